"""`plait plan`: which layout and strategy, before anything runs; figures by a stated model."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np

import plait
from plait.attention.cost import Machine, Prices, Shapes
from plait.cli.arguments import UserError, integer, number, require_extra, writable
from plait.cli.figures import Column, megabytes, table
from plait.cli.plan.code import code
from plait.cli.plan.documents import (
    Packed,
    distribution,
    draw,
    one_document,
    pack_rows,
    sample,
)
from plait.cli.plan.estimates import (
    Option,
    Recommendation,
    estimate,
    recommend,
    refusals,
)
from plait.cli.plan.files import LENGTH, TOKENS, Reader
from plait.cli.plan.layouts import Candidate, Row, candidates
from plait.cli.plan.pairs import pairs_between_ranks
from plait.cli.progress import Progress

COMMAND = "plait plan"
MOST_RANKS, MOST_TOKENS = 4096, 2**26
MOST_PACKS = 1000
PICTURES = (".png", ".svg")
TRAINING = 3
"""FLOPs of forward and backward over those of forward: two products of matrices, and four more."""

WIDTH = 100


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
        help="their lengths: .txt, one a line; .npy; or .jsonl or .parquet with a column of lengths "
        "or of text",
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


@dataclasses.dataclass(frozen=True, eq=False)
class Laid:
    """All rows in one layout; pairs are int64 [rows, ranks]."""

    candidate: Candidate
    first: Row
    pairs: np.ndarray
    padding: float
    options: list[Option]


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    axes = _axes(arguments)
    shapes, machine = _shapes(arguments), _machine(arguments)
    _check_length(arguments)
    json_path, picture_path = _outputs(arguments)
    packed, said = _documents(arguments)

    inner = axes[1] if axes else None
    prices = Prices(arguments.ranks, arguments.sequence_length, shapes, machine)
    refused = refusals(prices, inner)
    strategies = [name for name, why_not in refused.items() if why_not is None]
    laid = _lay_out(arguments, packed, prices, inner, strategies)
    options = [option for one in laid for option in one.options]
    recommended = recommend(options, machine.memory_bytes)
    program = _code(arguments, recommended, axes)

    if arguments.json != "-":
        print(_text(arguments, said, laid, prices, refused, recommended, program))
    numbers = _numbers(arguments, said, packed, laid, prices, refused, recommended, program)
    text = json.dumps(numbers, indent=1, allow_nan=False)
    if arguments.json == "-":
        print(text)
    if json_path:
        json_path.write_text(text + "\n")
        print(f"\nNumbers: {json_path}")
    if picture_path:
        from plait.cli.plan.picture import draw as draw_picture

        taken = recommended.option.layout if recommended.option else None
        rows = {one.candidate.name: (one.first, one.pairs[0]) for one in laid}
        draw_picture(rows, taken, len(packed.rows), picture_path)
        if arguments.json != "-":
            print(f"\nPicture: {picture_path}")
    return 0


def _axes(arguments: argparse.Namespace) -> tuple[int, int] | None:
    if arguments.axes is None:
        return None
    sizes = arguments.axes.split(",")
    ranks = arguments.ranks
    works = next(size for size in (8, 4, 2, ranks) if ranks % size == 0)
    if (
        len(sizes) != 2
        or not all(size.strip().isdecimal() for size in sizes)
        or int(sizes[0]) * int(sizes[1]) != ranks
    ):
        raise UserError(
            f"{COMMAND}: --axes is {arguments.axes!r}; it needs to be two sizes that make up "
            f"--ranks {ranks}: {ranks // works},{works} works"
        )
    return int(sizes[0]), int(sizes[1])


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
            f"{COMMAND}: --sequence-length is {length}; zigzag over {arguments.ranks} ranks needs a "
            f"multiple of {step}: {works} works"
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
        from plait.cli.plan.documents import SPARE

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


def _lay_out(
    arguments: argparse.Namespace,
    packed: Packed,
    prices: Prices,
    inner: int | None,
    strategies: list[str],
) -> list[Laid]:
    progress = Progress()
    has_documents = any(len(row) > 1 for row in packed.rows)
    laid = []
    for candidate in candidates(arguments.ranks, has_documents):
        measured, padding, tokens, first = [], 0, 0, None
        for number_of, lengths in enumerate(packed.rows, 1):
            progress(f"{candidate.name}: row {number_of} of {len(packed.rows)}")
            row = candidate.lay_out(lengths, packed.sequence_length)
            first = first or row
            of_row = dataclasses.replace(prices, length=row.segment_ids.size)
            measured.append((pairs_between_ranks(row.layout, row.segment_ids), of_row))
            padding += row.padding
            tokens += row.segment_ids.size
        assert first
        usable = [s for s in strategies if not candidate.per_batch or s in ("all_gather", "ring")]
        laid.append(
            Laid(
                candidate,
                first,
                np.array([pairs.sum(axis=1) for pairs, _ in measured]),
                padding / tokens,
                estimate(candidate.name, measured, inner, usable),
            )
        )
    progress.done()
    return laid


def _code(
    arguments: argparse.Namespace, recommended: Recommendation, axes: tuple[int, int] | None
) -> str | None:
    if recommended.option is None:
        return None
    return code(
        recommended.option.layout,
        recommended.option.strategy,
        arguments.ranks,
        arguments.sequence_length,
        has_documents=arguments.distribution is not None
        or arguments.lengths is not None
        or arguments.tokenized is not None,
        axis_sizes=axes,
    )


def _text(
    arguments: argparse.Namespace,
    said: str,
    laid: list[Laid],
    prices: Prices,
    refused: dict[str, str | None],
    recommended: Recommendation,
    program: str | None,
) -> str:
    memory = prices.machine.memory_bytes
    columns = (
        Column("busiest\n/ mean", lambda x: f"{x[1].waits:.3f}"),
        Column("worst\nrow", lambda x: f"{x[1].worst:.3f}"),
        Column("busiest,\nTFLOPs", lambda x: f"{prices.flops(_busiest(x[0])) / 1e12:,.4g}"),
        Column("sends,\nMB", lambda x: megabytes(x[1].sent_bytes)),
        Column("holds,\nMB", lambda x: megabytes(x[1].held_bytes)),
        Column("padding", lambda x: f"{x[0].padding:.2%}"),
        Column("estimate,\nms", lambda x: f"{1e3 * x[1].seconds:,.3f}"),
        Column(
            "",
            lambda x: (
                "recommended"
                if x[1] is recommended.option
                else "does not fit"
                if x[1].held_bytes > memory
                else ""
            ),
            is_text=True,
        ),
    )
    rows = {option.name: (one, option) for one in laid for option in one.options}
    mean = float(laid[0].pairs.mean())
    shapes = prices.shapes
    notes = [
        f"Attention FLOPs of the mean rank, exact, of a layer and row: {_flops(prices, mean)} "
        f"forward, {_flops(prices, TRAINING * mean)} in training, {TRAINING} times that. Times are "
        "estimates by a stated model, of a layer's forward pass; nothing was run.",
        *(
            f"{strategy} cannot be had: {why_not}."
            for strategy, why_not in refused.items()
            if why_not
        ),
    ]
    head = (
        f"{arguments.ranks} ranks, rows of {arguments.sequence_length:,} tokens; {shapes.heads} "
        f"heads, {shapes.kv_heads} of keys, of {shapes.head_dim} and {shapes.v_head_dim}, "
        f"{shapes.itemsize} bytes a number; {arguments.peak:g} TFLOP/s, {arguments.network:g} "
        f"GB/s, {arguments.memory:g} GiB."
    )
    name = recommended.option.name if recommended.option else None
    advice = f"Recommended: {name}. {recommended.reason}" if name else recommended.reason
    return "\n\n".join(
        [
            *(textwrap.fill(part, WIDTH) for part in (head, said)),
            table(columns, rows, "layout, strategy"),
            *(textwrap.fill(part, WIDTH) for part in (*notes, advice)),
            *([textwrap.indent(program.rstrip(), "    ")] if program else []),
        ]
    )


def _busiest(laid: Laid) -> float:
    """Pairs of the busiest rank of a row, on average."""
    return float(laid.pairs.max(axis=1).mean())


def _flops(prices: Prices, pairs: float) -> str:
    return f"{prices.flops(pairs) / 1e12:,.4g} TFLOPs"


def _numbers(
    arguments: argparse.Namespace,
    said: str,
    packed: Packed,
    laid: list[Laid],
    prices: Prices,
    refused: dict[str, str | None],
    recommended: Recommendation,
    program: str | None,
) -> dict[str, Any]:
    """What was found as JSON types; lists are by row, or by row and rank."""
    taken = recommended.option
    forward = prices.flops(float(laid[0].pairs.mean()))
    return {
        "plait": plait.__version__,
        "ranks": arguments.ranks,
        "sequence_length": arguments.sequence_length,
        "axes": arguments.axes,
        "shapes": dataclasses.asdict(prices.shapes),
        "machine": dataclasses.asdict(prices.machine),
        "documents": {
            "source": said,
            "seed": arguments.seed,
            "packed": packed.documents,
            "cut": packed.cut,
            "lengths": [row.tolist() for row in packed.rows],
        },
        "attention_flops_of_mean_rank": {"forward": forward, "training": TRAINING * forward},
        "refused": {strategy: why_not for strategy, why_not in refused.items() if why_not},
        "layouts": {
            one.candidate.name: {
                "per_batch": one.candidate.per_batch,
                "padding": one.padding,
                "visible_pairs": one.pairs.tolist(),
                "forward_flops": [
                    [prices.flops(pairs) for pairs in row] for row in one.pairs.tolist()
                ],
                "strategies": {
                    option.strategy: {
                        "busiest_over_mean": option.waits,
                        "worst_busiest_over_mean": option.worst,
                        "sent_bytes": option.sent_bytes,
                        "held_bytes": option.held_bytes,
                        "fits": option.held_bytes <= prices.machine.memory_bytes,
                        "estimated_seconds": option.seconds,
                    }
                    for option in one.options
                },
            }
            for one in laid
        },
        "recommended": {
            "layout": taken.layout if taken else None,
            "strategy": taken.strategy if taken else None,
            "reason": recommended.reason,
            "code": program,
        },
    }
