import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import oracle
import plait
from plait import Causal, Contiguous, Full, HalfSwap, Placed, Zigzag
from plait.mask import BlockBounds, block_map
from test_layout import layouts

MASKS = [Causal(), Full()]


def brute_force(layout, length, mask, ids):
    positions = oracle.positions(layout, length)
    seen = oracle.visible(positions, ids[positions], isinstance(mask, Causal))[0]
    return seen.sum(axis=1).reshape(layout.ranks, -1).sum(axis=1)


@given(st.data())
def test_pairs_are_counted_exactly(data):
    layout = data.draw(st.sampled_from(layouts(data.draw(st.integers(1, 5)))[:6]))
    length = layout.multiple * 2
    ids = np.array(data.draw(st.lists(st.integers(0, 4), min_size=length, max_size=length)))
    mask = data.draw(st.sampled_from(MASKS))
    found = plait.visible_pairs(layout, length, mask, ids)
    np.testing.assert_array_equal(found, brute_force(layout, length, mask, ids))
    twice = plait.visible_pairs(layout, length, mask, np.stack([ids, ids]))
    np.testing.assert_array_equal(twice, 2 * found)


def test_balance_in_closed_form():
    """Zigzag and half swap do n (2g)(S + 1) / 2 pairs a rank; contiguous's last about twice."""
    for ranks in (2, 8, 128):
        length = 64 * ranks
        equal = length * (length + 1) // 2 // ranks
        for layout in (Zigzag(ranks), HalfSwap(ranks)):
            assert (plait.visible_pairs(layout, length) == equal).all()
        last = plait.visible_pairs(Contiguous(ranks), length)[-1]
        shard = length // ranks
        assert last == shard * (length - shard) + shard * (shard + 1) // 2


def test_documents_of_one_pack_by_hand():
    layout = Placed.zigzag_documents([4, 12], ranks=2)
    ids = np.repeat([1, 2], [4, 12])
    assert plait.visible_pairs(layout, 16, segment_ids=ids).tolist() == [44, 44]


def test_a_rank_with_padding_only():
    ids = (np.arange(128) < 38).astype(int)
    pairs = plait.visible_pairs(Contiguous(4), 128, segment_ids=ids)
    assert pairs.sum() == 38 * 39 // 2
    assert pairs[3] == 0


@given(st.data())
def test_a_block_said_to_be_empty_is_empty(data):
    length, block = 24, data.draw(st.sampled_from([2, 3, 4, 8]))
    ids = np.array(data.draw(st.lists(st.integers(0, 3), min_size=length, max_size=length)))
    if data.draw(st.booleans()):
        ids = np.sort(ids)
    positions = np.array(data.draw(st.permutations(range(length))))
    mask = data.draw(st.sampled_from(MASKS))
    bounds = BlockBounds.of(positions, ids[positions], block, np)
    needed = block_map(mask, bounds, bounds)
    seen = oracle.visible(positions, ids[positions], isinstance(mask, Causal))[0]
    tiles = seen.reshape(length // block, block, length // block, block).any(axis=(1, 3))
    assert not (tiles & ~needed).any()


def test_contiguous_blocks_are_bounded_tightly():
    positions, ids = np.arange(64), np.repeat([1, 2, 3, 0], 16)
    bounds = BlockBounds.of(positions, ids, 8, np)
    needed = block_map(Causal(), bounds, bounds)
    lower = [[1, 0], [1, 1]]
    wanted = np.kron(np.diag([1, 1, 1, 0]), lower).astype(bool)
    np.testing.assert_array_equal(needed, wanted)


def test_shapes_must_fit():
    with pytest.raises(ValueError, match=r"shape \(7,\).*\(8,\)"):
        plait.visible_pairs(Zigzag(2), 8, segment_ids=np.ones(7))
