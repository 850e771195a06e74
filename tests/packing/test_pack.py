import collections
import pickle

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import plait
from errors import refused
from plait import Causal, Full
from plait.packing import PackRecord, Piece, pack, unpack

lengths_of_documents = st.lists(st.integers(1, 40), min_size=1, max_size=30)


def token_counts(record):
    """How often each (document, token) stands in the rows."""
    return collections.Counter(
        (piece.document, token)
        for row in record.rows
        for piece in row
        for token in range(piece.start, piece.stop)
    )


@given(
    lengths_of_documents, st.integers(1, 20), st.sampled_from(["cut", "drop"]), st.integers(1, 4)
)
def test_no_token_is_lost_or_doubled(lengths, row_length, long, groups):
    record = pack(lengths, row_length, long=long, groups=groups)
    kept = [i for i, n in enumerate(lengths) if long == "cut" or n <= row_length]
    assert token_counts(record) == {(i, token): 1 for i in kept for token in range(lengths[i])}
    assert record.dropped == tuple(sorted(set(range(len(lengths))) - set(kept)))
    assert record.cut == tuple(i for i in kept if lengths[i] > row_length)
    assert all(sum(piece.length for piece in row) <= row_length for row in record.rows)
    assert len(record.rows) % groups == 0
    tokens = sum(lengths[i] for i in kept)
    assert record.padding == len(record.rows) * row_length - tokens
    assert record.document_lengths == tuple(lengths)


@given(lengths_of_documents, st.integers(40, 60))
def test_no_two_rows_would_fit_in_one(lengths, row_length):
    """What best fit promises: a row is begun only where no other has room."""
    rows = [sum(p.length for p in row) for row in pack(lengths, row_length).rows]
    assert all(a + b > row_length for i, a in enumerate(rows) for b in rows[:i]), rows


def test_best_fit_by_hand():
    """2 goes where it leaves no room, beside 4 and 4; first fit would put it beside 7."""
    record = pack([2, 4, 7, 4], sequence_length=10)
    assert record.rows == (
        (Piece(0, 0, 2), Piece(1, 0, 4), Piece(3, 0, 4)),
        (Piece(2, 0, 7),),
    )
    # In descending order two rows hold these; as they come it takes three.
    assert len(pack([3, 3, 6, 7], sequence_length=10).rows) == 2


def test_rows_keep_the_order_of_documents():
    rows = pack([1, 9, 2, 8, 3, 7], sequence_length=10).rows
    assert [[p.document for p in row] for row in rows] == [[0, 1], [2, 3], [4, 5]]


def test_cut():
    record = pack([3, 9, 5, 2], sequence_length=4, long="cut")
    pieces = sorted(piece for row in record.rows for piece in row)
    assert [p for p in pieces if p.document == 1] == [(1, 0, 4), (1, 4, 8), (1, 8, 9)]
    assert record.cut == (1, 2)
    assert record.dropped == ()
    outputs = record.apply([np.arange(n) + 10 * i for i, n in enumerate([3, 9, 5, 2])], fill=-1)
    assert [d.tolist() for d in unpack(outputs, record)] == [
        [0, 1, 2],
        [*range(10, 19)],
        [*range(20, 25)],
        [30, 31],
    ]


def test_dropped_documents_are_none():
    record = pack([3, 9], sequence_length=4, long="drop")
    packed = record.apply([np.ones(3, int), np.ones(9, int)], fill=0)
    assert packed.tolist() == [[1, 1, 1, 0]]
    first, second = unpack(packed, record)
    assert first.tolist() == [1, 1, 1]
    assert second is None
    everything = pack([9], sequence_length=4, long="drop")
    assert everything.shape == (0, 4)
    assert unpack(np.zeros((0, 4)), everything) == [None]
    assert "0 rows of 4" in str(everything)


def test_arrays_by_hand():
    record = pack([3, 5, 2], sequence_length=6)
    assert record.segment_ids.tolist() == [[1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 1, 0]]
    assert record.segment_positions.tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 0]]
    assert record.segment_ids.dtype == record.segment_positions.dtype == np.int32
    tokens = [np.array(x, np.uint16) for x in ([7, 8, 9], [1, 2, 3, 4, 5], [60000, 11])]
    packed = record.apply(tokens, fill=65535)
    assert packed.dtype == np.uint16
    assert packed.tolist() == [[7, 8, 9, 60000, 11, 65535], [1, 2, 3, 4, 5, 65535]]
    assert [p.tolist() for p in unpack(packed, record)] == [x.tolist() for x in tokens]


@given(lengths_of_documents, st.integers(1, 30))
def test_positions_are_those_of_the_ids(lengths, row_length):
    record = pack(lengths, row_length, long="cut")
    np.testing.assert_array_equal(
        record.segment_positions, plait.segment_positions(record.segment_ids)
    )


def test_features_and_dtypes(rng):
    record = pack([3, 5, 2, 6], sequence_length=6, groups=3)
    documents = [rng.normal(size=(n, 2, 3)).astype(jnp.bfloat16) for n in record.document_lengths]
    packed = record.apply(documents, fill=0)
    assert packed.shape == (3, 6, 2, 3)
    assert packed.dtype == jnp.bfloat16
    for document, output in zip(documents, unpack(jnp.asarray(packed), record), strict=True):
        assert output.dtype == jnp.bfloat16
        np.testing.assert_array_equal(output, document)


def test_groups():
    """Rows 6, 6, 3 + 3, 2 + 2 + 2 of work 21, 21, 12, 9: each group has one of the heavy ones."""
    record = pack([6, 6, 3, 2, 3, 2, 2], sequence_length=6, groups=2)
    assert sorted(record.work().reshape(2, 2).sum(axis=1)) == [30, 33]
    assert record.work(Full()).sum() == 36 + 36 + 18 + 12
    by_mask = pack([6, 6, 3, 2, 3, 2, 2], sequence_length=6, groups=2, mask=Full())
    assert sorted(by_mask.work(Full()).reshape(2, 2).sum(axis=1)) == [48, 54]
    assert record.groups == 2
    empty = pack([6], sequence_length=6, groups=4)
    assert sorted(empty.rows) == [(), (), (), (Piece(0, 0, 6),)]
    assert sorted(empty.work(Causal())) == [0, 0, 0, 21]
    assert empty.padding == 18


def test_record_is_plain_data():
    record = pack([3, 5, 2], sequence_length=6)
    assert pickle.loads(pickle.dumps(record)) == record
    assert hash(record) == hash(pack(np.array([3, 5, 2]), 6))
    with pytest.raises(AttributeError):
        record.rows = ()
    assert isinstance(record, PackRecord)
    assert "2 tokens of padding" in str(record)


def test_many_documents_fill_their_rows(rng):
    lengths = rng.integers(1, 2000, 5000)
    record = pack(lengths, sequence_length=8192)
    assert len(record.rows) == -(-lengths.sum() // 8192)


RECORD = pack([3, 5], sequence_length=6)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: pack([3, 0, 2], 4), ["document 1", "length 0", "leave empty documents out"]),
        (lambda: pack([3, -2], 4), ["document 1", "length -2", "such as 1"]),
        (lambda: pack([2**31], 4, long="cut"), ["document 0", "2147483648", "2147483647"]),
        (lambda: pack([3, 2**70], 4), ["document 1", str(2**70)]),
        (lambda: pack([], 4), ["at least one document"]),
        (lambda: pack(5, 4), ["0 dimensions"]),
        (lambda: pack([3], 0), ["sequence_length is 0"]),
        (lambda: pack([3], 4, groups=0), ["groups is 0"]),
        (lambda: pack([3, 9], 4), ["document 1 has length 9", "row of 4", "'cut'", "rows of 9"]),
        (lambda: pack([3, 9, 11], 4), ["document 1 (and 1 more)", "rows of 11"]),
        (lambda: pack([3], 4, long="split"), ["'split'", "'cut'"]),
        (lambda: unpack(np.zeros((2, 5)), RECORD), ["(2, 5)", "2 rows of 6"]),
        (lambda: unpack(np.zeros(6), RECORD), ["(6,)", "(2, 6)"]),
        (lambda: RECORD.apply([np.zeros(3)], 0), ["1 documents", "of 2"]),
        (lambda: RECORD.apply([np.zeros(3), np.zeros(4)], 0), ["document 1", "(4,)", "5 tokens"]),
        (lambda: RECORD.apply([np.zeros(3), np.zeros(5, int)], 0), ["document 1", "int64"]),
        (lambda: RECORD.apply([np.zeros(3), np.zeros((5, 2))], 0), ["document 1", "(2,)"]),
        (lambda: RECORD.apply([np.zeros(3, np.uint8), np.zeros(5, np.uint8)], -100), ["-100"]),
    ],
)
def test_bad_input_is_named(make, words):
    refused(make, *words)


def test_bad_types_are_named():
    refused(lambda: pack([3, 2.5], 4), "document 1", "2.5", "integer", error=TypeError)
    refused(lambda: pack(["3"], 4), "document 0", "'3'", error=TypeError)
    masked = [np.ma.masked_array(np.zeros(3)), np.zeros(5)]
    refused(lambda: RECORD.apply(masked, 0), "document 0", "masked", error=TypeError)
    refused(lambda: unpack(np.ma.zeros((2, 6)), RECORD), "outputs", "masked", error=TypeError)
