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


def layer_seconds(recorded: Record, place: str, form: str, passed: str) -> float:
    """K and V together, one layer, one pass."""
    return sum(
        recorded["programs"][f"{place}, {tensor}, {form}, {passed}"]["seconds"]
        for tensor in TENSORS
    )


def saving(recorded: Record, before: tuple[str, str], after: tuple[str, str]) -> dict[str, float]:
    """Seconds of a training step between two (place, form), over all layers.

    Forward runs once, or twice where its activations are rematerialised; backward once.

    >>> program = {"seconds": 0.0}
    >>> slow, fast = {"seconds": 0.02}, {"seconds": 0.01}
    >>> names = [f"local, {x}, {{}}, {p}" for x in TENSORS for p in PASSES]
    >>> figures = {n.format("a"): slow for n in names} | {n.format("b"): fast for n in names}
    >>> found = saving({"programs": figures}, ("local", "a"), ("local", "b"))
    >>> round(found["2 passes"], 2), round(found["3 passes"], 2)  # 61 * 2 * 10 ms, and 3 of them
    (2.44, 3.66)
    """
    forward, backward = (
        layer_seconds(recorded, *before, passed) - layer_seconds(recorded, *after, passed)
        for passed in PASSES
    )
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


def calibration(records: list[Record]) -> str:
    """The prediction beside the measurement, as Markdown, with its arithmetic."""
    lines = [
        "| compiler | take of chunks to strided: forward, backward, ms a layer | saved a step, s "
        "| strided to plait: forward, backward, ms a layer | saved a step, s | of 74 s |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for recorded in records:
        first = saving(recorded, ("local", "take of chunks"), ("local", "strided"))
        then = plait_saving(recorded)
        shares = [100 * then[f"{n} passes"] / MEASURED_AFTER for n in (2, 3)]
        cells = [name_of(recorded)]
        for found in (first, then):
            cells.append(f"{1e3 * found['forward']:.1f}, {1e3 * found['backward']:.1f}")
            cells.append(f"{found['2 passes']:.2f} to {found['3 passes']:.2f}")
        lines.append(f"| {' | '.join(cells)} | {shares[0]:.1f} to {shares[1]:.1f}% |")
    measured = MEASURED_BEFORE - MEASURED_AFTER
    lines += [
        f"| measured in the field | | {measured:.0f} ({MEASURED_BEFORE:.0f} to "
        f"{MEASURED_AFTER:.0f}) | | not measured | |",
        "",
    ]
    recorded = records[0]
    first = saving(recorded, ("local", "take of chunks"), ("local", "strided"))
    lines.append(f"The arithmetic of the first row, in ms ({name_of(recorded)}):")
    lines.append("")
    terms = {}
    for form, passed in itertools.product(("take of chunks", "strided"), PASSES):
        of = [
            1e3 * recorded["programs"][f"local, {tensor}, {form}, {passed}"]["seconds"]
            for tensor in TENSORS
        ]
        terms[form, passed] = f"({of[0]:.2f} + {of[1]:.2f})"
    for passed in PASSES:
        before, after = terms["take of chunks", passed], terms["strided", passed]
        result = f"{1e3 * first[passed]:.2f}"
        lines.append(f"    {passed + ':':9} {before} - {after} = {result}    K and V")
    sums = [f"{1e3 * first[passed]:.2f}" for passed in PASSES]
    lines.append(
        f"    step:     {LAYERS} * ({sums[0]} + {sums[1]}) = {1e3 * first['2 passes']:.0f}, with "
        f"the forward pass once more {1e3 * first['3 passes']:.0f}"
    )
    return "\n".join(lines)


def ranking(recorded: Record, place: str, tensor: str, passed: str, figure: str) -> list[str]:
    """The forms of a place, the least first, by "hbm_bytes" or "seconds"."""
    found = {
        key.split(", ")[2]: value[figure]
        for key, value in recorded["programs"].items()
        if key.split(", ")[:2] == [place, tensor] and key.endswith(f", {passed}")
    }
    return sorted((form for form in found if form != "none"), key=found.__getitem__)


def comparison(records: list[Record]) -> str:
    """Every program by every compiler, as Markdown, and which rankings agree."""
    names = [name_of(recorded) for recorded in records]
    lines = [
        "| | " + " | ".join(f"{n}: GB of HBM, ms" for n in names) + " |",
        "| --- |" + " --- |" * len(names),
    ]
    for key in records[0]["programs"]:
        cells = []
        for recorded in records:
            figures = recorded["programs"][key]
            least = "≥ " if figures["gathers"] else ""
            cells.append(
                f"{static.significant(figures['hbm_bytes'] / 1e9)}, "
                f"{least}{static.significant(1e3 * figures['seconds'])}"
            )
        lines.append(f"| {key} | {' | '.join(cells)} |")
    agree: dict[str, list[str]] = {"hbm_bytes": [], "seconds": []}
    lines += ["", "| order of the forms, least first | by bytes | by time |", "| --- | --- | --- |"]
    for place, tensor, passed in itertools.product(("local", "sharded", "gather"), TENSORS, PASSES):
        cells = []
        for figure in agree:
            orders = [ranking(recorded, place, tensor, passed, figure) for recorded in records]
            if all(order == orders[0] for order in orders):
                agree[figure].append(place)
                cells.append(", ".join(orders[0]))
            else:
                cells.append(
                    "; ".join(
                        f"{name}: {', '.join(order)}"
                        for name, order in zip(names, orders, strict=True)
                    )
                )
        lines.append(f"| {place}, {tensor}, {passed} | {' | '.join(cells)} |")
    total = 3 * len(TENSORS) * len(PASSES)
    lines += [
        "",
        f"The compilers agree on the whole order in {len(agree['hbm_bytes'])} of {total} lines by "
        f"bytes and in {len(agree['seconds'])} by time.",
    ]
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
