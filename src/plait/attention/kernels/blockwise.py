"""Attention kernels: exact attention of some queries over some keys, given their positions.

A kernel knows source positions and segment ids and nothing of meshes, ranks or slots.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from plait.layout import at_least_one
from plait.mask import BlockBounds, Mask, block_map
from plait.mesh import as_varying
from plait.names import ATTENDED, named

LEAST_BLOCK = 32


@dataclasses.dataclass(frozen=True)
class Blockwise:
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

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        mask: Mask,
        q_positions: jax.Array,
        k_positions: jax.Array,
        q_segment_ids: jax.Array | None,
        k_segment_ids: jax.Array | None,
        scale: float,
    ) -> tuple[jax.Array, jax.Array]:
        """Exact attention of the queries over the keys.

        Args:
          q: [batch, queries, heads, head_dim].
          k: [batch, keys, kv_heads, head_dim]; kv_heads divides heads.
          v: [batch, keys, kv_heads, v_head_dim].
          q_positions, k_positions: int32 source positions, [batch, queries] and [batch, keys].
          q_segment_ids, k_segment_ids: int32 of the same shapes, or both None.

        Returns:
          (out, lse): out [batch, queries, heads, v_head_dim] in the dtype of q; the log of the
          sum of exponentials, float32 [batch, queries, heads]. A query that sees nothing has out
          0 and lse -inf. Both have gradients in q, k and v; there is no forward mode.
        """
        length, masks_ids = q.shape[1], q_segment_ids is not None
        if q_segment_ids is None or k_segment_ids is None:
            q_segment_ids = jnp.ones(q_positions.shape, jnp.int32)
            k_segment_ids = jnp.ones(k_positions.shape, jnp.int32)
        else:  # what padding holds, NaN too, must reach nobody
            q = jnp.where((q_segment_ids != 0)[..., None, None], q, 0)
            k = jnp.where((k_segment_ids != 0)[..., None, None], k, 0)
            v = jnp.where((k_segment_ids != 0)[..., None, None], v, 0)
        kernel = Blockwise(min(self.q_block, length), min(self.k_block, k.shape[1]))
        q_pad, k_pad = -length % kernel.q_block, -k.shape[1] % kernel.k_block
        queries = [_pad(x, q_pad) for x in (q, q_positions, q_segment_ids)]
        keys = [_pad(x, k_pad) for x in (k, v, k_positions, k_segment_ids)]
        names = {name for x in (*queries, *keys) for name in jax.typeof(x).mat.varying}
        (q, q_pos, q_ids), (k, v, k_pos, k_ids) = (
            [as_varying(x, names) for x in arrays] for arrays in (queries, keys)
        )
        masks_ids |= bool(q_pad or k_pad)
        statics = _Statics(kernel.q_block, kernel.k_block, mask, scale, masks_ids)
        out, lse = _attend(statics, q, k, v, q_pos, q_ids, k_pos, k_ids)
        return out[:, :length], lse[:, :length]


def _fit(at_most: int, chunk: int) -> int:
    for parts in range(-(-chunk // at_most), chunk // LEAST_BLOCK + 1):
        if chunk % parts == 0:
            return chunk // parts
    return at_most


def _pad(x: jax.Array, count: int) -> jax.Array:
    return jnp.pad(x, [(0, 0), (0, count)] + [(0, 0)] * (x.ndim - 2)) if count else x


@dataclasses.dataclass(frozen=True)
class _Statics:
    q_block: int
    k_block: int
    mask: Mask
    scale: float
    masks_ids: bool


def _zeros(shape: tuple[int, ...], dtype: Any, like: jax.Array, value: float = 0) -> jax.Array:
    return as_varying(jnp.full(shape, value, dtype), jax.typeof(like).mat.varying)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(statics: _Statics, q: Any, k: Any, v: Any, *data: Any) -> tuple[jax.Array, jax.Array]:
    return _attend_forward(statics, q, k, v, *data)[0]


def _attend_forward(statics: _Statics, q: Any, k: Any, v: Any, *data: Any) -> tuple:
    results = lax.map(lambda row: _row_forward(statics, *row), (q, k, v, *data))
    out, lse = (named(x, name) for x, name in zip(results, ATTENDED, strict=True))
    return (out, lse), (q, k, v, out, lse, *data)


def _attend_backward(statics: _Statics, saved: tuple, cotangents: tuple) -> tuple:
    q, k, v, out, lse, *data = saved
    d_out, d_lse = cotangents
    if statics.masks_ids:  # a loss may be undefined where there is no token; it must not spread
        real = data[1] != 0
        d_out, d_lse = (
            jnp.where(real[..., None, None], d_out, 0),
            jnp.where(real[..., None], d_lse, 0),
        )
    delta = jnp.einsum("bshd,bshd->bsh", out, d_out, preferred_element_type=jnp.float32) - d_lse
    rows = (q, k, v, d_out, lse, delta, *data)
    gradients = lax.map(lambda row: _row_backward(statics, *row), rows)
    return (*gradients, *[None] * len(data))


_attend.defvjp(_attend_forward, _attend_backward)


def _row_forward(
    s: _Statics, q: Any, k: Any, v: Any, q_pos: Any, q_ids: Any, k_pos: Any, k_ids: Any
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
            scores = _scores(s, q, k, q_pos, q_ids, k_pos, k_ids)
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
        return out.astype(q.dtype), lse

    order, counts = _visits(s, q_pos, q_ids, k_pos, k_ids)
    q_blocks = _grouped(_blocks(q, s.q_block), group)
    tags = (q_pos.reshape(-1, s.q_block), q_ids.reshape(-1, s.q_block))
    out, lse = lax.map(one_q_block, (q_blocks, *tags, order, counts))
    return _joined(out, group), _joined(lse[..., None], group)[..., 0]


def _row_backward(
    s: _Statics,
    q: Any,
    k: Any,
    v: Any,
    d_out: Any,
    lse: Any,
    delta: Any,
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
            scores = _scores(s, q, k, q_pos, q_ids, k_pos, k_ids)
            p = jnp.where(scores == -jnp.inf, 0.0, jnp.exp(scores - lse[..., None]))
            d_p = _dot("hqd,htd->hqt", d_out, v)
            d_s = (p * (d_p - delta[..., None]) * s.scale).astype(q.dtype)
            d_q = d_q + _dot("hqt,htd->hqd", d_s, k)
            d_k = _add_at(d_k, j, _dot("hqt,hqd->htd", d_s, q))
            d_v = _add_at(d_v, j, _dot("hqt,hqd->htd", p.astype(d_out.dtype), d_out))
            return d_q, d_k, d_v

        start = (_zeros(q.shape, jnp.float32, q), *carry)
        d_q, d_k, d_v = lax.fori_loop(0, count, one_k_block, start)
        return (d_k, d_v), d_q.astype(q.dtype)

    order, counts = _visits(s, q_pos, q_ids, k_pos, k_ids)
    per_query = [_grouped(_blocks(x, s.q_block), group) for x in (q, d_out)]
    per_row = [_grouped(_blocks(x[..., None], s.q_block), group)[..., 0] for x in (lse, delta)]
    tags = (q_pos.reshape(-1, s.q_block), q_ids.reshape(-1, s.q_block))
    start = (_zeros(keys.shape, jnp.float32, k), _zeros(values.shape, jnp.float32, k))
    blocks = (*per_query, *per_row, *tags, order, counts)
    gradients: tuple = lax.scan(one_q_block, start, blocks)
    (d_k, d_v), d_q = gradients
    return _joined(d_q, group), _unblocked(d_k).astype(k.dtype), _unblocked(d_v).astype(v.dtype)


def _visits(
    s: _Statics, q_pos: Any, q_ids: Any, k_pos: Any, k_ids: Any
) -> tuple[jax.Array, jax.Array]:
    """For each block of queries, the blocks of keys to visit, first in the list, and how many."""
    needed = block_map(
        s.mask,
        BlockBounds.of(q_pos, q_ids, s.q_block, jnp),
        BlockBounds.of(k_pos, k_ids, s.k_block, jnp),
    )
    return jnp.argsort(~needed, axis=1, stable=True), needed.sum(axis=1, dtype=jnp.int32)


def _scores(
    s: _Statics, q: Any, k: Any, q_pos: Any, q_ids: Any, k_pos: Any, k_ids: Any
) -> jax.Array:
    """Scaled scores, float32 [kv_heads, group * q_block, k_block]; -inf where not visible."""
    visible = s.mask.visible(q_pos[:, None], k_pos[None, :])
    if s.masks_ids:
        visible &= (q_ids[:, None] == k_ids[None, :]) & (k_ids[None, :] != 0)
    scores = _dot("hqd,htd->hqt", q, k) * s.scale
    visible = jnp.broadcast_to(visible, (s.q_block, s.k_block))
    visible = jnp.tile(visible, (q.shape[1] // s.q_block, 1))
    return jnp.where(visible, scores, -jnp.inf)


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
