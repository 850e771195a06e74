"""Attention as pipelines call it: under vmap over stages, in a scan, with remat."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import oracle
from errors import refused
from hlo import collectives, text
from plait import GATHERED, ContextParallel, Zigzag

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
AXES = ("stage", "data", "context")
STAGES, BATCH, LENGTH = 2, 2, 32
LAYOUT = Zigzag(2)
ON_MESH = ContextParallel(LAYOUT, "context", batch_axes="data")
ALONE = ContextParallel(LAYOUT)


def mesh_with(*kinds):
    return jax.make_mesh((2, 2, 2), AXES, axis_types=kinds)


def stage_inputs(rng, stages=STAGES):
    """q, k, v, d_out [stages, batch, sequence, heads, head_dim], and segment ids."""
    arrays = [
        rng.normal(size=(stages, BATCH, LENGTH, heads, 8)).astype(np.float32)
        for heads in (4, 2, 2, 4)
    ]
    cuts = rng.integers(5, LENGTH - 5, size=(stages, BATCH, 1))
    ids = 1 + (np.arange(LENGTH) >= cuts).astype(np.int32)
    return arrays, ids


def wanted_of(arrays, ids):
    """out, d_q, d_k, d_v of every stage by the oracle."""
    positions = oracle.positions(LAYOUT, LENGTH)
    rows = [
        oracle.attention(q, k, v, oracle.visible(positions, of), d_out=d_out)
        for q, k, v, d_out, of in zip(*arrays, ids, strict=True)
    ]
    return [np.stack(x) for x in zip(*rows, strict=True)]


def assert_close(found, wanted):
    for name, a, b in zip(("out", "d_q", "d_k", "d_v"), found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=5e-6 * np.abs(b).max(), err_msg=name)


def over_stages(**options):
    """(q, k, v, d_out, ids) -> out and gradients, all with stages in front."""

    def attend(q, k, v, ids):
        return ON_MESH.attention(q, k, v, segment_ids=ids)

    def run(q, k, v, d_out, ids):
        mapped = jax.vmap(attend, **options)
        out, pull = jax.vjp(lambda *x: mapped(*x, ids), q, k, v)
        return out, *pull(d_out)

    return run


@pytest.mark.parametrize("kinds", [(AUTO,) * 3, (AUTO, EXPLICIT, EXPLICIT)], ids=["auto", "mixed"])
@pytest.mark.parametrize("stages", [2, 4])
def test_vmap_over_stages_gathers_keys_and_values_alone(kinds, stages, rng):
    mesh = mesh_with(*kinds)
    arrays, ids = stage_inputs(rng, stages)
    sharding = NamedSharding(mesh, P("stage", "data", "context"))
    on_mesh = jax.device_put((*arrays, ids), sharding)
    run = over_stages(spmd_axis_name="stage")
    with jax.set_mesh(mesh):
        found = jax.jit(run)(*on_mesh)
        program = text(run, *on_mesh)
    assert_close(found, wanted_of(arrays, ids))
    for x in found:
        assert x.sharding.is_equivalent_to(sharding, 5), x.sharding
    k = arrays[1].nbytes // (2 * 2)  # its stages and batch, the whole sequence
    wanted = [("all-gather", ids.nbytes // 4), *[("all-gather", k), ("reduce-scatter", k // 2)] * 2]
    assert collectives(program) == sorted(wanted)


def test_one_function_with_and_without_vmap(rng):
    """What was traced outside of vmap must not be taken for what is inside, nor the reverse."""
    mesh = mesh_with(AUTO, AUTO, AUTO)
    arrays, ids = stage_inputs(rng)
    wanted = wanted_of(arrays, ids)[0]
    attend = jax.jit(lambda q, k, v, ids: ON_MESH.attention(q, k, v, segment_ids=ids))
    with jax.set_mesh(mesh):
        for _ in range(2):
            one = ON_MESH.attention(*(x[0] for x in arrays[:3]), segment_ids=ids[0])
            np.testing.assert_allclose(one, wanted[0], atol=1e-5)
            mapped = jax.vmap(attend, spmd_axis_name="stage")(*arrays[:3], ids)
            np.testing.assert_allclose(mapped, wanted, atol=1e-5)


def test_stages_that_share_keys_and_ids(rng):
    """What is not mapped over is the same on every stage, and its gradient the stages' sum."""
    mesh = mesh_with(AUTO, AUTO, AUTO)
    (q, k, v, d_out), ids = stage_inputs(rng)
    k, v, ids = k[0], v[0], ids[0]

    def attend(q, k, v, ids):
        return ON_MESH.attention(q, k, v, segment_ids=ids)

    def run(q, k, v, ids, d_out):
        mapped = jax.vmap(attend, in_axes=(0, None, None, None), spmd_axis_name="stage")
        out, pull = jax.vjp(lambda *x: mapped(*x, ids), q, k, v)
        return out, *pull(d_out)

    with jax.set_mesh(mesh):
        found = jax.jit(run)(q, k, v, ids, d_out)
    repeated = [q, *(np.stack([x] * STAGES) for x in (k, v)), d_out]
    out, d_q, d_k, d_v = wanted_of(repeated, np.stack([ids] * STAGES))
    assert_close(found, (out, d_q, d_k.sum(axis=0), d_v.sum(axis=0)))


def test_gradients_of_each_stage(rng):
    """vmap of grad: nothing may be summed over the stages."""
    mesh = mesh_with(AUTO, AUTO, AUTO)
    arrays, ids = stage_inputs(rng)

    def one_stage(q, k, v, d_out, ids):
        attend = functools.partial(ON_MESH.attention, segment_ids=ids)
        out, pull = jax.vjp(attend, q, k, v)
        return out, *pull(d_out)

    with jax.set_mesh(mesh):
        found = jax.jit(jax.vmap(one_stage, spmd_axis_name="stage"))(*arrays, ids)
    assert_close(found, wanted_of(arrays, ids))


def test_vmap_that_no_mesh_axis_carries(rng):
    mesh = mesh_with(AUTO, AUTO, AUTO)
    arrays, ids = stage_inputs(rng, 3)
    with jax.set_mesh(mesh):
        run = over_stages()
        found = jax.jit(run)(*arrays, ids)
        sharding = NamedSharding(mesh, P(None, "data", "context"))
        on_mesh = jax.device_put((*arrays, ids), sharding)
        kinds = [kind for kind, _ in collectives(text(run, *on_mesh))]
    assert_close(found, wanted_of(arrays, ids))
    assert kinds == ["all-gather"] * 3 + ["reduce-scatter"] * 2


def test_copies_on_an_axis_cost_nothing(rng):
    """The check of types, off under vmap alone, is what saves a sum of gradients over copies."""
    mesh = mesh_with(AUTO, AUTO, AUTO)
    arrays, _ = stage_inputs(rng)
    on_mesh = jax.device_put([x[0] for x in arrays], NamedSharding(mesh, P("data", "context")))

    def run(q, k, v, d_out):
        out, pull = jax.vjp(ON_MESH.attention, q, k, v)
        return out, *pull(d_out)

    with jax.set_mesh(mesh):
        kinds = [kind for kind, _ in collectives(text(run, *on_mesh))]
    assert kinds == ["all-gather"] * 2 + ["reduce-scatter"] * 2


@pytest.mark.parametrize("kinds", [(EXPLICIT,) * 3, (EXPLICIT, AUTO, AUTO)], ids=["all", "stage"])
def test_explicit_stages_are_refused_and_the_way_out_works(kinds, rng):
    mesh = mesh_with(*kinds)
    arrays, ids = stage_inputs(rng)
    sharding = NamedSharding(mesh, P("stage", "data", "context"))
    on_mesh = jax.device_put((*arrays, ids), sharding)
    with jax.set_mesh(mesh):
        for options in ({}, {"spmd_axis_name": "stage"}):
            refused(
                lambda options=options: jax.jit(over_stages(**options))(*on_mesh),
                *("'stage'", "Explicit", "auto_axes", "spmd_axis_name='stage'"),
            )
        typed = [n for n, kind in zip(AXES, kinds, strict=True) if kind == EXPLICIT]
        spec = P(*(n if n in typed else None for n in AXES))
        run = jax.sharding.auto_axes(
            over_stages(spmd_axis_name="stage"), axes="stage", out_sharding=spec
        )
        found = jax.jit(run)(*on_mesh)
    assert_close(found, wanted_of(arrays, ids))


def layer(cp, weights, x, ids):
    """A stage: [batch, sequence, 32] by weights [3, 32, 32]."""
    q, k, v = (jnp.einsum("bsw,wv->bsv", x, w).reshape(*x.shape[:2], 4, 8) for w in weights)
    out = cp.attention(q, k[:, :, :2], v[:, :, :2], segment_ids=ids)
    return jnp.tanh(x + out.reshape(x.shape))


def pipeline(weights, x, ids, policy):
    """GPipe: each turn all stages compute under vmap, then hand on what they have.

    x: [microbatches, batch, sequence, width]; weights: [stages, 3, width, width].
    """
    stages, microbatches = weights.shape[0], x.shape[0]
    stage = jax.checkpoint(functools.partial(layer, ON_MESH), policy=policy, prevent_cse=False)
    compute = jax.vmap(stage, spmd_axis_name="stage")
    padding = [(0, stages - 1)] + [(0, 0)] * (x.ndim - 1)
    feed = jnp.pad(x, padding), jnp.pad(ids, padding[: ids.ndim])

    def turn(state, fed):
        state, held = (jnp.roll(s, 1, axis=0).at[0].set(f) for s, f in zip(state, fed, strict=True))
        state = compute(weights, state, held)
        state = jax.lax.with_sharding_constraint(state, P("stage", "data", "context"))
        return (state, held), state[-1]

    start = jnp.zeros((stages, *x.shape[1:])), jnp.zeros((stages, *ids.shape[1:]), ids.dtype)
    _, finished = jax.lax.scan(turn, start, feed)
    return finished[stages - 1 : stages - 1 + microbatches]


def test_a_pipeline_is_its_layers_one_after_the_other(rng):
    mesh = mesh_with(AUTO, AUTO, AUTO)
    microbatches = 3
    _, ids = stage_inputs(rng, microbatches)
    x = rng.normal(size=(microbatches, BATCH, LENGTH, 32)).astype(np.float32)
    weights = rng.normal(size=(STAGES, 3, 32, 32)).astype(np.float32) / 6
    keeping = jax.checkpoint_policies.save_only_these_names(*GATHERED)
    nothing = jax.checkpoint_policies.nothing_saveable

    def one_by_one(weights, x, ids):
        for w in weights:
            x = jnp.stack([layer(ALONE, w, row, of) for row, of in zip(x, ids, strict=True)])
        return x

    def loss(forward, weights, x, ids):
        return (forward(weights, x, ids) ** 2).sum()

    def gradient(forward):
        return jax.value_and_grad(functools.partial(loss, forward), argnums=(0, 1))

    wanted = jax.jit(gradient(one_by_one))(weights, x, ids)
    placed = jax.device_put(weights, NamedSharding(mesh, P("stage")))
    on_mesh = jax.device_put((x, ids), NamedSharding(mesh, P(None, "data", "context")))
    shard = BATCH // 2 * LENGTH * 2 * 8 * 4  # keys of one stage and its rows, the whole sequence
    with jax.set_mesh(mesh):
        for policy, times in ((keeping, 1), (nothing, 2)):
            run = jax.jit(gradient(functools.partial(pipeline, policy=policy)))
            compiled = run.lower(placed, *on_mesh).compile()
            found = compiled(placed, *on_mesh)
            for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
                np.testing.assert_allclose(a, b, rtol=0, atol=5e-6 * np.abs(b).max())
            sizes = [size for kind, size in collectives(compiled.as_text()) if kind == "all-gather"]
            assert sizes.count(shard) == 2 * times, sizes
            others = [size for size in sizes if size != shard]
            assert max(others) <= BATCH // 2 * LENGTH * 4, f"more than segment ids: {sizes}"
