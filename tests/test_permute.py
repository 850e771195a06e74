import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import oracle
import plait
from hlo import collectives, sequential, text
from plait import Contiguous, HalfSwap, Placed, Striped, Zigzag
from test_layout import layouts

DTYPES = [
    *("int32", "uint8", "int8", "float32", "bool", "complex64", "uint32", "int16"),
    *("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int4", "uint4", "int2"),
    "float4_e2m1fn",
]


def sample(dtype, shape):
    """Random bits where every pattern is a value, NaNs with payloads and -0.0 among them."""
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    generator = np.random.default_rng(1)
    if dtype in ("bool", "int4", "uint4", "int2", "float4_e2m1fn"):
        return generator.integers(0, 2, shape).astype(kind)
    raw = generator.integers(0, 256, (*shape, kind.itemsize), dtype=np.uint8)
    return raw.view(kind)[..., 0]


@pytest.mark.parametrize("ranks", [*range(1, 10), 128])
def test_both_directions_at_every_number_of_ranks(ranks):
    for layout in layouts(ranks)[1:]:
        if ranks == 128 and isinstance(layout, Placed):
            continue  # hundreds of pieces: twenty seconds of compiling for nothing new
        length = layout.multiple * (1 if isinstance(layout, Placed) else 2)
        x = np.arange(2 * length, dtype=np.int32).reshape(2, length)
        there = jax.jit(lambda x, layout=layout: plait.reorder(x, layout))(x)
        oracle.same_bits(there, oracle.reorder(x, layout, 1))
        back = jax.jit(lambda x, layout=layout: plait.restore(x, layout))(x)
        oracle.same_bits(back, oracle.restore(x, layout, 1))


@pytest.mark.parametrize("ndim", range(1, 6))
def test_every_axis_of_every_rank(ndim):
    layout = Zigzag(3)
    for axis in range(ndim):
        shape = [2] * ndim
        shape[axis] = 12
        x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        for given_axis in (axis, axis - ndim):
            there = plait.reorder(jnp.asarray(x), layout, axis=given_axis)
            oracle.same_bits(there, oracle.reorder(x, layout, axis))
            back = plait.restore(jnp.asarray(x), layout, axis=given_axis)
            oracle.same_bits(back, oracle.restore(x, layout, axis))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", [Zigzag(3), Striped(3)])
def test_every_bit_of_every_dtype(dtype, layout):
    x = sample(dtype, (2, 12, 3))
    there = jax.jit(lambda x: plait.reorder(x, layout))(jax.device_put(x))
    oracle.same_bits(there, oracle.reorder(x, layout, 1))
    oracle.same_bits(plait.reorder(x, layout), oracle.reorder(x, layout, 1))


def test_random_keys():
    keys = jax.random.split(jax.random.key(0), 12)
    moved = jax.jit(lambda keys: plait.reorder(keys, Zigzag(3), axis=0))(keys)
    assert moved.dtype == keys.dtype
    data = np.asarray(jax.random.key_data(keys))
    oracle.same_bits(jax.random.key_data(moved), oracle.reorder(data, Zigzag(3), 0))


@given(st.data())
def test_relayout_between_any_two_on_the_host(data):
    ranks = data.draw(st.integers(1, 6))
    source, target = (data.draw(st.sampled_from(layouts(ranks)[:6])) for _ in range(2))
    length = int(np.lcm(source.multiple, target.multiple)) * data.draw(st.integers(1, 3))
    axis = data.draw(st.integers(-3, 2))
    shape = [2, 2, 2]
    shape[axis] = length
    x = np.arange(np.prod(shape)).reshape(shape)
    moved = plait.relayout(x, source, target, axis=axis)
    oracle.same_bits(moved, oracle.relayout(x, source, target, axis))


def test_relayout_between_any_two_on_a_device():
    for source in layouts(3)[:6]:
        for target in layouts(3)[:6]:
            length = int(np.lcm(source.multiple, target.multiple))
            x = np.arange(length, dtype=np.int32)
            moved = plait.relayout(jnp.asarray(x), source, target, axis=0)
            oracle.same_bits(moved, oracle.relayout(x, source, target, 0))


def test_the_host_takes_views_and_leaves_the_source_alone():
    x = np.broadcast_to(np.arange(8), (3, 8))
    assert not x.flags.writeable
    moved = plait.reorder(x, Zigzag(2))
    oracle.same_bits(moved, oracle.reorder(x, Zigzag(2), 1))
    assert moved.flags.writeable
    y = np.arange(8)
    same = plait.reorder(y, Contiguous(2), axis=0)
    same[0] = 99
    assert y[0] == 0
    assert isinstance(plait.restore(x[:, ::-1], Zigzag(2)), np.ndarray)


@pytest.mark.parametrize("layout", [Zigzag(4), HalfSwap(5), Striped(4), layouts(3)[5]])
def test_no_gather_in_the_program_nor_in_its_derivative(layout):
    x = jnp.zeros((2, layout.multiple * 2, 4))
    for move in (plait.reorder, plait.restore):

        def forward(x, move=move):
            return move(x, layout)

        def backward(x, y, forward=forward):
            return jax.vjp(forward, x)[1](y)

        for program in (text(forward, x), text(backward, x, x)):
            assert not sequential(program)
            assert not collectives(program)
    lowered = jax.jit(lambda x: plait.reorder(x, layout)).lower(x).as_text()
    assert "gather" not in lowered
    assert "pad" not in lowered


def test_transformations(rng):
    layout = Zigzag(2)
    x = rng.normal(size=(3, 8)).astype(np.float32)
    w = rng.normal(size=(3, 8)).astype(np.float32)
    there, back = oracle.reorder(x, layout, 1), oracle.restore(w, layout, 1)

    def move(x):
        return plait.reorder(x, layout)

    def row(x):
        return plait.reorder(x, layout, axis=0)

    oracle.same_bits(jax.vmap(row)(x), there)
    oracle.same_bits(jax.vmap(row, in_axes=1, out_axes=1)(x.T), oracle.reorder(x.T, layout, 0))
    oracle.same_bits(jax.vmap(move, in_axes=2, out_axes=2)(x[..., None])[..., 0], there)
    primal, tangent = jax.jvp(move, (x,), (w,))
    oracle.same_bits(primal, there)
    oracle.same_bits(tangent, oracle.reorder(w, layout, 1))
    oracle.same_bits(jax.vjp(move, x)[1](w)[0], back)
    oracle.same_bits(jax.linearize(move, x)[1](w), oracle.reorder(w, layout, 1))
    oracle.same_bits(jax.jit(move, donate_argnums=0)(jnp.asarray(x)), there)
    oracle.same_bits(jax.checkpoint(move)(x), there)
    oracle.same_bits(jax.vmap(jax.grad(lambda r, s: row(r) @ s))(x, w), back)
    scanned, _ = jax.lax.scan(lambda c, _: (move(c), None), x, length=2)
    oracle.same_bits(scanned, oracle.reorder(there, layout, 1))
    hessian = jax.hessian(lambda r: (row(r) ** 3).sum())(x[0])
    np.testing.assert_allclose(hessian, np.diag(6 * x[0]), rtol=1e-6)


def test_the_derivative_keeps_negative_zeros():
    zeros = jnp.full((8,), -0.0)
    pulled = jax.vjp(lambda x: plait.reorder(x, Zigzag(2), axis=0), zeros)[1](zeros)[0]
    assert np.signbit(pulled).all()


def test_too_many_pieces_are_refused_on_a_device_and_moved_on_the_host(rng):
    layout = Placed(rng.permutation(np.repeat(np.arange(2), 2048)))
    x = np.arange(4096)
    oracle.same_bits(plait.reorder(x, layout, axis=0), oracle.reorder(x, layout, 0))
    with pytest.raises(ValueError, match="at most 1024 move on a device: permute on the host"):
        plait.reorder(jnp.asarray(x), layout, axis=0)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", range(1, 10))
def test_sweep_of_lengths_and_layouts_on_a_device(ranks):
    for layout in layouts(ranks)[:6]:
        for times in (1, 2, 3, 7):
            x = np.arange(layout.multiple * times, dtype=np.int32)
            move = jax.jit(lambda x, layout=layout: plait.reorder(x, layout, axis=0))
            oracle.same_bits(move(x), oracle.reorder(x, layout, 0))
