"""Attention over selected keys against a float64 oracle, row by row, and its gradients."""

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

LENGTH, HEADS, DIM, VALUE_DIM, SELECTED = 48, 3, 12, 8, 7
SCALE = 0.4
LAYOUTS = [
    Contiguous(4),
    Zigzag(4),
    HalfSwap(4),
    Striped(4),
    Placed((0, 3, 2, 1, 1, 2, 0, 3, 2, 1, 3, 0)),
]


def attention_inputs(rng, batch=2, length=LENGTH):
    """q, latents, d_out and chosen positions in source order; rows with few keys, one with none."""
    q = rng.normal(size=(batch, length, HEADS, DIM)).astype(np.float32)
    latents = rng.normal(size=(batch, length, DIM)).astype(np.float32)
    d_out = rng.normal(size=(batch, length, HEADS, VALUE_DIM)).astype(np.float32)
    ids = documents(rng, batch, length)
    score = rng.normal(size=(batch, length, length))
    chosen = [sparse_oracle.selected(s, SELECTED, i) for s, i in zip(score, ids, strict=True)]
    return q, latents, d_out, np.stack(chosen)


def oracle_of(q, latents, d_out, chosen):
    rows = [
        sparse_oracle.attention(*row[:3], VALUE_DIM, SCALE, row[3])
        for row in zip(q, latents, chosen, d_out, strict=True)
    ]
    return [np.stack(x) for x in zip(*rows, strict=True)]


def with_gradients(attend):
    def run(q, latents, d_out, chosen):
        out, pull = jax.vjp(lambda q, latents: attend(q, latents, chosen), q, latents)
        return out, *pull(d_out)

    return run


def assert_rows_close(found, wanted):
    """Every token by itself, so that one wrong row fails.

    A row's bound is its own largest entry, or a thousandth of the tensor's where that is more: the
    gradient of a query with one key is a difference of equal numbers, 0 in float64 alone.
    """
    bounds = {"out": 1e-5, "d_q": 1e-4, "d_latents": 1e-4}
    for (name, relative), a, b in zip(bounds.items(), found, wanted, strict=True):
        a = np.asarray(a).astype(np.float64).reshape(*b.shape[:2], -1)
        b = b.reshape(a.shape)
        largest = np.abs(b).max(axis=-1, keepdims=True)
        over = np.abs(a - b) / np.maximum(largest, 1e-3 * largest.max())
        np.testing.assert_array_less(over, relative, err_msg=name)
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * largest.max(), err_msg=name)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.kind)
def test_every_layout_and_its_gradients(layout, mesh_of, rng):
    given = attention_inputs(rng)
    order = layout.positions(LENGTH)
    attend = functools.partial(
        sparse.sparse_attention, layout=layout, value_dim=VALUE_DIM, scale=SCALE, q_block=5
    )
    moved = [x[:, order] for x in given]
    wanted = oracle_of(*given)
    for where in ({}, {"axis_name": "context", "mesh": mesh_of(4)}):
        found = jax.jit(with_gradients(functools.partial(attend, **where)))(*moved)
        back = [np.asarray(x)[:, np.argsort(order)] for x in found]
        assert_rows_close(back, wanted)
        np.testing.assert_array_equal(back[0][(given[3] < 0).all(axis=2)], 0)


def test_positions_as_data(mesh_of, rng):
    given = attention_inputs(rng)
    orders = np.stack([rng.permutation(LENGTH) for _ in range(2)])
    rows = np.arange(2)[:, None]
    attend = functools.partial(
        sparse.sparse_attention,
        layout=Contiguous(4),
        value_dim=VALUE_DIM,
        scale=SCALE,
        source_positions=orders,
        axis_name="context",
        mesh=mesh_of(4),
    )
    found = with_gradients(attend)(*(x[rows, orders] for x in given))
    back = [np.asarray(x)[rows, np.argsort(orders)] for x in found]
    assert_rows_close(back, oracle_of(*given))


def test_bfloat16_beside_a_data_axis_inside_and_outside(rng):
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "context"))
    given = attention_inputs(rng)
    layout = Zigzag(4)
    order = layout.positions(LENGTH)
    narrow = [jnp.asarray(x).astype(jnp.bfloat16) for x in given[:3]]
    wanted = oracle_of(*(np.asarray(x).astype(np.float32) for x in narrow), given[3])
    call = functools.partial(
        sparse.sparse_attention, layout=layout, value_dim=VALUE_DIM, scale=SCALE
    )
    outside = functools.partial(call, axis_name="context", batch_axes="data", mesh=mesh)
    spec = P("data", "context")
    inside = jax.shard_map(
        functools.partial(call, axis_name="context"), mesh=mesh, in_specs=spec, out_specs=spec
    )
    moved = [np.asarray(x)[:, order] for x in (*narrow, given[3])]
    for run in (outside, inside):
        found = jax.jit(with_gradients(run))(*moved)
        for a, b in zip(found, wanted, strict=True):
            assert a.dtype == jnp.bfloat16
            a = np.asarray(a).astype(np.float64)[:, np.argsort(order)]
            assert np.linalg.norm(a - b) <= 1e-2 * np.linalg.norm(b)


def test_padding_may_hold_anything(rng):
    """What stands in queries and latents of padding, NaN too, reaches no other token."""
    q, latents, d_out, chosen = attention_inputs(rng)
    blank = (chosen < 0).all(axis=2)
    assert blank.any()
    d_out[blank] = 0
    attend = functools.partial(
        sparse.sparse_attention, layout=Contiguous(1), value_dim=VALUE_DIM, scale=SCALE
    )
    wanted = with_gradients(attend)(q, latents, d_out, chosen)
    q[blank], latents[blank] = np.nan, np.nan
    found = with_gradients(attend)(q, latents, d_out, chosen)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(a)[~blank], np.asarray(b)[~blank])


def test_heads_over_a_mesh_axis(rng):
    """The gradient of the latents is summed over the ranks that hold other heads."""
    devices = np.array(jax.devices())[:6].reshape(3, 2)
    mesh = jax.sharding.Mesh(devices, ("tensor", "context"))
    given = attention_inputs(rng)
    order = Zigzag(2).positions(LENGTH)
    options = {"layout": Zigzag(2), "value_dim": VALUE_DIM, "scale": SCALE, "axis_name": "context"}
    call = functools.partial(sparse.sparse_attention, **options)
    heads, plain = P(None, "context", "tensor"), P(None, "context")
    inside = jax.shard_map(call, mesh=mesh, in_specs=(heads, plain, plain), out_specs=heads)
    for run in (functools.partial(call, head_axes="tensor", mesh=mesh), inside):
        found = jax.jit(with_gradients(run))(*(x[:, order] for x in given))
        back = [np.asarray(x)[:, np.argsort(order)] for x in found]
        assert_rows_close(back, oracle_of(*given))


def test_index_scores_and_their_gradients(mesh_of, rng):
    q = rng.normal(size=(2, LENGTH, HEADS, DIM)).astype(np.float32)
    k = rng.normal(size=(2, LENGTH, DIM)).astype(np.float32)
    w = rng.normal(size=(2, LENGTH, HEADS)).astype(np.float32)
    layout = Zigzag(4)
    order = layout.positions(LENGTH)
    chosen = attention_inputs(rng)[3]
    target = rng.normal(size=chosen.shape).astype(np.float32)

    def loss(q, k, w, chosen, target, score):
        found = score(q, k, w, chosen)
        return jnp.where(chosen < 0, 0, jnp.where(chosen < 0, 0, found) * target).sum()

    def plain(q, k, w, chosen):
        every = jnp.einsum("bths,bth->bts", jax.nn.relu(jnp.einsum("bthd,bsd->bths", q, k)), w)
        return jnp.take_along_axis(every, jnp.maximum(chosen, 0), axis=2)

    ours = functools.partial(
        sparse.index_scores, layout=layout, axis_name="context", mesh=mesh_of(4), q_block=5
    )
    value = functools.partial(jax.value_and_grad, argnums=(0, 1, 2))
    wanted = value(functools.partial(loss, score=plain))(q, k, w, chosen, target)
    moved = [x[:, order] for x in (q, k, w, chosen, target)]
    found = jax.jit(value(functools.partial(loss, score=ours)))(*moved)
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-5)
    for a, b in zip(found[1], wanted[1], strict=True):
        np.testing.assert_allclose(np.asarray(a)[:, np.argsort(order)], b, rtol=1e-4, atol=1e-5)
    scores = ours(*moved[:4])
    np.testing.assert_array_equal(np.asarray(scores)[moved[3] < 0], -np.inf)


def test_what_ranks_exchange(mesh_of):
    """One all-gather of latents forward, one reduce-scatter backward; nothing larger."""
    import hlo

    mesh = mesh_of(4)
    q = jnp.zeros((1, LENGTH, HEADS, DIM))
    latents, chosen = jnp.zeros((1, LENGTH, DIM)), jnp.zeros((1, LENGTH, SELECTED), jnp.int32)
    attend = functools.partial(
        sparse.sparse_attention, layout=Zigzag(4), value_dim=VALUE_DIM, scale=SCALE,
        axis_name="context", mesh=mesh,
    )  # fmt: skip
    size = LENGTH * DIM * 4
    assert hlo.collectives(hlo.text(attend, q, latents, chosen)) == [("all-gather", size)]
    both = hlo.text(with_gradients(attend), q, latents, jnp.zeros((1, LENGTH, HEADS, 8)), chosen)
    assert hlo.collectives(both) == [("all-gather", size), ("reduce-scatter", size // 4)]


def test_errors_name_what_is_wrong():
    q, latents = jnp.ones((1, 8, 2, 4)), jnp.ones((1, 8, 4))
    chosen = jnp.zeros((1, 8, 3), jnp.int32)
    attend = functools.partial(sparse.sparse_attention, layout=Zigzag(2), scale=1.0)
    refused(lambda: attend(q, latents, chosen, value_dim=5), "value_dim is 5", "at most 4")
    refused(lambda: attend(q, latents[..., :3], chosen, value_dim=2), "float32[3]", "float32[4]")
    refused(lambda: attend(q, latents, chosen[0], value_dim=2), "positions has shape (8, 3)")
    refused(lambda: attend(q, latents, chosen[:, :4], value_dim=2), "positions has shape (1, 4, 3)")
    refused(
        lambda: attend(q, latents, jnp.zeros((1, 8, 3)), value_dim=2), "float32", error=TypeError
    )
