"""What is right, in NumPy and the plainest terms: no chunk tables, no blocks, no devices."""

import numpy as np

import plait


def owner(layout, sequence_length, position):
    """The rank that holds a source position, token by token from the definition."""
    n, s, p = layout.ranks, sequence_length, position
    if isinstance(layout, plait.Contiguous):
        return p // (s // n)
    if isinstance(layout, plait.Zigzag):
        chunk = p // (s // (2 * n))
        return chunk if chunk < n else 2 * n - 1 - chunk
    if isinstance(layout, plait.HalfSwap):
        rank, half = divmod(p // (s // (2 * n)), 2)
        return n - 1 - rank if half else rank
    if isinstance(layout, plait.Striped):
        return p // layout.stripe % n
    return layout.chunk_ranks[p // (s // len(layout.chunk_ranks))]


def positions(layout, sequence_length):
    """Slot -> source position: rank by rank, ascending within a rank."""
    owners = [owner(layout, sequence_length, p) for p in range(sequence_length)]
    return np.array(
        [p for rank in range(layout.ranks) for p in range(sequence_length) if owners[p] == rank]
    )


def reorder(x, layout, axis):
    return np.take(x, positions(layout, x.shape[axis]), axis)


def restore(x, layout, axis):
    restored = np.empty_like(x)
    index = (slice(None),) * (axis % x.ndim) + (positions(layout, x.shape[axis]),)
    restored[index] = x
    return restored


def relayout(x, source, target, axis):
    return reorder(restore(x, source, axis), target, axis)


def lookahead(x, layout, by, fill, segment_ids=None):
    """x [batch, sequence, ...] and ids in the order of the layout, one token at a time."""
    at = positions(layout, x.shape[1])
    slot = {int(p): i for i, p in enumerate(at)}
    out = np.full_like(x, fill)
    for row in range(x.shape[0]):
        for i, p in enumerate(at):
            j = slot.get(int(p) + by)
            if j is None:
                continue
            if segment_ids is not None:
                mine, theirs = segment_ids[row, i], segment_ids[row, j]
                if mine == 0 or mine != theirs:
                    continue
            out[row, i] = x[row, j]
    return out


def sees(mask, q, k):
    """Whether one query position sees one key position, from the words that define the mask."""
    if isinstance(mask, plait.Causal):
        return k <= q
    if isinstance(mask, plait.SlidingWindow):
        return k - q <= mask.right if k > q else q - k <= mask.left
    if isinstance(mask, plait.Chunked):
        return k // mask.size == q // mask.size
    if isinstance(mask, plait.PrefixLM):
        return k < mask.length or k <= q
    if isinstance(mask, plait.Full):
        return True
    joined = all if type(mask).__name__ == "_Both" else any
    return joined((sees(mask.one, q, k), sees(mask.other, q, k)))


def visible(source_positions, segment_ids=None, causal=True, mask=None):
    """[batch, sequence, sequence]: whether a query (row) sees a key (column)."""
    at = np.atleast_2d(source_positions)
    seen = np.ones((at.shape[0], at.shape[1], at.shape[1]), bool)
    if mask is not None:
        seen = np.array([[[sees(mask, q, k) for k in row] for q in row] for row in at.tolist()])
    elif causal:
        seen = at[:, :, None] >= at[:, None, :]
    if segment_ids is not None:
        ids = np.atleast_2d(segment_ids)
        seen = seen & (ids[:, :, None] == ids[:, None, :]) & (ids[:, :, None] != 0)
    return seen


def attention(q, k, v, seen, scale=None, d_out=None, softcap=None, sinks=None):
    """float64 attention and, given the gradient of the output, that of q, k and v.

    And of the sinks, where there are any: one more score in each head's softmax, without a value.
    """
    q, k, v = (np.asarray(x).astype(np.float64) for x in (q, k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    group = q.shape[2] // k.shape[2]
    keys, values = np.repeat(k, group, axis=2), np.repeat(v, group, axis=2)
    dots = np.einsum("bqhd,bkhd->bhqk", q, keys) * scale
    scores = dots if softcap is None else softcap * np.tanh(dots / softcap)
    slope = scale if softcap is None else scale * (1 - np.tanh(dots / softcap) ** 2)
    scores = np.where(seen[:, None], scores, -np.inf)
    sink = np.full(q.shape[2], -np.inf) if sinks is None else np.asarray(sinks).astype(np.float64)
    sink = np.broadcast_to(sink[None, :, None, None], (*scores.shape[:3], 1))
    peak = np.maximum(scores.max(axis=-1, keepdims=True), sink)
    peak = np.where(np.isinf(peak), 0, peak)
    p, of_sink = np.exp(scores - peak), np.exp(sink - peak)
    total = p.sum(axis=-1, keepdims=True) + of_sink
    total = np.where(total == 0, 1, total)
    p, of_sink = p / total, of_sink / total
    out = np.einsum("bhqk,bkhd->bqhd", p, values)
    if d_out is None:
        return out
    d_out = np.asarray(d_out).astype(np.float64)
    d_values = np.einsum("bhqk,bqhd->bkhd", p, d_out)
    d_p = np.einsum("bqhd,bkhd->bhqk", d_out, values)
    mean = (d_p * p).sum(axis=-1, keepdims=True)
    d_scores = p * (d_p - mean) * slope
    d_q = np.einsum("bhqk,bkhd->bqhd", d_scores, keys)
    d_keys = np.einsum("bhqk,bqhd->bkhd", d_scores, q)
    shape = (*k.shape[:2], k.shape[2], group)
    d_k = d_keys.reshape(*shape, -1).sum(axis=3)
    d_v = d_values.reshape(*shape, -1).sum(axis=3)
    if sinks is None:
        return out, d_q, d_k, d_v
    return out, d_q, d_k, d_v, -(of_sink * mean).sum(axis=(0, 2, 3))


def same_bits(actual, wanted):
    """Asserts equality of type, shape and every bit: NaN payloads and -0.0 included."""
    actual, wanted = np.asarray(actual), np.asarray(wanted)
    assert actual.dtype == wanted.dtype, (actual.dtype, wanted.dtype)
    assert actual.shape == wanted.shape, (actual.shape, wanted.shape)
    np.testing.assert_array_equal(
        np.frombuffer(actual.tobytes(), np.uint8), np.frombuffer(wanted.tobytes(), np.uint8)
    )
