"""How much attention work the chunks of a sequence are: exact pairs, or tiles of a kernel."""

from __future__ import annotations

from typing import Any

import numpy as np

from plait.layout import Contiguous, at_least_one
from plait.mask import BlockBounds, Causal, Mask, check_mask
from plait.packing.checks import as_ids, as_weight
from plait.packing.needed import keys_needed


def chunk_work(
    segment_ids: Any,
    chunk: int,
    *,
    mask: Mask | None = None,
    tile: tuple[int, int] | None = None,
    token_work: float | np.ndarray = 0,
    key_work: float = 0,
) -> np.ndarray:
    """The work of each chunk of a sequence, counted in (query, key) pairs.

    Args:
      segment_ids: integers in source order, [sequence] or [batch, sequence], whose rows add up; 0
        is padding.
      chunk: tokens in a chunk; the sequence is a multiple.
      mask: a `plait.Mask`; None: `Causal()`.
      tile: None counts the pairs that queries see. (q_block, k_block) counts the pairs of all
        tiles that a kernel computes with such blocks, of which a partial one costs a whole one:
        what `plait.count_blocks` counts, where a chunk is a multiple of both blocks.
      token_work: work beside attention, in the same unit: a number for each token that is not
        padding, or an array of the shape of `segment_ids` with each token's own, such as for heads
        that run on response tokens only. What every slot costs, padding too, as dense layers do,
        is the same for each rank and needs no weight.
      key_work: work of receiving one token's keys, in the same unit, counted for every token
        outside the chunk that its queries see. A rank receives no more than the sum over its
        chunks, and less where several see the same keys (`keys_needed` is exact). All-gathers and
        rings bring every rank everything whatever it sees, and need no weight.

    Returns:
      int64 [chunks]; float64 where a weight is a float. With `chunk` the whole sequence, its one
      entry is the work of the row.

    Raises:
      ValueError: a sequence that is no multiple of the chunk or a chunk that is none of the tile,
        weights that are negative, not finite or of another shape, and for tiles ids that fall.

    >>> ids = np.array([1, 1, 1, 2, 2, 2, 2, 0])
    >>> chunk_work(ids, 2).tolist(), chunk_work(ids, 2, tile=(2, 2)).tolist()
    ([3, 4, 5, 4], [4, 8, 8, 12])
    >>> chunk_work(ids, 2, token_work=10).tolist(), chunk_work(ids, 2, key_work=10).tolist()
    ([23, 24, 25, 14], [3, 24, 15, 34])
    """
    ids = as_ids(segment_ids)
    attention = attention_work(ids, chunk, mask, tile)
    return attention + other_work(ids, chunk, mask, token_work, key_work)


def attention_work(
    ids: np.ndarray, chunk: int, mask: Mask | None, tile: tuple[int, int] | None
) -> np.ndarray:
    """Pairs that are seen, or computed in tiles, of each chunk: int64 [chunks]."""
    mask = Causal() if mask is None else mask
    rows = np.atleast_2d(ids)
    chunk = at_least_one("chunk", chunk)
    length = rows.shape[1]
    check_mask(mask, length)
    if length % chunk:
        raise ValueError(
            f"the sequence has length {length}; chunks of {chunk} tokens need a multiple of "
            f"{chunk}: pad to {-(-length // chunk) * chunk}"
        )
    if tile is None:
        seen = [mask.keys_seen(row) for row in rows]
    else:
        blocks = as_tile(tile)
        check_tile(chunk, blocks)
        seen = [_tile_pairs(row, mask, *blocks) for row in rows]
    return np.sum(seen, axis=0).reshape(length // chunk, -1).sum(axis=1)


def other_work(
    ids: np.ndarray, chunk: int, mask: Mask | None, token_work: Any, key_work: Any
) -> np.ndarray:
    """The work beside attention of each chunk: int64 or float64 [chunks]."""
    tokens = as_weight("token_work", token_work, ids.shape)
    tokens = tokens if tokens.ndim else tokens * (ids != 0)
    keys = as_weight("key_work", key_work)
    work = np.atleast_2d(tokens).sum(axis=0).reshape(-1, chunk).sum(axis=1)
    if keys:
        work = work + keys * keys_needed(Contiguous(work.size), ids, mask=mask)
    return work


def as_tile(tile: Any) -> tuple[int, int]:
    """The blocks of a tile, checked."""
    try:
        q_block, k_block = tile
    except (TypeError, ValueError):
        raise ValueError(
            f"tile is {tile!r}; it needs to be (q_block, k_block), such as (256, 256), or None"
        ) from None
    return at_least_one("q_block of tile", q_block), at_least_one("k_block of tile", k_block)


def check_tile(chunk: int, tile: tuple[int, int]) -> None:
    """ValueError where blocks would straddle chunks: their number would depend on the layout."""
    step = int(np.lcm(*tile))
    if chunk % step:
        raise ValueError(
            f"chunk is {chunk} tokens; tiles of {tile[0]} by {tile[1]} need a multiple of {step}, "
            f"such as {-(-chunk // step) * step}"
        )


def union_length(begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """How much the runs begin <= x < end cover together: of [runs, ...], over the first axis."""
    order = np.argsort(begins, axis=0, kind="stable")
    covered, reached = np.zeros(begins.shape[1:], np.int64), np.full(begins.shape[1:], -1, np.int64)
    for begin, end in zip(
        np.take_along_axis(begins, order, 0), np.take_along_axis(ends, order, 0), strict=True
    ):
        covered += np.maximum(end - np.maximum(begin, reached), 0)
        reached = np.maximum(reached, end)
    return covered


def _tile_pairs(ids: np.ndarray, mask: Mask, q_block: int, k_block: int) -> np.ndarray:
    """Pairs in the tiles of each block of queries, int64 [q blocks], by the rule of `block_map`.

    Blocks of keys that may be seen are runs of blocks, since positions and ids ascend: so they
    are counted from the runs' ends, not block by block.
    """
    real = ids[ids != 0]
    falls = np.flatnonzero(np.diff(real) < 0)
    if falls.size:
        raise ValueError(
            f"segment id {real[falls[0] + 1]} follows {real[falls[0]]}; to count tiles ids need to "
            "ascend: number the documents 1, 2, 3 in turn"
        )
    positions = np.arange(ids.size, dtype=np.int32)
    q, k = (BlockBounds.of(positions, ids, block, np) for block in (q_block, k_block))
    has_keys, has_queries = k.most >= 0, q.most >= 0
    least, most = k.least[has_keys], k.most[has_keys]
    q_least, q_most = q.least[has_queries], q.most[has_queries]
    same_begin = np.searchsorted(k.most_id[has_keys], q.least_id[has_queries], side="left")
    same_end = np.searchsorted(k.least_id[has_keys], q.most_id[has_queries], side="right")
    begins, ends = [], []
    for (first, _), (_, last) in zip(
        mask.intervals(q_least, np), mask.intervals(q_most, np), strict=True
    ):
        begin = 0 if first is None else np.searchsorted(most, first, side="left")
        end = least.size if last is None else np.searchsorted(least, last, side="right")
        begins.append(np.maximum(begin, same_begin))
        ends.append(np.minimum(end, same_end))
    tiles = np.zeros(q.most.size, np.int64)
    tiles[has_queries] = union_length(np.stack(begins), np.stack(ends))
    return tiles * q_block * k_block
