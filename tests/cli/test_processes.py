import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import jax
import pytest

import one_process
from plait.cli import main, processes
from plait.cli.arguments import UserError
from sweeps import slow

WORKER = [sys.executable, str(pathlib.Path(one_process.__file__))]
HEARTBEAT = 10


def script(code):
    """A program for `on_loopback` in which `me` is the process's id."""
    return [sys.executable, "-c", f"import os, sys, time; me = int(sys.argv[-1]); {code}"]


def test_the_output_of_process_0_is_forwarded(capfd):
    code = "print('[Gloo] Rank 0'); print('of', me, os.environ['JAX_NUM_CPU_DEVICES'], flush=True)"
    assert processes.on_loopback("plait demo", script(code), 3, devices_each=4) == 0
    assert capfd.readouterr() == ("of 0 4\n", "")


@pytest.mark.parametrize(
    ("fault", "count", "sentence"),
    [
        ("os.kill(os.getpid(), 9)", 2, "process 1 of 2 was ended by SIGKILL; the other was ended"),
        ("os.kill(os.getpid(), 15)", 4, "1 of 4 was ended by SIGTERM; the other 3 were ended"),
        ("sys.exit('why')", 2, "process 1 of 2 ended with exit status 1; the other was ended"),
    ],
)
def test_one_process_that_ends_ends_all(capfd, fault, count, sentence):
    start = time.perf_counter()
    code = f"time.sleep(1); me == 1 and {fault}; time.sleep(60)"
    status = processes.on_loopback("plait demo", script(code), count)
    assert time.perf_counter() - start < 20
    assert status == processes.ENDED_EARLY
    err = capfd.readouterr().err
    assert f"{sentence} with it" in err
    assert err.splitlines()[-1].startswith("plait demo: process 1 of")
    assert ("why" in err) == ("why" in fault)


@pytest.mark.parametrize("status", [1, 2])
def test_process_0_may_say_how_the_command_ends(capfd, status):
    code = f"me == 0 and print('why', file=sys.stderr); sys.exit(me == 0 and {status})"
    assert processes.on_loopback("plait demo", script(code), 2) == status
    assert capfd.readouterr().err == "why\n"


@pytest.mark.parametrize(
    ("count", "ranks", "works"), [(3, 8, 2), (7, 8, 8), (32, 8, 8), (4, 6, 3), (2, 7, 1)]
)
def test_processes_that_do_not_divide_the_ranks(count, ranks, works):
    with pytest.raises(UserError, match=f"--processes is {count}; .* {ranks} ranks: {works} works"):
        processes.share("plait demo", count, ranks)
    assert processes.share("plait demo", works, ranks) == ranks // works


@pytest.mark.parametrize(
    ("arguments", "given", "works"),
    [
        (["--processes", "0"], "--processes is 0", "2 works"),
        (["--processes", "3"], "--processes is 3", "2 works"),
        (["--processes", "2", "--sequence-length", "4100"], "is 4100", "4112 works"),
        (["--processes", "2", "--out", "/dev/null/here"], "--out is", ". works"),
        (["--coordinator", "here"], "--coordinator is 'here'", "127.0.0.1:8476 works"),
        (["--coordinator", "here:0"], "--coordinator is 'here:0'", "127.0.0.1:8476 works"),
        (["--process-id", "1"], "--process-id is 1", "--coordinator 127.0.0.1:8476 works"),
        (["--distributed", "--processes", "2", "--process-id", "2"], "is 2 of", "1 works"),
    ],
)
def test_a_bad_value_gets_one_line_with_a_value_that_works(
    capsys, monkeypatch, tmp_path, arguments, given, works
):
    monkeypatch.chdir(tmp_path)
    assert main(["demo", *arguments]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert not list(tmp_path.iterdir())
    assert err.startswith("plait demo: ")
    assert err.count("\n") == 1, err
    assert given in err
    assert works in err


def plait(*arguments):
    """A running `plait` command, which shares what is compiled with the others of this session."""
    cache = {
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    return subprocess.Popen(
        [sys.executable, "-m", "plait.cli", *arguments],
        env={**os.environ, **cache},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_no_cluster():
    command = plait("demo", "--distributed")
    out, err = command.communicate(timeout=120)
    assert (command.returncode, out) == (2, "")
    assert err.splitlines()[-1].startswith("plait demo: jax.distributed.initialize() found no")
    assert err.endswith("--coordinator HOST:PORT --processes N --process-id I works\n")


SMALL = [
    *("demo", "--processes", "2", "--ranks", "2", "--sequence-length", "128"),
    *("--steps", "2", "--layout", "zigzag", "--strategy", "ring"),
]


@pytest.mark.slow
def test_the_demo_agrees(tmp_path):
    command = plait(*SMALL, "--out", str(tmp_path))
    out, err = command.communicate(timeout=240)
    assert command.returncode == 0, out + err
    assert "Devices: 2 of 2 processes, cpu." in out
    assert "Gloo" not in out
    assert out.count("Losses and gradient norms") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"demo.png", "demo.json"}


def test_the_demo_ends_when_a_process_is_killed(tmp_path):
    command = plait(*SMALL, "--out", str(tmp_path))
    for line in command.stdout:
        if line.startswith("one device"):
            break
    found = subprocess.run(
        ["pgrep", "-P", str(command.pid), "-f", "process-id 1$"], capture_output=True, text=True
    )
    start = time.perf_counter()
    os.kill(int(found.stdout), signal.SIGKILL)
    _, err = command.communicate(timeout=20)
    assert time.perf_counter() - start < 20
    assert command.returncode == processes.ENDED_EARLY
    sentence = "process 1 of 2 was ended by SIGKILL; the other was ended with it"
    assert err.splitlines()[-1] == f"plait demo: {sentence}"
    assert not list(tmp_path.iterdir())


def in_slurm(*arguments):
    """Two running processes, started as by srun, that nobody watches."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    step = {
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_NODELIST": "127.0.0.1",
        "SLURM_NTASKS": "2",
        "JAX_COORDINATOR_PORT": str(port),
        "JAX_NUM_CPU_DEVICES": "1",
    }
    return [
        subprocess.Popen(
            [*WORKER, "loop", "--heartbeat-seconds", str(HEARTBEAT), *arguments],
            env={**os.environ, **step, "SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]


@pytest.mark.parametrize(
    ("fault", "faulty"), [slow("SIGKILL", 1), slow("SIGSTOP", 1), ("error", 0)]
)
def test_processes_that_nobody_watches_end_within_the_heartbeat(fault, faulty):
    workers = in_slurm("--fault", fault, "--faulty", str(faulty))
    try:
        # The rest is for the start; jax's own limits are 100 seconds and more.
        _, err = workers[1 - faulty].communicate(timeout=HEARTBEAT + 60)
        status = workers[1 - faulty].returncode
        if status == -signal.SIGABRT:
            assert "the JAX distributed service detected fatal errors" in err
            assert faulty == 0 or "stopped sending heartbeats" in err
        else:  # it may come to know from the broken connection before jax ends it
            assert fault != "SIGSTOP"
            assert status == processes.ENDED_EARLY, err
            assert "Gloo" in err
        if fault == "error":
            _, err = workers[faulty].communicate(timeout=20)
            assert workers[faulty].returncode == processes.ENDED_EARLY
            assert "RuntimeError: a fault of this process alone" in err
            assert err.splitlines()[-1] == (
                f"one process: process 0 of 2 ends with RuntimeError; the others end within "
                f"{HEARTBEAT} seconds"
            )
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
