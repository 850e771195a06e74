"""What the indexer selects: the same positions, ties included, whatever the layout."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import sparse_oracle
from attention_inputs import documents
from errors import refused
from plait import Contiguous, HalfSwap, Placed, Striped, Zigzag, sparse
from sweeps import slow

LENGTH, HEADS, DIM = 96, 3, 8
LAYOUTS = {
    "contiguous": Contiguous,
    "zigzag": Zigzag,
    "half swap": HalfSwap,
    "striped": lambda ranks: Striped(ranks, 2),
    "placed": lambda ranks: Placed(np.random.default_rng(5).permutation(8 * ranks) % ranks),
}


def indexer_inputs(rng, kind, batch=2, length=LENGTH):
    """q, k and w in source order, all exact in float32 and of the dtype's own numbers."""
    shapes = ((batch, length, HEADS, DIM), (batch, length, DIM), (batch, length, HEADS))
    if kind == "random":
        return [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    if kind == "ties":  # few different scores, of both signs
        return [rng.integers(-1, 2, shape).astype(np.float32) for shape in shapes]
    if kind == "plateaus":  # most scores are a zero, of either sign
        q, k, w = (rng.integers(-2, 3, shape).astype(np.float32) for shape in shapes)
        return [np.where(rng.random(q.shape) < 0.9, -np.abs(q), q), np.abs(k), -np.abs(w)]
    raise AssertionError(kind)


def select_in(layout, mesh, q, k, w, **options):
    """Positions and counts, back in source order, of arrays given in source order."""
    order = layout.positions(q.shape[1])
    ids = options.pop("segment_ids", None)
    where = {} if mesh is None else {"axis_name": "context", "mesh": mesh}
    q, k, w = (jnp.asarray(x)[:, order] for x in (q, k, w))
    found = sparse.select(
        q, k, w, layout, segment_ids=None if ids is None else ids[:, order], **options, **where
    )
    return [np.asarray(x)[:, np.argsort(order)] for x in found]


@pytest.mark.parametrize("kind", [slow("random"), "ties", slow("plateaus")])
@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_same_set_in_every_layout(name, packed, kind, mesh_of, rng):
    q, k, w = indexer_inputs(rng, kind)
    ids = documents(rng, 2, LENGTH) if packed else None
    options = {"top_k": 9, "segment_ids": ids, "q_block": 8, "k_block": 16}
    one_device, counts = select_in(Contiguous(1), None, q, k, w, **options)
    for row in range(2):
        wanted = sparse_oracle.selected(
            sparse_oracle.scores(q[row], k[row], w[row]), 9, None if ids is None else ids[row]
        )
        np.testing.assert_array_equal(one_device[row], wanted)
        np.testing.assert_array_equal(counts[row], (wanted >= 0).sum(axis=1))
    for ranks in (2, 4) if kind == "random" else (3,):
        found, counted = select_in(LAYOUTS[name](ranks), mesh_of(ranks), q, k, w, **options)
        np.testing.assert_array_equal(found, one_device)
        np.testing.assert_array_equal(counted, counts)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_the_same_set_on_any_number_of_ranks(dtype, name, ranks, mesh_of, rng):
    length = 48 * ranks
    for kind in ("random", "ties"):
        q, k, w = indexer_inputs(rng, kind, length=length)
        scale = 40 if dtype == "int8" and kind == "random" else 1
        q, k = (jnp.asarray(x * scale).astype(dtype) for x in (q, k))
        ids = documents(rng, 2, length)
        options = {"top_k": 20, "segment_ids": ids, "q_block": 8, "k_block": 32}
        wanted = select_in(Contiguous(1), None, q, k, w, **options)
        mesh = mesh_of(ranks)
        for a, b in zip(
            select_in(LAYOUTS[name](ranks), mesh, q, k, w, **options), wanted, strict=True
        ):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_narrow_dtypes(dtype, mesh_of, rng):
    q, k, w = indexer_inputs(rng, "random")
    q, k = (np.asarray(jnp.asarray(x * 40).astype(dtype)) for x in (q, k))
    options = {"top_k": 9, "q_block": 8, "k_block": 16}
    found, _ = select_in(Zigzag(4), mesh_of(4), q, k, w, **options)
    one_device, _ = select_in(Contiguous(1), None, q, k, w, **options)
    np.testing.assert_array_equal(found, one_device)
    score = sparse_oracle.scores(q[0], k[0], w[0])
    wanted = sparse_oracle.selected(score, 9)
    for t in range(LENGTH):  # the oracle's float64 may break what float32 sees as a tie
        a, b = score[t][found[0, t]], score[t][wanted[t]]
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_negative_zeros_are_zeros_and_nans_come_first():
    q, w = jnp.ones((1, 6, 1, 1)), jnp.array([1, 1, 1, 1, 1, -1.0])[None, :, None]
    k = jnp.array([-1.0, -0.0, 2.0, 0.0, jnp.nan, -3.0])[None, :, None]
    found, _ = sparse.select(q, k, w, Contiguous(1), top_k=4)
    assert found[0, 3].tolist() == [2, 0, 1, 3]
    assert found[0, 5].tolist() == [4, 0, 1, 3]  # -0.0 of w * relu is no less than 0.0


def test_scores_of_minus_infinity_are_scores():
    q, k = jnp.ones((1, 4, 1, 1)), jnp.arange(1.0, 5)[None, :, None]
    w = jnp.array([1, 1, 1, -jnp.inf])[None, :, None]
    found, counts = sparse.select(q, k, w, Contiguous(1), top_k=6, q_block=2, k_block=2)
    assert counts[0].tolist() == [1, 2, 3, 4]
    assert found[0, 3].tolist() == [0, 1, 2, 3, -1, -1]


def test_blocks_do_not_matter(rng):
    q, k, w = indexer_inputs(rng, "ties", length=50)
    wanted = select_in(Contiguous(1), None, q, k, w, top_k=60, q_block=50, k_block=50)
    for q_block, k_block in ((1, 50), (7, 3), (64, 2048)):
        found = select_in(Contiguous(1), None, q, k, w, top_k=60, q_block=q_block, k_block=k_block)
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(a, b)


def test_positions_as_data_compile_once(mesh_of, rng):
    ranks, length = 4, 48
    q, k, w = indexer_inputs(rng, "ties", length=length)
    ids = documents(rng, 2, length)
    options = {"top_k": 7, "q_block": 4, "k_block": 8}
    wanted = select_in(Contiguous(1), None, q, k, w, segment_ids=ids, **options)
    traces = []

    @jax.jit
    def run(q, k, w, ids, positions):
        traces.append(1)
        where = {"axis_name": "context", "mesh": mesh_of(ranks)}
        return sparse.select(
            q, k, w, Contiguous(ranks), segment_ids=ids, source_positions=positions,
            **options, **where,
        )  # fmt: skip

    for seed in range(5):
        orders = np.stack([np.random.default_rng(seed + r).permutation(length) for r in (0, 9)])
        rows = np.arange(2)[:, None]
        found = run(*(np.asarray(x)[rows, orders] for x in (q, k, w, ids)), orders)
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(np.asarray(a)[rows, np.argsort(orders)], b)
    assert len(traces) == 1


def test_inside_shard_map_beside_a_data_axis(rng):
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "context"))
    q, k, w = indexer_inputs(rng, "random")
    layout, order = Zigzag(4), Zigzag(4).positions(LENGTH)
    options = {"top_k": 5, "q_block": 8, "k_block": 16}
    wanted = select_in(Contiguous(1), None, q, k, w, **options)
    moved = [jnp.asarray(x)[:, order] for x in (q, k, w)]
    call = functools.partial(sparse.select, layout=layout, axis_name="context", **options)
    spec = P("data", "context")
    inside = jax.jit(jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=spec))
    outside = functools.partial(call, batch_axes="data", mesh=mesh)
    for run in (inside, outside, jax.jit(outside)):
        for a, b in zip(run(*moved), wanted, strict=True):
            np.testing.assert_array_equal(np.asarray(a)[:, np.argsort(order)], b)


def test_explicit_axes(rng):
    explicit = (jax.sharding.AxisType.Explicit,) * 2
    mesh = jax.make_mesh((2, 4), ("data", "context"), axis_types=explicit)
    q, k, w = indexer_inputs(rng, "random")
    order = Zigzag(4).positions(LENGTH)
    options = {"top_k": 5, "q_block": 8, "k_block": 16}
    wanted = select_in(Contiguous(1), None, q, k, w, **options)
    with jax.set_mesh(mesh):
        moved = [jax.device_put(x[:, order], P("data", "context")) for x in (q, k, w)]
        found = sparse.select(*moved, Zigzag(4), axis_name="context", **options)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(a)[:, np.argsort(order)], b)


@pytest.mark.parametrize("name", LAYOUTS)
def test_indices_there_and_back(name):
    layout = LAYOUTS[name](4)
    chosen = np.random.default_rng(0).integers(-1, LENGTH, (2, 5, 7))
    slots = sparse.slots(layout, LENGTH, chosen)
    wanted = np.where(chosen < 0, -1, layout.slots(LENGTH)[chosen])
    np.testing.assert_array_equal(slots, wanted)
    np.testing.assert_array_equal(sparse.positions(layout, LENGTH, slots), chosen)


def test_blocks_are_counted_as_they_are_computed(rng, monkeypatch):
    """Every visit of a block is seen: as many as counted, equal under zigzag."""
    from plait.sparse import indexer

    length, visits = 96, []
    plain = indexer._scores

    def counting(q, k, w):
        jax.debug.callback(lambda _: visits.append(1), q[0, 0, 0])
        return plain(q, k, w)

    monkeypatch.setattr(indexer, "_scores", counting)
    q, k, w = indexer_inputs(rng, "random", batch=1, length=length)
    for layout in (Contiguous(1), Zigzag(1)):
        sparse.select(q, k, w, layout, top_k=3, q_block=12, k_block=16, local=True)
        jax.effects_barrier()
        computed, total = sparse.count_blocks(layout, length, q_block=12, k_block=16)
        assert len(visits) == computed.sum() < total
        visits.clear()
    computed, _ = sparse.count_blocks(Zigzag(4), 4096, q_block=64, k_block=512)
    assert len(set(computed.tolist())) == 1
    computed, _ = sparse.count_blocks(Contiguous(4), 4096, q_block=64, k_block=512)
    assert computed.max() / computed.mean() > 1.5


def test_indices_beyond_the_sequence_are_no_token():
    for layout in (Zigzag(2), Striped(2)):
        found = sparse.slots(layout, 8, jnp.array([8, 100, -7, 7]))
        assert found[:3].tolist() == [-1, -1, -1]
        assert found[3] == layout.slots(8)[7]
        assert sparse.positions(layout, 8, jnp.array([8, 9])).tolist() == [-1, -1]
    far = sparse.slots(Zigzag(2), 1024, jnp.array([200], jnp.uint8))
    assert far.tolist() == [Zigzag(2).slots(1024)[200]]


def test_errors_name_what_is_wrong(mesh_of):
    q, k, w = jnp.ones((1, 8, 2, 4)), jnp.ones((1, 8, 4)), jnp.ones((1, 8, 2))
    select = functools.partial(sparse.select, layout=Zigzag(2), top_k=1)
    refused(lambda: select(q, k, w, top_k=0), "top_k", "0")
    refused(lambda: select(q, k[..., :3], w), "k has 3 dim", "4")
    refused(lambda: select(q, k, w[..., :1]), "w has 1 heads", "2")
    refused(lambda: select(q[0], k, w), "q has shape (8, 2, 4)", "[batch, sequence, heads, dim]")
    refused(lambda: select(q[:, :, :0], k, w), "(1, 8, 0, 4)", "at least 1")
    refused(lambda: select([1], k, w), "q is a list", error=TypeError)
    refused(lambda: select(q, k[:, :4], w), "k has shape (1, 4, 4)")
    refused(lambda: select(q, k.astype(jnp.bfloat16), w), "bfloat16")
    wide = q.astype(jnp.int16), k.astype(jnp.int16)
    refused(lambda: select(*wide, w), "int16", "int8", error=TypeError)
    refused(lambda: select(q, k, w.astype(int)), "w is int", error=TypeError)
    refused(lambda: select(q, k, w, layout=Zigzag(8)), "8", "16", "axis 1 of q")
    ids = jnp.ones((1, 8, 1), int)
    refused(lambda: select(q, k, w, segment_ids=ids), "segment_ids has shape (1, 8, 1)")
    where = {"axis_name": "context", "mesh": mesh_of(2)}
    refused(lambda: select(q, k, w, layout=Zigzag(4), **where), "4 ranks", "2 devices")
    refused(lambda: select(q, k, w, batch_axes="context", **where), "share a mesh axis")
    refused(lambda: select(q, k, w, layout="zigzag"), "layout", "Zigzag(8)", error=TypeError)
    within = np.array([0, 1, 2, 3, 0, 1, 2, 3])
    refused(lambda: select(q, k, w, source_positions=within), "row 0", "0 to 7", "RoPE")
    refused(lambda: select(q, k, w, source_positions=within[:4]), "(4,)", "(8,)")
    refused(lambda: sparse.slots(Zigzag(2), 8, np.array([8])), "8", "nearest", "7")
    refused(lambda: sparse.slots(Zigzag(2), 8, np.array([0.5])), "float64", error=TypeError)
    refused(lambda: sparse.positions("zigzag", 8, np.array([0])), "Zigzag(8)", error=TypeError)
    refused(lambda: sparse.count_blocks(Zigzag(2), 8, q_block=0), "q_block is 0")
    scores = functools.partial(sparse.index_scores, layout=Zigzag(2))
    ints, chosen = (q.astype(jnp.int8), k.astype(jnp.int8)), jnp.zeros((1, 8, 1), int)
    refused(lambda: scores(*ints, w, chosen), "int8", "bfloat16", error=TypeError)
    refused(lambda: scores(q, k, w, chosen[..., 0]), "positions has shape (1, 8)")
    refused(lambda: scores(q, k, w, (chosen, chosen)), "tuple", "`select`", error=TypeError)
    refused(lambda: scores(q, k, w, np.full((1, 8, 1), 9)), "holds 9", "nearest is 7")
