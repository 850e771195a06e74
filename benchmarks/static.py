"""Static figures of a compiled program, as the benchmarks state them, and what bounds the rest.

`plait.audit` sums the cycles that the TPU compiler estimates. The compiler estimates none for a
gather or a scatter that it does not turn into a loop, nor for collectives. The first are counted
here at the chip's HBM bandwidth, which is the least that they can take, and permutes by the bytes
on the busiest link of the torus. What is no clock stays no clock.
"""

import dataclasses
import importlib.metadata
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from plait import Contiguous, Zigzag
from plait.audit import Operation, Report, Topology
from plait.audit.hlo import COLLECTIVES
from plait.exchange import matchings
from plait.permute import Relayout

V5P_PEAK_FLOPS = 459e12
"""Matmul FLOPs a second of a v5p chip in bfloat16, as published."""

V5P_LINK_BYTES_PER_SECOND = 100e9
"""One link in one direction: the published 4,800 Gbit/s of a chip over its six links."""


@dataclasses.dataclass(frozen=True)
class Figures:
    """One program of one device; seconds and bytes of one execution.

    Attributes:
      estimated_seconds: the compiler's cycles at the chip's clock, loops by their turns.
      floor_seconds: operations without an estimate, at the peak HBM bandwidth.
      without_estimate: the names of these operations, where they move at least a megabyte.
      opaque: of these the gathers, the scatters and the custom calls (what the SparseCores do, and
        Pallas calls), which may take far longer than their floor.
      hbm_bytes: read and written, loops by their turns.
      temp_bytes: temporary memory, by the compiler's plan.
      collectives: (kind, bytes, how often) of each, in the order of the program.
      loops: `while` operations in the program.
      compile_seconds: how long this machine compiled.
    """

    estimated_seconds: float
    floor_seconds: float
    without_estimate: tuple[str, ...]
    opaque: tuple[str, ...]
    hbm_bytes: int
    temp_bytes: int
    collectives: tuple[tuple[str, int, int], ...]
    loops: int
    compile_seconds: float

    @property
    def seconds(self) -> float:
        """The estimate, and the floor of what has none."""
        return self.estimated_seconds + self.floor_seconds

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data, for JSON."""
        return {**dataclasses.asdict(self), "seconds": self.seconds}


def figures(report: Report, topology: Topology) -> Figures:
    """The figures of a report for a topology of TPUs."""
    assert topology.chip is not None, "figures are of a chip"
    # Copies without an estimate are prefetches, which run beside other operations.
    apart = {*COLLECTIVES, "copy"}
    unknown = [
        o
        for o in report.operations
        if not o.estimated_cycles and o.accessed_bytes and o.kind not in apart
    ]
    unknown_bytes = sum(o.accessed_bytes * o.executions for o in unknown)
    large = [o for o in unknown if o.accessed_bytes * o.executions >= 1e6]
    opaque = [
        o
        for o in large
        if o.kind == "custom-call" or any(word in o.name for word in ("gather", "scatter"))
    ]
    return Figures(
        estimated_seconds=report.estimated_seconds or 0.0,
        floor_seconds=unknown_bytes / topology.chip.hbm_bytes_per_second,
        without_estimate=_names(large),
        opaque=_names(opaque),
        hbm_bytes=report.counted_bytes,
        temp_bytes=report.temp_bytes,
        collectives=tuple((c.kind, c.bytes, c.executions) for c in report.collectives),
        loops=report.counts.get("while", 0),
        compile_seconds=report.compile_seconds or 0.0,
    )


def _names(operations: Iterable[Operation]) -> tuple[str, ...]:
    return tuple(sorted({re.sub(r"[.\d]+$", "", o.name) for o in operations}))


def shown_collectives(collectives: Iterable[Sequence[Any]]) -> str:
    """Collectives by kind and size, such as "2 all-reduce of 805 MB"."""
    counted: Counter[tuple[str, int]] = Counter()
    for kind, size, executions in collectives:
        counted[kind, size] += executions
    return ", ".join(f"{n} {kind} of {megabytes(size)}" for (kind, size), n in counted.items())


def megabytes(size: float) -> str:
    """Bytes as megabytes (10^6), to three digits or more."""
    value = size / 1e6
    return f"{value:,.0f} MB" if value >= 100 else f"{value:.3g} MB"


def versions() -> dict[str, str]:
    """Versions of jax, and of libtpu where it is installed."""
    found = {"jax": jax.__version__}
    try:
        found["libtpu"] = importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        found["libtpu"] = "not installed"
    return found


def hops(start: Sequence[int], end: Sequence[int], shape: Sequence[int]) -> list[tuple]:
    """The links of the way from chip to chip on a torus: one axis after the other, the short way.

    A link is (the chip it leaves, the axis, 1 or -1).
    """
    found, at = [], list(start)
    for axis, size in enumerate(shape):
        forward = (end[axis] - at[axis]) % size
        step = 1 if forward <= size - forward else -1
        for _ in range(min(forward, size - forward)):
            found.append((tuple(at), axis, step))
            at[axis] = (at[axis] + step) % size
    return found


def busiest_link(
    pairs: Iterable[tuple[int, int]],
    coordinates: Mapping[int, Sequence[int]] | Sequence[Sequence[int]],
    shape: Sequence[int],
) -> int:
    """How many of the pairs (source, target) share the fullest link, by `hops`."""
    loads = Counter(
        hop
        for source, target in pairs
        for hop in hops(coordinates[source], coordinates[target], shape)
    )
    return max(loads.values(), default=0)


def zigzag_permute_seconds(shard_bytes: int, topology: Topology, ranks: int) -> float:
    """What the permutes of one zigzag move of a shard take at least on the busiest link.

    Routed along one axis after the other; a router that spreads them takes less. Half a shard
    travels in each of two permutes, which run at the same time.
    """
    shape = tuple(int(size) for size in topology.name.partition(":")[2].split("x"))
    coordinates = [device.coords for device in topology.devices]
    move = Relayout(Zigzag(ranks), Contiguous(ranks), 2 * ranks)
    found = matchings(move.sources, ranks)
    pairs = [pair for matching in found for pair in enumerate(matching.targets)]
    load = busiest_link(pairs, coordinates, shape)
    return load * shard_bytes / len(found) / V5P_LINK_BYTES_PER_SECOND


def matmul_flops(pairs: int, heads: int, head_dim: int, v_head_dim: int) -> tuple[int, int]:
    """FLOPs of attention's matmuls, forward and backward, for (query, key) pairs of each head.

    Forward: scores and values. Backward, by FlashAttention's recomputation: the scores again,
    d_values and d_probabilities (v_head_dim), d_queries and d_keys (head_dim).
    """
    forward = 2 * (head_dim + v_head_dim)
    backward = 2 * (3 * head_dim + 2 * v_head_dim)
    return forward * pairs * heads, backward * pairs * heads


def significant(value: float, digits: int = 3) -> str:
    """A number to some significant digits, without an exponent.

    >>> significant(0.012345), significant(1234.5)
    ('0.0123', '1,234')
    """
    if not value:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}"
