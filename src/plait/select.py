"""Rows at given source positions, wherever they live: last-token logits, reward heads."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

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
from plait.positions import slots_of_positions
from plait.tree import as_axis, as_int32, known_values, over_axis


def select(
    x: Any,
    source_positions: Any,
    layout: Layout,
    *,
    axis: int = 1,
    axis_name: AxisName | None = None,
    mesh: AnyMesh | None = None,
    local: bool = False,
) -> Any:
    """The rows of x at some source positions, on every rank.

    Args:
      x: an array in the order of `layout`; NumPy gives NumPy.
      source_positions: integers [rows], or [batch, rows] where the batch is the first axis of x.
      layout: the layout that x is in.
      axis: the sequence axis of x.
      axis_name, mesh, local: as in `relayout`.

    Returns:
      x with the sequence axis replaced by the rows. Sharded, it communicates one sum of the rows
      over the ranks, whatever the length of the sequence.

    Raises:
      ValueError: positions outside the sequence, where they are known when the call is traced
        (traced ones give rows of 0), or whose shape does not fit; and what `relayout` raises.

    >>> import numpy as np
    >>> from plait import Zigzag
    >>> select(np.array([0, 1, 6, 7, 2, 3, 4, 5]), np.array([7, 2]), Zigzag(2), axis=0)
    array([7, 2])
    """
    names = as_names(axis_name)
    inside = not local and is_inside(names, "select")
    on_host = isinstance(x, np.ndarray) and not inside
    if not on_host:
        x = jnp.asarray(x)
    axis = as_axis(axis, x.ndim, "x")
    axes = bound_axes(names) if inside else None
    length = x.shape[axis] * (1 if axes is None else axes.size)
    layout.check_length(length, f"axis {axis} of x")
    source_positions = _checked_positions(source_positions, x, axis, length)
    if on_host:
        slots = layout.slots(length)[np.asarray(source_positions)]
        return _take(x, slots, axis, np)
    if axes is not None:
        check_ranks(layout, axes.size, names)
        check_shard(x, names, "x")
        differs = [n for n in names if n in jax.typeof(jnp.asarray(source_positions)).mat.varying]
        if differs and axes.size > 1:
            raise ValueError(
                f"source_positions may differ between the ranks of {differs}; every rank needs "
                "the same ones: pass them with in_specs P()"
            )
        return _select(x, source_positions, layout, axis, axes)
    if not names or local:
        check_whole(x, axis, "x")
        return _select(x, source_positions, layout, axis, None)
    mesh = find_mesh([x], names, mesh)
    axes = Axes.on(mesh, names)
    check_ranks(layout, axes.size, names)
    spec = sharded_spec(x, axis, names, mesh)
    rows_spec = PartitionSpec(*(spec[0] if axis else None, None)[2 - source_positions.ndim :])
    source_positions = lay_out(source_positions, mesh, rows_spec)
    return _over_mesh(layout, axis, axes, mesh, spec, rows_spec)(x, source_positions)


@functools.lru_cache(maxsize=256)
def _over_mesh(
    layout: Layout,
    axis: int,
    axes: Axes,
    mesh: AnyMesh,
    spec: PartitionSpec,
    rows_spec: PartitionSpec,
) -> Any:
    out_spec = PartitionSpec(*spec[:axis], None, *spec[axis + 1 :])
    over_mesh = jax.shard_map(
        lambda x, rows: _select(x, rows, layout, axis, axes),
        mesh=mesh,
        in_specs=(spec, rows_spec),
        out_specs=out_spec,
        axis_names=manual_for(spec, axes.names),
    )
    return jax.jit(over_mesh)


def _checked_positions(positions: Any, x: Any, axis: int, length: int) -> Any:
    positions = as_int32(positions, "source_positions")
    batched = positions.ndim == 2 and axis > 0 and positions.shape[0] == x.shape[0]
    if positions.ndim != 1 and not batched:
        raise ValueError(
            f"source_positions has shape {positions.shape}; for x of shape {x.shape} and axis "
            f"{axis} it needs to be [rows]" + (f" or ({x.shape[0]}, rows)" if axis else "")
        )
    values = known_values(positions)
    if values is None:
        return positions.astype(jnp.int32)
    outside = (values < 0) | (values >= length)
    if outside.any():
        wrong = int(values[outside][0])
        raise ValueError(
            f"source position {wrong} is outside the sequence of {length} tokens; the nearest is "
            f"{min(max(wrong, 0), length - 1)}"
        )
    return positions.astype(np.int32)


def _select(
    x: jax.Array, positions: Any, layout: Layout, axis: int, axes: Axes | None
) -> jax.Array:
    positions = jnp.asarray(positions)
    shard = x.shape[axis]
    length = shard * (1 if axes is None else axes.size)
    exists = (positions >= 0) & (positions < length)
    slots = slots_of_positions(layout, length, jnp.where(exists, positions, 0))
    held = exists
    if axes is not None:
        held = exists & (slots // shard == axes.rank())
        slots = jnp.where(held, slots % shard, 0)
    rows = _take(x, slots, axis, jnp)
    rows = jnp.where(over_axis(held, x.ndim, axis), rows, jnp.zeros((), x.dtype))
    if axes is None:
        return rows
    if rows.dtype == jnp.bool_:
        return lax.psum(rows.astype(jnp.int8), axes.names).astype(jnp.bool_)
    return lax.psum(rows, axes.names)


def _take(x: Any, slots: Any, axis: int, xp: Any) -> Any:
    if slots.ndim == 1:
        return xp.take(x, slots, axis=axis)
    return xp.take_along_axis(x, over_axis(slots, x.ndim, axis), axis=axis)
