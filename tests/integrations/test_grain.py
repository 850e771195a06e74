"""Steps of a grain pipeline: nothing is lost, everything follows, and iterators resume."""

import itertools

import numpy as np
import pytest

grain = pytest.importorskip("grain", reason="grain: pip install 'plait[grain]'")

import absl.flags  # noqa: E402

from errors import refused  # noqa: E402
from plait import HalfSwap, Zigzag  # noqa: E402
from plait.integrations.grain import (  # noqa: E402
    LAYOUT_POSITIONS,
    Balance,
    Labels,
    Rename,
    Reorder,
    pack,
    segment_ids_of,
)

LENGTH = 64


def documents(count=60, longest=60, seed=0):
    """Documents that can be told apart: each token is 1000 * document + its position."""
    lengths = np.random.default_rng(seed).integers(1, longest + 1, count)
    return [{"inputs": np.arange(n) + 1000 * d} for d, n in enumerate(lengths)]


def rows_of(source, **options):
    return pack(grain.MapDataset.source(source), {"inputs": LENGTH}, **options)


def whole(ranks=4, **options):
    dataset = rows_of(documents(), **options).map(Labels()).batch(2, drop_remainder=True)
    balanced = dataset.map(Balance(ranks, chunks_per_rank=4))
    return balanced.map(Reorder()).map(Rename("maxtext"))


def tokens_of(rows, ids="inputs_segment_ids"):
    return sorted(int(t) for row in rows for t in np.asarray(row["inputs"])[row[ids] != 0])


@pytest.mark.parametrize("longest", [60, 200])
def test_no_token_is_lost_or_doubled(longest):
    source = documents(longest=longest)
    rows = list(rows_of(source, long="error" if longest <= LENGTH else "cut"))
    assert tokens_of(rows) == sorted(int(t) for d in source for t in d["inputs"])
    for row in rows:
        for i in np.flatnonzero(row["inputs_segment_ids"][1:]) + 1:
            same = row["inputs_segment_ids"][i] == row["inputs_segment_ids"][i - 1]
            assert row["inputs_positions"][i] == (row["inputs_positions"][i - 1] + 1) * same


def test_labels_and_their_mask():
    row = {
        "inputs": np.array([5, 0, 7, 8, 9, 0, 0]),
        "inputs_segmentation": np.array([1, 1, 1, 2, 2, 0, 0]),
    }
    found = Labels().map(row)
    assert found["targets"].tolist() == [0, 7, -100, 9, -100, -100, -100]
    assert found["targets_loss_mask"].tolist() == [1, 1, 0, 1, 0, 0, 0]
    assert found["targets_segmentation"].tolist() == [1, 1, 0, 2, 0, 0, 0]
    further = Labels(name="second", by=2).map(row)
    assert further["second"].tolist() == [7, -100, -100, -100, -100, -100, -100]
    batched = {name: np.stack([x, x]) for name, x in row.items()}
    assert Labels().map(batched)["targets"].tolist() == [found["targets"].tolist()] * 2


def test_everything_follows_the_order():
    for batch in whole():
        orders, ids = batch["source_positions"], batch["inputs_segmentation"]
        assert set(batch) == {
            "inputs", "inputs_segmentation", "inputs_position", "targets", "targets_loss_mask",
            "targets_segmentation", "targets_position", "source_positions",
        }  # fmt: skip
        for row in range(2):
            back = np.argsort(orders[row])
            tokens = batch["inputs"][row][back]
            assert (np.diff(np.sort(orders[row])) == 1).all()
            for t in range(LENGTH):
                if batch["targets_loss_mask"][row][back][t]:
                    assert batch["targets"][row][back][t] == tokens[t] + 1 == tokens[t + 1]
                if ids[row][back][t]:
                    assert tokens[t] % 1000 == batch["inputs_position"][row][back][t]


def test_balance_is_better_than_zigzag():
    def worst(order, ids):
        work = np.array([(ids[: p + 1] == ids[p]).sum() * (ids[p] != 0) for p in order])
        by_rank = work.reshape(4, -1).sum(axis=1)
        return by_rank.max() / by_rank.mean()

    ours, plain = [], []
    for row in rows_of(documents()).map(Balance(4, chunks_per_rank=4)):
        ids = row["inputs_segment_ids"]
        ours.append(worst(row[LAYOUT_POSITIONS], ids))
        plain.append(worst(Zigzag(4).positions(LENGTH), ids))
    assert np.mean(ours) < np.mean(plain)
    assert max(ours) < 1.2


def test_a_fixed_layout():
    row = next(iter(rows_of(documents()).map(Reorder(HalfSwap(4)))))
    plain = next(iter(rows_of(documents())))
    np.testing.assert_array_equal(row["inputs"], plain["inputs"][HalfSwap(4).positions(LENGTH)])
    np.testing.assert_array_equal(row["source_positions"], HalfSwap(4).positions(LENGTH))


def test_what_is_carried_and_what_stays():
    row = next(iter(rows_of(documents())))
    order = Zigzag(4).positions(LENGTH)
    features = np.arange(3 * LENGTH).reshape(LENGTH, 3)
    element = {
        **row, "features": features, "pooled": np.ones(LENGTH), "weight": 0.5, "name": "a row",
        "more": {"x": np.arange(LENGTH)},
    }  # fmt: skip
    for given in (element, {**element, "source_positions": np.arange(LENGTH)}):
        found = Reorder(Zigzag(4), skip=("pooled",)).map(given)
        np.testing.assert_array_equal(found["features"], features[order])
        np.testing.assert_array_equal(found["more"]["x"], order)
        np.testing.assert_array_equal(found["source_positions"], order)
        assert found["pooled"] is element["pooled"]
        assert (found["weight"], found["name"]) == (0.5, "a row")
    batch = {name: np.stack([row[name]] * 8) for name in row}
    moved = Reorder(Zigzag(4)).map(batch)
    np.testing.assert_array_equal(moved["inputs"], batch["inputs"][:, order])


def same(found, wanted):
    for a, b in itertools.zip_longest(found, wanted):
        assert set(a) == set(b)
        for name in a:
            np.testing.assert_array_equal(a[name], b[name])


@pytest.mark.parametrize("ranks", [4, 8])
def test_a_checkpoint_resumes_at_any_number_of_ranks(ranks):
    """The state of a run over 4 ranks; the next batches of one over 8 are the same text."""
    run = iter(whole(4))
    for _ in range(3):
        next(run)
    state = run.get_state()
    resumed = iter(whole(ranks))
    resumed.set_state(state)
    found, wanted = list(resumed), list(run)
    assert len(found) == len(wanted) > 2
    if ranks == 4:
        same(found, wanted)
    for a, b in zip(found, wanted, strict=True):
        for name in ("inputs", "targets", "inputs_segmentation"):
            for row in range(2):
                back = [x[name][row][np.argsort(x["source_positions"][row])] for x in (a, b)]
                np.testing.assert_array_equal(*back)


def test_worker_processes_and_their_checkpoint():
    absl.flags.FLAGS.mark_as_parsed()  # as a program's main does; grain's workers ask for flags
    options = grain.MultiprocessingOptions(num_workers=1)
    wanted = list(whole())
    run = iter(whole().mp_prefetch(options))
    first = next(run)
    state = run.get_state()
    rest = list(run)
    same([first, *rest], wanted)
    resumed = iter(whole().mp_prefetch(options))
    resumed.set_state(state)
    same(list(resumed), rest)


def test_malformed_records_are_named():
    good = documents(5)
    list_of = lambda bad, **options: lambda: list(rows_of([*good, bad], **options))  # noqa: E731
    refused(list_of({"inputs": np.arange(65)}), "record 5", "65 tokens", "64")
    refused(list_of({"inputs": np.arange(0)}), "record 5", "empty")
    refused(list_of({"targets": np.arange(3)}), "record 5", "'inputs'", error=KeyError)
    both = {"inputs": 64, "targets": 64}
    uneven = [{"inputs": np.arange(3), "targets": np.arange(4)}]
    refused(lambda: list(pack(grain.MapDataset.source(uneven), both)), "record 0", "'targets': 4")
    refused(lambda: rows_of(good, long="drop"), "'drop'", "'cut'")
    refused(list_of({"inputs": np.arange(3, dtype=np.uint16)}), "record 5", "uint16", "int64")
    refused(list_of({"inputs": np.ones((3, 2), int)}), "record 5", "(2,)")
    refused(list_of({"inputs": [1, 2]}), "record 5", "[1, 2]", error=TypeError)
    refused(list_of({"inputs": np.arange(3), "name": "x"}), "record 5", "['name']", "lose")
    refused(lambda: pack(good, {"inputs": 8}), "list", "MapDataset", error=TypeError)
    refused(lambda: rows_of(good, bins=0), "bins is 0")
    refused(lambda: pack(grain.MapDataset.source(good), {}), "lengths", "'inputs'")
    refused(lambda: Balance(0), "ranks is 0")
    refused(lambda: Reorder("zigzag"), "'zigzag'", "Zigzag(8)", error=TypeError)
    ids = {"inputs": np.arange(4), "inputs_segment_ids": np.array([1, 2, 1, 0])}
    refused(lambda: segment_ids_of(ids, "inputs"), "document 1", "comes back")
    refused(lambda: Labels().map({"inputs": np.arange(4)}), "inputs_segment_ids", error=KeyError)
    refused(lambda: Labels(name="inputs").map(ids), "already")
    both = {**ids, "inputs_segmentation": ids["inputs_segment_ids"]}
    refused(lambda: segment_ids_of(both, "inputs"), "both", "drop one")
    negative = {"inputs": np.arange(3), "inputs_segment_ids": np.array([1, 1, -1])}
    refused(lambda: segment_ids_of(negative, "inputs"), "-1", "0 for padding")
    row = next(iter(rows_of(good)))
    refused(lambda: Labels().map(Reorder(Zigzag(4)).map(row)), "Reorder came before")
    refused(lambda: Reorder(Zigzag(4)).map(Reorder(Zigzag(4)).map(row)), "Reorder came before")
    refused(lambda: Reorder().map(row), "Reorder(Zigzag(8))", "Balance")
    refused(lambda: Reorder(Zigzag(4)).map(Balance(4, 4).map(row)), "drop one")
    refused(lambda: Balance(5).map(row), "64 tokens", "80")
    balanced = Balance(4, 4).map(row)
    longer = {n: x if n == LAYOUT_POSITIONS else np.tile(x, 2) for n, x in balanced.items()}
    refused(lambda: Reorder().map(longer), "(64,)", "(128,)", "cut or join")
    extra = {**row, "extra": np.arange(9), "extra_segment_ids": np.ones(9, int)}
    refused(lambda: Reorder(Zigzag(4)).map(extra), "'extra'", "(9,)")
    hundred = {**row, "inputs": row["inputs"] * 0 - 100}
    refused(lambda: Labels().map(hundred), "-100", "ignored")
    refused(lambda: Rename("t5x"), "'t5x'", "'maxtext'")
