import functools
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import bench_packing
from errors import refused
from plait.packing import assign, chunk_work, lower_bound


def optimum(works, ranks):
    """The least work of the heaviest rank, by trying every way to deal the chunks."""
    places = len(works) // ranks

    @functools.cache
    def heaviest(rest):
        if not rest:
            return 0
        return min(
            max(
                works[rest[0]] + sum(works[i] for i in others),
                heaviest(tuple(i for i in rest[1:] if i not in others)),
            )
            for others in itertools.combinations(rest[1:], places - 1)
        )

    return heaviest(tuple(range(len(works))))


def loads(works, ranks, **options):
    of = assign(works, ranks, **options)
    assert of.dtype == np.int64
    assert np.bincount(of, minlength=ranks).tolist() == [len(works) // ranks] * ranks, of
    return np.array(
        [sum(w for w, r in zip(works, of, strict=True) if r == i) for i in range(ranks)]
    )


def test_by_hand():
    """The greedy start gives 19 and 17; one exchange makes them equal."""
    works = [8, 7, 6, 5, 4, 2, 2, 2]
    assert loads(works, 2).tolist() == [18, 18]
    assert sorted(loads(works, 2, tolerance=1.0)) == [17, 19]


def test_two_for_two():
    """Exchanges of one chunk for one end at 79 and 75 here."""
    works = [4, 9, 19, 22, 22, 24, 25, 29]
    assert optimum(works, 2) == 77
    assert loads(works, 2).tolist() == [77, 77]


@pytest.mark.parametrize(
    ("works", "ranks", "bound"),
    [
        ([1, 2, 3, 4], 2, 5),
        ([0, 1, 2, 2, 3, 3], 2, 6),  # the mean, 5.5, rounded up
        ([0.0, 1, 2, 2, 3, 3], 2, 5.5),  # floats are not
        ([9, 1, 1, 1], 2, 10),  # the heaviest chunk, and the lightest beside it
        ([5, 5, 5, 1, 1, 1], 2, 11),  # two of three share a rank
        ([7, 7, 7, 7, 7, 0, 0, 0, 0], 3, 14),
        ([4], 1, 4),
        ([0, 0], 2, 0),
    ],
)
def test_lower_bound_by_hand(works, ranks, bound):
    found = lower_bound(works, ranks)
    assert found == bound
    assert type(found) is type(bound)


@pytest.mark.parametrize(
    ("ranks", "places"), [(2, 2), (2, 3), (2, 4), (3, 2), (4, 2), (5, 2), (1, 4), (4, 1)]
)
def test_small_ones_are_solved(ranks, places):
    """Against every assignment there is; and none is below the lower bound."""
    generator = np.random.default_rng(ranks * 10 + places)
    for most, power in itertools.product((10, 50, 1000), (1, 2, 3)):
        works = (generator.integers(0, most, ranks * places) ** power).tolist()
        best = optimum(works, ranks)
        assert lower_bound(works, ranks) <= best, works
        assert loads(works, ranks).max() == best, works


@pytest.mark.parametrize(("ranks", "places"), [(3, 3), (3, 4), (4, 3), (2, 6)])
def test_larger_ones_nearly(ranks, places):
    generator = np.random.default_rng(ranks * 10 + places)
    for most in (10, 50, 1000):
        works = generator.integers(0, most, ranks * places).tolist()
        best = optimum(works, ranks)
        found = loads(works, ranks).max()
        assert lower_bound(works, ranks) <= best <= found <= 1.05 * best, works


@given(st.integers(1, 6), st.integers(1, 7), st.data())
def test_never_worse_than_greedy(ranks, places, data):
    """The longest-processing-time rule with room for equally many, written out."""
    size = ranks * places
    works = data.draw(st.lists(st.integers(0, 1000), min_size=size, max_size=size))
    greedy, room = [0] * ranks, [places] * ranks
    for work in sorted(works, reverse=True):
        rank = min((r for r in range(ranks) if room[r]), key=lambda r: (greedy[r], r))
        greedy[rank] += work
        room[rank] -= 1
    assert sorted(loads(works, ranks, tolerance=1e9)) == sorted(greedy)
    assert lower_bound(works, ranks) <= loads(works, ranks).max() <= max(greedy)


def test_degenerate():
    assert loads([5, 5, 5, 5], 2).tolist() == [10, 10]
    assert loads([0, 0, 0, 0], 4).tolist() == [0, 0, 0, 0]
    assert sorted(loads([3, 1, 2], 3)) == [1, 2, 3]
    assert loads([3, 1, 2], 1).tolist() == [6]
    assert sorted(loads([0.25, 0.5, 0.75, 1.0], 2)) == [1.25, 1.25]
    assert loads(np.array([2**61, 0, 1, 0], np.uint64), 2).max() == 2**61


def test_deterministic(rng):
    works = rng.integers(0, 10**6, 512)
    np.testing.assert_array_equal(assign(works, 32), assign(works.copy(), 32))


@pytest.mark.parametrize("places", [1000, 4])
def test_few_and_many_places(places, rng):
    """Many places make more exchanges than are weighed at once."""
    works = rng.integers(0, 10**6, 5 * places)
    assert loads(works, 5).max() <= (1.0001 if places > 10 else 1.02) * lower_bound(works, 5)


def chunks(ranks, tokens, per_rank, seed):
    lengths = bench_packing.document_lengths(ranks * tokens, seed)
    ids = np.repeat(np.arange(1, lengths.size + 1), lengths)
    return chunk_work(ids, tokens // per_rank)


@pytest.mark.parametrize("ranks", [8, 32])
def test_packs_of_mixed_lengths(ranks):
    """16 chunks a rank: within 1e-4 of the lower bound, which is the mean here."""
    for seed in range(4):
        works = chunks(ranks, 8192, 16, seed)
        found = loads(works, ranks).max() / works.sum() * ranks
        print(ranks, seed, found)
        assert found <= 1.0002


def test_the_heaviest_chunk_decides():
    """8 chunks a rank of 64, a pack in which chunks of one document are more than a rank's share.

    The mean can't be had: the bound of the heaviest chunk can, and nearly is.
    """
    works = chunks(64, 8192, 8, seed=2)
    found, bound = loads(works, 64).max(), lower_bound(works, 64)
    mean = works.sum() / 64
    print(bound / mean, found / bound)
    assert bound > 1.05 * mean
    assert found <= 1.001 * bound


@pytest.mark.parametrize(
    ("works", "ranks", "words"),
    [
        ([1, 2, 3], 2, ["3 chunks", "multiple of 2", "add 1", "makes 4"]),
        ([1, -2], 2, ["works[1] is -2", "at least 0"]),
        ([1.0, float("nan")], 2, ["works[1] is nan", "finite"]),
        ([], 1, ["at least one"]),
        ([[1, 2]], 1, ["(1, 2)"]),
        (["a"], 1, ["a list of at least one number"]),
        ([2**62, 0], 2, ["2**62", "larger unit"]),
        ([1, 2], 0, ["ranks is 0"]),
    ],
)
@pytest.mark.parametrize("call", [assign, lower_bound])
def test_bad_input_is_named(call, works, ranks, words):
    refused(lambda: call(works, ranks), *words)


@pytest.mark.parametrize("tolerance", [-1, float("nan")])
def test_bad_tolerance(tolerance):
    refused(lambda: assign([1, 2], 2, tolerance=tolerance), "tolerance is", "1e-4")
