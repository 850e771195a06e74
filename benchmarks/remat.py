"""What remat policies cost attention: collectives and memory of a layer, by what is saved.

Layers of queries, keys and values, attention and a projection run in one `scan`, forward and
backward, under `jax.checkpoint`. `python benchmarks/remat.py` compiles them for a TPU slice that
need not be there and prints a table (about ten minutes on two cores, with libtpu installed); with
`--docs` it rewrites that of docs/attention.md. All is static: nothing is run.
"""

import argparse
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import pages
import static
from plait import ATTENDED, GATHERED, ContextParallel, Zigzag
from plait.audit import Report, Topology, compile_for, topology

POLICIES = jax.checkpoint_policies
FORMS: dict[str, Callable | None] = {
    "all: no remat": None,
    "nothing: `nothing_saveable`": POLICIES.nothing_saveable,
    "`GATHERED`": POLICIES.save_only_these_names(*GATHERED),
    "`ATTENDED`": POLICIES.save_only_these_names(*ATTENDED),
    "`GATHERED` and `ATTENDED`": POLICIES.save_only_these_names(*GATHERED, *ATTENDED),
}
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128  # Llama 3 8B
LAYERS = 8


def layer(cp: ContextParallel, x: jax.Array, weights: tuple) -> jax.Array:
    """x [batch, sequence, width]."""
    q, k, v, out = weights
    q, k, v = (jnp.einsum("bsw,whd->bshd", x, w) for w in (q, k, v))
    return x + jnp.einsum("bshd,hdw->bsw", cp.attention(q, k, v), out)


def gradient(cp: ContextParallel, policy: Callable | None) -> Callable:
    """Of a loss over layers [layers, ...] in a scan, by weights and input."""
    body = functools.partial(layer, cp)
    if policy is not None:
        body = jax.checkpoint(body, policy=policy, prevent_cse=False)

    def loss(weights: tuple, x: jax.Array) -> jax.Array:
        out, _ = jax.lax.scan(lambda x, w: (body(x, w), None), x, weights)
        return jnp.sum(out.astype(jnp.float32) ** 2)

    return jax.grad(loss, argnums=(0, 1))


def compiled(policy: Callable | None, target: Topology, tokens: int, ranks: int) -> Report:
    """The report of the layers."""
    width = HEADS * HEAD_DIM
    shapes = [(width, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    weights = tuple(
        jax.ShapeDtypeStruct((LAYERS, *shape), jnp.bfloat16)
        for shape in (*shapes, (HEADS, HEAD_DIM, width))
    )
    x = jax.ShapeDtypeStruct((1, tokens, width), jnp.bfloat16)
    return compile_for(
        target,
        gradient(ContextParallel(Zigzag(ranks), "context"), policy),
        weights,
        x,
        mesh={"context": ranks},
        in_specs=(P(), P(None, "context")),
    )


def measure(name: str, target: Topology, tokens: int, ranks: int) -> dict[str, Any]:
    """What a form's layers communicate, each, and their temporary memory."""
    report = compiled(FORMS[name], target, tokens, ranks)
    # What stands outside of the layers runs once.
    found = [(c.kind, c.bytes, c.executions // LAYERS) for c in report.collectives]
    collectives = [one for one in found if one[2]]
    return {"name": name, "temp_bytes": report.temp_bytes, "collectives": collectives}


def row(found: dict[str, Any]) -> str:
    """One line of the table."""
    said = static.shown_collectives(sorted(found["collectives"]))
    return f"| {found['name']} | {said} | {static.megabytes(found['temp_bytes'])} |"


def table(rows: list[dict[str, Any]], target: Topology, tokens: int, ranks: int) -> str:
    """The results as Markdown."""
    versions = static.versions()
    return "\n".join(
        [
            f"{tokens:,} tokens over {ranks} ranks of {target.name}, {HEADS} heads and {KV_HEADS} "
            f"of keys, head_dim {HEAD_DIM}, bfloat16; jax {versions['jax']}, libtpu "
            f"{versions['libtpu']}; one device, forward and backward.",
            "",
            f"| policy saves | collectives of a layer | temporary memory of {LAYERS} layers |",
            "| --- | --- | --- |",
            *map(row, rows),
        ]
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--topology", default="v5p:2x2x2")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--docs", action="store_true", help="rewrite docs/attention.md")
    options = parser.parse_args(arguments)
    target = topology(options.topology)
    rows = []
    for name in FORMS:
        rows.append(measure(name, target, options.tokens, options.ranks))
        print(row(rows[-1]), flush=True)
    text = table(rows, target, options.tokens, options.ranks)
    print(text)
    if options.docs:
        pages.rewrite(pages.DOCS / "attention.md", "remat", text)


if __name__ == "__main__":
    main()
