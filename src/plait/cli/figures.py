"""The figures of a report as text, the same on the terminal and on the page."""

from __future__ import annotations

import collections
import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping, Sequence

from plait.audit import Collective, Report


def megabytes(count: float) -> str:
    """Three digits of the megabytes (10^6 bytes) of a count of bytes.

    >>> megabytes(11_800_344), megabytes(1_527_988_768), megabytes(0), megabytes(12)
    ('11.8', '1,528', '0', '<0.001')
    >>> megabytes(3_801_088), megabytes(99_980_000), megabytes(1000)
    ('3.80', '100', '0.00100')
    """
    if count < 1000:
        return "<0.001" if count else "0"
    return f"{count / 1e6:,.0f}" if count >= 99.95e6 else f"{count / 1e6:#.3g}"


def ratio(value: float | None) -> str:
    """A multiple, with one digit behind the point up to 100; nothing where it is not known."""
    if value is None or value != value:
        return ""
    return f"{value:,.1f}" if value < 99.95 else f"{value:,.0f}"


def kinds(report: Report) -> str:
    """How many collectives of each kind, a line for each; with the turns of loops if there are any.

    >>> kinds(Report("cpu", (), (), 0, 0, 0, 0, 0, 0, 0))
    'none'
    """
    found, turns = collections.Counter[str](), collections.Counter[str]()
    for collective in report.collectives:
        found[collective.kind] += 1
        turns[collective.kind] += collective.executions
    lines = [
        f"{count} {kind}" + (f", run {turns[kind]} times" if turns[kind] != count else "")
        for kind, count in found.items()
    ]
    return "\n".join(lines) or "none"


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a table; `show` gives the text of a cell, empty where nothing is known."""

    heading: str
    show: Callable[..., str]
    is_text: bool = False


def _scaled(value: float | None, factor: float, digits: int) -> str:
    return "" if value is None else f"{value * factor:,.{digits}f}"


def _counts(report: Report) -> str:
    return ", ".join(str(report.counts.get(kind, 0)) for kind in ("gather", "while", "copy"))


FIGURES: tuple[Column, ...] = (
    Column("collectives", kinds, is_text=True),
    Column("stages", lambda r: str(r.stages)),
    Column("traffic,\nMB", lambda r: megabytes(r.traffic_bytes)),
    Column("traffic\n/ floor", lambda r: ratio(r.traffic_ratio)),
    Column("HBM,\nMB", lambda r: megabytes(r.hbm_bytes)),
    Column("HBM\n/ floor", lambda r: ratio(r.hbm_ratio)),
    Column("temp,\nMB", lambda r: megabytes(r.temp_bytes)),
    Column("gathers,\nwhiles,\ncopies", _counts),
    Column("compiler's\nestimate,\nµs", lambda r: _scaled(r.estimated_seconds, 1e6, 1)),
    Column("compiled\nin, s", lambda r: _scaled(r.compile_seconds, 1, 1)),
)
"""Of a report. MB are 10^6 bytes."""


def _where(collective: Collective) -> str:
    # A path below the current directory is told as the user would write it.
    return collective.source.removeprefix(os.getcwd() + os.sep)


COLLECTIVES: tuple[Column, ...] = (
    Column("stage", lambda c: str(c.stage) if c.stage else "none"),
    Column("kind", lambda c: c.kind, is_text=True),
    Column("MB", lambda c: megabytes(c.bytes)),
    Column("sent,\nMB", lambda c: megabytes(c.traffic_bytes)),
    Column("partici-\npants", lambda c: str(c.participants)),
    Column("times", lambda c: str(c.executions)),
    Column("made at", _where, is_text=True),
)
"""Of a collective; the figures are those of one device and one execution."""

LEGEND = (
    "Figures of one device, static: the compiler's plan, nothing was run. The HBM floor is each "
    "argument read and each result written once; the traffic floor, for a move of plait's, the "
    "most bytes that any rank has to send. A fusion counts as one operation and the gathers and "
    "copies inside it count too."
)
ESTIMATE = (
    "The compiler's estimate is weak: it leaves out collectives, launches, overlap and the inside "
    "of Pallas calls."
)


def notes(reports: Iterable[Report]) -> list[str]:
    """What has to be said beside the figures."""
    estimated = any(report.estimated_seconds is not None for report in reports)
    return [LEGEND, ESTIMATE] if estimated else [LEGEND]


def known(columns: Sequence[Column], rows: Sequence[object]) -> list[Column]:
    """The columns that have something to say of some row."""
    return [column for column in columns if any(column.show(row) for row in rows)]


def table(
    columns: Sequence[Column], rows: Mapping[str, object] | Sequence[object], first: str = ""
) -> str:
    """A plain table; rows given by name have the name in a column before the others.

    >>> print(table([Column("double", lambda n: str(2 * n))], {"one": 1, "fifty": 50}, "number"))
    number  double
    ──────────────
    one          2
    fifty      100
    """
    values = [*rows.values()] if isinstance(rows, Mapping) else [*rows]
    columns = known(columns, values)
    lines = [[c.heading for c in columns], *([c.show(v) for c in columns] for v in values)]
    text = [column.is_text for column in columns]
    if isinstance(rows, Mapping):
        text = [True, *text]
        lines = [[name, *cells] for name, cells in zip([first, *rows], lines, strict=True)]
    split = [[cell.split("\n") for cell in cells] for cells in lines]
    widths = [
        max(len(part) for cell in cells for part in cell) for cells in zip(*split, strict=True)
    ]
    printed = []
    for cells in split:
        height = max(map(len, cells))
        # Headings stand on the rule below them; cells hang from the line of their name.
        padding = [[""] * (height - len(cell)) for cell in cells]
        is_heading = cells is split[0]
        filled = [p + c if is_heading else c + p for p, c in zip(padding, cells, strict=True)]
        for parts in zip(*filled, strict=True):
            aligned = (
                part.ljust(width) if is_text else part.rjust(width)
                for part, width, is_text in zip(parts, widths, text, strict=True)
            )
            printed.append("  ".join(aligned).rstrip())
        if is_heading:
            printed.append("─" * (sum(widths) + 2 * (len(widths) - 1)))
    return "\n".join(printed)
