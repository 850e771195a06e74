import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental import checkify
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import oracle
from errors import refused
from plait import ContextParallel, Contiguous, HalfSwap, Striped, Zigzag
from plait.testing import assert_layout_invariant, check_order, in_order

FEATURES = 4


@pytest.fixture
def batch(rng):
    return {
        "x": rng.normal(size=(2, 16, FEATURES)).astype(np.float32),
        "segment_ids": np.repeat([[1, 2, 0], [1, 1, 2]], [5, 8, 3], axis=1),
        "scale": np.float32(2),
        "heads": 2,
    }


AXIS = {"x": 1, "segment_ids": 1, "scale": None, "heads": None}
fails = functools.partial(refused, error=AssertionError)


def shift(cp, x, ids):
    return cp.lookahead(x, -1, segment_ids=ids, fill=0.0)


def roll(cp, x, ids):
    return jnp.roll(x, 1, axis=1).at[:, 0].set(0)


def model(cp, batch, mix=shift):
    """Layers whose names do not ascend; "mix" mixes neighbours, and "loss" depends on it."""
    assert batch["heads"] + 0 == 2
    out = {"embed": batch["x"] * batch["scale"]}
    out["mix"] = [mix(cp, out["embed"], batch["segment_ids"]), jnp.ones(())]
    total, count = cp.sum_and_count(out["mix"][0].sum(2), batch["segment_ids"] > 0)
    return out | {"loss": total / count, "count": count}


def attend(cp, batch):
    q = batch["x"].reshape(2, -1, batch["heads"], FEATURES // batch["heads"])
    return {"attention": cp.attention(q, q, q, segment_ids=batch["segment_ids"])}


def test_a_model_that_is_right_in_every_layout(batch):
    seen = []

    def fn(cp, batch):
        seen.append(cp)
        assert batch["x"].shape == (2, 16, FEATURES)
        return model(cp, batch)

    assert_layout_invariant(fn, batch, axis=AXIS)
    one, *rest = seen
    assert one == ContextParallel(Contiguous(1), "context")
    assert [cp.layout for cp in rest] == [Contiguous(8), Zigzag(8), HalfSwap(8), Striped(8)]
    assert_layout_invariant(model, batch, axis=AXIS, layouts=[Striped(2, 4), HalfSwap(4)])
    assert_layout_invariant(attend, batch, axis=AXIS, layouts=[Zigzag(4)])


def test_the_first_faulty_layer_is_named(batch):
    """By the first layout in which it is wrong, and where: every start of a chunk but the first."""
    faulty = functools.partial(model, mix=roll)
    batch["segment_ids"][:] = 1
    words = "output 'mix.0' in Zigzag(2)", "source position 4 (slot 8, rank 1), index [0, 4, 0]"
    wanted = 2 * batch["x"][0, 3, 0]
    values = f"it is {2 * batch['x'][0, 15, 0]} and should be {wanted}", "16 of 128 values differ"
    fails(
        lambda: assert_layout_invariant(faulty, batch, axis=AXIS, ranks=2),
        *words,
        *values,
        "at source positions 4 and 12 (",
    )
    fails(
        lambda: assert_layout_invariant(faulty, batch, axis=AXIS, ranks=2, axis_name=None),
        *words,
        *values,
    )
    only = [Striped(2, 8), HalfSwap(4)]  # one stripe a rank is source order
    fails(
        lambda: assert_layout_invariant(faulty, batch, axis=AXIS, layouts=only),
        "output 'mix.0' in HalfSwap(4)",
        "at source positions 2, 4, 6, 10 and 2 runs more",
    )


def test_scalars_and_gradients_are_compared_as_they_are(rng):
    x = rng.normal(size=(1, 16)).astype(np.float32)

    def loss(weight, cp, batch, right):
        labels = cp.lookahead(batch, fill=0.0) if right else jnp.roll(batch, -1, axis=1)
        return ((weight * batch - labels) ** 2).mean()

    def scalar(cp, batch):
        return loss(1.0, cp, batch, False)

    fails(lambda: assert_layout_invariant(scalar, x), "the output in Zigzag(8)", "it is")

    def of_weight(cp, batch, right):
        return jax.grad(loss)(jnp.float32(1), cp, batch, right) * 1e-6

    assert_layout_invariant(functools.partial(of_weight, right=True), x)
    # Small values are no excuse: the tolerance goes by the size of the output.
    fails(lambda: assert_layout_invariant(functools.partial(of_weight, right=False), x), "e-0")


def test_a_sum_within_the_shard_is_found(batch):
    def ranks_mean(cp, batch):
        def local(x):
            return jax.lax.pmean((x * (x > 0)).sum() / (x > 0).sum(), "context")

        return {"loss": jax.shard_map(local, in_specs=P(None, "context"), out_specs=P())(batch)}

    fails(lambda: assert_layout_invariant(ranks_mean, batch["x"]), "output 'loss' in Contiguous(8)")


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_on_a_mesh_of_several_axes(kind, batch, rng):
    mesh = jax.make_mesh((2, 2, 2), ("outer", "tensor", "inner"), axis_types=(kind,) * 3)
    seen = []
    weight = jnp.asarray(rng.normal(size=(FEATURES, FEATURES)).astype(np.float32))

    def fn(cp, batch, mix=shift):
        seen.append((cp, jax.sharding.get_abstract_mesh().shape))
        return mix(cp, batch["x"] @ weight, batch["segment_ids"])

    over = {"axis": AXIS, "mesh": mesh, "axis_name": ("inner", "outer"), "head_axes": "tensor"}
    assert_layout_invariant(fn, batch, **over)
    assert [cp.layout.ranks for cp, _ in seen] == [1, 4, 4, 4, 4]
    assert all(cp.axis_name == ("inner", "outer") for cp, _ in seen)
    assert all(cp.head_axes == ("tensor",) for cp, _ in seen)
    assert [dict(shape)["tensor"] for _, shape in seen] == [1, 2, 2, 2, 2]
    if kind == AxisType.Auto:  # jax does not let an Explicit sharded axis be rolled
        batch["segment_ids"][:] = 1
        fails(lambda: assert_layout_invariant(lambda c, b: fn(c, b, roll), batch, **over), "Zigzag")
    refused(lambda: assert_layout_invariant(fn, batch, **over, ranks=2), "2 ranks", "has 4 devices")
    refused(
        lambda: assert_layout_invariant(fn, batch, axis=AXIS, mesh=mesh), "['outer', 'tensor', 'inn"
    )


def wrong_in_zigzag(right, wrong):
    """A function whose output is one value, but in zigzag another."""

    def fn(cp, batch):
        return jnp.asarray(wrong if isinstance(cp.layout, Zigzag) else right)

    return lambda **rest: assert_layout_invariant(
        fn, np.zeros((1, 16)), axis_name=None, ranks=2, **rest
    )


def test_nan_and_infinity_of_one_only_are_differences():
    nan, inf = np.nan, np.inf
    for right, wrong in ((1.0, nan), (nan, 1.0), (1.0, inf), (inf, 1.0), (inf, -inf), (nan, inf)):
        fails(wrong_in_zigzag(right, wrong), f"it is {wrong} and should be {right}")
        fails(wrong_in_zigzag([right, 1.0], [wrong, 1.0]), "index [0]", "1 of 2 values differs")
    for same in (nan, inf, -inf, [nan, inf, 0.0]):
        wrong_in_zigzag(same, same)()


def test_tolerances():
    for dtype, near, far in (
        (np.float32, 1.0001, 1.0003),
        (jnp.bfloat16, 1.0625, 1.125),
        (jnp.float16, 1.005, 1.01),
        (np.complex64, 1 + 1e-4j, 1 + 3e-4j),
    ):
        wrong_in_zigzag(np.ones((), dtype), np.asarray(near).astype(dtype))()
        fails(wrong_in_zigzag(np.ones((), dtype), np.asarray(far).astype(dtype)), "output")
    # Zeros may differ by what the size of the others allows.
    wrong_in_zigzag(np.array([0.0, 1.0]), np.array([5e-5, 1.0]))()
    fails(wrong_in_zigzag(np.array([0.0, 1.0]), np.array([2e-4, 1.0])), "index [0]")
    wrong_in_zigzag(1.0, 1.5)(rtol=0.5)
    wrong_in_zigzag(1.0, 1.5)(rtol=0, atol=0.5)
    fails(lambda: wrong_in_zigzag(1.0, 1.5)(rtol=0, atol=0.4), "by up to 0.5", "atol 0.4")
    fails(lambda: wrong_in_zigzag(100_000, 100_001)(), "it is 100001")
    fails(lambda: wrong_in_zigzag(True, False)(), "it is False")
    fails(lambda: wrong_in_zigzag(1, 1.0)(), "has dtype float32; at one rank it has int32")
    fails(lambda: wrong_in_zigzag(1, [1])(), "has shape (1,); at one rank it has ()")


def test_masked_scores_do_not_hide_a_fault(rng):
    """Their -1e9 is finite, and the root mean square of the output would be as large."""
    x = {"x": rng.normal(size=(2, 64, 8)).astype(np.float32)}

    def wrong(cp, batch):
        sums = jnp.cumsum(batch["x"].sum(-1), axis=1)
        return jnp.where(jnp.arange(8) == 0, -1e9, sums[..., None])

    with pytest.raises(AssertionError, match="differs"):
        assert_layout_invariant(wrong, x, ranks=4)


def test_one_rank_proves_nothing():
    batch = {"x": np.zeros((2, 64, 8), np.float32)}
    one = jax.sharding.Mesh(jax.devices()[:1], "context")
    for options in ({"ranks": 1}, {"layouts": [Zigzag(1)]}, {"mesh": one}):
        refused(
            lambda options=options: assert_layout_invariant(lambda cp, b: b, batch, **options),
            "1 rank",
            "at least 2",
        )


def test_outputs_whose_axis_is_said(rng):
    x = rng.normal(size=(16, 16)).astype(np.float32)

    def first(cp, batch):
        return {"a": batch.T, "b": batch[0], "c": jnp.ones(3)}

    axes = {"a": 0, "b": -1, "c": None}
    assert_layout_invariant(first, x, out_axis=axes)
    fails(lambda: assert_layout_invariant(first, x), "output 'a' in Zigzag(8)")
    fails(
        lambda: assert_layout_invariant(first, x, out_axis={**axes, "b": None}),
        "say so by out_axis",
    )
    assert_layout_invariant(lambda cp, b: b[:, 0], x, axis=0)  # axis 0, as the batch's
    refused(
        lambda: assert_layout_invariant(first, x, out_axis={**axes, "c": 0}),
        "axis 0 of output 'c' has length 3; the sequence has 16",
    )
    refused(lambda: assert_layout_invariant(first, x, out_axis="1"), "out_axis is '1'")
    refused(lambda: assert_layout_invariant(first, x, out_axis={"a": 1}), "out_axis", "prefix")


def test_keys_and_low_precision_pass_through():
    batch = {
        "x": np.arange(16).astype(ml_dtypes.bfloat16)[None],
        "device": jnp.arange(16)[None],
        "keys": jax.random.split(jax.random.key(0), (1, 16)),
        "key": jax.random.key(1),
    }
    axis = {"x": 1, "device": 1, "keys": 1, "key": None}
    assert_layout_invariant(lambda cp, batch: batch, batch, axis=axis)
    fails(
        lambda: assert_layout_invariant(
            lambda cp, b: jax.random.split(b["key"], 16)[None], batch, axis=axis
        ),
        "differs from one rank's: at source position 1",
    )


def test_the_number_of_ranks_suits_the_length():
    def ranks(length, **rest):
        seen = []
        assert_layout_invariant(
            lambda cp, b: seen.append(cp.layout.ranks) or b, np.zeros((1, length)), **rest
        )
        return max(seen)

    assert [ranks(length) for length in (16, 12, 10, 32)] == [8, 6, 5, 8]
    assert ranks(16, axis_name=None) == 8
    refused(lambda: ranks(7), "length 7", "2 to 8 ranks", "8 tokens would do")
    refused(lambda: ranks(12, ranks=8), "has length 12", "Contiguous(8) needs a multiple")
    refused(lambda: ranks(36, ranks=9), "9 ranks need 9 devices and 8 are here", "count=9")
    assert ranks(36, ranks=9, axis_name=None) == 9


def test_errors_name_what_is_wrong(batch):
    def call(fn=lambda cp, b: b["x"], batch=batch, axis=AXIS, **rest):
        return lambda: assert_layout_invariant(fn, batch, axis=axis, **rest)

    refused(call(fn=lambda cp, b: {}), "fn returned no arrays")
    refused(call(fn=lambda cp, b: {"a": "b"}), "output 'a' is a str", error=TypeError)
    refused(call(axis=dict.fromkeys(AXIS)), "no leaf of the batch has a sequence axis")
    refused(call(batch=[np.zeros((1, 4)), np.zeros((1, 8))], axis=1), "'1' has length 8", "'0' has")
    refused(call(layouts=[]), "such as [Zigzag(4)]", error=TypeError)
    refused(call(layouts=Zigzag(4)), "layouts is Zigzag(4)", error=TypeError)
    refused(call(layouts=[Zigzag(4)], ranks=4), "both layouts and ranks")
    refused(call(ranks=0), "ranks is 0")
    refused(call(axis_name=("a", "b"), ranks=2), "needs mesh=")
    fails(
        call(fn=lambda cp, b: {str(cp.layout.ranks): b["x"]}),
        "fn returned output '8' in Contiguous(8) and output '1' at one rank",
    )


def test_one_device_says_how_to_get_eight():
    program = (
        "import numpy, plait.testing\n"
        "try: plait.testing.assert_layout_invariant(lambda cp, b: b, numpy.zeros((1, 8)))\n"
        "except ValueError as error: print(error)\n"
        "plait.testing.assert_layout_invariant("
        "lambda cp, b: b, numpy.zeros((1, 8)), axis_name=None)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PATH": "", "JAX_PLATFORMS": "cpu", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "2 ranks need 2 devices and 1 is here" in done.stdout
    assert "XLA_FLAGS=--xla_force_host_platform_device_count=8" in done.stdout
    assert "axis_name=None" in done.stdout


ORDERS = [Zigzag(4), HalfSwap(4), Striped(4), Striped(2, 4), Zigzag(2)]


@pytest.mark.parametrize("layout", ORDERS, ids=repr)
def test_the_order_that_was_claimed_and_each_other(layout):
    good = np.tile(oracle.positions(layout, 24), (2, 1))
    check_order(good, layout)
    check_order(good[0].tolist(), ContextParallel(layout, "context"))
    check_order(jnp.asarray(good), layout)
    for other in ORDERS:
        if other == layout:
            continue
        slot = int(np.argmax(good[0] != oracle.positions(other, 24)))
        refused(
            lambda other=other: check_order(good, other),
            f"not in the order of {other!r}: slot {slot} of row 0 holds position {good[0, slot]} ",
            "they look like",
            repr(layout),
        )
    batch = good.copy()
    batch[1] = np.arange(24)
    refused(lambda: check_order(batch, layout), "of row 1", "look like source order")
    refused(lambda: check_order(np.arange(24), layout), "as if they had not been")
    twice = oracle.reorder(good, layout, 1)
    refused(lambda: check_order(twice, layout), f"look like {layout!r} applied twice")


def test_orders_that_no_layout_has():
    refused(lambda: check_order([0, 1, 6, 2, 7, 3, 4, 5], Zigzag(2)), "slot 3", "no layout that")
    refused(lambda: check_order([0, 1, 2, 0, 1, 2, 3, 4], Zigzag(2)), "position 0 comes up more")
    refused(lambda: check_order([0, 1, 6, 7, 2, 3, 4, 8], Zigzag(2)), "slot 7 holds position 8")
    refused(lambda: check_order([0, 1, 6, 7, 2, 3, 4, -1], Zigzag(2)), "position -1 lies outside")
    slots = Striped(2).slots(16)
    refused(
        lambda: check_order(slots, Striped(2)),
        "as if they had been restored or Striped(8, stripe=1)",
    )
    refused(lambda: check_order([0, 1, 2], Zigzag(2)), "length 3", "multiple of 4")
    refused(lambda: check_order([0.0] * 8, Zigzag(2)), "dtype float64", error=TypeError)
    refused(
        lambda: jax.jit(lambda x: check_order(x, Zigzag(2)))(np.arange(8)),
        "traced",
        "plait.testing.in_order",
        error=TypeError,
    )


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_order_of_sharded_arrays_and_on_the_device(kind):
    mesh = jax.make_mesh((2, 4), ("data", "context"), axis_types=(kind,) * 2)
    cp = ContextParallel(Zigzag(4), "context", batch_axes="data")
    good = np.tile(cp.source_positions(16), (4, 1)).astype(np.int32)
    bad = good.copy()
    bad[2] = HalfSwap(4).positions(16)
    spec = P("data", "context")
    with jax.set_mesh(mesh):
        inside = jax.shard_map(lambda x: in_order(x, cp), in_specs=spec, out_specs=P())
        for x, right in ((good, True), (bad, False)):
            x = jax.device_put(x, NamedSharding(mesh, spec))
            assert bool(jax.jit(lambda x: in_order(x, cp))(x)) is right
            assert bool(jax.jit(inside)(x)) is right
            assert bool(in_order(x, Zigzag(4))) is right
            if right:
                check_order(x, cp)
            else:
                refused(
                    lambda x=x: check_order(x, cp),
                    "slot 4 of row 2 holds position 4 and should hold 2",
                    "look like HalfSwap(4)",
                )


def test_one_wrong_slot_on_one_rank(mesh_of):
    cp = ContextParallel(Striped(4), "context")
    at = cp.source_positions(16)
    inside = jax.shard_map(
        lambda x: in_order(x, cp), mesh=mesh_of(4), in_specs=P("context"), out_specs=P()
    )
    assert bool(jax.jit(inside)(at))
    for slot in (0, 7, 15):
        wrong = at.copy()
        wrong[slot] += 1
        assert not bool(jax.jit(inside)(wrong))
        assert not bool(in_order(wrong, cp))
    copies = jax.shard_map(lambda x: in_order(x, cp), mesh=mesh_of(4), in_specs=P(), out_specs=P())
    refused(lambda: jax.jit(copies)(at), "the same on every rank")
    refused(lambda: in_order(at * 1.0, cp), "dtype float", error=TypeError)


def test_with_checkify():
    def step(at):
        checkify.check(in_order(at, Zigzag(2)), "batch not in order")
        return at.sum()

    checked = jax.jit(checkify.checkify(step))
    assert checked(Zigzag(2).positions(8))[0].get() is None
    assert "batch not in order" in checked(np.arange(8))[0].get()


def test_replicated_arrays_are_read_once():
    mesh = Mesh(np.array(jax.devices()), ("context",))
    x = jax.device_put(np.arange(16), NamedSharding(mesh, P()))
    refused(lambda: check_order(x, Zigzag(2)), "slot 4 holds position 4 and should hold 12")
