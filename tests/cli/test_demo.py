import json
import math
import sys

import jax
import numpy as np
import pytest

from plait import Causal, Contiguous, HalfSwap, Striped, Zigzag
from plait.cli import main, picture, text, train
from plait.cli.alone import time_ranks
from plait.cli.demo import Measured

SMALL = ["demo", "--ranks", "2", "--sequence-length", "256", "--steps", "3"]


def run(capsys, *arguments):
    """(status, stdout, stderr) of a call."""
    status = main(arguments)
    return status, *capsys.readouterr()


def fake_train(monkeypatch, factor=1.0):
    """Runs whose losses are equal, but for those in zigzag: `factor` times the others."""

    def train_at_once(layout, tokens, *_, **__):
        of_layout = factor if isinstance(layout, Zigzag) else 1.0
        return train.Run([5.0 * of_layout] * len(tokens), [1.0] * len(tokens), [0.1] * len(tokens))

    monkeypatch.setattr(train, "train", train_at_once)
    monkeypatch.setattr(train, "initial_weights", lambda seed: None)


@pytest.mark.parametrize(
    ("arguments", "given", "works"),
    [
        (["--ranks", "0"], "--ranks is 0", "8 works"),
        (["--ranks", "1"], "--ranks is 1", "8 works"),
        (["--ranks", "17"], "--ranks is 17", "8 works"),
        (["--ranks", "eight"], "--ranks is 'eight'", "8 works"),
        (["--ranks", ""], "--ranks is ''", "8 works"),
        (["--steps", "-3"], "--steps is -3", "8 works"),
        (["--steps", "2.5"], "--steps is '2.5'", "8 works"),
        (["--steps", "51"], "--steps is 51", "8 works"),
        (["--seed", "-1"], "--seed is -1", "0 works"),
        (["--sequence-length", "16"], "--sequence-length is 16", "4096 works"),
        (["--sequence-length", "4100"], "--sequence-length is 4100", "4112 works"),
        (["--sequence-length", "1000000000000"], "is 1000000000000", "4096 works"),
        (["--ranks", "7", "--sequence-length", "65535"], "is 65535", "65534 works"),
        (["--sequence-length", "4104", "--layout", "zigzag"], "Zigzag(8)", "4112 works"),
        (["--layout", "zigzig"], "--layout is 'zigzig'", "zigzag works"),
        (["--layout", "zigzag,"], "--layout is ''", "zigzag works"),
        (["--strategy", "rings"], "--strategy is 'rings'", "ring works"),
        (["--mask", "window"], "--mask is 'window'", "window:512 works"),
        (["--kernel", "splosh"], "--kernel is 'splosh'", "auto works"),
        (["--out", "/dev/null/here"], "--out is '/dev/null/here'", ". works"),
    ],
)
def test_a_bad_value_gets_one_line_with_a_value_that_works(
    capsys, monkeypatch, tmp_path, arguments, given, works
):
    monkeypatch.chdir(tmp_path)
    status, out, err = run(capsys, "demo", *arguments)
    assert (status, out) == (2, "")
    assert not list(tmp_path.iterdir())
    assert err.startswith("plait demo: ")
    assert err.count("\n") == 1, err
    assert given in err
    assert works in err


def test_the_length_that_an_error_names_works(capsys, monkeypatch, tmp_path):
    fake_train(monkeypatch)
    at = ["demo", "--ranks", "3", "--steps", "1", "--out", str(tmp_path)]
    _, _, err = run(capsys, *at, "--sequence-length", "1000")
    assert "Contiguous(3) needs a multiple of 3: 1002 works" in err
    assert run(capsys, *at, "--sequence-length", "1002")[0] == 0


def test_more_steps_than_there_is_text(capsys, monkeypatch, tmp_path):
    (tmp_path / "a.py").write_bytes(b"x" * 700)
    monkeypatch.setattr(text, "standard_library", lambda: tmp_path)
    status, _, err = run(capsys, *SMALL, "--steps", "5")
    assert status == 2
    assert "--steps is 5; the standard library fills 3 rows of 256 tokens: 3 works" in err


@pytest.mark.parametrize("arguments", [[], ["dmo"], ["demo", "--rank-count", "8"]])
def test_a_bad_command_gets_one_line(capsys, arguments):
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("plait")
    assert err.count("\n") == 1, err


def test_more_ranks_than_devices(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(jax, "devices", lambda backend: [object()] * 4)
    status, _, err = run(capsys, "demo", "--ranks", "8", "--out", str(tmp_path))
    assert status == 2
    assert "--ranks is 8" in err
    assert "4 works" in err


def test_missing_packages_name_the_extra(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "flax", None)
    monkeypatch.setitem(sys.modules, "rich", None)
    status, _, err = run(capsys, "demo")
    assert status == 2
    assert err == "plait demo: flax and rich are not installed: pip install 'plait[demo]'\n"


def test_trains_and_agrees(capsys, tmp_path):
    if jax.device_count() < 2:
        pytest.skip("needs 2 devices")
    options = ["--layout", "zigzag", "--mask", "window:100", "--out", str(tmp_path)]
    status, out, err = run(capsys, *SMALL, *options)
    assert (status, err) == (0, "")
    for expected in (
        "one device",
        "zigzag, all_gather",
        "zigzag, ring",
        "padding",
        "share this machine's cores",
    ):
        assert expected in out
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")

    numbers = json.loads((tmp_path / "demo.json").read_text())
    assert list(numbers["runs"]) == ["zigzag, all_gather", "zigzag, ring"]
    assert numbers["mask"] == "SlidingWindow(left=100, right=0)"
    assert 0 <= numbers["largest_relative_difference"] <= 1e-5
    losses = numbers["one_device"]["losses"]
    assert len(losses) == 3
    assert losses[0] == pytest.approx(math.log(256), abs=0.1)
    assert losses[-1] < losses[0]
    packed = numbers["text"]
    assert packed["tokens"] + packed["padding"] == 3 * 256
    for name, one in numbers["runs"].items():
        np.testing.assert_allclose(one["losses"], losses, rtol=1e-5, err_msg=name)
        np.testing.assert_allclose(
            one["gradient_norms"], numbers["one_device"]["gradient_norms"], rtol=1e-5, err_msg=name
        )
        assert np.shape(one["visible_pairs"]) == (3, 2)
        assert np.shape(one["attention_alone_seconds"]) == (3, 2)
        assert one["busiest_over_mean"] >= 1
        assert len(one["blocks_computed_by_rank"]) == len(one["blocks_skipped_by_rank"]) == 2
    assert numbers["runs"]["zigzag, ring"]["layout"] == "zigzag"
    assert numbers["runs"]["zigzag, ring"]["strategy"] == "ring"


@pytest.mark.parametrize("factor", [1.00002, float("nan")])
def test_runs_that_disagree_exit_with_1(capsys, monkeypatch, tmp_path, factor):
    fake_train(monkeypatch, factor)
    status, out, _ = run(capsys, *SMALL, "--layout", "contiguous,zigzag", "--out", str(tmp_path))
    assert status == 1
    assert "do not agree" in out


def test_layouts_may_be_repeated_and_the_picture_named(capsys, monkeypatch, tmp_path):
    fake_train(monkeypatch)
    path = tmp_path / "new" / "picture.svg"
    layouts = ["--layout", "half-swap", "--layout", "contiguous,half-swap", "--strategy", "ring"]
    status, _, _ = run(capsys, *SMALL, *layouts, "--out", str(path))
    assert status == 0
    assert "<svg" in path.read_text()
    numbers = json.loads((tmp_path / "new" / "picture.json").read_text())
    assert list(numbers["runs"]) == ["half-swap", "contiguous"]
    by_layout = [np.sum(one["visible_pairs"], axis=1) for one in numbers["runs"].values()]
    np.testing.assert_array_equal(*by_layout)


def test_busiest_over_mean_takes_the_busiest_of_each_step():
    pairs = np.array([[3, 1], [1, 3]])
    alone = np.array([[0.3, 0.1], [0.5, 0.2]])
    one = Measured(train.Run([], [], []), 0.0, pairs, pairs[0], 4, alone)
    assert one.busiest_over_mean == pytest.approx(6 / 4)
    assert one.alone_busiest == pytest.approx((0.3 + 0.2) / 2)
    assert one.alone_mean == pytest.approx(1.1 / 4)


def test_the_first_step_is_left_out_of_the_time():
    assert train.Run([], [], [9.0, 1.0, 2.0, 4.0]).seconds_a_step == 2.0
    assert train.Run([], [], [9.0]).seconds_a_step == 9.0


def test_each_rank_is_timed():
    ids = np.ones((2, 128), np.int32)
    seconds = time_ranks(Zigzag(4), ids, jax.devices()[0], Causal())
    assert seconds.shape == (2, 4)
    assert (seconds > 0).all()


@pytest.mark.parametrize("ranks", [2, 16])
@pytest.mark.parametrize("lengths", [[256, 0], [1, 100, 30, 125]])
def test_a_picture_is_drawn(tmp_path, ranks, lengths):
    ids = np.repeat([*range(1, len(lengths)), 0], lengths).astype(np.int32)
    layouts = {kind.kind: kind(ranks) for kind in (Contiguous, Zigzag, HalfSwap, Striped)}
    picture.draw(layouts, ids, Causal(), tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 10_000
    assert len({tuple(color) for color in picture.rank_colors(ranks)}) == ranks
