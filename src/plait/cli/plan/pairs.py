"""The (query, key) pairs between any two ranks, for causal packs of documents: those that are seen,
exactly, and those in the tiles that a kernel computes.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from plait.attention.kernels import Blockwise
from plait.layout import Layout
from plait.mask import BlockBounds, Causal, block_map

SMALLEST_BLOCK, RANKS_PER_FRAGMENT = 16, 8
"""How many fragments make a block. Within blocks pairs are added up one by one, between blocks by a
product of matrices; so both take about as long."""

MOST_TILES = 2**22
"""Looked at in one go."""


def pairs_between_ranks(layout: Layout, segment_ids: np.ndarray) -> np.ndarray:
    """How many keys of each rank the queries of each rank see, under a causal mask.

    A document is cut into fragments, each the longest run that one rank holds. A query sees its
    own fragment up to itself and all fragments of its document before.

    Args:
      layout: any layout.
      segment_ids: integers in source order, [sequence]; each id is one run, 0 is padding.

    Returns:
      int64 [ranks of queries, ranks of keys]. Sums over keys are `Layout.work`.

    Raises:
      ValueError: a sequence length that the layout does not accept.

    >>> from plait import Contiguous, Zigzag
    >>> pairs_between_ranks(Contiguous(2), np.array([1, 1, 1, 1, 1, 2, 2, 0])).tolist()
    [[10, 0], [4, 4]]
    >>> pairs_between_ranks(Zigzag(2), np.ones(8, int)).tolist()
    [[10, 8], [8, 10]]
    """
    ranks = layout.ranks
    rank, size, document = _fragments(layout, np.asarray(segment_ids))
    if not rank.size:
        return np.zeros((ranks, ranks), np.int64)
    place = _places(document)
    within = place % max(ranks // RANKS_PER_FRAGMENT, SMALLEST_BLOCK)
    begins = within == 0
    block = np.cumsum(begins) - 1
    blocks = int(block[-1]) + 1
    held = np.bincount(block * ranks + rank, size, blocks * ranks).reshape(blocks, ranks)
    before = np.cumsum(held, axis=0) - held
    before -= before[block[place == 0]][document[begins]]
    pairs = held.T @ before  # float64: exact below 2**53: up to 2**26 tokens

    bins = ranks * ranks
    flat = np.bincount(rank * (ranks + 1), size * (size + 1) / 2, bins)
    for back in range(1, int(within.max()) + 1):
        later = np.flatnonzero(within >= back)
        earlier = later - back
        flat += np.bincount(rank[later] * ranks + rank[earlier], size[later] * size[earlier], bins)
    return (pairs + flat.reshape(ranks, ranks)).astype(np.int64)


def tiles_between_ranks(layout: Layout, segment_ids: np.ndarray, kernel: Blockwise) -> np.ndarray:
    """How many pairs are in the tiles that a kernel computes for the queries of each rank.

    By the rule of `plait.count_blocks`. A tile that is partly seen is computed whole, so that this
    is more than the pairs that are seen: by little where a rank holds long runs, and by much where
    its blocks of queries and keys hold pieces of many documents.

    Args:
      kernel: has the blocks; the last of a rank may have less tokens.
      Others as in `pairs_between_ranks`.

    Returns:
      int64 [ranks of queries, ranks of keys].

    >>> from plait import Contiguous, Striped
    >>> ids = np.array([1, 1, 1, 1, 2, 2, 2, 2])
    >>> tiles_between_ranks(Contiguous(2), ids, Blockwise(2, 2)).tolist()
    [[12, 0], [0, 12]]
    >>> tiles_between_ranks(Striped(2), ids, Blockwise(2, 2)).tolist()
    [[8, 8], [8, 8]]
    """
    ids = np.asarray(segment_ids)
    length, ranks = layout.check_length(ids.size), layout.ranks
    share = length // ranks
    positions = layout.positions(length)

    def bounds(block: int) -> BlockBounds:
        padding = [(0, 0), (0, -share % block)]
        at, of = (np.pad(x.reshape(ranks, -1), padding) for x in (positions, ids[positions]))
        return BlockBounds.of(at.reshape(-1), of.reshape(-1), block, np)

    q_block, k_block = (min(block, share) for block in (kernel.q_block, kernel.k_block))
    q, k = bounds(q_block), bounds(k_block)
    count, step = q.most.size, max(MOST_TILES // k.most.size, 1)
    tiles = np.concatenate(
        [
            block_map(Causal(), _slice(q, start, start + step), k)
            .reshape(-1, ranks, k.most.size // ranks)
            .sum(axis=2)
            for start in range(0, count, step)
        ]
    )
    return tiles.reshape(ranks, -1, ranks).sum(axis=1) * (q_block * k_block)


def _slice(bounds: BlockBounds, start: int, stop: int) -> BlockBounds:
    return BlockBounds(*(getattr(bounds, f.name)[start:stop] for f in dataclasses.fields(bounds)))


def _fragments(layout: Layout, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each fragment, in source order: its rank, its tokens, and its document, from 0."""
    length = layout.check_length(ids.size)
    holder = np.empty(length, np.int64)
    holder[layout.positions(length)] = np.repeat(np.arange(layout.ranks), length // layout.ranks)
    ends_document = np.diff(ids) != 0
    cuts = np.flatnonzero(ends_document | (np.diff(holder) != 0)) + 1
    starts = np.concatenate([[0], cuts])
    sizes = np.diff(np.concatenate([starts, [length]]))
    is_real = ids[starts] != 0
    starts, sizes = starts[is_real], sizes[is_real]
    document = np.concatenate([[0], np.cumsum(np.diff(ids[starts]) != 0)])
    return holder[starts], sizes, document[: starts.size]


def _places(document: np.ndarray) -> np.ndarray:
    """The place of each fragment within its document, from 0."""
    index = np.arange(document.size)
    is_first = np.concatenate([[True], np.diff(document) != 0])
    return index - np.maximum.accumulate(np.where(is_first, index, 0))
