"""The kernel in pure JAX, which runs everywhere and which the others are held to."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from plait.attention.kernels.base import Kernel, Scores, Tags
from plait.layout import at_least_one
from plait.mask import BlockBounds, block_map
from plait.mesh import as_varying

LEAST_BLOCK = 32


@dataclasses.dataclass(frozen=True)
class Blockwise(Kernel):
    """Attention in blocks, in pure JAX: memory grows with a block, not with the sequence squared.

    Softmax is accumulated over blocks of keys in float32 (Milakov and Gimelshein 2018,
    arXiv 1805.02867; FlashAttention-2, arXiv 2307.08691). Blocks that the mask empties are not
    visited: the loop over key blocks runs over a list of the others, made from the blocks' least
    and most positions and segment ids, so that it works for positions that are data. Blocks are
    skipped for each row of the batch on its own, for all heads together. Under `jax.vmap` the
    results are the same, but every row is charged for the longest of the lists.

    Attributes:
      q_block, k_block: most tokens in a block of queries and of keys.
    """

    q_block: int = 256
    k_block: int = 256

    def __post_init__(self) -> None:
        object.__setattr__(self, "q_block", at_least_one("q_block", self.q_block))
        object.__setattr__(self, "k_block", at_least_one("k_block", self.k_block))

    def fitted(self, q_chunk: int, k_chunk: int) -> Blockwise:
        """With blocks that do not straddle chunks, where chunks are long enough to allow it."""
        return Blockwise(_fit(self.q_block, q_chunk), _fit(self.k_block, k_chunk))

    def forward(
        self, scores: Scores, q: jax.Array, k: jax.Array, v: jax.Array, q_tags: Tags, k_tags: Tags
    ) -> tuple[jax.Array, jax.Array]:
        """See `Kernel.forward`."""
        blocks = _Blocks.of(self, scores, q, k, q_tags, k_tags)
        rows = (*blocks.queries(q), *blocks.keys(k, v), *blocks.tags)
        out, lse = lax.map(lambda row: _row_forward(blocks, *row), rows)
        return out[:, : q.shape[1]], lse[:, : q.shape[1]]

    def backward(
        self,
        scores: Scores,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        d_out: jax.Array,
        lse: jax.Array,
        delta: jax.Array,
        q_tags: Tags,
        k_tags: Tags,
        *,
        dtype: Any = jnp.float32,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """See `Kernel.backward`."""
        blocks = _Blocks.of(self, scores, q, k, q_tags, k_tags)
        rows = (*blocks.queries(q, d_out, lse, delta), *blocks.keys(k, v), *blocks.tags)

        def of_row(row: Any) -> tuple:
            gradients = zip(_row_backward(blocks, *row), (q, k, v), strict=True)
            return tuple(d.astype(dtype or x.dtype) for d, x in gradients)

        d_q, d_k, d_v = lax.map(of_row, rows)
        return d_q[:, : q.shape[1]], d_k[:, : k.shape[1]], d_v[:, : k.shape[1]]


def _fit(at_most: int, chunk: int) -> int:
    for parts in range(-(-chunk // at_most), chunk // LEAST_BLOCK + 1):
        if chunk % parts == 0:
            return chunk // parts
    return at_most


class _Blocks(NamedTuple):
    """How the tokens of a call fall into blocks, and what tells them apart."""

    scores: Scores
    q_block: int
    k_block: int
    masks_ids: bool
    tags: tuple[jax.Array, ...]
    """Positions and segment ids of queries and of keys, padded: int32 [batch, sequence]."""

    @classmethod
    def of(
        cls, kernel: Blockwise, scores: Scores, q: Any, k: Any, q_tags: Tags, k_tags: Tags
    ) -> _Blocks:
        q_block, k_block = min(kernel.q_block, q.shape[1]), min(kernel.k_block, k.shape[1])
        masks_ids = q_tags.segment_ids is not None or q.shape[1] % q_block + k.shape[1] % k_block
        tags = []
        for given, block in ((q_tags, q_block), (k_tags, k_block)):
            ids = given.segment_ids
            ids = jnp.ones(given.positions.shape, jnp.int32) if ids is None else ids
            tags += [_padded(x, block) for x in (given.positions, ids)]
        names = {name for x in (q, k, *tags) for name in jax.typeof(x).mat.varying}
        tags = [as_varying(x, names) for x in tags]
        return cls(scores, q_block, k_block, bool(masks_ids), tuple(tags))

    def queries(self, *arrays: jax.Array) -> list[jax.Array]:
        return [_padded(x, self.q_block) for x in arrays]

    def keys(self, *arrays: jax.Array) -> list[jax.Array]:
        return [_padded(x, self.k_block) for x in arrays]


def _padded(x: jax.Array, block: int) -> jax.Array:
    count = -x.shape[1] % block
    return jnp.pad(x, [(0, 0), (0, count)] + [(0, 0)] * (x.ndim - 2)) if count else x


def _zeros(shape: tuple[int, ...], dtype: Any, like: jax.Array, value: float = 0) -> jax.Array:
    return as_varying(jnp.full(shape, value, dtype), jax.typeof(like).mat.varying)


def _row_forward(
    s: _Blocks, q: Any, k: Any, v: Any, q_pos: Any, q_ids: Any, k_pos: Any, k_ids: Any
) -> tuple[jax.Array, jax.Array]:
    """One row of the batch: [sequence, heads, head_dim] and so on."""
    group = q.shape[1] // k.shape[1]
    keys, values = _blocks(k, s.k_block), _blocks(v, s.k_block)
    key_tags = (k_pos.reshape(-1, s.k_block), k_ids.reshape(-1, s.k_block))

    def one_q_block(block: tuple) -> tuple[jax.Array, jax.Array]:
        q, q_pos, q_ids, order, count = block
        rows = q.shape[:2]

        def one_k_block(i: Any, carry: tuple) -> tuple:
            peak, total, acc = carry
            k, v, k_pos, k_ids = _at(order[i], keys, values, *key_tags)
            scores, _ = _scores(s, q, k, q_pos, q_ids, k_pos, k_ids)
            new_peak = jnp.maximum(peak, scores.max(axis=-1))
            shift = jnp.where(new_peak == -jnp.inf, 0.0, new_peak)
            p = jnp.exp(scores - shift[..., None])
            kept = jnp.exp(peak - shift)
            acc = acc * kept[..., None] + _dot("hqt,htd->hqd", p.astype(v.dtype), v)
            return new_peak, total * kept + p.sum(axis=-1), acc

        start = (
            _zeros(rows, jnp.float32, q, -jnp.inf),
            _zeros(rows, jnp.float32, q),
            _zeros((*rows, v.shape[-1]), jnp.float32, q),
        )
        peak, total, acc = lax.fori_loop(0, count, one_k_block, start)
        out = acc / jnp.where(total == 0, 1.0, total)[..., None]
        lse = jnp.where(peak == -jnp.inf, 0.0, peak) + jnp.log(total)
        return out, lse

    order, counts = _visits(s, q_pos, q_ids, k_pos, k_ids)
    q_blocks = _grouped(_blocks(q, s.q_block), group)
    tags = (q_pos.reshape(-1, s.q_block), q_ids.reshape(-1, s.q_block))
    out, lse = lax.map(one_q_block, (q_blocks, *tags, order, counts))
    return _joined(out, group), _joined(lse[..., None], group)[..., 0]


def _row_backward(
    s: _Blocks,
    q: Any,
    d_out: Any,
    lse: Any,
    delta: Any,
    k: Any,
    v: Any,
    q_pos: Any,
    q_ids: Any,
    k_pos: Any,
    k_ids: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    group = q.shape[1] // k.shape[1]
    keys, values = _blocks(k, s.k_block), _blocks(v, s.k_block)
    key_tags = (k_pos.reshape(-1, s.k_block), k_ids.reshape(-1, s.k_block))

    def one_q_block(carry: tuple, block: tuple) -> tuple:
        q, d_out, lse, delta, q_pos, q_ids, order, count = block

        def one_k_block(i: Any, carry: tuple) -> tuple[jax.Array, jax.Array, jax.Array]:
            d_q, d_k, d_v = carry
            j = order[i]
            k, v, k_pos, k_ids = _at(j, keys, values, *key_tags)
            scores, slope = _scores(s, q, k, q_pos, q_ids, k_pos, k_ids)
            p = jnp.where(scores == -jnp.inf, 0.0, jnp.exp(scores - lse[..., None]))
            d_p = _dot("hqd,htd->hqt", d_out, v)
            d_s = (p * (d_p - delta[..., None]) * slope).astype(q.dtype)
            d_q = d_q + _dot("hqt,htd->hqd", d_s, k)
            d_k = _add_at(d_k, j, _dot("hqt,hqd->htd", d_s, q))
            d_v = _add_at(d_v, j, _dot("hqt,hqd->htd", p.astype(d_out.dtype), d_out))
            return d_q, d_k, d_v

        start = (_zeros(q.shape, jnp.float32, q), *carry)
        d_q, d_k, d_v = lax.fori_loop(0, count, one_k_block, start)
        return (d_k, d_v), d_q

    order, counts = _visits(s, q_pos, q_ids, k_pos, k_ids)
    per_query = [_grouped(_blocks(x, s.q_block), group) for x in (q, d_out)]
    per_row = [_grouped(_blocks(x[..., None], s.q_block), group)[..., 0] for x in (lse, delta)]
    tags = (q_pos.reshape(-1, s.q_block), q_ids.reshape(-1, s.q_block))
    start = (_zeros(keys.shape, jnp.float32, k), _zeros(values.shape, jnp.float32, k))
    blocks = (*per_query, *per_row, *tags, order, counts)
    gradients: tuple = lax.scan(one_q_block, start, blocks)
    (d_k, d_v), d_q = gradients
    return _joined(d_q, group), _unblocked(d_k), _unblocked(d_v)


def _visits(
    s: _Blocks, q_pos: Any, q_ids: Any, k_pos: Any, k_ids: Any
) -> tuple[jax.Array, jax.Array]:
    """For each block of queries, the blocks of keys to visit, first in the list, and how many."""
    needed = block_map(
        s.scores.mask,
        BlockBounds.of(q_pos, q_ids, s.q_block, jnp),
        BlockBounds.of(k_pos, k_ids, s.k_block, jnp),
    )
    return jnp.argsort(~needed, axis=1, stable=True), needed.sum(axis=1, dtype=jnp.int32)


def _scores(
    s: _Blocks, q: Any, k: Any, q_pos: Any, q_ids: Any, k_pos: Any, k_ids: Any
) -> tuple[jax.Array, Any]:
    """Scores, float32 [kv_heads, group * q_block, k_block], -inf where not visible.

    And their slope, by which gradients go from the scores to the dot products.
    """
    scores, slope = s.scores.of(_dot("hqd,htd->hqt", q, k))
    visible = s.scores.mask.visible(q_pos[:, None], k_pos[None, :])
    if s.masks_ids:
        visible &= (q_ids[:, None] == k_ids[None, :]) & (k_ids[None, :] != 0)
    visible = jnp.broadcast_to(visible, (s.q_block, s.k_block))
    visible = jnp.tile(visible, (q.shape[1] // s.q_block, 1))
    return jnp.where(visible, scores, -jnp.inf), slope


def _dot(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)


def _at(index: jax.Array, *blocks: jax.Array) -> list[jax.Array]:
    return [lax.dynamic_index_in_dim(x, index, keepdims=False) for x in blocks]


def _add_at(x: jax.Array, index: jax.Array, value: jax.Array) -> jax.Array:
    return lax.dynamic_update_index_in_dim(x, _at(index, x)[0] + value, index, 0)


def _blocks(x: jax.Array, block: int) -> jax.Array:
    """[sequence, heads, ...] as [blocks, heads, block, ...]."""
    return x.reshape(-1, block, *x.shape[1:]).swapaxes(1, 2)


def _unblocked(x: jax.Array) -> jax.Array:
    return x.swapaxes(1, 2).reshape(-1, x.shape[1], *x.shape[3:])


def _grouped(x: jax.Array, group: int) -> jax.Array:
    """[blocks, heads, block, ...] as [blocks, kv_heads, group * block, ...]."""
    return x.reshape(x.shape[0], x.shape[1] // group, -1, *x.shape[3:])


def _joined(x: jax.Array, group: int) -> jax.Array:
    """[blocks, kv_heads, group * block, ...] as [sequence, heads, ...]."""
    return _unblocked(x.reshape(x.shape[0], x.shape[1] * group, -1, *x.shape[3:]))
