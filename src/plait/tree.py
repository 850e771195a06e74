"""Pytrees of arrays with one sequence axis a leaf."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Axis = Any
"""An int, or a pytree prefix of ints, as vmap's in_axes; None passes a leaf through."""

Array = jax.Array | np.ndarray


def map_axis(
    fn: Callable[[Array, int, str], Any], tree: Any, axis: Axis, *, may_pass: bool = True
) -> Any:
    """fn(leaf, its axis counted from the front, its name for errors) over the leaves of a tree.

    Leaves whose axis is None pass through unchanged; `may_pass` says whether whoever called can
    ask for that. TypeError for a leaf that is no array; ValueError for one without that axis, and
    where `axis` is not a prefix of the tree.
    """

    paths, structure = jax.tree.flatten_with_path(tree)
    axes = broadcast_prefix(axis, tree, "axis")
    mapped = [
        leaf if axis is None else fn(*_checked(leaf, axis, path_name(path), may_pass))
        for (path, leaf), axis in zip(paths, axes, strict=True)
    ]
    return jax.tree.unflatten(structure, mapped)


def broadcast_prefix(
    prefix: Any, tree: Any, what: str, is_leaf: Callable[[Any], bool] | None = None
) -> list[Any]:
    """For each leaf of the tree, the leaf of the prefix above it; None is a leaf of the prefix.

    `is_leaf` says what else of the tree is a leaf.
    """
    structure: Any = jax.tree.structure(prefix, is_leaf=_is_none)
    try:
        subtrees = structure.flatten_up_to(tree)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{what} {prefix!r} is not a prefix of the tree, whose structure is "
            f"{jax.tree.structure(tree)}: {error}"
        ) from None
    values = jax.tree.leaves(prefix, is_leaf=_is_none)
    return [
        value
        for value, subtree in zip(values, subtrees, strict=True)
        for _ in jax.tree.leaves(subtree, is_leaf=is_leaf)
    ]


def path_name(path: tuple) -> str:
    """How errors call the leaf at a path: "'tokens'", or "the array" where there is no path."""
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    return repr(name) if name else "the array"


def as_axis(axis: Any, ndim: int, name: str, *, may_pass: bool = False) -> int:
    """The axis counted from the front; errors name the leaf, and None where that is an axis too."""
    try:
        number = operator.index(axis)
    except TypeError:
        raise TypeError(
            f"axis of {name} is {axis!r}; it needs to be an integer"
            + (", or None to pass through" if may_pass else ", such as 1")
        ) from None
    if not -ndim <= number < ndim:
        raise ValueError(
            f"axis {number} of {name} does not exist: it has {ndim} dimensions"
            + (
                f"; the nearest axis is {min(max(number, -ndim), ndim - 1)}"
                if ndim
                else "; give it the axis None to pass it through"
                if may_pass
                else "; an array with a sequence axis is needed"
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


def as_int32(x: Any, name: str) -> Any:
    """Integers as int32: NumPy's and lists' with their values checked, jax's as they are."""
    if isinstance(x, jax.Array):
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise TypeError(f"{name} has dtype {x.dtype}; it needs integers")
        return x
    x = np.asarray(x)
    if x.size == 0:
        return x.astype(np.int32)
    if not np.issubdtype(x.dtype, np.integer):
        raise TypeError(f"{name} has dtype {x.dtype}; it needs integers")
    info = np.iinfo(np.int32)
    if int(x.min()) < info.min or int(x.max()) > info.max:
        raise ValueError(
            f"{name} holds values from {x.min()} to {x.max()}; it needs int32: number them anew, "
            "such as by np.unique(ids, return_inverse=True)[1] + 1"
        )
    return x.astype(np.int32)


def known_values(x: Any) -> np.ndarray | None:
    """The values as NumPy's, or None where they are traced or lie on other hosts' devices too."""
    if isinstance(x, jax.core.Tracer) or not getattr(x, "is_fully_addressable", True):
        return None
    return np.asarray(x)


def as_float(name: str, value: Any, instead: str | None = None) -> float:
    """A finite float, known when the program is traced; `instead` says what else to do with it."""
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"{name} is {value}, a traced array; it needs to be a float"
            + (f": {instead}" if instead else "")
        )
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} is {value!r:.60}; it needs to be a float, such as 1.0") from None
    if not math.isfinite(number):
        raise ValueError(f"{name} is {number}; it needs to be a finite float, such as 1.0")
    return number


def as_fill(fill: Any, dtype: Any, name: str) -> np.ndarray:
    """The fill as a scalar of the dtype; errors where the dtype cannot hold it."""
    try:
        number = float(fill)
    except (TypeError, ValueError):
        raise TypeError(f"the fill of {name} is {fill!r}; a number is needed, such as 0") from None
    if jnp.issubdtype(dtype, jnp.integer) or dtype == np.bool_:
        least, most = (0, 1) if dtype == np.bool_ else (jnp.iinfo(dtype).min, jnp.iinfo(dtype).max)
        if not number.is_integer() or not least <= int(fill) <= most:
            raise ValueError(
                f"the fill of {name} is {fill}; {dtype} holds integers from {int(least)} to "
                f"{int(most)}: another fill is needed, or a wider dtype such as int32"
            )
    elif np.isfinite(number):
        with np.errstate(over="ignore"):
            held = np.isfinite(np.asarray(fill).astype(dtype).astype(np.complex128))
        if not held:
            raise ValueError(
                f"the fill of {name} is {fill}, which {dtype} cannot hold; 0 would work"
            )
    return np.asarray(fill).astype(dtype)


def check_unmasked(x: Any, name: str) -> None:
    """TypeError for a masked array, whose mask a move would lose."""
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(
            f"{name} is a masked array, whose mask would be lost; a plain one is needed, such as "
            "its filled(0), and its mask as another array"
        )


def _checked(leaf: Any, axis: Any, name: str, may_pass: bool) -> tuple[Array, int, str]:
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
        raise TypeError(
            f"{name} is a {type(leaf).__name__}; an array is needed"
            + (
                ", or the axis None to pass it through"
                if may_pass
                else ", such as np.asarray gives of lists"
            )
        )
    check_unmasked(leaf, name)
    number = as_axis(axis, jnp.ndim(leaf), name, may_pass=may_pass)
    return leaf, number, name  # type: ignore[return-value]


def _is_none(x: Any) -> bool:
    return x is None
