"""Where a call of `plait.sparse` runs: here, on one device, or over a mesh."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
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
    check_apart,
    check_manual,
    check_ranks,
    check_shard,
    find_mesh,
    is_inside,
    is_vmapped,
    lay_out,
    manual_axes,
    typed_spec,
)
from plait.positions import positions_of_rank, positions_of_slots
from plait.tree import as_int32, known_values


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
    check_layout(call.layout)
    names, batch, heads = as_names(axis_name), as_names(batch_axes), as_names(head_axes)
    check_apart(axis_name=names, batch_axes=batch, head_axes=heads)
    inside = not local and is_inside(names, what)
    given: list[Any] = [None if x is None else jnp.asarray(x) for x in arrays.values()]
    first = given[0]
    axes = None
    if inside:
        axes = bound_axes(names)
        check_ranks(call.layout, axes.size, names)
        for name, x in zip(arrays, given, strict=True):
            if x is not None:
                check_shard(x, names, name)
                check_manual(x, name, what)
    length = first.shape[1] * (1 if axes is None else axes.size)
    call.layout.check_length(length, f"axis 1 of {next(iter(arrays))}")
    if inside or (local and manual_axes()):
        return call.run(axes, *given)
    if local:
        names = ()
    typed = typed_spec(first)
    if not (names or batch or heads or any(typed)):
        return _on_one_device(call)(*given)
    mesh = find_mesh([first], (*names, *batch, *heads), mesh)
    if names:
        axes = Axes.on(mesh, names)
        check_ranks(call.layout, axes.size, names)
    spec = PartitionSpec(as_entry(batch or typed[0]), as_entry(names))
    for dimension, over, of in ((0, as_names(spec[0]), "batch"), (2, heads, "heads of q")):
        size, count = Axes.on(mesh, over).size, first.shape[dimension]
        if count % size:
            raise ValueError(
                f"{of}: {count} do not divide over the {size} devices of mesh axis "
                f"{as_entry(over)!r}; the nearest number that does is "
                f"{max(1, round(count / size)) * size}"
            )
    specs = (PartitionSpec(*spec, as_entry(heads)) if heads else spec, *[spec] * (len(given) - 1))
    given = [None if x is None else lay_out(x, mesh, s) for x, s in zip(given, specs, strict=True)]
    named = {name for entry in specs[0] for name in as_names(entry)}
    vmapped = is_vmapped(mesh, named, given, what)
    return _over_mesh(call, axes, mesh, specs, vmapped)(*given)


def check_layout(layout: Any) -> None:
    """TypeError for what is no layout."""
    if not isinstance(layout, Layout):
        raise TypeError(f"layout is {layout!r}; it needs to be a layout, such as Zigzag(8)")


def check_arrays(**arrays: tuple[Any, str]) -> None:
    """TypeError or ValueError, by name, for what is no array of the dimensions that are said.

    All begin with the same batch and sequence. None passes.
    """
    given = {name: pair for name, pair in arrays.items() if pair[0] is not None}
    first = next(iter(given))
    for name, (x, last) in given.items():
        wanted = f"[batch, sequence{last}]"
        if not isinstance(x, jax.Array | np.ndarray):
            raise TypeError(f"{name} is a {type(x).__name__}; it needs to be an array {wanted}")
        if x.ndim != 2 + last.count(",") or 0 in x.shape[1:]:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}; it needs to be {wanted}, every dimension at "
                "least 1"
            )
        like = tuple(given[first][0].shape[:2])
        if tuple(x.shape[:2]) != like:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)} and {first} {tuple(given[first][0].shape)}; "
                "both need to begin with the same [batch, sequence]"
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


def as_positions(source_positions: Any, like: jax.Array) -> Any:
    """Positions that are data, as int32 [batch, sequence]; None where the layout says them.

    ValueError for values, where they are known, that are not each position once.
    """
    if source_positions is None:
        return None
    positions = as_int32(source_positions, "source_positions")
    batch, tokens = like.shape[:2]
    if positions.shape not in ((batch, tokens), (tokens,)):
        raise ValueError(
            f"source_positions has shape {tuple(positions.shape)}; it needs to be ({tokens},) or "
            f"{(batch, tokens)}"
        )
    values = known_values(positions)
    if values is not None:
        rows = np.atleast_2d(values)
        wrong = (np.sort(rows, axis=1) != np.arange(tokens)).any(axis=1)
        if wrong.any():
            raise ValueError(
                f"row {int(np.argmax(wrong))} of source_positions is not each of the positions 0 "
                f"to {tokens - 1} once; positions within documents, as RoPE takes them, are not "
                "what is needed"
            )
    return jnp.broadcast_to(jnp.asarray(positions).astype(jnp.int32), (batch, tokens))


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
