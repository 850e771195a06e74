import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import plait
from errors import refused
from hlo import collectives, operations, text
from plait import ContextParallel, Placed, Striped, Zigzag

HOW = ["sum", "mean", "max"]


def oracle(values, segment_ids, documents, how, mask=None):
    """One document at a time in float64, and the derivative of the sum of weighted results."""
    values = np.asarray(values).astype(np.float64)
    kept = np.ones(values.shape, bool) if mask is None else np.asarray(mask) != 0
    out = np.zeros((values.shape[0], documents))
    slope = np.zeros(values.shape)
    for row in range(values.shape[0]):
        for document in range(documents):
            here = (segment_ids[row] == document + 1) & kept[row]
            tokens = values[row, here]
            if how == "max":
                out[row, document] = tokens.max() if tokens.size else -np.inf
                here &= values[row] == out[row, document]
            elif tokens.size:
                out[row, document] = tokens.sum() / (tokens.size if how == "mean" else 1)
            share = 1 if how == "sum" else max(here.sum(), 1)
            slope[row, here] = weights(documents)[document] / share
    return out, slope


def weights(documents):
    return np.arange(1, documents + 1)


def packed(rng, length, documents=5):
    """Two rows: documents over the edges of shards, some empty, padding; values with ties."""
    ids = np.sort(rng.integers(0, documents, (2, length)))  # the last id has no token
    ids[1] = np.where(ids[1] == 2, 3, ids[1])
    values = rng.integers(-8, 8, (2, length)).astype(np.float32) / 4
    mask = rng.random((2, length)) < 0.7
    mask[0][ids[0] == 1] = False  # a document that the mask empties
    values[~mask | (ids == 0)] = np.nan
    return values, ids, mask


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("layout", [Zigzag(1), Zigzag(3), Zigzag(8), Striped(4, 3)], ids=repr)
def test_values_and_derivatives_at_any_number_of_ranks(how, layout, mesh_of, rng):
    """Sharded inside and outside of shard_map, on one device, in every layout: the oracle's."""
    values, ids, mask = packed(rng, layout.multiple * 3)
    cp = ContextParallel(layout, "context")
    wanted, slope = oracle(values, ids, 5, how, mask)
    shown = np.where(np.isinf(wanted), 0, wanted)
    batch = cp.reorder([values, ids, mask])
    mesh = mesh_of(layout.ranks)

    def reduced(*batch):
        return cp.reduce_documents(*batch[:2], documents=5, how=how, mask=batch[2])

    over_ranks = jax.shard_map(reduced, mesh=mesh, in_specs=P(None, "context"), out_specs=P())
    sharding = NamedSharding(mesh, P(None, "context"))
    on_mesh = [jax.device_put(x, sharding) for x in batch]

    def objective(values, fn, batch):
        out = fn(values, *batch[1:])
        return (jnp.where(jnp.isinf(out), 0, out) * weights(5)).sum(), out

    for fn, given in ((over_ranks, batch), (reduced, on_mesh)):
        step = jax.jit(jax.value_and_grad(lambda v, fn=fn, g=given: objective(v, fn, g), 0, True))
        (total, out), gradient = step(given[0])
        assert out.dtype == jnp.float32
        np.testing.assert_allclose(out, wanted, rtol=1e-6)
        np.testing.assert_allclose(total, (shown * weights(5)).sum(), rtol=1e-5)
        np.testing.assert_allclose(cp.restore(np.asarray(gradient)), slope, rtol=1e-6)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients_inside_the_region(how, check_vma, mesh_of, rng):
    """Taken inside with check_vma, and of the region without: neither is n times too large."""
    values, ids, mask = packed(rng, 24)
    cp = ContextParallel(Zigzag(4), "context")
    values, ids, mask = cp.reorder([np.where(mask, values, 0), ids, mask])
    _, slope = oracle(values, ids, 4, how, mask)

    def objective(values, ids, mask):
        out = cp.reduce_documents(values, ids, documents=4, how=how, mask=mask)
        return (jnp.where(jnp.isinf(out), 0, out) * weights(4)).sum()

    inside = jax.grad(objective) if check_vma else objective
    fn = jax.shard_map(
        inside,
        mesh=mesh_of(4),
        in_specs=P(None, "context"),
        out_specs=P(None, "context") if check_vma else P(),
        check_vma=check_vma,
    )
    gradient = jax.jit(fn if check_vma else jax.grad(fn))(values, ids, mask)
    np.testing.assert_allclose(gradient, slope, rtol=1e-6)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_rows_stay_apart_beside_a_data_axis(kind, rng):
    mesh = jax.make_mesh((2, 2, 2), ("data", "inner", "outer"), axis_types=(kind,) * 3)
    cp = ContextParallel(Zigzag(4), ("outer", "inner"), batch_axes="data")
    values, ids, mask = packed(rng, 16)
    spec = P("data", ("outer", "inner"))
    batch = cp.reorder([values, ids, mask])
    with jax.set_mesh(mesh):
        on_mesh = [jax.device_put(x, NamedSharding(mesh, spec)) for x in batch]
        for how in HOW:
            wanted, _ = oracle(values, ids, 5, how, mask)

            def reduced(values, ids, mask, how=how):
                return cp.reduce_documents(values, ids, documents=5, how=how, mask=mask)

            inside = jax.shard_map(reduced, mesh=mesh, in_specs=spec, out_specs=P("data"))
            for fn in (inside, reduced):
                np.testing.assert_allclose(jax.jit(fn)(*on_mesh), wanted, rtol=1e-6)


def test_every_layout_of_a_batch_of_its_own(rng):
    values, ids, mask = packed(rng, 24)
    cp = ContextParallel(Placed((1, 0, 0, 1, 1, 0)))
    values, ids, mask = cp.reorder([values, ids, mask])
    out = cp.reduce_documents(values, ids, documents=5, how="mean", mask=mask)
    np.testing.assert_allclose(out, oracle(values, ids, 5, "mean", mask)[0], rtol=1e-6)
    alone = plait.reduce_documents(values[0], ids[0], documents=5, how="mean", mask=mask[0])
    np.testing.assert_array_equal(alone, out[0])
    mapped = jax.vmap(
        lambda v, i, m: cp.reduce_documents(v, i, documents=5, how="mean", mask=m), 1, 0
    )(*(x[:, None] for x in (values, ids, mask)))
    np.testing.assert_array_equal(mapped[0], out)


def test_low_precision_is_reduced_in_float32():
    ones, ids = jnp.ones((1, 4096), jnp.bfloat16), np.ones((1, 4096), int)
    assert float(plait.reduce_documents(ones, ids, documents=1)[0, 0]) == 4096
    right = jnp.arange(4) < 3
    mean = plait.reduce_documents(right, [1, 1, 2, 2], documents=2, how="mean")
    assert mean.tolist() == [1, 0.5]
    gradient = jax.grad(lambda x: plait.reduce_documents(x, ids, documents=1).sum())(ones)
    assert gradient.dtype == jnp.bfloat16


def test_with_64_bits_and_strict_types(rng):
    values, ids, _ = packed(rng, 12)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"), jax.debug_nans(True):
        values = np.nan_to_num(values)
        values[0, 0] = -np.inf
        for how in HOW:
            out = plait.reduce_documents(
                jnp.asarray(values, np.float32), jnp.asarray(ids), documents=5, how=how
            )
            assert out.dtype == jnp.float32
            np.testing.assert_allclose(out, oracle(values, ids, 5, how)[0], rtol=1e-6)


def test_nan_of_one_rank_reaches_all(mesh_of):
    """The maximum over ranks passes over NaN on CPUs."""
    values = np.arange(16, dtype=np.float32)[None]
    values[0, 3] = np.nan
    ids = np.repeat([[1, 2]], 8, axis=1)
    cp = ContextParallel(Zigzag(4), "context")
    batch = cp.reorder([values, ids])
    for how, second in (("max", 15), ("sum", 92), ("mean", 11.5)):
        fn = jax.shard_map(
            lambda v, i, how=how: cp.reduce_documents(v, i, documents=2, how=how),
            mesh=mesh_of(4),
            in_specs=P(None, "context"),
            out_specs=P(),
        )
        np.testing.assert_array_equal(jax.jit(fn)(*batch), [[np.nan, second]])


def test_infinite_maxima_are_no_nan():
    values = jnp.array([-jnp.inf, -jnp.inf, 1.0, jnp.inf])
    ids = np.array([1, 1, 2, 2])

    def largest(x):
        return plait.reduce_documents(x, ids, documents=3, how="max")

    np.testing.assert_array_equal(largest(values), [-np.inf, np.inf, -np.inf])
    np.testing.assert_array_equal(jax.grad(lambda x: largest(x)[1])(values), [0, 0, 0, 0])


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("wrong", [6, -1])
def test_an_id_out_of_range_does_not_vanish(how, wrong, mesh_of):
    values = np.ones((2, 16), np.float32)
    ids = np.ones((2, 16), np.int32)
    ids[1, 5] = wrong
    cp = ContextParallel(Zigzag(4), "context")
    for known in (ids, jnp.asarray(ids)):
        refused(
            lambda known=known: cp.reduce_documents(values, known, documents=5, how=how),
            f"segment_ids holds {wrong}",
            "documents=5 ids are 0 (padding) to 5",
        )

    def reduced(values, ids):
        return cp.reduce_documents(values, ids, documents=5, how=how)

    inside = jax.shard_map(reduced, mesh=mesh_of(4), in_specs=P(None, "context"), out_specs=P())
    for fn in (reduced, inside):
        out = np.asarray(jax.jit(fn)(values, ids))
        assert np.isnan(out[1]).all()
        assert not np.isnan(out[0]).any()


def test_errors_name_what_is_wrong(mesh_of):
    values, ids = np.ones((1, 8), np.float32), np.ones((1, 8), int)

    def call(values=values, ids=ids, documents=2, **rest):
        return lambda: plait.reduce_documents(values, ids, documents=documents, **rest)

    refused(call(ids=ids * 7), "documents=7 is needed")
    refused(call(ids=ids[0]), "segment_ids has shape (8,)", "values have shape (1, 8)")
    refused(call(how="median"), "'median'", "['sum', 'mean', 'max']")
    refused(call(documents=0), "documents is 0", "at least 1")
    refused(call(documents=2.0), "documents is 2.0", "such as 2", error=TypeError)
    refused(call(ids=ids * 1.0), "segment_ids has dtype float64", error=TypeError)
    refused(call(values=values * 1j), "complex", "such as float32", error=TypeError)
    refused(call(mask=np.full((1, 8), 0.5)), "mask has dtype", "mask != 0", error=TypeError)
    refused(call(mask=np.ones(8, int)), "mask has shape (8,)")
    refused(call(np.float32(1), np.int32(1)), "[..., sequence]")
    cp = ContextParallel(Zigzag(4), "context")
    copies = jax.shard_map(
        lambda v, i: cp.reduce_documents(v, i, documents=2),
        mesh=mesh_of(4),
        in_specs=P(),
        out_specs=P(),
    )
    refused(lambda: jax.jit(copies)(values, ids), "values is the same on every rank")


def test_counting_ones_and_a_document_of_all_tokens(mesh_of):
    """Constants inside the region are no forgotten specs as long as one of the two is a shard."""
    cp = ContextParallel(Zigzag(4), "context")

    def fn(x):
        ones = jnp.ones((1, 4))
        count = cp.reduce_documents(ones, x, documents=2)
        whole = cp.reduce_documents(x, ones.astype(jnp.int32), documents=1, how="mean")
        return count, whole

    ids = np.repeat([[1, 2]], [6, 10], axis=1)
    over_ranks = jax.shard_map(fn, mesh=mesh_of(4), in_specs=P(None, "context"), out_specs=P())
    count, whole = jax.jit(over_ranks)(ids)
    assert count.tolist() == [[6, 10]]
    assert whole.tolist() == [[26 / 16]]


def test_local_reduces_the_shard(rng):
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    values, ids, mask = packed(rng, 12)
    cp = ContextParallel(Zigzag(2))

    def over_data(local):
        fn = jax.shard_map(
            lambda v, i, m: cp.reduce_documents(v, i, documents=5, mask=m, local=local),
            mesh=mesh,
            in_specs=P("data"),
            out_specs=P("data"),
        )
        return jax.jit(fn)(values, ids, mask)

    np.testing.assert_allclose(over_data(True), oracle(values, ids, 5, "sum", mask)[0], rtol=1e-6)
    refused(lambda: over_data(False), "manual over ['data']", "local=True")


def test_it_communicates_documents_and_never_gathers(mesh_of):
    """Neither inside a region nor where XLA shards the global arrays."""
    cp = ContextParallel(Zigzag(4), "context")
    mesh = mesh_of(4)
    sharding = NamedSharding(mesh, P(None, "context"))
    values, ids = (
        jax.ShapeDtypeStruct((2, 64), dtype, sharding=sharding) for dtype in (np.float32, np.int32)
    )
    for how, number in (("sum", 1), ("mean", 2), ("max", 3)):

        def reduced(values, ids, how=how):
            return cp.reduce_documents(values, ids, documents=7, how=how)

        inside = jax.shard_map(reduced, mesh=mesh, in_specs=P(None, "context"), out_specs=P())
        for fn in (reduced, inside):
            program = text(fn, values, ids)
            assert collectives(program) == [("all-reduce", 2 * 7 * 4)] * number
            assert not {"gather", "scatter", "dot", "while"} & set(operations(program))
