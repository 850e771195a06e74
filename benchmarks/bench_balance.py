"""`plait bench balance`: whether balance shows in time, and not only in counts.

Causal attention over one document, in layouts that give the ranks equal work and in one that does
not. Each rank's attention is timed alone on one core; beside it, as they come, two real processes
with a core each and eight virtual devices that share them all. Every figure is a ratio of times
that were taken within the same round.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import json
import os
import pathlib
import platform
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

import pages
import plait
from balance_worker import WAYS, Spec
from plait import Causal
from plait.cli.arguments import LAYOUTS, UserError, integer

BASE = "contiguous"
BALANCED = ("zigzag", "half-swap")
DEVICES = 8

PARTS = {
    "alone": "each rank alone on one core",
    "processes": "two processes, a core each",
    "devices": f"{DEVICES} virtual devices of one process",
}
SHARE = {"alone": 0.6, "processes": 0.2, "devices": 0.2}
"""Of --seconds."""

WANTED = {2: 1.4, 8: 1.75}
"""The least ratio of ranks timed alone that shows balance, by the number of ranks."""

PATIENCE = 600.0
"""Seconds beyond its own after which a process is taken to hang."""


def _specs(arguments: argparse.Namespace, part: str) -> list[Spec]:
    """What the processes of a part are to do."""
    cores = sorted(os.sched_getaffinity(0))
    ranks = {"alone": tuple(arguments.ranks), "processes": (2,), "devices": (DEVICES,)}
    spec = Spec(
        part=part,
        ranks=ranks[part],
        layouts=(BASE, *BALANCED),
        tokens=arguments.tokens,
        heads=arguments.heads,
        kv_heads=arguments.kv_heads,
        head_dim=arguments.head_dim,
        block=arguments.block,
        rounds=arguments.rounds,
        seconds=SHARE[part] * arguments.seconds,
    )
    if part == "devices":
        return [spec]
    if part == "alone":
        return [dataclasses.replace(spec, core=cores[-1])]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return [dataclasses.replace(spec, core=cores[i], process=i, port=port) for i in range(2)]


def samples_of(specs: list[Spec], progress: Callable[[dict], None]) -> list[dict[str, Any]]:
    """Run one process for each spec, all at once, and return every sample that they take."""
    devices = DEVICES if specs[0].part == "devices" else 1
    flag = f"--xla_force_host_platform_device_count={devices}"
    here = pathlib.Path(__file__).parent
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip(),
        "PYTHONPATH": os.pathsep.join(
            [str(pathlib.Path(plait.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        ),
    }
    found: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        workers = []
        for spec in specs:
            errors = stack.enter_context(tempfile.TemporaryFile("w+"))
            output = stack.enter_context(tempfile.TemporaryFile("w+"))
            worker = subprocess.Popen(
                [sys.executable, here / "balance_worker.py", json.dumps(dataclasses.asdict(spec))],
                env=environment,
                # The first is followed as it goes; a pipe that nobody reads would fill up.
                stdout=output if workers else subprocess.PIPE,
                stderr=errors,
                text=True,
            )
            stack.callback(worker.wait)
            stack.callback(worker.kill)
            workers.append((worker, output, errors))
        first, _, _ = workers[0]
        limit = threading.Timer(specs[0].seconds + PATIENCE, first.kill)
        stack.callback(limit.cancel)
        limit.start()
        for sample in _read(first.stdout):
            found.append(sample)
            progress(sample)
        for worker, output, errors in workers:
            try:
                failed = worker.wait(PATIENCE) != 0
            except subprocess.TimeoutExpired:
                failed = True
            if failed:
                errors.seek(0)
                tail = errors.read().strip().splitlines()[-1:] or ["it said nothing"]
                raise UserError(
                    f"bench balance: a process of {specs[0].part!r} failed ({tail[0]}); run "
                    "balance_worker.py by itself to see all it says"
                )
            output.seek(0)
            found += _read(output)
    return found


def _read(lines: Any) -> Iterator[dict[str, Any]]:
    """The samples among the lines; collectives print some of their own."""
    return (json.loads(line) for line in lines if line.startswith("{"))


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """All samples, as plain data, and where and how they were taken."""
    before = os.getloadavg()[0]
    samples: list[dict[str, Any]] = []
    for part in arguments.parts:
        print(f"{PARTS[part]}:", flush=True)
        seen = [-1]

        def progress(sample: dict[str, Any], seen: list[int] = seen) -> None:
            if sample["round"] > seen[0]:
                seen[0] = sample["round"]
                print(f"  round {seen[0] + 1} of {arguments.rounds} at most", flush=True)

        samples += samples_of(_specs(arguments, part), progress)
    return {
        "date": datetime.date.today().isoformat(),
        "jax": jax.__version__,
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load": [before, os.getloadavg()[0]],
        "tokens": arguments.tokens,
        "heads": arguments.heads,
        "kv_heads": arguments.kv_heads,
        "head_dim": arguments.head_dim,
        "block": arguments.block,
        "samples": samples,
    }


def _processor() -> str:
    """The name that Linux gives the processor; the architecture where it gives none."""
    with contextlib.suppress(OSError):
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


Rows = list[dict[str, Any]]


def busiest(rows: Rows, clock: str) -> float:
    """Seconds of the busiest rank in one round of one layout.

    Alone it is the rank with most blocks, told by count since times are noisy; the median where
    several have as many. A step of real processes waits for the one that takes longest.
    """
    if rows[0]["part"] != "alone":
        return max(row[clock] for row in rows)
    most = max(row["blocks"] for row in rows)
    return float(np.median([row[clock] for row in rows if row["blocks"] == most]))


def by_round(rows: Rows, layout: str, clock: str) -> np.ndarray:
    """Seconds of the busiest rank of a layout, one for each round."""
    mine = [row for row in rows if row["layout"] == layout]
    rounds = sorted({row["round"] for row in mine})
    return np.array([busiest([r for r in mine if r["round"] == n], clock) for n in rounds])


def ratios(rows: Rows, layout: str, clock: str) -> dict[str, float]:
    """Contiguous over a layout, round by round: the median and the quartiles."""
    found = by_round(rows, BASE, clock) / by_round(rows, layout, clock)
    low, median, high = np.quantile(found, [0.25, 0.5, 0.75])
    return {"low": float(low), "median": float(median), "high": float(high)}


def limit(ranks: int, tokens: int) -> float:
    """The ratio of the visible pairs, which a kernel that visits no others would come to."""
    pairs = [LAYOUTS[name](ranks).work(tokens, Causal()).max() for name in (BASE, BALANCED[0])]
    return float(pairs[0] / pairs[1])


def groups(results: dict[str, Any]) -> Iterator[tuple[str, int, str, Rows]]:
    """(part, ranks, way, samples), in the order of the tables."""
    samples = results["samples"]
    for part in PARTS:
        for ranks in sorted({row["ranks"] for row in samples if row["part"] == part}):
            for way in WAYS:
                rows = [
                    r for r in samples if (r["part"], r["ranks"], r["way"]) == (part, ranks, way)
                ]
                if rows:
                    yield part, ranks, way, rows


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    rounds = {row["part"]: row["round"] + 1 for row in results["samples"]}
    taken = ", ".join(f"{rounds[part]} of {PARTS[part]}" for part in PARTS if part in rounds)
    load = " and ".join(f"{x:.1f}" for x in results["load"])
    lines = [
        f"Causal, one document of {results['tokens']:,} tokens, heads: "
        f"{results['heads']} of queries, {results['kv_heads']} of keys and values, "
        f"dimension {results['head_dim']}, float32, blocks of {results['block']}. "
        f"{results['date']}, jax {results['jax']}, {results['processor']}, {results['cores']} "
        f"cores. Rounds: {taken}. Load average before "
        f"and after: {load}, of which about 1 or 2 is this benchmark.",
        "",
        "Contiguous over the layout, the busiest rank of each: medians of rounds, with quartiles.",
        "",
        *_ratio_lines(results),
    ]
    if "alone" in rounds:
        lines += ["", "Milliseconds of CPU of a rank alone, medians of rounds:", ""]
        lines += _rank_lines(results)
    return "\n".join(lines)


def _ratio_lines(results: dict[str, Any]) -> list[str]:
    heads = ["", "ranks", ""]
    heads += [f"{name}, {clock}" for clock in ("CPU time", "clock") for name in BALANCED]
    lines = [[*heads, "of pairs", "own core"], ["---"] * 9]
    for part, ranks, way, rows in groups(results):
        line = [PARTS[part], str(ranks), way]
        for clock in ("cpu", "wall"):
            # The devices of one process have one CPU time, which is that of all their work.
            known = (part, clock) != ("devices", "cpu")
            line += [_cell(ratios(rows, name, clock)) if known else "" for name in BALANCED]
        line += [f"{limit(ranks, results['tokens']):.3f}"]
        line += [f"{own_core(rows):.0%}" if part == "alone" else ""]
        lines.append(line)
    return _markdown(lines)


def own_core(rows: Rows) -> float:
    """The part of the time for which a process had its core, the median of samples.

    Below 1 something else ran there, and ratios of the clock say as much about that.
    """
    return float(np.median([row["cpu"] / row["wall"] for row in rows]))


def _cell(ratio: dict[str, float]) -> str:
    return f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"


def _rank_lines(results: dict[str, Any]) -> list[str]:
    lines = [["ranks", "", "layout", "busiest", "rank by rank, once", "µs a block"], ["---"] * 6]
    for part, ranks, way, rows in groups(results):
        if part != "alone":
            continue
        for name in (BASE, *BALANCED):
            mine = [row for row in rows if row["layout"] == name]
            once = {row["rank"]: row for row in mine if row["round"] == 0}
            a_block = np.quantile([1e6 * row["cpu"] / row["blocks"] for row in mine], [0.25, 0.75])
            lines.append(
                [
                    str(ranks),
                    way,
                    name,
                    f"{1e3 * np.median(by_round(rows, name, 'cpu')):.0f}",
                    " ".join(f"{1e3 * once[rank]['cpu']:.0f}" for rank in sorted(once)),
                    f"{a_block[0]:.0f} to {a_block[1]:.0f}",
                ]
            )
    return _markdown(lines)


def _markdown(lines: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(line) + " |" for line in lines]


def verdict(results: dict[str, Any]) -> str:
    """Whether ranks timed alone show the balance that they should; empty where none were."""
    found = []
    for part, ranks, way, rows in groups(results):
        if part == "alone" and ranks in WANTED:
            least = min(ratios(rows, name, "cpu")["median"] for name in BALANCED)
            sign = "at least" if least >= WANTED[ranks] else "BELOW"
            found.append(f"{ranks} ranks, {way}: {least:.2f}, {sign} {WANTED[ranks]}")
    return "\n".join(found)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `plait bench balance`."""
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART",
        help=f"of {', '.join(PARTS)}",
    )  # fmt: skip
    parser.add_argument(
        "--ranks", nargs="+", type=integer("--ranks", 2, 64, works=8), default=[2, 8],
        metavar="N", help="how many ranks, for those that are timed alone",
    )  # fmt: skip
    for flag, value, most, what in (
        ("--tokens", 16384, 2**20, "in the sequence"),
        ("--heads", 1, 128, "of queries; time is in proportion to them"),
        ("--kv-heads", 1, 128, "of keys and values"),
        ("--head-dim", 64, 1024, "width of a head"),
        ("--block", 256, 4096, "most queries and most keys in a block of the kernel"),
        ("--rounds", 9, 1000, "most rounds; a round times every layout once"),
        ("--seconds", 160, 36000, "no round begins later, but for the first three of a part"),
    ):
        parser.add_argument(
            flag, type=integer(flag, 1, most, works=value), default=value, metavar="N",
            help=f"{what} (default: {value})",
        )  # fmt: skip
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write all samples here")
    parser.add_argument(
        "--from", dest="source", type=pathlib.Path, metavar="FILE",
        help="take the samples that --json wrote, and time nothing",
    )  # fmt: skip
    parser.add_argument(
        "--docs", action="store_true", help="rewrite the tables in docs/performance.md"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure or read the samples, print their tables, and write what was asked for."""
    if arguments.source:
        results = _earlier(arguments.source)
    else:
        _check(arguments)
        results = measure(arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    text = table(results)
    print("\n" + text)
    print("\n" + verdict(results))
    if arguments.docs:
        pages.rewrite(pages.DOCS / "performance.md", "bench balance", text)
    return 0


def _earlier(path: pathlib.Path) -> dict[str, Any]:
    try:
        results = json.loads(path.read_text())
        list(groups(results))
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(
            f"bench balance: --from is {str(path)!r}; it needs to be a file that --json wrote"
        ) from None
    return results


def _check(arguments: argparse.Namespace) -> None:
    """UserError for what would fail in a process, or only after minutes."""
    if not hasattr(os, "sched_setaffinity"):
        raise UserError(
            f"bench balance: {platform.system()} pins no process to a core; it needs Linux"
        )
    if "processes" in arguments.parts and len(os.sched_getaffinity(0)) < 2:
        raise UserError(
            "bench balance: two processes need two cores and there is one; "
            "--parts alone devices works"
        )
    if arguments.heads % arguments.kv_heads:
        raise UserError(
            f"bench balance: --kv-heads is {arguments.kv_heads}; it needs to divide the "
            f"{arguments.heads} heads: 1 works"
        )
    if arguments.json and not arguments.json.parent.is_dir():
        raise UserError(
            f"bench balance: --json is {str(arguments.json)!r}; there is no folder "
            f"{str(arguments.json.parent)!r}: {arguments.json.name} works"
        )
    ranks = {"alone": arguments.ranks, "processes": [2], "devices": [DEVICES]}
    for count in sorted({n for part in arguments.parts for n in ranks[part]}):
        for name in (*BALANCED, BASE):  # what suits the first suits the last
            try:
                LAYOUTS[name](count).check_length(arguments.tokens)
            except ValueError as error:
                raise UserError(f"bench balance: --tokens: {error}") from error


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    sys.exit(run(parser.parse_args()))
