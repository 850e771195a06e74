import json
import pathlib
import sys

import numpy as np
import pytest

import one_process
from plait.cli.processes import on_loopback
from sweeps import slow


@pytest.mark.parametrize(("count", "also"), [slow(2, ["--moves"]), (4, [])])
def test_real_processes_agree_with_one(capsys, count, also):
    program = [sys.executable, str(pathlib.Path(one_process.__file__)), "step", *also]
    status = on_loopback("test", [*program, "--processes", str(count)], count, 8 // count)
    out, err = capsys.readouterr()
    assert status == 0, err[-3000:]
    results = json.loads(out.splitlines()[-1])
    alone = one_process.training_step(one_process.mesh_of(2, 2, 2))
    np.testing.assert_allclose(results["2x2x2"], alone, rtol=1e-6)
    if also:
        # The mean over all tokens knows no mesh.
        np.testing.assert_allclose(results["8"], alone, rtol=1e-6)
