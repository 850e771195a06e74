import pytest

import static
from plait import audit
from plait.audit.topology import CHIPS


def test_the_way_on_a_torus_is_the_short_one():
    assert static.hops((0, 0), (3, 1), (4, 4)) == [((0, 0), 0, -1), ((3, 0), 1, 1)]
    assert static.hops((0, 0), (2, 0), (4, 4)) == [((0, 0), 0, 1), ((1, 0), 0, 1)]
    assert static.hops((1, 2), (1, 2), (4, 4)) == []


def test_the_busiest_link_of_a_ring_by_hand():
    """Four chips in a row that close to a ring: 0 to 2 and 1 to 3 share the link from 1 to 2."""
    ring = [(n,) for n in range(4)]
    assert static.busiest_link([(0, 2), (1, 3)], ring, (4,)) == 2
    assert static.busiest_link([(0, 1), (1, 2), (2, 3), (3, 0)], ring, (4,)) == 1
    assert static.busiest_link([(0, 0)], ring, (4,)) == 0


def test_flops_by_hand():
    """One head, one pair: q.k of 192 and p.v of 128, a multiply and an add each; then five."""
    assert static.matmul_flops(1, 1, 192, 128) == (2 * 320, 2 * (192 + 128 + 128 + 192 + 192))
    assert static.matmul_flops(10, 3, 128, 128) == (30 * 512, 30 * 1280)


def operation(kind, name, size, cycles, executions=1):
    return audit.Operation(kind, name, executions, size, cycles, "here:1")


def test_what_has_no_estimate_is_counted_at_the_bandwidth():
    chip = CHIPS["v5p"]
    target = audit.Topology("v5p", (), chip)
    report = audit.Report(
        topology="v5p",
        operations=(
            operation("fusion", "fusion.1", 10**9, 5),
            operation("gather", "gather_fusion.2", 10**9, 0, executions=3),
            operation("copy", "copy-start.3", 10**9, 0),
            operation("all-reduce", "all-reduce", 10**9, 0),
            operation("reshape", "reshape.4", 10, 0),
        ),
        collectives=(),
        stages=0,
        hbm_bytes=7,
        counted_bytes=8,
        argument_bytes=0,
        output_bytes=0,
        temp_bytes=9,
        estimated_cycles=chip.clock_hz,
        clock_hz=chip.clock_hz,
    )
    found = static.figures(report, target)
    assert found.estimated_seconds == 1
    bandwidth = chip.hbm_bytes_per_second
    assert found.floor_seconds == pytest.approx((3e9 + 10) / bandwidth)
    assert found.seconds == 1 + found.floor_seconds
    assert found.without_estimate == found.opaque == ("gather_fusion",)
    assert (found.hbm_bytes, found.temp_bytes) == (8, 9)


def test_collectives_are_shown_by_kind_and_size():
    shown = static.shown_collectives([("all-reduce", 805306368, 1)] * 2 + [("all-gather", 2e6, 3)])
    assert shown == "2 all-reduce of 805 MB, 3 all-gather of 2 MB"
