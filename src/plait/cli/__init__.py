"""The command line: `plait demo`, `plait audit`, `plait bench`, `plait plan`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from plait.cli import audit, bench, demo, plan
from plait.cli.arguments import Parser, UserError


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 2, after one line on stderr, for a user's error.

    >>> main(["demo", "--ranks", "0"])
    2
    """
    parser = Parser(prog="plait", description="Load-balanced context parallelism for JAX.")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    demo.add_command(commands)
    audit.add_command(commands)
    bench.add_command(commands)
    plan.add_command(commands)
    try:
        arguments = parser.parse_args(argv)
        arguments.argv = sys.argv[1:] if argv is None else list(argv)
        return arguments.run(arguments)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
