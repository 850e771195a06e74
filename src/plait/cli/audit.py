"""`plait audit`: compile for an accelerator that need not be there, and show what comes out."""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import math
import sys
import textwrap
from pathlib import Path
from typing import Any

import jax
from jax.sharding import PartitionSpec

import plait
from plait.audit import Report, Topology, compile_for, topology
from plait.audit.arguments import SpecError
from plait.audit.topology import CHIPS
from plait.cli.arguments import LAYOUTS, UserError, integer, names, writable
from plait.cli.devices import start_on_cpu
from plait.cli.figures import COLLECTIVES, FIGURES, notes, table
from plait.cli.progress import tell
from plait.cli.variants import (
    AXIS,
    MOVES,
    SHAPE,
    Variant,
    check_mesh,
    check_spec,
    of_function,
    of_moves,
    parse_aval,
    parse_mesh,
    parse_spec,
)

TOPOLOGY = "v5p:4x4x8"
DTYPE = "bfloat16"
DEFAULT_LAYOUTS = ("zigzag", "half-swap", "striped")
MOST_DEVICES = 1024
WIDTH = 100


def add_command(commands: Any) -> None:
    """Add `audit` to the subparsers of `plait`."""
    parser = commands.add_parser(
        "audit",
        help="compile for a TPU or GPU that need not be there and show what the program does",
        description="Compiles plait's moves side by side, or a function of your own, for a "
        "topology that need not be there, and shows what the program of one device does: "
        "collectives and their stages, bytes, memory, the compiler's estimate. Nothing is run.",
    )
    parser.add_argument(
        "function",
        nargs="?",
        metavar="MODULE:FUNCTION",
        help="a function to compile, its module importable from the current directory (default: "
        "plait's moves)",
    )
    parser.add_argument(
        "--topology",
        default=TOPOLOGY,
        metavar="NAME",
        help=f"what to compile for, see --list (default: {TOPOLOGY}); cpu:8 needs no more compiler",
    )
    parser.add_argument("--list", action="store_true", help="list the topologies and stop")
    parser.add_argument(
        "--shape",
        action="append",
        metavar="SIZES",
        help=f"of an argument, such as {SHAPE}, which is the default for the moves; once for each "
        "argument of a function",
    )
    parser.add_argument(
        "--dtype",
        action="append",
        metavar="NAME",
        help=f"of an argument; once for all, or once for each (default: {DTYPE})",
    )
    parser.add_argument(
        "--ranks",
        type=integer("--ranks", 1, 2**16, works=8),
        help=f'devices of a mesh with one axis "{AXIS}" (default: all of the topology)',
    )
    parser.add_argument(
        "--turns",
        type=integer("--turns", 0, 2**31 - 1, works=1),
        default=1,
        help="how often to count a loop whose length is data (default: 1)",
    )
    parser.add_argument(
        "--json", metavar="FILE", help="save all figures as JSON; - prints them and nothing else"
    )
    parser.add_argument("--html", metavar="FILE", help="save a page with pictures of the figures")
    moves = parser.add_argument_group("plait's moves")
    moves.add_argument(
        "--layout",
        action="append",
        type=names("--layout", LAYOUTS, works="zigzag"),
        metavar="NAME[,NAME]",
        help=f"{', '.join(LAYOUTS)} (default: {','.join(DEFAULT_LAYOUTS)})",
    )
    moves.add_argument(
        "--move",
        action="append",
        type=names("--move", MOVES, works="reorder"),
        metavar="NAME[,NAME]",
        help=f"{', '.join(MOVES)}; without it all, those that compile slowly in the first layout "
        "alone",
    )
    moves.add_argument(
        "--axis", type=integer("--axis", -64, 63, works=1), help="the sequence axis (default: 1)"
    )
    function = parser.add_argument_group("a function")
    function.add_argument(
        "--mesh",
        metavar="AXIS=SIZE[,AXIS=SIZE]",
        help="axes of the mesh that the function is compiled in, major first. Without --mesh, "
        "--ranks and --spec all is on one device",
    )
    function.add_argument(
        "--spec",
        action="append",
        metavar="AXES",
        help='how an argument is sharded, a mesh axis or nothing a dimension: ",context", or '
        '"data,context+model"; once for all, or once for each (default: replicated)',
    )
    function.add_argument(
        "--out-spec",
        action="append",
        metavar="AXES",
        help="the same for results (default: the compiler chooses)",
    )
    parser.set_defaults(run=run)


_FOR_MOVES = ("layout", "move", "axis")
_FOR_A_FUNCTION = ("mesh", "spec", "out_spec")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    if arguments.list:
        print(_listed())
        return 0
    _check_together(arguments)
    avals = _avals(arguments)
    sizes = _mesh_sizes(arguments)
    target = _topology(arguments.topology, sizes)
    sizes = sizes or (None if _is_alone(arguments) else {AXIS: len(target.devices)})
    variants = _variants(arguments, avals, sizes, target)
    # Checked after all else, as it may make a folder, and before the slow part.
    outputs = [_writable(kind, getattr(arguments, kind)) for kind in ("json", "html")]
    reports = _compile(target, sizes, variants, arguments.turns)
    options = _options(arguments, target, sizes, variants)

    title = arguments.function or "plait's moves"
    lines = [
        f"{title} compiled for {target.name}: {_described(options)}",
        table(FIGURES, reports, "program"),
    ]
    if arguments.function and (collectives := reports[arguments.function].collectives):
        lines.append("Collectives of one device, in the order of the schedule:")
        lines.append(table(COLLECTIVES, collectives))
    lines += [textwrap.fill(note, WIDTH) for note in notes(reports.values())]
    if arguments.json != "-":
        print("\n\n".join(lines))
    _save(arguments, outputs, title, options, reports)
    return 0


def _listed() -> str:
    needs = {
        "tpu": "TPU slices, in chips; need libtpu: pip install 'plait[audit]'",
        "gpu": "NVIDIA hosts, in slices x hosts x devices; need jax's CUDA plugin: "
        "pip install 'plait[audit-gpu]'",
    }
    lines = []
    for kind, what in needs.items():
        lines += [what, *(f"  {chip}" for chip in CHIPS.values() if chip.kind == kind)]
    return "\n".join([*lines, "This machine", "  cpu:8  any number of virtual devices", "  local"])


def _check_together(arguments: argparse.Namespace) -> None:
    """UserError where an argument is for another kind of audit than the one that is asked."""
    foreign, of = (
        (_FOR_MOVES, "plait's own moves: leave MODULE:FUNCTION out, or the argument")
        if arguments.function
        else (_FOR_A_FUNCTION, "a function: name one, such as model:forward")
    )
    for name in foreign:
        if getattr(arguments, name) is not None:
            flag = "--" + name.replace("_", "-")
            raise UserError(f"plait audit: {flag} is given and is for {of}")
    if arguments.mesh and arguments.ranks:
        raise UserError(
            f"plait audit: --mesh is {arguments.mesh!r} and --ranks {arguments.ranks}; give one of "
            f"them: --mesh {AXIS}={arguments.ranks} works"
        )


def _writable(kind: str, given: str | None) -> Path | None:
    """The file to write, or None."""
    if given is None or (given == "-" and kind == "json"):
        return None
    return writable("plait audit", f"--{kind}", given, f"audit.{kind}")


def _repeated(flag: str, given: list[str], count: int) -> list[str]:
    if count and len(given) not in (1, count):
        raise UserError(
            f"plait audit: {flag} is given {len(given)} times for arguments: {count}; once, or "
            f"{count} times, works"
        )
    return given * count if len(given) == 1 else given[:count]


def _avals(arguments: argparse.Namespace) -> list[jax.ShapeDtypeStruct]:
    shapes = arguments.shape or ([] if arguments.function else [SHAPE])
    if len(shapes) > 1 and not arguments.function:
        raise UserError(
            f"plait audit: --shape is given {len(shapes)} times; a move takes one array: "
            f"--shape {shapes[0]} works"
        )
    dtypes = _repeated("--dtype", arguments.dtype or [DTYPE], len(shapes))
    return [parse_aval(*pair) for pair in zip(shapes, dtypes, strict=True)]


def _mesh_sizes(arguments: argparse.Namespace) -> dict[str, int] | None:
    if arguments.mesh:
        return parse_mesh(arguments.mesh)
    return {AXIS: arguments.ranks} if arguments.ranks else None


def _is_alone(arguments: argparse.Namespace) -> bool:
    """Whether a function stands on one device."""
    return bool(arguments.function and not arguments.spec and not arguments.out_spec)


def _topology(name: str, sizes: dict[str, int] | None) -> Topology:
    """The topology; jax starts with no other backend than it needs.

    A compiler needs no device, and a TPU or GPU of this machine stays free for others.
    """
    base, _, count = name.partition(":")
    if base == "cpu":
        wanted = count or str(math.prod((sizes or {AXIS: 8}).values()))
        if not wanted.isdecimal() or not 1 <= int(wanted) <= MOST_DEVICES:
            raise UserError(
                f"plait audit: --topology is {name!r}; cpu takes from 1 to {MOST_DEVICES} devices: "
                "cpu:8 works"
            )
        name = f"cpu:{wanted}"
        start_on_cpu(int(wanted))
    elif base != "local":
        start_on_cpu()
    try:
        return topology(name)
    except ValueError as error:
        raise UserError(f"plait audit: {error}") from None
    except (ImportError, RuntimeError) as error:
        raise UserError(f"plait audit: {error}; --topology cpu:8 works without") from None


def _variants(
    arguments: argparse.Namespace,
    avals: list[jax.ShapeDtypeStruct],
    sizes: dict[str, int] | None,
    target: Topology,
) -> list[Variant]:
    if sizes:
        given = f"--mesh {arguments.mesh}" if arguments.mesh else f"--ranks {arguments.ranks}"
        check_mesh(given, sizes, target)
    if arguments.function:
        in_specs = _specs(arguments.spec, avals, sizes)
        out_specs = [parse_spec("--out-spec", s, sizes or {}) for s in arguments.out_spec or ()]
        return [of_function(arguments.function, avals, in_specs, out_specs or None)]
    assert sizes
    chosen = itertools.chain(*arguments.layout) if arguments.layout else DEFAULT_LAYOUTS
    layouts = {name: LAYOUTS[name](sizes[AXIS]) for name in chosen}
    moves = list(dict.fromkeys(itertools.chain(*arguments.move))) if arguments.move else None
    axis = 1 if arguments.axis is None else arguments.axis
    return of_moves(layouts, moves, avals[0], axis)


def _specs(
    given: list[str] | None, avals: list[jax.ShapeDtypeStruct], sizes: dict[str, int] | None
) -> list[PartitionSpec] | None:
    if not given:
        return None
    assert sizes
    specs = [parse_spec("--spec", s, sizes) for s in _repeated("--spec", given, len(avals))]
    for spec, aval in zip(specs, avals, strict=True):
        check_spec(spec, aval, sizes)
    return specs


def _compile(
    target: Topology, sizes: dict[str, int] | None, variants: list[Variant], turns: int
) -> dict[str, Report]:
    reports = {}
    for number, variant in enumerate(variants, 1):
        tell(sys.stderr, f"compiling {variant.name} ({number} of {len(variants)})")
        try:
            reports[variant.name] = compile_for(
                target,
                variant.fn,
                *variant.avals,
                mesh=sizes,
                in_specs=variant.in_specs,
                out_specs=variant.out_specs,
                network_floor_bytes=variant.network_floor_bytes,
                unknown_turns=turns,
            )
        except SpecError as error:
            raise UserError(f"plait audit: --out-spec does not fit: {error}") from None
        except jax.errors.JaxRuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise UserError(
                f"plait audit: {variant.name} does not compile for {target.name}, the compiler "
                f"says: {reason}"
            ) from None
        except ImportError as error:
            # Of what reads the program; a function of the user's may itself import what is not.
            if "plait[audit]" not in str(error):
                raise
            raise UserError(f"plait audit: {error}") from None
    tell(sys.stderr, "")
    return reports


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"plait": plait.__version__}
    for package in ("jax", "jaxlib", "libtpu"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def _options(
    arguments: argparse.Namespace,
    target: Topology,
    sizes: dict[str, int] | None,
    variants: list[Variant],
) -> dict[str, Any]:
    """What was asked for, with the defaults filled in, as JSON types."""
    avals = variants[0].avals
    axis = None if arguments.function else 1 if arguments.axis is None else arguments.axis
    return {
        "function": arguments.function,
        "topology": target.name,
        "mesh": sizes,
        "shapes": [list(aval.shape) for aval in avals],
        "dtypes": [str(aval.dtype) for aval in avals],
        "axis": axis,
        "specs": arguments.spec,
        "out_specs": arguments.out_spec,
        "turns": arguments.turns,
    }


def _described(options: dict[str, Any]) -> str:
    """The arguments and the mesh in one line."""
    pairs = zip(options["shapes"], options["dtypes"], strict=True)
    arrays = ", ".join(f"{shape} {dtype}" for shape, dtype in pairs) or "no arguments"
    if not options["mesh"]:
        return f"{arrays}, on one device"
    return f"{arrays}, over " + ", ".join(f"{k}={v}" for k, v in options["mesh"].items())


def _save(
    arguments: argparse.Namespace,
    outputs: list[Path | None],
    title: str,
    options: dict[str, Any],
    reports: dict[str, Report],
) -> None:
    json_path, html_path = outputs
    versions = _versions()
    if arguments.json:
        programs = {name: report.to_dict() for name, report in reports.items()}
        numbers = {"options": options, "versions": versions, "programs": programs}
        text = json.dumps(numbers, indent=1, allow_nan=False)
        if json_path:
            json_path.write_text(text + "\n")
            print(f"\nNumbers: {json_path}")
        else:
            print(text)
    if html_path:
        from plait.cli.page import page

        described = f"{_described(options)}; compiled for {options['topology']}"
        html_path.write_text(page(title, described, versions, reports), encoding="utf-8")
        if arguments.json != "-":
            print(f"\nPage: {html_path}")
