import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import oracle
import plait
from errors import refused
from hlo import collectives, sequential, text
from plait import ContextParallel, Contiguous, HalfSwap, Placed, Striped, Zigzag
from sweeps import slow
from test_layout import layouts


def packed(rng, batch, length):
    ids = np.sort(rng.integers(0, 4, (batch, length)), axis=1).astype(np.int32)
    return np.roll(ids, -(ids == 0).sum(axis=1).min(), axis=1)


@given(st.data())
def test_on_the_host(data):
    ranks = data.draw(st.integers(1, 5))
    layout = data.draw(st.sampled_from(layouts(ranks)[:6]))
    length = layout.multiple * data.draw(st.integers(1, 3))
    rng = np.random.default_rng(0)
    x = rng.integers(0, 50, (2, length))
    ids = data.draw(st.sampled_from([None, packed(rng, 2, length)]))
    by = data.draw(st.integers(-length - 3, length + 3))
    found = plait.lookahead(x, layout, by, segment_ids=ids)
    oracle.same_bits(found, oracle.lookahead(x, layout, by, -100, ids))


@pytest.mark.parametrize("ranks", [1, slow(2), 3, slow(8)])
def test_on_devices(ranks, mesh_of, rng):
    """Within a chunk, a whole chunk, more than a chunk, backwards, past the end."""
    for layout in [*layouts(ranks)[:5], layouts(ranks)[5]]:
        length = layout.multiple * (1 if isinstance(layout, Placed) else 3)
        chunk = layout.chunk_length(length)
        x = rng.integers(0, 50, (2, length)).astype(np.int32)
        ids = packed(rng, 2, length)[:, oracle.positions(layout, length)]
        steps = {1, -1, chunk, length // 2 + 1} if ranks > 1 else {1, length + 2}
        for by in sorted(steps):
            wanted = oracle.lookahead(x, layout, by, -100, ids)
            cp = ContextParallel(layout, "context")
            ahead = jax.jit(functools.partial(cp.lookahead, by=by, mesh=mesh_of(ranks), fill=-100))
            oracle.same_bits(ahead(x, segment_ids=ids), wanted)
            local = jax.jit(functools.partial(plait.lookahead, layout=layout, by=by))
            oracle.same_bits(local(x, segment_ids=ids), wanted)
            assert not sequential(text(ahead, x))


def test_only_boundary_tokens_travel(mesh_of):
    x = np.zeros((2, 96), np.int32)
    for layout, permutes in (
        (Contiguous(8), 1),
        (Zigzag(8), 2),
        (HalfSwap(8), 2),
        (Striped(8, stripe=3), 1),
    ):
        for by in (1, 2, 3):
            ahead = functools.partial(
                plait.lookahead, layout=layout, by=by, axis_name="context", mesh=mesh_of(8)
            )
            stripes = 4 if isinstance(layout, Striped) else 1
            size = 2 * by * 4 * stripes
            assert collectives(text(ahead, x)) == [("collective-permute", size)] * permutes


def test_labels_by_hand():
    """One document of eight: taking labels after the split gives 6 after 1, and -100 after 5."""
    tokens = np.arange(8)[None]
    cp = ContextParallel(Zigzag(2))
    np.testing.assert_array_equal(cp.lookahead(cp.reorder(tokens)), [[1, 2, 7, -100, 3, 4, 5, 6]])


@pytest.mark.parametrize(
    ("by", "wanted"),
    [
        (1, [11, 12, 24, -100, -100, 21, 22, 23]),
        (2, [12, -100, -100, -100, -100, 22, 23, 24]),
        (3, [-100, -100, -100, -100, -100, 23, 24, -100]),
    ],
)
@pytest.mark.parametrize("where", ["host", "device", "sharded"])
def test_multi_token_targets_by_hand(by, wanted, where, mesh_of):
    tokens = np.array([[10, 11, 12, 20, 21, 22, 23, 24]], np.int32)
    ids = np.array([[1, 1, 1, 2, 2, 2, 2, 2]], np.int32)
    cp = ContextParallel(Zigzag(2), "context" if where == "sharded" else None)
    tokens, ids = plait.reorder([tokens, ids], Zigzag(2))
    tokens = tokens if where == "host" else jnp.asarray(tokens)
    found = cp.lookahead(tokens, by, segment_ids=ids, mesh=mesh_of(2))
    np.testing.assert_array_equal(found, [wanted])


def test_padding_inside_and_between_documents():
    layout = Placed.zigzag_documents([8, 4], ranks=2)
    tokens = np.array([[1, 2, 3, 4, 5, 0, 0, 0, 11, 12, 13, 0]])
    ids = np.array([[1, 1, 1, 1, 1, 0, 0, 0, 2, 2, 2, 0]])
    tokens, ids = plait.reorder([tokens, ids], layout)
    np.testing.assert_array_equal(tokens, [[1, 2, 0, 0, 11, 0, 3, 4, 5, 0, 12, 13]])
    labels = plait.lookahead(tokens, layout, segment_ids=ids)
    wanted = [[2, 3, -100, -100, 12, -100, 4, 5, -100, -100, 13, -100]]
    np.testing.assert_array_equal(labels, wanted)


def test_hidden_states_and_their_derivative(mesh_of, rng):
    layout = Zigzag(4)
    x = rng.normal(size=(2, 32, 3)).astype(np.float32)
    ids = packed(rng, 2, 32)[:, oracle.positions(layout, 32)]
    spec = P(None, "context")
    cp = ContextParallel(layout, "context")
    ahead = jax.shard_map(
        lambda x, ids: cp.lookahead(x, 2, segment_ids=ids, fill=0),
        mesh=mesh_of(4),
        in_specs=spec,
        out_specs=spec,
    )
    wanted = oracle.lookahead(x, layout, 2, 0, ids)
    oracle.same_bits(jax.jit(ahead)(x, ids), wanted)
    # <w, A x> = <A' w, x> for the linear map A, entry by entry through basis vectors
    w = rng.normal(size=x.shape).astype(np.float32)
    pulled = jax.jit(jax.grad(lambda x: (ahead(x, ids) * w).sum()))(x)
    numbers = np.broadcast_to(np.arange(1, 33)[None, :, None], x.shape)
    source = oracle.lookahead(numbers, layout, 2, 0, ids)
    by_hand = np.zeros_like(x)
    for row, slot, feature in np.ndindex(x.shape):
        if source[row, slot, feature]:
            by_hand[row, source[row, slot, feature] - 1, feature] += w[row, slot, feature]
    np.testing.assert_allclose(pulled, by_hand, rtol=1e-6)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_beside_a_data_axis(kind, rng):
    mesh = jax.make_mesh((2, 4), ("data", "context"), axis_types=(kind,) * 2)
    spec = NamedSharding(mesh, P("data", "context"))
    x = rng.integers(0, 50, (2, 32)).astype(np.int32)
    ids = packed(rng, 2, 32)
    cp = ContextParallel(HalfSwap(4), "context")
    with jax.set_mesh(mesh):
        ahead = jax.jit(lambda x, ids: cp.lookahead(x, 3, segment_ids=ids))
        arrays = jax.device_put(x, spec), jax.device_put(ids, spec)
        found = ahead(*arrays)
        kinds = {kind for kind, _ in collectives(text(ahead, *arrays))}
    oracle.same_bits(found, oracle.lookahead(x, HalfSwap(4), 3, -100, ids))
    assert kinds == {"collective-permute"}


@pytest.mark.parametrize("ids_spec", [P(), P("data", "context"), P(None, "context")])
def test_ids_follow_the_batch_under_explicit_types(ids_spec, rng):
    mesh = jax.make_mesh((2, 4), ("data", "context"), axis_types=(AxisType.Explicit,) * 2)
    x = rng.integers(0, 50, (2, 16)).astype(np.int32)
    ids = packed(rng, 2, 16)
    cp = ContextParallel(Zigzag(4), "context")
    wanted = oracle.lookahead(x, Zigzag(4), 1, -100, ids)
    with jax.set_mesh(mesh):
        on_mesh = jax.device_put(x, NamedSharding(mesh, P("data", "context")))
        ids_on_mesh = jax.device_put(ids, NamedSharding(mesh, ids_spec))
        for given_ids in (ids, ids_on_mesh):
            oracle.same_bits(cp.lookahead(on_mesh, segment_ids=given_ids), wanted)
            jitted = jax.jit(lambda x, ids: cp.lookahead(x, segment_ids=ids))
            oracle.same_bits(jitted(on_mesh, given_ids), wanted)


def test_ids_that_int32_cannot_hold_are_refused():
    ids = np.array([[2**32] * 4 + [2**32 + 1] * 4])
    for x in (np.zeros((1, 8), int), jnp.zeros((1, 8), int)):
        with pytest.raises(ValueError, match="4294967297; it needs int32"):
            plait.lookahead(x, Zigzag(2), segment_ids=ids)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda f: f(np.zeros((1, 8), np.uint8)), ["uint8", "cast it to int32"]),
        (lambda f: f(np.zeros((1, 8), bool), fill=-100), ["-100", "0 to 1"]),
        (lambda f: f(np.zeros((1, 8), np.float16), fill=1e9), ["float16 cannot hold"]),
        (lambda f: f(np.zeros((1, 8), np.float32)), ["float32", "fill=0"]),
        (lambda f: f(np.zeros((1, 8), np.uint8), fill=-100), ["-100", "0 to 255"]),
        (lambda f: f(np.zeros((1, 8), int), fill=0.5), ["0.5"]),
        (lambda f: f(np.zeros((1, 6), int)), ["length 6", "pad to 8"]),
        (lambda f: f(np.zeros((1, 8), int), segment_ids=np.ones((2, 8), int)), ["(1, 8)"]),
        (lambda f: f(jnp.zeros((1, 8), int), segment_ids=np.ones(4, int)), ["(4,)"]),
        (lambda f: f(np.zeros((1, 8), int), axis=2), ["axis 2", "nearest axis is 1"]),
    ],
)
def test_errors_name_what_is_wrong(call, words):
    refused(lambda: call(functools.partial(plait.lookahead, layout=Zigzag(2))), *words)
