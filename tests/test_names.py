"""What a policy saves by name, the backward pass does not communicate or compute again."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import hlo
import plait
from plait import ATTENDED, GATHERED, RELAID, ContextParallel, Striped, Zigzag
from sweeps import slow

policies = jax.checkpoint_policies
NOTHING = policies.nothing_saveable
CP = ContextParallel(Zigzag(4), "context", batch_axes="data")
LAYERS = 3


def saving(*names):
    return policies.save_only_these_names(*names)


def attend(x, w, ids):
    q, k, v = (jnp.einsum("bshd,de->bshe", x, one) for one in w)
    return x + CP.attention(q, k, v, segment_ids=ids)


def relay(x, w, ids):
    return jnp.sin(CP.reorder(jnp.tanh(CP.restore(jnp.sin(x @ w[0]))) ** 2))


def relay_stripes(x, w, ids):
    y = plait.relayout(jnp.sin(x @ w[0]), Striped(4), CP.layout, axis_name="context")
    return jnp.tanh(y) ** 2


def gather(x, w, ids):
    whole = CP.all_gather(jnp.sin(x @ w[0]))
    return x * jnp.tanh(whole**2).mean()


def gradient(body, policy, scanned):
    """The gradient of a loss over some layers, each under remat; no remat without a policy."""

    def loss(x, w, ids):
        layer = body
        if policy is not None:
            layer = jax.checkpoint(body, policy=policy, prevent_cse=not scanned)
        if scanned:
            return (jax.lax.scan(lambda x, w: (layer(x, w, ids), None), x, w)[0] ** 2).sum()
        for one in w:
            x = layer(x, one, ids)
        return (x**2).sum()

    return jax.value_and_grad(loss)


@pytest.fixture
def arguments(rng):
    x = rng.normal(size=(2, 64, 4, 8)).astype(np.float32)
    w = rng.normal(size=(LAYERS, 3, 8, 8)).astype(np.float32) / 4
    return x, w, np.repeat([[1, 2]], 32, axis=1).repeat(2, axis=0).astype(np.int32)


def on(mesh, arguments):
    x, w, ids = arguments
    sharding = NamedSharding(mesh, P("data", "context"))
    return jax.device_put(x, sharding), w, jax.device_put(ids, sharding)


def counts(mesh, fn, arguments, bytes_at_least=0):
    with jax.set_mesh(mesh):
        program = hlo.text(fn, *arguments)
    found = collections.Counter(
        kind for kind, size in hlo.collectives(program) if size >= bytes_at_least
    )
    found["while"] = hlo.operations(program)["while"]
    return found


KINDS = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "typed"])


def mesh_of_kind(kind):
    return jax.make_mesh((2, 4), ("data", "context"), axis_types=(kind,) * 2)


@KINDS
@pytest.mark.parametrize("scanned", [pytest.param(True, id="scan"), slow(False, id="loop")])
def test_keys_and_values_are_gathered_once(kind, scanned, arguments):
    mesh = mesh_of_kind(kind)
    placed = on(mesh, arguments)
    shard = placed[0].nbytes // 8  # of keys; segment ids are far smaller
    times = 1 if scanned else LAYERS

    def of(policy):
        return counts(mesh, gradient(attend, policy, scanned), placed, shard)

    plain, nothing = of(None), of(NOTHING)
    gathered, both = of(saving(*GATHERED)), of(saving(*GATHERED, *ATTENDED))
    assert plain["all-gather"] == gathered["all-gather"] == both["all-gather"] == 2 * times
    if scanned or jax.__version_info__ >= (0, 12):  # XLA:CPU merged both gathers of a loop
        assert nothing["all-gather"] == 4 * times
    for found in (plain, nothing, gathered, both):
        assert found["reduce-scatter"] == 2 * times
        assert not found["collective-permute"]
    # The loop over blocks runs once more where its results were not saved.
    assert nothing["while"] == gathered["while"] > both["while"] == plain["while"]


def test_all_that_is_gathered_has_a_name(arguments):
    mesh = mesh_of_kind(AxisType.Auto)
    placed = on(mesh, arguments)
    positions = jnp.asarray(CP.layout.positions(64))

    def body(x, w, ids):
        q, k, v = (jnp.einsum("bshd,de->bshe", x, one) for one in w)
        return x + CP.attention(q, k, v, segment_ids=ids, source_positions=positions + ids * 0)

    def of(policy):
        return counts(mesh, gradient(body, policy, False), placed)["all-gather"]

    # Segment ids and positions are those of every layer, and XLA sees that.
    assert of(saving(*GATHERED)) == of(None) == 2 * LAYERS + 2
    assert of(saving("plait_gathered_keys", "plait_gathered_values")) > 2 * LAYERS + 2


@KINDS
@pytest.mark.parametrize(
    ("body", "names", "what", "once"),
    [
        (relay, RELAID, "collective-permute", 8),
        (relay_stripes, RELAID, "all-to-all", 2),
        (gather, GATHERED, "all-gather", 1),
    ],
)
def test_moves_are_not_repeated(kind, body, names, what, once, arguments):
    mesh = mesh_of_kind(kind)
    placed = on(mesh, arguments)
    plain, nothing, saved = (
        counts(mesh, gradient(body, policy, True), placed)[what]
        for policy in (None, NOTHING, saving(*names))
    )
    assert plain == saved == once
    assert nothing > once


@pytest.mark.parametrize("body", [attend, relay, gather])
def test_no_policy_changes_a_result(body, arguments):
    mesh = mesh_of_kind(AxisType.Auto)
    placed = on(mesh, arguments)
    with jax.set_mesh(mesh):
        wanted = jax.jit(gradient(body, None, True))(*placed)
        for policy in (NOTHING, saving(*GATHERED, *ATTENDED, *RELAID), saving(*RELAID)):
            found = jax.jit(gradient(body, policy, True))(*placed)
            for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())


def test_a_name_costs_no_operation(arguments, monkeypatch):
    mesh = mesh_of_kind(AxisType.Auto)
    placed = on(mesh, arguments)

    def program():
        with jax.set_mesh(mesh):
            return hlo.operations(hlo.text(lambda *x: gradient(relay, None, True)(*x), *placed))

    named = program()
    monkeypatch.setattr(plait.exchange, "named", lambda x, name: x)
    assert program() == named


def test_names_inside_the_users_shard_map(arguments):
    """A move and a gather of shards, inside, with typed PRNG keys beside."""
    mesh = mesh_of_kind(AxisType.Auto)
    x, w, _ = on(mesh, arguments)
    keys = jax.random.split(jax.random.key(0), (2, 64))

    def local(x, w, keys):
        moved, _ = CP.restore((jnp.sin(x @ w[0]), keys))
        return jnp.tanh(CP.all_gather(moved, order="layout") ** 2).sum(axis=1, keepdims=True) * x

    def body(x, w, ids):
        spec = P("data", "context")
        return jax.shard_map(local, in_specs=(spec, P(), spec), out_specs=spec)(x, w, keys)

    def of(policy):
        return counts(mesh, gradient(body, policy, False), (x, w, None))

    nothing, saved = of(NOTHING), of(saving(*GATHERED))
    assert saved["all-gather"] < nothing["all-gather"]
    assert saved["collective-permute"] < nothing["collective-permute"]
