"""Pytrees of arrays with one sequence axis a leaf."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Axis = Any
"""An int, or a pytree prefix of ints, as vmap's in_axes; None passes a leaf through."""

Array = jax.Array | np.ndarray


def map_axis(fn: Callable[[Array, int, str], Any], tree: Any, axis: Axis) -> Any:
    """fn(leaf, its axis counted from the front, its name for errors) over the leaves of a tree.

    Leaves whose axis is None pass through unchanged. TypeError for a leaf that is no array;
    ValueError for one without that axis, and where `axis` is not a prefix of the tree.
    """

    def over_subtree(path: tuple, axis: Any, subtree: Any) -> Any:
        if axis is None:
            return subtree
        return jax.tree.map_with_path(
            lambda rest, leaf: fn(*_checked(leaf, axis, path_name((*path, *rest)))), subtree
        )

    return map_prefix(over_subtree, axis, tree, "axis")


def map_prefix(fn: Callable[[tuple, Any, Any], Any], prefix: Any, tree: Any, what: str) -> Any:
    """fn(path, leaf of the prefix, subtree below it); None counts as a leaf of the prefix."""
    try:
        structure: Any = jax.tree.structure(prefix, is_leaf=_is_none)
        subtrees = structure.flatten_up_to(tree)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{what} {prefix!r} is not a prefix of the tree, whose structure is "
            f"{jax.tree.structure(tree)}: {error}"
        ) from None
    paths, _ = jax.tree.flatten_with_path(prefix, is_leaf=_is_none)
    mapped = [fn(path, leaf, sub) for (path, leaf), sub in zip(paths, subtrees, strict=True)]
    return jax.tree.unflatten(structure, mapped)


def path_name(path: tuple) -> str:
    """How errors call the leaf at a path: "'tokens'", or "the array" where there is no path."""
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    return repr(name) if name else "the array"


def as_axis(axis: Any, ndim: int, name: str) -> int:
    """The axis counted from the front; errors name the leaf."""
    try:
        number = operator.index(axis)
    except TypeError:
        raise TypeError(
            f"axis of {name} is {axis!r}; it needs to be an integer, or None to pass through"
        ) from None
    if not -ndim <= number < ndim:
        raise ValueError(
            f"axis {number} of {name} does not exist: it has {ndim} dimensions"
            + (
                f"; the nearest axis is {min(max(number, -ndim), ndim - 1)}"
                if ndim
                else "; give it the axis None to pass it through"
            )
        )
    return number % ndim


def over_axis(x: Any, ndim: int, axis: int) -> Any:
    """x, [sequence] or [batch, sequence], as a shape that broadcasts over `axis` and the first."""
    shape = [1] * ndim
    shape[axis] = x.shape[-1]
    if x.ndim == 2:
        shape[0] = x.shape[0]
    return x.reshape(shape)


def _checked(leaf: Any, axis: Any, name: str) -> tuple[Array, int, str]:
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
        raise TypeError(
            f"{name} is a {type(leaf).__name__}; an array is needed, or the axis None to pass it "
            "through"
        )
    return leaf, as_axis(axis, jnp.ndim(leaf), name), name  # type: ignore[return-value]


def _is_none(x: Any) -> bool:
    return x is None
