"""The examples run, say what they claim, and compute what NumPy does from their weights."""

import jax
import numpy as np
import pytest
from flax import nnx

import nnx_attention
import nnx_scanned_layers
import oracle
from plait import ContextParallel, Contiguous, HalfSwap


def rotated(x, positions):
    """RoPE by complex numbers, float64: pairs (i, i + half) turn by position * 10000^(-i/half)."""
    half = x.shape[-1] // 2
    turns = 10_000.0 ** (-np.arange(half) / half)
    z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * positions[..., None, None] * turns)
    return np.concatenate([z.real, z.imag], axis=-1)


def weights_of(layer):
    return [np.asarray(getattr(layer, name).kernel[...], np.float64) for name in ("q", "k", "v")], (
        np.asarray(layer.out.kernel[...], np.float64)
    )


def attended(layer, x, positions, segment_ids):
    """The layer by the oracle, source order, float64."""
    (q, k, v), out = weights_of(layer)
    q, k, v = (np.einsum("bsw,whd->bshd", x, w) for w in (q, k, v))
    seen = oracle.visible(np.arange(x.shape[1]), segment_ids)
    mixed = oracle.attention(rotated(q, positions), rotated(k, positions), v, seen)
    return np.einsum("bshd,hdw->bsw", mixed, out)


def source_batch(length=64, width=32):
    batch = nnx_attention.make_batch(np.random.default_rng(1), 2, length, width)
    ids = batch["segment_ids"]
    counted = np.zeros_like(ids)
    for row, column in np.ndindex(ids.shape):  # positions restart where the document changes
        if column and ids[row, column] == ids[row, column - 1]:
            counted[row, column] = counted[row, column - 1] + 1
    real = ids != 0
    np.testing.assert_array_equal(batch["positions"][real], counted[real])
    return batch


@pytest.mark.parametrize("layout", [Contiguous(1), HalfSwap(4)])
def test_the_layer_is_what_the_oracle_says(layout, mesh_of):
    batch = source_batch()
    cp = ContextParallel(layout, "context")
    layer = nnx_attention.Attention(cp, 32, heads=4, kv_heads=2, rngs=nnx.Rngs(3))
    moved = cp.reorder(batch)
    with jax.set_mesh(mesh_of(layout.ranks)):
        out, _ = nnx_attention.step(layer, moved)
    wanted = attended(layer, batch["x"], batch["positions"], batch["segment_ids"])
    np.testing.assert_allclose(cp.restore(np.asarray(out)), wanted, rtol=0, atol=2e-5)


def test_attention_runs(capsys):
    differences = nnx_attention.main(length=64, width=32)
    assert len(differences) == 5
    assert max(differences.values()) < 1e-5, differences
    assert "equals one device" in capsys.readouterr().out


def test_scanned_layers_run(capsys):
    found = nnx_scanned_layers.main(length=64, width=32, layers=3)
    # Keys, values and segment ids; saving nothing, keys and values once more.
    assert found["all-gathers, saving gathered"] == 3
    assert found["all-gathers, saving nothing"] == 5
    assert found["difference, saving gathered"] < 1e-5, found
    assert "3 all-gathers" in capsys.readouterr().out


def test_the_stack_is_its_layers_one_after_the_other():
    batch = source_batch()
    cp = ContextParallel(Contiguous(1))
    policy = nnx_scanned_layers.SAVE_GATHERED
    stack = nnx_scanned_layers.Stack(cp, 32, 2, policy, rngs=nnx.Rngs(5))
    out, _ = nnx_scanned_layers.step(stack, batch)
    graph, state = nnx.split(stack.layers)
    x = batch["x"].astype(np.float64)
    for index in range(2):
        layer = nnx.merge(graph, jax.tree.map(lambda w, i=index: w[i], state))
        scale = np.asarray(layer.norm.scale[...], np.float64)
        normed = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6) * scale
        x = x + attended(layer.attention, normed, batch["positions"], batch["segment_ids"])
    np.testing.assert_allclose(out, x, rtol=0, atol=5e-5)
    kernels = np.asarray(stack.layers.attention.q.kernel[...])
    assert not np.array_equal(kernels[0], kernels[1]), "each layer has weights of its own"
