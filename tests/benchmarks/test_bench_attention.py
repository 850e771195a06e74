import json

import pytest

import bench_attention
from plait.audit import topology
from plait.cli import main

TINY = ["bench", "attention", "--topology", "cpu:4", "--ranks", "4", "--tokens", "64"]


def test_what_a_ring_sends_by_hand(monkeypatch):
    """Shards of 16 tokens and 2 kv heads: k and v 5 times, their gradients 4 times.

    Three times each way, the first permutes of both passes being the same to the compiler, which
    on a CPU moves bfloat16 as float32.
    """
    monkeypatch.setitem(bench_attention.MODELS, "tiny", (4, 2, 8, 8))
    found = bench_attention.measure("tiny", "ring", "blockwise", topology("cpu:4"), 64, 4)
    shard = 16 * 2 * 8 * 2
    assert found["shard_bytes"] == 2 * shard
    assert found["sent"] == {"collective-permute": [18, 18 * 2 * shard]}


@pytest.mark.slow
def test_the_command(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(bench_attention, "MODELS", {"tiny": (4, 2, 8, 8), "odd": (6, 2, 8, 8)})
    path = tmp_path / "results.json"
    assert main([*TINY, "--kernel", "blockwise", "--json", str(path)]) == 0
    assert "| tiny | `ulysses` |" in capsys.readouterr().out
    results = json.loads(path.read_text())
    assert list(results["models"]["tiny"]) == ["all_gather", "ring", "ulysses"]
    assert list(results["models"]["odd"]) == ["all_gather", "ring"]
    assert main(["bench", "attention", "--from", str(path)]) == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tokens", "63"], ("63", "multiple of 8")),
        (["--topology", "v9p"], ("v9p",)),
        (["--json", "/nowhere/x.json"], ("/nowhere/x.json",)),
    ],
)
def test_bad_arguments(arguments, words, capsys):
    assert main([*TINY, *arguments]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert all(word in message for word in words), message
