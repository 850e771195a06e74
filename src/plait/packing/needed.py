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
    interval of the mask is one run. Each rank has a line of its own, all on one number axis.
    """
    line = ids.size + 1
    order = np.argsort(ids, kind="stable")
    order = order[ids[order] != 0]
    rank = rank_of[order]
    begin, end = _merged(*_seen(ids[order], order, rank, line, mask))
    if not begin.size:
        return np.zeros(ranks, np.int64)
    upto = np.concatenate([[0], np.cumsum(end - begin)])

    def covered(x: np.ndarray) -> np.ndarray:
        """How much before x is seen."""
        run = np.searchsorted(begin, x, side="right") - 1
        return np.where(run < 0, 0, upto[run] + np.minimum(x - begin[run], (end - begin)[run]))

    first, last = _ends_of_runs(np.diff(rank) != 0)
    held = rank * line + np.arange(order.size)
    own = covered(held[last] + 1) - covered(held[first])
    seen = np.bincount(begin // line, end - begin, ranks)
    return (seen - np.bincount(rank[first], own, ranks)).astype(np.int64)


def _seen(
    ids: np.ndarray, positions: np.ndarray, rank: np.ndarray, line: int, mask: Mask
) -> tuple[np.ndarray, np.ndarray]:
    """What queries see, lined up: runs begin <= x < end on their ranks' lines, in any order."""
    _, document = np.unique(ids, return_inverse=True)
    members = document * line + positions

    def members_to(position: Any) -> np.ndarray:
        """How many tokens lie, in line, up to a position of each query's document."""
        inside = np.clip(position, -1, line - 2)
        return np.searchsorted(members, document * line + inside, side="right")

    begins, ends = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for first, last in mask.intervals(positions, np):
        begin = members_to((0 if first is None else first) - 1)
        end = members_to(line if last is None else last)
        sees = begin < end
        if not sees.any():
            continue
        begin, end, of, text = begin[sees], end[sees], rank[sees], document[sees]
        # Queries of one rank and document that follow each other see one run, if without gaps.
        apart = (np.diff(of) != 0) | (np.diff(text) != 0) | (begin[1:] > end[:-1])
        one, other = _ends_of_runs(apart)
        begins.append(of[one] * line + begin[one])
        ends.append(of[other] * line + end[other])
    return np.concatenate(begins), np.concatenate(ends)


def _ends_of_runs(apart: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where runs start and where they stop, bool [n], given which neighbours are apart [n - 1]."""
    return np.concatenate([[True], apart]), np.concatenate([apart, [True]])


def _merged(begins: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The runs begin <= x < end, those that overlap or touch joined, in ascending order."""
    if not begins.size:
        return begins, ends
    order = np.argsort(begins, kind="stable")
    begins, reached = begins[order], np.maximum.accumulate(ends[order])
    first, last = _ends_of_runs(begins[1:] > reached[:-1])
    return begins[first], reached[last]
