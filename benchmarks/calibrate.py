"""How far to trust static figures: one change whose effect was measured, and two compilers.

    python benchmarks/calibrate.py --record     # compile, and write benchmarks/recorded/
    python benchmarks/calibrate.py --docs       # from what is recorded, docs/calibration.md

The change: MaxText restored gathered keys and values by a gather of chunks (`take of chunks` here)
and does so by strided slices now; its DeepSeek-V3.2 run at 128K tokens went from 77 s to 74 s a
step. What the compiler's figures make of the same change is computed here, and what they make of
restoring the shard before it is gathered, as plait does. Recording compiles some fifty programs for
v5p:4x4x8 (about five minutes on two cores, with libtpu installed); nothing is run.
"""

import argparse
import itertools
import json
import math
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import bench_step
import pages
import peers
import static
from plait.audit import Topology, compile_for, topology

RECORDED = pathlib.Path(__file__).resolve().parent / "recorded"

TOPOLOGY, RANKS, TOKENS = "v5p:4x4x8", 128, 131072
LAYERS = 61
MEASURED_BEFORE, MEASURED_AFTER = 77.0, 74.0
"""Seconds a step of the field's run, with the gather and with slices."""

# Per device, its 128 heads sharded 8 ways: [batch, heads, sequence, head_dim].
TENSORS = {"K": (1, 16, TOKENS, 192), "V": (1, 16, TOKENS, 128)}
PASSES = ("forward", "backward")
FORMS = ("take", "take of chunks", "strided", "plait")

Record = dict[str, Any]


def programs() -> Iterator[tuple[str, Callable[..., Any], jax.ShapeDtypeStruct, dict[str, Any]]]:
    """("place, tensor, form, pass", function, argument, how to compile it) of every program.

    Places: "local", restore of what one device holds whole; "sharded", restore of a global array
    over all ranks; "gather", all-gather and restore, inside a manual region.
    """
    spec = P(None, None, "context", None)
    over_mesh = {"mesh": {"context": RANKS}}
    sharded = {**over_mesh, "in_specs": spec, "out_specs": spec}
    for tensor, shape in TENSORS.items():
        whole = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        shard = jax.ShapeDtypeStruct((*shape[:2], TOKENS // RANKS, shape[3]), jnp.bfloat16)
        for form in FORMS:
            move = peers.PEERS.get(form, peers.plait_local)
            for passed, fn in _both(_restore(move), whole):
                yield f"local, {tensor}, {form}, {passed}", fn, whole, {}
        for form in FORMS:
            move = peers.PEERS.get(form, peers.plait_sharded)
            for passed, fn in _both(_restore(move), whole):
                yield f"sharded, {tensor}, {form}, {passed}", fn, whole, sharded
        for form, gather in bench_step.gathers(RANKS).items():
            for passed, fn in _both(gather, shard):
                given, wanted = (spec, P()) if passed == "forward" else (P(), spec)
                region = jax.shard_map(fn, in_specs=given, out_specs=wanted, check_vma=False)
                options = {**over_mesh, "in_specs": given}
                yield f"gather, {tensor}, {form}, {passed}", region, whole, options


def _restore(form: peers.Form) -> Callable[[jax.Array], jax.Array]:
    return lambda x: form(x, RANKS, 2, True)


def _both(fn: Callable, aval: jax.ShapeDtypeStruct) -> Iterator[tuple[str, Callable]]:
    yield "forward", fn
    yield "backward", lambda g: jax.linear_transpose(fn, aval)(g)[0]


def record(target: Topology) -> Record:
    """The figures of every program, with the versions that they are of."""
    found: Record = {"versions": static.versions(), "topology": target.name, "programs": {}}
    for name, fn, argument, options in programs():
        figures = static.figures(compile_for(target, fn, argument, **options), target)
        found["programs"][name] = figures.to_dict()
        print(f"{name}: {1e3 * figures.seconds:.3f} ms", flush=True)
    shard = sum(2 * 16 * TOKENS // RANKS * shape[3] for shape in TENSORS.values())
    found["permute_seconds"] = static.zigzag_permute_seconds(shard, target, RANKS)
    return found


def at_least(recorded: Record, key: str) -> float:
    """Seconds of a program, what has no estimate at the HBM's peak."""
    return recorded["programs"][key]["seconds"]


def as_loops(recorded: Record, key: str) -> float:
    """The same, but gathers without an estimate as slow as those that became loops.

    Per byte of the tensor, the slowest local one of the same form that this compiler can estimate.
    """
    if not recorded["programs"][key]["opaque"]:
        return at_least(recorded, key)
    _, tensor, form, _ = key.split(", ")
    loops = [
        at_least(recorded, other) * math.prod(TENSORS[tensor]) / math.prod(TENSORS[name])
        for name, passed in itertools.product(TENSORS, PASSES)
        for other in [f"local, {name}, {form}, {passed}"]
        if not recorded["programs"][other]["opaque"]
    ]
    return max(loops, default=at_least(recorded, key))


def saving(
    recorded: Record,
    before: tuple[str, str],
    after: tuple[str, str],
    seconds: Callable[[Record, str], float] = at_least,
) -> dict[str, float]:
    """Seconds between two (place, form): of K and V in a layer's pass, and of a training step.

    Forward runs once, or twice where its activations are rematerialised; backward once.

    >>> slow, fast = {"seconds": 0.02, "opaque": ()}, {"seconds": 0.01, "opaque": ()}
    >>> names = [f"local, {x}, {{}}, {p}" for x in TENSORS for p in PASSES]
    >>> figures = {n.format("a"): slow for n in names} | {n.format("b"): fast for n in names}
    >>> found = saving({"programs": figures}, ("local", "a"), ("local", "b"))
    >>> round(found["2 passes"], 2), round(found["3 passes"], 2)  # 61 * 2 * 10 ms, and 3 of them
    (2.44, 3.66)
    """

    def layer(which: tuple[str, str], passed: str) -> float:
        return sum(seconds(recorded, f"{which[0]}, {x}, {which[1]}, {passed}") for x in TENSORS)

    forward, backward = (layer(before, p) - layer(after, p) for p in PASSES)
    return {
        "forward": forward,
        "backward": backward,
        "2 passes": LAYERS * (forward + backward),
        "3 passes": LAYERS * (2 * forward + backward),
    }


def plait_saving(recorded: Record) -> dict[str, float]:
    """From strided slices to plait's gather, the permutes on the busiest link subtracted."""
    found = saving(recorded, ("gather", "strided"), ("gather", "plait"))
    links = recorded["permute_seconds"]
    return {
        "forward": found["forward"] - links,
        "backward": found["backward"] - links,
        "2 passes": found["2 passes"] - LAYERS * 2 * links,
        "3 passes": found["3 passes"] - LAYERS * 3 * links,
    }


def _range(found: dict[str, float]) -> str:
    low, high = sorted(found[f"{n} passes"] for n in (2, 3))
    return f"{low:.2f} to {high:.2f}"


def calibration(records: list[Record]) -> str:
    """The prediction beside the measurement, as Markdown, with its arithmetic."""
    change = ("local", "take of chunks"), ("local", "strided")
    lines = [
        "| saved a step, s | `take` to slices, at least | gathers as slow as the loops "
        "| slices to plait | of 74 s |",
        "| --- | --- | --- | --- | --- |",
    ]
    for recorded in records:
        then = plait_saving(recorded)
        shares = sorted(100 * then[f"{n} passes"] / MEASURED_AFTER for n in (2, 3))
        cells = [
            name_of(recorded),
            _range(saving(recorded, *change)),
            _range(saving(recorded, *change, as_loops)),
            _range(then),
            f"{shares[0]:.1f} to {shares[1]:.1f}%",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    measured = f"{MEASURED_BEFORE - MEASURED_AFTER:.0f}"
    lines.append(f"| measured in the field | {measured} | {measured} | not measured | |")
    for recorded in records:
        lines += ["", f"{name_of(recorded)}, ms, K and V:", ""]
        for title, seconds in (("at least", at_least), ("as loops", as_loops)):
            lines += _arithmetic(
                title, change, saving(recorded, *change, seconds), recorded, seconds
            )
        change_to_plait = ("gather", "strided"), ("gather", "plait")
        found = saving(recorded, *change_to_plait)
        lines += _arithmetic("to plait", change_to_plait, found, recorded, at_least)
        lines.append(
            f"    and {1e3 * recorded['permute_seconds']:.2f} a layer and pass less, for plait's "
            "permutes on the busiest link"
        )
    return "\n".join(lines)


def _arithmetic(
    title: str,
    change: tuple[tuple[str, str], tuple[str, str]],
    found: dict[str, float],
    recorded: Record,
    seconds: Callable[[Record, str], float],
) -> list[str]:
    lines = []
    for passed in PASSES:
        sums = [
            " + ".join(
                f"{1e3 * seconds(recorded, f'{a}, {x}, {b}, {passed}'):.2f}" for x in TENSORS
            )
            for a, b in change
        ]
        difference = f"{1e3 * found[passed]:.2f}"
        lines.append(f"    {title}, {passed}: ({sums[0]}) - ({sums[1]}) = {difference}")
    both = [f"{1e3 * found[passed]:.2f}" for passed in PASSES]
    lines.append(
        f"    {title}, {LAYERS} layers: {LAYERS} * ({both[0]} + {both[1]}) = "
        f"{1e3 * found['2 passes']:.0f}; with the forward pass twice {1e3 * found['3 passes']:.0f}"
    )
    return lines


def ranking(recorded: Record, line: tuple[str, str, str], figure: str) -> list[str]:
    """The forms of a (place, tensor, pass), the least first, by "hbm_bytes" or "seconds"."""
    place, tensor, passed = line
    programs = recorded["programs"]
    return sorted(FORMS, key=lambda form: programs[f"{place}, {tensor}, {form}, {passed}"][figure])


def comparison(records: list[Record]) -> str:
    """Every program by every compiler, as Markdown, and which rankings agree."""
    table = list(itertools.product(("local", "sharded", "gather"), TENSORS, PASSES))
    columns = ("none", *FORMS)
    lines = []
    for recorded in records:
        lines += [
            f"{name_of(recorded)}; GB of HBM, ms:",
            "",
            "| | " + " | ".join(columns) + " |",
            "| --- |" + " --- |" * len(columns),
        ]
        for place, tensor, passed in table:
            cells = []
            for form in columns:
                figures = recorded["programs"].get(f"{place}, {tensor}, {form}, {passed}")
                if figures is None:
                    cells.append("")
                    continue
                least = "≥ " if figures["opaque"] else ""
                gigabytes, ms = figures["hbm_bytes"] / 1e9, 1e3 * figures["seconds"]
                cells.append(f"{static.significant(gigabytes)}, {least}{static.significant(ms)}")
            lines.append(f"| {place}, {tensor}, {passed} | {' | '.join(cells)} |")
        lines.append("")
    for figure, name in (("hbm_bytes", "bytes"), ("seconds", "time")):
        orders = {line: [ranking(r, line, figure) for r in records] for line in table}
        same = [line for line, found in orders.items() if all(o == found[0] for o in found)]
        least = [line for line, found in orders.items() if all(o[0] == "plait" for o in found)]
        lines.append(
            f"* By {name}, all compilers put the four forms in the same order in {len(same)} of "
            f"{len(table)} lines, and plait first in {len(least)}. Else:"
        )
        for line in table:
            if line not in same:
                shown = [
                    f"{name_of(r)} has {', '.join(o)}"
                    for r, o in zip(records, orders[line], strict=True)
                ]
                lines.append(f"  * {', '.join(line)}: {'; '.join(shown)}.")
    return "\n".join(lines)


def name_of(recorded: Record) -> str:
    versions = recorded["versions"]
    return f"jax {versions['jax']}, libtpu {versions['libtpu']}"


def recordings() -> list[Record]:
    """What is recorded, the oldest compiler first."""
    found = [json.loads(path.read_text()) for path in RECORDED.glob("calibrate-*.json")]
    return sorted(found, key=lambda r: [int(n) for n in r["versions"]["jax"].split(".")])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--record", action="store_true", help="compile and record")
    parser.add_argument("--docs", action="store_true", help="rewrite docs/calibration.md")
    arguments = parser.parse_args()
    if arguments.record:
        recorded = record(topology(TOPOLOGY))
        RECORDED.mkdir(exist_ok=True)
        path = RECORDED / f"calibrate-jax-{recorded['versions']['jax']}.json"
        path.write_text(json.dumps(recorded, indent=1) + "\n")
    records = recordings()
    print(calibration(records), comparison(records), sep="\n\n")
    if arguments.docs:
        page = pages.DOCS / "calibration.md"
        pages.rewrite(page, "calibration", calibration(records))
        pages.rewrite(page, "two compilers", comparison(records))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
