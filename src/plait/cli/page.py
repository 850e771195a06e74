"""The figures of an audit as one HTML page that stands alone: inline SVG and CSS, no script."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from plait.audit import Collective, Report
from plait.cli.figures import COLLECTIVES, FIGURES, Column, known, megabytes, notes, ratio

MOST_COLORS = 7
MOST_BOXES = 8
"""Of a stage; what has more says how many."""

REST, UNSEEN = "other operations", "counted by the compiler alone"

# Of the pictures, in units of their own; the page scales them to its width.
_WIDTH, _BAR, _ROW, _PLOT = 960, 22, 58, 760

_STYLE = """
:root {
  color-scheme: light dark;
  --paper: #ffffff; --card: #f5f6f8; --ink: #1c2128; --soft: #59636e; --line: #d5d9df;
  --floor: #1c2128; --on: #ffffff;
  --c0: #2865a8; --c1: #a8520b; --c2: #2a7a4f; --c3: #7a4bb0; --c4: #b3384f; --c5: #14707a;
  --c6: #7c6208; --rest: #6b737d;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14181d; --card: #1d2329; --ink: #e8ebee; --soft: #a3adb8; --line: #3a424b;
    --floor: #f4f6f8; --on: #10141a;
    --c0: #76b0ee; --c1: #f0a35c; --c2: #6fcb98; --c3: #bd9cf0; --c4: #f28ca0; --c5: #63cbd4;
    --c6: #d9bf57; --rest: #98a2ad;
  }
}
body {
  margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 62rem; background: var(--paper);
  color: var(--ink); font: 16px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif;
}
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .5rem; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .5rem; }
h3 { font-size: 1rem; margin: 0 0 .5rem; overflow-wrap: anywhere; }
p { margin: .25rem 0 .75rem; max-width: 48rem; overflow-wrap: anywhere; }
.soft, figcaption { color: var(--soft); font-size: .9rem; }
figure { margin: 1rem 0; }
svg { display: block; width: 100%; min-width: 40rem; height: auto; }
svg text { fill: var(--ink); font-size: 14px; }
svg .name { font-weight: 600; paint-order: stroke; stroke: var(--paper); stroke-width: 5px; }
svg .soft { fill: var(--soft); font-size: 13px; }
svg .on { fill: var(--on); font-size: 12px; }
svg .grid { stroke: var(--line); }
svg .floor { stroke: var(--floor); stroke-width: 2; stroke-dasharray: 5 4; }
svg .unseen { fill: url(#unseen); stroke: var(--soft); }
svg .cut { stroke: var(--ink); stroke-width: 7; fill: none; }
svg .cut + .cut { stroke: var(--paper); stroke-width: 5; }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; padding: 0; margin: .75rem 0;
  list-style: none; font-size: .9rem; }
.legend i { display: inline-block; width: .8em; height: .8em; margin-right: .45em;
  border-radius: 2px; vertical-align: -.05em; box-sizing: border-box; }
.legend i.unseen { border: 1px solid var(--soft);
  background: repeating-linear-gradient(135deg, var(--soft) 0 1px, transparent 1px 4px); }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 19rem), 1fr));
  gap: 1rem; }
.card { background: var(--card); border-radius: 8px; padding: .9rem 1rem; min-width: 0; }
.stages { display: flex; gap: .6rem; overflow-x: auto; }
.stage { flex: 1 0 8.6rem; }
.stage > p { margin: 0 0 .35rem; border-bottom: 1px solid var(--line); }
.box { background: var(--paper); border: 1px solid var(--line); border-left: .35rem solid;
  border-radius: 4px; padding: .35rem .6rem; margin-bottom: .4rem; font-size: .85rem;
  line-height: 1.4; }
.box b { display: block; font-weight: 600; }
.wide { overflow-x: auto; margin-bottom: .75rem; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .7rem .35rem 0; text-align: right; vertical-align: top;
  border-bottom: 1px solid var(--line); white-space: pre-line; }
thead th { vertical-align: bottom; color: var(--soft); font-weight: 500; white-space: pre; }
th.text, td.text { text-align: left; }
tbody th { font-weight: 600; white-space: nowrap; }
td.text { white-space: pre; }
"""

_HATCHING = (
    '<defs><pattern id="unseen" width="6" height="6" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><path d="M0 0V6" stroke="var(--soft)" stroke-width="1.5"/>'
    "</pattern></defs>"
)


def page(
    title: str, described: str, versions: Mapping[str, str | None], reports: Mapping[str, Report]
) -> str:
    """The page.

    Args:
      title: what was compiled.
      described: the arguments, the mesh and the topology, in a line.
      versions: of packages, by name; None is not installed.
      reports: by the names of the programs.
    """
    colors = _colors(reports.values())
    used = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{escape(described)}.</p>",
        '<p class="soft">Static figures by the compiler, of the program of one device. '
        f"Nothing was run; nothing here is a measurement. {escape(used)}.</p>",
        "<h2>Where the bytes go</h2>",
        _legend(colors, reports.values()),
        f'<figure><div class="wide">{_bars(reports, colors)}</div>'
        "<figcaption>Bytes of HBM read and written, by the kind "
        "of operation, as multiples of the floor: each argument read and each result written once. "
        "Hatched is what the compiler counts beyond plait's reading, such as what a permute sends, "
        "twice. A bar that is cut is longer than it is drawn, its parts in proportion."
        "</figcaption></figure>",
        "<h2>Stages of communication</h2>",
        '<p class="soft">A collective stands one stage after those whose results it needs; those '
        "of one stage may be under way together. Bytes are what one device carries, the larger of "
        "what it gives and what it takes.</p>",
        f'<div class="cards">{"".join(_card(n, r, colors) for n, r in reports.items())}</div>',
        "<h2>The figures</h2>",
        _table(FIGURES, [*reports.values()], [*reports]),
        *(f'<p class="soft">{escape(note)}</p>' for note in notes(reports.values())),
    ]
    if len(reports) == 1 and (collectives := next(iter(reports.values())).collectives):
        parts += ["<h2>Each collective</h2>", _table(COLLECTIVES, collectives)]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}: plait audit</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )


def _colors(reports: Iterable[Report]) -> dict[str, str]:
    """A CSS color for each kind of operation: its own for collectives and for the heaviest."""
    weights: dict[str, float] = collections.defaultdict(float)
    communicating: dict[str, None] = {}
    for report in reports:
        communicating |= {collective.kind: None for collective in report.collectives}
        for kind, count in report.bytes_by_kind.items():
            weights[kind] += count / max(report.floor_bytes, 1)
    heaviest = sorted(weights.keys() - communicating, key=lambda kind: (-weights[kind], kind))
    ordered = [*communicating, *heaviest][:MOST_COLORS]
    return {kind: f"var(--c{number})" for number, kind in enumerate(ordered)}


@dataclasses.dataclass(frozen=True)
class _Segment:
    kind: str
    bytes: int


def _segments(report: Report, colors: Mapping[str, str]) -> list[_Segment]:
    by_kind = report.bytes_by_kind
    shown = [_Segment(kind, by_kind[kind]) for kind in colors if kind in by_kind]
    rest = sum(count for kind, count in by_kind.items() if kind not in colors)
    return [
        s
        for s in (
            *shown,
            _Segment(REST, rest),
            _Segment(UNSEEN, report.hbm_bytes - report.counted_bytes),
        )
        if s.bytes > 0
    ]


def _legend(colors: Mapping[str, str], reports: Iterable[Report]) -> str:
    present = {s.kind: None for report in reports for s in _segments(report, colors)}
    items = [
        '<i class="unseen"></i>' + UNSEEN
        if kind == UNSEEN
        else f'<i style="background: {colors.get(kind, "var(--rest)")}"></i>{escape(kind)}'
        for kind in (*colors, REST, UNSEEN)
        if kind in present
    ]
    return f'<ul class="legend">{"".join(f"<li>{item}</li>" for item in items)}</ul>'


def axis_end(ratios: Sequence[float]) -> float:
    """Where the axis ends: at the largest, unless that would leave the others too small to see.

    >>> axis_end([4.0, 5.0, 224.0]), axis_end([4.0, 5.0, 9.0]), axis_end([0.5])
    (5.0, 9.0, 1.0)
    """
    ordered = sorted((1.0, *ratios))
    gap = next((i for i, (a, b) in enumerate(itertools.pairwise(ordered)) if i and b > 4 * a), None)
    return ordered[-1 if gap is None else gap]


def _tick(end: float) -> float:
    return next((s for s in (0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500) if end / s <= 8), end)


def _bars(reports: Mapping[str, Report], colors: Mapping[str, str]) -> str:
    floors = {name: max(report.floor_bytes, 1) for name, report in reports.items()}
    end = axis_end([report.hbm_bytes / floors[name] for name, report in reports.items()])
    scale = _PLOT / (1.04 * end)
    height = _ROW * len(reports) + 66
    drawn = [_HATCHING]
    step = _tick(end)
    for number in range(int(end / step) + 1):
        x = number * step * scale
        drawn.append(f'<path class="grid" d="M{x:.1f} 24V{height - 38}"/>')
        anchor = "middle" if number else "start"
        drawn.append(
            f'<text class="soft" x="{x:.1f}" y="{height - 20}" text-anchor="{anchor}">'
            f"{number * step:g}{'x' if number else ''}</text>"
        )
    rows = [(34 + row * _ROW, name) for row, name in enumerate(reports)]
    drawn += [_bar(reports[name], y + 19, scale / floors[name], colors) for y, name in rows]
    drawn.append(f'<path class="floor" d="M{scale:.1f} 20V{height - 38}"/>')
    # Last, as their edges keep the lines off the letters.
    drawn += [
        f'<text class="name" x="0" y="{y + 12}">{escape(_short(name))}</text>' for y, name in rows
    ]
    anchor = "end" if scale > _WIDTH / 2 else "start"
    drawn.append(
        f'<text class="soft" x="{scale:.1f}" y="13" text-anchor="{anchor}">'
        "the floor: read and write once</text>"
    )
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" '
        'aria-label="HBM bytes of each program, as multiples of its floor">'
        f"{''.join(drawn)}</svg>"
    )


def _short(name: str) -> str:
    return name if len(name) <= 100 else name[:99] + "…"


def _bar(report: Report, y: int, scale: float, colors: Mapping[str, str]) -> str:
    x, drawn = 0.0, []
    is_cut = report.hbm_bytes * scale > _PLOT
    scale = _PLOT / report.hbm_bytes if is_cut else scale
    for segment in _segments(report, colors):
        width = segment.bytes * scale
        tip = f"<title>{escape(f'{segment.kind}: {megabytes(segment.bytes)} MB')}</title>"
        paint = (
            'class="unseen"'
            if segment.kind == UNSEEN
            else f'fill="{colors.get(segment.kind, "var(--rest)")}"'
        )
        drawn.append(
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_BAR}" {paint}>{tip}</rect>'
        )
        # 7 units a letter are enough for the fonts that a browser may choose.
        if segment.kind != UNSEEN and width > 7 * len(segment.kind) + 12:
            drawn.append(
                f'<text class="on" x="{x + 6:.1f}" y="{y + 15}">{escape(segment.kind)}</text>'
            )
        x += width
    if is_cut:
        cut = _PLOT - 24
        drawn += [f'<path class="cut" d="M{cut} {y - 2}l7 9l-7 8l7 9"/>'] * 2
    shown = escape(f"{megabytes(report.hbm_bytes)} MB")
    if multiple := ratio(report.hbm_ratio):
        shown += f", {multiple}x"
    drawn.append(f'<text x="{x + 8:.1f}" y="{y + 16}">{shown}</text>')
    return "".join(drawn)


def _card(name: str, report: Report, colors: Mapping[str, str]) -> str:
    by_stage: dict[int, list[Collective]] = {}
    for collective in report.collectives:
        by_stage.setdefault(collective.stage, []).append(collective)
    columns = "".join(_stage(stage, by_stage[stage], colors) for stage in sorted(by_stage))
    if not columns:
        columns = '<p class="soft">No collectives: nothing leaves a device.</p>'
    later = report.stages > max(by_stage, default=0)
    more = (
        f'<p class="soft">{report.stages} serial stages in all, as loops turn.</p>' if later else ""
    )
    return (
        f'<div class="card"><h3>{escape(name)}</h3><div class="stages">{columns}</div>{more}</div>'
    )


def _stage(stage: int, collectives: Sequence[Collective], colors: Mapping[str, str]) -> str:
    heading = f"stage {stage}" if stage else "within a device"
    boxes = []
    for c in collectives[:MOST_BOXES]:
        times = f"<br>{c.executions} times" if c.executions != 1 else ""
        boxes.append(
            f'<div class="box" style="border-left-color: {colors.get(c.kind, "var(--rest)")}">'
            f"<b>{escape(c.kind)}</b>{escape(megabytes(c.bytes))} MB{times}<br>"
            f"{c.participants} participant{'s' if c.participants != 1 else ''}</div>"
        )
    if len(collectives) > MOST_BOXES:
        boxes.append(f'<p class="soft">and {len(collectives) - MOST_BOXES} more</p>')
    return f'<div class="stage"><p class="soft">{heading}</p>{"".join(boxes)}</div>'


def _table(
    columns: Sequence[Column], rows: Sequence[object], names: Sequence[str] | None = None
) -> str:
    columns = known(columns, rows)
    head = "".join(_cell("th", c.heading, c.is_text) for c in columns)
    lines = ["".join(_cell("td", c.show(row), c.is_text) for c in columns) for row in rows]
    if names is not None:
        head = _cell("th", "program", True) + head
        lines = [_cell("th", n, True) + line for n, line in zip(names, lines, strict=True)]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return (
        f'<div class="wide"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _cell(tag: str, text: str, is_text: bool) -> str:
    kind = ' class="text"' if is_text else ""
    return f"<{tag}{kind}>{escape(text)}</{tag}>"
