"""Sharded moves: carry chunks between the ranks of mesh axes at the floor of bytes.

With k chunks a rank, a relayout is a k-regular bipartite multigraph from source ranks to target
ranks. It splits into k perfect matchings (König), and each matching is one `ppermute` of one
chunk: one stage, at most one shard of traffic. Between source order and stripes, where k is
large and every rank sends to every other, the move is one all-to-all.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from plait.layout import Contiguous, Layout, Striped
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
    check_whole,
    explicit_axes,
    find_mesh,
    is_inside,
    manual_for,
    of_rank,
    sharded_spec,
    typed_spec,
)
from plait.names import GATHERED_OTHER, RELAID, named
from plait.permute import Relayout, apply_bijection, permute, permute_on_host
from plait.tree import Axis, map_axis

MOST_CHUNKS_PER_RANK = 64


@dataclasses.dataclass(frozen=True)
class Matching:
    """One `ppermute` of one chunk a rank: for each rank, where it goes and which place it fills.

    `targets[r]` is the rank that rank r sends to; `sent[r]` the place, within r's shard, of the
    chunk that it sends; `filled[r]` the place that the chunk which r receives belongs in.
    """

    targets: tuple[int, ...]
    sent: tuple[int, ...]
    filled: tuple[int, ...]

    @property
    def stays(self) -> bool:
        """Whether every rank sends to itself, so that nothing is communicated."""
        return self.targets == tuple(range(len(self.targets)))


def matchings(sources: np.ndarray, ranks: int) -> tuple[Matching, ...]:
    """Split a table of chunks, as `Relayout.sources`, into perfect matchings between the ranks.

    Where the chunks in each place of a shard form a matching, before or after the move, those are
    taken: their slices are then the same on every rank. Otherwise scipy finds the matchings.
    """
    per_rank = sources.size // ranks
    target, filled = np.divmod(np.arange(sources.size), per_rank)
    source, sent = np.divmod(sources, per_rank)
    for place in (sent, filled):
        classes = [np.flatnonzero(place == p) for p in range(per_rank)]
        if all(_is_perfect(source[c], target[c], ranks) for c in classes):
            break
    else:
        classes = _split_by_matching(source, target, ranks, per_rank)
    found = []
    for edges in classes:
        by_source, by_target = edges[np.argsort(source[edges])], edges[np.argsort(target[edges])]
        found.append(
            Matching(
                targets=tuple(target[by_source].tolist()),
                sent=tuple(sent[by_source].tolist()),
                filled=tuple(filled[by_target].tolist()),
            )
        )
    return tuple(found)


def _is_perfect(source: np.ndarray, target: np.ndarray, ranks: int) -> bool:
    return len(set(source.tolist())) == len(set(target.tolist())) == source.size == ranks


def _split_by_matching(
    source: np.ndarray, target: np.ndarray, ranks: int, per_rank: int
) -> list[np.ndarray]:
    """Perfect matchings by scipy, as index arrays of edges; chunks that stay are preferred."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import min_weight_full_bipartite_matching

    left: dict[tuple[int, int], list[int]] = {}
    for edge, pair in enumerate(zip(source.tolist(), target.tolist(), strict=True)):
        left.setdefault(pair, []).append(edge)
    classes = []
    for _ in range(per_rank):
        pairs = np.array(sorted(left))
        weights = np.where(pairs[:, 0] == pairs[:, 1], 1.0, 2.0)
        graph = csr_array((weights, (pairs[:, 0], pairs[:, 1])), shape=(ranks, ranks))
        rows, columns = min_weight_full_bipartite_matching(graph)
        chosen = []
        for pair in zip(rows.tolist(), columns.tolist(), strict=True):
            chosen.append(left[pair].pop(0))
            if not left[pair]:
                del left[pair]
        classes.append(np.array(chosen))
    return classes


@dataclasses.dataclass(frozen=True)
class ChunkExchange:
    """A relayout of a shard by one `ppermute` for each matching that leaves a rank."""

    move: Relayout
    axes: Axes

    def inverse(self) -> ChunkExchange:
        return ChunkExchange(self.move.inverse(), self.axes)

    def check_chunks(self) -> None:
        """ValueError where a rank has more chunks than should each be a permute."""
        per_rank = self.move.chunks // self.axes.size
        if per_rank > MOST_CHUNKS_PER_RANK:
            raise ValueError(
                f"from {self.move.source!r} to {self.move.target!r} moves {per_rank} chunks of "
                f"{self.move.chunk_length} tokens a rank, each by its own ppermute; at most "
                f"{MOST_CHUNKS_PER_RANK} chunks a rank move on devices: permute on the host, "
                "where NumPy arrays of any layout move"
            )

    @functools.cached_property
    def matchings(self) -> tuple[Matching, ...]:
        """The permutes that the move is made of."""
        return matchings(self.move.sources, self.axes.size)

    def apply(self, x: jax.Array, axis: int) -> jax.Array:
        rank = self.axes.rank()
        received = []
        for matching in self.matchings:
            chunk = self._at_place(x, matching.sent, rank, axis)
            if not matching.stays:
                chunk = self.axes.ppermute(chunk, enumerate(matching.targets))
            received.append(chunk)
        return self._in_place(received, rank, axis)

    def _at_place(
        self, x: jax.Array, places: tuple[int, ...], rank: jax.Array, axis: int
    ) -> jax.Array:
        """The chunk in the one place of `axis` that this rank's entry of `places` names."""
        length = x.shape[axis] // len(self.matchings)
        starts = np.array(places, np.int32) * length
        if len(set(places)) == 1:
            return lax.slice_in_dim(x, int(starts[0]), int(starts[0]) + length, axis=axis)
        return lax.dynamic_slice_in_dim(x, of_rank(starts, rank), length, axis)

    def _in_place(self, received: list[jax.Array], rank: jax.Array, axis: int) -> jax.Array:
        """The received chunks joined, each where this rank's table says it belongs."""
        filled = np.array([matching.filled for matching in self.matchings])
        order = np.argsort(filled, axis=0)  # [place, rank] -> matching
        if (order == order[:, :1]).all():
            return lax.concatenate([received[m] for m in order[:, 0]], axis)
        return lax.platform_dependent(
            *received,
            tpu=functools.partial(self._update_in_place, rank=rank, axis=axis),
            default=functools.partial(self._select_in_place, rank=rank, axis=axis),
        )

    def _update_in_place(self, *received: jax.Array, rank: jax.Array, axis: int) -> jax.Array:
        """Each chunk written where it belongs: two shards of bytes less than `_select_in_place`.

        The result starts as what its memory happens to hold, which costs nothing on a TPU.
        """
        first = received[0]
        length = first.shape[axis]
        shape = [*first.shape[:axis], length * len(received), *first.shape[axis + 1 :]]
        joined = as_varying(lax.empty(tuple(shape), first.dtype), self.axes.names)
        for matching, chunk in zip(self.matchings, received, strict=True):
            starts = np.array(matching.filled, np.int32) * length
            start = of_rank(starts, rank)
            joined = lax.dynamic_update_slice_in_dim(joined, chunk, start, axis)
        return joined

    def _select_in_place(self, *received: jax.Array, rank: jax.Array, axis: int) -> jax.Array:
        filled = np.array([matching.filled for matching in self.matchings])
        order = np.argsort(filled, axis=0)
        if len(received) == 2:
            swapped = of_rank(order[0] == 1, rank)
            first, second = received
            return lax.concatenate(
                [lax.select(swapped, second, first), lax.select(swapped, first, second)], axis
            )
        joined = lax.concatenate(received, axis)
        return lax.concatenate(
            [self._at_place(joined, tuple(row.tolist()), rank, axis) for row in order], axis
        )


@dataclasses.dataclass(frozen=True)
class StripedRoll:
    """Stripes of a striped sequence, each replaced by the one `roll` stripes on: one `ppermute`.

    The place of stripe t receives stripe t + roll, modulo the number of stripes.
    """

    roll: int
    axes: Axes
    stripes_per_rank: int

    def inverse(self) -> StripedRoll:
        return StripedRoll(-self.roll, self.axes, self.stripes_per_rank)

    def apply(self, x: jax.Array, axis: int) -> jax.Array:
        shape, ranks = x.shape, self.axes.size
        rows, hop = divmod(self.roll, ranks)
        length = shape[axis] // self.stripes_per_rank
        stripes = x.reshape(*shape[:axis], self.stripes_per_rank, length, *shape[axis + 1 :])
        if hop:
            stripes = self.axes.ppermute(stripes, [((r + hop) % ranks, r) for r in range(ranks)])
        wrapped = self.axes.rank() + hop >= ranks
        rolled = [_roll(stripes, down % self.stripes_per_rank, axis) for down in (rows, rows + 1)]
        return lax.select(wrapped, rolled[1], rolled[0]).reshape(shape)


def _roll(x: jax.Array, by: int, axis: int) -> jax.Array:
    size = x.shape[axis]
    parts = (lax.slice_in_dim(x, by, size, axis=axis), lax.slice_in_dim(x, 0, by, axis=axis))
    return lax.concatenate(parts, axis)


@dataclasses.dataclass(frozen=True)
class StripedExchange:
    """Between source order and stripes, by one all-to-all.

    Where the stripes of a contiguous shard do not divide by the ranks, each pair of ranks
    exchanges its number of stripes rounded up: at most one stripe of padding a pair.
    """

    axes: Axes
    stripes_per_rank: int
    to_stripes: bool

    def inverse(self) -> StripedExchange:
        return dataclasses.replace(self, to_stripes=not self.to_stripes)

    def apply(self, x: jax.Array, axis: int) -> jax.Array:
        rank = self.axes.rank()
        packed = self.pack(x, axis, rank)
        names = self.axes.names
        return self.unpack(lax.all_to_all(packed, names, axis, axis, tiled=True), axis, rank)

    @property
    def _rows(self) -> int:
        """Stripes that a pair of ranks exchanges, padding included."""
        return -(-self.stripes_per_rank // self.axes.size)

    @property
    def _divides(self) -> bool:
        return self.stripes_per_rank % self.axes.size == 0

    def _first_row(self, striped_rank: Any, contiguous_rank: Any) -> Any:
        """Place, on a striped rank, of the first stripe that a contiguous rank holds too."""
        ranks, stripes = self.axes.size, self.stripes_per_rank
        before = contiguous_rank * stripes - striped_rank + ranks - 1
        return lax.div(before, np.int32(ranks))

    def _shift(self, contiguous_rank: jax.Array, sign: int) -> jax.Array:
        """The striped rank of a contiguous rank's first stripe, or its negative, modulo n."""
        ranks = self.axes.size
        step = np.int32(sign * self.stripes_per_rank % ranks)
        return lax.rem(contiguous_rank * step, np.int32(ranks))

    def pack(self, x: jax.Array, axis: int, rank: jax.Array) -> jax.Array:
        """A shard as [..., rank that receives, stripes for it, ...]."""
        before, after = x.shape[:axis], x.shape[axis + 1 :]
        ranks, stripes, rows = self.axes.size, self.stripes_per_rank, self._rows
        length = x.shape[axis] // stripes
        x = x.reshape(*before, stripes, length, *after)
        if self.to_stripes:
            x = _pad_end(x, rows * ranks - stripes, axis)
            x = x.reshape(*before, rows, ranks, length, *after).swapaxes(axis, axis + 1)
            if self._divides:
                return x
            return _roll_dynamic(x, self._shift(rank, -1), axis)
        if self._divides:
            return x.reshape(*before, ranks, rows, length, *after)
        x = _pad_end(x, rows, axis)
        firsts = [self._first_row(rank, jnp.int32(other)) for other in range(ranks)]
        sends = [lax.dynamic_slice_in_dim(x, first, rows, axis) for first in firsts]
        return jnp.stack(sends, axis)

    def unpack(self, x: jax.Array, axis: int, rank: jax.Array) -> jax.Array:
        """The shard from [..., rank that sent, stripes from it, ...]."""
        before, length, after = x.shape[:axis], x.shape[axis + 2], x.shape[axis + 3 :]
        ranks, stripes, rows = self.axes.size, self.stripes_per_rank, self._rows
        if not self.to_stripes:
            if not self._divides:
                x = _roll_dynamic(x, self._shift(rank, 1), axis)
            x = x.swapaxes(axis, axis + 1).reshape(*before, rows * ranks, length, *after)
            x = lax.slice_in_dim(x, 0, stripes, axis=axis)
        elif not self._divides:
            parts = [lax.index_in_dim(x, other, axis, keepdims=False) for other in range(ranks)]
            x = lax.concatenate(parts, axis)
            for other, part in enumerate(parts):
                first = self._first_row(rank, jnp.int32(other))
                x = lax.dynamic_update_slice_in_dim(x, part, first, axis)
            x = lax.slice_in_dim(x, 0, stripes, axis=axis)
        return x.reshape(*before, stripes * length, *after)


def _pad_end(x: jax.Array, count: int, axis: int) -> jax.Array:
    padding = [(0, count if dimension == axis else 0, 0) for dimension in range(x.ndim)]
    return lax.pad(x, jnp.zeros((), x.dtype), padding)


def _roll_dynamic(x: jax.Array, by: jax.Array, axis: int) -> jax.Array:
    """Place i receives place i + by (modulo the size), 0 <= by < size."""
    return lax.dynamic_slice_in_dim(lax.concatenate([x, x], axis), by, x.shape[axis], axis)


Exchange = ChunkExchange | StripedRoll | StripedExchange


@dataclasses.dataclass(frozen=True)
class OverMesh:
    """An exchange outside `shard_map`, which it wraps around itself when it is lowered.

    Only then is known what `jax.vmap` has made of x, and with it every axis that its type is
    sharded over: these are made manual, as XLA would gather over them otherwise.
    """

    exchange: Exchange
    mesh: AnyMesh

    def inverse(self) -> OverMesh:
        return dataclasses.replace(self, exchange=self.exchange.inverse())

    def apply(self, x: jax.Array, axis: int) -> jax.Array:
        names = self.exchange.axes.names
        spec = sharded_spec(x, axis, names, self.mesh)
        manual = manual_for(spec, names)
        in_region = functools.partial(jax.shard_map, mesh=self.mesh, axis_names=manual)
        if isinstance(self.exchange, StripedExchange) and manual != set(self.mesh.axis_names):
            return _stripes_over_mesh(self.exchange, x, axis, spec, self.mesh, in_region)
        move = functools.partial(self.exchange.apply, axis=axis)
        return in_region(move, in_specs=spec, out_specs=spec)(x)


def _stripes_over_mesh(
    exchange: StripedExchange,
    x: jax.Array,
    axis: int,
    spec: PartitionSpec,
    mesh: AnyMesh,
    in_region: Any,
) -> jax.Array:
    """The exchange of stripes where not all axes of the mesh are manual.

    An all-to-all in such a region makes XLA gather over the others first. So the shards are
    packed and unpacked in manual regions, which communicate nothing, and between them a sharding
    constraint asks XLA for the all-to-all.
    """
    names = exchange.axes.names
    before, after = spec[:axis], spec[axis + 1 :]
    sent = PartitionSpec(*before, as_entry(names), None, None, None, *after)
    received = PartitionSpec(*before, None, as_entry(names), None, None, *after)

    def pack(shard: jax.Array) -> jax.Array:
        return jnp.expand_dims(exchange.pack(shard, axis, exchange.axes.rank()), axis)

    def unpack(packed: jax.Array) -> jax.Array:
        packed = lax.squeeze(packed, (axis + 1,))
        return exchange.unpack(packed, axis, exchange.axes.rank())

    packed = in_region(pack, in_specs=spec, out_specs=sent)(x)
    packed = _reshard(packed, {axis: None, axis + 1: as_entry(names)}, names, mesh)
    return in_region(unpack, in_specs=received, out_specs=spec)(packed)


def _reshard(
    x: jax.Array, placed: dict[int, AxisName | None], names: tuple[str, ...], mesh: AnyMesh
) -> jax.Array:
    """Lay some dimensions of x out over `names`, or over nothing; the others stay as they are."""
    if set(names) <= explicit_axes(mesh):
        typed = [as_entry(entry) for entry in typed_spec(x)]
        for dimension, entry in placed.items():
            typed[dimension] = entry
        return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*typed)))
    unconstrained = PartitionSpec.UNCONSTRAINED
    constraint = PartitionSpec(
        *[placed.get(dimension, unconstrained) for dimension in range(x.ndim)]
    )
    explicit = explicit_axes(mesh)
    if not explicit:
        return lax.with_sharding_constraint(x, NamedSharding(mesh, constraint))
    # Beside Explicit axes a constraint would unshard the Auto axes that it leaves open.
    spec = PartitionSpec(*map(as_entry, typed_spec(x)))
    constrain = functools.partial(lax.with_sharding_constraint, shardings=constraint)
    return jax.shard_map(constrain, mesh=mesh, in_specs=spec, out_specs=spec, axis_names=explicit)(
        x
    )


@dataclasses.dataclass(frozen=True)
class _Unshard:
    """The identity on values, after which one axis is whole on every rank; Auto axes only."""

    names: tuple[str, ...]
    mesh: AnyMesh
    forward: bool = True

    def inverse(self) -> _Unshard:
        return dataclasses.replace(self, forward=not self.forward)

    def apply(self, x: jax.Array, axis: int) -> jax.Array:
        entry = None if self.forward else as_entry(self.names)
        return _reshard(x, {axis: entry}, self.names, self.mesh)


def _steps(move: Relayout) -> list[Relayout]:
    """The move as moves that have a direct form: stripes only from and to source order."""
    source, target = move.source, move.target
    if move.is_identity:
        return []
    striped = [isinstance(layout, Striped) for layout in (source, target)]
    ends = [type(layout) for layout in (source, target)]
    if move.roll or not any(striped) or Contiguous in ends:
        return [move]
    between = Contiguous(source.ranks)
    length = move.sequence_length
    halves = (Relayout(source, between, length), Relayout(between, target, length))
    return [half for half in halves if not half.is_identity]


def _bijection(move: Relayout, axes: Axes) -> Exchange:
    striped = [isinstance(layout, Striped) for layout in (move.source, move.target)]
    if not any(striped):
        exchange = ChunkExchange(move, axes)
        exchange.check_chunks()
        return exchange
    per_rank = move.chunks // axes.size
    if all(striped):
        return StripedRoll(move.roll, axes, per_rank)
    return StripedExchange(axes, per_rank, to_stripes=striped[1])


def exchange(x: jax.Array, move: Relayout, axis: int, axes: Axes) -> jax.Array:
    """This rank's shard after a move; inside a region that is manual over `axes`."""
    steps = _steps(move)
    x = as_varying(x, axes.names) if steps else x
    for step in steps:
        x = apply_bijection(_bijection(step, axes), x, axis)
    return named(x, *RELAID) if steps else x


def exchange_over_mesh(
    x: jax.Array, move: Relayout, axis: int, names: tuple[str, ...], mesh: AnyMesh
) -> jax.Array:
    """The global array after a move; outside `shard_map`, which this wraps around itself."""
    sharded_spec(x, axis, names, mesh)  # raises where the sequence is not sharded so
    steps = _steps(move)
    for step in steps:
        x = _over_mesh(step, axis, Axes.on(mesh, names), mesh)(x)
    return named(x, *RELAID) if steps else x


@functools.lru_cache(maxsize=1024)
def _over_mesh(move: Relayout, axis: int, axes: Axes, mesh: AnyMesh) -> Any:
    over_mesh = OverMesh(_bijection(move, axes), mesh)

    def run(x: jax.Array) -> jax.Array:
        if not jax.typeof(x).sharding.mesh.empty:
            return apply_bijection(over_mesh, x, axis)
        # A plain array: without a constraint before and after, jit would not know the devices to
        # run on, there and in the derivative.
        placed = {axis: as_entry(axes.names)}
        x = _reshard(x, placed, axes.names, mesh)
        return _reshard(apply_bijection(over_mesh, x, axis), placed, axes.names, mesh)

    return jax.jit(run)


def move_array(
    x: Any,
    source: Layout,
    target: Layout,
    axis: int,
    name: str,
    *,
    names: tuple[str, ...],
    mesh: AnyMesh | None,
    local: bool,
) -> Any:
    """One leaf from a layout to another, wherever the call stands; `relayout` has the rules."""
    # The layout that was asked for is named rather than source order, where both need the same.
    ends = sorted((source, target), key=lambda layout: isinstance(layout, Contiguous))
    strict, loose = sorted(ends, key=lambda layout: -layout.multiple)
    inside = not local and is_inside(names, f"moving {name}")
    if inside:
        x = jnp.asarray(x)
        axes = bound_axes(names)
        check_ranks(strict, axes.size, names)
        check_shard(x, names, name)
    length = x.shape[axis] * (axes.size if inside else 1)
    for layout in (strict, loose):
        layout.check_length(length, f"axis {axis} of {name}")
    move = Relayout(source, target, length)
    if inside:
        return exchange(x, move, axis, axes)
    if isinstance(x, np.ndarray | np.generic):
        return permute_on_host(np.asarray(x), move, axis)
    if not names or local:
        check_whole(x, axis, name)
        return permute(x, move, axis)
    mesh = find_mesh([x], names, mesh)
    check_ranks(strict, Axes.on(mesh, names).size, names)
    return exchange_over_mesh(x, move, axis, names, mesh)


def _contiguous(layout: Layout) -> Contiguous:
    if not isinstance(layout, Layout):
        raise TypeError(f"layout is {layout!r}; it needs to be a layout, such as Zigzag(8)")
    return Contiguous(layout.ranks)


def reorder(
    tree: Any,
    layout: Layout,
    *,
    axis: Axis = 1,
    axis_name: AxisName | None = None,
    mesh: AnyMesh | None = None,
    local: bool = False,
) -> Any:
    """Carry every leaf of a tree from source order to `layout`.

    Same as `relayout(tree, Contiguous(layout.ranks), layout, ...)`, which states the rules.

    >>> import numpy as np
    >>> from plait import Zigzag
    >>> reorder(np.arange(8), Zigzag(2), axis=0)
    array([0, 1, 6, 7, 2, 3, 4, 5])
    """
    contiguous = _contiguous(layout)
    return relayout(
        tree, contiguous, layout, axis=axis, axis_name=axis_name, mesh=mesh, local=local
    )


def restore(
    tree: Any,
    layout: Layout,
    *,
    axis: Axis = 1,
    axis_name: AxisName | None = None,
    mesh: AnyMesh | None = None,
    local: bool = False,
) -> Any:
    """Carry every leaf of a tree from `layout` back to source order: the inverse of `reorder`.

    >>> import numpy as np
    >>> from plait import Zigzag
    >>> restore(np.array([0, 1, 6, 7, 2, 3, 4, 5]), Zigzag(2), axis=0)
    array([0, 1, 2, 3, 4, 5, 6, 7])
    """
    contiguous = _contiguous(layout)
    return relayout(
        tree, layout, contiguous, axis=axis, axis_name=axis_name, mesh=mesh, local=local
    )


def relayout(
    tree: Any,
    source: Layout,
    target: Layout,
    *,
    axis: Axis = 1,
    axis_name: AxisName | None = None,
    mesh: AnyMesh | None = None,
    local: bool = False,
) -> Any:
    """Carry every leaf of a tree from one layout to another, bit for bit, without a gather.

    Args:
      tree: arrays of any dtype and at least one dimension, typed PRNG keys included. NumPy
        arrays give new NumPy arrays; they may be read-only or broadcast views.
      source: the layout that the leaves are in.
      target: the layout to carry them to, of as many ranks.
      axis: the sequence axis, negative from the end: an int, or a pytree prefix of ints in which
        None passes a leaf through.
      axis_name: the mesh axis that the sequence is sharded over, or a tuple of them, major first.
        Inside `jax.shard_map` the leaves are this rank's shards, and the region must be manual
        over these axes; outside, they are global arrays. None: the sequence is not sharded.
      mesh: the mesh, where neither `jax.set_mesh` nor the arrays say it.
      local: permute within the shard, although the call stands in a manual region.

    Communicates, for k chunks a rank, at most k concurrent permutes of one chunk: two for zigzag,
    one for half swap; one all-to-all from or to `Striped` (by way of source order where the other
    side is neither). One rank communicates nothing. The derivative is the inverse move.

    Raises:
      ValueError: a length that a layout does not accept, layouts or mesh axes of different
        numbers of ranks, a manual region that does not name the axis, a sequence axis that is not
        sharded as Explicit axis types would say, more chunks a rank than devices should move.

    >>> import numpy as np
    >>> from plait import HalfSwap, Zigzag
    >>> relayout(np.array([0, 1, 6, 7, 2, 3, 4, 5]), Zigzag(2), HalfSwap(2), axis=0)
    array([0, 1, 6, 7, 2, 3, 4, 5])
    """
    names = as_names(axis_name)
    if _contiguous(source) != _contiguous(target):
        raise ValueError(
            f"{source!r} has {source.ranks} ranks and {target!r} has {target.ranks}; a relayout "
            f"needs equally many, such as {source.ranks} for both"
        )

    def move(x: Any, axis: int, name: str) -> Any:
        return move_array(x, source, target, axis, name, names=names, mesh=mesh, local=local)

    return map_axis(move, tree, axis)


def all_gather(
    tree: Any,
    layout: Layout,
    *,
    axis: Axis = 1,
    axis_name: AxisName | None = None,
    order: Literal["source", "layout"] = "source",
    mesh: AnyMesh | None = None,
    local: bool = False,
) -> Any:
    """The whole of every leaf on every rank, in source order at the price of a plain all-gather.

    The shard is restored before it is gathered, so that what the order costs is one shard and not
    the whole tensor. The transpose is a reduce-scatter, then the reorder of one shard.
    `order="layout"` gathers the slots as they lie. Arguments and errors as in `relayout`.

    Inside `jax.shard_map` the result counts as varying over the axis. Outside, the sequence axis
    of the result is unsharded and the other dimensions stay as they are. Inside a region that is
    manual over some mesh axes only, XLA gathers the batch over the others first: make all manual.

    >>> import numpy as np
    >>> from plait import Zigzag
    >>> all_gather(np.array([0, 1, 6, 7, 2, 3, 4, 5]), Zigzag(2), axis=0)
    array([0, 1, 2, 3, 4, 5, 6, 7])
    """
    if order not in ("source", "layout"):
        raise ValueError(f"order is {order!r}; it needs to be 'source' or 'layout'")
    names = as_names(axis_name)
    target = _contiguous(layout) if order == "source" else layout

    def gather(x: Any, axis: int, name: str) -> Any:
        x = move_array(x, layout, target, axis, name, names=names, mesh=mesh, local=local)
        if isinstance(x, np.ndarray) or not names or local:
            return x
        if is_inside(names, f"gathering {name}"):
            return gather_shards(x, axis, names)
        return named(_unshard(x, axis, names, find_mesh([x], names, mesh)), GATHERED_OTHER)

    return map_axis(gather, tree, axis)


def gather_shards(
    x: jax.Array, axis: int, names: tuple[str, ...], name: str = GATHERED_OTHER
) -> jax.Array:
    """Every rank's shard, joined in rank order; inside a region that is manual over `names`.

    `name` is what `jax.checkpoint` policies know the result by.
    """
    if bound_axes(names).size == 1:
        return x
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        data = gather_shards(jax.random.key_data(x), axis, names, name)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    gathered = lax.all_gather(as_varying(x, names), names, axis=axis, tiled=True, to="varying")
    return named(gathered, name)


def _unshard(x: jax.Array, axis: int, names: tuple[str, ...], mesh: AnyMesh) -> jax.Array:
    if set(names) <= explicit_axes(mesh):
        return _reshard(x, {axis: None}, names, mesh)
    return apply_bijection(_Unshard(names, mesh), x, axis)
