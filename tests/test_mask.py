import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import oracle
from errors import refused
from plait import (
    Causal,
    Chunked,
    Contiguous,
    Full,
    HalfSwap,
    Placed,
    PrefixLM,
    SlidingWindow,
    Zigzag,
)
from plait.mask import BlockBounds, block_map, full_blocks
from test_layout import layouts

MASKS = [
    Causal(),
    Full(),
    SlidingWindow(5),
    SlidingWindow(0),
    SlidingWindow(3, 2),
    Chunked(6),
    PrefixLM(0),
    PrefixLM(7),
    Causal() & Chunked(8),
    SlidingWindow(4) | PrefixLM(3),
    (SlidingWindow(2) | Chunked(6)) & Causal(),
    Causal() & (Chunked(3) | SlidingWindow(1, 9)) & PrefixLM(40),
]


def brute_force(layout, length, mask, ids):
    positions = oracle.positions(layout, length)
    seen = oracle.visible(positions, ids[positions], mask=mask)[0]
    return seen.sum(axis=1).reshape(layout.ranks, -1).sum(axis=1)


@given(st.data())
def test_pairs_are_counted_exactly(data):
    layout = data.draw(st.sampled_from(layouts(data.draw(st.integers(1, 5)))[:6]))
    length = layout.multiple * 2
    ids = np.array(data.draw(st.lists(st.integers(0, 4), min_size=length, max_size=length)))
    mask = data.draw(st.sampled_from(MASKS))
    found = layout.work(length, mask, ids)
    np.testing.assert_array_equal(found, brute_force(layout, length, mask, ids))
    twice = layout.work(length, mask, np.stack([ids, ids]))
    np.testing.assert_array_equal(twice, 2 * found)


def test_balance_in_closed_form():
    """Zigzag and half swap do n (2g)(S + 1) / 2 pairs a rank; contiguous's last about twice."""
    for ranks in (2, 8, 128):
        length = 64 * ranks
        equal = length * (length + 1) // 2 // ranks
        for layout in (Zigzag(ranks), HalfSwap(ranks)):
            assert (layout.work(length, Causal()) == equal).all()
        last = Contiguous(ranks).work(length, Causal())[-1]
        shard = length // ranks
        assert last == shard * (length - shard) + shard * (shard + 1) // 2


def test_documents_of_one_pack_by_hand():
    layout = Placed.zigzag_documents([4, 12], ranks=2)
    ids = np.repeat([1, 2], [4, 12])
    assert layout.work(16, Causal(), ids).tolist() == [44, 44]


def test_a_rank_with_padding_only():
    ids = (np.arange(128) < 38).astype(int)
    pairs = Contiguous(4).work(128, Causal(), ids)
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
    seen = oracle.visible(positions, ids[positions], mask=mask)[0]
    tiles = seen.reshape(length // block, block, length // block, block)
    assert not (tiles.any(axis=(1, 3)) & ~needed).any()
    full = full_blocks(mask, bounds, bounds)
    assert not (full & ~tiles.all(axis=(1, 3))).any()


def test_contiguous_blocks_are_bounded_tightly():
    positions, ids = np.arange(64), np.repeat([1, 2, 3, 0], 16)
    bounds = BlockBounds.of(positions, ids, 8, np)
    needed = block_map(Causal(), bounds, bounds)
    lower = [[1, 0], [1, 1]]
    wanted = np.kron(np.diag([1, 1, 1, 0]), lower).astype(bool)
    np.testing.assert_array_equal(needed, wanted)


@pytest.mark.parametrize("mask", MASKS[:8], ids=repr)
def test_blocks_of_a_run_are_told_apart_exactly(mask):
    """Where positions are consecutive, no block is called partial that is empty or full."""
    length, block = 48, 4
    positions, ids = np.arange(length), np.ones(length, int)
    bounds = BlockBounds.of(positions, ids, block, np)
    seen = oracle.visible(positions, mask=mask)[0]
    tiles = seen.reshape(length // block, block, length // block, block)
    np.testing.assert_array_equal(block_map(mask, bounds, bounds), tiles.any(axis=(1, 3)))
    np.testing.assert_array_equal(full_blocks(mask, bounds, bounds), tiles.all(axis=(1, 3)))


def test_block_maps_of_128_ranks_at_once():
    """All of 128K tokens in blocks of 512: counted by hand, and built without a loop."""
    layout, length, block = Zigzag(128), 131072, 512
    bounds = BlockBounds.of(layout.positions(length), np.ones(length, np.int32), block, np)
    needed, full = block_map(Causal(), bounds, bounds), full_blocks(Causal(), bounds, bounds)
    blocks = length // block
    assert needed.sum() == blocks * (blocks + 1) // 2
    assert full.sum() == blocks * (blocks - 1) // 2
    window = block_map(SlidingWindow(4096), bounds, bounds)
    assert window.sum() == sum(min(i, 8) + 1 for i in range(blocks))


@pytest.mark.parametrize("mask", MASKS, ids=repr)
def test_on_the_device_as_on_the_host(mask):
    q, k = np.arange(40, dtype=np.int32)[:, None], np.arange(40, dtype=np.int32)
    wanted = oracle.visible(k, mask=mask)[0]
    np.testing.assert_array_equal(np.broadcast_to(mask.visible(q, k), (40, 40)), wanted)
    found = jax.jit(mask.visible)(q, k)
    np.testing.assert_array_equal(np.broadcast_to(found, (40, 40)), wanted)


def test_bad_masks_are_refused():
    refused(lambda: SlidingWindow(-1), "left is -1; it needs to be 0 to 1073741824, such as 0")
    refused(lambda: SlidingWindow(2.5), "left is 2.5; it needs to be an integer", error=TypeError)
    refused(lambda: Chunked(0), "size is 0; it needs to be at least 1")
    refused(lambda: PrefixLM(2**31), "length is 2147483648; it needs to be 0 to 1073741824")
    with pytest.raises(TypeError, match="unsupported operand"):
        Causal() & True


def test_shapes_must_fit():
    with pytest.raises(ValueError, match=r"shape \(7,\).*\(8,\)"):
        Zigzag(2).work(8, Causal(), np.ones(7))
