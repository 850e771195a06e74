import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import plait
from hlo import collectives, text
from plait import ContextParallel, Striped, Zigzag
from test_layout import layouts


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_rows_wherever_they_live(ranks, mesh_of, rng):
    for layout in layouts(ranks)[:6]:
        length = layout.multiple * 2
        source = rng.normal(size=(2, length, 3)).astype(np.float32)
        x = plait.reorder(source, layout)
        shared = np.array([length - 1, 0, length // 2])
        per_row = np.array([[1, 0, 1], [length - 1, 2 % length, 0]])
        cp = ContextParallel(layout, "context")
        for rows in (shared, per_row):
            at = rows if rows.ndim == 2 else np.tile(rows, (2, 1))
            wanted = np.stack([source[b, at[b]] for b in range(2)])
            np.testing.assert_array_equal(plait.select(x, rows, layout), wanted)
            np.testing.assert_array_equal(plait.select(jnp.asarray(x), rows, layout), wanted)
            chosen = jax.jit(lambda x, r, cp=cp: cp.select(x, r, mesh=mesh_of(ranks)))(x, rows)
            np.testing.assert_array_equal(chosen, wanted)


def test_traffic_is_the_rows_and_not_the_sequence(mesh_of):
    cp = ContextParallel(Zigzag(4), "context")
    x = np.zeros((2, 64, 16), np.float32)
    program = text(lambda x: cp.select(x, np.array([5, 63]), mesh=mesh_of(4)), x)
    assert collectives(program) == [("all-reduce", 2 * 2 * 16 * 4)]


def test_inside_shard_map_with_its_derivative(mesh_of, rng):
    cp = ContextParallel(Zigzag(4), "context")
    source = rng.normal(size=(1, 16)).astype(np.float32)
    x = plait.reorder(source, Zigzag(4))

    def last(x):
        return cp.select(x, jnp.array([[15]]))[:, 0]

    fn = jax.shard_map(last, mesh=mesh_of(4), in_specs=P(None, "context"), out_specs=P())
    np.testing.assert_array_equal(jax.jit(fn)(x), source[:, 15])
    pulled = jax.jit(jax.grad(lambda x: 3 * fn(x).sum()))(x)
    np.testing.assert_array_equal(
        pulled, plait.reorder(3.0 * (np.arange(16) == 15)[None], cp.layout)
    )


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_rows_of_each_example_beside_a_data_axis(kind, rng):
    mesh = jax.make_mesh((2, 4), ("data", "context"), axis_types=(kind,) * 2)
    source = rng.normal(size=(2, 16, 3)).astype(np.float32)
    cp = ContextParallel(Zigzag(4), "context")
    rows = np.array([[3], [5]])
    with jax.set_mesh(mesh):
        x = jax.device_put(cp.reorder(source), NamedSharding(mesh, P("data", "context")))
        for found in (cp.select(x, rows), jax.jit(cp.select)(x, rows)):
            np.testing.assert_array_equal(found, np.stack([source[0, [3]], source[1, [5]]]))
        both = cp.select(x, np.array([1, 2]))
        np.testing.assert_array_equal(both, source[:, [1, 2]])


def test_with_64_bits(mesh_of):
    with jax.enable_x64(True):
        for layout in (Zigzag(4), Striped(4), Striped(4, 3)):
            source = np.arange(96).reshape(1, 96)
            cp = ContextParallel(layout, "context")
            x = jnp.asarray(cp.reorder(source))
            found = cp.select(x, [5, 95], mesh=mesh_of(4))
            np.testing.assert_array_equal(found, [[5, 95]])
            moved = cp.reorder(jnp.asarray(source), mesh=mesh_of(4))
            np.testing.assert_array_equal(moved, x)
            ahead = cp.restore(np.asarray(cp.lookahead(x, mesh=mesh_of(4))))
            np.testing.assert_array_equal(ahead[0, :-1], source[0, 1:])


def test_positions_that_a_jitted_function_closes_over(mesh_of):
    cp = ContextParallel(Zigzag(2), "context")
    rows = jnp.array([5, 1], jnp.int32)
    x = np.arange(8.0)[None]
    moved = cp.reorder(x)
    assert jax.jit(lambda x: plait.select(x, rows, Zigzag(2)))(moved).tolist() == [[5, 1]]
    sharded = jax.jit(lambda x: cp.select(x, rows, mesh=mesh_of(2)))
    assert sharded(moved).tolist() == [[5, 1]]


def test_other_dtypes_and_axes(mesh_of):
    flags = np.arange(16).reshape(16, 1) % 3 == 0
    cp = ContextParallel(Zigzag(4), "context")
    found = cp.select(plait.reorder(flags, cp.layout, axis=0), [3, 4], 0)
    np.testing.assert_array_equal(found, [[True], [False]])
    on_device = jnp.asarray(plait.reorder(flags, cp.layout, axis=0))
    np.testing.assert_array_equal(
        cp.select(on_device, [3, 4], 0, mesh=mesh_of(4)), [[True], [False]]
    )


def test_positions_outside_the_sequence():
    with pytest.raises(ValueError, match=r"source position 8 is outside .* nearest is 7"):
        plait.select(np.zeros((1, 8)), [0, 8], Zigzag(2))
    traced = jax.jit(lambda p: plait.select(jnp.ones((1, 8)), p, Zigzag(2)))(jnp.array([0, 8, -1]))
    np.testing.assert_array_equal(traced, [[1, 0, 0]])
    with pytest.raises(ValueError, match=r"shape \(3, 2\)"):
        plait.select(np.zeros((1, 8)), np.zeros((3, 2), int), Zigzag(2))
