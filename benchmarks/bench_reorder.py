"""`plait bench reorder`: moves between source order and zigzag, plait beside what the field runs.

Static figures come from the compilers of TPUs and GPUs that need not be there; times from the
devices of this machine, each as a ratio to a plain copy of the same bytes in the same run. Every
form is held to a NumPy oracle before it is compared.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import importlib.metadata
import json
import math
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import pages
import peers
from plait import ContextParallel, HalfSwap, Zigzag, audit
from plait.cli.arguments import UserError, integer

K = 1024


@dataclasses.dataclass(frozen=True)
class Tensor:
    """What a model moves: `axis` of `shape` is the sequence, its length there left as 0."""

    name: str
    shape: tuple[int, ...]
    axis: int
    dtype: str = "bfloat16"

    def of_length(self, length: int) -> jax.ShapeDtypeStruct:
        shape = tuple(length if d == self.axis else s for d, s in enumerate(self.shape))
        return jax.ShapeDtypeStruct(shape, jnp.dtype(self.dtype))

    def spec(self) -> P:
        return P(*[None] * self.axis, "context")


TENSORS = (
    Tensor("tokens int32 [8,S]", (8, 0), 1, "int32"),
    Tensor("hidden [1,S,7168]", (1, 0, 7168), 1),
    Tensor("K [1,16,S,192]", (1, 16, 0, 192), 2),
    Tensor("V [1,16,S,128]", (1, 16, 0, 128), 2),
    Tensor("latent [1,S,576]", (1, 0, 576), 1),
    Tensor("KV [1,S,8,128]", (1, 0, 8, 128), 1),
)

DIRECTIONS = {"reorder": False, "restore": True}


@dataclasses.dataclass(frozen=True)
class Case:
    """One program to compile or to time."""

    place: str
    """"sharded", "local" or "gather": an all-gather, then the restore of what it brought."""
    form: str
    direction: str
    backward: bool
    tensor: Tensor
    length: int
    ranks: int
    topology: str


# Where XLA's compiler partitions a form, it is called on the global array.
SHARDED: dict[str, peers.Form] = {**peers.PEERS, "plait": peers.plait_sharded}
LOCAL: dict[str, peers.Form] = {**peers.PEERS, "plait": peers.plait_local}


def half_swap(x: Any, ranks: int, axis: int, to_contiguous: bool) -> jax.Array:
    cp = ContextParallel(HalfSwap(ranks), "context")
    return (cp.restore if to_contiguous else cp.reorder)(x, axis=axis)


def gathered(form: str, ranks: int, axis: int) -> Callable[[jax.Array], jax.Array]:
    """What a form makes of this rank's zigzag shard: the whole tensor, in source order."""
    cp = ContextParallel(Zigzag(ranks), "context")

    def gather(x: jax.Array) -> jax.Array:
        if form == "plait":
            return cp.all_gather(x, axis=axis)
        whole = lax.all_gather(x, "context", axis=axis, tiled=True)
        return whole if form == "no reorder" else LOCAL[form](whole, ranks, axis, True)

    return gather


def _transposed(fn: Callable[[Any], Any], aval: Any) -> Callable[[Any], Any]:
    def backward(cotangent: jax.Array) -> jax.Array:
        (x,) = jax.linear_transpose(fn, aval)(cotangent)
        return x

    return backward


def _program(case: Case, mesh: Mesh | None) -> tuple[Any, jax.ShapeDtypeStruct, P, P]:
    """The function of a case, its argument, and the specs of that and of the result."""
    axis, spec = case.tensor.axis, case.tensor.spec()
    aval = case.tensor.of_length(case.length)
    if case.place != "gather":
        forms = {**SHARDED, "plait half swap": half_swap} if case.place == "sharded" else LOCAL
        back = DIRECTIONS[case.direction]
        fn = functools.partial(forms[case.form], ranks=case.ranks, axis=axis, to_contiguous=back)
        return (_transposed(fn, aval) if case.backward else fn), aval, spec, spec
    inside = gathered(case.form, case.ranks, axis)
    shard = case.tensor.of_length(case.length // case.ranks)
    if case.backward:
        inside = _transposed(inside, shard)
    ends = (P(), spec) if case.backward else (spec, P())
    mapped = jax.shard_map(inside, mesh=mesh, in_specs=ends[0], out_specs=ends[1], check_vma=False)
    return mapped, aval, *ends


def compile_case(case: Case) -> dict[str, Any]:
    """The static figures of a case, on one device."""
    target = audit.topology(case.topology)
    if case.place == "local":
        fn, aval, _, _ = _program(case, None)
        report = audit.compile_for(target, fn, aval)
    else:
        mesh = target.mesh({"context": case.ranks})
        fn, aval, in_spec, out_spec = _program(case, mesh)
        report = audit.compile_for(
            target, fn, aval, mesh=mesh, in_specs=in_spec, out_specs=out_spec
        )
    return _row(case, report)


def _row(case: Case, report: audit.Report) -> dict[str, Any]:
    aval = case.tensor.of_length(case.length)
    size = math.prod(aval.shape) * aval.dtype.itemsize
    unit = size // case.ranks if case.place == "sharded" else size
    kinds: dict[str, int] = {}
    for collective in report.collectives:
        if collective.stage:
            kinds[collective.kind] = kinds.get(collective.kind, 0) + 1
    counts = report.counts
    seconds = report.estimated_seconds
    return {
        **{f.name: getattr(case, f.name) for f in dataclasses.fields(case)},
        "tensor": case.tensor.name,
        "unit_bytes": unit,
        "hbm_units": report.hbm_bytes / unit,
        "counted_units": report.counted_bytes / unit,
        "temp_units": report.temp_bytes / unit,
        "traffic_units": report.traffic_bytes / unit,
        "collectives": kinds,
        "stages": report.stages,
        "sequential": {k: counts[k] for k in ("gather", "scatter", "while", "sort") if k in counts},
        "estimated_microseconds": None if seconds is None else seconds * 1e6,
        "compile_seconds": report.compile_seconds,
    }


V5P = "v5p:4x4x8"
SLICES = {8: "v5p:2x2x2", 32: "v5p:2x4x4", 128: V5P}
OTHERS = {
    "v5e": {8: "v5e:2x4", 32: "v5e:4x8", 128: "v5e:8x16"},
    "v6e": {8: "v6e:2x4", 32: "v6e:4x8", 128: "v6e:8x16"},
    "h200": {8: "h200:1x1x8", 64: "h200:1x8x8"},
}
LATENT, KEYS, TOKENS = TENSORS[4], TENSORS[2], TENSORS[0]
LOCAL_RANKS = 8
"""Ranks of the layout that is timed on one device."""

QUICK = ("take", "strided", "plait")


def cases(full: bool) -> Iterator[Case]:
    """What is compiled: every tensor at 128 ranks and 128K; other sizes for some, or with full."""
    both, once = (False, True), (False,)
    at = {"length": 128 * K, "ranks": 128, "topology": V5P}
    for tensor in TENSORS:
        for direction in DIRECTIONS:
            for backward in both:
                # The other gathers are to the backward what `take` is; half of the compiling.
                forms = QUICK if backward and not full else (*SHARDED,)
                for form in (*forms, "plait half swap"):
                    yield Case("sharded", form, direction, backward, tensor, **at)
                for form in forms:
                    yield Case("local", form, direction, backward, tensor, **at)
        for backward in both:
            for form in ("no reorder", "take", "strided", "plait"):
                yield Case("gather", form, "restore", backward, tensor, **at)
    for chips in (SLICES, *OTHERS.values()):
        for ranks, topology in chips.items():
            for length in (8 * K, 128 * K, 1024 * K) if full or ranks == 8 else (128 * K,):
                if (chips, ranks, length) == (SLICES, 128, 128 * K):
                    continue
                for tensor in TENSORS if full else (LATENT,):
                    for direction in DIRECTIONS:
                        for backward in both if full else once:
                            for form in QUICK:
                                sizes = (tensor, length, ranks, topology)
                                yield Case("sharded", form, direction, backward, *sizes)
                    for form in ("no reorder", *QUICK):
                        for backward in both if full else once:
                            yield Case(
                                "gather", form, "restore", backward, tensor, length, ranks, topology
                            )


def _device_arrays(case: Case) -> tuple[Any, Any]:
    """Random contents for a case, on the devices that it runs on, and its jitted function."""
    aval = case.tensor.of_length(case.length)
    values = np.random.default_rng(0).integers(-100, 100, aval.shape).astype(aval.dtype)
    if case.place == "local":
        fn, _, _, _ = _program(case, None)
        return jax.device_put(values, jax.devices()[0]), jax.jit(fn)
    mesh = audit.topology("local").mesh({"context": case.ranks})
    fn, _, in_spec, out_spec = _program(case, mesh)
    x = jax.device_put(values, NamedSharding(mesh, in_spec))

    jitted = jax.jit(fn, out_shardings=NamedSharding(mesh, out_spec))

    def in_mesh(x: jax.Array) -> jax.Array:
        with jax.set_mesh(mesh):
            return jitted(x)

    return x, in_mesh


def _spread(samples: list[float]) -> dict[str, float]:
    low, middle, high = np.quantile(samples, [0.25, 0.5, 0.75])
    return {"low": float(low), "median": float(middle), "high": float(high)}


def time_cases(group: list[Case], repeats: int) -> list[dict[str, Any]]:
    """Seconds of cases that move the same bytes, as ratios to a copy, by turns in one run."""
    programs: dict[str, Callable[[], Any]] = {}
    for case in group:
        x, fn = _device_arrays(case)
        _check_result(case, x, fn(x))
        programs[case.form] = functools.partial(fn, x)
    copy = jax.jit(lambda x: x * 1 if x.dtype == jnp.int32 else jnp.copy(x))
    programs["copy"] = functools.partial(copy, x)
    return [
        {**_labels(case), **figures}
        for case, figures in zip(group, _ratios(programs, "copy", repeats), strict=False)
    ]


def _labels(case: Case) -> dict[str, Any]:
    labels = {f.name: getattr(case, f.name) for f in dataclasses.fields(case)}
    return {**labels, "tensor": case.tensor.name}


def _check_result(case: Case, x: Any, moved: Any) -> None:
    """A program is the move or its transpose, which is the move the other way."""
    back = DIRECTIONS[case.direction] != case.backward
    table = peers.order(case.ranks, case.length, back)
    np.testing.assert_array_equal(moved, np.take(np.asarray(x), table, axis=case.tensor.axis))


SAMPLE_SECONDS = 2e-3


def _seconds(run: Callable[[], Any], calls: int) -> float:
    """Seconds of one call, the mean of `calls` in a row."""
    start = time.perf_counter()
    for _ in range(calls):
        jax.block_until_ready(run())
    return (time.perf_counter() - start) / calls


def _calls(run: Callable[[], Any]) -> int:
    """How many calls take `SAMPLE_SECONDS`; the first, which compiles, is not asked."""
    jax.block_until_ready(run())
    return max(1, math.ceil(SAMPLE_SECONDS / _seconds(run, 1)))


def _ratios(
    programs: dict[str, Callable[[], Any]], base: str, repeats: int
) -> Iterator[dict[str, Any]]:
    """For each program, its times over the median of `base`, taken by turns.

    A sample is as many calls as take `SAMPLE_SECONDS`, so that what is timed of a small move is
    the move and not the clock, and every other turn goes backward: what ran before a program warms
    the caches for it.
    """
    calls = {name: _calls(run) for name, run in programs.items()}
    times: dict[str, list[float]] = {name: [] for name in programs}
    for turn in range(repeats):
        for name in [*programs][:: -1 if turn % 2 else 1]:
            times[name].append(_seconds(programs[name], calls[name]))
    unit = float(np.median(times[base]))
    for name, samples in times.items():
        yield {"form": name, "copy_seconds": unit, "ratio": _spread([s / unit for s in samples])}


def time_host(repeats: int) -> list[dict[str, Any]]:
    """NumPy's ways to reorder a batch on the host, as ratios to a copy of it."""
    found = []
    for length in (8 * K, 128 * K, 1024 * K):
        ranks = 128
        x = np.random.default_rng(0).integers(0, 2**31, (8, length), dtype=np.int32)
        cp, table = ContextParallel(Zigzag(ranks)), peers.order(ranks, length, False)
        programs = {
            "plait": lambda x=x, cp=cp: cp.reorder(x),
            "numpy take": lambda x=x, table=table: np.take(x, table, axis=1),
            "copy": lambda x=x: x.copy(),
        }
        np.testing.assert_array_equal(programs["plait"](), programs["numpy take"]())
        for figures in _ratios(programs, "copy", repeats):
            found.append(
                {"place": "host", "length": length, "tensor": "tokens int32 [8,S]", **figures}
            )
    return found


def _timed_ranks() -> int:
    """Ranks that are timed on the devices of this machine."""
    devices = len(jax.devices())
    return max(n for n in (1, 2, 4, 8, 64) if n <= devices)


def _check_length(length: int) -> None:
    multiple = Zigzag(max(LOCAL_RANKS, _timed_ranks())).multiple
    if length % multiple:
        raise UserError(
            f"plait bench reorder: --length is {length}; it needs a multiple of {multiple}: "
            f"{-(-length // multiple) * multiple} works"
        )


def timed_groups(length: int) -> Iterator[list[Case]]:
    """Cases to time, those together that are compared."""
    ranks = _timed_ranks()
    for tensor in TENSORS:
        for direction in DIRECTIONS:
            for place, forms, count in (("local", LOCAL, LOCAL_RANKS), ("sharded", SHARDED, ranks)):
                if place == "sharded" and ranks == 1:
                    continue
                for backward in (False, True):
                    sizes = (direction, backward, tensor, length, count, "local")
                    yield [Case(place, form, *sizes) for form in forms]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `plait bench reorder`."""
    parser.add_argument("--static", action="store_true", help="only what the compilers say")
    parser.add_argument("--timed", action="store_true", help="only what this machine's clock says")
    parser.add_argument("--full", action="store_true", help="every size, tensor and topology")
    parser.add_argument("--only", default="", help="only static cases whose line contains this")
    parser.add_argument(
        "--length",
        type=integer("--length", 1, 2**31 - 1, works=4 * K),
        default=4 * K,
        help="tokens that are timed",
    )
    parser.add_argument(
        "--repeats",
        type=integer("--repeats", 1, 10**6, works=9),
        default=9,
        help="timings of each program",
    )
    parser.add_argument("--json", type=pathlib.Path, help="write all figures to this file")
    parser.add_argument(
        "--from",
        dest="earlier",
        type=pathlib.Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="run nothing: take the figures of these files, the last of each kind",
    )
    parser.add_argument("--docs", action="store_true", help="rewrite the tables of docs/")


def run(arguments: argparse.Namespace) -> int:
    """Check every form, compare them, print, and write what was asked for."""
    pages.check_writable("plait bench reorder", arguments.json)
    if arguments.earlier:
        results = _joined(
            [pages.read("plait bench reorder", f, "static") for f in arguments.earlier]
        )
    else:
        results = _measure(arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    if arguments.docs:
        pages.rewrite(pages.DOCS / "performance.md", "bench reorder", page(results))
    return 0


def _joined(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Several runs as one: what a later one has, static figures or times, replaces an earlier's."""
    joined: dict[str, Any] = {"static": [], "timed": []}
    for run in runs:
        for kind in ("static", "timed"):
            if run[kind]:
                joined = {**joined, **run, "static": joined["static"], "timed": joined["timed"]}
                joined |= {kind: run[kind], f"{kind}_date": run["date"]}
    return joined


def _measure(arguments: argparse.Namespace) -> dict[str, Any]:
    both = arguments.static == arguments.timed
    chosen = [
        case
        for case in cases(arguments.full)
        if arguments.only in " ".join(str(v) for v in _labels(case).values())
    ]
    if (both or arguments.static) and not chosen:
        raise UserError(
            f"plait bench reorder: --only is {arguments.only!r}, which stands in no line; it needs "
            "words of one, such as 'sharded plait'"
        )
    if both or arguments.timed:
        _check_length(arguments.length)
    for form in (*peers.PEERS.values(), peers.plait_local):
        peers.check(form)
    results: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "jax": jax.__version__,
        "libtpu": _version("libtpu"),
        "cores": os.cpu_count(),
        "static": [],
        "timed": [],
    }
    results["static_date"] = results["timed_date"] = results["date"]
    if both or arguments.static:
        for case in chosen:
            results["static"].append(_show(compile_case(case)))
    if both or arguments.timed:
        results["device"] = jax.devices()[0].device_kind
        for group in timed_groups(arguments.length):
            for row in time_cases(group, arguments.repeats):
                results["timed"].append(_show_time(row))
        for row in time_host(arguments.repeats):
            results["timed"].append(_show_time(row))
    return results


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _show(row: dict[str, Any]) -> dict[str, Any]:
    way = "backward" if row["backward"] else "forward"
    kinds = ", ".join(f"{n} {k}" for k, n in row["collectives"].items()) or "no collective"
    odd = " ".join(f"{n} {k}" for k, n in row["sequential"].items())
    print(
        f"{row['topology']:11} {row['place']:8} {row['tensor']:19} {row['length'] // K:5}K "
        f"{row['direction']} {way:8} {row['form']:16} {row['hbm_units']:8.2f} units "
        f"temp {row['temp_units']:7.2f} {row['compile_seconds']:5.1f} s  {kinds} "
        f"in {row['stages']}  {odd}",
        flush=True,
    )
    return row


def _show_time(row: dict[str, Any]) -> dict[str, Any]:
    ratio = row["ratio"]
    way = "backward" if row.get("backward") else "forward"
    print(
        f"{row['place']:8} {row['tensor']:19} {row.get('direction', 'reorder')} {way:8} "
        f"{row['form']:16} {ratio['median']:7.2f} of a copy "
        f"({ratio['low']:.2f} to {ratio['high']:.2f})",
        flush=True,
    )
    return row


def page(results: dict[str, Any]) -> str:
    """The tables of docs/performance.md."""
    parts = [_static_page(results), _timed_page(results)]
    return "\n\n".join(part for part in parts if part)


def _static_page(results: dict[str, Any]) -> str:
    rows = results["static"]
    if not rows:
        return ""
    at_home = [r for r in rows if (r["topology"], r["ranks"], r["length"]) == (V5P, 128, 128 * K)]
    elsewhere = [r for r in rows if r not in at_home]
    forms = {"sharded": [*SHARDED, "plait half swap"], "local": [*LOCAL]}
    gathers = ["no reorder", "take", "strided", "plait"]
    text = [
        f"Compiled on {results['static_date']} with jax {results['jax']}, libtpu "
        f"{results['libtpu']}: the compilers' static figures, not clocks.",
        "### Sharded, v5p:4x4x8, 128 ranks, 128K tokens",
        "Bytes of HBM in shards (to read and write a shard once is 2); in brackets collectives in "
        "serial stages. The larger of reorder and restore, forward and backward.",
        _table(_of(at_home, "sharded"), "tensor", forms["sharded"], _bytes_and_stages),
        "Temporary memory, in shards:",
        _table(_of(at_home, "sharded"), "tensor", forms["sharded"], _temp),
        "### Local, one chip of v5p, 128 ranks, 128K tokens",
        "Bytes of HBM in tensors (to read and write it once is 2) and, after the comma, temporary "
        "memory. The larger of reorder and restore, forward and backward.",
        _table(_of(at_home, "local"), "tensor", forms["local"], _bytes_and_temp),
        "Compile time in seconds on the machine that wrote this page, the longest of the four:",
        _table(_of(at_home, "local"), "tensor", forms["local"], _compile_time),
        "### All-gather and restore inside `shard_map`, v5p:4x4x8, 128 ranks, 128K tokens",
        "Bytes of HBM in whole tensors, forward and then backward. `no reorder` is the plain "
        "all-gather, in layout order.",
        _table(_of(at_home, "gather"), "tensor", gathers, _both_ways),
    ]
    for chip in dict.fromkeys(r["topology"].partition(":")[0] for r in elsewhere):
        of_chip = [r for r in elsewhere if r["topology"].startswith(f"{chip}:")]
        for row in of_chip:
            row["size"] = f"{row['tensor']}, {row['ranks']} ranks, {row['length'] // K}K"
        text += [
            f"### {chip}, other sizes",
            "Sharded: bytes in shards, collectives in stages, the larger of both directions."
            + (
                " Bytes are counted from the program, as this compiler gives none."
                * (chip[0] == "h")
            ),
            _table(_of(of_chip, "sharded"), "size", [*QUICK], _bytes_and_stages),
            "All-gather and restore: bytes in whole tensors, forward.",
            _table(_of(of_chip, "gather"), "size", gathers, _both_ways),
        ]
    return "\n\n".join(text)


Rows = list[dict[str, Any]]


def _of(rows: Rows, place: str) -> Rows:
    return [row for row in rows if row["place"] == place]


def _table(rows: Rows, by: str, forms: list[str], cell: Callable[[Rows], str]) -> str:
    """A Markdown table: a line for each value of `by`, a column for each form."""
    lines = [["", *forms], ["---"] * (len(forms) + 1)]
    for label in dict.fromkeys(row[by] for row in rows):
        found = [[r for r in rows if r[by] == label and r["form"] == form] for form in forms]
        lines.append([label, *(cell(r) if r else "" for r in found)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"


def _bytes_and_stages(rows: Rows) -> str:
    worst = max(rows, key=lambda row: row["hbm_units"])
    count = sum(worst["collectives"].values())
    return f"{_number(worst['hbm_units'])} ({count} in {worst['stages']})"


def _temp(rows: Rows) -> str:
    return _number(max(row["temp_units"] for row in rows))


def _bytes_and_temp(rows: Rows) -> str:
    return f"{_number(max(row['hbm_units'] for row in rows))}, {_temp(rows)}"


def _compile_time(rows: Rows) -> str:
    return f"{max(row['compile_seconds'] for row in rows):.1f}"


def _both_ways(rows: Rows) -> str:
    return ", ".join(_number(row["hbm_units"]) for row in sorted(rows, key=lambda r: r["backward"]))


def _timed_page(results: dict[str, Any]) -> str:
    rows = results["timed"]
    if not rows:
        return ""
    text = [
        "### By the clock",
        f"Timed on {results['timed_date']} on {results['device']} ({results['cores']} cores), "
        "medians as ratios to a plain copy of the same bytes, taken by turns in the same run, with "
        "the quartiles. Forward, the larger median of reorder and restore; the programs of the "
        "derivative are the same moves.",
    ]
    for place in ("local", "sharded"):
        moves = [row for row in _of(rows, place) if not row["backward"]]
        if moves:
            count = f" over {moves[0]['ranks']} devices" if place == "sharded" else ""
            text += [
                f"{place.capitalize()}{count}, zigzag over {moves[0]['ranks']} ranks, "
                f"{moves[0]['length'] // K}K tokens:",
                _table(moves, "tensor", [*SHARDED], _ratio),
            ]
    hosts = _of(rows, "host")
    for row in hosts:
        row["size"] = f"{row['tensor']}, 128 ranks, {row['length'] // K}K"
    text += ["On the host, NumPy:", _table(hosts, "size", ["plait", "numpy take"], _ratio)]
    return "\n\n".join(text)


def _ratio(rows: Rows) -> str:
    worst = max((row["ratio"] for row in rows), key=lambda ratio: ratio["median"])
    return f"{worst['median']:.2f} ({worst['low']:.2f} to {worst['high']:.2f})"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    sys.exit(run(parser.parse_args()))
