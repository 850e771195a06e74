"""The indexer and sparse attention in NumPy, a token at a time, in source order and float64."""

import numpy as np


def scores(q, k, w):
    """[queries, keys] for one row of the batch: [S, H, D], [S, D], [S, H]."""
    q, k, w = (np.asarray(x).astype(np.float64) for x in (q, k, w))
    return np.einsum("ths,th->ts", np.maximum(np.einsum("thd,sd->ths", q, k), 0), w)


def selected(score, top_k, ids=None):
    """Source positions [S, top_k] by score, then position; -1 where none is left."""
    length = len(score)
    ids = np.ones(length, np.int32) if ids is None else ids
    found = np.full((length, top_k), -1, np.int32)
    for t in range(length):
        seen = [s for s in range(t + 1) if ids[s] == ids[t] != 0]
        best = sorted(seen, key=lambda s: (-score[t, s], s))[:top_k]
        found[t, : len(best)] = best
    return found


def attention(q, latents, chosen, value_dim, scale, d_out=None):
    """out [S, H, value_dim], and the gradients of q and latents where d_out is given."""
    q, latents = (np.asarray(x).astype(np.float64) for x in (q, latents))
    out = np.zeros((*q.shape[:2], value_dim))
    d_q, d_latents = np.zeros_like(q), np.zeros_like(latents)
    for t, row in enumerate(chosen):
        keys = latents[row[row >= 0]]
        if not len(keys):
            continue
        s = q[t] @ keys.T * scale
        p = np.exp(s - s.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        out[t] = p @ keys[:, :value_dim]
        if d_out is None:
            continue
        g = np.asarray(d_out[t]).astype(np.float64)
        d_p = g @ keys[:, :value_dim].T
        d_s = p * (d_p - (d_p * p).sum(axis=1, keepdims=True)) * scale
        d_q[t] = d_s @ keys
        d_keys = d_s.T @ q[t]
        d_keys[:, :value_dim] += p.T @ g
        np.add.at(d_latents, row[row >= 0], d_keys)
    return out if d_out is None else (out, d_q, d_latents)
