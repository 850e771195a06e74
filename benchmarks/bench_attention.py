"""What the strategies of attention keep in memory and send, at 128K tokens over 128 ranks.

One layer's attention, forward and backward, in zigzag order with the sequence sharded over all
devices, by the Pallas kernels, compiled for a TPU slice that need not be there. Static figures;
nothing is run.
"""

import argparse
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import pages
import static
from plait import ContextParallel, Zigzag
from plait.audit import Topology, compile_for, topology
from plait.cli.arguments import UserError

COMMAND = "plait bench attention"
MODELS: dict[str, tuple[int, int, int, int]] = {  # heads, kv_heads, head_dim, v_head_dim
    "DeepSeek-V3.2": (128, 128, 192, 128),
    "Llama-3-70B": (64, 8, 128, 128),
}
STRATEGIES = ("all_gather", "ring", "ulysses")
SPEC = P(None, "context")


def step(strategy: str, kernel: str, ranks: int) -> Any:
    """(q, k, v, d_out) -> (out, d_q, d_k, d_v)."""
    cp = ContextParallel(Zigzag(ranks), "context")
    attend: Any = functools.partial(cp.attention, strategy=strategy, kernel=kernel)

    def run(q: jax.Array, k: jax.Array, v: jax.Array, d_out: jax.Array) -> tuple:
        out, pull = jax.vjp(attend, q, k, v)
        return out, *pull(d_out)

    return run


def measure(
    model: str, strategy: str, kernel: str, target: Topology, tokens: int, ranks: int
) -> dict[str, Any]:
    """Figures of one device, as plain data."""
    heads, kv_heads, head_dim, v_head_dim = MODELS[model]
    widths = ((heads, head_dim), (kv_heads, head_dim), (kv_heads, v_head_dim), (heads, v_head_dim))
    arrays = [jax.ShapeDtypeStruct((1, tokens, *width), jnp.bfloat16) for width in widths]
    report = compile_for(
        target,
        step(strategy, kernel, ranks),
        *arrays,
        mesh={"context": ranks},
        in_specs=SPEC,
    )
    sent: dict[str, list[int]] = {}
    for one in report.collectives:
        times, moved = sent.get(one.kind, [0, 0])
        sent[one.kind] = [
            times + one.executions,
            moved + one.executions * one.traffic_bytes,
        ]
    return {
        "temp_bytes": report.temp_bytes,
        "shard_bytes": 2 * tokens // ranks * kv_heads * (head_dim + v_head_dim),
        "sent": sent,
        "compile_seconds": report.compile_seconds,
    }


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    versions = results["versions"]
    lines = [
        f"{results['tokens']:,} tokens over {results['ranks']} ranks of {results['topology']}, "
        f"batch 1, bfloat16, heads not sharded; jax {versions['jax']}, libtpu "
        f"{versions['libtpu']}; one device.",
        "",
        "| model | strategy | temporary, MB | in shards of k and v | sent, MB: collectives |",
        "| --- | --- | --- | --- | --- |",
    ]
    for model, strategies in results["models"].items():
        for strategy, one in strategies.items():
            sent = "; ".join(
                f"{moved / 1e6:,.0f}: {times} {kind}"
                for kind, (times, moved) in one["sent"].items()
            )
            shards = one["temp_bytes"] / one["shard_bytes"]
            lines.append(
                f"| {model} | `{strategy}` | {one['temp_bytes'] / 1e6:,.0f} | {shards:.3g} "
                f"| {sent} |"
            )
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--topology", default="v5p:4x4x8", help="what to compile for")
    parser.add_argument("--ranks", type=int, default=128, help="devices of the context axis")
    parser.add_argument("--tokens", type=int, default=131072, help="tokens in the sequence")
    parser.add_argument("--kernel", default="flash", help="flash, or blockwise elsewhere")
    pages.add_outputs(parser, "attention.md")


def run(arguments: argparse.Namespace) -> int:
    pages.present(arguments, COMMAND, "attention.md", "models", _measured, table)
    return 0


def _measured(arguments: argparse.Namespace) -> dict[str, Any]:
    tokens, ranks = arguments.tokens, arguments.ranks
    try:
        target = topology(arguments.topology)
        target.mesh({"context": ranks})
        Zigzag(ranks).check_length(tokens)
    except (ValueError, ImportError, RuntimeError) as error:
        raise UserError(f"{COMMAND}: {error}") from error
    models: dict[str, Any] = {}
    for model, (heads, *_) in MODELS.items():
        models[model] = {}
        for strategy in STRATEGIES:
            if strategy == "ulysses" and heads % ranks:
                continue  # too few heads to deal
            one = measure(model, strategy, arguments.kernel, target, tokens, ranks)
            models[model][strategy] = one
            print(f"{model}, {strategy}: compiled in {one['compile_seconds']:.0f} s", flush=True)
    return {
        "topology": target.name,
        "ranks": ranks,
        "tokens": tokens,
        "versions": static.versions(),
        "models": models,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    raise SystemExit(run(parser.parse_args()))
