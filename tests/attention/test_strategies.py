import dataclasses
import functools
import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import oracle
import plait
from attention_inputs import assert_close, documents, inputs, with_gradients
from errors import refused
from hlo import collectives, text
from plait import (
    Blockwise,
    Causal,
    ContextParallel,
    Contiguous,
    Flash,
    Full,
    HalfSwap,
    Mask,
    Shapes,
    SlidingWindow,
    Striped,
    Zigzag,
    audit,
    choose_kernel,
    choose_strategy,
)
from plait.attention.cost import pairs_by_shift
from plait.attention.kernels import Scores, Tags, attend, blockwise, merge
from plait.attention.strategies.ring import needed_shifts
from sweeps import every, slow

_spec = importlib.util.spec_from_file_location(
    "matrix", pathlib.Path(__file__).with_name("matrix.py")
)
matrix = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(matrix)

SMALL = Blockwise(q_block=16, k_block=16)


def two_axes(ranks=4):
    """A mesh over whose axes, major first, the sequence is sharded: USP needs two."""
    return Mesh(np.array(jax.devices()[:ranks]).reshape(2, -1), ("outer", "inner"))


def run(cell, rng):
    layout, mask = matrix.LAYOUTS[cell.layout], matrix.MASKS[cell.mask]
    length = layout.multiple * (96 // layout.multiple)
    heads, kv_heads, head_dim, v_head_dim = matrix.HEADS[cell.heads]
    arrays = inputs(rng, 2, length, heads, kv_heads, head_dim, v_head_dim)
    q, k, v, d_out = (jnp.asarray(x, cell.dtype) for x in arrays)
    positions = oracle.positions(layout, length)
    options = {"ids": None, "positions": None, "sinks": None}
    if cell.packed:
        options["ids"] = documents(rng, 2, length)[:, positions]
    handle = layout
    if cell.layout == "per batch":
        options["positions"], handle = positions.astype(np.int32), Contiguous(layout.ranks)
    softcap = 2.0 if cell.extra == "softcap" else None
    if cell.extra == "sinks":
        options["sinks"] = rng.normal(size=heads).astype(np.float32)
    cp = ContextParallel(handle, ("outer", "inner"))

    def attend(q, k, v, sinks, ids, positions):
        return cp.attention(
            *(q, k, v),
            mask=mask,
            segment_ids=ids,
            source_positions=positions,
            strategy=cell.strategy,
            kernel=SMALL,
            softcap=softcap,
            sinks=sinks,
        )

    def step(q, k, v, d_out, sinks, ids, positions):
        out, pull = jax.vjp(lambda *x: attend(*x, ids, positions), q, k, v, sinks)
        return out, *(d for d in pull(d_out) if d is not None)

    with jax.set_mesh(two_axes()):
        found = jax.jit(step)(
            *(q, k, v, d_out), options["sinks"], options["ids"], options["positions"]
        )
    seen = oracle.visible(positions, options["ids"], mask=mask)
    seen = np.broadcast_to(seen, (2, length, length))
    wanted = oracle.attention(q, k, v, seen, None, d_out, softcap, options["sinks"])
    return found, wanted


def check(cell, rng):
    found, wanted = run(cell, rng)
    if cell.dtype == "float32":
        assert_close(found, wanted)
        return
    for a, b in zip(found, wanted, strict=True):
        # bfloat16 keeps 8 bits: 2**-8 an operation, by norm
        error = np.linalg.norm(np.asarray(a).astype(np.float64) - b) / np.linalg.norm(b)
        assert error < 1e-2


@pytest.mark.parametrize("cell", every(3, matrix.PAIRS), ids=str)
def test_every_pair_of_choices_equals_float64(cell, rng):
    check(cell, rng)


@pytest.mark.slow
@pytest.mark.parametrize("cell", matrix.covering(3), ids=str)
def test_every_three_choices_equal_float64(cell, rng):
    check(cell, rng)


@pytest.mark.parametrize(
    "layout", [slow(Zigzag(8)), HalfSwap(8), Zigzag(5), slow(HalfSwap(3))], ids=repr
)
@pytest.mark.parametrize("packed", [False, True])
def test_a_ring_of_any_number_of_ranks(layout, packed, mesh_of, rng):
    """No rule that the length be a multiple of the ranks squared: 5 and 8 ranks of 6 tokens."""
    length = layout.multiple * 3
    arrays = inputs(rng, 1, length)
    positions = oracle.positions(layout, length)
    ids = documents(rng, 1, length)[:, positions] if packed else None
    cp = ContextParallel(layout, "context")

    def attend(q, k, v, ids):
        return cp.attention(q, k, v, segment_ids=ids, strategy="ring", kernel=Blockwise(3, 3))

    with jax.set_mesh(mesh_of(layout.ranks)):
        found = jax.jit(with_gradients(attend))(*arrays, ids)
    q, k, v, d_out = arrays
    assert_close(found, oracle.attention(q, k, v, oracle.visible(positions, ids), d_out=d_out))


@pytest.mark.parametrize("layout", [Zigzag(4), HalfSwap(4)], ids=repr)
def test_every_step_of_a_ring_is_half_a_square(layout, mesh_of, rng, monkeypatch):
    """Blocks that were visited, told by the kernel itself: 3 of 4 on the diagonal, then 2."""
    visited = []

    def spy(*args):
        order, counts = original(*args)
        jax.debug.callback(lambda c: visited.append(int(c.sum())), counts)
        return order, counts

    original = blockwise._visits
    monkeypatch.setattr(blockwise, "_visits", spy)
    q, k, v, _ = (jnp.asarray(x) for x in inputs(rng, 1, 128))
    kernel = Blockwise(16, 16)  # a chunk of the layout
    out = plait.attention(
        q, k, v, layout, axis_name="context", mesh=mesh_of(4), strategy="ring", kernel=kernel
    )
    out.block_until_ready()
    jax.effects_barrier()
    assert sorted(visited) == [2] * 12 + [3] * 4


def test_steps_that_nobody_needs_are_left_out(mesh_of, rng):
    assert needed_shifts(Contiguous(8), 128, 8, Causal()) == tuple(range(8))
    assert needed_shifts(Contiguous(8), 128, 8, SlidingWindow(16)) == (0, 1)
    assert needed_shifts(Contiguous(8), 128, 8, SlidingWindow(17)) == (0, 1, 2)
    assert needed_shifts(Zigzag(8), 128, 8, SlidingWindow(8)) == (0, 1, 7)
    cp = ContextParallel(Contiguous(8), "context")
    q, k, v, _ = inputs(rng, 1, 128)
    attend = functools.partial(
        cp.attention, mask=SlidingWindow(16), strategy="ring", mesh=mesh_of(8)
    )
    moved = [("collective-permute", x.nbytes // 8) for x in (k, v)]
    assert collectives(text(attend, q, k, v)) == sorted(moved)


def executed(report):
    """Kind and bytes of every collective, as often as it runs."""
    found = [(c.kind, c.bytes) for c in report.collectives for _ in range(c.executions)]
    return sorted(found)


CP = ContextParallel(Zigzag(4), ("outer", "inner"))
SHAPES = [(1, 64, 8, 16), (1, 64, 2, 16), (1, 64, 2, 12), (1, 64, 8, 12)]


@pytest.mark.parametrize("strategy", matrix.STRATEGIES)
def test_what_strategies_communicate(strategy):
    """Bytes by hand, of float32 shards: q 8 KiB, k 2 KiB, v 1.5 KiB, out 6 KiB."""
    q, k, v, out = 8192, 2048, 1536, 6144
    permute, to_all = "collective-permute", "all-to-all"
    forward = {
        "all_gather": [("all-gather", 4 * k), ("all-gather", 4 * v)],
        "ring": [(permute, k), (permute, v)] * 3,
        # two kv heads over four ranks: two copies of each
        "ulysses": [(to_all, q), (to_all, 2 * k), (to_all, 2 * v), (to_all, out)],
        "usp": [(to_all, q), (to_all, k), (to_all, v), (to_all, out), (permute, k), (permute, v)],
    }[strategy]
    backward = {
        "all_gather": [("reduce-scatter", 4 * k), ("reduce-scatter", 4 * v)],
        # 3 steps and the way home of the gradients, and of k and v but 2 more: the compiler sees
        # that the first permutes are those of the forward pass
        "ring": [(permute, k), (permute, v)] * 6,
        "ulysses": forward,
        "usp": [(to_all, q), (to_all, k), (to_all, v), (to_all, out)]
        + [(permute, k), (permute, v)] * 2,
    }[strategy]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in SHAPES]
    spec = P(None, ("outer", "inner"))
    attend = functools.partial(CP.attention, strategy=strategy, kernel=SMALL)
    compiled = functools.partial(audit.compile_for, "cpu:4", mesh={"outer": 2, "inner": 2})
    report = compiled(attend, *arrays[:3], in_specs=spec)
    assert executed(report) == sorted(forward)
    report = compiled(with_gradients(attend), *arrays, in_specs=spec)
    assert executed(report) == sorted(forward + backward)


def test_partial_results_merge_as_if_together(rng):
    q, k, v, _ = (jnp.asarray(x) for x in inputs(rng, 2, 24))
    tags = Tags(jnp.tile(jnp.arange(24), (2, 1)))
    whole = attend(SMALL, Scores(Causal(), 0.3), q, k, v, tags, tags)
    parts = [
        attend(
            *(SMALL, Scores(Causal(), 0.3), q, k[:, part], v[:, part]),
            *(tags, Tags(tags.positions[:, part])),
        )
        for part in (slice(0, 5), slice(5, 24))
    ]
    for merged in (merge(*parts), merge(*reversed(parts))):
        for a, b in zip(merged, whole, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6)


def test_two_empty_parts_merge_to_an_empty_one():
    empty = jnp.zeros((1, 2, 1, 3)), jnp.full((1, 2, 1), -jnp.inf)
    out, lse = merge(empty, empty)
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_array_equal(lse, -np.inf)
    some = jnp.ones((1, 2, 1, 3)), jnp.full((1, 2, 1), 0.5)
    for merged in (merge(empty, some), merge(some, empty)):
        for a, b in zip(merged, some, strict=True):
            np.testing.assert_array_equal(a, b)
    gradient = jax.grad(lambda out: merge((out, empty[1]), empty)[0].sum())(empty[0])
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("strategy", [slow("all_gather"), "ring", slow("usp")])
def test_the_pallas_kernels_serve_every_strategy(strategy, rng):
    """Interpreted; float32 partial results and gradients of a ring among them."""
    layout = Zigzag(4)
    arrays = inputs(rng, 1, 64)
    positions = oracle.positions(layout, 64)
    ids = documents(rng, 1, 64)[:, positions]
    cp = ContextParallel(layout, ("outer", "inner"))
    kernel = Flash(8, 8, interpret=True)
    attend = functools.partial(cp.attention, segment_ids=ids, strategy=strategy, kernel=kernel)
    with jax.set_mesh(two_axes()):
        found = jax.jit(with_gradients(attend))(*arrays)
    q, k, v, d_out = arrays
    assert_close(found, oracle.attention(q, k, v, oracle.visible(positions, ids), d_out=d_out))


def test_auto_says_which_kernel_and_why():
    x = jax.ShapeDtypeStruct((1, 1024, 8, 128), jnp.bfloat16)
    half = jax.ShapeDtypeStruct((1, 1024, 8, 128), jnp.float16)
    on_tpu = functools.partial(choose_kernel, platform="tpu")
    assert on_tpu(x, x, x).kernel == Flash()
    assert on_tpu(half, half, half).kernel == Blockwise()
    assert "float16" in on_tpu(half, half, half).reason
    assert "manual" in on_tpu(x, x, x, fully_manual=False).reason
    assert choose_kernel(x, x, x, platform="gpu") == (
        Blockwise(),
        "it runs on gpu; Flash is for TPUs",
    )


@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
def test_a_rank_without_a_real_token(strategy, mesh_of, rng):
    """Padding may hold NaN, and so may the gradients of what it gives."""
    layout = Zigzag(4)
    positions = oracle.positions(layout, 64)
    ids = (positions < 20).astype(np.int32)[None]
    arrays = inputs(rng, 1, 64)
    noisy = [np.where((ids == 0)[..., None, None], np.nan, x) for x in arrays]
    cp = ContextParallel(layout, "context")
    attend = functools.partial(cp.attention, segment_ids=ids, strategy=strategy, kernel=SMALL)
    with jax.set_mesh(mesh_of(4)):
        found = jax.jit(with_gradients(attend))(*noisy)
    quiet = [np.where((ids == 0)[..., None, None], 0, x) for x in arrays]
    wanted = oracle.attention(*quiet[:3], oracle.visible(positions, ids), d_out=quiet[3])
    assert_close(found, wanted)


@pytest.mark.parametrize("check_vma", [True, slow(False)])
@pytest.mark.parametrize("strategy", ["ring", "ulysses", "usp"])
def test_inside_the_users_shard_map(strategy, check_vma, rng):
    layout = Zigzag(4)
    arrays = inputs(rng, 1, 32)
    cp = ContextParallel(layout, ("outer", "inner"))
    sinks = rng.normal(size=4).astype(np.float32)
    spec = P(None, ("outer", "inner"))

    def layer(q, k, v, sinks):
        attend = functools.partial(cp.attention, strategy=strategy, kernel=SMALL)
        return jax.checkpoint(attend)(q, k, v, sinks=sinks)

    mapped = jax.shard_map(
        layer,
        mesh=two_axes(),
        in_specs=(spec, spec, spec, P()),
        out_specs=spec,
        check_vma=check_vma,
    )

    def step(q, k, v, sinks, d_out):
        out, pull = jax.vjp(mapped, q, k, v, sinks)
        return out, *pull(d_out)

    found = jax.jit(step)(*arrays[:3], sinks, arrays[3])
    seen = oracle.visible(oracle.positions(layout, 32))
    assert_close(found, oracle.attention(*arrays[:3], seen, None, arrays[3], None, sinks))


def test_batch_and_heads_on_axes_of_their_own(rng):
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("data", "context", "tensor"))
    layout = Zigzag(2)
    arrays = inputs(rng, 2, 32, heads=8, kv_heads=2)
    cp = ContextParallel(layout, "context", batch_axes="data", head_axes="tensor")
    seen = np.broadcast_to(oracle.visible(oracle.positions(layout, 32)), (2, 32, 32))
    wanted = oracle.attention(*arrays[:3], seen, d_out=arrays[3])
    for strategy in ("ring", "ulysses", "auto"):
        with jax.set_mesh(mesh):
            attend = functools.partial(cp.attention, strategy=strategy, kernel=SMALL)
            assert_close(jax.jit(with_gradients(attend))(*arrays), wanted)


def test_what_cannot_be_dealt_is_refused(mesh_of):
    x, two = jnp.ones((1, 16, 6, 8)), jnp.ones((1, 16, 2, 8))
    cp = ContextParallel(Zigzag(4), "context")
    ulysses = functools.partial(cp.attention, strategy="ulysses", mesh=mesh_of(4))
    refused(lambda: ulysses(x, two, two), "6 heads of q", "4 devices", "multiple of 4", "'ring'")
    usp = functools.partial(cp.attention, strategy="usp", mesh=mesh_of(4))
    refused(lambda: usp(x, two, two), "'usp'", "axis_name is 'context'", "name two")


def test_work_by_shift_adds_up():
    for layout in (Contiguous(4), Zigzag(4), HalfSwap(4), Striped(4)):
        for mask in (Causal(), Full(), SlidingWindow(64)):
            pairs = pairs_by_shift(layout, 1024, mask)
            exact = layout.work(1024, mask)
            np.testing.assert_allclose(pairs.sum(axis=1), exact, rtol=0.1)


def test_a_choice_follows_the_model():
    deepseek = Shapes(1, 128, 128, 192, 128)
    choice = choose_strategy(Zigzag(128), 131072, deepseek)
    assert choice.strategy == "ulysses"
    assert "exceed 4 GiB" in str(choice)
    # by hand: 640 FLOPs a pair and head, 128 heads, half of the square, over 128 ranks
    (ulysses,) = (e for e in choice.estimates if e.strategy == "ulysses")
    compute = 640 * 128 * 131072**2 / 2 / 128 / 459e12
    shard = 1024 * 128 * (320 + 320) * 2
    assert ulysses.received_bytes == pytest.approx(127 / 128 * shard)
    assert ulysses.seconds == pytest.approx(compute + ulysses.received_bytes / 100e9)
    few_heads = Shapes(1, 8, 1, 128, 128)
    assert choose_strategy(Zigzag(128), 131072, few_heads).strategy == "ring"
    short = Shapes(1, 6, 1, 128, 128)  # too few heads to deal, too little work to hide a step
    windowed = choose_strategy(Contiguous(4), 4096, short, mask=SlidingWindow(1024))
    assert windowed.strategy == "ring"  # which moves one shard where a gather moves three


@dataclasses.dataclass(frozen=True)
class Falling(Mask):
    """Two global queries and a window: the first position shown falls from query 1 to 2."""

    def intervals(self, q_positions, xp):
        return ((xp.where(q_positions < 2, 5, q_positions - 1), q_positions),)


class Unhashable(Mask):
    __hash__ = None

    def intervals(self, q_positions, xp):
        return ((None, q_positions),)


def test_a_mask_that_blocks_cannot_follow_is_refused():
    x = jnp.ones((1, 16, 1, 8))
    for call in (
        lambda: plait.attention(x, x, x, Zigzag(2), mask=Falling()),
        lambda: plait.count_blocks(Zigzag(2), 16, mask=Falling()),
    ):
        refused(call, "first position", "falls from query 1 to 2", "joined by |")
    refused(
        lambda: plait.attention(x, x, x, Zigzag(2), mask=Unhashable()),
        "frozen dataclass",
        error=TypeError,
    )


def test_narrow_positions_do_not_wrap(rng):
    q, k, v, _ = inputs(rng, 1, 64)
    seen = oracle.visible(np.arange(64), mask=SlidingWindow(3))
    for dtype in (jnp.uint8, jnp.uint32, jnp.int16):
        positions = jnp.arange(64, dtype=dtype)
        out = plait.attention(
            q, k, v, Zigzag(4), mask=SlidingWindow(3), source_positions=positions, kernel=SMALL
        )
        np.testing.assert_allclose(out, oracle.attention(q, k, v, seen), atol=1e-5)


def test_no_sink_beside_tokens_that_see_nothing(rng):
    """-inf is no sink; padding has an lse of -inf, and the difference would be NaN."""
    arrays = inputs(rng, 1, 32)
    ids = np.array([[1] * 20 + [0] * 12], np.int32)
    sinks = np.array([-np.inf, 0, 1, 2], np.float32)

    def step(q, k, v, sinks, d_out):
        attend = functools.partial(plait.attention, layout=Contiguous(1), segment_ids=ids)
        out, pull = jax.vjp(lambda *x: attend(*x[:3], sinks=x[3]), q, k, v, sinks)
        return out, *pull(d_out)

    found = jax.jit(step)(*arrays[:3], sinks, arrays[3])
    seen = oracle.visible(np.arange(32), ids)
    assert_close(found, oracle.attention(*arrays[:3], seen, None, arrays[3], None, sinks))


def test_the_output_travels_in_its_dtype():
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in SHAPES[:3]]
    mapped = jax.shard_map(
        functools.partial(CP.attention, strategy="ulysses", kernel=SMALL),
        mesh=two_axes(),
        in_specs=P(None, ("outer", "inner")),
        out_specs=P(None, ("outer", "inner")),
    )
    program = jax.jit(mapped).lower(*arrays).as_text()
    sent = [line for line in program.splitlines() if "all_to_all" in line]
    assert sent
    assert all("bf16" in line for line in sent), sent


def test_heads_that_only_types_shard_are_counted(rng):
    mesh = jax.make_mesh((2, 4), ("tensor", "context"), axis_types=(AxisType.Explicit,) * 2)
    spec = P(None, "context", "tensor")
    x = jax.device_put(np.ones((1, 16, 4, 8), np.float32), NamedSharding(mesh, spec))
    cp = ContextParallel(Zigzag(4), "context")
    with jax.set_mesh(mesh):
        refused(lambda: cp.attention(x, x, x, strategy="ulysses"), "2 heads of q", "multiple of 4")


def test_estimates_where_positions_are_data():
    """No layout of whole chunks is needed, and no strategy computes in less than its work takes."""
    shapes = Shapes(1, 8, 8, 128, 128)
    odd = choose_strategy(Zigzag(4), 36, shapes, positions_are_data=True)
    assert odd.strategy in matrix.STRATEGIES
    for layout in (HalfSwap(8), Zigzag(8)):
        choice = choose_strategy(layout, 131072, shapes, axis_sizes=(4, 2))
        least = 512 * 8 * 131072**2 / 2 / 8 / 459e12
        assert all(e.seconds > 0.99 * least for e in choice.estimates), str(choice)
    refused(lambda: choose_strategy(Zigzag(4), 64, shapes, axis_sizes=(2, 4)), "8 devices", "4")
    assert choose_strategy(Zigzag(4), 64, shapes, axis_sizes=[2, 2]).estimates
    refused(lambda: choose_strategy(Zigzag(4), 65, shapes), "65", "72")
    refused(
        lambda: choose_strategy(Zigzag(4), 64, shapes, mask="causal"), "Causal()", error=TypeError
    )
    refused(lambda: Shapes(1, 8, 0, 4, 4), "kv_heads is 0")
    refused(lambda: Shapes(1, 8, 3, 4, 4), "kv_heads 3", "divide", "1")


def test_numbers_and_ids_that_make_no_sense():
    x = jnp.ones((1, 16, 1, 8))
    attend = functools.partial(plait.attention, x, x, x, Zigzag(2))
    refused(lambda: attend(softcap=float("inf")), "softcap is inf", "finite")
    refused(lambda: attend(scale=float("nan")), "scale is nan", "finite")
    refused(lambda: plait.attention(x, x, x, "zigzag"), "'zigzag'", "Zigzag(8)", error=TypeError)
    for ids in (np.ones(32, int), np.ones(8, int)):
        refused(lambda ids=ids: plait.count_blocks(Zigzag(2), 16, segment_ids=ids), "(16,)")
