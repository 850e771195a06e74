"""Padding to a length that a layout accepts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from plait.layout import Layout
from plait.mesh import manual_axes
from plait.tree import Axis, map_axis, map_prefix, path_name


def pad(tree: Any, layout: Layout, fill: Any, *, axis: Axis = 1) -> Any:
    """Every leaf, in source order, padded at its end to a length that `layout` accepts.

    Args:
      tree: arrays in source order; NumPy gives NumPy.
      layout: the layout they are to be carried to.
      fill: the value to pad with, or a pytree prefix of values: such as 0 for tokens and segment
        ids, -100 for labels.
      axis: the sequence axis, as in `relayout`.

    Raises ValueError inside `jax.shard_map`, where the end of a shard is not that of the sequence.

    >>> import numpy as np
    >>> from plait import Zigzag
    >>> pad({"ids": np.ones(7, int), "labels": np.ones(7, int)}, Zigzag(2),
    ...     {"ids": 0, "labels": -100}, axis=0)["labels"]
    array([   1,    1,    1,    1,    1,    1,    1, -100])
    """
    _check_whole_sequence("pad")
    fills = map_prefix(
        lambda _, value, subtree: jax.tree.map(lambda _: _Fill(value), subtree), fill, tree, "fill"
    )
    flat_fills = iter(jax.tree.leaves(fills, is_leaf=lambda leaf: isinstance(leaf, _Fill)))
    by_name = {
        path_name(path): next(flat_fills) for path, _ in jax.tree_util.tree_leaves_with_path(tree)
    }

    def pad_leaf(x: Any, axis: int, name: str) -> Any:
        length = layout.padded_length(x.shape[axis])
        count = length - x.shape[axis]
        value = by_name[name].value
        _check_holds(value, x.dtype, name)
        xp: Any = np if isinstance(x, np.ndarray) else jnp
        shape = (*x.shape[:axis], count, *x.shape[axis + 1 :])
        return xp.concatenate([x, xp.full(shape, value, x.dtype)], axis=axis) if count else x

    return map_axis(pad_leaf, tree, axis)


def unpad(tree: Any, sequence_length: int, *, axis: Axis = 1) -> Any:
    """Every leaf, in source order, cut to its first `sequence_length` tokens: undoes `pad`.

    >>> import numpy as np
    >>> unpad(np.arange(8), 7, axis=0)
    array([0, 1, 2, 3, 4, 5, 6])
    """
    _check_whole_sequence("unpad")

    def unpad_leaf(x: Any, axis: int, name: str) -> Any:
        if not 0 < sequence_length <= x.shape[axis]:
            raise ValueError(
                f"sequence_length is {sequence_length}; axis {axis} of {name} has length "
                f"{x.shape[axis]}, so it needs to be 1 to {x.shape[axis]}"
            )
        return x[(slice(None),) * axis + (slice(sequence_length),)]

    return map_axis(unpad_leaf, tree, axis)


class _Fill:
    """Keeps a fill value whole in a tree, whatever it is."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _check_whole_sequence(what: str) -> None:
    manual = manual_axes()
    if manual:
        raise ValueError(
            f"{what} was called in a region that is manual over {sorted(manual)}: a shard ends "
            f"before the sequence does; {what} the global arrays, outside jax.shard_map"
        )


def _check_holds(value: Any, dtype: Any, name: str) -> None:
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        if value != int(value) or not info.min <= value <= info.max:
            raise ValueError(
                f"the fill of {name} is {value}; {dtype} holds integers from {info.min} to "
                f"{info.max}, such as {min(max(int(value), info.min), info.max)}"
            )
