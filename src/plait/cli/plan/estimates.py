"""What each layout costs with each strategy, and which to take: figures by a stated model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from plait.attention.cost import Estimate, Machine, Prices

NEAR = 1.01
"""Within this multiple of the least estimate the first, which asks for less code, is taken."""


@dataclasses.dataclass(frozen=True, eq=False)
class Work:
    """One row in one layout.

    Attributes:
      pairs: that are seen, int64 [ranks of queries, ranks of keys].
      tiles: pairs in the tiles that a kernel computes, as many.
      group_tiles: the same between groups of ranks that hold heads of the same tokens, for "usp".
      prices: of a row of this length.
    """

    pairs: np.ndarray
    tiles: np.ndarray
    group_tiles: np.ndarray | None
    prices: Prices


@dataclasses.dataclass(frozen=True)
class Option:
    """One layout with one strategy, over all rows: means, but for `worst_waits` and `held_bytes`.

    Attributes:
      waits: pairs that all ranks wait for over the mean rank's, of all rows; 1 is balance.
      worst_waits: the same of the worst row.
      tiles_over_pairs: pairs in the tiles that the kernel computes over those that are seen.
      busiest_pairs: of the rank with most in a row.
      seconds: estimated, of a layer's forward pass over a row.
      sent_bytes: by each rank, for a layer's forward pass over a row.
      held_bytes: of keys and values of other ranks in memory at once, at most.
    """

    layout: str
    strategy: str
    waits: float
    worst_waits: float
    tiles_over_pairs: float
    busiest_pairs: float
    seconds: float
    sent_bytes: float
    held_bytes: float

    @property
    def name(self) -> str:
        """Both names."""
        return f"{self.layout}, {self.strategy}"


def estimate(
    layout: str, rows: Sequence[Work], inner: int, strategies: Sequence[str]
) -> list[Option]:
    """What a layout costs with each strategy.

    Args:
      rows: at least one.
      inner: devices of the mesh axis that "usp" deals heads over.
      strategies: such as can be had.
    """
    options = []
    for strategy in strategies:
        waited, busiest = np.array([_waits(strategy, row.pairs, inner) for row in rows]).T
        means = np.array([row.pairs.sum() / len(row.pairs) for row in rows])
        tiles = sum(int(_tiles(strategy, row).sum()) for row in rows)
        prices = [_price(strategy, row, inner) for row in rows]
        options.append(
            Option(
                layout,
                strategy,
                waits=float(waited.sum() / means.sum()),
                worst_waits=float((waited / means).max()),
                tiles_over_pairs=tiles / sum(int(row.pairs.sum()) for row in rows),
                busiest_pairs=float(busiest.mean()),
                seconds=float(np.mean([price.seconds for price in prices])),
                sent_bytes=float(np.mean([price.received_bytes for price in prices])),
                held_bytes=max(price.held_bytes for price in prices),
            )
        )
    return options


def _waits(strategy: str, pairs: np.ndarray, inner: int) -> tuple[float, float]:
    """Pairs that all ranks wait for, and those of the busiest rank."""
    if strategy == "ring":
        return sum(busiest_of_steps(pairs)), float(pairs.sum(axis=1).max())
    if strategy == "all_gather":
        busiest = float(pairs.sum(axis=1).max())
        return busiest, busiest
    size = len(pairs) if strategy == "ulysses" else inner
    groups = of_groups(pairs, size)
    return sum(busiest_of_steps(groups)) / size, float(groups.sum(axis=1).max()) / size


def _tiles(strategy: str, row: Work) -> np.ndarray:
    """Pairs in tiles between those that pass keys on: ranks, or groups of them."""
    if strategy != "usp":
        return row.tiles
    assert row.group_tiles is not None
    return row.group_tiles


def _price(strategy: str, row: Work, inner: int) -> Estimate:
    tiles, prices = _tiles(strategy, row), row.prices
    if strategy == "all_gather":
        return prices.all_gather(float(tiles.sum(axis=1).max()))
    if strategy == "ulysses":
        return prices.ulysses(float(tiles.sum() / prices.ranks))
    if strategy == "ring":
        return prices.ring(busiest_of_steps(tiles))
    return prices.usp(inner, busiest_of_steps(tiles))


def of_groups(pairs: np.ndarray, size: int) -> np.ndarray:
    """Pairs between groups of ranks that follow each other, each a rank of a smaller ring.

    >>> of_groups(np.arange(16).reshape(4, 4), 2).tolist()
    [[10, 18], [42, 50]]
    """
    groups = len(pairs) // size
    return pairs.reshape(groups, size, groups, size).sum(axis=(1, 3))


def busiest_of_steps(pairs: np.ndarray) -> list[float]:
    """Pairs of the busiest rank in each step of a ring, which all others wait for.

    >>> busiest_of_steps(np.array([[10, 0], [16, 10]]))
    [10.0, 16.0]
    """
    ranks = np.arange(len(pairs))
    steps = pairs[ranks[:, None], (ranks[:, None] - ranks) % ranks.size]
    return [float(busiest) for busiest in steps.max(axis=0)]


def refusals(prices: Prices, inner: int) -> dict[str, str | None]:
    """Of each strategy why it cannot be had, or None; without "usp" where `inner` is 1.

    >>> from plait import Machine, Shapes
    >>> prices = Prices(16, 4096, Shapes(1, 8, 1, 64, 64), Machine())
    >>> refusals(prices, inner=1)["ulysses"]
    '8 heads of q are no multiple of 16'
    """
    reasons = {"all_gather": None, "ulysses": prices.ulysses(0).why_not, "ring": None}
    if inner > 1:
        reasons["usp"] = prices.usp(inner, [0]).why_not
    return reasons


@dataclasses.dataclass(frozen=True)
class Recommendation:
    """What to take and why; `option` is None where nothing fits."""

    option: Option | None
    reason: str


def recommend(options: Sequence[Option], machine: Machine) -> Recommendation:
    """The option with the least estimate of those whose keys fit in memory.

    Args:
      options: those that ask for less code first: within 1% of the least the first is taken.
    """
    fitting = [option for option in options if option.held_bytes <= machine.memory_bytes]
    if not fitting:
        smallest = min(options, key=lambda option: option.held_bytes)
        return Recommendation(
            None,
            f"Nothing fits: {smallest.name} holds the least keys and values, "
            f"{_gib(smallest.held_bytes)}, and --memory is {_gib(machine.memory_bytes)}.",
        )
    least = min(fitting, key=lambda option: option.seconds)
    taken = next(option for option in fitting if option.seconds <= NEAR * least.seconds)
    reason = [_why(taken, least, machine)]
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


def _why(taken: Option, least: Option, machine: Machine) -> str:
    fits = f"the least of what fits in {_gib(machine.memory_bytes)}"
    standing = (
        fits if taken is least else f"within {NEAR - 1:.0%} of {fits} ({least.name}), for less code"
    )
    sending = taken.sent_bytes / machine.network_bytes_per_second
    return (
        f"Its estimate, {milliseconds(taken.seconds)} a layer forward, is {standing}. Ranks wait "
        f"for {taken.waits:.3f} times the mean rank's pairs, and each sends "
        f"{taken.sent_bytes / 1e6:,.4g} MB, {milliseconds(sending)} by itself."
    )


def milliseconds(seconds: float) -> str:
    """Three digits.

    >>> milliseconds(0.00123456), milliseconds(0.013), milliseconds(12)
    ('1.23 ms', '13.0 ms', '12,000 ms')
    """
    value = 1e3 * seconds
    return f"{value:,.0f} ms" if value >= 99.95 else f"{value:#.3g} ms"


def _gib(count: float) -> str:
    return f"{count / 2**30:,.3g} GiB"
