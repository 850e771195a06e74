import itertools
import json
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import oracle
from errors import refused
from plait import Contiguous, HalfSwap, Layout, Placed, Striped, Zigzag


def layouts(ranks):
    generator = np.random.default_rng(ranks)
    shuffled = generator.permutation(np.repeat(np.arange(ranks), 3))
    return [
        Contiguous(ranks),
        Zigzag(ranks),
        HalfSwap(ranks),
        Striped(ranks),
        Striped(ranks, stripe=3),
        Placed(shuffled),
        Placed.zigzag_documents([2 * ranks, 0, 6 * ranks], ranks),
    ]


any_layout = st.integers(1, 9).flatmap(lambda ranks: st.sampled_from(layouts(ranks)))


def lengths_of(layout):
    pinned = isinstance(layout, Placed) and layout.tokens_per_chunk is not None
    return st.integers(1, 1 if pinned else 5).map(lambda times: times * layout.multiple)


@pytest.mark.parametrize(
    ("layout", "length", "positions"),
    [
        (Zigzag(2), 8, [0, 1, 6, 7, 2, 3, 4, 5]),
        (Zigzag(3), 6, [0, 5, 1, 4, 2, 3]),
        (Zigzag(1), 4, [0, 1, 2, 3]),
        (HalfSwap(4), 16, [0, 1, 14, 15, 4, 5, 10, 11, 6, 7, 8, 9, 2, 3, 12, 13]),
        (HalfSwap(3), 6, [0, 5, 2, 3, 1, 4]),
        (Striped(2), 6, [0, 2, 4, 1, 3, 5]),
        (Striped(2, stripe=2), 8, [0, 1, 4, 5, 2, 3, 6, 7]),
        (Contiguous(3), 6, [0, 1, 2, 3, 4, 5]),
        (Placed((1, 0, 0, 1)), 4, [1, 2, 0, 3]),
    ],
)
def test_orders_by_hand(layout, length, positions):
    found = layout.positions(length)
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, positions)


@given(st.data())
def test_positions_follow_the_definition(data):
    layout = data.draw(any_layout)
    length = data.draw(lengths_of(layout))
    positions = layout.positions(length)
    np.testing.assert_array_equal(positions, oracle.positions(layout, length))
    np.testing.assert_array_equal(layout.slots(length)[positions], np.arange(length))
    shards = positions.reshape(layout.ranks, -1)
    assert (np.diff(shards, axis=1) > 0).all()
    for rank, shard in enumerate(shards):
        runs = layout.runs(length, rank)
        np.testing.assert_array_equal(np.concatenate([np.arange(*run) for run in runs]), shard)
        assert all(a[1] < b[0] for a, b in itertools.pairwise(runs))


@pytest.mark.parametrize("layout_type", [Zigzag, HalfSwap])
def test_128_ranks(layout_type):
    layout = layout_type(128)
    np.testing.assert_array_equal(layout.positions(1024), oracle.positions(layout, 1024))


def test_zigzag_slot_in_closed_form():
    n, g = 5, 3
    p = np.arange(2 * n * g)
    c = p // g
    slots = np.where(c < n, c, 2 * n - 1 - c) * 2 * g + np.where(c >= n, g, 0) + p % g
    np.testing.assert_array_equal(Zigzag(n).slots(2 * n * g), slots)


def test_documents_are_rank_major():
    """A document-major order is a permutation too, but leaves rank 1 with 62 of 88 pairs."""
    layout = Placed.zigzag_documents([4, 12], ranks=2)
    wanted = [0, 3, 4, 5, 6, 13, 14, 15, 1, 2, 7, 8, 9, 10, 11, 12]
    np.testing.assert_array_equal(layout.positions(16), wanted)


def test_repeated_final_offset_changes_nothing():
    lengths = np.diff([0, 16, 40, 40, 40])
    layout = Placed.zigzag_documents(lengths, ranks=2)
    assert layout == Placed.zigzag_documents([16, 24], ranks=2)
    rank0 = [*range(4), *range(12, 22), *range(34, 40)]
    rank1 = [*range(4, 12), *range(22, 34)]
    np.testing.assert_array_equal(layout.positions(40), rank0 + rank1)


@given(st.data())
def test_serialises_and_hashes(data):
    layout = data.draw(any_layout)
    for copy in (
        Layout.from_dict(json.loads(json.dumps(layout.to_dict()))),
        pickle.loads(pickle.dumps(layout)),
        eval(repr(layout)) if "<" not in repr(layout) else layout,
    ):
        assert copy == layout
        assert hash(copy) == hash(layout)


def test_layouts_of_one_size_differ():
    assert len({Contiguous(4), Zigzag(4), HalfSwap(4), Striped(4), Striped(4, 2)}) == 5


def test_frozen():
    with pytest.raises(AttributeError):
        Zigzag(4).ranks = 8


def test_padded_length():
    assert [Zigzag(4).padded_length(s) for s in (1, 8, 9, 2999)] == [8, 8, 16, 3000]
    assert Striped(3, stripe=5).padded_length(16) == 30
    assert Placed.zigzag_documents([4, 12], 2).padded_length(10) == 16


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Zigzag(4).positions(2999), ["2999", "Zigzag(4)", "multiple of 8", "3000"]),
        (lambda: Zigzag(4).slots(0), ["length 0", "pad to 8"]),
        (lambda: Contiguous(0), ["ranks is 0", "at least 1"]),
        (lambda: Striped(2, stripe=0), ["stripe is 0"]),
        (lambda: Placed((0, 0, 1)), ["2 chunks to rank 0", "1 to rank 1"]),
        (lambda: Placed((0, 2)), ["rank 1"]),
        (lambda: Placed(()), ["at least one"]),
        (lambda: Placed((-1, 0)), ["chunk_ranks[0] is -1"]),
        (lambda: Placed.zigzag_documents([4, 6], 2), ["document 1", "length 6", "pad it to 8"]),
        (lambda: Placed.zigzag_documents([0, 0], 2), ["at least one document"]),
        (lambda: Placed.zigzag_documents([4, 12], 2).positions(32), ["32", "exactly 16"]),
        (lambda: Placed.zigzag_documents([4], 2).padded_length(5), ["5", "exactly 4"]),
        (lambda: Zigzag(2).runs(8, 2), ["rank is 2", "nearest is 1"]),
        (lambda: Contiguous(1).positions(2**31), ["2147483648", "int32"]),
        (lambda: Layout.from_dict({"layout": "zigzig"}), ["zigzig", "zigzag"]),
        (lambda: Layout.from_dict({"layout": "zigzag", "size": 3}), ["does not describe"]),
    ],
)
def test_bad_input_is_named(make, words):
    refused(make, *words)


@pytest.mark.parametrize("make", [lambda: Zigzag(2.5), lambda: Zigzag(2).positions(8.0)])
def test_fractions_are_no_lengths(make):
    with pytest.raises(TypeError, match="integer"):
        make()
