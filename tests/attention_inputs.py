"""Inputs of attention for tests, and how its results are compared."""

import jax
import numpy as np


def documents(rng, batch, length):
    """Segment ids in source order: documents of many lengths, then padding, differing by row."""
    ids = np.zeros((batch, length), np.int32)
    for row in range(batch):
        cuts = np.sort(rng.choice(np.arange(1, length - 3), 4, replace=False))
        ids[row] = 1 + np.searchsorted(cuts, np.arange(length), side="right")
        ids[row, length - 3 - row :] = 0
    return ids


def inputs(rng, batch, length, heads=4, kv_heads=2, head_dim=8, v_head_dim=6, dtype=np.float32):
    shapes = [(heads, head_dim), (kv_heads, head_dim), (kv_heads, v_head_dim), (heads, v_head_dim)]
    return [rng.normal(size=(batch, length, *shape)).astype(dtype) for shape in shapes]


def with_gradients(attend):
    """(q, k, v, d_out, ...) -> out, d_q, d_k, d_v."""

    def run(q, k, v, d_out, *rest):
        out, pull = jax.vjp(lambda q, k, v: attend(q, k, v, *rest), q, k, v)
        return out, *pull(d_out)

    return run


def assert_close(found, wanted, relative=2e-6):
    """Every row to `relative` of the largest entry of the tensor; a NaN fails."""
    names = ("out", "d_q", "d_k", "d_v", "d_sinks")[: len(wanted)]
    for name, a, b in zip(names, found, wanted, strict=True):
        a = np.asarray(a).astype(np.float64)
        np.testing.assert_allclose(
            a, b, rtol=0, atol=relative * np.abs(b).max() + 1e-30, err_msg=name
        )
