"""`plait bench`: the comparisons in benchmarks/, which a checkout has beside the package."""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import pathlib
import sys
from typing import Any

import plait
from plait.cli.arguments import UserError

# Name of the module in benchmarks/ -> what it compares. Each has `add_arguments` and `run`.
_BENCHMARKS = {
    "attention": "Strategies of attention at 128K: memory and communication, compiled for a TPU.",
    "reorder": "Moves between source order and zigzag: plait beside what the field runs.",
    "balance": "Time of the busiest rank: contiguous beside the layouts that balance.",
    "sparse": "DeepSeek sparse attention from 8K to 1M tokens: balance and memory.",
    "step": "One attention layer's step at 128K, and the share that the reorder takes of it.",
}


def add_command(commands: Any) -> None:
    """Add `bench` and its benchmarks to the command line."""
    parser = commands.add_parser(
        "bench",
        help="compare plait with other forms, side by side in one run",
        description="Run a comparison from benchmarks/ of a checkout of plait.",
    )
    benchmarks = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    folder = _folder()
    for name, summary in _BENCHMARKS.items():
        benchmark = benchmarks.add_parser(name, help=summary, description=summary)
        if folder is None:
            benchmark.set_defaults(run=_refuse)
            benchmark.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
            continue
        module = _module(folder, name)
        module.add_arguments(benchmark)
        benchmark.set_defaults(run=functools.partial(_run, module))


def _run(module: Any, arguments: argparse.Namespace) -> int:
    # Compilers that need no hardware are asked, and the CPU is eight devices where timed.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    return module.run(arguments)


def _folder() -> pathlib.Path | None:
    """benchmarks/ beside the package's source, or in the current directory."""
    for root in (pathlib.Path(plait.__file__).parents[2], pathlib.Path.cwd()):
        if (root / "benchmarks" / "peers.py").exists():
            return root / "benchmarks"
    return None


def _module(folder: pathlib.Path, name: str) -> Any:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return importlib.import_module(f"bench_{name}")


def _refuse(_: argparse.Namespace) -> int:
    raise UserError(
        "plait bench: benchmarks/ is not installed with plait; run it in a checkout of the "
        "repository"
    )
