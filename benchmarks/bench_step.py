"""One attention layer's step at 128K tokens: what the order of keys and values takes of it.

The layer as users write it, in a `shard_map` that is manual over the whole mesh: queries, keys and
values [1, heads, sequence, head_dim] in zigzag order, sharded over "context" alone; keys and values
are gathered, brought to source order in one of several forms, and attended to; forward and
backward. The form "none" gathers and leaves the order: its kernel is told the keys' positions, so
that its results are right too, and what the others cost above it is the price of the order.

`plait bench step` compiles them all for a TPU slice that need not be there (about five minutes on
two cores, with libtpu installed) and states the compiler's static figures. Nothing is run.
"""

import argparse
import json
import math
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import maxtext_layer
import pages
import peers
import static
from plait import Causal, ContextParallel, Zigzag
from plait.attention import count_blocks
from plait.audit import Topology, compile_for, topology
from plait.cli.arguments import UserError

LAYERS: dict[str, dict[str, int]] = {
    "DeepSeek-V3.2": maxtext_layer.MLA,
    "Llama-3-70B": {"heads": 64, "kv_heads": 8, "head_dim": 128, "v_head_dim": 128},
}

SPEC = P(None, None, "context", None)

Gather = Callable[[jax.Array], jax.Array]


def gathers(ranks: int) -> dict[str, Gather]:
    """By name: from this rank's shard [batch, heads, sequence, head_dim] to the whole sequence."""
    cp = ContextParallel(Zigzag(ranks), "context")

    def gathered(x: jax.Array) -> jax.Array:
        return lax.all_gather(x, "context", axis=2, tiled=True)

    def then(form: peers.Form) -> Gather:
        return lambda x: form(gathered(x), ranks, 2, True)

    return {
        "none": gathered,
        "take": then(peers.take),
        "take of chunks": then(peers.take_chunks),
        "strided": then(peers.strided),
        "plait": lambda x: cp.all_gather(x, axis=2),
    }


FORMS = tuple(gathers(1))


def layer(form: str, ranks: int) -> Callable[..., tuple]:
    """(q, k, v, d_out) -> (out, d_q, d_k, d_v), in a region that is manual over "context"."""
    gather = gathers(ranks)[form]
    cp = ContextParallel(Zigzag(ranks), "context")

    def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        k, v = gather(k), gather(v)
        keys = k.shape[2]
        # "none" has its keys where the layout puts them; all others in source order.
        k_positions = jnp.asarray(Zigzag(ranks).positions(keys)) if form == "none" else None
        positions = cp.source_positions(keys)
        return maxtext_layer.blockwise(q, k, v, positions, None, None, k_positions)

    def step(q: jax.Array, k: jax.Array, v: jax.Array, d_out: jax.Array) -> tuple:
        out, pull = jax.vjp(attention, q, k, v)
        return out, *pull(d_out)

    return jax.shard_map(step, in_specs=SPEC, out_specs=SPEC, check_vma=False)


def arguments(shape: dict[str, int], tokens: int, dtype: Any = jnp.bfloat16) -> tuple:
    """Shapes and dtypes of (q, k, v, d_out)."""
    widths = (
        (shape["heads"], shape["head_dim"]),
        (shape["kv_heads"], shape["head_dim"]),
        (shape["kv_heads"], shape["v_head_dim"]),
        (shape["heads"], shape["v_head_dim"]),
    )
    return tuple(jax.ShapeDtypeStruct((1, h, tokens, width), dtype) for h, width in widths)


def turns(tokens: int, ranks: int) -> int:
    """Key blocks that the kernel visits for one block of queries, rounded up.

    How many is data to the compiler, so that it must be told. In zigzag order all ranks visit
    equally many.
    """
    kernel = maxtext_layer.Blockwise().fitted(max(1, tokens // ranks // 2), tokens)
    visited, _ = count_blocks(Zigzag(ranks), tokens, kernel=kernel)
    return math.ceil(visited.max() / -(-tokens // ranks // kernel.q_block))


def measure(name: str, form: str, target: Topology, tokens: int, ranks: int) -> static.Figures:
    """The figures of one layer with one form."""
    report = compile_for(
        target,
        layer(form, ranks),
        *arguments(LAYERS[name], tokens),
        mesh={"context": ranks},
        in_specs=SPEC,
        unknown_turns=turns(tokens, ranks),
    )
    return static.figures(report, target)


def results_of(
    names: list[str], forms: list[str], target: Topology, tokens: int, ranks: int, progress: Any
) -> dict[str, Any]:
    """Everything that the table says, as plain data."""
    pairs = int(Zigzag(ranks).work(tokens, Causal()).max())
    found: dict[str, Any] = {
        "topology": target.name,
        "ranks": ranks,
        "tokens": tokens,
        "versions": static.versions(),
        "layers": {},
    }
    for name in names:
        shape = LAYERS[name]
        keys_and_values = arguments(shape, tokens)[1:3]
        key_bytes = sum(2 * math.prod(x.shape) for x in keys_and_values)
        flops = sum(
            static.matmul_flops(pairs, shape["heads"], shape["head_dim"], shape["v_head_dim"])
        )
        programs = {}
        for form in forms:
            programs[form] = measure(name, form, target, tokens, ranks).to_dict()
            progress(f"{name}, {form}: compiled in {programs[form]['compile_seconds']:.0f} s")
        permutes = static.zigzag_permute_seconds(key_bytes // ranks, target, ranks)
        found["layers"][name] = {
            **shape,
            "key_bytes": key_bytes,
            "matmul_flops": flops,
            "matmul_seconds": flops / static.V5P_PEAK_FLOPS,
            "permute_seconds": 2 * permutes,  # forward and backward
            "programs": programs,
        }
    return found


def shares(facts: dict[str, Any], form: str) -> dict[str, float]:
    """What a form costs above "none", and that as a share of the layer's step.

    Returns:
      "seconds": by the compiler's estimate, with the floor of what has none, and for plait the
      permutes on the busiest link. "of_program": over the whole program with this form.
      "of_peak": over the same with an attention kernel that does nothing but its matmuls at the
      chip's peak rate.
    """
    programs = facts["programs"]
    above = programs[form]["seconds"] - programs["none"]["seconds"]
    links = facts["permute_seconds"] if form == "plait" else 0.0
    cost = above + links
    return {
        "seconds": cost,
        "links": links,
        "of_program": cost / (programs[form]["seconds"] + links),
        "of_peak": cost / (facts["matmul_seconds"] + cost),
        "hbm_bytes": programs[form]["hbm_bytes"] - programs["none"]["hbm_bytes"],
        "temp_bytes": programs[form]["temp_bytes"] - programs["none"]["temp_bytes"],
    }


def table(results: dict[str, Any]) -> str:
    """The results as Markdown: one table for each layer."""
    jax_version, libtpu = (results["versions"][name] for name in ("jax", "libtpu"))
    lines = [
        f"{results['tokens']:,} tokens over {results['ranks']} ranks of {results['topology']}, "
        f"batch 1, bfloat16, forward and backward; jax {jax_version}, libtpu {libtpu}; one device.",
    ]
    for name, facts in results["layers"].items():
        lines += ["", *_layer_lines(name, facts)]
    return "\n".join(lines)


def _layer_lines(name: str, facts: dict[str, Any]) -> list[str]:
    programs = facts["programs"]
    head = (
        f"**{name}**: {facts['heads']} heads, {facts['kv_heads']} of keys and values, head "
        f"dimension {facts['head_dim']}, of values {facts['v_head_dim']}. Gathered keys and values "
        f"are {facts['key_bytes'] / 1e9:.3g} GB. The matmuls of attention are "
        f"{facts['matmul_flops'] / 1e12:.3g} TFLOP: {1e3 * facts['matmul_seconds']:.3g} ms at the "
        "chip's peak."
    )
    rows = [
        "| order by | GB of HBM (above none) | temporary, GB | ms of the step | above none, ms "
        "| share of this step | share beside matmuls at the peak |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    uncounted: dict[str, list[str]] = {}
    for form, program in programs.items():
        cost = shares(facts, form) if form != "none" and "none" in programs else None
        total = 1e3 * (program["seconds"] + (cost["links"] if cost else 0))
        hbm = static.significant(program["hbm_bytes"] / 1e9)
        if cost:
            hbm += f" (+{static.significant(cost['hbm_bytes'] / 1e9)})"
        temp = static.significant(program["temp_bytes"] / 1e9)
        row = f"| {form} | {hbm} | {temp} | {total:.4g} |"
        if cost is None:
            rows.append(row + " | | |")
            continue
        unknown = program["opaque"]
        least = "≥ " if unknown else ""
        if unknown:
            uncounted[form] = unknown
        rows.append(
            f"{row} {least}{static.significant(1e3 * cost['seconds'])} "
            f"| {least}{100 * cost['of_program']:.1f}% | {least}{100 * cost['of_peak']:.1f}% |"
        )
    notes = [
        f"* {form}: {static.shown_collectives(program['collectives'])}"
        for form, program in programs.items()
    ]
    ends = []
    if uncounted:
        named = "; ".join(f"{form}: {', '.join(names)}" for form, names in uncounted.items())
        ends.append(f"≥: without an estimate, and here at the HBM's peak: {named}.")
    if "plait" in programs:
        links = static.significant(1e3 * facts["permute_seconds"])
        ends.append(f"Of plait's time {links} ms are its permutes on the busiest link.")
    return [head, "", *rows, "", *ends, "", "Collectives, forward and backward:", "", *notes]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--layers", nargs="+", choices=LAYERS, default=list(LAYERS), metavar="LAYER",
        help=f"of {', '.join(LAYERS)}",
    )  # fmt: skip
    parser.add_argument(
        "--forms", nargs="+", choices=FORMS, default=list(FORMS), metavar="FORM",
        help=f"of {', '.join(FORMS)}; shares are over none",
    )  # fmt: skip
    parser.add_argument("--topology", default="v5p:4x4x8", help="what to compile for")
    parser.add_argument("--ranks", type=int, default=128, help="devices of the context axis")
    parser.add_argument("--tokens", type=int, default=131072, help="tokens in the sequence")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write results here")
    parser.add_argument(
        "--from", dest="source", type=pathlib.Path, metavar="FILE",
        help="take the results that --json wrote, and compile nothing",
    )  # fmt: skip
    parser.add_argument(
        "--docs", action="store_true", help="rewrite the table in docs/performance.md"
    )


def run(arguments: argparse.Namespace) -> int:
    def progress(line: str) -> None:
        print(line, flush=True)

    pages.check_writable("plait bench step", arguments.json)
    if arguments.source:
        results = pages.read("plait bench step", arguments.source, "layers")
    else:
        try:
            target = topology(arguments.topology)
            if target.chip is None or target.chip.kind != "tpu":
                raise ValueError(
                    f"--topology is {arguments.topology!r}; the figures need a TPU's compiler, "
                    "which estimates: v5p:4x4x8 works"
                )
            target.mesh({"context": arguments.ranks})
            Zigzag(arguments.ranks).check_length(arguments.tokens)
        except (ValueError, ImportError, RuntimeError) as error:
            raise UserError(f"plait bench step: {error}") from error
        results = results_of(
            arguments.layers,
            arguments.forms,
            target,
            arguments.tokens,
            arguments.ranks,
            progress,
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    text = table(results)
    print("\n" + text)
    if arguments.docs:
        pages.rewrite(pages.DOCS / "performance.md", "bench step", text)
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add_arguments(parser)
    raise SystemExit(run(parser.parse_args()))
