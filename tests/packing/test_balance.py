import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from errors import refused
from plait import Blockwise, Causal, ContextParallel, Full, SlidingWindow, count_blocks
from plait.packing import balance, balance_rows, balance_segments, chunk_work, pack, unpack


@given(
    st.lists(st.integers(0, 90), min_size=1, max_size=9).filter(any),
    st.integers(1, 5),
    st.sampled_from([Causal(), Full(), SlidingWindow(7)]),
)
def test_any_lengths(lengths, ranks, mask):
    made = balance(lengths, ranks, chunk=4, mask=mask)
    ids, layout = made.segment_ids, made.layout
    tokens = sum(lengths)
    assert ids.dtype == np.int32
    assert ids[:tokens].tolist() == [i + 1 for i, n in enumerate(lengths) for _ in range(n)]
    assert not ids[tokens:].any()
    assert 0 <= ids.size - tokens < 4 * ranks
    assert (layout.ranks, layout.multiple, layout.tokens_per_chunk) == (ranks, ids.size, 4)
    np.testing.assert_array_equal(made.pairs, layout.work(ids.size, mask, ids))
    np.testing.assert_array_equal(made.work, made.pairs)
    assert made.tile_pairs is None
    assert made.lower_bound <= made.work.max()
    assert made.ratio == pytest.approx(made.work.max() * ranks / made.work.sum())


def test_tiles_are_what_the_kernel_computes():
    lengths = [300, 20, 41, 7, 500, 90]
    made = balance(lengths, 4, chunk=32, tile=(16, 8))
    computed, _ = count_blocks(
        made.layout,
        made.segment_ids.size,
        segment_ids=made.segment_ids,
        kernel=Blockwise(16, 8),
    )
    np.testing.assert_array_equal(made.tile_pairs, computed * 16 * 8)
    np.testing.assert_array_equal(made.work, made.tile_pairs)
    np.testing.assert_array_equal(
        made.pairs, made.layout.work(made.segment_ids.size, Causal(), made.segment_ids)
    )
    assert made.work.max() < 1.05 * made.work.mean()


def test_what_is_asked_for_is_balanced():
    """One document of 64 short ones' length: by pairs it is nearly all work, by tokens half."""
    lengths = [512] + [8] * 64
    even = balance(lengths, 2, chunk=8)
    assert even.ratio < 1.001
    response = np.zeros(1024)
    response[768:] = 1e6  # in the last quarter only, half of the short documents
    weighed = balance(lengths, 2, chunk=8, token_work=response)
    np.testing.assert_array_equal(weighed.work - weighed.pairs, [128e6, 128e6])
    heavy = chunk_work(even.segment_ids, 8, token_work=response) > 1e6
    assert np.bincount(weighed.layout.chunk_ranks, heavy).tolist() == [16, 16]


def test_keys_weigh():
    """Of equal documents of two chunks, each second chunk has keys to receive: one on each rank."""
    made = balance([8, 8], 2, chunk=4, mask=SlidingWindow(0), key_work=5)
    assert made.pairs.tolist() == made.work.tolist() == [8, 8]
    made = balance([8, 8], 2, chunk=4, mask=SlidingWindow(3), key_work=1000)
    assert made.work.tolist() == [10 + 16 + 3000] * 2
    assert made.layout.chunk_ranks[1] != made.layout.chunk_ranks[3]


def test_default_chunks():
    """Sixteen a rank, of a multiple of the tile."""
    made = balance([1000, 23], 4)
    assert made.layout.tokens_per_chunk == 16
    assert len(made.layout.chunk_ranks) == 64
    assert balance([1000, 25], 4).layout.tokens_per_chunk == 17
    made = balance([1000, 25], 4, tile=(8, 4))
    assert (made.layout.tokens_per_chunk, made.segment_ids.size) == (24, 1056)
    made = balance([3], 2)
    assert (made.layout.tokens_per_chunk, made.segment_ids.size) == (1, 4)
    assert balance([3], 2, sequence_length=64).layout.tokens_per_chunk == 2


def test_given_length():
    made = balance([30], 2, sequence_length=64, chunk=8)
    assert made.layout.multiple == made.segment_ids.size == 64
    assert made.segment_ids.sum() == 30
    assert sum(made.pairs) == 30 * 31 // 2


def test_repeated_and_empty_documents():
    assert balance([8, 0, 0, 8], 2, chunk=4).pairs.tolist() == [36, 36]
    assert balance([0, 0], 2, chunk=4).ratio == 1.0
    assert balance([0, 0], 2, chunk=4).above_bound == 0.0


def test_one_layout_for_a_batch():
    ids = np.array([[1] * 16, [1] * 8 + [2] * 4 + [0] * 4])
    made = balance_segments(ids, 2, chunk=2)
    np.testing.assert_array_equal(made.pairs, made.layout.work(16, Causal(), ids))
    assert made.pairs.sum() == 136 + 36 + 10
    # Chunks of 6, 14, 22, 30, 22, 30, 27, 31: but for the last two all are 6 and eights.
    assert sorted(made.pairs) == [89, 93]


def test_says_how_far_from_optimal():
    made = balance([12, 4], 2, chunk=4)
    assert made.work.tolist() in ([42 + 10, 26 + 10], [26 + 10, 42 + 10])
    assert made.lower_bound == 52
    assert made.ratio == 52 / 44
    assert made.above_bound == 0.0
    assert "1.18182" in str(made)
    assert "0.00%" in str(made)


def test_documents_through_pack_layout_and_back(rng):
    """Tokens are packed, laid out, worked on by slot, restored and given back by document."""
    lengths = [7, 33, 2, 18, 64, 5]
    documents = [rng.integers(1, 100, n) for n in lengths]
    record = pack(lengths, sequence_length=64)
    made = balance_segments(record.segment_ids, 4, chunk=4)
    cp = ContextParallel(made.layout)
    batch = cp.reorder({"x": record.apply(documents, fill=0), "at": record.segment_positions})
    outputs = cp.restore(batch["x"] * 1000 + batch["at"])
    for document, output in zip(documents, unpack(outputs, record), strict=True):
        assert output.tolist() == [1000 * x + i for i, x in enumerate(document.tolist())]


def test_rows_over_groups():
    dealt = balance_rows([8, 7, 6, 5, 4, 2, 2, 2], 2)
    assert dealt.work.tolist() == [18, 18]
    assert dealt.lower_bound == 18
    assert dealt.ratio == 1.0
    assert dealt.rows.shape == (2, 4)
    assert sorted(dealt.order.tolist()) == list(range(8))
    assert (np.diff(dealt.rows, axis=1) > 0).all()
    uneven = balance_rows([9.0, 1.0], 2)
    assert sorted(uneven.work.tolist()) == [1.0, 9.0]
    assert uneven.ratio == 1.8


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: balance([5, -1], 2), ["document 1", "length -1", "0 to 2147483647"]),
        (lambda: balance([2**31], 2), ["document 0", "2147483648"]),
        (lambda: balance([], 2), ["at least one document"]),
        (lambda: balance([[3]], 2), ["2 dimensions"]),
        (lambda: balance([5], 0), ["ranks is 0"]),
        (lambda: balance([5], 2, chunk=0), ["chunk is 0"]),
        (lambda: balance([70], 2, sequence_length=64), ["70 tokens", "64", "pack"]),
        (lambda: balance([60], 2, sequence_length=63), ["63", "multiple of 32", "pad to 64"]),
        (lambda: balance([60], 2, sequence_length=66, chunk=4), ["chunks of 4", "pad to 72"]),
        (lambda: balance([60], 2, chunk=6, tile=(4, 4)), ["chunk is 6", "such as 8"]),
        (lambda: balance([60], 2, token_work=[1, 2]), ["(2,)", "(60,)"]),
        (lambda: balance([60], 2, tolerance=-1), ["tolerance is -1"]),
        (lambda: balance_segments([1, 1, 1], 2), ["length 3", "pad to 32"]),
        (lambda: balance_rows([1, 2, 3], 2), ["3 chunks"]),
    ],
)
def test_bad_input_is_named(make, words):
    refused(make, *words)


def test_lengths_that_are_no_integers():
    refused(lambda: balance([3, 2.5], 2), "document 1", "2.5", "integer", error=TypeError)
