import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from errors import refused
from plait import Causal, Chunked, Contiguous, Full, Mask, PrefixLM, SlidingWindow, Zigzag
from plait.mask import BlockBounds, block_map
from plait.packing import chunk_work, keys_needed


@dataclasses.dataclass(frozen=True)
class Doubled(Mask):
    """The key at twice the query's position alone: what neighbours see does not touch."""

    def intervals(self, q_positions, xp):
        return ((2 * q_positions, 2 * q_positions),)


MASKS = [
    Doubled(),
    Causal(),
    Full(),
    SlidingWindow(3),
    SlidingWindow(2, 4),
    Causal() & Chunked(5),
    SlidingWindow(1) | Chunked(3),
    PrefixLM(4) & SlidingWindow(6, 9),
]


def visible(ids, mask):
    """Which query sees which key, pair by pair: bool [queries, keys]."""
    ids, at = np.asarray(ids), np.arange(len(ids))
    same = (ids[:, None] == ids) & (ids[:, None] != 0)
    return same & np.broadcast_to(mask.visible(at[:, None], at), same.shape)


@st.composite
def packs(draw, length=24):
    """Ascending ids with padding at the end, of documents of any lengths."""
    lengths = draw(st.lists(st.integers(1, 12), min_size=1, max_size=8))
    ids = np.repeat(np.arange(1, len(lengths) + 1), lengths)[:length]
    return np.pad(ids, (0, length - ids.size))


@given(packs(), st.sampled_from(MASKS), st.sampled_from([1, 2, 3, 8, 24]))
def test_exact_pairs(ids, mask, chunk):
    wanted = visible(ids, mask).sum(axis=1).reshape(-1, chunk).sum(axis=1)
    np.testing.assert_array_equal(chunk_work(ids, chunk, mask=mask), wanted)


@given(packs(), st.sampled_from(MASKS), st.sampled_from([(1, 1), (2, 3), (4, 2), (6, 12)]))
def test_tiles_are_those_of_the_block_map(ids, mask, tile):
    q_block, k_block = tile
    at = np.arange(ids.size, dtype=np.int32)
    q, k = (BlockBounds.of(at, ids.astype(np.int32), block, np) for block in tile)
    computed = np.broadcast_to(
        block_map(mask, q, k), (ids.size // q_block, ids.size // k_block)
    ).sum(axis=1)
    wanted = (computed * q_block * k_block).reshape(-1, 12 // q_block).sum(axis=1)
    found = chunk_work(ids, 12, mask=mask, tile=tile)
    np.testing.assert_array_equal(found, wanted)
    assert (found >= chunk_work(ids, 12, mask=mask)).all()


def test_tiles_by_hand():
    """Blocks of 2 by 2 on documents of 3 and 4 tokens: the last block of queries is half padding.

    The second block holds the end of the first document and the start of the second, so that it
    meets the first block; the third and fourth see the second and their own.
    """
    ids = np.array([1, 1, 1, 2, 2, 2, 2, 0])
    assert chunk_work(ids, 2, tile=(2, 2)).tolist() == [4, 8, 8, 12]
    assert chunk_work(ids, 4, tile=(4, 2)).tolist() == [16, 24]
    padded_between = np.array([1, 1, 0, 0, 1, 2, 0, 0])
    assert chunk_work(padded_between, 2, tile=(2, 2)).tolist() == [4, 0, 8, 0]


def test_rows_add_up():
    one, two = np.array([1, 1, 1, 1]), np.array([1, 2, 2, 0])
    assert chunk_work(np.stack([one, two]), 2).tolist() == [3 + 2, 7 + 2]
    assert chunk_work(np.stack([one, two]), 2, tile=(2, 2)).tolist() == [8, 16]


def test_no_work_at_all():
    assert chunk_work(np.zeros(4, int), 2).tolist() == [0, 0]
    assert chunk_work(np.zeros(4, int), 2, tile=(2, 2), token_work=3).tolist() == [0, 0]
    assert keys_needed(Zigzag(2), np.zeros(4, int)).tolist() == [0, 0]


def test_weights_by_hand():
    ids = np.array([1, 1, 2, 2, 2, 0])
    assert chunk_work(ids, 2).tolist() == [3, 3, 3]
    assert chunk_work(ids, 2, token_work=10).tolist() == [23, 23, 13]
    assert chunk_work(ids, 2, token_work=np.array([0, 1, 0, 5, 5, 9])).tolist() == [4, 8, 17]
    assert chunk_work(ids, 2, token_work=0.5).tolist() == [4.0, 4.0, 3.5]
    # Only the fifth token sees keys outside its chunk: two.
    assert chunk_work(ids, 2, key_work=100).tolist() == [3, 3, 203]
    rows = np.stack([ids, ids])
    assert chunk_work(rows, 2, token_work=10, key_work=100).tolist() == [46, 46, 426]
    assert chunk_work(rows, 2, token_work=np.ones((2, 6))).tolist() == [10.0, 10.0, 10.0]


@given(
    st.lists(st.integers(0, 3), min_size=24, max_size=24),
    st.sampled_from(MASKS),
    st.sampled_from([Contiguous(1), Contiguous(3), Zigzag(2), Zigzag(4), Contiguous(24)]),
)
def test_keys_needed(ids, mask, layout):
    """Ids in any order: a document may be in parts, and padding anywhere."""
    shards = layout.positions(24).reshape(layout.ranks, -1)
    seen = visible(ids, mask)
    wanted = [
        len(set(np.flatnonzero(seen[shard].any(axis=0))) - set(shard.tolist())) for shard in shards
    ]
    found = keys_needed(layout, np.array(ids), mask=mask)
    assert found.dtype == np.int64
    assert found.tolist() == wanted


def test_keys_needed_of_rows_add_up():
    ids = np.array([[1, 1, 1, 1], [1, 2, 2, 0]])
    assert keys_needed(Contiguous(2), ids).tolist() == [0, 2 + 1]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: chunk_work([1, 1, 1], 2), ["length 3", "multiple of 2", "pad to 4"]),
        (lambda: chunk_work([], 2), ["(0,)", "at least one token"]),
        (lambda: chunk_work([[[1]]], 1), ["(1, 1, 1)", "(batch, sequence)"]),
        (lambda: chunk_work([1, 1], 0), ["chunk is 0"]),
        (lambda: chunk_work([1, 1, 1, 1], 2, tile=4), ["tile is 4", "(q_block, k_block)"]),
        (lambda: chunk_work([1] * 6, 3, tile=(2, 3)), ["chunk is 3", "multiple of 6"]),
        (lambda: chunk_work([2, 1], 1, tile=(1, 1)), ["id 1 follows 2", "ascend"]),
        (lambda: chunk_work([1, 1], 1, token_work=-1), ["token_work is -1", "at least 0"]),
        (lambda: chunk_work([1, 1], 1, token_work=[1, -2]), ["-2 at token 1"]),
        (lambda: chunk_work([1, 1], 1, token_work=[1]), ["(1,)", "(2,)"]),
        (lambda: chunk_work([1, 1], 1, key_work=float("inf")), ["key_work is inf"]),
        (lambda: chunk_work([1, 1], 1, key_work=[1, 1]), ["key_work has shape (2,)"]),
        (lambda: keys_needed(Zigzag(2), [1, 1, 1]), ["length 3", "multiple of 4"]),
    ],
)
def test_bad_input_is_named(make, words):
    refused(make, *words)


def test_bad_types_are_named():
    refused(lambda: chunk_work([1.0, 2.0], 1), "segment_ids", "integers", error=TypeError)
    refused(lambda: chunk_work([1, 1], 1, mask="causal"), "Causal()", error=TypeError)
    refused(lambda: chunk_work([1, 1], 1, token_work="x"), "token_work", error=TypeError)
