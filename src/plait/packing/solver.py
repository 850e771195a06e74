"""Equally many chunks for every rank, and work as near to equal as can be.

The problem is multiprocessor scheduling with equal cardinalities: NP-hard, and easy in practice
where a rank holds many chunks. A greedy start, then exchanges of chunks between pairs of ranks,
many pairs at a time. No mask and no documents in here: only the work of each chunk.
"""

from __future__ import annotations

import heapq
import math
from typing import Any

import numpy as np

from plait.layout import at_least_one

_LARGEST_SUM = 2**62
"""Sums of two ranks' work stay within int64."""

_CANDIDATES = 2**17
"""Exchanges weighed in one round: temporaries of a megabyte, which stay in cache."""

_ROUNDS = 400
_SHUFFLES = 10


def assign(works: Any, ranks: int, *, tolerance: float = 1e-4) -> np.ndarray:
    """The rank of each chunk: equally many chunks a rank, the heaviest rank as light as can be.

    Starts from the longest-processing-time rule (Graham, "Bounds on multiprocessing timing
    anomalies", 1969), with room for equally many: chunks in descending order of work, each to the
    least loaded rank that has room. Then exchanges one chunk for one, or two for two, between
    ranks, until the heaviest is within `tolerance` of `lower_bound`, or no exchange that it tries
    helps, or after 400 rounds. Deterministic.

    Args:
      works: the work of each chunk, in any unit: integers or floats, [chunks].
      ranks: how many ranks; the chunks are a multiple.
      tolerance: how far above the lower bound is near enough, as a fraction.

    Returns:
      int64 [chunks], the rank of each.

    Raises:
      ValueError: works that are negative, not finite, or too large to add up in int64, a number of
        chunks that does not divide among the ranks, and a negative tolerance.

    >>> works = np.array([8, 7, 6, 5, 4, 2, 2, 2])
    >>> of = assign(works, ranks=2)
    >>> np.bincount(of).tolist(), np.bincount(of, works).tolist()
    ([4, 4], [18.0, 18.0])
    """
    works, ranks = _checked(works, ranks)
    if not tolerance >= 0:
        raise ValueError(f"tolerance is {tolerance}; it needs to be a fraction such as 1e-4")
    held = _greedy(works, ranks)
    _exchange(works, held, goal=lower_bound(works, ranks) * (1 + tolerance))
    of = np.empty(works.size, np.int64)
    of[held] = np.arange(ranks)[:, None]
    return of


def lower_bound(works: Any, ranks: int) -> float:
    """What the heaviest rank does at least, in whatever way equally many chunks are dealt.

    The largest of: the mean work of a rank (rounded up for integers); and for every j, among the
    j * ranks + 1 heaviest chunks j + 1 must share a rank, which holds no less than the lightest of
    those and the lightest of all others in its remaining places. For j = 0 this is the heaviest
    chunk among the lightest.

    Args as in `assign`, and ValueErrors too.

    >>> lower_bound([8, 7, 6, 5, 4, 2, 2, 2], ranks=2)
    18
    >>> lower_bound([9, 1, 1, 1], ranks=2)
    10
    """
    works, ranks = _checked(works, ranks)
    places = works.size // ranks
    sums = np.concatenate([np.zeros(1, works.dtype), np.cumsum(np.sort(works))])
    total = sums[-1]
    mean = total / ranks if works.dtype == np.float64 else -(-total // ranks)
    sharing = np.arange(places)
    first = works.size - (sharing * ranks + 1)
    together = sums[first + sharing + 1] - sums[first] + sums[places - sharing - 1]
    return max(mean, together.max()).item()


def _checked(works: Any, ranks: Any) -> tuple[np.ndarray, int]:
    """The works as int64 or float64 [chunks], and the ranks."""
    ranks = at_least_one("ranks", ranks)
    given = np.asarray(works)
    if given.ndim != 1 or given.size == 0 or given.dtype.kind not in "iuf":
        raise ValueError(
            f"works has shape {given.shape} and dtype {given.dtype}; it needs to be a list of at "
            "least one number, such as [3, 1, 2, 2]"
        )
    if given.size % ranks:
        more = -given.size % ranks
        raise ValueError(
            f"works has {given.size} chunks; {ranks} ranks need a multiple of {ranks}: add {more} "
            f"of work 0, which makes {given.size + more}"
        )
    wrong = np.flatnonzero(~(np.isfinite(given) & (given >= 0)))
    if wrong.size:
        raise ValueError(
            f"works[{wrong[0]}] is {given[wrong[0]]}; work needs to be finite and at least 0"
        )
    if given.dtype.kind == "f":
        return given.astype(np.float64), ranks
    if given.sum(dtype=np.float64) >= _LARGEST_SUM:
        raise ValueError(
            f"works adds up to {given.sum(dtype=np.float64):.3g}; it needs to stay below 2**62: "
            "count in a larger unit, such as works // 1024, or in floats"
        )
    return given.astype(np.int64), ranks


def _greedy(works: np.ndarray, ranks: int) -> np.ndarray:
    """The chunks of each rank, [ranks, chunks per rank], by the rule above."""
    places = works.size // ranks
    work_of = works.tolist()
    held: list[list[int]] = [[] for _ in range(ranks)]
    with_room: list[tuple[float, int]] = [(0, rank) for rank in range(ranks)]
    for chunk in np.argsort(-works, kind="stable").tolist():
        load, rank = with_room[0]
        held[rank].append(chunk)
        if len(held[rank]) < places:
            heapq.heapreplace(with_room, (load + work_of[chunk], rank))
        else:
            heapq.heappop(with_room)
    return np.array(held)


def _exchange(works: np.ndarray, held: np.ndarray, goal: float) -> None:
    """Exchange chunks between ranks, in place, until the heaviest does no more than `goal`.

    Each round some heavy ranks share out light ones, and each exchanges with the best of its own.
    Half of the ranks do so at first, with one partner each; where that no longer makes the heaviest
    lighter, fewer with more partners, down to the heaviest with all others; then two chunks for
    two. Where all is in vain, ranks paired at random even out what they can, which opens other
    exchanges. No exchange makes the heavier of its two ranks heavier.
    """
    ranks, places = held.shape
    if ranks == 1:
        return
    shuffles = np.random.default_rng(0)
    levels = [
        (subsets, heavy)
        for subsets in _subsets(places)
        for heavy in sorted({max(ranks // 2, 1), max(ranks // 16, 1), 1}, reverse=True)
    ]
    level = shuffled = 0
    loads = works[held].sum(axis=1)
    least = loads.max()
    for _ in range(_ROUNDS):
        if least <= goal or shuffled > _SHUFFLES:
            break
        if level < len(levels):
            _round(works, held, loads, np.argsort(-loads, kind="stable"), *levels[level])
        else:
            _round(works, held, loads, shuffles.permutation(ranks), levels[0][0], ranks // 2)
            shuffled += 1
        loads = works[held].sum(axis=1)
        if loads.max() < least:
            least, level, shuffled = loads.max(), max(level - 1, 0), 0
        else:
            level = level + 1 if level < len(levels) else 0


def _subsets(places: int) -> list[np.ndarray]:
    """Which places an exchange empties, [subsets, 1] and, where they are not too many, [_, 2].

    Of very many places some, spread evenly: chunks stand in order of their work at first.
    """
    one = np.arange(0, places, -(-places // math.isqrt(_CANDIDATES)))[:, None]
    pairs = places * (places - 1) // 2
    if not 0 < pairs**2 <= _CANDIDATES:
        return [one]
    return [one, np.stack(np.triu_indices(places, 1), axis=1)]


def _round(
    works: np.ndarray,
    held: np.ndarray,
    loads: np.ndarray,
    order: np.ndarray,
    subsets: np.ndarray,
    heavy: int,
) -> None:
    """The first `heavy` ranks of `order` each make one exchange with a rank from its end."""
    pairs = max(1, _CANDIDATES // len(subsets) ** 2)
    heavy = min(heavy, pairs)
    partners = min(len(order) - heavy, pairs) // heavy * heavy
    theirs = order[::-1][:partners]
    ours = order[np.arange(partners) % heavy]
    gap = loads[ours] - loads[theirs]
    gives, takes = (works[held[of][:, subsets]].sum(axis=2) for of in (ours, theirs))
    # An exchange that gives x more than it takes leaves the two ranks |gap - 2 x| apart.
    apart = gives[:, :, None] - takes[:, None, :]
    apart *= 2
    apart -= gap[:, None, None]
    apart = np.abs(apart, out=apart).reshape(partners, -1)
    best = apart.argmin(axis=1)
    left = apart[np.arange(partners), best]
    heavier = np.where(left < np.abs(gap), loads[ours] + loads[theirs] + left, np.inf)
    chosen = heavier.reshape(-1, heavy).argmin(axis=0) * heavy + np.arange(heavy)
    chosen = chosen[np.isfinite(heavier[chosen])]
    give, take = (subsets[at] for at in np.divmod(best[chosen], len(subsets)))
    us, them = ours[chosen, None], theirs[chosen, None]
    held[us, give], held[them, take] = held[them, take], held[us, give]
