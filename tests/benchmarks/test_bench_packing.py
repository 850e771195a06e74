import argparse
import json

import numpy as np
import pytest

import bench_packing
import pages
from errors import refused
from plait.cli.arguments import UserError


def run(*words):
    parser = argparse.ArgumentParser()
    bench_packing.add_arguments(parser)
    return bench_packing.run(parser.parse_args(words))


def test_the_distribution():
    """71% of documents up to 1K, 94% up to 4K, 98.7% up to 16K, 0.3% over 64K."""
    lengths = np.concatenate([bench_packing.document_lengths(2**21, seed) for seed in range(16)])
    for most, share in ((1024, 0.71), (4096, 0.94), (16384, 0.987), (65536, 0.997)):
        found = np.mean(lengths <= most)
        assert abs(found - share) < 0.1 * (1 - share) + 0.003, (most, found)
    for seed in range(3):
        lengths = bench_packing.document_lengths(65536, seed)
        assert lengths.sum() == 65536
        assert 1 <= lengths.min() <= lengths.max() <= 16384
        np.testing.assert_array_equal(lengths, bench_packing.document_lengths(65536, seed))


def test_one_document_by_hand(monkeypatch):
    """Of one document whose chunks are so many triangles, two ranks in order do 1/4 and 3/4."""
    monkeypatch.setattr(bench_packing, "document_lengths", lambda tokens, _: np.array([tokens]))
    figures = bench_packing.measure(2, 1600, seed=0)
    assert figures["contiguous"] == pytest.approx(1.5, rel=1e-3)
    assert figures["zigzag"] == 1.0
    assert figures["16"]["over_mean"] <= 1.0001
    assert figures["8"]["over_bound"] <= 1.0001
    assert figures["moved"] == 1600
    # The first rank holds both ends and needs the middle; the other needs the first quarter.
    assert figures["needed"]["zigzag"] == [1600, 800]


def test_the_command(capsys, monkeypatch, tmp_path):
    path = tmp_path / "results.json"
    page = tmp_path / "packing.md"
    page.write_text("a\n<!-- bench packing -->\nold\n<!-- end of bench packing -->\nb\n")
    monkeypatch.setattr(pages, "DOCS", tmp_path)
    assert run("--ranks", "2", "--tokens", "512", "--packs", "2", "--json", str(path)) == 0
    printed = capsys.readouterr().out
    assert "2 x 512" in printed
    assert len(json.loads(path.read_text())["cases"]["2 x 512"]) == 2
    assert run("--from", str(path), "--docs") == 0
    assert "old" not in page.read_text()
    assert printed.split("\n\n", 1)[1].strip() in page.read_text()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--tokens", "100"], ["--tokens is 100", "112 works"]),
        (["--ranks", "1"], ["--ranks is 1", "8 works"]),
        (["--packs", "0"], ["--packs is 0"]),
        (["--from", "/nowhere.json"], ["/nowhere.json"]),
    ],
)
def test_bad_arguments(words, expected):
    refused(lambda: run(*words), *expected, error=UserError)
