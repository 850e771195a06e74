"""A cut-down attention layer of MaxText's shape, before plait and after, to compare by compiling.

MaxText's order of events under load-balanced context parallelism: queries stay sharded over the
sequence; keys, values and the keys' segment ids are gathered before `shard_map`, whose in_specs
leave their sequence whole, and are restored to source order inside it. `before` does that, `after`
gathers inside by `cp.all_gather`. Both take q, k, v [batch, heads, sequence, head_dim] and segment
ids [batch, sequence] in zigzag order, sharded over mesh axes "data", "tensor" (heads) and
"context" (sequence), and return out [batch, heads, sequence, v_head_dim].

`python benchmarks/maxtext_layer.py --docs` compiles both for a TPU slice that need not be there,
over the whole slice and beside a data axis, and writes the tables of docs/maxtext.md (about ten
minutes on two cores, with libtpu installed). Nothing is run.
"""

import argparse
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import pages
import peers
import static
from plait import Blockwise, Causal, ContextParallel, Zigzag, audit

QUERY_SPEC = P("data", "tensor", "context", None)
KEY_SPEC = P("data", "tensor", "context", None)
WHOLE_KEY_SPEC = P("data", "tensor", None, None)
IDS_SPEC = P("data", "context")
WHOLE_IDS_SPEC = P("data", None)

GQA = {"heads": 32, "kv_heads": 8, "head_dim": 128, "v_head_dim": 128}
MLA = {"heads": 128, "kv_heads": 128, "head_dim": 192, "v_head_dim": 128}

Array = jax.Array
Attend = Callable[[Array, Array, Array, Array, Array, Array], Array]


def strided(x: Array, ranks: int, axis: int) -> Array:
    """Source order from zigzag by strided slices, the form of MaxText's `reorder_sequence`."""
    return peers.strided(x, ranks, axis, True)


def take(x: Array, ranks: int, axis: int) -> Array:
    """Source order from zigzag by a gather, the form of older versions of MaxText."""
    return peers.take_chunks(x, ranks, axis, True)


def blockwise(
    q: Array,
    k: Array,
    v: Array,
    positions: Array,
    q_ids: Array | None,
    k_ids: Array | None,
    k_positions: Any = None,
) -> Array:
    """Causal attention of this rank's queries over all keys, by plait's kernel.

    The keys are in source order, or where `k_positions` [keys] says.
    """
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    length, keys = q.shape[1], k.shape[1]
    kernel = Blockwise().fitted(max(1, length // 2), keys)
    if k_positions is None:
        k_positions = jnp.arange(keys, dtype=jnp.int32)
    out, _ = kernel(
        q,
        k,
        v,
        mask=Causal(),
        q_positions=jnp.broadcast_to(positions, q.shape[:2]),
        k_positions=jnp.broadcast_to(k_positions, k.shape[:2]),
        q_segment_ids=q_ids,
        k_segment_ids=k_ids,
        scale=q.shape[-1] ** -0.5,
    )
    return out.swapaxes(1, 2).astype(q.dtype)


def before(
    q: Array,
    k: Array,
    v: Array,
    segment_ids: Array,
    *,
    mesh: Mesh,
    restore: Callable[[Array, int, int], Array] = strided,
    attend: Attend = blockwise,
) -> Array:
    """Gather outside, then restore all of the keys and values on every device."""
    ranks = mesh.shape["context"]
    cp = ContextParallel(Zigzag(ranks), "context")

    def attention(q: Array, k: Array, v: Array, q_ids: Array, k_ids: Array) -> Array:
        k, v, k_ids = restore(k, ranks, 2), restore(v, ranks, 2), restore(k_ids, ranks, 1)
        return attend(q, k, v, cp.source_positions(k.shape[2]), q_ids, k_ids)

    k, v = (_constrained(x, mesh, WHOLE_KEY_SPEC) for x in (k, v))
    k_ids = _constrained(segment_ids, mesh, WHOLE_IDS_SPEC)
    return jax.shard_map(
        attention,
        mesh=mesh,
        in_specs=(QUERY_SPEC, WHOLE_KEY_SPEC, WHOLE_KEY_SPEC, IDS_SPEC, WHOLE_IDS_SPEC),
        out_specs=QUERY_SPEC,
        check_vma=False,
    )(q, k, v, segment_ids, k_ids)


def after(
    q: Array, k: Array, v: Array, segment_ids: Array, *, mesh: Mesh, attend: Attend = blockwise
) -> Array:
    """Restore this rank's shard, then gather, inside the region."""
    cp = ContextParallel(Zigzag(mesh.shape["context"]), "context")

    def attention(q: Array, k: Array, v: Array, ids: Array) -> Array:
        k, v = cp.all_gather((k, v), axis=2)
        k_ids = cp.all_gather(ids, axis=1)
        return attend(q, k, v, cp.source_positions(k.shape[2]), ids, k_ids)

    return jax.shard_map(
        attention,
        mesh=mesh,
        in_specs=(QUERY_SPEC, KEY_SPEC, KEY_SPEC, IDS_SPEC),
        out_specs=QUERY_SPEC,
        check_vma=False,
    )(q, k, v, segment_ids)


def with_gradients(layer: Callable[..., Array], **options: Any) -> Callable[..., tuple]:
    """(q, k, v, segment_ids, d_out) -> (out, d_q, d_k, d_v) of a layer above."""

    def run(q: Array, k: Array, v: Array, segment_ids: Array, d_out: Array) -> tuple:
        out, pull = jax.vjp(lambda q, k, v: layer(q, k, v, segment_ids, **options), q, k, v)
        return out, *pull(d_out)

    return run


def arguments(
    mesh: Mesh, shape: Mapping[str, int], *, batch: int, sequence: int, dtype: Any = jnp.bfloat16
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes, dtypes and shardings of (q, k, v, segment_ids, d_out), to lower for."""

    def struct(heads: int, head_dim: int, spec: P) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct((batch, heads, sequence, head_dim), dtype, sharding=sharding)

    q = struct(shape["heads"], shape["head_dim"], QUERY_SPEC)
    k = struct(shape["kv_heads"], shape["head_dim"], KEY_SPEC)
    v = struct(shape["kv_heads"], shape["v_head_dim"], KEY_SPEC)
    d_out = struct(shape["heads"], shape["v_head_dim"], QUERY_SPEC)
    ids_sharding = NamedSharding(mesh, IDS_SPEC)
    ids = jax.ShapeDtypeStruct((batch, sequence), jnp.int32, sharding=ids_sharding)
    return q, k, v, ids, d_out


def lowered(
    layer: Callable[..., Array],
    mesh: Mesh,
    shape: Mapping[str, int],
    *,
    batch: int,
    sequence: int,
    dtype: Any = jnp.bfloat16,
    backward: bool = True,
    **options: Any,
) -> jax.stages.Lowered:
    """The layer lowered for a mesh, its results sharded as its arguments; `.compile()` it."""
    q, k, v, ids, d_out = arguments(mesh, shape, batch=batch, sequence=sequence, dtype=dtype)
    if not backward:
        forward = jax.jit(lambda *x: layer(*x, mesh=mesh, **options), out_shardings=d_out.sharding)
        return forward.lower(q, k, v, ids)
    results = tuple(x.sharding for x in (d_out, q, k, v))
    run = jax.jit(with_gradients(layer, mesh=mesh, **options), out_shardings=results)
    return run.lower(q, k, v, ids, d_out)


def _constrained(x: Array, mesh: Mesh, spec: P) -> Array:
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


SHAPES = {"GQA": GQA, "MLA": MLA}
AXES = {"over the whole slice": (1, 128), "beside a data axis": (8, 16)}
FORMS: dict[str, tuple[Callable[..., Array], dict[str, Any]]] = {
    "before, take": (before, {"restore": take}),
    "before, strided": (before, {"restore": strided}),
    "after": (after, {}),
}


def compiled(
    name: str, form: str, axes: tuple[int, int], target: audit.Topology, sequence: int
) -> list[audit.Report]:
    """What the compiler makes of a layer: forward alone, and with its gradients."""
    layer, options = FORMS[form]
    data, context = axes
    mesh = target.mesh({"data": data, "context": context, "tensor": 1})
    reports = []
    for backward in (False, True):
        with jax.set_mesh(mesh):
            low = lowered(
                layer,
                mesh,
                SHAPES[name],
                batch=data,
                sequence=sequence,
                backward=backward,
                **options,
            )
            start = time.perf_counter()
            program = low.compile()
        seconds = time.perf_counter() - start
        reports.append(audit.read_compiled(program, target, compile_seconds=seconds))
    return reports


def table(name: str, target: audit.Topology, sequence: int) -> str:
    """The tables of one shape of attention, as Markdown."""
    versions = static.versions()
    shape = SHAPES[name]
    lines = [
        f"**{name}**: {shape['heads']} heads, {shape['kv_heads']} of keys and values, head "
        f"dimension {shape['head_dim']}, of values {shape['v_head_dim']}; {sequence:,} tokens a "
        f"row, bfloat16, {target.name}, jax {versions['jax']}, libtpu {versions['libtpu']}.",
    ]
    for where, (data, context) in AXES.items():
        lines += [
            "",
            f"Context {where} (data {data}, context {context}, {data} rows):",
            "",
            "| | GB of HBM: forward, with backward | temporary, GB | compiled in, s "
            "| collectives of both passes |",
            "| --- | --- | --- | --- | --- |",
        ]
        for form in FORMS:
            reports = compiled(name, form, (data, context), target, sequence)
            hbm = ", ".join(static.significant(r.hbm_bytes / 1e9) for r in reports)
            temp = ", ".join(static.significant(r.temp_bytes / 1e9) for r in reports)
            took = ", ".join(f"{r.compile_seconds:.0f}" for r in reports)
            moved = static.shown_collectives(
                (c.kind, c.bytes, c.executions) for c in reports[1].collectives if c.bytes >= 1e6
            )
            lines.append(f"| {form} | {hbm} | {temp} | {took} | {moved} |")
            print(lines[-1], flush=True)
    return "\n".join(lines)


BARE = (
    ("v5p:4x4x8", {"context": 128}, 192),
    ("v5p:4x4x8", {"context": 128}, 128),
    ("v5p:4x4x8", {"outer": 16, "inner": 8}, 192),
    ("v5p:4x4x8", {"data": 2, "context": 64}, 192),
    ("v5p:4x4x8", {"data": 8, "context": 16}, 192),
    ("v5p:4x4x8", {"data": 8, "context": 16}, 128),
    ("v5p:4x4x4", {"context": 64}, 192),
    ("v5p:2x2x2", {"context": 8}, 192),
    ("v5e:8x16", {"context": 128}, 192),
    ("v6e:8x16", {"context": 128}, 192),
    ("v6e:4x4", {"context": 16}, 192),
)
"""Slices, meshes and head dimensions for which nothing but an all-gather is compiled."""


def bare_gathers(sequence: int) -> str:
    """What becomes of `lax.all_gather` alone and of its transpose, as Markdown."""
    versions = static.versions()
    lines = [
        f"Keys [data, 16, {sequence}, head dimension] bfloat16, jax {versions['jax']}, libtpu "
        f"{versions['libtpu']}:",
        "",
        "| slice | mesh | head dimension | `lax.all_gather` becomes | `lax.psum_scatter` becomes |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, sizes, head_dim in BARE:
        gathered = tuple(axis for axis in sizes if axis != "data")
        rows = "data" if "data" in sizes else None
        whole, split = P(rows), P(rows, None, gathered)
        x = jax.ShapeDtypeStruct((sizes.get("data", 1), 16, sequence, head_dim), jnp.bfloat16)
        kinds = []
        for move, given, wanted in (
            (lambda x, g=gathered: jax.lax.all_gather(x, g, axis=2, tiled=True), split, whole),
            (
                lambda x, g=gathered: jax.lax.psum_scatter(x, g, scatter_dimension=2, tiled=True),
                whole,
                split,
            ),
        ):
            region = jax.shard_map(move, in_specs=given, out_specs=wanted, check_vma=False)
            report = audit.compile_for(name, region, x, mesh=sizes, in_specs=given)
            kinds.append(static.shown_collectives((c.kind, c.bytes, 1) for c in report.collectives))
        mesh = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
        lines.append(f"| {name} | {mesh} | {head_dim} | {' | '.join(kinds)} |")
        print(lines[-1], flush=True)
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Compile the layers for a TPU slice.")
    parts = ["bare gathers", *SHAPES]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--topology", default="v5p:4x4x8", help="128 chips")
    parser.add_argument("--sequence", type=int, default=131072)
    parser.add_argument("--docs", action="store_true", help="rewrite the tables in docs/maxtext.md")
    options = parser.parse_args()
    target = audit.topology(options.topology)
    for part in options.parts:
        if part in SHAPES:
            name, text = f"layer {part}", table(part, target, options.sequence)
        else:
            name, text = part, bare_gathers(options.sequence)
        if options.docs:
            pages.rewrite(pages.DOCS / "maxtext.md", name, text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
