import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import oracle
from errors import refused
from plait import (
    Blockwise,
    Causal,
    Contiguous,
    Full,
    HalfSwap,
    Placed,
    SlidingWindow,
    Striped,
    Zigzag,
    audit,
)
from plait.attention.kernels import Scores, Tags, flash, visits
from plait.attention.kernels.flash import Flash
from plait.mask import BlockBounds, Chunked, PrefixLM
from sweeps import slow

SMALL = Flash(16, 32, interpret=True)
NAMES = ("out", "lse", "d_q", "d_k", "d_v")

# Most tests have the same shapes, those of one rank's queries and the keys of all four, so that
# they share a compiled program: the interpreter's are slow to compile.
LENGTH, MINE = 192, slice(48, 96)
LAYOUTS = [
    Contiguous(4),
    Zigzag(4),
    HalfSwap(4),
    Striped(4),
    Placed((2, 0, 3, 1, 1, 3, 0, 2, 0, 2, 1, 3)),
]


def inputs(rng, queries, keys, *, batch=2, heads=4, kv_heads=2, head_dim=8, v_head_dim=6):
    """q, k, v and the gradients of out and lse."""
    shapes = [
        (queries, heads, head_dim),
        (keys, kv_heads, head_dim),
        (keys, kv_heads, v_head_dim),
        (queries, heads, v_head_dim),
        (queries, heads),
    ]
    return [rng.normal(size=(batch, *shape)).astype(np.float32) for shape in shapes]


def documents(rng, batch, length):
    """Segment ids in source order: documents of many lengths, then padding, differing by row."""
    ids = np.zeros((batch, length), np.int32)
    for row in range(batch):
        cuts = np.sort(rng.choice(np.arange(1, length - 3), 4, replace=False))
        ids[row] = 1 + np.searchsorted(cuts, np.arange(length), side="right")
        ids[row, length - 3 - row :] = 0
    return ids


def facts(q_positions, k_positions, q_ids=None, k_ids=None, batch=2, mask=None, **others):
    def rows(x):
        x = jnp.asarray(x, jnp.int32)
        return jnp.broadcast_to(x, (batch, x.shape[-1]))

    return {
        "mask": Causal() if mask is None else mask,
        "q_positions": rows(q_positions),
        "k_positions": rows(k_positions),
        "q_segment_ids": None if q_ids is None else rows(q_ids),
        "k_segment_ids": None if k_ids is None else rows(k_ids),
        "scale": 0.3,
        **others,
    }


def parts_of(data):
    """The same facts as a strategy gives them."""
    scores = Scores(data["mask"], data["scale"], data.get("softcap"))
    tags = (Tags(data[f"{x}_positions"], data[f"{x}_segment_ids"]) for x in "qk")
    return scores, *tags


def forward(q, k, v, data, kernel=SMALL):
    scores, *tags = parts_of(data)
    return kernel.forward(scores, q, k, v, *tags)


def backward(q, k, v, d_out, lse, delta, data, kernel=SMALL):
    scores, *tags = parts_of(data)
    return kernel.backward(scores, q, k, v, d_out, lse, delta, *tags)


def with_gradients(kernel, arrays, data):
    """out, lse, d_q, d_k, d_v."""
    jitted, traced = program(kernel, data)
    return jitted(*(jnp.asarray(x) for x in arrays), traced)


def program(kernel, data):
    """A jitted function, the same for the same static facts, and the others, which it takes."""
    static = {name: x for name, x in data.items() if not isinstance(x, jax.Array)}
    return _program(kernel, tuple(static.items())), {k: data[k] for k in data if k not in static}


@functools.cache
def _program(kernel, static):
    def run(q, k, v, d_out, d_lse, traced):
        TRACES[jitted] += 1
        call = functools.partial(kernel, **dict(static), **traced)
        (out, lse), pull = jax.vjp(call, q, k, v)
        return out, lse, *pull((d_out.astype(out.dtype), d_lse))

    jitted = jax.jit(run)
    return jitted


TRACES = collections.Counter()


def wanted(arrays, seen, scale=0.3, softcap=None):
    """The same in float64. A query that sees nothing takes its gradients with it."""
    q, k, v, d_out, d_lse = (np.asarray(x).astype(np.float64) for x in arrays)
    group = q.shape[2] // k.shape[2]
    keys, values = np.repeat(k, group, axis=2), np.repeat(v, group, axis=2)
    scores = np.einsum("bqhd,bkhd->bhqk", q, keys) * scale
    slope = scale
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
        slope = scale * (1 - (scores / softcap) ** 2)
    e = np.where(seen[:, None], np.exp(scores), 0)
    total = e.sum(axis=-1, keepdims=True)
    p = e / np.where(total == 0, 1, total)
    with np.errstate(divide="ignore"):
        lse = np.log(total)[..., 0].swapaxes(1, 2)
    out = np.einsum("bhqk,bkhd->bqhd", p, values)
    d_p = np.einsum("bqhd,bkhd->bhqk", d_out, values) + d_lse.swapaxes(1, 2)[..., None]
    d_p -= np.einsum("bqhd,bqhd->bhq", out, d_out)[..., None]
    d_scores = p * d_p * slope
    grouped = lambda x: x.reshape(*k.shape[:3], group, -1).sum(axis=3)  # noqa: E731
    return (
        out,
        lse,
        np.einsum("bhqk,bkhd->bqhd", d_scores, keys),
        grouped(np.einsum("bhqk,bqhd->bkhd", d_scores, q)),
        grouped(np.einsum("bhqk,bqhd->bkhd", p, d_out)),
    )


def assert_close(found, right, relative=2e-6):
    """To `relative` of the largest entry of the tensor; infinities where they are, NaN nowhere."""
    for name, a, b in zip(NAMES, found, right, strict=True):
        largest = np.abs(b, where=np.isfinite(b), out=np.zeros_like(b)).max()
        a = np.asarray(a).astype(np.float64)
        np.testing.assert_allclose(a, b, rtol=0, atol=relative * largest + 1e-30, err_msg=name)


def test_wanted_is_the_oracle(rng):
    *arrays, d_lse = inputs(rng, 20, 20)
    seen = np.tile(oracle.visible(np.arange(20)), (2, 1, 1))
    out, _, *gradients = wanted((*arrays, 0 * d_lse), seen)
    found = oracle.attention(*arrays[:3], seen, 0.3, arrays[3])
    for a, b in zip((out, *gradients), found, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-13)


@pytest.mark.parametrize("packed", [slow(False), True])
def test_equals_float64_on_every_layout(packed, rng):
    for layout in LAYOUTS:
        positions = oracle.positions(layout, LENGTH)
        ids = documents(rng, 2, LENGTH)[:, positions] if packed else None
        arrays = inputs(rng, 48, LENGTH)
        q_ids = ids[:, MINE] if packed else None
        data = facts(positions[MINE], positions, q_ids, ids)
        found = with_gradients(SMALL, arrays, data)
        seen = np.broadcast_to(oracle.visible(positions, ids), (2, LENGTH, LENGTH))[:, MINE]
        assert_close(found, wanted(arrays, seen))
    assert TRACES[program(SMALL, data)[0]] == 1  # positions are data


UNION = SlidingWindow(7, 3) | PrefixLM(5) | (Causal() & Chunked(13))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dims", "mask", "softcap"),
    [(2, 2, (24, 16), Full(), 2.0), (4, 1, (9, 8), UNION, None)],
)
def test_heads_dims_masks_and_odd_lengths(heads, kv_heads, dims, mask, softcap, rng):
    """The dims of MLA, an eighth of them, and one head of keys for all; groups are elsewhere.

    50 keys are in blocks of 24: the last hangs over, and what is read there is anything.
    """
    arrays = inputs(
        rng, 50, 50, heads=heads, kv_heads=kv_heads, head_dim=dims[0], v_head_dim=dims[1]
    )
    positions = rng.permutation(50)
    data = facts(positions, positions, mask=mask, softcap=softcap)
    found = with_gradients(Flash(16, 24, interpret=True), arrays, data)
    seen = np.tile(oracle.visible(positions, mask=mask), (2, 1, 1))
    assert_close(found, wanted(arrays, seen, softcap=softcap))


def test_bfloat16_by_norm(rng):
    arrays = inputs(rng, 64, 64)
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in arrays[:4]] + [arrays[4]]
    found = with_gradients(SMALL, arrays, facts(np.arange(64), np.arange(64)))
    right = wanted(arrays, np.tile(oracle.visible(np.arange(64)), (2, 1, 1)))
    for name, a, b in zip(NAMES, found, right, strict=True):
        assert a.dtype == (jnp.float32 if name in ("out", "lse") else jnp.bfloat16)
        error = np.linalg.norm(np.asarray(a).astype(np.float64) - b) / np.linalg.norm(b)
        assert error < 1e-2, name  # bfloat16 keeps 8 bits: 2**-8 an operation


@pytest.mark.parametrize("with_ids", [False, True])
def test_queries_that_see_nothing(with_ids, rng):
    """The first 32 come before every key: blocks without a visit, written all the same."""
    arrays = inputs(rng, 48, LENGTH)
    q_positions = np.concatenate([np.arange(32), np.arange(80, 96)])
    k_positions = np.arange(40, 40 + LENGTH)
    q_ids, k_ids = np.ones(48, int), np.ones(LENGTH, int)
    q_ids[47] = 2
    data = facts(q_positions, k_positions, *((q_ids, k_ids) if with_ids else (None, None)))
    found = [np.asarray(x) for x in with_gradients(SMALL, arrays, data)]
    blind = np.arange(48) < 32
    seen = k_positions[None, :] <= q_positions[:, None]
    if with_ids:
        seen = seen & (q_ids[:, None] == k_ids[None, :])
        blind[47] = True
    assert_close(found, wanted(arrays, np.tile(seen, (2, 1, 1))))
    for name, x in zip(NAMES[:3], found[:3], strict=True):
        np.testing.assert_array_equal(x[:, blind], -np.inf if name == "lse" else 0, err_msg=name)


def test_nothing_but_padding(rng):
    arrays = inputs(rng, 48, LENGTH)
    ids = np.zeros(LENGTH, int)
    found = with_gradients(SMALL, arrays, facts(np.arange(48), np.arange(LENGTH), ids[:48], ids))
    for name, x in zip(NAMES, found, strict=True):
        np.testing.assert_array_equal(x, -np.inf if name == "lse" else 0, err_msg=name)


def test_nan_in_padding_stays_there(rng):
    arrays = inputs(rng, 48, LENGTH)
    q_ids = np.where(np.arange(48) % 3 == 0, 0, 1 + (np.arange(48) > 20))
    k_ids = np.where(np.arange(LENGTH) % 5 == 0, 0, 1 + (np.arange(LENGTH) > 20))
    data = facts(np.arange(48), np.arange(LENGTH), q_ids, k_ids)
    clean = with_gradients(SMALL, arrays, data)
    of_queries = [0, 3, 4]
    dirty = [x.copy() for x in arrays]
    for i, x in enumerate(dirty):
        x[:, (q_ids if i in of_queries else k_ids) == 0] = np.nan
    found = with_gradients(SMALL, dirty, data)
    for name, a, b in zip(NAMES, found, clean, strict=True):
        assert not np.isnan(a).any(), name
        np.testing.assert_array_equal(a, b, err_msg=name)


@pytest.mark.slow
def test_parts_merged_by_lse_are_the_whole(rng):
    """As a ring does: forward by parts of the keys, backward by parts with the final lse."""
    q, k, v, d_out, d_lse = (jnp.asarray(x) for x in inputs(rng, 32, 64))
    positions = oracle.positions(Zigzag(2), 64)
    parts = [
        (k[:, part], v[:, part], facts(positions[:32], positions[part]))
        for part in (slice(0, 32), slice(32, 64))
    ]

    @jax.jit
    def forward_part(q, k, v, positions):
        return forward(q, k, v, facts(positions[0], positions[1]))

    @jax.jit
    def backward_part(q, k, v, d_out, lse, delta, positions):
        return backward(q, k, v, d_out, lse, delta, facts(positions[0], positions[1]))

    places = [jnp.stack([data[f"{x}_positions"][0] for x in "qk"]) for _, _, data in parts]
    found = [forward_part(q, *part[:2], at) for part, at in zip(parts, places, strict=True)]
    lse = jnp.logaddexp(*(part for _, part in found))
    out = sum(jnp.exp(part - lse)[..., None] * o for o, part in found)
    delta = (out * d_out).sum(axis=-1) - d_lse
    gradients = [
        backward_part(q, *part[:2], d_out, lse, delta, at)
        for part, at in zip(parts, places, strict=True)
    ]
    d_q = gradients[0][0] + gradients[1][0]
    d_k, d_v = (jnp.concatenate([g[i] for g in gradients], axis=1) for i in (1, 2))
    seen = np.tile(oracle.visible(positions), (2, 1, 1))[:, :32]
    assert_close((out, lse, d_q, d_k, d_v), wanted((q, k, v, d_out, d_lse), seen))


def test_parts_are_float32():
    x = jnp.ones((2, 32, 4, 8), jnp.bfloat16)
    rows = jnp.ones((2, 32, 4))
    data = facts(np.arange(32), np.arange(32))
    found = jax.eval_shape(
        lambda: (*forward(x, x, x, data), *backward(x, x, x, x, rows, rows, data))
    )
    assert {y.dtype for y in found} == {jnp.dtype(jnp.float32)}


def test_equals_blockwise(rng):
    arrays = inputs(rng, 48, LENGTH)
    ids = documents(rng, 2, LENGTH)
    data = facts(np.arange(8, 56), np.arange(LENGTH), ids[:, 8:56], ids)
    found, plain = (with_gradients(x, arrays, data) for x in (SMALL, Blockwise(16, 32)))
    assert_close(found, [np.asarray(x, np.float64) for x in plain])


@pytest.mark.parametrize("outer", ["q", "k"])
@pytest.mark.parametrize("mask", [Causal(), SlidingWindow(30)], ids=repr)
def test_visits_are_the_blocks_that_are_not_empty(mask, outer, rng):
    """By looking at every pair of a rank's queries and all keys; of documents, by their bounds."""

    @jax.jit
    def listed(at, ids):
        q = BlockBounds.of(at[:, MINE], ids[:, MINE], 24, jnp)
        return visits.list_visits(mask, q, BlockBounds.of(at, ids, 12, jnp), outer)

    for layout in LAYOUTS:
        positions = oracle.positions(layout, LENGTH)
        ids = np.stack([np.repeat([1, 2, 0], [100, 80, 12]), np.ones(LENGTH, int)])[:, positions]
        pairs = oracle.visible(positions, ids) & oracle.visible(positions, mask=mask)
        pairs = pairs[:, MINE].reshape(2, 2, 24, 16, 12)
        some, every = pairs.any(axis=(2, 4)), pairs.all(axis=(2, 4))
        if outer == "k":
            some, every = some.swapaxes(1, 2), every.swapaxes(1, 2)
        table, count = listed(np.broadcast_to(positions, ids.shape), ids)
        table, rest = np.split(np.asarray(table), [int(count)])
        assert rest.size
        assert not rest.any()
        places = np.stack(visits.Visits(*some.shape[1:]).place(table), axis=1)
        assert places.tolist() == sorted(places.tolist())  # so that an outer block is left once
        found = np.full(some.shape, visits.NOTHING)
        found[tuple(places.T)] = visits.kind(table)
        assert (found[some] != visits.NOTHING).all()
        np.testing.assert_array_equal(found == visits.FULL, every)
        if isinstance(layout, (Contiguous, Zigzag, HalfSwap)):  # no block straddles chunks
            np.testing.assert_array_equal(found[1] != visits.NOTHING, some[1])
        starts = np.flatnonzero(np.diff(places[:, :2], axis=0, prepend=-1).any(axis=1))
        assert len(starts) == some[..., 0].size  # every outer block is written, seen or not
        np.testing.assert_array_equal(np.flatnonzero(visits.is_first(table)), starts)
        ends = [*(starts[1:] - 1), len(table) - 1]
        np.testing.assert_array_equal(np.flatnonzero(visits.is_last(table)), ends)


def test_blocks_that_are_empty_are_never_read(rng):
    """NaN in a block that is computed would reach the output as 0 * NaN."""
    arrays = inputs(rng, 48, LENGTH)
    for x in arrays[1:3]:
        x[:, 32:] = np.nan
    arrays[3][:, 32:] = arrays[4][:, 32:] = 0
    out, lse, d_q, _, _ = with_gradients(SMALL, arrays, facts(np.arange(48), np.arange(LENGTH)))
    for x in (out, lse, d_q):
        assert np.isfinite(x[:, :32]).all()
        assert np.isnan(x[:, 32:]).any()


@pytest.mark.parametrize("check_vma", [True, False])
def test_in_shard_map_under_scan_remat_and_vmap(check_vma, mesh_of, rng):
    q, k, v, d_out, _ = inputs(rng, 32, 32, v_head_dim=8)
    positions = oracle.positions(Zigzag(2), 32).astype(np.int32)
    ids = np.stack([np.repeat([1, 2], 16), np.repeat([1, 0], [20, 12])]).astype(np.int32)
    ids = ids[:, positions]

    def attend(x, k, v, at, ids):
        """One row: without a batch, which vmap is."""
        gather = functools.partial(jax.lax.all_gather, axis_name="context", tiled=True)
        data = facts(at, gather(at), ids, gather(ids), batch=1)
        out, lse = SMALL(x[None], *(gather(y)[None] for y in (k, v)), **data)
        return out[0] + 0 * jnp.where(lse == -jnp.inf, 0.0, lse)[0, ..., None]

    def layers(q, k, v, at, ids):
        @jax.checkpoint
        def layer(x, _):
            return jax.vmap(attend, in_axes=(0, 0, 0, None, 0))(x, k, v, at, ids), None

        return jax.lax.scan(layer, q, length=2)[0]

    spec = P(None, "context")
    sharded = jax.shard_map(
        layers,
        mesh=mesh_of(2),
        in_specs=(spec, spec, spec, P("context"), spec),
        out_specs=spec,
        check_vma=check_vma,
    )

    @jax.jit
    def run(q, k, v, d_out):
        out, pull = jax.vjp(lambda q, k, v: sharded(q, k, v, positions, ids), q, k, v)
        return out, *pull(d_out)

    seen = oracle.visible(positions, ids)
    once = oracle.attention(q, k, v, seen, 0.3)
    out, d_once, d_k2, d_v2 = oracle.attention(once, k, v, seen, 0.3, d_out)
    _, d_q, d_k1, d_v1 = oracle.attention(q, k, v, seen, 0.3, d_once)
    found = run(q, k, v, d_out)
    for a, b in zip(found, (out, d_q, d_k1 + d_k2, d_v1 + d_v2), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * np.abs(b).max())


def test_rows_of_vmap_and_too_many_are_taken_in_turn(monkeypatch, rng):
    q, k, v, _, _ = (jnp.asarray(x) for x in inputs(rng, 32, 32, batch=6))
    v = jnp.tile(v[:2], (3, 1, 1, 1))

    def attend(q, k, v):
        data = facts(np.arange(32), np.arange(32), batch=q.shape[0])
        return forward(q, k, v, data)

    def run(fn, *arrays):
        traced = jax.jit(fn).trace(*arrays)
        return str(traced.jaxpr).count("scan"), traced.lower().compile()(*arrays)

    loops, together = run(attend, q, k, v)
    monkeypatch.setattr(flash, "MOST_VISITS", 4)
    by_pairs = [x.reshape(3, 2, *x.shape[1:]) for x in (q, k)]
    more_loops, in_turn = run(jax.vmap(attend, in_axes=(0, 0, None)), *by_pairs, v[:2])
    assert (loops, more_loops) == (0, 1)
    for a, b in zip(in_turn, together, strict=True):
        np.testing.assert_array_equal(a.reshape(b.shape), b)


def test_fitted_blocks_do_not_straddle_chunks():
    assert Flash().fitted(1024, 384) == Flash(512, 384)
    assert Flash().fitted(640, 512 * 7) == Flash(512, 512)  # 128 would be all overhead
    assert Flash(1024, 1024).fitted(1536, 768) == Flash(768, 768)
    assert SMALL.fitted(8, 48) == Flash(16, 32, interpret=True)


def test_what_it_cannot_take():
    def shaped(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    x = shaped(1, 1024, 16, 192)
    kernel = Flash()
    assert kernel.why_not(x, x, x) is None
    half = shaped(1, 1024, 16, 192, dtype=jnp.float16)
    assert "float16" in kernel.why_not(half, half, half)
    mixed = shaped(1, 1024, 16, 192, dtype=jnp.float32)
    assert "['bfloat16', 'float32']" in kernel.why_not(x, x, mixed)
    long = shaped(1, 512 * 512, 16, 192)
    assert flash.MOST_VISITS < 512 * 512
    why = kernel.why_not(long, long, long)
    assert "262144 blocks of 512 x 512" in why
    assert "larger blocks" in why
    assert Flash(1024, 1024).why_not(long, long, long) is None
    y = jnp.ones((1, 16, 1, 8), jnp.float16)
    refused(lambda: SMALL(y, y, y, **facts(np.arange(16), np.arange(16), batch=1)), "float16")
    refused(lambda: Flash(100, 512), "q_block is 100", "128")
    refused(lambda: Flash(512, 0), "k_block is 0")


def test_the_compiler_for_tpus_takes_it():
    """DeepSeek's dims, 16 of its heads, 1024 queries a rank, 128K keys: no gather, keys once."""
    pytest.importorskip("libtpu", reason="compiles for a TPU")
    keys, heads = 131072, 16
    topology = audit.topology("v5p:4x4x8")
    mesh = topology.mesh()
    on_rank, whole = P(None, "context"), P()

    def step(q, k, v, q_positions, k_positions, d_out):
        data = dict(facts(q_positions, k_positions, batch=1), scale=192**-0.5)
        (out, lse), pull = jax.vjp(functools.partial(Flash(), **data), q, k, v)
        return out, lse, *pull((d_out.astype(out.dtype), 0 * lse))

    specs = (on_rank, whole, whole, on_rank, whole, on_rank)
    per_rank = jax.shard_map(
        step, mesh=mesh, in_specs=specs, out_specs=(on_rank, on_rank, on_rank, whole, whole)
    )
    avals = [
        jax.ShapeDtypeStruct((1, keys, heads, dim), jnp.bfloat16) for dim in (192, 192, 128, 128)
    ]
    positions = jax.ShapeDtypeStruct((1, keys), jnp.int32)
    arguments = (*avals[:3], positions, positions, avals[3])
    report = audit.compile_for(topology, per_rank, *arguments, mesh=mesh, in_specs=specs)
    report.require(gathers=0, scatters=0, sorts=0, whiles=0)
    assert report.counts["custom-call"] == 3
    # heads before tokens, k with its 192 lanes padded to 256, and the gradients of both
    padded = 2 * keys * heads * (256 + 128) * 2
    print(f"temp {report.temp_bytes / 1e6:.0f} MB, compiled in {report.compile_seconds:.1f} s")
    assert report.temp_bytes < 1.1 * padded
