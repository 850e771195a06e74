"""The token some places on: next-token labels and multi-token targets, over any layout."""

from __future__ import annotations

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from plait.exchange import exchange
from plait.layout import Layout
from plait.mesh import (
    AnyMesh,
    Axes,
    AxisName,
    as_names,
    bound_axes,
    check_ranks,
    check_shard,
    check_whole,
    find_mesh,
    is_inside,
    lay_out,
    manual_for,
    sharded_spec,
)
from plait.permute import Relayout, permute
from plait.positions import positions_of_rank, positions_of_slots
from plait.tree import as_axis, as_fill, as_int32, over_axis

IGNORED_LABEL = -100


def lookahead(
    x: Any,
    layout: Layout,
    by: int = 1,
    *,
    axis: int = 1,
    segment_ids: Any = None,
    fill: Any = None,
    axis_name: AxisName | None = None,
    mesh: AnyMesh | None = None,
    local: bool = False,
) -> Any:
    """For every source position p, in the place of p, the value of x at position p + by.

    Next-token labels are `lookahead(tokens, layout)`, the targets of the k-th head of multi-token
    prediction `lookahead(tokens, layout, k)`. A negative `by` looks back.

    Args:
      x: an array in the order of `layout`; NumPy gives NumPy.
      layout: the layout that x and segment_ids are in.
      by: how many positions to look ahead: any integer, also more than a chunk or the sequence.
      axis: the sequence axis of x.
      segment_ids: integers in the order of `layout`, [sequence] or [batch, sequence], where the
        batch is the first axis of x; 0 is padding. Given, p + by must lie in p's document.
      fill: the value where there is nothing to look at: past either end of the sequence or of
        the document, and in padding. Default -100, the ignored label, for signed integers; other
        dtypes need it said.
      axis_name, mesh, local: as in `relayout`.

    Sharded, it communicates only the `by` boundary tokens of each chunk where `by` is at most a
    chunk (two permutes for zigzag and half swap, one for stripes), and all of x, in up to twice as
    many permutes, where it is more. Under one-token stripes every token is a boundary.

    Raises:
      ValueError: a fill that x's dtype cannot hold or that is missing, segment ids whose shape
        does not fit, and what `relayout` raises.

    >>> import numpy as np
    >>> from plait import Zigzag
    >>> lookahead(np.array([0, 1, 6, 7, 2, 3, 4, 5]), Zigzag(2), axis=0)
    array([   1,    2,    7, -100,    3,    4,    5,    6])
    """
    names, by = as_names(axis_name), _as_integer(by)
    inside = not local and is_inside(names, "lookahead")
    on_host = isinstance(x, np.ndarray) and not inside
    if not on_host:
        x = jnp.asarray(x)
    axis = as_axis(axis, x.ndim, "x")
    if segment_ids is not None:
        segment_ids = as_int32(segment_ids, "segment_ids")
        segment_ids = segment_ids if on_host else jnp.asarray(segment_ids)
    _check_segment_ids(segment_ids, x, axis)
    fill = _checked_fill(fill, x.dtype)
    if inside:
        axes = bound_axes(names)
        check_ranks(layout, axes.size, names)
        check_shard(x, names, "x")
        if segment_ids is not None:
            check_shard(segment_ids, names, "segment_ids")
        return _look(x, segment_ids, layout, by, axis, fill, axes)
    layout.check_length(x.shape[axis], f"axis {axis} of x")
    if on_host:
        return _look_on_host(x, segment_ids, layout, by, axis, fill)
    if not names or local:
        check_whole(x, axis, "x")
        return _look(x, segment_ids, layout, by, axis, fill, None)
    mesh = find_mesh([x], names, mesh)
    axes = Axes.on(mesh, names)
    check_ranks(layout, axes.size, names)
    spec = sharded_spec(x, axis, names, mesh)
    ids_spec: PartitionSpec | None = None
    if segment_ids is not None:
        ids_spec = PartitionSpec(*(spec[0], spec[axis])[2 - segment_ids.ndim :])
        segment_ids = lay_out(segment_ids, mesh, ids_spec)
    key = (fill.tobytes(), x.dtype)
    return _over_mesh(layout, by, axis, key, axes, mesh, spec, ids_spec)(x, segment_ids)


def _as_integer(by: Any) -> int:
    try:
        return operator.index(by)
    except TypeError:
        raise TypeError(
            f"by is {by!r}; it needs to be an integer that is known when the program is traced, "
            "such as 1"
        ) from None


@functools.lru_cache(maxsize=256)
def _over_mesh(
    layout: Layout,
    by: int,
    axis: int,
    fill_key: tuple[bytes, Any],
    axes: Axes,
    mesh: AnyMesh,
    spec: PartitionSpec,
    ids_spec: PartitionSpec | None,
) -> Any:
    fill = np.frombuffer(fill_key[0], fill_key[1])[0]
    over_mesh = jax.shard_map(
        lambda x, ids: _look(x, ids, layout, by, axis, fill, axes),
        mesh=mesh,
        in_specs=(spec, ids_spec),
        out_specs=spec,
        axis_names=manual_for(spec, axes.names),
    )
    return jax.jit(over_mesh)


def _check_segment_ids(segment_ids: Any, x: Any, axis: int) -> None:
    if segment_ids is None:
        return
    fitting = [(x.shape[axis],), (x.shape[0], x.shape[axis])]
    if segment_ids.shape not in (fitting if axis else fitting[:1]):
        raise ValueError(
            f"segment_ids has shape {segment_ids.shape}; for x of shape {x.shape} and axis {axis} "
            f"it needs to be {fitting[-1] if axis else fitting[0]}"
        )


def _checked_fill(fill: Any, dtype: Any) -> np.ndarray:
    if fill is None:
        if jnp.issubdtype(dtype, jnp.unsignedinteger):
            raise ValueError(
                f"x has dtype {dtype}, which cannot hold the ignored label {IGNORED_LABEL}: cast "
                "it to int32 first, or pass the fill= that you mask by"
            )
        if not jnp.issubdtype(dtype, jnp.signedinteger):
            raise ValueError(
                f"x has dtype {dtype}, which has no usual fill: pass fill=, such as fill=0"
            )
        fill = IGNORED_LABEL
    return as_fill(fill, dtype, "x")


def _look_on_host(
    x: np.ndarray, segment_ids: Any, layout: Layout, by: int, axis: int, fill: np.ndarray
) -> np.ndarray:
    length = x.shape[axis]
    ahead = layout.positions(length).astype(np.int64) + by
    exists = (ahead >= 0) & (ahead < length)
    slots = layout.slots(length)[np.where(exists, ahead, 0)]
    found = exists
    if segment_ids is not None:
        ids = np.asarray(segment_ids)
        found = exists & (ids[..., slots] == ids) & (ids != 0)
    return np.where(over_axis(found, x.ndim, axis), np.take(x, slots, axis), fill)


def _look(
    x: jax.Array,
    segment_ids: jax.Array | None,
    layout: Layout,
    by: int,
    axis: int,
    fill: Any,
    axes: Axes | None,
) -> jax.Array:
    """On a shard where there are axes, on the whole sequence where there are none."""
    length = x.shape[axis] * (1 if axes is None else axes.size)
    layout.check_length(length, f"axis {axis} of x")
    if abs(by) >= length:
        return jnp.full_like(x, fill)
    ahead = by + (
        positions_of_slots(layout, length)
        if axes is None
        else positions_of_rank(layout, length, axes.rank())
    )
    found = (ahead >= 0) & (ahead < length)
    if segment_ids is not None:
        pulled = _pull(segment_ids, layout, length, by, segment_ids.ndim - 1, axes)
        found = found & (pulled == segment_ids) & (segment_ids != 0)
    value = _pull(x, layout, length, by, axis, axes)
    return jnp.where(over_axis(found, x.ndim, axis), value, jnp.asarray(fill, x.dtype))


def _pull(
    x: jax.Array, layout: Layout, length: int, by: int, axis: int, axes: Axes | None
) -> jax.Array:
    """x at p + by, modulo the sequence, in the place of p.

    Of every chunk, the tokens from `within` on come from `chunks_on` chunks ahead, and the rest
    from one chunk further: two moves to the layout's own table of chunks, rolled.
    """
    chunk = layout.chunk_length(length)
    chunks_on, within = divmod(by, chunk)
    before, after, chunks = x.shape[:axis], x.shape[axis + 1 :], x.shape[axis] // chunk
    chunked = x.reshape(*before, chunks, chunk, *after)
    pieces = []
    for start, stop, roll in ((within, chunk, chunks_on), (0, within, chunks_on + 1)):
        if start == stop:
            continue
        piece = lax.slice_in_dim(chunked, start, stop, axis=axis + 1)
        flat = piece.reshape(*before, chunks * (stop - start), *after)
        move = Relayout(layout, layout, length, roll)
        moved = permute(flat, move, axis) if axes is None else exchange(flat, move, axis, axes)
        pieces.append(moved.reshape(piece.shape))
    return lax.concatenate(pieces, axis + 1).reshape(x.shape)
