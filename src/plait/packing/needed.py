"""The keys of other ranks that a rank's queries see: the least that any strategy could move."""

from __future__ import annotations

from typing import Any

import numpy as np

from plait.layout import Layout
from plait.mask import Causal, Mask, check_mask
from plait.packing.checks import as_ids


def keys_needed(layout: Layout, segment_ids: Any, *, mask: Mask | None = None) -> np.ndarray:
    """How many tokens of other ranks each rank's queries see: the keys that it must receive.

    An all-gather or a ring brings every rank all tokens of the others, sequence * (1 - 1 / ranks)
    of each row; what it brings beyond this count is not looked at.

    Args:
      layout: any layout.
      segment_ids: integers in source order, [sequence] or [batch, sequence], whose rows add up; 0
        is padding.
      mask: a `plait.Mask`; None: `Causal()`.

    Returns:
      int64 [ranks], exact.

    Raises:
      ValueError: a sequence length that the layout does not accept.

    >>> from plait import Contiguous, Zigzag
    >>> ids = np.array([1, 1, 1, 2, 2, 2, 2, 0])
    >>> keys_needed(Contiguous(2), ids).tolist(), keys_needed(Zigzag(2), ids).tolist()
    ([0, 1], [3, 2])
    """
    mask = Causal() if mask is None else mask
    rows = np.atleast_2d(as_ids(segment_ids))
    length = layout.check_length(rows.shape[1])
    check_mask(mask, length)
    rank_of = np.empty(length, np.int64)
    rank_of[layout.positions(length)] = np.repeat(np.arange(layout.ranks), length // layout.ranks)
    return sum(
        (_needed(row, rank_of, layout.ranks, mask) for row in rows), np.zeros(layout.ranks, int)
    )


def _needed(ids: np.ndarray, rank_of: np.ndarray, ranks: int, mask: Mask) -> np.ndarray:
    """Of one row, [ranks].

    Tokens are lined up document by document, padding left out: there, what a query sees by one
    interval of the mask is one run. Places are offset by rank, so that all ranks are on one line.
    """
    length = ids.size
    order = np.argsort(ids, kind="stable")
    order = order[ids[order] != 0]
    if not order.size:
        return np.zeros(ranks, np.int64)
    _, document = np.unique(ids[order], return_inverse=True)
    members = document * (length + 1) + order
    rank, places = rank_of[order], np.arange(order.size)
    base = rank * (length + 1)

    def members_to(position: Any) -> np.ndarray:
        """How many tokens lie, in line, up to a position of each query's document."""
        inside = np.clip(position, -1, length - 1)
        return np.searchsorted(members, document * (length + 1) + inside, side="right")

    begins, ends = [], []
    for first, last in mask.intervals(order, np):
        begin = members_to((0 if first is None else first) - 1)
        end = members_to(length if last is None else last)
        seeing = np.flatnonzero(begin < end)
        # Queries of one rank and document that follow each other see one run, unless it has gaps.
        breaks = (
            (np.diff(rank[seeing]) != 0)
            | (np.diff(document[seeing]) != 0)
            | (begin[seeing[1:]] > end[seeing[:-1]])
        )
        starts = np.concatenate([[True], breaks]) if seeing.size else np.zeros(0, bool)
        stops = np.concatenate([breaks, [True]]) if seeing.size else np.zeros(0, bool)
        begins.append(base[seeing[starts]] + begin[seeing[starts]])
        ends.append(base[seeing[stops]] + end[seeing[stops]])
    begin, end = _merged(np.concatenate(begins), np.concatenate(ends))
    if not begin.size:
        return np.zeros(ranks, np.int64)
    seen = np.bincount(begin // (length + 1), end - begin, ranks)
    starts = np.concatenate([[True], np.diff(rank) != 0])
    stops = np.concatenate([starts[1:], [True]])
    upto = np.concatenate([[0], np.cumsum(end - begin)])

    def covered(x: np.ndarray) -> np.ndarray:
        """How much of the line before x the merged runs cover."""
        run = np.searchsorted(begin, x, side="right") - 1
        return np.where(run < 0, 0, upto[run] + np.minimum(x - begin[run], (end - begin)[run]))

    own = covered((base + places)[stops] + 1) - covered((base + places)[starts])
    return (seen - np.bincount(rank[starts], own, ranks)).astype(np.int64)


def _merged(begins: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The runs begin <= x < end, those that overlap or touch joined, in ascending order."""
    order = np.argsort(begins, kind="stable")
    begins, ends = begins[order], ends[order]
    if not begins.size:
        return begins, ends
    reached = np.maximum.accumulate(ends)
    fresh = np.concatenate([[True], begins[1:] > reached[:-1]])
    return begins[fresh], reached[np.concatenate([fresh[1:], [True]])]
