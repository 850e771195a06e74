import jax
import numpy as np
import pytest
from flax import nnx

from plait import ContextParallel, Contiguous, HalfSwap, Striped, Zigzag, segment_positions
from plait.cli.model import ByteTransformer, loss, rotate

LENGTH = 64
LAYOUTS = [Contiguous(4), Zigzag(4), HalfSwap(4), Striped(4)]
IDS = np.repeat([1, 2, 3, 0], [20, 25, 13, 6])[None].astype(np.int32)
TOKENS = np.random.default_rng(0).integers(0, 256, (1, LENGTH), np.int32)


def model_of(layout):
    cp = ContextParallel(layout)
    model = ByteTransformer(cp, width=32, heads=4, kv_heads=2, layers=1, rngs=nnx.Rngs(0))
    # Logits far from uniform, so that a label more or less changes the loss.
    model.embedding.embedding[...] *= 20
    return model


def batch_of(model, tokens):
    batch = {"tokens": tokens, "segment_ids": IDS, "positions": segment_positions(IDS)}
    return model.cp.reorder(batch)


@nnx.jit
def logits_and_loss(model, batch):
    logits = model(batch["tokens"], batch["positions"], batch["segment_ids"])
    return logits, loss(model, batch)


def in_source_order(model, tokens):
    return model.cp.restore(np.asarray(logits_and_loss(model, batch_of(model, tokens))[0]))


@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_documents_do_not_see_each_other(layout):
    model = model_of(layout)
    before = in_source_order(model, TOKENS)
    after = in_source_order(model, np.where(IDS == 2, (TOKENS + 1) % 256, TOKENS))
    changed = (before != after).any(axis=-1)
    np.testing.assert_array_equal(changed, IDS == 2)


@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=repr)
def test_a_layout_changes_no_logits(layout):
    expected = in_source_order(model_of(Contiguous(4)), TOKENS)
    actual = in_source_order(model_of(layout), TOKENS)
    real = IDS != 0
    np.testing.assert_allclose(actual[real], expected[real], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_the_loss_is_the_mean_over_next_bytes_within_documents(layout):
    model = model_of(layout)
    logits = in_source_order(model, TOKENS).astype(np.float64)[0]
    log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    terms = [
        -log_p[p, TOKENS[0, p + 1]]
        for p in range(LENGTH - 1)
        if IDS[0, p] == IDS[0, p + 1] and IDS[0, p] != 0
    ]
    assert len(terms) == 19 + 24 + 12
    _, actual = logits_and_loss(model, batch_of(model, TOKENS))
    np.testing.assert_allclose(actual, np.mean(terms), rtol=1e-5)


def test_rotation_leaves_relative_position_only():
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 8))

    def score(q_position, k_position):
        q_rotated = rotate(q, np.full((1, 1), q_position, np.int32))
        return float((q_rotated * rotate(k, np.full((1, 1), k_position, np.int32))).sum())

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-4)
    assert score(0, 0) == pytest.approx(float((q * k).sum()), abs=1e-5)
    assert score(9, 4) != pytest.approx(score(9, 5), abs=1e-3)
