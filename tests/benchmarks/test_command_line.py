"""What `plait bench` refuses, before it measures anything."""

import json

import pytest

import bench_reorder
import bench_step
import peers
from plait.cli import main


@pytest.fixture(autouse=True)
def _no_work(monkeypatch):
    def work(*_, **__):
        raise AssertionError("this is the slow part")

    monkeypatch.setattr(bench_step, "results_of", work)
    monkeypatch.setattr(bench_reorder, "compile_case", work)
    monkeypatch.setattr(bench_reorder, "time_cases", work)
    monkeypatch.setattr(peers, "check", work)


@pytest.mark.parametrize(
    ("arguments", "given", "works"),
    [
        (["step", "--topology", "cpu:8", "--ranks", "8"], "--topology is 'cpu:8'", "v5p:4x4x8"),
        (["step", "--topology", "v5q:4x4x8"], "'v5q:4x4x8' is unknown", "v5p:4x4x8"),
        (["step", "--from", "nofile.json"], "'nofile.json', no such file", "--json nofile.json"),
        (["reorder", "--from", "nofile.json"], "'nofile.json', no such file", "--json nofile.json"),
        (["step", "--from", "text.json"], "'text.json', no JSON", "--json text.json"),
        (["reorder", "--from", "list.json"], "'list.json', of something else", "--json list.json"),
        (["step", "--json", "nodir/x.json"], "--json is 'nodir/x.json'", "results.json works"),
        (["reorder", "--json", "nodir/x.json"], "--json is 'nodir/x.json'", "results.json works"),
        (["reorder", "--json", "."], "it is a folder", "results.json works"),
        (["reorder", "--timed", "--length", "100"], "--length is 100", "112 works"),
        (["reorder", "--timed", "--length", "0"], "--length is 0", "4096 works"),
        (["reorder", "--timed", "--repeats", "0"], "--repeats is 0", "9 works"),
        (["reorder", "--static", "--only", "zzz"], "--only is 'zzz'", "'sharded plait'"),
    ],
)
def test_a_bad_value_gets_one_line_with_a_value_that_works(
    capsys, monkeypatch, tmp_path, arguments, given, works
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.json").write_text("some text")
    (tmp_path / "list.json").write_text(json.dumps([1]))
    status, (out, err) = main(["bench", *arguments]), capsys.readouterr()
    assert (status, out) == (2, "")
    assert err.startswith("plait bench ")
    assert err.count("\n") == 1, err
    assert given in err
    assert works in err
    assert len([*tmp_path.iterdir()]) == 2
