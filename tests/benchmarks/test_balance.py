import argparse
import json
import os

import numpy as np
import pytest

import balance_worker
import bench_balance
import pages
from plait.cli import main
from plait.cli.arguments import UserError

LAYOUTS = ("contiguous", "zigzag", "half-swap")
needs_linux = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="pins processes to cores"
)


def row(part, layout, turn, rank, cpu, wall=None, blocks=None, ranks=2, way="forward"):
    wall = cpu if wall is None else wall
    extra = {} if blocks is None else {"blocks": blocks}
    where = {"part": part, "ranks": ranks, "way": way, "layout": layout, "round": turn}
    return {**where, "rank": rank, "cpu": cpu, "wall": wall, **extra}


def results(samples):
    keys = {"tokens": 1024, "heads": 1, "kv_heads": 1, "head_dim": 8, "block": 32, "cores": 2}
    machine = {"date": "today", "jax": "1.2.3", "processor": "Z80", "load": [0.5, 1.25]}
    return {**keys, **machine, "samples": samples}


ALONE = [
    *(row("alone", "contiguous", 0, *x) for x in ((0, 1.0, 2.0, 10), (1, 3.0, 6.0, 30))),
    row("alone", "contiguous", 1, 1, 4.5, 4.5, 30),
    row("alone", "contiguous", 2, 1, 3.6, 7.2, 30),
    *(row("alone", "zigzag", 0, *x) for x in ((0, 1.5, 3.0, 20), (1, 2.5, 5.0, 20))),
    row("alone", "zigzag", 1, 1, 2.5, 2.5, 20),
    row("alone", "zigzag", 2, 0, 3.0, 6.0, 20),
    *(row("alone", "half-swap", n, 0, 3.0, 6.0, 20) for n in range(3)),
]


def test_ratios_are_of_the_busiest_rank_and_within_a_round():
    """Rounds: 3.0 over the median of 1.5 and 2.5, then 4.5 / 2.5 and 3.6 / 3.0."""
    assert bench_balance.by_round(ALONE, "contiguous", "cpu").tolist() == [3.0, 4.5, 3.6]
    assert bench_balance.by_round(ALONE, "zigzag", "cpu").tolist() == [2.0, 2.5, 3.0]
    found = bench_balance.ratios(ALONE, "zigzag", "cpu")
    assert found == pytest.approx({"low": 1.35, "median": 1.5, "high": 1.65})
    assert bench_balance.own_core(ALONE) == 0.5


def test_a_step_of_two_processes_takes_as_long_as_the_slower_one():
    rows = [row("processes", "zigzag", 0, 0, 1.0, 5.0), row("processes", "zigzag", 0, 1, 2.0, 4.0)]
    assert bench_balance.busiest(rows, "cpu") == 2.0
    assert bench_balance.busiest(rows, "wall") == 5.0


@pytest.mark.parametrize(("ranks", "wanted"), [(2, 1.5), (8, 1.875)])
def test_the_limit_by_hand(ranks, wanted):
    """The last of n equal runs sees (2n - 1) / n^2 of all pairs, a balanced rank 1 / n."""
    assert wanted == (2 * ranks - 1) / ranks
    assert bench_balance.limit(ranks, 16384) == pytest.approx(wanted, rel=1e-4)


def test_the_table_and_the_verdict():
    devices = [row("devices", name, 0, 0, 9.0, 1.0, ranks=8) for name in LAYOUTS]
    found = results([*devices, *ALONE])
    text = bench_balance.table(found)
    assert "jax 1.2.3, Z80, 2 cores" in text
    assert "Rounds: 3 of each rank alone on one core, 1 of 8 virtual devices" in text
    assert "| each rank alone on one core | 2 | forward | 1.50 (1.35 to 1.65) |" in text
    assert "| 1.500 | 50% |" in text
    # No CPU time for the devices of one process: it is that of all their work.
    name = bench_balance.PARTS["devices"]
    cells = "1.00 (1.00 to 1.00) | 1.00 (1.00 to 1.00) | 1.874 |  |"
    assert f"| {name} | 8 | forward |  |  | {cells}" in text
    assert "| 2 | forward | contiguous | 3600 | 1000 3000 |" in text
    # Of half swap 3.0 / 3.0, 4.5 / 3.0 and 3.6 / 3.0.
    assert bench_balance.verdict(found) == "2 ranks, forward: 1.20, BELOW 1.4"


def parsed(*flags):
    parser = argparse.ArgumentParser()
    bench_balance.add_arguments(parser)
    return parser.parse_args(flags)


def test_the_page_is_rewritten_from_a_file(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pages, "DOCS", tmp_path)
    page, source = tmp_path / "performance.md", tmp_path / "samples.json"
    page.write_text("a\n<!-- bench balance -->\nold\n<!-- end of bench balance -->\nb\n")
    source.write_text(json.dumps(results(ALONE)))
    assert bench_balance.run(parsed("--from", str(source), "--docs")) == 0
    text = page.read_text()
    assert bench_balance.table(results(ALONE)) in text
    assert text.startswith("a\n<!-- bench balance -->\n")
    assert text.endswith("<!-- end of bench balance -->\nb\n")
    assert "old" not in text
    assert "BELOW 1.4" in capsys.readouterr().out


@pytest.mark.slow
@needs_linux
def test_what_is_sampled(tmp_path):
    """Every part at a tiny size: which ranks, ways, layouts and rounds, and how many blocks."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("two processes need two cores")
    out = tmp_path / "samples.json"
    flags = {"tokens": 256, "head-dim": 8, "block": 32, "rounds": 4, "seconds": 1}
    flags = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    # Three rounds are taken where time is up, and the first compiles nothing more.
    assert main(["bench", "balance", "--ranks", "2", *flags, "--json", str(out)]) == 0
    samples = json.loads(out.read_text())["samples"]
    for part, ranks, way, rows in bench_balance.groups({"samples": samples}):
        for name in LAYOUTS:
            mine = [x for x in rows if x["layout"] == name]
            message = f"{part}, {ranks} ranks, {way}, {name}: {mine}"
            rounds = sorted({x["round"] for x in mine})
            assert rounds in ([0, 1, 2], [0, 1, 2, 3]), message
            assert all(x["wall"] > 0 and x["cpu"] > 0 for x in mine), message
            first = sorted(x["rank"] for x in mine if x["round"] == 0)
            assert first == ([0] if part == "devices" else [0, 1]), message
            if part == "alone":  # 8 blocks of 32: 1 + .. + 4 and 5 + .. + 8; 18 each
                blocks = {x["rank"]: x["blocks"] for x in mine}
                assert blocks == ({0: 10, 1: 26} if name == "contiguous" else {0: 18, 1: 18})
                later = [x["rank"] for x in mine if x["round"]]
                turns = [1, 1, 1] if name == "contiguous" else [1, 0, 1]
                assert later == turns[: len(later)], message
    assert {x["part"] for x in samples} == set(bench_balance.PARTS)
    assert {x["way"] for x in samples} == {"forward", "forward+backward"}


def test_a_wrong_result_is_not_timed(rng):
    q, k = (rng.standard_normal((1, n, 2, 4)).astype(np.float32) for n in (8, 16))
    with pytest.raises(AssertionError):
        balance_worker._check(q, q, k, k, np.arange(16), 1)


@needs_linux
@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--heads", "3", "--kv-heads", "2"], "--kv-heads is 2; it needs to divide the 3 heads"),
        (["--tokens", "100"], "length 100; Zigzag.* pad to 112"),
        (["--from", "nowhere.json"], "--from is 'nowhere.json'; it needs to be a file"),
        (["--json", "nowhere/x.json"], "there is no folder 'nowhere': x.json works"),
    ],
)
def test_bad_input_gets_one_sentence(flags, says):
    with pytest.raises(UserError, match=says) as caught:
        bench_balance.run(parsed(*flags))
    assert "\n" not in str(caught.value)


@needs_linux
def test_a_process_that_fails_says_why():
    (spec,) = bench_balance._specs(parsed("--tokens", "100"), "devices")
    with pytest.raises(UserError, match=r"a process of 'devices' failed .*100") as caught:
        bench_balance.samples_of([spec], lambda sample: None)
    assert "\n" not in str(caught.value)
