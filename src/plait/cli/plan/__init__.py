"""`plait plan`: which layout and strategy, before anything runs; figures by a stated model."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from plait.attention.cost import Machine, Prices, Shapes
from plait.attention.kernels import Blockwise
from plait.cli.arguments import UserError, integer, number, require_extra, writable
from plait.cli.plan.compare import make_plan
from plait.cli.plan.documents import (
    SPARE,
    Packed,
    distribution,
    draw,
    one_document,
    pack_rows,
    sample,
)
from plait.cli.plan.files import LENGTH, TOKENS, Reader
from plait.cli.plan.report import as_json, as_text
from plait.cli.progress import Progress

COMMAND = "plait plan"
MOST_RANKS, MOST_TOKENS = 1024, 2**23
MOST_TILES = 2**32
"""Of a row: more would take minutes to look at."""

MOST_PACKS = 1000
PICTURES = (".png", ".svg")


def add_command(commands: Any) -> None:
    """Add `plan` to the subparsers of `plait`."""
    parser = commands.add_parser(
        "plan",
        help="say which layout and strategy suit a sequence, its documents and a machine",
        description="Compares layouts and strategies of causal attention for one layer: who waits "
        "for whom, FLOPs, bytes, memory, padding, and an estimated time; recommends one and "
        "prints the code. Work is counted exactly; times are estimates by a stated model, and "
        "nothing is run.",
    )
    parser.add_argument(
        "--ranks",
        required=True,
        type=integer("--ranks", 2, MOST_RANKS, works=64),
        help="devices that the sequence is sharded over",
    )
    parser.add_argument(
        "--sequence-length",
        required=True,
        type=integer("--sequence-length", 4, MOST_TOKENS, works=524288),
        metavar="TOKENS",
        help="tokens of a row",
    )
    parser.add_argument(
        "--axes",
        metavar="RING,HEADS",
        help='sizes of two mesh axes that make up the ranks, such as 16,8: adds "usp", with heads '
        "dealt over the second",
    )
    documents = parser.add_argument_group(
        "documents", "without these the row is one document"
    ).add_mutually_exclusive_group()
    documents.add_argument(
        "--lengths",
        type=Path,
        metavar="FILE",
        help="their lengths: .txt, one a line; .npy; or .jsonl or .parquet with a column of "
        "lengths or of text",
    )
    documents.add_argument(
        "--tokenized",
        type=Path,
        metavar="FILE",
        help=".jsonl or .parquet with a column of lists of tokens, which are counted",
    )
    documents.add_argument(
        "--distribution",
        type=distribution("--distribution"),
        metavar="NAME",
        help="drawn: long-tail (71%% of the documents up to 1K tokens, 94%% up to 4K, 98.7%% up to "
        "16K, 99.7%% up to 64K, none over a quarter of a row), uniform (up to a quarter of a row) "
        "or equal:TOKENS",
    )
    packing = parser.add_argument_group("how they are read and packed")
    packing.add_argument(
        "--column",
        help=f"of .jsonl and .parquet (default: {LENGTH}, and {TOKENS} for --tokenized)",
    )
    packing.add_argument(
        "--bytes-per-token",
        type=number("--bytes-per-token", works=4),
        default=4.0,
        metavar="BYTES",
        help="by which the UTF-8 bytes of text are counted as tokens (default: 4)",
    )
    packing.add_argument(
        "--packs",
        type=integer("--packs", 1, MOST_PACKS, works=20),
        default=20,
        metavar="ROWS",
        help="rows to look at, of documents taken at random (default: 20)",
    )
    packing.add_argument(
        "--seed",
        type=integer("--seed", 0, 2**32 - 1, works=0),
        default=0,
        help="of what is drawn (default: 0)",
    )
    parser.add_argument(
        "--tile",
        default="256,256",
        metavar="Q,K",
        help="blocks of queries and keys that the kernel computes whole (default: 256,256)",
    )
    shapes = parser.add_argument_group("attention, of one device and one layer")
    for name, default, what in (
        ("heads", 64, "of queries"),
        ("kv-heads", 8, "of keys and values; they divide the heads"),
        ("head-dim", 128, "of queries and keys"),
        ("v-head-dim", None, "of values (default: that of keys)"),
        ("itemsize", 2, "bytes of a number"),
    ):
        shapes.add_argument(
            f"--{name}",
            type=integer(f"--{name}", 1, 2**16, works=default or 128),
            default=default,
            metavar="N",
            help=what if default is None else f"{what} (default: {default})",
        )
    machine = parser.add_argument_group("machine, by default a TPU v5p at its peaks")
    for name, default, unit, what in (
        ("peak", 459, "TFLOPS", "10^12 FLOPs a second of a device"),
        ("network", 100, "GB/S", "10^9 bytes a second that a device can receive"),
        ("memory", 4, "GIB", "2^30 bytes that keys and values of other ranks may take"),
    ):
        machine.add_argument(
            f"--{name}",
            type=number(f"--{name}", works=default),
            default=float(default),
            metavar=unit,
            help=f"{what} (default: {default})",
        )
    parser.add_argument(
        "--json", metavar="FILE", help="save all figures as JSON; - prints them and nothing else"
    )
    parser.add_argument(
        "--picture", metavar="FILE", help="save a picture of one row in each layout, .png or .svg"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    axes = _axes(arguments)
    prices = Prices(
        arguments.ranks, arguments.sequence_length, _shapes(arguments), _machine(arguments)
    )
    _check_length(arguments)
    kernel = _kernel(arguments)
    json_path, picture_path = _outputs(arguments)
    packed, source = _documents(arguments)
    made = make_plan(packed, source, prices, kernel, axes)

    if arguments.json != "-":
        print(as_text(made))
    if arguments.json:
        numbers = json.dumps(as_json(made), indent=1, allow_nan=False)
        if json_path:
            json_path.write_text(numbers + "\n")
            print(f"\nNumbers: {json_path}")
        else:
            print(numbers)
    if picture_path:
        from plait.cli.plan.picture import draw as draw_picture

        draw_picture(made, picture_path)
        if arguments.json != "-":
            print(f"\nPicture: {picture_path}")
    return 0


def _axes(arguments: argparse.Namespace) -> tuple[int, int] | None:
    if arguments.axes is None:
        return None
    ranks = arguments.ranks
    works = next(size for size in (8, 4, 2, ranks) if ranks % size == 0)
    sizes = _pair("--axes", arguments.axes, f"{ranks // works},{works}")
    if sizes[0] * sizes[1] != ranks:
        raise UserError(
            f"{COMMAND}: --axes is {arguments.axes!r}, {sizes[0] * sizes[1]} devices; it needs to "
            f"make up --ranks {ranks}: {ranks // works},{works} works"
        )
    return sizes


def _pair(flag: str, given: str, works: str) -> tuple[int, int]:
    parts = [part.strip() for part in given.split(",")]
    if len(parts) != 2 or not all(part.isdecimal() and 0 < int(part) < 2**31 for part in parts):
        raise UserError(
            f"{COMMAND}: {flag} is {given!r}; it needs to be two integers above 0: {works} works"
        )
    return int(parts[0]), int(parts[1])


def _kernel(arguments: argparse.Namespace) -> Blockwise:
    q_block, k_block = _pair("--tile", arguments.tile, "256,256")
    length = arguments.sequence_length
    if length**2 > MOST_TILES * q_block * k_block:
        works = -(-length // math.isqrt(MOST_TILES))
        raise UserError(
            f"{COMMAND}: --tile is {arguments.tile!r}, too many of which are in a row of {length} "
            f"tokens to look at; it needs to be larger: {works},{works} works"
        )
    return Blockwise(q_block, k_block)


def _shapes(arguments: argparse.Namespace) -> Shapes:
    heads, kv_heads = arguments.heads, arguments.kv_heads
    if heads % kv_heads:
        works = next(n for n in range(min(kv_heads, heads), 0, -1) if heads % n == 0)
        raise UserError(
            f"{COMMAND}: --kv-heads is {kv_heads}; it needs to divide --heads {heads}: "
            f"{works} works"
        )
    head_dim = arguments.head_dim
    v_head_dim = arguments.v_head_dim or head_dim
    return Shapes(1, heads, kv_heads, head_dim, v_head_dim, arguments.itemsize)


def _machine(arguments: argparse.Namespace) -> Machine:
    return Machine(arguments.peak * 1e12, arguments.network * 1e9, arguments.memory * 2**30)


def _check_length(arguments: argparse.Namespace) -> None:
    length, step = arguments.sequence_length, 2 * arguments.ranks
    if length % step:
        works = min(-(-length // step), MOST_TOKENS // step) * step
        raise UserError(
            f"{COMMAND}: --sequence-length is {length}; zigzag over {arguments.ranks} ranks needs "
            f"a multiple of {step}: {works} works"
        )


def _outputs(arguments: argparse.Namespace) -> tuple[Path | None, Path | None]:
    """Where JSON and picture go; UserError where they cannot."""
    picture = None
    if arguments.picture:
        if Path(arguments.picture).suffix.lower() not in PICTURES:
            raise UserError(
                f"{COMMAND}: --picture is {arguments.picture!r}; it needs to end in "
                f"{' or '.join(PICTURES)}: plan.png works"
            )
        require_extra(COMMAND, "demo", ("matplotlib",))
        picture = writable(COMMAND, "--picture", arguments.picture, "plan.png")
    numbers = None
    if arguments.json and arguments.json != "-":
        numbers = writable(COMMAND, "--json", arguments.json, "plan.json")
    return numbers, picture


def _documents(arguments: argparse.Namespace) -> tuple[Packed, str]:
    """The rows to look at, and what they are in words."""
    length, packs = arguments.sequence_length, arguments.packs
    path = arguments.lengths or arguments.tokenized
    rng = np.random.default_rng(arguments.seed)
    if arguments.distribution:
        drawn = draw(arguments.distribution, int(SPARE * packs * length), length, rng)
        packed = pack_rows(drawn, packs, length, rng)
        return packed, (
            f"{packed.documents:,} documents drawn from {arguments.distribution!r} (seed "
            f"{arguments.seed}): {_described(drawn)}. {_packed(packed)}"
        )
    if path is None:
        if arguments.column:
            raise UserError(
                f"{COMMAND}: --column is {arguments.column!r} and there is no file; it needs "
                "--lengths FILE or --tokenized FILE"
            )
        return one_document(length), "One document in one row."
    reader = Reader(
        COMMAND,
        arguments.column or (TOKENS if arguments.tokenized else LENGTH),
        bool(arguments.tokenized),
        arguments.bytes_per_token,
    )
    progress = Progress()
    lengths, is_text = reader.read(path, progress)
    progress(f"packing {path.name}")
    taken = sample(lengths, packs, length, rng)
    packed = pack_rows(taken, packs, length, rng)
    progress.done()
    counted = f", counted from text at {reader.bytes_per_token:g} bytes a token" if is_text else ""
    part = (
        f" {taken.size:,} of them, at random (seed {arguments.seed}), were packed."
        if taken.size < lengths.size
        else ""
    )
    return packed, (
        f"{lengths.size:,} documents of {path}{counted}: {_described(lengths)}.{part} "
        f"{_packed(packed)}"
    )


def _described(lengths: np.ndarray) -> str:
    return (
        f"{int(lengths.sum()):,} tokens, of the median document {int(np.median(lengths)):,}, of "
        f"the longest {int(lengths.max()):,}"
    )


def _packed(packed: Packed) -> str:
    cut = f", {packed.cut:,} longer than a row cut" if packed.cut else ""
    rows = len(packed.rows)
    return f"Rows looked at: {rows}, with {sum(map(len, packed.rows)):,} documents{cut}."
