import itertools
import json
import re
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
from plait import (
    Causal,
    Contiguous,
    HalfSwap,
    Machine,
    Placed,
    Shapes,
    Striped,
    Zigzag,
    choose_strategy,
    count_blocks,
)
from plait.attention.cost import Prices
from plait.attention.kernels import Blockwise
from plait.cli import main
from plait.cli.arguments import UserError
from plait.cli.plan.code import code
from plait.cli.plan.compare import make_plan
from plait.cli.plan.documents import draw, one_document, pack_rows, sample
from plait.cli.plan.estimates import Option, Work, estimate, recommend
from plait.cli.plan.files import Reader
from plait.cli.plan.layouts import Row, candidates, segment_ids
from plait.cli.plan.pairs import pairs_between_ranks, tiles_between_ranks
from plait.cli.progress import Progress

SMALL = ["plan", "--ranks", "4", "--sequence-length", "256"]


def run(capsys, *arguments):
    """(status, stdout, stderr) of a call."""
    status = main([str(argument) for argument in arguments])
    return status, *capsys.readouterr()


def some_ids(rng, length):
    """Documents of any length in any order of ids, one of them padding."""
    cuts = np.sort(rng.choice(np.arange(1, length), rng.integers(0, 9), replace=False))
    lengths = np.diff(np.concatenate([[0], cuts, [length]]))
    return np.repeat(rng.permutation(lengths.size), lengths).astype(np.int32)


def layouts_of(ranks, rng):
    placed = rng.permutation(np.repeat(np.arange(ranks), 8)).tolist()
    return [
        Contiguous(ranks),
        Zigzag(ranks),
        HalfSwap(ranks),
        Striped(ranks),
        Striped(ranks, 4),
        Placed(placed),
    ]


# Pairs and tiles


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_pairs_between_ranks_are_those_of_the_oracle(rng, ranks):
    length = 32 * ranks
    at = np.arange(length)
    for _ in range(6):
        ids = some_ids(rng, length)
        visible = (at[:, None] >= at) & (ids[:, None] == ids) & (ids[:, None] != 0)
        for layout in layouts_of(ranks, rng):
            holder = np.array([oracle.owner(layout, length, p) for p in at])
            holds = (holder[:, None] == np.arange(ranks)).astype(int)
            expected = holds.T @ visible @ holds
            np.testing.assert_array_equal(
                pairs_between_ranks(layout, ids), expected, err_msg=f"{layout} {ids}"
            )


def test_pairs_of_many_fragments_a_document(rng):
    # More than one block of fragments, and blocks that end within documents.
    ids = np.repeat([3, 1, 0, 2], [500, 37, 3, 484]).astype(np.int32)
    at = np.arange(1024)
    visible = (at[:, None] >= at) & (ids[:, None] == ids) & (ids[:, None] != 0)
    holds = (at[:, None] % 4 == np.arange(4)).astype(int)
    np.testing.assert_array_equal(pairs_between_ranks(Striped(4), ids), holds.T @ visible @ holds)


def test_a_row_of_padding_has_no_pairs():
    assert not pairs_between_ranks(Zigzag(2), np.zeros(8, np.int32)).any()


def test_tiles_are_the_blocks_that_the_kernel_counts(rng):
    for layout in layouts_of(4, rng):
        ids = np.repeat([1, 2, 3, 4, 0], [100, 500, 300, 111, 13]).astype(np.int32)
        kernel = Blockwise(32, 16)
        tiles = tiles_between_ranks(layout, ids, kernel)
        blocks, _ = count_blocks(layout, 1024, segment_ids=ids, kernel=kernel)
        np.testing.assert_array_equal(tiles.sum(axis=1), blocks * 32 * 16, err_msg=str(layout))
        assert (tiles >= pairs_between_ranks(layout, ids)).all()


# Estimates


def prices_of(network=1.0, ranks=2, length=8, **fields):
    shapes = Shapes(
        **{"batch": 1, "heads": 2, "kv_heads": 1, "head_dim": 3, "v_head_dim": 1} | fields
    )
    return Prices(ranks, length, shapes, Machine(16.0, network, 1e12))


def work_of(layout, prices, group_tiles=None):
    pairs = pairs_between_ranks(layout, np.ones(prices.length, np.int32))
    return Work(pairs, pairs, group_tiles, prices)


def test_estimates_counted_by_hand():
    # Contiguous(2) of 8 tokens has pairs [[10, 0], [16, 10]]. A pair is 2 * (3 + 1) * 2 = 16 FLOPs,
    # a second. A rank's keys and values are 4 * 1 * (3 + 1) * 2 = 32 bytes, q and out twice that.
    work = work_of(Contiguous(2), prices_of(network=2.0))
    all_gather, ulysses, ring = estimate("contiguous", [work], 1, ["all_gather", "ulysses", "ring"])
    assert all_gather.seconds == 32 / 2 + 26
    assert ulysses.seconds == (64 + 2 * 32) / 2 / 2 + 18  # one kv head, sent twice
    assert ring.seconds == max(10, 32 / 2) + 16
    assert [o.waits for o in (all_gather, ulysses, ring)] == [26 / 18, 1.0, 26 / 18]
    assert [o.busiest_pairs for o in (all_gather, ulysses, ring)] == [26, 18, 26]
    assert [o.sent_bytes for o in (all_gather, ulysses, ring)] == [32, 64, 32]
    assert [o.held_bytes for o in (all_gather, ulysses, ring)] == [64, 64, 64]


def test_a_ring_waits_in_every_step():
    # Both ranks have 20 pairs, one of them all of its own in the first step.
    pairs = np.array([[20, 0], [2, 18]])
    ring = estimate("x", [Work(pairs, pairs, None, prices_of(network=1e9))], 1, ["ring"])[0]
    assert ring.waits == (20 + 2) / 20
    assert ring.busiest_pairs == 20
    assert ring.seconds == pytest.approx(22)


def test_time_comes_from_tiles_and_balance_from_pairs():
    prices = prices_of(network=1e9)
    pairs = np.array([[20, 0], [0, 20]])
    tiles = np.array([[64, 0], [0, 32]])
    one = estimate("x", [Work(pairs, tiles, None, prices)], 1, ["all_gather"])[0]
    assert (one.waits, one.tiles_over_pairs) == (1.0, 96 / 40)
    assert one.seconds == pytest.approx(64)


def test_rows_of_much_work_count_for_more():
    prices = prices_of(network=1e9)
    works = [Work(p, p, None, prices) for p in (np.diag([30, 10]), np.diag([2, 2]))]
    one = estimate("x", works, 1, ["all_gather"])[0]
    assert one.waits == (30 + 2) / (20 + 2)
    assert one.worst_waits == 30 / 20
    assert one.seconds == pytest.approx((30 + 2) / 2)


def test_groups_of_usp_wait_for_each_other():
    pairs = np.arange(16).reshape(4, 4)
    groups = np.array([[10, 18], [42, 50]])
    work = Work(pairs, pairs, groups, prices_of(network=1e9, ranks=4, heads=2, kv_heads=2))
    usp = estimate("x", [work], 2, ["usp"])[0]
    # Two steps: the groups' own pairs, then the others', of half the heads of two ranks each.
    assert usp.waits == ((50 + 42) / 2) / (120 / 4)
    assert usp.busiest_pairs == (42 + 50) / 2


@pytest.mark.parametrize("ranks", [4, 16])
def test_one_document_costs_what_choose_strategy_says(ranks):
    length, axes = 32768, (ranks // 2, 2)
    shapes = Shapes(1, 16, 2, 128, 64)
    # A network at which neither sending nor computing hides the other's error.
    machine = Machine(network_bytes_per_second=30e9)
    plan = make_plan(
        one_document(length), "", Prices(ranks, length, shapes, machine), Blockwise(), axes
    )
    for one in plan.layouts:
        layout = one.first.layout
        choice = choose_strategy(layout, length, shapes, axis_sizes=axes, machine=machine)
        expected = {e.strategy: e for e in choice.estimates}
        assert {o.strategy for o in one.options} == set(expected)
        for option in one.options:
            of_model = expected[option.strategy]
            assert option.seconds == pytest.approx(of_model.seconds, rel=0.08), option.name
            assert option.sent_bytes == of_model.received_bytes, option.name
            assert option.held_bytes == of_model.held_bytes, option.name


def option(layout, strategy, seconds, held=1.0):
    return Option(layout, strategy, 1.0, 1.0, 1.0, 10.0, seconds, 1e6, held * 2**30)


def test_the_fastest_that_fits_is_recommended():
    options = [
        option("zigzag", "ring", 3.0),
        option("zigzag", "all_gather", 2.0, held=3),
        option("balanced", "all_gather", 1.0, held=9),
    ]
    made = recommend(options, Machine(memory_bytes=4 * 2**30))
    assert made.option is options[1]
    for words in (
        "2,000 ms a layer forward, is the least of what fits in 4 GiB",
        "zigzag, ring is next, at 1.5 times that",
        "balanced, all_gather would take 1,000 ms, but holds 9 GiB",
    ):
        assert words in made.reason


def test_less_code_wins_within_a_percent():
    options = [option("zigzag", "ring", 1.009), option("balanced", "ring", 1.0)]
    machine = Machine()
    assert recommend(options, machine).option is options[0]
    assert "within 1% of the least" in recommend(options, machine).reason
    options[0] = option("zigzag", "ring", 1.02)
    assert recommend(options, machine).option is options[1]


def test_nothing_fits():
    made = recommend([option("zigzag", "ring", 1.0, held=9)], Machine(memory_bytes=2**30))
    assert made.option is None
    assert made.reason == (
        "Nothing fits: zigzag, ring holds the least keys and values, 9 GiB, and --memory is 1 GiB."
    )


# Layouts


def test_documents_are_padded_for_their_zigzag():
    zigzag = candidates(2, True, (256, 256))[4]
    row = zigzag.lay_out(np.array([5, 3]), 8)
    # Rooms of 8 and 4: the row grows from 8 tokens to 12.
    assert row.segment_ids.tolist() == [1] * 5 + [0] * 3 + [2] * 3 + [0]
    assert row.padding == 4
    assert pairs_between_ranks(row.layout, row.segment_ids).sum() == 15 + 6
    # A row that is longer stays as it is.
    assert zigzag.lay_out(np.array([5, 3]), 16).tokens == 16


def test_padding_is_of_the_whole_row():
    for candidate in candidates(2, True, (256, 256)):
        row = candidate.lay_out(np.array([4, 3]), 32)
        assert row.tokens == 32, candidate.name
        assert row.padding == 32 - 7, candidate.name
        assert row.layout.ranks == 2


# Documents


def read(path, tokenized=False, column=None, bytes_per_token=4.0):
    column = column or ("input_ids" if tokenized else "length")
    reader = Reader("plait plan", column, tokenized, bytes_per_token)
    lengths, is_text = reader.read(path, lambda line: None)
    return lengths.tolist(), is_text


def test_lengths_of_text_files(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("5\n 7 \n2147483647\n\n")
    assert read(path) == ([5, 7, 2**31 - 1], False)


def test_lengths_of_numpy_files(tmp_path):
    path = tmp_path / "a.npy"
    np.save(path, np.array([5, 7], np.uint16))
    assert read(path) == ([5, 7], False)


def test_columns_of_jsonl(tmp_path):
    path = tmp_path / "a.jsonl"
    records = [
        {"length": 5, "text": "12345", "input_ids": [1, 2]},
        {"length": 7, "text": "\u00e9\u00e9\u00e9", "input_ids": [3]},
    ]
    path.write_text("\n".join(map(json.dumps, records)))
    assert read(path) == ([5, 7], False)
    assert read(path, tokenized=True) == ([2, 1], False)
    records[0]["text"] = "words"
    path.write_text("\n".join(map(json.dumps, records)))
    assert read(path, column="text") == ([2, 2], True)  # 5 and 6 bytes
    assert read(path, column="text", bytes_per_token=1.0) == ([5, 6], True)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", "5\n0\n", ["line 2 of", "is 0", "1 to 2147483647: 1 works"]),
        ("a.txt", "5\n-3\n", ["line 2 of", "is -3", "1 works"]),
        ("a.txt", "2147483648\n", ["line 1 of", "2147483647 works"]),
        ("a.txt", "5\n6.5\n", ["line 2 of", "'6.5'", "an integer"]),
        ("a.txt", "5\n\n6\n", ["line 2 of", "is empty"]),
        ("a.txt", "", ["a.txt", "no documents"]),
        ("a.txt", b"\xff\xfe1", ["a.txt", "no UTF-8 text"]),
        ("a.npy", "", ["a.npy", "no array"]),
        ("a.npy", "5", ["a.npy", "no array"]),
        ("a.csv", "5", ["'.csv'", ".jsonl"]),
        ("a.jsonl", '{"length": 5}\n{"length": ', ["line 2 of", "no JSON"]),
        ("a.jsonl", "[5]", ["line 1 of", "an object"]),
        ("a.jsonl", '{"text": "a"}', ["no column 'length'", "'text'", "--column text works"]),
        ("a.jsonl", '{"length": true}', ["'length' in line 1", "True", "an integer"]),
        ("a.jsonl", '{"length": 5.0}', ["'length' in line 1", "5.0"]),
        ("a.jsonl", '{"length": null}', ["'length' in line 1", "None"]),
        ("a.jsonl", '{"length": [1, 2]}', ["line 1 of", "--tokenized counts lists"]),
        ("a.jsonl", '{"length": "512"}', ["the text '512'", "512 works"]),
        ("a.jsonl", '{"length": "ab"}\n{"length": 3}', ["line 2 of", "the same in all"]),
        ("a.jsonl", '{"length": ""}', ["'length' in line 1", "is 0"]),
    ],
)
def test_malformed_input_is_named_by_file_and_line(tmp_path, name, content, words):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as raised:
        read(path)
    message = str(raised.value)
    assert message.startswith("plait plan: ")
    assert "\n" not in message
    assert all(word in message for word in [name, *words]), message


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.array([5, 6, -1]), ["record 2", "is -1"]),
        (np.array([5, 2**40]), ["record 1", "2147483647 works"]),
        (np.array([5, 2**64 - 1], np.uint64), ["record 1", "18446744073709551615"]),
        (np.array([5.0]), ["float64", "integer"]),
        (np.array([[5]]), ["(1, 1)"]),
    ],
)
def test_malformed_arrays_are_named_by_record(tmp_path, array, words):
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(UserError) as raised:
        read(tmp_path / "a.npy")
    assert all(word in str(raised.value) for word in words), raised.value


def test_records_are_counted_over_batches(tmp_path, monkeypatch):
    monkeypatch.setattr("plait.cli.plan.files.BATCH", 2)
    np.save(tmp_path / "a.npy", np.array([1, 2, 3, 4, 0]))
    with pytest.raises(UserError, match="record 4 of"):
        read(tmp_path / "a.npy")
    (tmp_path / "a.txt").write_text("1\n2\n3\n4\n5\n")
    assert read(tmp_path / "a.txt")[0] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("name", ["a.txt", "a.npy", "a.jsonl", "a.parquet"])
def test_a_file_that_is_not_there(tmp_path, name):
    if name == "a.parquet":
        pytest.importorskip("pyarrow")
    with pytest.raises(UserError, match=f"{name}' can't be read"):
        read(tmp_path / name)


def test_tokens_have_a_column(tmp_path):
    (tmp_path / "a.txt").write_text("5")
    with pytest.raises(UserError, match="--lengths works for numbers"):
        read(tmp_path / "a.txt", tokenized=True)
    (tmp_path / "a.jsonl").write_text('{"input_ids": 5}')
    with pytest.raises(UserError, match=r"line 1.*--lengths reads numbers"):
        read(tmp_path / "a.jsonl", tokenized=True)


def test_parquet_needs_pyarrow(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"plait\[parquet\]"):
        read(tmp_path / "a.parquet")


def test_columns_of_parquet(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    columns = {
        "length": [5, 7, 1],
        "text": ["words", "\u00e9\u00e9\u00e9", "a"],
        "input_ids": [[1, 2], [3], [4, 5, 6]],
        "score": [0.5, 1.5, 2.5],
        "holes": [1, None, 2],
        "wrong": [1, 2, -4],
    }
    parquet.write_table(arrow.table(columns), path, row_group_size=2)
    assert read(path) == ([5, 7, 1], False)
    assert read(path, column="text") == ([2, 2, 1], True)
    assert read(path, tokenized=True) == ([2, 1, 3], False)
    for column, tokenized, words in (
        ("nothing", False, "no column 'nothing'; it has 'length'"),
        ("score", False, "double; it needs to be integers or strings"),
        ("input_ids", False, "--tokenized works"),
        ("length", True, "needs to be lists of tokens"),
        ("holes", False, "record 1 of 'holes' in"),
        ("wrong", False, "record 2 of 'wrong' in .* is -4"),
    ):
        with pytest.raises(UserError, match=words):
            read(path, tokenized=tokenized, column=column)
    path.write_text("no table")
    with pytest.raises(UserError, match="is no Parquet file"):
        read(path)


def test_the_long_tail_has_the_shares_that_are_said(rng):
    lengths = draw("long-tail", 60_000_000, 2**20, rng)
    assert lengths.sum() >= 60_000_000
    assert lengths.max() <= 2**18
    for limit, share in ((2**10, 0.71), (2**12, 0.94), (2**14, 0.987), (2**16, 0.997)):
        assert np.mean(lengths <= limit) == pytest.approx(share, abs=0.01), limit
    assert 0 < np.mean(lengths > 2**16) < 0.006
    assert draw("long-tail", 10_000, 4096, rng).max() == 1024


def test_other_distributions(rng):
    lengths = draw("uniform", 1_000_000, 4096, rng)
    assert (lengths.min(), lengths.max()) == (1, 1024)
    assert lengths.mean() == pytest.approx(512, rel=0.05)
    assert draw("equal:300", 1000, 4096, rng).tolist() == [300] * 4


def test_a_sample_is_random_and_in_order(rng):
    lengths = np.arange(1, 1001)
    taken = sample(lengths, 2, 1000, rng)
    assert 2100 <= taken.sum() <= 3200
    assert (np.diff(taken) > 0).all()
    assert taken.min() < 300 < 700 < taken.max()
    assert sample(np.array([5, 6]), 20, 1000, rng).tolist() == [5, 6]


def test_rows_are_packed_and_cut(rng):
    packed = pack_rows(np.array([10, 3, 5, 25]), 20, 10, rng)
    assert sorted(map(tuple, (row.tolist() for row in packed.rows))) == [
        (3,),
        (5, 5),
        (10,),
        (10,),
        (10,),
    ]
    assert (packed.documents, packed.cut) == (4, 1)
    # Of more rows than are looked at the emptiest is left out.
    for _ in range(5):
        fewer = pack_rows(np.array([10, 3, 5, 25]), 2, 10, rng)
        assert len(fewer.rows) == 2
        assert all(row.sum() == 10 for row in fewer.rows)


# The code


def attend_by_hand(q, k, v, ids):
    """One row in source order, float64."""
    at = np.arange(len(ids))
    sees = (at[:, None] >= at) & (ids[:, None] == ids) & (ids[:, None] != 0)
    out = np.zeros(q.shape)
    for head in range(q.shape[1]):
        scores = np.where(sees, q[:, head] @ k[:, head].T / np.sqrt(q.shape[2]), -np.inf)
        weights = np.exp(scores - np.where(sees.any(1), scores.max(1), 0)[:, None])
        out[:, head] = weights / np.maximum(weights.sum(1), 1e-30)[:, None] @ v[:, head]
    return out


@pytest.mark.parametrize(
    ("layout", "strategy", "axes"),
    [
        ("zigzag", "ring", None),
        ("contiguous", "ulysses", None),
        ("striped", "all_gather", None),
        ("half-swap", "usp", (2, 2)),
        ("balanced", "ring", None),
        ("zigzag documents", "all_gather", None),
    ],
)
def test_the_code_runs_and_is_right(rng, layout, strategy, axes):
    if jax.device_count() < 4:
        pytest.skip("needs 4 devices")
    length = 64
    text = code(layout, strategy, 4, length, has_documents=True, tile=(4, 4), axis_sizes=axes)
    # It is for a machine of four devices; there are eight.
    names = {}
    exec(text.replace("axis_types=", "devices=jax.devices()[:4], axis_types="), names)
    documents = [np.arange(1, n + 1, dtype=np.int32) for n in (30, 7, 13)]
    if layout == "zigzag documents":
        batch = names["put"](documents)
    else:
        ids = segment_ids([30, 7, 13], np.array([30, 7, 13]), length)[None]
        batch = names["put"]({"tokens": np.arange(length)[None], "segment_ids": ids})
    place = np.asarray(
        batch["positions"][0] if "positions" in batch else names["cp"].layout.positions(length)
    )
    ids = np.empty(length, np.int32)
    ids[place] = np.asarray(batch["segment_ids"][0])
    assert np.bincount(ids)[1:].tolist() == [30, 7, 13]

    q, k, v = rng.normal(size=(3, length, 4, 8))
    put = [jnp.asarray(x[place][None], jnp.float32) for x in (q, k, v)]
    extra = [batch["positions"]] if "positions" in batch else []
    with jax.set_mesh(names["mesh"]):
        out = jax.jit(names["attend"])(*put, batch["segment_ids"], *extra)
    np.testing.assert_allclose(
        np.asarray(out[0], np.float64), attend_by_hand(q, k, v, ids)[place], atol=2e-6
    )


# The command


def test_what_is_printed_for_one_document(capsys):
    status, out, err = run(capsys, *SMALL, "--heads", 4, "--kv-heads", 2, "--head-dim", 8)
    assert (status, err) == (0, "")
    assert "4 ranks, rows of 256 tokens, causal; 4 heads and 2 of keys, head_dim 8" in out
    assert "One document in one row." in out
    assert re.search(r"contiguous, all_gather +1\.747 ", out)  # 7 / 4 in the limit
    assert "zigzag documents" not in out
    assert out.count("recommended") == 1
    # 256 * 257 / 2 pairs over 4 ranks, 2 * (8 + 8) * 4 FLOPs each.
    assert f"{256 * 257 / 2 / 4 * 2 * 16 * 4 / 1e12:,.4g} TFLOPs forward" in out
    assert "from plait import ContextParallel" in out


def test_json_has_the_exact_figures(capsys):
    arguments = ["--heads", 4, "--kv-heads", 2, "--head-dim", 8, "--v-head-dim", 4, "--json", "-"]
    status, out, err = run(capsys, *SMALL, *arguments)
    assert (status, err) == (0, "")
    numbers = json.loads(out)
    pairs = Contiguous(4).work(256, Causal()).tolist()
    contiguous = numbers["layouts"]["contiguous"]
    assert contiguous["visible_pairs"] == [pairs]
    assert contiguous["forward_flops"] == [[2 * (8 + 4) * 4 * p for p in pairs]]
    assert numbers["mean_rank_flops"]["training"] == 3 * 2 * 12 * 4 * sum(pairs) / 4
    ring = contiguous["strategies"]["ring"]
    assert ring["sent_bytes"] == 3 * 64 * 2 * 12 * 2
    assert ring["held_bytes"] == 2 * 64 * 2 * 12 * 2
    assert ring["busiest_over_mean"] == pytest.approx(max(pairs) / np.mean(pairs))
    assert numbers["recommended"]["layout"] in numbers["layouts"]


def test_documents_of_a_file(capsys, tmp_path):
    path = tmp_path / "a.jsonl"
    texts = ["word " * n for n in (10, 200, 400, 30)]  # 13, 250, 500 and 38 tokens of 4 bytes
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    out_path = tmp_path / "new" / "plan.json"
    status, out, err = run(
        capsys, *SMALL, "--lengths", path, "--column", "text", "--json", out_path, "--axes", "2,2"
    )
    assert (status, err) == (0, "")
    assert "4 documents of" in out
    assert "counted from text at 4 bytes a token" in " ".join(out.split())
    assert "1 longer than a row cut" in " ".join(out.split())
    numbers = json.loads(out_path.read_text())
    assert sorted(itertools.chain(*numbers["documents"]["lengths"])) == [13, 38, 244, 250, 256]
    assert list(numbers["layouts"])[-2:] == ["zigzag documents", "balanced"]
    assert set(numbers["layouts"]["zigzag"]["strategies"]) == {
        "all_gather",
        "ulysses",
        "ring",
        "usp",
    }
    assert set(numbers["layouts"]["balanced"]["strategies"]) == {"all_gather", "ring"}


def test_what_is_drawn_is_said_and_is_the_same_again(capsys):
    arguments = [*SMALL, "--distribution", "uniform", "--packs", 3, "--seed", 5]
    status, out, _ = run(capsys, *arguments)
    assert status == 0
    assert "drawn from 'uniform' (seed 5)" in out
    assert "Rows looked at: 3" in " ".join(out.split())
    assert run(capsys, *arguments)[1] == out
    assert run(capsys, *arguments[:-1], 6)[1] != out


def test_a_strategy_that_cannot_be_had_says_why(capsys):
    status, out, _ = run(capsys, *SMALL, "--heads", 6, "--kv-heads", 2)
    assert status == 0
    assert "ulysses cannot be had: 6 heads of q are no multiple of 4." in out


def test_nothing_that_fits_has_no_code(capsys):
    status, out, _ = run(capsys, *SMALL, "--memory", 1e-6)
    assert status == 0
    assert "Nothing fits" in out
    assert "ContextParallel" not in out
    assert out.count("does not fit") == 12


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ranks", "1"], ["--ranks is 1", "64 works"]),
        (["--sequence-length", "1002"], ["is 1002", "multiple of 8", "1008 works"]),
        (["--axes", "2,3"], ["--axes is '2,3'", "--ranks 4", "1,4 works"]),
        (["--axes", "4"], ["--axes is '4'", "two integers"]),
        (["--tile", "256"], ["--tile is '256'", "256,256 works"]),
        (["--tile", "1,1", "--sequence-length", "1048576"], ["larger", "16,16 works"]),
        (["--heads", "6", "--kv-heads", "4"], ["--kv-heads is 4", "--heads 6", "3 works"]),
        (["--head-dim", "0"], ["--head-dim is 0", "128 works"]),
        (["--memory", "-1"], ["--memory is -1", "4 works"]),
        (["--peak", "fast"], ["--peak is 'fast'", "459 works"]),
        (["--distribution", "normal"], ["'normal'", "long-tail works"]),
        (["--distribution", "equal:0"], ["'equal:0'", "equal:4096 works"]),
        (["--lengths", "a.txt", "--distribution", "uniform"], ["not allowed with"]),
        (["--column", "text"], ["--column is 'text'", "--lengths FILE"]),
        (["--lengths", "missing.txt"], ["'missing.txt'", "can't be read"]),
        (["--picture", "a.jpg"], ["'a.jpg'", "plan.png works"]),
        (["--json", "/dev/null/a"], ["/dev/null/a", "plan.json works"]),
    ],
)
def test_a_bad_value_gets_one_line(capsys, monkeypatch, tmp_path, arguments, words):
    monkeypatch.chdir(tmp_path)
    status, out, err = run(capsys, *SMALL, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("plait plan: ")
    assert err.count("\n") == 1, err
    assert all(word in err for word in words), err
    assert not list(tmp_path.iterdir())


def test_a_picture_needs_matplotlib(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, _, err = run(capsys, *SMALL, "--picture", "a.png")
    assert status == 2
    assert err == "plait plan: matplotlib is not installed: pip install 'plait[demo]'\n"


# The picture


@pytest.mark.parametrize(("ranks", "name"), [(8, "a.png"), (256, "a.svg")])
def test_a_picture_is_drawn(capsys, tmp_path, ranks, name):
    path = tmp_path / name
    arguments = ["plan", "--ranks", ranks, "--sequence-length", 8192, "--packs", 1]
    arguments += ["--distribution", "equal:3000", "--heads", 8, "--picture", path]
    status, out, _ = run(capsys, *arguments)
    assert status == 0
    assert f"Picture: {path}" in out
    assert path.stat().st_size > 20_000
    assert path.read_bytes().startswith(b"\x89PNG" if ranks == 8 else b"<?xml")


def test_pixels_show_what_is_visible_and_whose_it_is(rng, monkeypatch):
    picture = pytest.importorskip("plait.cli.plan.picture")
    monkeypatch.setattr(picture, "PIXELS", 10)
    at = np.arange(64)
    edges = at[: 10 + 1] * 64 // 10
    pixel = np.searchsorted(edges, at, side="right") - 1
    for layout in layouts_of(2, rng):
        lengths = rng.multinomial(50, [0.5, 0.3, 0.1, 0.05, 0.05])
        ids = segment_ids(lengths[lengths > 0], lengths[lengths > 0], 64)
        row = Row(layout, ids)
        visible = (at[:, None] >= at) & (ids[:, None] == ids) & (ids[:, None] != 0)
        expected = np.zeros((10, 10), bool)
        np.logical_or.at(expected, (pixel[:, None], pixel[None]), visible)
        np.testing.assert_array_equal(picture.visible_pixels(row), expected)
        holder = np.array([oracle.owner(layout, 64, p) for p in at])
        share = [np.mean(holder[pixel == i]) for i in range(10)]
        colors = np.array([[0.0, 0.0, 0.0, 1.0], [1.0, 0.5, 0.25, 1.0]])
        np.testing.assert_allclose(
            picture.pixel_colors(row, colors), np.outer(share, [1, 0.5, 0.25])
        )


# Progress


def test_progress_is_told_after_a_second_and_seldom_in_a_log(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    progress = Progress()
    for now[0] in (0.5, 1.5, 2.5, 11.0, 12.0):
        progress(f"at {now[0]}")
    progress.done()
    assert capsys.readouterr().err == "at 1.5\nat 12.0\n"


def test_progress_on_a_terminal_is_one_line(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    progress = Progress()
    for now[0] in (0.5, 1.5, 1.6, 2.5):
        progress(f"at {now[0]}")
    progress.done()
    assert capsys.readouterr().err == "\r\x1b[Kat 1.5\r\x1b[Kat 2.5\r\x1b[K"
