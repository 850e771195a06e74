"""What a benchmark writes: parts of the documentation, and its figures as JSON."""

import argparse
import json
import os
import pathlib
from collections.abc import Callable
from typing import Any

from plait.cli.arguments import UserError

DOCS = pathlib.Path(__file__).resolve().parent.parent / "docs"


def rewrite(page: pathlib.Path, name: str, text: str) -> None:
    """Put `text` between the page's markers <!-- name --> and <!-- end of name -->."""
    before, start, rest = page.read_text().partition(f"<!-- {name} -->\n")
    _, end, after = rest.partition(f"<!-- end of {name} -->")
    if not start or not end:
        raise ValueError(f"{page} has no part between <!-- {name} --> and <!-- end of {name} -->")
    page.write_text(f"{before}{start}{text.rstrip()}\n{end}{after}")


def add_outputs(parser: argparse.ArgumentParser, page: str) -> None:
    """The options of a benchmark that say where its figures go, and where they come from."""
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write results here")
    parser.add_argument(
        "--from", dest="source", type=pathlib.Path, metavar="FILE",
        help="take the results that --json wrote, and measure nothing",
    )  # fmt: skip
    parser.add_argument("--docs", action="store_true", help=f"rewrite the table in docs/{page}")


def present(
    arguments: argparse.Namespace,
    command: str,
    page: str,
    key: str,
    measured: Callable[[argparse.Namespace], dict[str, Any]],
    table: Callable[[dict[str, Any]], str],
) -> None:
    """Measure, or take what --json wrote, which has `key`; print the table; write as asked."""
    check_writable(command, arguments.json)
    source = arguments.source
    results = read(command, source, key) if source else measured(arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    text = table(results)
    print("\n" + text)
    if arguments.docs:
        rewrite(DOCS / page, command.removeprefix("plait "), text)


def check_writable(command: str, path: pathlib.Path | None) -> None:
    """UserError, before the slow part, where --json names what cannot be written."""
    if path is None:
        return
    there = path if path.exists() else path.parent
    if path.is_dir() or not there.exists() or not os.access(there, os.W_OK):
        why = "it is a folder" if path.is_dir() else "it can't be written there"
        raise UserError(f"{command}: --json is '{path}' and {why}: results.json works")


def read(command: str, path: pathlib.Path, key: str) -> dict[str, Any]:
    """What --json wrote before, which has this key; UserError where it did not."""
    try:
        results = json.loads(path.read_text())
    except OSError as error:
        why = (error.strerror or "it can't be read").lower()
    except ValueError:
        why = "no JSON"
    else:
        if isinstance(results, dict) and key in results:
            return results
        why = "of something else"
    raise UserError(
        f"{command}: --from is '{path}', {why}; it needs the file that --json wrote: "
        f"{command} --json {path.name} writes one"
    )
