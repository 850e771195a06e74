"""Where a call of `plait.sparse` runs: here, on one device, or over a mesh."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from plait.exchange import gather_shards
from plait.layout import Layout
from plait.mesh import (
    AnyMesh,
    Axes,
    AxisName,
    as_entry,
    as_names,
    as_varying,
    bound_axes,
    check_ranks,
    check_shard,
    find_mesh,
    is_inside,
    is_vmapped,
    lay_out,
    typed_spec,
)
from plait.positions import positions_of_rank, positions_of_slots
from plait.tree import as_int32


class Call(Hashable, Protocol):
    """What of a call is known when it is traced; hashable."""

    @property
    def layout(self) -> Layout: ...

    @property
    def run(self) -> Callable[..., tuple[jax.Array, ...]]:
        """run(axes, *arrays): on this rank's shards, or without axes on whole sequences."""
        ...


def place(
    call: Call,
    arrays: dict[str, jax.Array | None],
    *,
    axis_name: AxisName | None,
    batch_axes: AxisName | None,
    mesh: AnyMesh | None,
    local: bool,
    what: str,
    head_axes: AxisName | None = None,
) -> tuple[jax.Array, ...]:
    """call.run over arrays and to arrays that are all [batch, sequence, ...].

    Outside `jax.shard_map` every mesh axis is made manual, as in `plait.attention`. `head_axes`
    shard axis 2 of the first array and of the results.
    """
    if not isinstance(call.layout, Layout):
        raise TypeError(f"layout is {call.layout!r}; it needs to be a layout, such as Zigzag(8)")
    names, batch, heads = as_names(axis_name), as_names(batch_axes), as_names(head_axes)
    inside = not local and is_inside(names, what)
    _check_lengths(arrays)
    given: list[Any] = [None if x is None else jnp.asarray(x) for x in arrays.values()]
    first = given[0]
    axes = None
    if inside:
        axes = bound_axes(names)
        check_ranks(call.layout, axes.size, names)
        for name, x in zip(arrays, given, strict=True):
            if x is not None:
                check_shard(x, names, name)
    length = first.shape[1] * (1 if axes is None else axes.size)
    call.layout.check_length(length, f"axis 1 of {next(iter(arrays))}")
    if inside or local:
        return call.run(axes, *given)
    typed = typed_spec(first)
    if not (names or batch or heads or any(typed)):
        return _on_one_device(call)(*given)
    mesh = find_mesh([first], (*names, *batch, *heads), mesh)
    if names:
        axes = Axes.on(mesh, names)
        check_ranks(call.layout, axes.size, names)
    spec = PartitionSpec(as_entry(batch or typed[0]), as_entry(names))
    for dimension, over, of in ((0, as_names(spec[0]), "batch"), (2, heads, "heads")):
        size = Axes.on(mesh, over).size
        if first.shape[dimension] % size:
            raise ValueError(
                f"{what}: the {of} are {first.shape[dimension]}; they need to be a multiple of the "
                f"{size} devices of mesh axis {as_entry(over)!r}"
            )
    specs = (PartitionSpec(*spec, as_entry(heads)) if heads else spec, *[spec] * (len(given) - 1))
    given = [None if x is None else lay_out(x, mesh, s) for x, s in zip(given, specs, strict=True)]
    named = {name for entry in specs[0] for name in as_names(entry)}
    vmapped = is_vmapped(mesh, named, given, what)
    return _over_mesh(call, axes, mesh, specs, vmapped)(*given)


def _check_lengths(arrays: dict[str, Any]) -> None:
    (first, like), *others = arrays.items()
    for name, x in others:
        if x is not None and tuple(x.shape[:2]) != tuple(like.shape[:2]):
            raise ValueError(
                f"{name} has shape {tuple(x.shape)} and {first} {tuple(like.shape)}; both need to "
                "begin with the same [batch, sequence]"
            )


@functools.lru_cache(maxsize=256)
def _on_one_device(call: Call) -> Any:
    return jax.jit(functools.partial(call.run, None))


@functools.lru_cache(maxsize=256)
def _over_mesh(
    call: Call, axes: Axes | None, mesh: AnyMesh, specs: tuple[PartitionSpec, ...], vmapped: bool
) -> Any:
    named = [name for entry in specs[0] for name in as_names(entry)]

    def body(*arrays: Any) -> Any:
        return jax.tree.map(lambda x: as_varying(x, named), call.run(axes, *arrays))

    mapped = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=specs,
        out_specs=specs[0],
        axis_names=frozenset(mesh.axis_names),
        check_vma=not vmapped,
    )
    return jax.jit(mapped)


def as_positions(source_positions: Any, batch: int) -> Any:
    """Positions that are data, as int32 [batch, sequence]; None where the layout says them."""
    if source_positions is None:
        return None
    positions = jnp.asarray(as_int32(source_positions, "source_positions")).astype(jnp.int32)
    if positions.ndim not in (1, 2):
        raise ValueError(
            f"source_positions has shape {positions.shape}; it needs to be [sequence] or "
            f"({batch}, sequence)"
        )
    return jnp.broadcast_to(positions, (batch, positions.shape[-1]))


def own_positions(layout: Layout, length: int, axes: Axes | None, batch: int) -> jax.Array:
    """The source positions of this rank's tokens: int32 [batch, tokens]."""
    if axes is None:
        found = positions_of_slots(layout, length)
    else:
        found = positions_of_rank(layout, length, axes.rank())
    return jnp.broadcast_to(found, (batch, found.size))


def slots_by_position(positions: jax.Array, axes: Axes | None) -> jax.Array:
    """Of positions that are data, of all ranks together: the slot of each, int32 [batch, length].

    A slot is where a token lies when the shards are joined in the order of the ranks. Positions
    outside the sequence have none; a position that no token has, gets slot -1.
    """
    if axes is not None:
        positions = gather_shards(positions, 1, axes.names)
    length = positions.shape[1]
    iota = jnp.arange(length, dtype=jnp.int32)

    def of_row(row: jax.Array) -> jax.Array:
        empty = as_varying(jnp.full(length, -1, jnp.int32), jax.typeof(row).mat.varying)
        inside = jnp.where((row >= 0) & (row < length), row, length)
        return empty.at[inside].set(iota, mode="drop")

    return jax.vmap(of_row)(positions)
