"""DeepSeek sparse attention from 8K to 1M tokens over 128 ranks, compiled for a TPU slice.

How the indexer's work falls on ranks, counted; what `plait.sparse` keeps in memory and sends; and
the whole layer of examples/sparse_layer.py at 128K. Static figures; nothing is run.
"""

import argparse
import functools
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import pages
import static
from plait import ContextParallel, Contiguous, Zigzag, sparse
from plait.audit import Report, Topology, compile_for, topology
from plait.cli.arguments import UserError

COMMAND = "plait bench sparse"
K = 1024
LENGTHS = (8 * K, 32 * K, 128 * K, 512 * K, 1024 * K)
HEADS, LATENT, ROPE, INDEX_HEADS, INDEX_DIM, TOP_K = 128, 512, 64, 64, 128, 2048
SPEC = P(None, "context")


def shaped(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((1, *shape), dtype)


def compile_select(target: Topology, tokens: int, ranks: int, turns: int) -> Report:
    """The indexer's selection, from its queries, keys and weights."""
    cp = ContextParallel(Zigzag(ranks), "context")
    return compile_for(
        target,
        functools.partial(sparse.select, layout=cp.layout, top_k=TOP_K, axis_name="context"),
        shaped(tokens, INDEX_HEADS, INDEX_DIM),
        shaped(tokens, INDEX_DIM),
        shaped(tokens, INDEX_HEADS, dtype=jnp.float32),
        mesh={"context": ranks},
        in_specs=SPEC,
        out_specs=SPEC,
        unknown_turns=turns,
    )


def compile_attention(target: Topology, tokens: int, ranks: int) -> Report:
    """Attention to what was selected, forward and backward."""
    attend: Any = functools.partial(
        sparse.sparse_attention,
        layout=Zigzag(ranks),
        value_dim=LATENT,
        scale=0.1,
        axis_name="context",
    )

    def run(q: jax.Array, latents: jax.Array, selected: jax.Array, d_out: jax.Array) -> tuple:
        out, pull = jax.vjp(lambda q, latents: attend(q, latents, selected), q, latents)
        return out, *pull(d_out)

    return compile_for(
        target,
        run,
        shaped(tokens, HEADS, LATENT + ROPE),
        shaped(tokens, LATENT + ROPE),
        shaped(tokens, TOP_K, dtype=jnp.int32),
        shaped(tokens, HEADS, LATENT),
        mesh={"context": ranks},
        in_specs=SPEC,
        out_specs=SPEC,
    )


def compile_layer(target: Topology, tokens: int, ranks: int) -> Report:
    """examples/sparse_layer.py at DeepSeek-V3.2's sizes: the output, and all gradients."""
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "examples"))
    from flax import nnx

    import sparse_layer

    cp = ContextParallel(Zigzag(ranks), "context")
    make = lambda: sparse_layer.SparseAttention(cp, sparse_layer.Sizes(), rngs=nnx.Rngs(0))  # noqa: E731
    graph, state = nnx.split(nnx.eval_shape(make))
    weights = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), state)

    def step(weights: Any, x: Any, positions: Any, ids: Any, d_out: Any, d_scores: Any) -> tuple:
        def run(weights: Any, x: Any) -> tuple:
            out, selected, scores = nnx.merge(graph, weights)(x, positions, ids)
            return (out, jnp.where(selected < 0, 0, scores)), selected

        (out, _), pull, _ = jax.vjp(run, weights, x, has_aux=True)
        return out, *pull((d_out, d_scores))

    ints = functools.partial(shaped, dtype=jnp.int32)
    width = sparse_layer.Sizes().width
    return compile_for(
        target,
        step,
        weights,
        shaped(tokens, width),
        ints(tokens),
        ints(tokens),
        shaped(tokens, width),
        shaped(tokens, TOP_K, dtype=jnp.float32),
        mesh={"context": ranks},
        in_specs=(P(), SPEC, SPEC, SPEC, SPEC, SPEC),
        out_specs=(SPEC, P(), SPEC),
    )


def figures_of(report: Report, target: Topology) -> dict[str, Any]:
    found = static.figures(report, target)
    return {
        "temp_bytes": report.temp_bytes,
        "argument_bytes": report.argument_bytes,
        "output_bytes": report.output_bytes,
        "hbm_bytes": report.counted_bytes,
        "estimated_seconds": found.seconds,
        "without_estimate": found.without_estimate,
        "collectives": static.shown_collectives(found.collectives),
        "largest_operation_bytes": max(o.accessed_bytes for o in report.operations),
        "compile_seconds": report.compile_seconds,
    }


def measure(target: Topology, tokens: int, ranks: int) -> dict[str, Any]:
    """Everything about one length, as plain data."""
    blocks = {}
    for kind in (Contiguous, Zigzag):
        computed, total = sparse.count_blocks(kind(ranks), tokens)
        blocks[kind.__name__] = {
            "most": int(computed.max()),
            "mean": float(computed.mean()),
            "of": total,
        }
    q_blocks = -(-tokens // ranks // sparse.Q_BLOCK)
    turns = max(1, round(blocks["Zigzag"]["most"] / q_blocks))
    return {
        "tokens": tokens,
        "blocks": blocks,
        "select": figures_of(compile_select(target, tokens, ranks, turns), target),
        "attention": figures_of(compile_attention(target, tokens, ranks), target),
    }


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    versions = results["versions"]
    lines = [
        f"{results['ranks']} ranks of {results['topology']}, zigzag, batch 1, bfloat16, at the "
        f"sizes of DeepSeek-V3.2; jax {versions['jax']}, libtpu {versions['libtpu']}; one device. "
        "Blocks of index scores are counted, the rest is the compiler's.",
        "",
        "| tokens | index blocks, busiest / mean: contiguous | zigzag | `select`: temporary, MiB "
        "| estimate, ms | attention, forward and backward: temporary, MiB | estimate, ms |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for one in results["lengths"]:
        uneven, even = (one["blocks"][name] for name in ("Contiguous", "Zigzag"))
        cells = [
            f"{one['tokens'] // K}K",
            f"{uneven['most']:,} / {uneven['mean']:,.0f} = {uneven['most'] / uneven['mean']:.2f}",
            f"{even['most']:,} / {even['mean']:,.0f} = {even['most'] / even['mean']:.2f}",
        ]
        for name in ("select", "attention"):
            cells += [
                f"{one[name]['temp_bytes'] / 2**20:,.0f}",
                f"{one[name]['estimated_seconds'] * 1e3:,.3g}",
            ]
        lines.append("| " + " | ".join(cells) + " |")
    last = next((one for one in results["lengths"] if one["tokens"] == 128 * K), None)
    if last:
        lines += [
            "",
            f"At 128K `select` communicates {last['select']['collectives']}; attention "
            f"{last['attention']['collectives']}.",
        ]
    if results["layer"]:
        layer = results["layer"]
        total = layer["temp_bytes"] + layer["argument_bytes"] + layer["output_bytes"]
        lines += [
            "",
            f"The whole layer at 128K, forward and backward, weights in bfloat16 on every rank: "
            f"{layer['temp_bytes'] / 2**30:.2f} GiB of temporary memory beside "
            f"{(layer['argument_bytes'] + layer['output_bytes']) / 2**30:.2f} GiB of arguments and "
            f"results, {total / 2**30:.2f} GiB of the 95 GiB of a v5p.",
        ]
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--topology", default="v5p:4x4x8", help="what to compile for")
    parser.add_argument("--ranks", type=int, default=128, help="devices of the context axis")
    parser.add_argument(
        "--tokens", type=int, nargs="*", default=LENGTHS, help="lengths of the sequence"
    )
    parser.add_argument("--no-layer", action="store_true", help="leave the whole layer out")
    pages.add_outputs(parser, "sparse.md")


def run(arguments: argparse.Namespace) -> int:
    pages.present(arguments, COMMAND, "sparse.md", "lengths", _measured, table)
    return 0


def _measured(arguments: argparse.Namespace) -> dict[str, Any]:
    ranks = arguments.ranks
    try:
        target = topology(arguments.topology)
        target.mesh({"context": ranks})
        for tokens in arguments.tokens:
            Zigzag(ranks).check_length(tokens)
    except (ValueError, ImportError, RuntimeError) as error:
        raise UserError(f"{COMMAND}: {error}") from error
    lengths = []
    for tokens in arguments.tokens:
        one = measure(target, tokens, ranks)
        lengths.append(one)
        seconds = one["select"]["compile_seconds"] + one["attention"]["compile_seconds"]
        print(f"{tokens // K}K: compiled in {seconds:.0f} s", flush=True)
    layer = None
    if not arguments.no_layer:
        layer = figures_of(compile_layer(target, 128 * K, ranks), target)
    return {
        "topology": target.name,
        "ranks": ranks,
        "versions": static.versions(),
        "lengths": lengths,
        "layer": layer,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    raise SystemExit(run(parser.parse_args()))
