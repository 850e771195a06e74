"""Which strategy to use: a cost model that is stated, and a choice that says why."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np

from plait.attention.strategies.ring import is_nested, needed_shifts
from plait.attention.strategies.ulysses import group_layout
from plait.layout import Contiguous, Layout, at_least_one
from plait.mask import BlockBounds, Causal, Mask, block_map, check_mask, full_blocks

BLOCKS_PER_RANK = 16
"""In how many blocks the work of a rank is estimated, at most."""


@dataclasses.dataclass(frozen=True)
class Machine:
    """What the estimates take a device to do; by default a TPU v5p at its peaks.

    Attributes:
      flops_per_second: of matrix products.
      network_bytes_per_second: that a device can receive from its peers.
      memory_bytes: that gathered keys and values of one layer may take.
    """

    flops_per_second: float = 459e12
    network_bytes_per_second: float = 100e9
    memory_bytes: float = 4 * 2**30


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What one strategy costs a device in the forward pass, or why it cannot be had.

    Attributes:
      seconds: of compute and of communication that compute does not hide.
      received_bytes: from other ranks.
      held_bytes: of keys and values of other ranks in memory at once.
      why_not: None where the strategy can be had.
    """

    strategy: str
    seconds: float
    received_bytes: float
    held_bytes: float
    why_not: str | None = None

    def __str__(self) -> str:
        if self.why_not is not None:
            return f"{self.strategy}: no, {self.why_not}"
        return (
            f"{self.strategy}: {1e3 * self.seconds:.3g} ms, receives "
            f"{self.received_bytes / 1e6:,.4g} MB, holds {self.held_bytes / 1e6:,.4g} MB"
        )


@dataclasses.dataclass(frozen=True)
class Choice:
    """The strategy with the least estimate, and all estimates; `str` says why, a line each."""

    strategy: str
    estimates: tuple[Estimate, ...]

    def __str__(self) -> str:
        return "\n".join([f"{self.strategy} has the least estimate", *map(str, self.estimates)])


@dataclasses.dataclass(frozen=True)
class Shapes:
    """Of one device's attention: its part of batch and heads, and the whole sequence."""

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    itemsize: int = 2

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            number = at_least_one(field.name, getattr(self, field.name))
            object.__setattr__(self, field.name, number)
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads is {self.heads} and kv_heads {self.kv_heads}; kv_heads needs to divide "
                f"heads, such as {math.gcd(self.heads, self.kv_heads)}"
            )


def choose_strategy(
    layout: Layout,
    sequence_length: int,
    shapes: Shapes,
    *,
    axis_sizes: tuple[int, ...] | None = None,
    mask: Mask | None = None,
    machine: Machine | None = None,
    positions_are_data: bool = False,
) -> Choice:
    """The strategy that `strategy="auto"` takes.

    The model, for the forward pass of one device with n ranks, its busiest rank's visible pairs W
    and the bytes of one rank's keys and values K:

    * compute takes 2 (head_dim + v_head_dim) FLOPs a pair and head, at the machine's peak;
    * "all_gather" receives (n - 1) K before it computes W, and holds n K;
    * "ring" does a step for each shift that some rank needs, each as long as the longer of K's
      transfer and the busiest rank's part of it, and holds 2 K;
    * "ulysses" receives (n - 1)/n of q, k, v and out, copies of shared kv heads included, before
      and after it computes the mean of W;
    * "usp" does the second over the last axis and the first but one over the others.

    Of equals the first named is taken. "all_gather" is left out where n K exceeds the machine's
    `memory_bytes`. Documents are not looked at; where positions are data, all ranks and steps are
    taken to do equal work.

    Args:
      shapes: batch and heads of one device.
      axis_sizes: of the mesh axes of the sequence, major first; (layout.ranks,) by default.
      mask: Causal() by default.
      machine: Machine() by default.

    >>> from plait import Zigzag
    >>> llama = Shapes(batch=1, heads=8, kv_heads=1, head_dim=128, v_head_dim=128)
    >>> print(choose_strategy(Zigzag(128), 131072, llama))
    ring has the least estimate
    all_gather: 1.26 ms, receives 66.58 MB, holds 67.11 MB
    ulysses: no, 8 heads of q are no multiple of 128
    ring: 0.671 ms, receives 66.58 MB, holds 1.049 MB
    usp: no, the sequence lies over one mesh axis
    """
    mask = Causal() if mask is None else mask
    machine = Machine() if machine is None else machine
    sizes = (layout.ranks,) if axis_sizes is None else tuple(axis_sizes)
    if math.prod(sizes) != layout.ranks:
        raise ValueError(
            f"axis_sizes is {sizes}, {math.prod(sizes)} devices; {layout!r} needs {layout.ranks}, "
            f"such as {(layout.ranks,)}"
        )
    length = at_least_one("sequence_length", sequence_length)
    check_mask(mask, length)
    if not positions_are_data:
        layout.check_length(length)
    return _choose(layout, length, shapes, mask, machine, sizes, positions_are_data)


@functools.lru_cache(maxsize=256)
def _choose(
    layout: Layout,
    length: int,
    shapes: Shapes,
    mask: Mask,
    machine: Machine,
    sizes: tuple[int, ...],
    is_data: bool,
) -> Choice:
    prices = Prices(layout.ranks, length, shapes, machine)
    pairs = pairs_by_shift(layout, length, mask, is_data).sum(axis=1)
    estimates = (
        prices.all_gather(pairs.max()),
        prices.ulysses(pairs.mean()),
        prices.ring(_busiest_of_steps(layout, length, mask, is_data)),
        _usp(prices, layout, mask, sizes, is_data),
    )
    possible = [e for e in estimates if e.why_not is None]
    return Choice(min(possible, key=lambda e: e.seconds).strategy, estimates)


def _usp(
    prices: Prices, layout: Layout, mask: Mask, sizes: tuple[int, ...], is_data: bool
) -> Estimate:
    if len(sizes) < 2:
        return Estimate("usp", math.inf, 0, 0, "the sequence lies over one mesh axis")
    inner = sizes[-1]
    grouped = None if is_data else group_layout(layout, inner)
    around = grouped or Contiguous(layout.ranks // inner)
    return prices.usp(inner, _busiest_of_steps(around, prices.length, mask, grouped is None))


def _busiest_of_steps(layout: Layout, length: int, mask: Mask, is_data: bool) -> tuple[float, ...]:
    """About how many pairs the busiest rank has in each step that a ring makes."""
    shifts = needed_shifts(None if is_data else layout, length, layout.ranks, mask)
    return tuple(pairs_by_shift(layout, length, mask, is_data).max(axis=0)[list(shifts)].tolist())


@dataclasses.dataclass(frozen=True)
class Prices:
    """What strategies cost, by the model of `choose_strategy`, once it is known who waits for what.

    Attributes:
      ranks: over which the sequence lies.
      length: tokens of the sequence.
      shapes: batch and heads of one device.
      machine: what a device does.
    """

    ranks: int
    length: int
    shapes: Shapes
    machine: Machine

    @property
    def key_bytes(self) -> float:
        """Of one rank's keys and values."""
        s = self.shapes
        tokens = s.batch * self.length / self.ranks
        return tokens * s.kv_heads * (s.head_dim + s.v_head_dim) * s.itemsize

    @property
    def query_bytes(self) -> float:
        """Of one rank's queries and their output."""
        return self.key_bytes / self.shapes.kv_heads * self.shapes.heads

    def flops(self, pairs: float) -> float:
        """Of the two products of attention with so many visible pairs a head, forward."""
        s = self.shapes
        return 2 * (s.head_dim + s.v_head_dim) * s.heads * s.batch * pairs

    def compute(self, pairs: float) -> float:
        """Seconds that so many visible pairs a head take."""
        return self.flops(pairs) / self.machine.flops_per_second

    def transfer(self, received: float) -> float:
        """Seconds that so many bytes take to come."""
        return received / self.machine.network_bytes_per_second

    def all_gather(self, busiest: float) -> Estimate:
        """Where the busiest rank has so many pairs."""
        received, held = (self.ranks - 1) * self.key_bytes, self.ranks * self.key_bytes
        limit = self.machine.memory_bytes
        why_not = None
        if held > limit:
            why_not = f"{held / 2**30:.3g} GiB of keys and values exceed {limit / 2**30:.3g} GiB"
        seconds = self.transfer(received) + self.compute(busiest)
        return Estimate("all_gather", seconds, received, held, why_not)

    def ulysses(self, mean: float) -> Estimate:
        """Where ranks have so many pairs on average."""
        received, held, why_not = self._to_heads(self.ranks)
        seconds = self.transfer(received) + self.compute(mean)
        return Estimate("ulysses", seconds, received, held, why_not)

    def ring(self, busiest_of_steps: Sequence[float]) -> Estimate:
        """Where the busiest rank of each step has so many pairs in it."""
        seconds, received = self._around(busiest_of_steps, self.key_bytes)
        return Estimate("ring", seconds, received, 2 * self.key_bytes)

    def usp(self, inner: int, busiest_of_steps: Sequence[float]) -> Estimate:
        """Heads over `inner` ranks, whose pairs together are so many in each step of the ring."""
        dealt, _, why_not = self._to_heads(inner)
        if why_not is not None:
            return Estimate("usp", math.inf, 0, 0, why_not)
        copies = math.lcm(self.shapes.kv_heads, inner) / self.shapes.kv_heads
        seconds, received = self._around(
            [pairs / inner for pairs in busiest_of_steps], copies * self.key_bytes
        )
        total = self.transfer(dealt) + seconds
        return Estimate("usp", total, dealt + received, 2 * copies * self.key_bytes)

    def _around(self, busiest_of_steps: Sequence[float], key_bytes: float) -> tuple[float, float]:
        """Seconds and bytes received of a ring: every step waits for its busiest rank."""
        sent = len(busiest_of_steps) - 1
        moving = [self.transfer(key_bytes)] * sent + [0.0]
        steps = (max(self.compute(p), m) for p, m in zip(busiest_of_steps, moving, strict=True))
        return sum(steps), sent * key_bytes

    def _to_heads(self, size: int) -> tuple[float, float, str | None]:
        """Bytes received and held where heads are dealt over `size` ranks, or why they cannot."""
        dealt = math.lcm(self.shapes.kv_heads, size)
        if self.shapes.heads % dealt:
            return 0, 0, f"{self.shapes.heads} heads of q are no multiple of {dealt}"
        keys = self.key_bytes * dealt / self.shapes.kv_heads
        return (size - 1) / size * (self.query_bytes + keys), keys, None


@functools.lru_cache(maxsize=256)
def pairs_by_shift(layout: Layout, length: int, mask: Mask, is_data: bool = False) -> np.ndarray:
    """About how many pairs each rank computes with the keys of the rank t before it, [ranks, t].

    Exact for a causal mask over nested chunks, else counted in blocks, partial ones as half.

    >>> from plait import Contiguous, Zigzag
    >>> pairs_by_shift(Zigzag(2), 8, Causal()).tolist()
    [[8.0, 8.0], [8.0, 8.0]]
    """
    ranks, per_rank = layout.ranks, length // layout.ranks
    if is_data:
        mean = mask.keys_seen(np.ones(length, np.int32)).sum() / ranks**2
        return np.full((ranks, ranks), mean)
    if type(mask) is Causal and is_nested(layout, length):
        return np.full((ranks, ranks), per_rank**2 / 2)
    parts = next(p for p in range(min(BLOCKS_PER_RANK, per_rank), 0, -1) if per_rank % p == 0)
    block = per_rank // parts
    positions = layout.positions(length)
    bounds = BlockBounds.of(positions, np.ones_like(positions), block, np)
    visited = np.mean([f(mask, bounds, bounds) for f in (block_map, full_blocks)], axis=0)
    between = visited.reshape(ranks, parts, ranks, parts).sum(axis=(1, 3)) * block**2
    query = np.arange(ranks)[:, None]
    return np.asarray(between[query, (query - np.arange(ranks)) % ranks])
