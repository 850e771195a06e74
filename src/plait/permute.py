"""Local moves: permute the chunks of an axis that one device holds whole, without a gather.

`Relayout` says which chunk goes where; `permute` carries it out on the device as slices, reversals
and one concatenation; `permute_on_host` with NumPy. The operation is a jax primitive of its own
because no composition gives all of: every bit kept, every transformation, and a derivative that
is exactly the inverse permutation.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from plait import block_copy
from plait.layout import Layout

MOST_PIECES = 1024


class Bijection(Hashable, Protocol):
    """A permutation of one axis that the primitive can lower, differentiate and batch."""

    def inverse(self) -> Bijection: ...

    def apply(self, x: jax.Array, axis: int) -> jax.Array: ...


_bijection_p = Primitive("plait_bijection")


def apply_bijection(bijection: Bijection, x: jax.Array, axis: int) -> jax.Array:
    """x with `axis` (non-negative) permuted; typed PRNG keys included."""
    if not jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return _bijection_p.bind(x, bijection=bijection, axis=axis)
    data = _bijection_p.bind(jax.random.key_data(x), bijection=bijection, axis=axis)
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))


def _transpose(cotangent: jax.Array, _: object, *, bijection: Bijection, axis: int) -> list:
    return [_bijection_p.bind(cotangent, bijection=bijection.inverse(), axis=axis)]


def _batch(args: tuple, dims: tuple, *, bijection: Bijection, axis: int) -> tuple:
    (x,), (dim,) = args, dims
    shifted = axis + (dim <= axis)
    return _bijection_p.bind(x, bijection=bijection, axis=shifted), dim


def _lower(x: jax.Array, *, bijection: Bijection, axis: int) -> jax.Array:
    return bijection.apply(x, axis)


def _lower_cpu(x: jax.Array, *, bijection: Bijection, axis: int) -> jax.Array:
    """Every bit kept, where XLA:CPU alters NaNs of narrow floats and corrupts 2-bit integers."""
    width = jax.dtypes.itemsize_bits(x.dtype)
    if jnp.issubdtype(x.dtype, jnp.floating) and width in _altered_widths(bijection):
        bits = lax.bitcast_convert_type(x, f"uint{width}")
        return lax.bitcast_convert_type(bijection.apply(bits, axis), x.dtype)
    if jnp.issubdtype(x.dtype, jnp.integer) and width < 4:
        wide = jnp.int8 if jnp.issubdtype(x.dtype, jnp.signedinteger) else jnp.uint8
        return bijection.apply(x.astype(wide), axis).astype(x.dtype)
    return bijection.apply(x, axis)


def _altered_widths(bijection: Bijection) -> set[int]:
    """Widths of the floats whose NaNs XLA:CPU alters: by selections; by plain copies, too, before
    jax 0.12."""
    plain_copy = isinstance(bijection, Relayout) and jax.__version_info__ >= (0, 12)
    return {8} if plain_copy else {8, 16}


def _lower_tpu(ctx: Any, x: Any, *, bijection: Bijection, axis: int) -> Any:
    """One copy where Pallas may stand and has blocks for the array, else as anywhere."""
    lower: Callable[..., jax.Array] = _lower
    if isinstance(bijection, Relayout) and _is_unpartitioned(ctx.module_context.axis_context):
        (aval,) = ctx.avals_in
        chunk_length = aval.shape[axis] // bijection.chunks
        planned = block_copy.plan(aval.shape, axis, aval.dtype, chunk_length)
        if planned is not None:
            lower = functools.partial(_lower_block_copy, planned=planned)
    lowered = mlir.lower_fun(lower, multiple_results=False)
    return lowered(ctx, x, bijection=bijection, axis=axis)


def _lower_block_copy(
    x: jax.Array, *, bijection: Relayout, axis: int, planned: block_copy.Plan
) -> jax.Array:
    return block_copy.copy_blocks(x, bijection.sources, planned)


def _is_unpartitioned(axis_context: Any) -> bool:
    """Whether the program is lowered for one device, or stands where every axis is manual.

    Only there does XLA not partition it, which a Pallas kernel could not bear.
    """
    manual = getattr(axis_context, "manual_axes", None)
    if manual is not None:
        return frozenset(manual) == frozenset(axis_context.mesh.axis_names)
    return getattr(axis_context, "num_devices", None) == 1


_compiled = jax.jit(_bijection_p.bind, static_argnames=("bijection", "axis"))


def _evaluate(x: jax.Array, *, bijection: Bijection, axis: int) -> jax.Array:
    if jax.config.jax_disable_jit:  # type: ignore[attr-defined]  # bind would come back here
        return _lower_cpu(x, bijection=bijection, axis=axis)
    return _compiled(x, bijection=bijection, axis=axis)


_bijection_p.def_abstract_eval(lambda x, **_: x)
_bijection_p.def_impl(_evaluate)
mlir.register_lowering(_bijection_p, mlir.lower_fun(_lower, multiple_results=False))
mlir.register_lowering(_bijection_p, mlir.lower_fun(_lower_cpu, multiple_results=False), "cpu")
mlir.register_lowering(_bijection_p, _lower_tpu, "tpu")
ad.deflinear2(_bijection_p, _transpose)
batching.primitive_batchers[_bijection_p] = _batch


Progression = tuple[int, int, int]
"""Start, step and count of an arithmetic progression."""


def _progressions(table: np.ndarray) -> list[Progression]:
    """The table as few arithmetic progressions, greedily, in order."""
    found: list[Progression] = []
    steps = np.append(np.diff(table), 0)
    ends = np.flatnonzero(np.append(steps[1:-1] != steps[:-2], [True, True])) + 1
    start = 0
    while start < table.size:
        end = int(ends[np.searchsorted(ends, start + 1)]) if start + 1 < table.size else start
        count, step = end - start + 1, int(steps[start])
        if step != 1 and count == 2:
            count = 1
        found.append((int(table[start]), step if count > 1 else 1, count))
        start += count
    return found


def _pieces(columns: list[list[Progression]]) -> int:
    return sum(len(column) for column in columns)


@dataclasses.dataclass(frozen=True)
class Relayout:
    """The move of a sequence from one layout to another, as a table of chunks.

    With `roll`, counted in chunks, the place of chunk c receives chunk c + roll instead (modulo
    the number of chunks): what looks across chunk edges is made of such moves.
    """

    source: Layout
    target: Layout
    sequence_length: int
    roll: int = 0

    @functools.cached_property
    def chunk_length(self) -> int:
        """Tokens in the longest chunk that stays together in both layouts."""
        return math.gcd(
            self.source.chunk_length(self.sequence_length),
            self.target.chunk_length(self.sequence_length),
        )

    @property
    def chunks(self) -> int:
        return self.sequence_length // self.chunk_length

    def inverse(self) -> Relayout:
        return Relayout(self.target, self.source, self.sequence_length, -self.roll)

    @functools.cached_property
    def sources(self) -> np.ndarray:
        """The source place of each target place, counted in chunks: int64 [chunks]."""
        arriving, slots = self._chunks_by_place(self.target), np.empty(self.chunks, np.int64)
        slots[self._chunks_by_place(self.source)] = np.arange(self.chunks)
        return slots[(arriving + self.roll) % self.chunks]

    def _chunks_by_place(self, layout: Layout) -> np.ndarray:
        """Which chunk of the text a layout has in each place: int64 [chunks]."""
        parts = layout.chunk_length(self.sequence_length) // self.chunk_length
        table = layout.chunk_table(self.sequence_length)
        return (table[..., None] * parts + np.arange(parts)).reshape(-1)

    @functools.cached_property
    def is_identity(self) -> bool:
        return bool((self.sources == np.arange(self.chunks)).all())

    def apply(self, x: jax.Array, axis: int) -> jax.Array:
        """Permute the whole axis on one device; its length may be any multiple of `chunks`."""
        shape = x.shape
        before, after, length = shape[:axis], shape[axis + 1 :], shape[axis] // self.chunks
        if self.rows is not None:
            matrix = x.reshape(*before, self.rows, self.chunks // self.rows, length, *after)
            return matrix.swapaxes(axis, axis + 1).reshape(shape)
        chunked = x.reshape(*before, self.chunks, length, *after)
        columns = [
            lax.concatenate([_take_progression(chunked, axis, *part) for part in column], axis)
            for column in self.columns
        ]
        stacked = columns[0] if len(columns) == 1 else jnp.stack(columns, axis=axis + 1)
        return stacked.reshape(shape)

    @functools.cached_property
    def rows(self) -> int | None:
        """Rows of the matrix of chunks that the move transposes, where it is a transpose."""
        for rows in (self.target.ranks, self.chunks // self.target.ranks):
            if rows > 1 and self.chunks % rows == 0:
                transposed = np.arange(self.chunks).reshape(rows, -1).T.reshape(-1)
                if (self.sources == transposed).all():
                    return rows
        return None

    @functools.cached_property
    def columns(self) -> list[list[Progression]]:
        """`sources` dealt into interleaved columns of progressions, in as few pieces as found."""
        ranks = self.target.ranks
        splits = [
            [_progressions(self.sources[first::period]) for first in range(period)]
            for period in sorted({1, 2, ranks, self.chunks // ranks})
            if period and self.chunks % period == 0
        ]
        return min(splits, key=_pieces)

    def check_pieces(self) -> None:
        """ValueError where the move falls into more pieces than a compiler should be given."""
        if self.rows is None and _pieces(self.columns) > MOST_PIECES:
            raise ValueError(
                f"from {self.source!r} to {self.target!r} is {_pieces(self.columns)} separate "
                f"runs; at most {MOST_PIECES} move on a device: permute on the host, where NumPy "
                "arrays of any layout move"
            )


def _take_progression(x: jax.Array, axis: int, start: int, step: int, count: int) -> jax.Array:
    last = start + step * (count - 1)
    low, high = min(start, last), max(start, last)
    taken = lax.slice_in_dim(x, low, high + 1, abs(step), axis)
    return lax.rev(taken, (axis,)) if step < 0 else taken


def permute(x: jax.Array, move: Relayout, axis: int) -> jax.Array:
    """x with `axis`, of the move's sequence length, carried from one layout to the other."""
    if move.is_identity:
        return x
    move.check_pieces()
    return apply_bijection(move, x, axis)


def permute_on_host(x: np.ndarray, move: Relayout, axis: int) -> np.ndarray:
    """The same for a NumPy array, into a new array; x may be read-only or a broadcast view."""
    shape = x.shape
    chunked = x.reshape(*shape[:axis], move.chunks, move.chunk_length, *shape[axis + 1 :])
    return np.take(chunked, move.sources, axis=axis).reshape(shape)
