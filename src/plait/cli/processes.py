"""Several processes, each with devices of its own, that run one program together.

`joined` makes this process one of them, wherever it was started; `on_loopback` starts them all on
this machine. With either, when one process is gone the others end: at once under `on_loopback`, and
within `HEARTBEAT_SECONDS` where nobody watches over them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from plait.cli.arguments import UserError, integer

HEARTBEAT_SECONDS = 60
"""How long a process may be silent before jax ends all others; jax itself would wait for 100."""

SHUTDOWN_SECONDS = 3600
"""How long a process that is done waits for the others, as long as their hearts beat."""

ENDED_EARLY = 3
"""The exit status of a process that an error ended, and of a command that lost a process."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say how many processes there are and which of them this is."""
    group = parser.add_argument_group("several processes", "one program on one mesh of devices")
    group.add_argument(
        "--processes",
        type=integer("--processes", 1, 65_536, works=2),
        metavar="N",
        default=argparse.SUPPRESS,
        help="start N processes on this machine, with a share of the ranks each; with "
        "--distributed or --coordinator, how many there are in all",
    )
    group.add_argument(
        "--distributed",
        action="store_true",
        default=argparse.SUPPRESS,
        help="be one of the processes that SLURM, a TPU pod or Kubernetes started, as jax finds "
        "out, on the accelerators that there are",
    )
    group.add_argument(
        "--coordinator",
        type=_address,
        metavar="HOST:PORT",
        default=argparse.SUPPRESS,
        help="be one of several processes, with process 0 at this address",
    )
    group.add_argument(
        "--process-id",
        type=integer("--process-id", 0, 65_535, works=0),
        metavar="I",
        default=argparse.SUPPRESS,
        help="which of the processes this is, from 0",
    )


def _address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 65_536):
        raise argparse.ArgumentError(
            None,
            f"--coordinator is {text!r}; it needs to be HOST:PORT, the same in every process: "
            "127.0.0.1:8476 works on one machine",
        )
    return text


def joins(command: str, arguments: argparse.Namespace) -> bool:
    """Whether this process is to be one of several; UserError where the flags do not fit."""
    process_id = getattr(arguments, "process_id", None)
    count = getattr(arguments, "processes", None)
    if process_id is not None and count is not None and process_id >= count:
        raise UserError(
            f"{command}: --process-id is {process_id} of --processes {count}; ids count from 0: "
            f"{count - 1} works"
        )
    asked = hasattr(arguments, "distributed") or hasattr(arguments, "coordinator")
    if process_id is not None and not asked:
        raise UserError(
            f"{command}: --process-id is {process_id}, without the address of process 0: "
            "--coordinator 127.0.0.1:8476 works on one machine"
        )
    return asked


@contextlib.contextmanager
def joined(
    command: str,
    coordinator: str | None = None,
    processes: int | None = None,
    process_id: int | None = None,
    *,
    heartbeat_seconds: int = HEARTBEAT_SECONDS,
) -> Iterator[None]:
    """Run a block as one of several processes; what is None, jax finds out from the cluster.

    An error ends the whole Python process: a process that leaves in the usual way waits for the
    others to finish, and these wait for it in a collective.

    Args:
      command: what errors begin with.
      coordinator, processes, process_id: as in `jax.distributed.initialize`; where all three are
        given, nothing is found out, and the process has all devices that it sees.
      heartbeat_seconds: the others end when one was silent for so long.
    """
    given = (coordinator, processes, process_id)
    # That service takes SIGTERM for a request to save a checkpoint, and the process lives on.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            *given,
            cluster_detection_method=None if None in given else "deactivate",
            heartbeat_timeout_seconds=heartbeat_seconds,
            shutdown_timeout_seconds=SHUTDOWN_SECONDS,
        )
    except ValueError as error:
        raise UserError(
            f"{command}: jax.distributed.initialize() found no SLURM step, TPU pod, Kubernetes job "
            f"or Open MPI to tell this process its place ({str(error).rstrip('.')}): "
            "--coordinator HOST:PORT --processes N --process-id I works"
        ) from None
    try:
        yield
    except UserError as error:
        _leave(2, str(error))
    except BaseException as error:
        traceback.print_exception(error)
        _leave(
            ENDED_EARLY,
            f"{command}: process {jax.process_index()} of {jax.process_count()} ends with "
            f"{type(error).__name__}; the others end within {heartbeat_seconds} seconds",
        )


def _leave(status: int, message: str) -> None:
    print(message, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def on_mesh(tree: Any, sharding: NamedSharding) -> Any:
    """Global arrays of NumPy arrays that every process has, each making its own devices' shards."""
    return jax.tree.map(
        lambda x: jax.make_array_from_callback(np.shape(x), sharding, lambda index: x[index]), tree
    )


def check_same(command: str, what: str, data: bytes) -> None:
    """UserError, in every process, unless all have the same bytes.

    It is also where the processes wait for each other: on the CPU, Gloo connects them in the first
    collective, and for that they have to come to it within 30 seconds.
    """
    devices = jax.devices()
    mesh = jax.make_mesh((len(devices),), ("all",))
    by_device, replicated = NamedSharding(mesh, P("all")), NamedSharding(mesh, P())
    mine = np.full(len(devices), zlib.crc32(data), np.uint32)
    same = jax.jit(lambda x: x, out_shardings=replicated)(on_mesh(mine, by_device))
    theirs = np.asarray(same.addressable_data(0))
    if (theirs != theirs[0]).any():
        owner = mesh.devices[int(np.argmax(theirs != theirs[0]))].process_index
        raise UserError(
            f"{command}: {what} differs between process {mesh.devices[0].process_index} and "
            f"process {owner}; the same Python, jax and arguments in every process work"
        )


def share(command: str, processes: int, ranks: int) -> int:
    """How many of the ranks each of the processes holds; UserError where that does not go up."""
    if ranks % processes:
        divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
        works = min(divisors, key=lambda n: abs(n - processes))
        raise UserError(
            f"{command}: --processes is {processes}; it needs to divide the {ranks} ranks: "
            f"{works} works"
        )
    return ranks // processes


def on_loopback(command: str, program: Sequence[str], processes: int, devices_each: int = 1) -> int:
    """Run a program as several processes with CPU devices on this machine; its exit status.

    Every process gets the flags --coordinator and --process-id beside the program's own arguments.
    What process 0 prints is printed. The status is that of process 0, once all have ended; as soon
    as one of them ends with another status than 0, the others are killed, and one sentence says
    which it was: then the status is `ENDED_EARLY`.
    """
    address = f"127.0.0.1:{_free_port()}"
    encoding = sys.stdout.encoding or "utf-8"
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices_each),
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "JAX_COORDINATOR_BIND_ADDRESS": address,  # the default is every interface
        "PYTHONIOENCODING": encoding,
        "COLUMNS": str(shutil.get_terminal_size().columns),
    }
    ended: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
    with contextlib.ExitStack() as stack:
        errors, children, threads = [], [], []
        for process_id in range(processes):
            errors.append(stack.enter_context(tempfile.TemporaryFile()))
            child = subprocess.Popen(
                [*program, "--coordinator", address, "--process-id", str(process_id)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL if process_id else subprocess.PIPE,
                stderr=errors[-1],
                encoding=encoding,
                errors="replace",
            )
            stack.callback(child.wait)
            stack.callback(child.kill)
            children.append(child)
            # A thread a process, to know which ended first: another may follow within milliseconds.
            watch = threading.Thread(
                target=lambda i=process_id, child=child: ended.put((i, child.wait())), daemon=True
            )
            threads.append(watch)
        threads.append(threading.Thread(target=_forward, args=(children[0].stdout,), daemon=True))
        for thread in threads:
            thread.start()

        first, status = next((one for one in (ended.get() for _ in children) if one[1]), (0, 0))
        for child in children:
            child.kill()
        for thread in threads:
            thread.join()
        errors[first].seek(0)
        sys.stderr.write(errors[first].read().decode(encoding, "replace"))
        if not status or (first == 0 and status in (1, 2)):
            return status
        print(f"{command}: {_how_it_ended(first, processes, status)}", file=sys.stderr)
        return ENDED_EARLY


def _how_it_ended(process_id: int, processes: int, status: int) -> str:
    how = (
        f"was ended by {signal.Signals(-status).name}"
        if status < 0
        else f"ended with exit status {status}"
    )
    others = {1: "", 2: "; the other was ended with it"}.get(
        processes, f"; the other {processes - 1} were ended with it"
    )
    return f"process {process_id} of {processes} {how}{others}"


def _forward(lines: Any) -> None:
    for line in lines:
        # Gloo greets on standard output, once a rank.
        if not line.startswith("[Gloo] "):
            print(line, end="", flush=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
