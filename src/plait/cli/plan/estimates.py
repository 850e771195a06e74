"""What each layout costs with each strategy, and which to take: figures by a stated model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from plait.attention.cost import Estimate, Prices

NEAR = 1.01
"""Within this multiple of the least estimate the first, which asks for less code, is taken."""


@dataclasses.dataclass(frozen=True)
class Option:
    """One layout with one strategy, over all rows: means, but for `worst`.

    Attributes:
      waits: pairs that all ranks wait for over the mean rank's, of all rows; 1 is balance.
      worst: the same of the worst row.
      seconds: estimated, of a layer's forward pass over a row.
      sent_bytes: by each rank, for a layer's forward pass over a row.
      held_bytes: of keys and values of other ranks in memory at once, at most.
    """

    layout: str
    strategy: str
    waits: float
    worst: float
    seconds: float
    sent_bytes: float
    held_bytes: float

    @property
    def name(self) -> str:
        """Both names."""
        return f"{self.layout}, {self.strategy}"


@dataclasses.dataclass(frozen=True)
class _Cost:
    """A strategy over one row."""

    estimate: Estimate
    waited_pairs: float


def estimate(
    layout: str,
    rows: Sequence[tuple[np.ndarray, Prices]],
    inner: int | None,
    strategies: Sequence[str],
) -> list[Option]:
    """What a layout costs with each strategy that can be had.

    Args:
      rows: of each row the pairs between ranks [ranks of queries, ranks of keys], and the prices of
        its length.
      inner: devices of the mesh axis that "usp" deals heads over.
    """
    options = []
    for strategy in strategies:
        costs = [_cost(strategy, pairs, prices, inner) for pairs, prices in rows]
        means = [float(pairs.sum() / len(pairs)) for pairs, _ in rows]
        waited = [cost.waited_pairs for cost in costs]
        estimates = [cost.estimate for cost in costs]
        options.append(
            Option(
                layout,
                strategy,
                waits=sum(waited) / sum(means),
                worst=max(w / m for w, m in zip(waited, means, strict=True)),
                seconds=float(np.mean([e.seconds for e in estimates])),
                sent_bytes=float(np.mean([e.received_bytes for e in estimates])),
                held_bytes=max(e.held_bytes for e in estimates),
            )
        )
    return options


def _cost(strategy: str, pairs: np.ndarray, prices: Prices, inner: int | None) -> _Cost:
    ranks = len(pairs)
    if strategy == "all_gather":
        busiest = float(pairs.sum(axis=1).max())
        return _Cost(prices.all_gather(busiest), busiest)
    if strategy == "ulysses":
        mean = float(pairs.sum() / ranks)
        return _Cost(prices.ulysses(mean), mean)
    if strategy == "ring":
        steps = busiest_of_steps(pairs)
        return _Cost(prices.ring(steps), sum(steps))
    assert inner
    # A group of ranks, each with some of the heads of all its tokens, is one rank of the ring.
    grouped = pairs.reshape(ranks // inner, inner, ranks // inner, inner).sum(axis=(1, 3))
    steps = busiest_of_steps(grouped)
    return _Cost(prices.usp(inner, steps), sum(steps) / inner)


def busiest_of_steps(pairs: np.ndarray) -> list[float]:
    """Pairs of the busiest rank in each step of a ring, which all others wait for.

    >>> busiest_of_steps(np.array([[10, 0], [16, 10]]))
    [10.0, 16.0]
    """
    ranks = np.arange(len(pairs))
    steps = pairs[ranks[:, None], (ranks[:, None] - ranks) % ranks.size]
    return [float(busiest) for busiest in steps.max(axis=0)]


def refusals(prices: Prices, inner: int | None) -> dict[str, str | None]:
    """Of each strategy why it cannot be had, or None; usp is left out where there is one axis."""
    reasons = {
        "all_gather": None,
        "ulysses": prices.ulysses(0).why_not,
        "ring": None,
    }
    if inner:
        reasons["usp"] = prices.usp(inner, [0]).why_not
    return reasons


@dataclasses.dataclass(frozen=True)
class Recommendation:
    """What to take and why; `option` is None where nothing fits."""

    option: Option | None
    reason: str


def recommend(options: Sequence[Option], memory_bytes: float) -> Recommendation:
    """The option with the least estimate of those whose keys fit in memory.

    Args:
      options: those that ask for less code first: within 1% of the least the first is taken.
    """
    fitting = [option for option in options if option.held_bytes <= memory_bytes]
    if not fitting:
        smallest = min(options, key=lambda option: option.held_bytes)
        return Recommendation(
            None,
            f"Nothing fits: {smallest.name} holds the least keys and values, "
            f"{_gib(smallest.held_bytes)}, and --memory is {_gib(memory_bytes)}.",
        )
    least = min(fitting, key=lambda option: option.seconds)
    taken = next(option for option in fitting if option.seconds <= NEAR * least.seconds)
    reason = [_why(taken, least, memory_bytes)]
    others = [o for o in fitting if o.layout != taken.layout or o.strategy != taken.strategy]
    slower = [o for o in others if o.seconds > NEAR * least.seconds]
    if slower:
        following = min(slower, key=lambda option: option.seconds)
        times = following.seconds / taken.seconds
        reason.append(f"{following.name} is next, at {times:.3g} times that.")
    faster = [o for o in options if o not in fitting and o.seconds * NEAR < taken.seconds]
    if faster:
        best = min(faster, key=lambda option: option.seconds)
        reason.append(
            f"{best.name} would take {milliseconds(best.seconds)}, but holds "
            f"{_gib(best.held_bytes)}."
        )
    return Recommendation(taken, " ".join(reason))


def _why(taken: Option, least: Option, memory_bytes: float) -> str:
    standing = (
        "the least"
        if taken is least
        else f"within {NEAR - 1:.0%} of the least, {least.name}, for less code"
    )
    return (
        f"Its estimate, {milliseconds(taken.seconds)} a layer forward, is {standing} of what fits "
        f"in {_gib(memory_bytes)}: ranks wait for {taken.waits:.3f} times the mean work, and each "
        f"sends {taken.sent_bytes / 1e6:,.4g} MB."
    )


def milliseconds(seconds: float) -> str:
    """Three digits.

    >>> milliseconds(0.00123456)
    '1.23 ms'
    """
    return f"{1e3 * seconds:,.3g} ms" if seconds < 1 else f"{1e3 * seconds:,.0f} ms"


def _gib(count: float) -> str:
    return f"{count / 2**30:,.3g} GiB"
