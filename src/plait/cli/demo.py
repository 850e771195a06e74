"""`plait demo`: train on real text, the sequence sharded over devices in several layouts.

All runs take the same steps from the same weights; what differs is which rank holds which token.
The devices are virtual ones on the CPU, or those of several processes, which then all run this
module; process 0 alone runs the reference, prints and writes.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from plait import Layout, count_blocks
from plait.cli import processes, text
from plait.cli.arguments import LAYOUTS, UserError, integer, mask, names, require_extra
from plait.cli.devices import start_on_cpu

if TYPE_CHECKING:
    from rich.console import Console

    from plait.cli.model import Attend
    from plait.cli.train import Run

COMMAND = "plait demo"
DEFAULT_RANKS = 8
DEFAULT_LAYOUTS = ("contiguous", "zigzag", "half-swap")
STRATEGIES = ("all_gather", "ring", "auto")
DEFAULT_STRATEGIES = ("all_gather", "ring")
KERNELS = ("auto", "blockwise")
REFERENCE = "one device"
SHORTEST, LONGEST = 128, 65_536
MOST_STEPS = 50
"""Some 100 steps on, training has amplified rounding errors beyond the tolerance."""

PICTURES = (".png", ".svg")
TOLERANCE = 1e-5
"""Of losses and gradient norms, relative; float32 sums in another order differ by about 1e-7."""

ROWS_TIMED_ALONE = 8


@dataclasses.dataclass(frozen=True)
class Measured:
    """One layout: what its run measured, and the work that its ranks do.

    Attributes:
      run: losses, gradient norms and seconds, by step.
      difference: the largest relative difference of a loss or gradient norm from the reference.
      pairs: visible pairs, int64 [steps, ranks].
      blocks: blocks of scores that each rank computes in all steps, int64 [ranks].
      blocks_of_rank: how many there are for one rank, skipped ones included.
      alone: seconds of each rank's attention, timed alone, float64 [rows, ranks].
    """

    run: Run
    difference: float
    pairs: np.ndarray
    blocks: np.ndarray
    blocks_of_rank: int
    alone: np.ndarray

    @property
    def busiest_over_mean(self) -> float:
        """The busiest rank of each step over the mean rank, both summed over the steps.

        Every step waits for its own busiest rank; a sum over steps before the maximum would let
        ranks make up for a busy step in another.
        """
        return float(self.pairs.max(axis=1).sum() / self.pairs.mean(axis=1).sum())

    @property
    def alone_busiest(self) -> float:
        """Mean seconds of the rank that has most pairs, told by count and not by the noisy time."""
        busiest = self.pairs[: len(self.alone)].argmax(axis=1)[:, None]
        return float(np.take_along_axis(self.alone, busiest, axis=1).mean())

    @property
    def alone_mean(self) -> float:
        return float(self.alone.mean())


def add_command(commands: Any) -> None:
    """Add `demo` to the subparsers of `plait`."""
    parser = commands.add_parser(
        "demo",
        help="train on real text over virtual CPU devices and show what balance buys",
        description="Trains a small transformer on the source of Python's standard library, the "
        "sequence sharded over virtual CPU devices: the same steps on one device and in each "
        "layout. Prints what each rank does and that losses and gradients agree, and saves a "
        "picture and the numbers as JSON. About two minutes; nothing is downloaded.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--ranks",
        type=integer("--ranks", 2, 16, works=DEFAULT_RANKS),
        help="virtual CPU devices that the sequence is sharded over, 2 to 16 (default: "
        f"{DEFAULT_RANKS}; with --distributed or --coordinator all devices of all processes)",
        default=argparse.SUPPRESS,
    )
    parser.add_argument(
        "--sequence-length",
        type=integer("--sequence-length", SHORTEST, LONGEST, works=4096),
        default=4096,
        metavar="TOKENS",
        help="bytes in a row; every layout shown needs to divide it over the ranks",
    )
    parser.add_argument(
        "--steps",
        type=integer("--steps", 1, MOST_STEPS, works=8),
        default=8,
        help=f"training steps of each run, one row a step, at most {MOST_STEPS}",
    )
    parser.add_argument(
        "--layout",
        action="append",
        type=names("--layout", LAYOUTS, works="zigzag"),
        metavar="NAME[,NAME]",
        help=f"layouts to run beside the reference on one device: {', '.join(LAYOUTS)}; "
        f"may be repeated (default: {','.join(DEFAULT_LAYOUTS)})",
        default=argparse.SUPPRESS,
    )
    parser.add_argument(
        "--strategy",
        action="append",
        type=names("--strategy", STRATEGIES, works="ring"),
        metavar="NAME[,NAME]",
        help=f"strategies of attention to run each layout with: {', '.join(STRATEGIES)}; may be "
        f"repeated (default: {','.join(DEFAULT_STRATEGIES)})",
        default=argparse.SUPPRESS,
    )
    parser.add_argument(
        "--mask",
        type=mask("--mask"),
        default="causal",
        metavar="NAME[:TOKENS]",
        help="causal, window:TOKENS, chunked:TOKENS (within causal) or prefix:TOKENS",
    )
    parser.add_argument(
        "--kernel",
        type=names("--kernel", KERNELS, works="auto"),
        default="auto",
        metavar="NAME",
        help=f"the kernel of attention: {' or '.join(KERNELS)}",
    )
    parser.add_argument(
        "--seed",
        type=integer("--seed", 0, 2**31 - 1, works=0),
        default=0,
        help="of the order of the files and of the weights",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("plait-demo"),
        metavar="PATH",
        help="folder for demo.png and demo.json, or the picture's own name, *.png or *.svg",
    )
    processes.add_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; 1 where the runs do not agree, and 0 otherwise."""
    require_extra(COMMAND, "demo", ("flax", "matplotlib", "optax", "rich"))
    if processes.joins(COMMAND, arguments):
        place = (getattr(arguments, x, None) for x in ("coordinator", "processes", "process_id"))
        with processes.joined(COMMAND, *place):
            # A TPU multiplies float32 in bfloat16 otherwise: no runs would agree to TOLERANCE.
            jax.config.update("jax_default_matmul_precision", "highest")
            arguments.ranks = _all_devices(getattr(arguments, "ranks", None))
            layouts, packed = _checked(arguments)
            processes.check_same(COMMAND, "the text", packed.tokens.tobytes())
            if jax.process_index() == 0:
                return _lead(arguments, layouts, packed, jax.devices())
            return _follow(arguments, layouts, packed, jax.devices())

    arguments.ranks = getattr(arguments, "ranks", DEFAULT_RANKS)
    layouts, packed = _checked(arguments)
    if hasattr(arguments, "processes"):
        each = processes.share(COMMAND, arguments.processes, arguments.ranks)
        _picture_path(arguments.out)
        program = [sys.executable, "-m", "plait.cli", *arguments.argv]
        return processes.on_loopback(COMMAND, program, arguments.processes, each)
    return _lead(arguments, layouts, packed, _cpu_devices(arguments.ranks))


def _checked(arguments: argparse.Namespace) -> tuple[dict[str, Layout], text.Packed]:
    """Layouts by name, and the text; UserError where the arguments do not fit each other."""
    given = getattr(arguments, "layout", [DEFAULT_LAYOUTS])
    layouts: dict[str, Layout] = {
        name: LAYOUTS[name](arguments.ranks) for name in itertools.chain(*given)
    }
    _check_length(arguments.sequence_length, layouts)
    return layouts, _packed(arguments.sequence_length, arguments.steps, arguments.seed)


def _lead(
    arguments: argparse.Namespace,
    layouts: dict[str, Layout],
    packed: text.Packed,
    devices: list[Any],
) -> int:
    """All runs, and what comes of them: the part of one process, or of process 0."""
    picture_path = _picture_path(arguments.out)

    # Imported here, so that the checks above work without the demo's extra packages.
    from rich.console import Console

    from plait.cli import picture

    console = Console()
    if jax.process_count() > 1:
        console.print(
            f"Devices: {len(devices)} of {jax.process_count()} processes, {devices[0].platform}.",
            highlight=False,
        )
    _print_text(console, packed)
    reference, measured = _measure(console, packed, layouts, arguments, devices)
    _print_results(console, packed, reference, measured, devices[0].platform)

    picture.draw(layouts, packed.segment_ids[0], arguments.mask, picture_path)
    numbers_path = picture_path.with_suffix(".json")
    numbers = _numbers(arguments, packed, reference, layouts, measured)
    numbers_path.write_text(json.dumps(numbers, indent=1) + "\n")
    console.print(f"Picture: {picture_path}\nNumbers: {numbers_path}", soft_wrap=True)

    largest = numbers["largest_relative_difference"]
    # Written so that NaN fails.
    if not largest <= TOLERANCE:
        console.print(
            f"[bold red]The runs do not agree:[/] losses or gradient norms differ by {largest:.1e} "
            f"of the one-device run's; at most {TOLERANCE:.0e} is allowed."
        )
        return 1
    return 0


def _follow(
    arguments: argparse.Namespace,
    layouts: dict[str, Layout],
    packed: text.Packed,
    devices: list[Any],
) -> int:
    """The part of the other processes: the same runs, but for the reference on one device."""
    from plait.cli.train import initial_weights, train

    weights = initial_weights(arguments.seed)
    for _, layout, attend in _runs(arguments, layouts):
        train(layout, packed.tokens, packed.segment_ids, weights, attend, devices=devices)
    return 0


def _runs(
    arguments: argparse.Namespace, layouts: dict[str, Layout]
) -> list[tuple[str, Layout, Attend]]:
    """Every layout with every strategy, named, in the order that all processes run them."""
    from plait.cli.model import Attend

    given = getattr(arguments, "strategy", [DEFAULT_STRATEGIES])
    strategies = list(dict.fromkeys(itertools.chain(*given)))
    (kernel,) = arguments.kernel if isinstance(arguments.kernel, list) else [arguments.kernel]
    return [
        (
            name if len(strategies) == 1 else f"{name}, {strategy}",
            layout,
            Attend(strategy, arguments.mask, kernel),
        )
        for name, layout in layouts.items()
        for strategy in strategies
    ]


def _measure(
    console: Console,
    packed: text.Packed,
    layouts: dict[str, Layout],
    arguments: argparse.Namespace,
    devices: list[Any],
) -> tuple[Run, dict[str, Measured]]:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from plait.cli.alone import time_ranks
    from plait.cli.model import Attend
    from plait.cli.train import initial_weights, train

    ids = packed.segment_ids
    steps, length = ids.shape
    weights = initial_weights(arguments.seed)
    mask = arguments.mask
    own = [device for device in devices if device.process_index == jax.process_index()]
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    # Bars are drawn over and over; what is not a terminal gets a line when a run is done.
    is_live = console.is_terminal
    with Progress(*columns, console=console, disable=not is_live) as progress:

        def one_run(name: str, layout: Layout | None, attend: Attend) -> Run:
            task = progress.add_task(name, total=steps + 1)
            result = train(
                layout,
                packed.tokens,
                ids,
                weights,
                attend,
                devices=own if layout is None else devices,
                on_progress=lambda: progress.advance(task),
            )
            if not is_live:
                console.print(f"{name}: {steps} steps in {sum(result.seconds):.1f} s")
            return result

        reference = one_run(REFERENCE, None, Attend(mask=mask))
        measured: dict[str, Measured] = {}
        alone = {
            layout: time_ranks(layout, ids[:ROWS_TIMED_ALONE], own[0], mask)
            for layout in layouts.values()
        }
        for name, layout, attend in _runs(arguments, layouts):
            result = one_run(name, layout, attend)
            blocks, blocks_of_rank = count_blocks(layout, length, mask=mask, segment_ids=ids)
            measured[name] = Measured(
                run=result,
                difference=_difference(result, reference),
                pairs=np.array([layout.work(length, mask, row) for row in ids]),
                blocks=blocks,
                blocks_of_rank=blocks_of_rank,
                alone=alone[layout],
            )
    return reference, measured


def _difference(result: Run, reference: Run) -> float:
    mine, theirs = (np.array([x.losses, x.gradient_norms]) for x in (result, reference))
    return float(np.max(np.abs(mine - theirs) / np.abs(theirs)))


def _largest(measured: dict[str, Measured]) -> float:
    # Python's max() would pass over a NaN.
    return float(np.max([one.difference for one in measured.values()]))


def _check_length(length: int, layouts: dict[str, Layout]) -> None:
    for layout in layouts.values():
        if length % layout.multiple:
            multiple = math.lcm(*(other.multiple for other in layouts.values()))
            works = min(-(-length // multiple), LONGEST // multiple) * multiple
            raise UserError(
                f"plait demo: --sequence-length is {length}; {layout!r} needs a multiple of "
                f"{layout.multiple}: {works} works"
            )


def _picture_path(out: Path) -> Path:
    """The path of the picture; UserError unless its folder, made if needed, can be written to."""
    named = out.suffix.lower() in PICTURES and not out.is_dir()
    path = out if named else out / "demo.png"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise UserError(
            f"plait demo: --out is {str(out)!r}; nothing can be written there "
            f"({error.strerror}): . works where the current folder can be written to"
        ) from None
    return path


def _packed(length: int, steps: int, seed: int) -> text.Packed:
    root = text.standard_library()
    packed = text.pack(text.read_files(root, seed), length, steps)
    rows = len(packed.tokens)
    if not rows:
        raise UserError(
            f"plait demo: no Python files in {str(root)!r}; it needs an interpreter that has the "
            "source of its standard library"
        )
    if rows < steps:
        raise UserError(
            f"plait demo: --steps is {steps}; the standard library fills {rows} rows of {length} "
            f"tokens: {rows} works"
        )
    return packed


def _all_devices(ranks: int | None) -> int:
    """The number of devices of all processes; UserError unless it is that of the ranks."""
    count = jax.device_count()
    if count < 2:
        raise UserError(
            f"{COMMAND}: jax.distributed.initialize() gave {count} device; the sequence is sharded "
            "over 2 or more: --processes 2, without --distributed and --coordinator, works"
        )
    if ranks not in (None, count):
        raise UserError(
            f"{COMMAND}: --ranks is {ranks}; all devices of all processes are ranks: {count} works"
        )
    return count


def _cpu_devices(count: int) -> list[Any]:
    start_on_cpu(count)
    devices = jax.devices("cpu")
    if len(devices) < count:
        works = f"{len(devices)} works" if len(devices) > 1 else f"{count} works in a new process"
        raise UserError(
            f"plait demo: --ranks is {count}; jax has started in this process with CPU devices: "
            f"{len(devices)}; {works}"
        )
    return devices


def _print_text(console: Console, packed: text.Packed) -> None:
    rows, length = packed.tokens.shape
    tail = f" {packed.left_out:,} bytes of the last file found no room." if packed.left_out else ""
    console.print(
        f"Text: {packed.files} files of the standard library, cut {packed.cuts} times into "
        f"{len(packed.pieces)} documents, packed into {rows} rows of {length:,} bytes: "
        f"{packed.real_tokens:,} tokens and {packed.padding / packed.tokens.size:.1%} padding."
        + tail,
        highlight=False,
    )


def _print_results(
    console: Console,
    packed: text.Packed,
    reference: Run,
    measured: dict[str, Measured],
    platform: str,
) -> None:
    from rich import box
    from rich.table import Table

    results = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    results.add_column("layout, strategy", no_wrap=True)
    for heading in (
        "attention\nwork of\nbusiest\n/ mean",
        "attention\nalone, ms\nbusiest\n/ mean",
        "seconds\na step",
        "final\nloss",
        "differs\nfrom one\ndevice by",
    ):
        results.add_column(heading, justify="right", no_wrap=True)

    def of_run(run: Run) -> tuple[str, str]:
        return f"{run.seconds_a_step:.2f}", f"{run.losses[-1]:.4f}"

    results.add_row(REFERENCE, "", "", *of_run(reference), "")
    for name, one in measured.items():
        results.add_row(
            name,
            f"{one.busiest_over_mean:.3f}",
            f"{1e3 * one.alone_busiest:.1f} / {1e3 * one.alone_mean:.1f}",
            *of_run(one.run),
            f"{one.difference:.1e}",
        )
    console.print(results)
    if platform == "cpu":
        console.print(
            "All virtual devices share this machine's cores, so seconds a step do not show "
            "balance; the attention of one rank, timed alone (one layer, forward), does.\n",
            highlight=False,
        )

    steps = len(packed.tokens)
    console.print(
        f"Attention blocks each rank computed + skipped (one layer, forward, {steps} steps):",
        highlight=False,
    )
    blocks = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    blocks.add_column("rank", justify="right")
    of_layout = {name.split(",")[0]: one for name, one in measured.items()}
    for name in of_layout:
        blocks.add_column(name, justify="right", no_wrap=True)
    for rank in range(next(iter(measured.values())).blocks.size):
        computed = [(int(one.blocks[rank]), one.blocks_of_rank) for one in of_layout.values()]
        blocks.add_row(str(rank), *(f"{n:,} + {total - n:,}" for n, total in computed))
    console.print(blocks)
    console.print(
        f"Losses and gradient norms of all runs and steps differ from the one-device run's by at "
        f"most {_largest(measured):.1e}, relative.",
        highlight=False,
    )


def _numbers(
    arguments: argparse.Namespace,
    packed: text.Packed,
    reference: Run,
    layouts: dict[str, Layout],
    measured: dict[str, Measured],
) -> dict[str, Any]:
    """What was measured as JSON types: lists are by step, or by step and rank."""

    def of_run(run: Run) -> dict[str, Any]:
        return {
            "losses": run.losses,
            "gradient_norms": run.gradient_norms,
            "seconds": run.seconds,
            "median_seconds_a_step": run.seconds_a_step,
        }

    runs = {name: (layout, attend) for name, layout, attend in _runs(arguments, layouts)}
    of_runs = {
        name: {
            **runs[name][0].to_dict(),
            "strategy": runs[name][1].strategy,
            **of_run(one.run),
            "largest_relative_difference": one.difference,
            "visible_pairs": one.pairs.tolist(),
            "busiest_over_mean": one.busiest_over_mean,
            "blocks_computed_by_rank": one.blocks.tolist(),
            "blocks_skipped_by_rank": (one.blocks_of_rank - one.blocks).tolist(),
            "attention_alone_seconds": one.alone.tolist(),
            "attention_alone_busiest_seconds": one.alone_busiest,
            "attention_alone_mean_seconds": one.alone_mean,
        }
        for name, one in measured.items()
    }
    return {
        "ranks": arguments.ranks,
        "processes": jax.process_count(),
        "sequence_length": arguments.sequence_length,
        "steps": arguments.steps,
        "seed": arguments.seed,
        "mask": repr(arguments.mask),
        "jax": jax.__version__,
        "text": {
            "files": packed.files,
            "documents": len(packed.pieces),
            "cuts": packed.cuts,
            "tokens": packed.real_tokens,
            "padding": packed.padding,
            "left_out": packed.left_out,
        },
        "largest_relative_difference": _largest(measured),
        "one_device": of_run(reference),
        "runs": of_runs,
    }
