"""`plait bench sparse` on a small slice, and its table by hand."""

import json

import pytest

import bench_sparse
from plait.cli import main


def results(**changed):
    figures = {
        "temp_bytes": 64 * 2**20, "estimated_seconds": 0.0182, "collectives": "1 all-reduce of 3 MB"
    }  # fmt: skip
    blocks = {
        "Contiguous": {"most": 1024, "mean": 520.0, "of": 2048},
        "Zigzag": {"most": 520, "mean": 520.0, "of": 2048},
    }
    one = {"tokens": 131072, "blocks": blocks, "select": figures, "attention": figures}
    layer = {"temp_bytes": 3 * 2**29, "argument_bytes": 2**29, "output_bytes": 2**28}
    return {
        "topology": "v5p:4x4x8", "ranks": 128, "versions": {"jax": "1", "libtpu": "2"},
        "lengths": [one], "layer": layer, **changed,
    }  # fmt: skip


def test_the_table_by_hand():
    text = bench_sparse.table(results())
    row = "| 128K | 1,024 / 520 = 1.97 | 520 / 520 = 1.00 | 64 | 18.2 | 64 | 18.2 |"
    assert row in text
    assert "1.50 GiB of temporary memory beside 0.75 GiB" in text
    assert "2.25 GiB of the 95 GiB" in text
    assert "whole layer" not in bench_sparse.table(results(layer=None))


def test_the_command(tmp_path, capsys):
    pytest.importorskip("libtpu", reason="libtpu: pip install 'plait[audit]' on x86-64 Linux")
    out = tmp_path / "sparse.json"
    flags = ["--topology", "v5p:2x2x1", "--ranks", "4", "--tokens", "1024", "--no-layer"]
    assert main(["bench", "sparse", *flags, "--json", str(out)]) == 0
    (one,) = json.loads(out.read_text())["lengths"]
    assert one["blocks"]["Zigzag"]["most"] == one["blocks"]["Zigzag"]["mean"]
    assert one["select"]["temp_bytes"] > 0
    assert "| 1K |" in capsys.readouterr().out
    assert main(["bench", "sparse", "--from", str(out)]) == 0
    assert main(["bench", "sparse", "--tokens", "1000"]) == 2
    assert "1000" in capsys.readouterr().err
