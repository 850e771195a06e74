"""The Pallas kernels of `Flash`: forward, the gradient of q, and those of k and v.

Here heads come before tokens, [batch, heads, tokens, head_dim]; numbers of single tokens lie along
the lanes, as rows: positions and segment ids as tags [batch, 2, tokens], lse and delta as
[batch, heads, 1, tokens]. As columns each would fill 128 lanes of memory; the kernels turn a row
where they need a column. The last block may hang over the end of an array; anything may stand
there, and in padding, NaN too, so that what is multiplied by a zero of the mask is zeroed first.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import lax

# Not where it is used: importing Pallas adds to what jax's caches of traces go by, so that whatever
# was traced before, the function being traced too, would be traced and compiled once more.
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from plait.attention.kernels.visits import (
    FULL,
    PARTIAL,
    Visits,
    is_first,
    is_last,
    kind,
    list_visits,
)
from plait.mask import BlockBounds, Mask
from plait.mesh import as_varying

LANES = 128
"""Of a vector register: what lies along them comes in multiples."""

_NO_DOCUMENT = np.iinfo(np.int32).min
"""The segment id of padding among queries: equal to that of no key, padding's 0 included."""


@dataclasses.dataclass(frozen=True)
class Statics:
    """What of a call is known when it is traced; `dtype` is that of the results, if another."""

    q_block: int
    k_block: int
    interpret: bool
    mask: Mask
    masks_ids: bool
    scale: float
    softcap: float | None = None
    dtype: Any = None

    def blocks(self, q_tags: jax.Array, k_tags: jax.Array) -> int:
        """How many blocks of scores a row of the batch has."""
        return q_tags.shape[2] // self.q_block * (k_tags.shape[2] // self.k_block)


def forward(
    s: Statics, q: jax.Array, k: jax.Array, v: jax.Array, q_tags: jax.Array, k_tags: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(out [batch, heads, queries, v_head_dim], lse float32 [batch, heads, 1, queries])."""
    out = jax.ShapeDtypeStruct((*q.shape[:3], v.shape[3]), s.dtype or q.dtype)
    lse = jax.ShapeDtypeStruct((*q.shape[:2], 1, q.shape[2]), jnp.float32)
    return _Grid(s, "q", q_tags, k_tags, q.shape[1], k.shape[1]).call(
        _forward_kernel, [q], [k, v], [out, lse],
        [(s.q_block, LANES), (s.q_block, LANES), (s.q_block, v.shape[3])],
    )  # fmt: skip


def backward(
    s: Statics,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    d_out: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    q_tags: jax.Array,
    k_tags: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(d_q, d_k, d_v) in the shapes of q, k and v."""
    d_q, d_k, d_v = (jax.ShapeDtypeStruct(x.shape, s.dtype or x.dtype) for x in (q, k, v))
    of_queries, of_keys = [q, d_out, lse, delta], [k, v]
    heads = q.shape[1], k.shape[1]
    (d_q,) = _Grid(s, "q", q_tags, k_tags, *heads).call(
        _d_q_kernel, of_queries, of_keys, [d_q],
        [(s.q_block, LANES), (s.q_block, LANES), (s.q_block, q.shape[3])],
    )  # fmt: skip
    d_k, d_v = _Grid(s, "k", q_tags, k_tags, *heads).call(
        _d_kv_kernel, of_queries, of_keys, [d_k, d_v],
        [(s.k_block, k.shape[3]), (s.k_block, v.shape[3])],
    )  # fmt: skip
    return d_q, d_k, d_v


@dataclasses.dataclass(frozen=True)
class _Grid:
    """A grid over heads and the visits that the tags call for.

    Where blocks of queries are outer, the grid is over the heads of q. Where blocks of keys are,
    it is over those of k, and each visit is made for every head of q in the group in turn, so that
    their gradients add up.
    """

    s: Statics
    outer: Literal["q", "k"]
    q_tags: jax.Array
    k_tags: jax.Array
    heads: int
    kv_heads: int

    @property
    def _visits(self) -> Visits:
        q_blocks = self.q_tags.shape[2] // self.s.q_block
        k_blocks = self.k_tags.shape[2] // self.s.k_block
        return Visits(*((q_blocks, k_blocks) if self.outer == "q" else (k_blocks, q_blocks)))

    def _place(self, side: str, *indices: Any) -> tuple[Any, Any, Any]:
        """For a step of the grid, the row of the batch, the head and the block of a side."""
        head, step, *member, table = indices
        row, outer, inner = self._visits.place(table[step])
        group = self.heads // self.kv_heads
        if member and side == "q":
            head = head * group + member[0]
        elif not member and side == "k":
            head = lax.div(head, np.int32(group))  # `//` would ask the host for its chip
        return row, head, outer if side == self.outer else inner

    def _spec(self, side: str, shape: tuple[int, ...]) -> pl.BlockSpec:
        tokens = self.s.q_block if side == "q" else self.s.k_block
        if shape[2] == 1:
            rows = lambda row, head, block: (row, head, 0, block)  # noqa: E731
            return self._indexed(side, (None, None, 1, tokens), rows)
        matrix = lambda row, head, block: (row, head, block, 0)  # noqa: E731
        return self._indexed(side, (None, None, tokens, shape[3]), matrix)

    def _tags_spec(self, side: str) -> pl.BlockSpec:
        tokens = self.s.q_block if side == "q" else self.s.k_block
        return self._indexed(side, (None, 2, tokens), lambda row, _, block: (row, 0, block))

    def _indexed(self, side: str, block: tuple, index: Callable[..., tuple]) -> pl.BlockSpec:
        return pl.BlockSpec(block, lambda *indices: index(*self._place(side, *indices)))

    def call(
        self,
        kernel: Callable[..., None],
        of_queries: Sequence[jax.Array],
        of_keys: Sequence[jax.Array],
        results: Sequence[jax.ShapeDtypeStruct],
        scratch: Sequence[tuple[int, int]],
    ) -> Any:
        """The results, blocks of which lie as the outer ones do; the scratch is float32."""
        s = self.s
        q_bounds = BlockBounds.of(self.q_tags[:, 0], self.q_tags[:, 1], s.q_block, jnp)
        k_bounds = BlockBounds.of(self.k_tags[:, 0], self.k_tags[:, 1], s.k_block, jnp)
        table, count = list_visits(s.mask, q_bounds, k_bounds, self.outer)
        ids = self.q_tags[:, 1]
        q_tags = self.q_tags.at[:, 1].set(jnp.where(ids == 0, _NO_DOCUMENT, ids))
        arrays = [count, table, *of_queries, *of_keys, q_tags, self.k_tags]
        varying = frozenset[str]().union(*(jax.typeof(x).mat.varying for x in arrays))
        arrays = [as_varying(x, varying) for x in arrays]
        in_specs = [
            *(self._spec("q", x.shape) for x in of_queries),
            *(self._spec("k", x.shape) for x in of_keys),
            self._tags_spec("q"),
            self._tags_spec("k"),
        ]
        of_group = () if self.outer == "q" else (self.heads // self.kv_heads,)
        semantics: list[Any] = ["parallel", "arbitrary", *["arbitrary" for _ in of_group]]

        def run(count: jax.Array, *arrays: jax.Array) -> Any:
            mat = jax.typeof(count).mat
            heads = self.heads if self.outer == "q" else self.kv_heads
            return pl.pallas_call(
                functools.partial(kernel, s),
                grid_spec=pltpu.PrefetchScalarGridSpec(
                    num_scalar_prefetch=1,
                    grid=(heads, count, *of_group),
                    in_specs=in_specs,
                    out_specs=[self._spec(self.outer, x.shape) for x in results],
                    scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
                ),
                out_shape=[
                    jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=mat) for x in results
                ],
                compiler_params=pltpu.CompilerParams(dimension_semantics=semantics),
                name=f"plait_flash{kernel.__name__.removesuffix('_kernel')}",
                interpret=s.interpret,
            )(*arrays)

        if s.interpret and varying:
            return [as_varying(x, varying) for x in _closed(run, arrays)]
        return run(*arrays)


def _closed(run: Callable[..., Any], arrays: Sequence[jax.Array]) -> Any:
    """run(*arrays) as a program of its own, lowered outside of the surrounding `jax.shard_map`.

    There the interpreter's own indices fail the check of what varies over the mesh.
    """
    avals = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    return jax.export.export(jax.jit(run))(*avals).call(*arrays)


def _forward_kernel(
    s: Statics,
    table: Any,
    q: Any,
    k: Any,
    v: Any,
    q_tags: Any,
    k_tags: Any,
    out: Any,
    lse: Any,
    peak: Any,
    total: Any,
    acc: Any,
) -> None:
    visit = table[pl.program_id(1)]

    @pl.when(is_first(visit))
    def _start() -> None:
        peak[...] = jnp.full_like(peak, -jnp.inf)
        total[...] = jnp.zeros_like(total)
        acc[...] = jnp.zeros_like(acc)

    def body(masked: bool) -> None:
        scores, values = _scores(s, q[...], k[...]), v[...]
        if masked:
            seen = _seen(s, scores.shape, _columns(q_tags), k_tags)
            scores = jnp.where(seen, scores, -jnp.inf)
            values = _real(s, values, k_tags)
        before = peak[:, :1]
        after = jnp.maximum(before, scores.max(axis=1, keepdims=True))
        shift = jnp.where(after == -jnp.inf, 0.0, after)
        p, kept = jnp.exp(scores - shift), jnp.exp(before - shift)
        peak[...] = jnp.broadcast_to(after, peak.shape)
        total[...] = total[...] * kept + p.sum(axis=1, keepdims=True)
        acc[...] = acc[...] * kept + _dot(p.astype(values.dtype), values)

    _compute(visit, body)

    @pl.when(is_last(visit))
    def _finish() -> None:
        sums = total[:, :1]
        out[...] = (acc[...] / jnp.where(sums == 0, 1.0, sums)).astype(out.dtype)
        nothing = total[...] == 0
        of_rows = jnp.where(nothing, 0.0, peak[...]) + jnp.log(total[...])
        lse[...] = of_rows.T[:1]


def _d_q_kernel(
    s: Statics,
    table: Any,
    q: Any,
    d_out: Any,
    lse: Any,
    delta: Any,
    k: Any,
    v: Any,
    q_tags: Any,
    k_tags: Any,
    d_q: Any,
    lse_column: Any,
    delta_column: Any,
    acc: Any,
) -> None:
    visit = table[pl.program_id(1)]

    @pl.when(is_first(visit))
    def _start() -> None:
        lse_column[...] = _turned(lse[...])
        delta_column[...] = _turned(delta[...])
        acc[...] = jnp.zeros_like(acc)

    def body(masked: bool) -> None:
        keys = k[...]
        scores = _scores(s, q[...], keys)
        p = jnp.exp(scores - lse_column[:, :1])
        d_p = _dot(d_out[...], v[...], transposed=True)
        d_scores = p * (d_p - delta_column[:, :1]) * _slope(s, scores)
        if masked:
            seen = _seen(s, scores.shape, _columns(q_tags), k_tags)
            d_scores = jnp.where(seen, d_scores, 0.0)
            keys = _real(s, keys, k_tags)
        acc[...] += _dot(d_scores.astype(keys.dtype), keys)

    _compute(visit, body)

    @pl.when(is_last(visit))
    def _finish() -> None:
        d_q[...] = acc[...].astype(d_q.dtype)


def _d_kv_kernel(
    s: Statics,
    table: Any,
    q: Any,
    d_out: Any,
    lse: Any,
    delta: Any,
    k: Any,
    v: Any,
    q_tags: Any,
    k_tags: Any,
    d_k: Any,
    d_v: Any,
    d_k_acc: Any,
    d_v_acc: Any,
) -> None:
    """Scores lie the other way round, [k_block, q_block], so that lse and delta are rows."""
    visit, member = table[pl.program_id(1)], pl.program_id(2)

    @pl.when(is_first(visit) & (member == 0))
    def _start() -> None:
        d_k_acc[...] = jnp.zeros_like(d_k_acc)
        d_v_acc[...] = jnp.zeros_like(d_v_acc)

    def body(masked: bool) -> None:
        queries, gradient = q[...], d_out[...]
        scores = _scores(s, k[...], queries)
        p = jnp.exp(scores - lse[...])
        d_p = _dot(v[...], gradient, transposed=True)
        d_scores = p * (d_p - delta[...]) * _slope(s, scores)
        if masked:
            seen = _seen(s, scores.shape, q_tags, _columns(k_tags))
            p, d_scores = jnp.where(seen, p, 0.0), jnp.where(seen, d_scores, 0.0)
            queries, gradient = _real(s, queries, q_tags), _real(s, gradient, q_tags)
        d_v_acc[...] += _dot(p.astype(gradient.dtype), gradient)
        d_k_acc[...] += _dot(d_scores.astype(queries.dtype), queries)

    _compute(visit, body)

    @pl.when(is_last(visit) & (member == pl.num_programs(2) - 1))
    def _finish() -> None:
        d_k[...] = d_k_acc[...].astype(d_k.dtype)
        d_v[...] = d_v_acc[...].astype(d_v.dtype)


def _compute(visit: Any, body: Callable[[bool], None]) -> None:
    """The body with the mask's arithmetic where it is needed, and without where it is not."""
    pl.when(kind(visit) == PARTIAL)(lambda: body(True))
    pl.when(kind(visit) == FULL)(lambda: body(False))


def _scores(s: Statics, a: jax.Array, b: jax.Array) -> jax.Array:
    scores = _dot(a, b, transposed=True) * s.scale
    return scores if s.softcap is None else s.softcap * jnp.tanh(scores / s.softcap)


def _slope(s: Statics, scores: jax.Array) -> jax.Array | float:
    """The derivative of the scores by the products of q and k."""
    return s.scale if s.softcap is None else s.scale * (1 - (scores / s.softcap) ** 2)


def _dot(a: jax.Array, b: jax.Array, transposed: bool = False) -> jax.Array:
    """a @ b or a @ b.T, float32: exact products of bfloat16, and full ones of float32."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    dimensions = (((1,), (1 if transposed else 0,)), ((), ()))
    return lax.dot_general(
        a, b, dimensions, precision=precision, preferred_element_type=jnp.float32
    )


def _turned(row: jax.Array) -> jax.Array:
    """A row [1, n] as a column in every lane, [n, LANES]."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T


def _columns(tags: Any) -> tuple[jax.Array, jax.Array]:
    return _turned(tags[:1])[:, :1], _turned(tags[1:])[:, :1]


def _rows(tags: Any) -> tuple[jax.Array, jax.Array]:
    return (tags[:1], tags[1:]) if not isinstance(tags, tuple) else tags


def _seen(s: Statics, shape: tuple[int, ...], q_tags: Any, k_tags: Any) -> jax.Array:
    """Which scores the mask leaves; tags are rows in memory, or columns."""
    (q_pos, q_ids), (k_pos, k_ids) = _rows(q_tags), _rows(k_tags)
    seen = s.mask.visible(q_pos, k_pos)
    if s.masks_ids:
        seen &= q_ids == k_ids
    return jnp.broadcast_to(seen, shape)


def _real(s: Statics, x: jax.Array, tags: Any) -> jax.Array:
    """x [tokens, head_dim] with zeros in place of padding."""
    if not s.masks_ids:
        return x
    ids = _columns(tags)[1]
    return jnp.where((ids != 0) & (ids != _NO_DOCUMENT), x, jnp.zeros_like(x))
