import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import on_hardware
import peers

SCRIPT = pathlib.Path(on_hardware.__file__)
SOURCE = SCRIPT.parents[1] / "src"


def start(*arguments, devices=8):
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "PYTHONPATH": os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)


@pytest.mark.slow
def test_a_tiny_run_writes_every_row_and_a_trace(tmp_path):
    out = tmp_path / "results.json"
    tiny = ("--tokens", 32, "--repeats", 2, "--calls", 1, "--tensors", "tokens", "latent")
    run = start("--out", out, *tiny)
    assert run.returncode == 0, run.stdout + run.stderr[-3000:]
    results = json.loads(out.read_text())
    assert results["machine"]["devices"] == 8
    assert results["settings"] == {"tokens": 32, "repeats": 2, "calls": 1}
    forms = ["copy", *peers.PEERS, "plait"]
    gathers = ["copy", "none", *peers.PEERS, "plait"]
    wanted = [
        *[("tokens", operation, form) for operation in ("reorder", "restore") for form in forms],
        *[("tokens", "gather", form) for form in gathers],
        *[("latent", operation, form) for operation in ("reorder", "restore") for form in forms],
        *[("latent", way, form) for way in ("gather", "gather, backward") for form in gathers],
    ]
    assert [(r["tensor"], r["operation"], r["form"]) for r in results["rows"]] == wanted
    for row in results["rows"]:
        low, high = row["quartile_seconds"]
        assert 0 < row["least_seconds"] <= low <= row["median_seconds"] <= high, row
        if row["form"] == "copy":
            assert row["ratio_to_copy"] == 1
    assert len(list((tmp_path / "results.traces" / "latent").rglob("*.xplane.pb"))) == 1
    assert run.stdout == on_hardware.table(results["rows"]) + "\n"


def test_a_length_that_does_not_divide_is_refused(tmp_path):
    run = start("--out", tmp_path / "results.json", "--tokens", 100)
    assert run.returncode == 2
    assert "--tokens is 100" in run.stderr
    assert "96 works" in run.stderr


def test_a_wrong_result_is_no_time(mesh_of, monkeypatch, tmp_path):
    """A form that is a permutation, and not the right one, is named and not timed."""
    monkeypatch.setitem(peers.PEERS, "strided", lambda x, ranks, axis, back: jnp.flip(x, axis))
    arguments = on_hardware.parse(
        ["--out", str(tmp_path / "r.json"), "--tokens", "16", "--repeats", "2", "--no-trace"]
    )
    mesh = mesh_of(4)
    with jax.set_mesh(mesh):
        rows = on_hardware.measure("tokens", mesh, arguments)
    wrong = {(r["operation"], r["form"]): r["error"] for r in rows if "error" in r}
    assert set(wrong) == {(operation, "strided") for operation in ("reorder", "restore", "gather")}
    assert all("is not what the oracle says" in error for error in wrong.values())
    assert not [r for r in rows if "error" in r and "median_seconds" in r]
    assert "oracle" in on_hardware.table(rows)


def test_a_wrong_shard_is_seen(mesh_of):
    mesh = mesh_of(2)
    for case in on_hardware.cases(on_hardware.TENSORS["latent"], 8, mesh):
        with jax.set_mesh(mesh):
            on_hardware.check(case)
            wanted = np.array(case.wanted)
            wanted[0, -1, 0] += 1
            with pytest.raises(on_hardware.WrongResultError, match=case.operation):
                on_hardware.check(case._replace(wanted=wanted))
