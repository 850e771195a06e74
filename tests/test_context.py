import json
import pickle

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import plait
from errors import refused
from plait import ContextParallel, Contiguous, HalfSwap, Striped, Zigzag


def test_one_device_needs_no_axis(rng):
    cp = ContextParallel(Zigzag(4))
    x = rng.normal(size=(2, 16, 2, 4)).astype(np.float32)
    moved = cp.reorder(x)
    np.testing.assert_array_equal(cp.restore(moved), x)
    np.testing.assert_array_equal(cp.all_gather(moved), x)
    np.testing.assert_array_equal(cp.all_gather(moved, order="layout"), moved)
    swapped = cp.relayout(moved, HalfSwap(4))
    np.testing.assert_array_equal(swapped, plait.reorder(x, HalfSwap(4)))
    np.testing.assert_array_equal(cp.select(moved, [15])[:, 0], x[:, 15])
    in_source_order = plait.attention(*[jax.numpy.asarray(x)] * 3, Contiguous(1))
    np.testing.assert_allclose(
        cp.restore(np.asarray(cp.attention(*[jax.numpy.asarray(moved)] * 3))),
        in_source_order,
        rtol=1e-6,
        atol=1e-6,
    )


def test_a_batch_with_leaves_that_have_no_sequence():
    cp = ContextParallel(Zigzag(2))
    batch = {
        "tokens": np.arange(16)[None],
        "labels": np.arange(16)[None],
        "attention_mask": np.ones(1),
        "extra": None,
        "step": 7,
    }
    axis = {"tokens": 1, "labels": 1, "attention_mask": None, "extra": None, "step": None}
    moved = cp.reorder(batch, axis)
    wanted = [*range(4), *range(12, 16), *range(4, 12)]
    np.testing.assert_array_equal(moved["tokens"][0], wanted)
    assert moved["attention_mask"] is batch["attention_mask"]
    assert moved["extra"] is None
    assert moved["step"] == 7
    square = np.arange(64).reshape(8, 8)
    np.testing.assert_array_equal(cp.reorder(square), square[:, Zigzag(2).positions(8)])
    np.testing.assert_array_equal(cp.reorder(square, 0), square[Zigzag(2).positions(8)])


def test_a_leaf_that_does_not_fit_is_named():
    cp = ContextParallel(Zigzag(2))
    nested = {"a": [np.zeros((1, 8)), np.zeros((1, 9))]}
    with pytest.raises(ValueError, match=r"axis 1 of 'a\.1' has length 9; Zigzag\(2\)"):
        cp.reorder(nested)
    with pytest.raises(ValueError, match=r"axis 1 of 'step' does not exist: it has 0 dim"):
        cp.reorder({"step": np.array(3)})
    with pytest.raises(TypeError, match=r"'step' is a int; an array is needed"):
        cp.reorder({"step": 3})
    with pytest.raises(ValueError, match="is not a prefix"):
        cp.reorder({"step": 3}, {"tokens": 1})
    with pytest.raises(TypeError, match=r"axis of 'x' is 'seq'"):
        cp.reorder({"x": np.zeros(8)}, "seq")


def test_frozen_hashable_serialisable_static():
    cp = ContextParallel(Striped(8, 2), ("a", "b"), batch_axes="data", head_axes=("tensor",))
    for copy in (
        ContextParallel.from_dict(json.loads(json.dumps(cp.to_dict()))),
        pickle.loads(pickle.dumps(cp)),
        ContextParallel(Striped(8, 2), ("a", "b"), batch_axes=("data",), head_axes="tensor"),
    ):
        assert copy == cp
        assert hash(copy) == hash(cp)
    assert ContextParallel(Zigzag(2), ("context",)) == ContextParallel(Zigzag(2), "context")
    with pytest.raises(AttributeError):
        cp.layout = Zigzag(2)
    move = jax.jit(lambda x, cp: cp.reorder(x), static_argnames="cp")
    assert move(np.zeros((1, 8)), cp=ContextParallel(Zigzag(2))).shape == (1, 8)


def test_bad_handles():
    with pytest.raises(TypeError, match="'zigzag'"):
        ContextParallel("zigzag")
    with pytest.raises(ValueError, match="share a mesh axis"):
        ContextParallel(Zigzag(2), "context", batch_axes=("data", "context"))
    with pytest.raises(TypeError, match="different ones"):
        ContextParallel(Zigzag(2), ("a", "a"))
    with pytest.raises(ValueError, match="a ContextParallel needs"):
        ContextParallel.from_dict({"layout": Zigzag(2).to_dict()})


def test_the_public_names():
    assert set(plait.__all__) <= set(dir(plait))
    methods = [name for name in dir(ContextParallel) if not name.startswith("_")]
    functions = set(methods) - {"to_dict", "from_dict", "layout"}
    assert functions <= set(plait.__all__), functions - set(plait.__all__)


def test_local_works_within_the_shard(rng):
    """A region manual over the batch alone, each device holding whole sequences."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    cp = ContextParallel(Zigzag(4))
    x = rng.normal(size=(2, 16, 2, 4)).astype(np.float32)

    def everything(x, local):
        moved = cp.reorder(x, local=local)
        out = cp.attention(moved, moved, moved, local=local)
        ahead = cp.lookahead(out, fill=0, local=local)
        whole = cp.all_gather(ahead, local=local)
        total, _ = cp.sum_and_count(whole, local=local)
        return cp.select(cp.restore(moved, local=local), [3], local=local), total[None]

    def over_data(local):
        return jax.shard_map(
            lambda x: everything(x, local), mesh=mesh, in_specs=P("data"), out_specs=P("data")
        )

    rows, totals = jax.jit(over_data(True))(x)
    for row in range(2):
        row_alone, total_alone = everything(jax.numpy.asarray(x[row : row + 1]), False)
        np.testing.assert_array_equal(rows[row], row_alone[0])
        np.testing.assert_allclose(totals[row], total_alone[0], rtol=1e-5)
    refused(lambda: jax.jit(over_data(False))(x), "manual over ['data']", "local=True")
    for call in (
        lambda x: cp.attention(x, x, x),
        lambda x: cp.select(x, [3]),
        cp.all_gather,
        lambda x: cp.sum_and_count(x)[0][None],
    ):
        alone = jax.shard_map(call, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
        refused(lambda alone=alone: jax.jit(alone)(x), "local=True")


def test_empty_arrays_pass():
    cp = ContextParallel(Zigzag(2))
    for x in (np.zeros((0, 8)), jax.numpy.zeros((0, 8)), jax.numpy.zeros((1, 8, 0))):
        assert cp.reorder(x).shape == x.shape
        assert cp.lookahead(x, fill=0).shape == x.shape
