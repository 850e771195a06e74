import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import plait
from plait import ContextParallel, Zigzag


def batch(xp, length=2999):
    return {"tokens": xp.ones((1, length), int), "labels": xp.ones((1, length), int), "step": None}


@pytest.mark.parametrize("xp", [np, jnp])
def test_each_leaf_with_its_own_fill(xp):
    cp = ContextParallel(Zigzag(4))
    padded = cp.pad(batch(xp), {"tokens": 0, "labels": -100, "step": 0})
    assert padded["tokens"].shape == padded["labels"].shape == (1, 3000)
    assert int(padded["tokens"][0, -1]) == 0
    assert int(padded["labels"][0, -1]) == -100
    assert int(padded["labels"][0, -2]) == 1
    assert isinstance(padded["tokens"], np.ndarray) == (xp is np)
    back = cp.unpad(padded, 2999)
    np.testing.assert_array_equal(back["labels"], batch(xp)["labels"])


def test_one_fill_for_all_and_other_axes():
    x = [np.ones((3, 2)), np.ones((7,))]
    a, b = plait.pad(x, Zigzag(2), 5, axis=0)
    np.testing.assert_array_equal(a, [[1, 1]] * 3 + [[5, 5]])
    np.testing.assert_array_equal(b, [1] * 7 + [5])
    kept, _ = plait.pad(x, Zigzag(2), 5, axis=[None, -1])
    assert kept is x[0]


def test_names_that_look_alike_keep_their_fills():
    tree = {"a": {"b": np.ones((1, 3), int)}, "a.b": np.ones((1, 3), int)}
    padded = plait.pad(tree, Zigzag(2), {"a": {"b": 7}, "a.b": 9})
    assert padded["a"]["b"][0, -1] == 7
    assert padded["a.b"][0, -1] == 9


def test_padding_changes_no_real_token(rng):
    cp = ContextParallel(Zigzag(4))
    length = 29
    q, k, v = (rng.normal(size=(1, length, 2, 4)).astype(np.float32) for _ in range(3))
    ids = np.ones((1, length), np.int32)
    tokens = np.arange(length)[None]
    q, k, v, ids = cp.pad([q, k, v, ids], [9.0, 9.0, 9.0, 0])
    out = cp.attention(*cp.reorder([q, k, v]), segment_ids=cp.reorder(ids))
    out = cp.unpad(cp.restore(np.asarray(out)), length)
    alone = plait.attention(*(jnp.asarray(x[:, :length]) for x in (q, k, v)), plait.Contiguous(1))
    np.testing.assert_allclose(out, alone, rtol=1e-5, atol=1e-6)
    labels = cp.lookahead(cp.reorder(cp.pad(tokens, 0)), segment_ids=cp.reorder(ids))
    np.testing.assert_array_equal(cp.restore(labels)[0], [*range(1, length), *[-100] * 4])


def test_errors(mesh_of):
    with pytest.raises(ValueError, match=r"fill of 'tokens' is -1; uint8 holds .*0 to 255"):
        plait.pad({"tokens": np.zeros((1, 3), np.uint8)}, Zigzag(2), -1)
    for fill in (None, "pad"):
        with pytest.raises(TypeError, match=r"fill of the array .* a number is needed"):
            plait.pad(np.zeros((1, 3)), Zigzag(2), fill)
    with pytest.raises(ValueError, match=r"fill .* is not a prefix"):
        plait.pad({"tokens": np.zeros((1, 3))}, Zigzag(2), {"labels": 0})
    with pytest.raises(ValueError, match=r"sequence_length is 9; .* 1 to 8"):
        plait.unpad(np.zeros((1, 8)), 9)
    spec = P(None, "context")
    fn = jax.shard_map(
        lambda x: plait.pad(x, Zigzag(2), 0), mesh=mesh_of(2), in_specs=spec, out_specs=spec
    )
    with pytest.raises(ValueError, match="pad was called in a region that is manual"):
        jax.jit(fn)(jnp.zeros((1, 6)))
