import json
import os
import pathlib
import socket
import subprocess
import sys

import numpy as np

from two_processes import training_step


def test_two_real_processes_agree_with_one(mesh_of):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    here = pathlib.Path(__file__).parent
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "PYTHONPATH": os.pathsep.join([str(here), os.environ.get("PYTHONPATH", "")]),
    }
    workers = [
        subprocess.Popen(
            [sys.executable, here / "two_processes.py", str(port), str(process_id)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process_id in range(2)
    ]
    try:
        outputs = [worker.communicate(timeout=240) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for worker, (_, errors) in zip(workers, outputs, strict=True):
        assert worker.returncode == 0, errors[-3000:]
    first, second = (json.loads(out.splitlines()[-1]) for out, _ in outputs)
    assert first == second
    np.testing.assert_allclose(first, training_step(mesh_of(8)), rtol=1e-6)
