import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import plait
from plait import ContextParallel, Zigzag

LOSSES = np.arange(1.0, 9.0, dtype=np.float32)[None]


@pytest.mark.parametrize(
    ("mask", "mean"), [([0, 0, 0, 0, 0, 0, 1, 1], 7.5), ([1, 1, 1, 0, 0, 0, 1, 1], 4.2)]
)
@pytest.mark.parametrize("check_vma", [True, False])
def test_a_mean_over_tokens_is_no_mean_of_means(mask, mean, check_vma, mesh_of):
    """A rank without a token must not make it NaN; a mean of the ranks' means gives 3.75."""
    cp = ContextParallel(Zigzag(2), "context")
    losses, mask = cp.reorder([LOSSES, np.array(mask)[None]])
    losses = np.where(mask == 0, np.nan, losses)
    fn = jax.shard_map(
        cp.sum_and_count,
        mesh=mesh_of(2),
        in_specs=P(None, "context"),
        out_specs=P(),
        check_vma=check_vma,
    )
    total, count = jax.jit(fn)(losses, mask)
    np.testing.assert_allclose(total / count, mean, rtol=1e-6)
    outside = cp.sum_and_count(losses, mask)
    np.testing.assert_allclose(outside[0] / outside[1], mean, rtol=1e-6)
    gradient = jax.jit(jax.grad(lambda x: fn(x, mask)[0]))(losses)
    np.testing.assert_array_equal(gradient, mask.astype(np.float32))


def test_over_batch_axes_too(rng):
    mesh = jax.make_mesh((2, 4), ("data", "context"), axis_types=(AxisType.Auto,) * 2)
    cp = ContextParallel(Zigzag(4), "context", batch_axes="data")
    values = rng.normal(size=(4, 16)).astype(np.float32)
    fn = jax.shard_map(cp.sum_and_count, mesh=mesh, in_specs=P("data", "context"), out_specs=P())
    total, count = jax.jit(fn)(values)
    np.testing.assert_allclose(total, values.sum(dtype=np.float64), rtol=1e-5)
    assert int(count) == 64


def test_low_precision_is_summed_in_float32():
    total, count = plait.sum_and_count(jnp.ones((1, 4096), jnp.bfloat16))
    assert float(total) == 4096
    assert int(count) == 4096


def test_a_mask_is_no_weight():
    with pytest.raises(TypeError, match=r"mask has dtype float.* mask != 0"):
        plait.sum_and_count(LOSSES, np.full((1, 8), 0.5))


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"mask has shape \(8,\)"):
        plait.sum_and_count(LOSSES, np.ones(8, int))


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_gradients_under_accumulation(ranks, mesh_of, rng):
    """Sums and counts of micro-batches add up to the mean over all tokens; means would not."""
    length, parts = 48, 4
    weights = rng.normal(size=5).astype(np.float32)
    x = rng.normal(size=(parts, 2, length, 5)).astype(np.float32)
    mask = rng.random((parts, 2, length)) < np.array([0.05, 0.3, 0.9, 0.0])[:, None, None]

    def plain(weights):
        return np.sum(np.square(x @ weights), where=mask) / mask.sum()

    wanted = 2 * np.einsum("pbs,pbs,pbsd->d", x @ weights, mask, x) / mask.sum()
    cp = ContextParallel(Zigzag(ranks), "context")
    order = cp.layout.positions(length)

    def loss(weights, x, mask):
        def add(carry, part):
            total, count = cp.sum_and_count(jnp.square(part[0] @ weights), part[1])
            return (carry[0] + total, carry[1] + count), None

        zeros = (jnp.float32(0), jnp.zeros((), jnp.int32))
        (total, count), _ = jax.lax.scan(add, zeros, (x, mask))
        return total / count

    with jax.set_mesh(mesh_of(ranks)):
        moved = jax.device_put(
            (x[:, :, order], mask[:, :, order]),
            NamedSharding(mesh_of(ranks), P(None, None, "context")),
        )
        value, gradient = jax.jit(jax.value_and_grad(loss))(weights, *moved)
    np.testing.assert_allclose(value, plain(weights), rtol=1e-6)
    np.testing.assert_allclose(gradient, wanted, rtol=2e-5, atol=1e-6)
