"""Padding to a length that a layout accepts."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from plait.layout import Layout, at_least_one
from plait.mesh import manual_axes
from plait.tree import Axis, as_fill, broadcast_prefix, map_axis


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
    fills = iter(broadcast_prefix(fill, tree, "fill"))
    axes = broadcast_prefix(axis, tree, "axis")
    fill_of_next = iter(
        [value for value, axis in zip(fills, axes, strict=True) if axis is not None]
    )

    def pad_leaf(x: Any, axis: int, name: str) -> Any:
        count = layout.padded_length(x.shape[axis]) - x.shape[axis]
        value = as_fill(next(fill_of_next), x.dtype, name)
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
    length = at_least_one("sequence_length", sequence_length)

    def unpad_leaf(x: Any, axis: int, name: str) -> Any:
        if length > x.shape[axis]:
            raise ValueError(
                f"sequence_length is {length}; axis {axis} of {name} has length "
                f"{x.shape[axis]}, so it needs to be 1 to {x.shape[axis]}"
            )
        return x[(slice(None),) * axis + (slice(length),)]

    return map_axis(unpad_leaf, tree, axis)


def _check_whole_sequence(what: str) -> None:
    manual = manual_axes()
    if manual:
        raise ValueError(
            f"{what} was called in a region that is manual over {sorted(manual)}: a shard ends "
            f"before the sequence does; {what} the global arrays, outside jax.shard_map"
        )
