import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import oracle
import plait
from attention_inputs import assert_close, documents, inputs, with_gradients
from errors import refused
from hlo import collectives, operations, text
from plait import (
    Blockwise,
    Causal,
    ContextParallel,
    Contiguous,
    Full,
    HalfSwap,
    Placed,
    Striped,
    Zigzag,
)
from plait.mask import check_mask
from sweeps import slow
from test_layout import layouts

SMALL = Blockwise(q_block=32, k_block=32)


@pytest.mark.parametrize("ranks", [1, 2, 3, slow(8)])
@pytest.mark.parametrize("packed", [slow(False), True])
def test_equals_float64_on_every_layout(ranks, packed, mesh_of, rng):
    for layout in [*layouts(ranks)[:4], layouts(ranks)[5]]:
        length = layout.multiple * max(1, 192 // layout.multiple)
        arrays = inputs(rng, 2, length)
        positions = oracle.positions(layout, length)
        ids = documents(rng, 2, length)[:, positions] if packed else None
        cp = ContextParallel(layout, "context")

        def attend(q, k, v, ids, cp=cp):
            return cp.attention(q, k, v, segment_ids=ids, kernel=SMALL)

        with jax.set_mesh(mesh_of(ranks)):
            found = jax.jit(with_gradients(attend))(*arrays, ids)
        q, k, v, d_out = arrays
        wanted = oracle.attention(q, k, v, oracle.visible(positions, ids), d_out=d_out)
        assert_close(found, wanted)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize("mask", [Causal(), Full()])
@pytest.mark.parametrize("kernel", [Blockwise(16, 24), Blockwise(10, 25)], ids=["padded", "even"])
def test_heads_masks_and_odd_lengths(heads, kv_heads, mask, kernel, rng):
    length = 50
    arrays = inputs(rng, 2, length, heads, kv_heads)
    layout = Zigzag(5)
    positions = oracle.positions(layout, length)
    attend = functools.partial(plait.attention, layout=layout, mask=mask, kernel=kernel, scale=0.3)
    found = jax.jit(with_gradients(attend))(*arrays)
    q, k, v, d_out = arrays
    seen = np.broadcast_to(
        oracle.visible(positions, causal=isinstance(mask, Causal)), (2, length, length)
    )
    assert_close(found, oracle.attention(q, k, v, seen, 0.3, d_out))


def test_bfloat16_is_close_to_float32(mesh_of, rng):
    layout = Zigzag(4)
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in inputs(rng, 1, 256)]
    cp = ContextParallel(layout, "context")
    with jax.set_mesh(mesh_of(4)):
        found = jax.jit(with_gradients(functools.partial(cp.attention, kernel=SMALL)))(*arrays)
    q, k, v, d_out = arrays
    positions = oracle.positions(layout, 256)
    wanted = oracle.attention(q, k, v, oracle.visible(positions), d_out=d_out)
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == jnp.bfloat16
        # bfloat16 keeps 8 bits: 2**-8 an operation, by norm
        error = np.linalg.norm(np.asarray(a).astype(np.float64) - b) / np.linalg.norm(b)
        assert error < 1e-2


def test_another_document_changes_nothing(mesh_of, rng):
    layout, length = HalfSwap(4), 64
    positions = oracle.positions(layout, length)
    ids = np.repeat([1, 2, 3, 0], 16)[None, positions].astype(np.int32)
    q, k, v, _ = inputs(rng, 1, length)
    cp = ContextParallel(layout, "context")
    with jax.set_mesh(mesh_of(4)):
        attend = jax.jit(lambda q, k, v: cp.attention(q, k, v, segment_ids=ids, kernel=SMALL))
        before = np.asarray(attend(q, k, v))
        others = (ids != 2)[..., None, None]
        # padding may hold anything at all
        noise = np.where((ids == 0)[..., None, None], np.nan, 1e3).astype(np.float32)
        after = np.asarray(attend(*(np.where(others, x * 3 + noise, x) for x in (q, k, v))))
    document = ids[0] == 2
    np.testing.assert_array_equal(after[:, document], before[:, document])
    assert np.isfinite(after).all()
    np.testing.assert_array_equal(after[:, ids[0] == 0], 0)


def test_a_later_token_changes_nothing(rng):
    layout, length = Zigzag(4), 64
    positions = oracle.positions(layout, length)
    q, k, v, _ = inputs(rng, 1, length)
    attend = jax.jit(lambda q, k, v: plait.attention(q, k, v, layout, kernel=SMALL))
    late = (positions >= 40)[None, :, None, None]
    after = attend(*(np.where(late, x + 7, x) for x in (q, k, v)))
    early = positions < 40
    np.testing.assert_array_equal(after[:, early], attend(q, k, v)[:, early])


def test_skipped_blocks_are_never_read(rng):
    """NaN in the keys of a block that is computed would reach the output as 0 * NaN."""
    layout, length, block = Contiguous(1), 256, 32
    q, k, v, d_out = inputs(rng, 1, length)
    v[:, length // 2 :] = np.nan
    k[:, length // 2 :] = np.nan
    kernel = Blockwise(block, block)
    attend = functools.partial(plait.attention, layout=layout, kernel=kernel)
    d_out[:, length // 2 :] = 0
    out, pull = jax.vjp(attend, *(jnp.asarray(x) for x in (q, k, v)))
    assert np.isfinite(out[:, : length // 2]).all()
    assert np.isnan(out[:, length // 2 :]).all()
    d_q, _, _ = pull(d_out)
    assert np.isfinite(d_q[:, : length // 2]).all()


def test_work_shows_in_the_counts():
    contiguous, total = plait.count_blocks(Contiguous(8), 4096)
    zigzag, same_total = plait.count_blocks(Zigzag(8), 4096)
    assert total == same_total == 2 * 16
    np.testing.assert_array_equal(contiguous, [3, 7, 11, 15, 19, 23, 27, 31])
    np.testing.assert_array_equal(zigzag, [17] * 8)
    swapped, _ = plait.count_blocks(HalfSwap(8), 4096)
    np.testing.assert_array_equal(swapped, [17] * 8)


def test_counts_are_what_the_kernel_visits(mesh_of, rng, monkeypatch):
    """The same rule on the host and on the device: counted from the lists the kernel made."""
    from plait.attention.kernels import blockwise as kernels

    visited = []

    def spy(*args):
        order, counts = original(*args)
        jax.debug.callback(lambda c: visited.append(int(c.sum())), counts)
        return order, counts

    original = kernels._visits
    monkeypatch.setattr(kernels, "_visits", spy)
    length = 512
    for layout in (Zigzag(4), Striped(4), Contiguous(4), layouts(4)[5]):
        length = layout.multiple * (512 // layout.multiple)
        ids = documents(rng, 2, length)
        kernel = Blockwise(16, 64)
        q, k, v, _ = inputs(rng, 2, length)
        visited.clear()
        plait.attention(
            *(jnp.asarray(x) for x in (q, k, v)),
            layout,
            axis_name="context",
            mesh=mesh_of(4),
            segment_ids=ids[:, layout.positions(length)],
            kernel=kernel,
        ).block_until_ready()
        jax.effects_barrier()
        computed, _ = plait.count_blocks(layout, length, segment_ids=ids, kernel=kernel)
        assert sum(visited) == computed.sum(), layout


def test_a_row_that_sees_nothing(rng):
    q, k, v, d_out = inputs(rng, 1, 32)
    ids = np.zeros((1, 32), np.int32)
    attend = functools.partial(plait.attention, layout=Zigzag(2), segment_ids=ids)
    found = with_gradients(attend)(q, k, v, d_out)
    for x in found:
        np.testing.assert_array_equal(x, 0)


def test_a_row_of_a_kernel_that_sees_nothing(rng):
    """Without the front door, which answers for padding itself: key shards of a ring hide rows."""
    q, k, v, d_out = inputs(rng, 1, 24)
    positions = np.arange(24, dtype=np.int32)[None]
    data = {"mask": Causal(), "scale": 0.5, "q_positions": positions, "k_positions": positions + 8}

    def attend(q, k, v):
        return Blockwise(8, 8)(q, k, v, **data)

    (out, lse), pull = jax.vjp(attend, *map(jnp.asarray, (q, k, v)))
    np.testing.assert_array_equal(out[:, :8], 0)
    np.testing.assert_array_equal(lse[:, :8], -np.inf)
    d_q, *d_keys = pull((jnp.asarray(d_out), jnp.zeros_like(lse)))
    np.testing.assert_array_equal(d_q[:, :8], 0)
    for d in d_keys:
        np.testing.assert_array_equal(d[:, 16:], 0)
        assert np.isfinite(d).all()
    assert np.isfinite(out).all()
    assert np.isfinite(d_q).all()


def test_lse_and_its_gradient(rng):
    q, k, v, _ = inputs(rng, 1, 24)
    ids = np.array([[1] * 10 + [2] * 10 + [0] * 4], np.int32)
    positions = np.arange(24, dtype=np.int32)[None]
    data = {"mask": Causal(), "scale": 0.5, "q_positions": positions, "k_positions": positions}

    def lse(q, k):
        return Blockwise(8, 8)(q, k, v, q_segment_ids=ids, k_segment_ids=ids, **data)[1]

    def plain(q, k):
        scores = jnp.einsum("bqhd,bkhd->bqhk", q, jnp.repeat(k, 2, 2)) * 0.5
        seen = oracle.visible(positions, ids)[:, :, None]
        return jax.nn.logsumexp(jnp.where(seen, scores, -jnp.inf), axis=-1)

    found = lse(jnp.asarray(q), jnp.asarray(k))
    np.testing.assert_allclose(found[:, :20], plain(q, k)[:, :20], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found[:, 20:], -np.inf)
    gradients = jax.grad(lambda *x: lse(*x)[:, :20].sum(), argnums=(0, 1))(q, k)
    wanted = jax.grad(lambda *x: plain(*x)[:, :20].sum(), argnums=(0, 1))(q, k)
    for a, b in zip(gradients, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_positions_as_data_compile_once(mesh_of, rng):
    """Twenty layouts, one program: each equal to the same text in source order."""
    ranks, length = 4, 96
    q, k, v, d_out = inputs(rng, 1, length)
    ids = documents(rng, 1, length)
    wanted = oracle.attention(q, k, v, oracle.visible(np.arange(length), ids), d_out=d_out)
    cp = ContextParallel(Contiguous(ranks), "context")
    traces = []

    def attend(q, k, v, ids, positions):
        traces.append(1)
        return cp.attention(
            q, k, v, segment_ids=ids, source_positions=positions, kernel=Blockwise(8, 16)
        )

    run = jax.jit(with_gradients(attend))
    with jax.set_mesh(mesh_of(ranks)):
        for seed in range(20):
            generator = np.random.default_rng(seed)
            layout = Placed(generator.permutation(np.repeat(np.arange(ranks), 6)))
            moved = plait.reorder([q, k, v, d_out, ids], layout)
            positions = layout.positions(length)
            found = run(*moved, positions if seed % 2 else np.tile(positions, (1, 1)))
            assert_close(plait.restore([np.asarray(x) for x in found], layout), wanted)
    assert len(traces) == 2  # one for positions of each shape


def test_what_it_communicates(mesh_of, rng):
    q, k, v, d_out = inputs(rng, 2, 64)
    ids = np.ones((2, 64), np.int32)
    cp = ContextParallel(Zigzag(4), "context")
    plain = functools.partial(cp.attention, mesh=mesh_of(4))

    def packed(q, k, v, ids):
        return plain(q, k, v, segment_ids=ids)

    gathers = [("all-gather", k.nbytes), ("all-gather", v.nbytes)]
    assert collectives(text(plain, q, k, v)) == sorted(gathers)
    assert collectives(text(packed, q, k, v, ids)) == sorted([*gathers, ("all-gather", ids.nbytes)])
    scatters = [("reduce-scatter", k.nbytes // 4), ("reduce-scatter", v.nbytes // 4)]
    program = text(with_gradients(plain), q, k, v, d_out)
    assert collectives(program) == sorted(gathers + scatters)
    alone = text(functools.partial(plait.attention, layout=Zigzag(4)), q, k, v)
    assert not collectives(alone)


def test_memory_does_not_grow_with_the_square(rng):
    def temporaries(length):
        x = jax.ShapeDtypeStruct((1, length, 2, 16), jnp.float32)
        grad = jax.grad(lambda q, k, v: plait.attention(q, k, v, Zigzag(2)).sum(), (0, 1, 2))
        return jax.jit(grad).lower(x, x, x).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(16384) < 5 * temporaries(4096)


MESHES = [
    (kind, shape)
    for kind in (AxisType.Auto, AxisType.Explicit)
    for shape in (("data", "context", "tensor"), ("tensor", "data", "context"))
]


@pytest.mark.parametrize(("kind", "axes"), MESHES)
def test_batch_and_heads_stay_on_their_axes(kind, axes, rng):
    mesh = jax.make_mesh((2, 2, 2), axes, axis_types=(kind,) * 3)
    cp = ContextParallel(Zigzag(2), "context", batch_axes="data", head_axes="tensor")
    host = inputs(rng, 2, 32)
    ids = np.stack([np.repeat([1, 2], 16), np.repeat([1, 0], [20, 12])]).astype(np.int32)
    positions = oracle.positions(cp.layout, 32)
    ids = ids[:, positions]
    spec = P("data", "context", "tensor")
    arrays = [jax.device_put(x, NamedSharding(mesh, spec)) for x in host]
    ids_on = jax.device_put(ids, NamedSharding(mesh, P("data", "context")))

    def attend(q, k, v, ids):
        return cp.attention(q, k, v, segment_ids=ids, kernel=SMALL)

    with jax.set_mesh(mesh):
        found = jax.jit(with_gradients(attend))(*arrays, ids_on)
        kinds = [kind for kind, _ in collectives(text(attend, *arrays[:3], ids_on))]
    assert kinds == ["all-gather"] * 3
    q, k, v, d_out = host
    assert_close(found, oracle.attention(q, k, v, oracle.visible(positions, ids), d_out=d_out))
    for x in found:
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, spec), 4)


def test_only_batch_and_heads_sharded(rng):
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    cp = ContextParallel(Zigzag(2), batch_axes="data", head_axes="tensor")
    q, k, v, d_out = inputs(rng, 4, 32)
    with jax.set_mesh(mesh):
        found = jax.jit(with_gradients(cp.attention))(q, k, v, d_out)
        assert not collectives(text(cp.attention, q, k, v))
    seen = np.broadcast_to(oracle.visible(oracle.positions(cp.layout, 32)), (4, 32, 32))
    assert_close(found, oracle.attention(q, k, v, seen, d_out=d_out))


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_the_users_shard_map_under_scan_remat_and_vmap(check_vma, mesh_of, rng):
    q, k, v, d_out = inputs(rng, 2, 32, v_head_dim=8)
    layout = Zigzag(4)
    cp = ContextParallel(layout, "context")
    spec = P(None, "context")

    def layers(q, k, v):
        @jax.checkpoint
        def layer(x, _):
            rows = [y[:, None] for y in (x, k, v)]
            return jax.vmap(cp.attention)(*rows)[:, 0], None

        return jax.lax.scan(layer, q, length=2)[0]

    fn = jax.shard_map(layers, mesh=mesh_of(4), in_specs=spec, out_specs=spec, check_vma=check_vma)
    found = jax.jit(with_gradients(fn))(q, k, v, d_out)
    seen = np.broadcast_to(oracle.visible(oracle.positions(layout, 32)), (2, 32, 32))
    once = oracle.attention(q, k, v, seen)
    out, d_once, d_k2, d_v2 = oracle.attention(once, k, v, seen, d_out=d_out)
    _, d_q, d_k1, d_v1 = oracle.attention(q, k, v, seen, d_out=d_once)
    assert_close(found, (out, d_q, d_k1 + d_k2, d_v1 + d_v2))


def test_a_policy_keeps_what_was_gathered(mesh_of, rng):
    q, k, v, _ = inputs(rng, 1, 32)
    cp = ContextParallel(Zigzag(4), "context")
    names = ("plait_gathered_keys", "plait_gathered_values")

    def loss(policy):
        attend = functools.partial(cp.attention, mesh=mesh_of(4))
        remat = jax.checkpoint(attend, policy=policy, prevent_cse=False)
        return jax.grad(lambda q, k, v: (remat(q, k, v) ** 2).sum(), argnums=(0, 1, 2))

    policies = jax.checkpoint_policies
    keeping = text(loss(policies.save_only_these_names(*names)), q, k, v)
    assert operations(keeping)["all-gather"] == 2


def test_padded_keys_change_nothing():
    """Seven tokens padded to eight; counting the padding gives 1.9443 for a one."""
    x = np.ones((1, 8, 1, 8), np.float32)
    x[:, 4:7], x[:, 7] = 2, 100
    ids = np.array([[1] * 7 + [0]], np.int32)
    cp = ContextParallel(Zigzag(2))
    moved, ids = cp.reorder([x, ids])
    out = cp.restore(np.asarray(cp.attention(moved, moved, moved, mask=Full(), segment_ids=ids)))
    np.testing.assert_allclose(out[0, :4], 1.92695, atol=1e-5)
    np.testing.assert_allclose(out[0, 4:7], 1.99536, atol=1e-5)
    np.testing.assert_array_equal(out[0, 7], 0)


@pytest.mark.parametrize(
    ("valid", "padded", "of_ranks"), [(2, 8, [2, 0]), (38, 128, [16, 16, 6, 0])]
)
def test_a_rank_with_no_real_token(valid, padded, of_ranks, mesh_of, rng):
    layout = Zigzag(len(of_ranks))
    positions = oracle.positions(layout, padded)
    ids = (positions < valid).astype(np.int32)[None]
    assert ids.reshape(layout.ranks, -1).sum(axis=1).tolist() == of_ranks
    q, k, v, d_out = inputs(rng, 1, padded)
    attend = functools.partial(plait.attention, layout=layout, mesh=mesh_of(layout.ranks))
    attend = functools.partial(attend, axis_name="context", segment_ids=ids)
    found = jax.jit(with_gradients(attend))(q, k, v, d_out)
    assert_close(found, oracle.attention(q, k, v, oracle.visible(positions, ids), d_out=d_out))
    np.testing.assert_array_equal(found[0][ids == 0], 0)


def test_an_undefined_loss_in_padding_does_not_spread(rng):
    """A norm without epsilon after attention is 0 / 0 in padding, and so is its gradient."""
    q, k, v, d_out = inputs(rng, 1, 32)
    ids = np.array([[1] * 20 + [2] * 5 + [0] * 7], np.int32)
    d_out[:, 25:] = np.nan
    attend = functools.partial(plait.attention, layout=Contiguous(1), segment_ids=ids)
    found = with_gradients(attend)(*(jnp.asarray(x) for x in (q, k, v, d_out)))
    d_out[:, 25:] = 0
    seen = oracle.visible(np.arange(32), ids)
    assert_close(found, oracle.attention(q, k, v, seen, d_out=d_out))


def test_explicit_arrays_without_an_axis_name(rng):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
    q, k, v, _ = inputs(rng, 4, 16)
    wanted = oracle.attention(q, k, v, np.tile(oracle.visible(np.arange(16)), (4, 1, 1)))
    ids = np.ones((4, 16), int)
    on_mesh = [jax.device_put(x, NamedSharding(mesh, P("data"))) for x in (q, k, v)]
    np.testing.assert_allclose(plait.attention(*on_mesh, Contiguous(1)), wanted, atol=1e-5)
    with jax.set_mesh(mesh):
        out = plait.attention(*on_mesh, Contiguous(1), segment_ids=ids)
        np.testing.assert_allclose(out, wanted, atol=1e-5)
        positions = np.arange(16)
        out = plait.attention(*on_mesh, Contiguous(1), source_positions=positions)
        np.testing.assert_allclose(out, wanted, atol=1e-5)
        by_sequence = [jax.device_put(x, NamedSharding(mesh, P(None, "data"))) for x in (q, k, v)]
        refused(
            lambda: plait.attention(*by_sequence, Contiguous(1)), "sequence", "sharded over 'data'"
        )


def test_an_eager_call_traces_once(rng, monkeypatch):
    from plait.attention.kernels import blockwise as kernels

    q, k, v, _ = (jnp.asarray(x) for x in inputs(rng, 1, 16))
    first = plait.attention(q, k, v, Zigzag(2))
    monkeypatch.setattr(kernels, "_visits", None)  # what a second trace would call
    np.testing.assert_array_equal(plait.attention(q, k, v, Zigzag(2)), first)


def test_errors_name_what_is_wrong(mesh_of):
    x = jnp.ones((2, 16, 4, 8))
    attend = functools.partial(plait.attention, layout=Zigzag(2))
    refused(lambda: attend(x[0], x, x), "q has shape (16, 4, 8)")
    refused(lambda: attend(x, x[:, :8], x), "do not fit")
    refused(lambda: attend(x, x[:, :, :3], x[:, :, :3]), "4 heads and k has 3", "3 heads of q")
    refused(lambda: attend(x, x, x, segment_ids=jnp.ones((16,), int)), "(2, 16)")
    refused(lambda: attend(x, x, x, source_positions=jnp.ones((4,), int)), "(16,)")
    refused(lambda: attend(x, x, x, strategy="rnig"), "'rnig'", "'all_gather'", "'ring'?")
    refused(lambda: attend(x, x, x, sinks=jnp.ones(3)), "sinks has shape (3,)", "4 heads")
    refused(lambda: attend(x, x, x, softcap=-1), "softcap is -1.0", "above 0")
    refused(lambda: attend(x, x, x, kernel="splash"), "'splash'", "'blockwise'", "'flash'")
    refused(lambda: attend(x, x, x, mask="causal"), "'causal'", "Causal()", error=TypeError)
    refused(
        lambda: jax.jit(lambda s: attend(x, x, x, scale=s))(0.5),
        *("scale", "traced", "multiply q"),
        error=TypeError,
    )
    refused(lambda: attend(x[..., :0], x[..., :0], x), "(2, 16, 4, 0)")
    refused(lambda: attend([1], x, x), "q is a list", error=TypeError)
    refused(lambda: Blockwise(0, 16), "q_block is 0")
    refused(lambda: attend(x, x, x, segment_ids=np.full((2, 16), 2**40)), "segment_ids", "int32")
    refused(lambda: attend(x.astype(int), x, x), "int", "bfloat16", error=TypeError)
    refused(lambda: attend(x[:, :15], x[:, :15], x[:, :15]), "length 15", "pad to 16")
    on_mesh = functools.partial(attend, axis_name="context", mesh=mesh_of(2))
    odd = x[:, :15]
    refused(lambda: on_mesh(odd, odd, odd), "sequence: 15", "16")
    heads = jax.make_mesh((2, 4), ("context", "tensor"), axis_types=(AxisType.Auto,) * 2)
    two = x[:, :, :2]
    refused(
        lambda: attend(x, two, two, axis_name="context", head_axes="tensor", mesh=heads),
        *("heads of k and v: 2", "4 devices"),
    )
    manual = jax.shard_map(
        lambda x: attend(x, x, x), mesh=mesh_of(2), in_specs=P(None, "context"), out_specs=P()
    )
    refused(lambda: jax.jit(manual)(x), "manual over ['context']")
    refused(lambda: on_mesh(x, x, x, batch_axes="context"), "'context'", "share a mesh axis")
    refused(lambda: Zigzag(4).work(16, "causal"), "mask is a str", "Causal()", error=TypeError)
    refused(lambda: check_mask(Causal(), 2**30 + 1), str(2**30 + 1), str(2**30))


def test_local_attention_over_explicit_axes(rng):
    """The batch is sharded, the sequence is not; and heads may be named that no type shards."""
    explicit = (AxisType.Explicit,) * 2
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=explicit)
    q, k, v, _ = inputs(rng, 2, 32, heads=3, kv_heads=3)
    wanted = plait.attention(q, k, v, Zigzag(2))
    with jax.set_mesh(mesh):
        moved = [jax.device_put(x, P("data")) for x in (q, k, v)]
        for options in ({"local": True, "axis_name": "context"}, {"head_axes": "tensor"}):
            found = plait.attention(*moved, Zigzag(2), **options)
            np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)
