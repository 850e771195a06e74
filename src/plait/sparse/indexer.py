"""The lightning indexer of DeepSeek-V3.2: which keys a query attends to.

Its scores are I[t, s] = sum over heads h of w[t, h] * relu(q[t, h] . k[s]), in float32
(DeepSeek-V3.2, arXiv 2512.02556, equation 1).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from plait.exchange import all_gather, gather_shards, restore
from plait.layout import Layout, Placed, at_least_one
from plait.mask import BlockBounds, Causal, block_map
from plait.mesh import AnyMesh, Axes, AxisName, as_varying
from plait.names import GATHERED_KEYS
from plait.positions import slots_of_positions
from plait.sparse.place import as_positions, own_positions, place, slots_by_position
from plait.tree import as_int32

Q_BLOCK, K_BLOCK = 64, 2048
"""Tokens in a block of scores: 32 MiB of products at 64 heads."""


def select(
    q: jax.Array,
    k: jax.Array,
    w: jax.Array,
    layout: Layout,
    *,
    top_k: int,
    axis_name: AxisName | None = None,
    batch_axes: AxisName | None = None,
    segment_ids: jax.Array | None = None,
    source_positions: jax.Array | None = None,
    q_block: int = Q_BLOCK,
    k_block: int = K_BLOCK,
    mesh: AnyMesh | None = None,
    local: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The `top_k` keys with the best index scores for each query, as source positions.

    A query chooses from the keys at or before its source position, of its own document. Of equal
    scores (0.0 and -0.0 are equal) the earlier position is the better; a NaN, as in
    `torch.topk`, is better than any number. So the result is one set, whatever the layout, the
    number of ranks and the sizes of the blocks.

    Args:
      q: [batch, sequence, heads, dim]: float32, bfloat16, float16 or int8. Products of int8 are
        exact; scales of quantisation belong into w.
      k: [batch, sequence, dim], of the dtype of q: one head for all.
      w: [batch, sequence, heads], the weight of each head, taken as float32.
      layout: the layout of the sequence axis.
      top_k: how many keys a query keeps at most.
      axis_name, mesh, local: as in `plait.attention`.
      batch_axes: the mesh axes that the batch is sharded over, used outside `jax.shard_map`, where
        every axis of the mesh is made manual.
      segment_ids: integers [batch, sequence] in the order of the layout; 0 is padding, which
        selects nothing and is not selected.
      source_positions: int32 [sequence] or [batch, sequence] in the order of the arrays, for
        layouts that change with every batch; they replace those of `layout`.
      q_block, k_block: tokens in a block of queries and of keys. Memory grows with heads *
        q_block * k_block, work with what blocks hold beyond the diagonal.

    Returns:
      (positions, counts): int32 [batch, sequence, top_k], the best first, -1 beyond the last where
      fewer keys are visible; and int32 [batch, sequence], how many there are. Laid out as q is. No
      gradients; those of the scores come from `index_scores`.

    Communicates one all-gather of k and, where they are given, of the segment ids and positions.
    Key blocks that no query of a block sees are skipped. Memory is linear in the sequence.

    Raises:
      ValueError: shapes, lengths, layouts and meshes that do not fit together, by name.

    >>> import jax.numpy as jnp
    >>> from plait import Zigzag
    >>> q, w = jnp.ones((1, 4, 1, 1)), jnp.ones((1, 4, 1))
    >>> k = jnp.array([1.0, 3.0, 1.0, 2.0])[None, :, None]  # source positions 0, 3, 1, 2
    >>> best, counts = select(q, k, w, Zigzag(2), top_k=2)
    >>> best[0].tolist(), counts[0].tolist()
    ([[0, -1], [3, 2], [0, 1], [2, 0]], [1, 2, 2, 2])
    """
    _check_indexer(q, k, w)
    sizes = [at_least_one(n, s) for n, s in (("q_block", q_block), ("k_block", k_block))]
    call = _Select(layout, at_least_one("top_k", top_k), *sizes)
    ids = None if segment_ids is None else as_int32(segment_ids, "segment_ids")
    positions = as_positions(source_positions, q.shape[0])
    arrays = {"q": q, "k": k, "w": w, "segment_ids": ids, "source_positions": positions}
    best, counts = place(
        call,
        arrays,
        axis_name=axis_name,
        batch_axes=batch_axes,
        mesh=mesh,
        local=local,
        what="select",
    )
    return best, counts


@dataclasses.dataclass(frozen=True)
class _Select:
    layout: Layout
    top_k: int
    q_block: int
    k_block: int

    def run(self, axes: Axes | None, q: Any, k: Any, w: Any, ids: Any, positions: Any) -> tuple:
        q, k, w = (lax.stop_gradient(x) for x in (q, k, w))
        batch, tokens = q.shape[:2]
        k, k_ids = self._in_source_order(k, ids, positions, axes)
        if positions is None:
            positions = own_positions(self.layout, k.shape[1], axes, batch)
        if ids is None:
            ids = jnp.ones((batch, tokens), jnp.int32)
        queries = [_padded(x, self.q_block) for x in (q, w, positions, ids)]
        keys = [_padded(x, self.k_block) for x in (k, k_ids)]
        rows = (*queries, *keys)
        names = {name for x in rows for name in jax.typeof(x).mat.varying}
        rows = tuple(as_varying(x, names) for x in rows)
        best = lax.map(lambda row: self._of_row(*row), rows)[:, :tokens]
        return best, (best >= 0).sum(axis=-1, dtype=jnp.int32)

    def _in_source_order(self, k: Any, ids: Any, positions: Any, axes: Axes | None) -> tuple:
        """The keys of all ranks and their segment ids, [batch, length, ...]."""
        batch, length = k.shape[0], k.shape[1] * (1 if axes is None else axes.size)
        names = None if axes is None else axes.names
        if positions is None and not isinstance(self.layout, Placed):
            whole = functools.partial(restore, local=True) if axes is None else all_gather
            given = (k,) if ids is None else (k, ids)
            k, *rest = (whole(x, self.layout, axis=1, axis_name=names) for x in given)
            return k, rest[0] if rest else jnp.ones((batch, length), jnp.int32)
        # Any order: tokens are looked up one by one.
        if positions is None:
            positions = own_positions(self.layout, length, axes, batch)
        slots = slots_by_position(positions, axes)
        if names is not None:
            k = gather_shards(k, 1, names, GATHERED_KEYS)
            ids = None if ids is None else gather_shards(ids, 1, names)
        k = jnp.take_along_axis(k, slots[..., None], axis=1)
        ids = jnp.ones_like(slots) if ids is None else jnp.take_along_axis(ids, slots, axis=1)
        return k, jnp.where(slots < 0, 0, ids)

    def _of_row(self, q: Any, w: Any, q_pos: Any, q_ids: Any, k: Any, k_ids: Any) -> jax.Array:
        """One row of the batch: [sequence, top_k], in blocks of whole queries and keys."""
        bounds = BlockBounds.of(q_pos, q_ids, self.q_block, jnp)
        k_pos = lax.iota(jnp.int32, k.shape[0])
        needed = block_map(Causal(), bounds, BlockBounds.of(k_pos, k_ids, self.k_block, jnp))
        order = jnp.argsort(~needed, axis=1, stable=True)
        counts = needed.sum(axis=1, dtype=jnp.int32)
        keys = [_in_blocks(x, self.k_block) for x in (k, k_pos, k_ids)]

        def of_q_block(block: tuple) -> jax.Array:
            q, w, q_pos, q_ids, order, count = block

            def visit(i: Any, best: tuple) -> tuple:
                index = order[i]
                k, k_pos, k_ids = (lax.dynamic_index_in_dim(x, index, keepdims=False) for x in keys)
                sees = (k_pos <= q_pos[:, None]) & (k_ids == q_ids[:, None]) & (k_ids != 0)
                return _best_of(best, _scores(q, k, w), jnp.where(sees, k_pos, -1), self.top_k)

            names = jax.typeof(q_pos).mat.varying
            start = (
                as_varying(jnp.full((self.q_block, self.top_k), jnp.inf), names),
                as_varying(jnp.full((self.q_block, self.top_k), -1, jnp.int32), names),
            )
            return lax.fori_loop(0, count, visit, start)[1]

        queries = [_in_blocks(x, self.q_block) for x in (q, w, q_pos, q_ids)]
        return lax.map(of_q_block, (*queries, order, counts)).reshape(-1, self.top_k)


def _best_of(best: tuple, scores: jax.Array, positions: jax.Array, top_k: int) -> tuple:
    """The best keys of those so far and others: their scores, negated, and positions.

    A position of -1 is no key. They come sorted by score and then position, so that it does not
    matter in which order keys arrive.
    """
    scores = jnp.where(jnp.isnan(scores), jnp.inf, scores)
    costs = jnp.where(positions < 0, jnp.inf, -scores)  # to `lax.sort` -0.0 and 0.0 are equal
    both = [jnp.concatenate(pair, axis=1) for pair in zip(best, (costs, positions), strict=True)]
    ordered = lax.sort(both, dimension=1, num_keys=2, is_stable=False)
    return tuple(x[:, :top_k] for x in ordered)


def _scores(q: jax.Array, k: jax.Array, w: jax.Array) -> jax.Array:
    """The index scores of [queries, heads, dim] and [keys, dim]: float32 [queries, keys]."""
    return _weighted(_products("thd,sd->ths", q, k), w)


def _weighted(products: jax.Array, w: jax.Array) -> jax.Array:
    return (jnp.maximum(products, 0) * w.astype(jnp.float32)[..., None]).sum(axis=1)


def _products(equation: str, q: jax.Array, k: jax.Array) -> jax.Array:
    """In float32; of integers exactly, and of float32 in full."""
    if jnp.issubdtype(q.dtype, jnp.integer):
        return jnp.einsum(equation, q, k, preferred_element_type=jnp.int32).astype(jnp.float32)
    return jnp.einsum(
        equation, q, k, preferred_element_type=jnp.float32, precision=lax.Precision.HIGHEST
    )


def _padded(x: jax.Array, block: int) -> jax.Array:
    """Up to whole blocks; what is added has segment id 0."""
    return jnp.pad(x, [(0, 0), (0, -x.shape[1] % block)] + [(0, 0)] * (x.ndim - 2))


def _in_blocks(x: jax.Array, block: int) -> jax.Array:
    return x.reshape(-1, block, *x.shape[1:])


def _check_indexer(q: Any, k: Any, w: Any) -> None:
    wanted = {"q": (q, 4, "heads, dim]"), "k": (k, 3, "dim]"), "w": (w, 3, "heads]")}
    for name, (x, rank, last) in wanted.items():
        if x.ndim != rank:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}; it needs to be [batch, sequence, {last}"
            )
    if q.dtype != k.dtype:
        raise ValueError(f"q is {q.dtype} and k {k.dtype}; both need the same dtype")
    if not (jnp.issubdtype(q.dtype, jnp.floating) or q.dtype == jnp.int8):
        raise ValueError(f"q and k are {q.dtype}; they need to be float32, bfloat16 or int8")
    for name, size, other, of in (
        ("k", k.shape[2], q.shape[3], "dim"),
        ("w", w.shape[2], q.shape[2], "heads"),
    ):
        if size != other:
            raise ValueError(f"{name} has {size} {of} and q {other}; both need the same")


def index_scores(
    q: jax.Array,
    k: jax.Array,
    w: jax.Array,
    positions: jax.Array,
    layout: Layout,
    *,
    axis_name: AxisName | None = None,
    batch_axes: AxisName | None = None,
    source_positions: jax.Array | None = None,
    q_block: int = 16,
    mesh: AnyMesh | None = None,
    local: bool = False,
) -> jax.Array:
    """The index scores of selected keys, with gradients: what the indexer is trained by.

    Args:
      q, k, w: as in `select`, float.
      positions: int32 [batch, sequence, selected] from `select`; -1 is no key.
      q_block: queries whose keys are in memory at once.
      Others as in `select`.

    Returns:
      float32 [batch, sequence, selected]; -inf where there is no key.

    Communicates an all-gather of k; backward a reduce-scatter of its gradient.

    >>> import jax.numpy as jnp
    >>> from plait import Contiguous
    >>> x = jnp.array([1.0, -2.0])[None, :, None]
    >>> index_scores(x[..., None], x, x, jnp.array([[[0, -1], [1, 0]]]), Contiguous(1))[0].tolist()
    [[1.0, -inf], [-8.0, -0.0]]
    """
    _check_indexer(q, k, w)
    if not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(f"q and k are {q.dtype}; index_scores needs floats, such as bfloat16")
    call = _IndexScores(layout, at_least_one("q_block", q_block))
    arrays = {
        "q": q,
        "k": k,
        "w": w,
        "positions": as_int32(positions, "positions"),
        "source_positions": as_positions(source_positions, q.shape[0]),
    }
    (scores,) = place(
        call,
        arrays,
        axis_name=axis_name,
        batch_axes=batch_axes,
        mesh=mesh,
        local=local,
        what="index_scores",
    )
    return scores


@dataclasses.dataclass(frozen=True)
class _IndexScores:
    layout: Layout
    q_block: int

    def run(self, axes: Axes | None, q: Any, k: Any, w: Any, chosen: Any, positions: Any) -> tuple:
        tokens = q.shape[1]
        slots = slots_of(self.layout, chosen, positions, tokens, axes)
        if axes is not None:
            k = gather_shards(k, 1, axes.names, GATHERED_KEYS)
        k = k.astype(jnp.float32)  # so that its gradient is summed in float32
        names = {name for x in (q, k, w, slots) for name in jax.typeof(x).mat.varying}
        q, k, w, slots = (as_varying(x, names) for x in (q, k, w, slots))
        blocks = [_padded(x, self.q_block) for x in (q, w)]
        absent = _padded(slots + 1, self.q_block) - 1

        def of_row(row: tuple) -> jax.Array:
            q, w, slots, k = row

            @jax.checkpoint
            def of_block(block: tuple) -> jax.Array:
                q, w, slots = block
                rows = k[jnp.maximum(slots, 0)].astype(q.dtype)
                scores = _weighted(_products("thd,tsd->ths", q, rows), w)
                return jnp.where(slots < 0, -jnp.inf, scores)

            found = lax.map(of_block, tuple(_in_blocks(x, self.q_block) for x in (q, w, slots)))
            return found.reshape(-1, slots.shape[-1])

        return (lax.map(of_row, (*blocks, absent, k))[:, :tokens],)


def slots_of(
    layout: Layout, chosen: jax.Array, positions: Any, tokens: int, axes: Axes | None
) -> jax.Array:
    """The slots of chosen source positions, -1 where there is none: int32, shaped as `chosen`.

    By arithmetic; by a table, made on the device, only where positions are data.
    """
    length = tokens * (1 if axes is None else axes.size)
    inside = (chosen >= 0) & (chosen < length)
    clipped = jnp.where(inside, chosen, 0).astype(jnp.int32)
    if positions is None:
        slots = slots_of_positions(layout, length, clipped)
    else:
        table = slots_by_position(positions, axes)
        slots = jax.vmap(lambda row, index: row[index])(table, clipped)
    return jnp.where(inside, slots, -1)


def count_blocks(
    layout: Layout,
    sequence_length: int,
    *,
    segment_ids: np.ndarray | None = None,
    q_block: int = Q_BLOCK,
    k_block: int = K_BLOCK,
) -> tuple[np.ndarray, int]:
    """The blocks of index scores that `select` computes on each rank, and of how many.

    Counted on the host by the rule that `select` itself follows.

    Args:
      segment_ids: integers [sequence] in source order.
      Others as in `select`.

    Returns:
      (computed, total): int64 [ranks], and the number of blocks of one rank, skipped ones included.

    >>> from plait import Contiguous, Zigzag
    >>> for layout in (Contiguous(2), Zigzag(2)):
    ...     count_blocks(layout, 1024, k_block=64)[0].tolist()
    [36, 100]
    [68, 68]
    """
    length = layout.check_length(sequence_length)
    ids = np.ones(length, np.int32)
    if segment_ids is not None:
        ids = as_int32(np.asarray(segment_ids), "segment_ids")
        if ids.shape != (length,):
            raise ValueError(f"segment_ids has shape {ids.shape}; it needs to be ({length},)")
    positions = layout.positions(length)
    keys = _host_bounds(np.arange(length, dtype=np.int32), ids, k_block)
    needed = [
        block_map(Causal(), _host_bounds(mine, ids[mine], q_block), keys)
        for mine in positions.reshape(layout.ranks, -1)
    ]
    return np.array([int(n.sum()) for n in needed]), int(needed[0].size)


def _host_bounds(positions: np.ndarray, ids: np.ndarray, block: int) -> BlockBounds:
    padding = (0, -positions.size % block)
    return BlockBounds.of(np.pad(positions, padding), np.pad(ids, padding), block, np)
