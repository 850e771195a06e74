"""The picture of a plan: who holds what of a row, which pairs are whose, and how many these are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from plait.cli.picture import INK, rank_colors, tidy
from plait.cli.plan.compare import Compared, Plan
from plait.cli.plan.layouts import Row

PIXELS = 512
"""Of a map, along each side, and of a strip, at most."""

MANY_TOKENS = 1 << 20
"""From which on an axis has room for four of their numbers only."""

FEWEST_PIXELS_TO_OUTLINE = 6
"""Of a document in the strip: edges of shorter ones would hide what lies between them."""


def draw(plan: Plan, path: Path) -> None:
    """Save the picture; the suffix of the path says the format.

    A panel for each layout. Left, the causal map of the first row: queries down, keys to the right,
    each visible pair in the color of the rank that computes it. Right, above, the row in the color
    of the ranks that hold it; below, the visible pairs of each rank. Where a pixel holds the tokens
    of several ranks it has the mean of their colors.
    """
    panels = plan.layouts
    rows = -(-len(panels) // 2)
    colors = rank_colors(plan.prices.ranks)
    figure = Figure(figsize=(14, 1.2 + 3.3 * rows), layout="constrained", dpi=130)
    figure.suptitle(_title(plan), color=INK, fontsize=13)
    parts: Any = figure.subfigures(rows, 2, wspace=0.04, hspace=0.04)
    cards = np.atleast_1d(parts).ravel()
    taken = plan.recommended.option
    most = max(one.pairs[0].max() for one in panels)
    for card, one in zip(cards, panels, strict=False):
        name = one.candidate.name
        strategy = taken.strategy if taken and taken.layout == name else None
        _draw_panel(card, one, strategy, colors, float(most))
    figure.savefig(path)


def _title(plan: Plan) -> str:
    lengths = plan.packed.rows[0]
    documents = "1 document" if len(lengths) == 1 else f"{len(lengths):,} documents"
    row = f"row 1 of {len(plan.packed.rows)}: " if len(plan.packed.rows) > 1 else ""
    return (
        f"Causal attention over {row}{documents} in {plan.prices.length:,} tokens, laid out over "
        f"{plan.prices.ranks} ranks"
    )


def _draw_panel(
    card: Any, one: Compared, strategy: str | None, colors: np.ndarray, most: float
) -> None:
    pairs = one.pairs[0]
    title = f"{one.candidate.name}: busiest / mean = {pairs.max() / pairs.mean():.2f}"
    recommended = f"   (recommended, with {strategy})" if strategy else ""
    card.suptitle(title + recommended, x=0.02, ha="left", fontsize=11, color=INK, fontweight="bold")
    axes = card.subplot_mosaic(
        [["map", "strip"], ["map", "bars"]], width_ratios=(1, 1.35), height_ratios=(1, 3.4)
    )
    shades = pixel_colors(one.first, colors)
    _draw_map(axes["map"], one.first, shades)
    _draw_strip(axes["strip"], one.first, shades)
    _draw_bars(axes["bars"], pairs, colors, most)


def pixel_colors(row: Row, colors: np.ndarray) -> np.ndarray:
    """The mean color of the ranks that hold the tokens of each pixel: RGB [pixels, 3]."""
    edges, holder = _edges(row), _holder(row)
    return np.stack(
        [np.add.reduceat(shade[holder], edges[:-1]) / np.diff(edges) for shade in colors[:, :3].T],
        axis=1,
    )


def _holder(row: Row) -> np.ndarray:
    """The rank of each token, in source order."""
    holder = np.empty(row.tokens, np.int64)
    share = row.tokens // row.layout.ranks
    holder[row.layout.positions(row.tokens)] = np.repeat(np.arange(row.layout.ranks), share)
    return holder


def visible_pixels(row: Row) -> np.ndarray:
    """Whether some query of each pixel sees some key of each other: bool [pixels, pixels]."""
    edges, ids = _edges(row), row.segment_ids
    first, last = ids[edges[:-1]], ids[edges[1:] - 1]
    # Documents stand one after the other: one that is in both pixels is last here and first there.
    earlier = np.tri(first.size, k=-1, dtype=bool)
    visible = earlier & (first[:, None] == last) & (last != 0)
    np.fill_diagonal(visible, np.logical_or.reduceat(ids != 0, edges[:-1]))
    return visible


def _edges(row: Row) -> np.ndarray:
    pixels = min(PIXELS, row.tokens)
    return np.arange(pixels + 1) * row.tokens // pixels


def _draw_map(axes: Any, row: Row, shades: np.ndarray) -> None:
    visible = visible_pixels(row)
    image = np.where(visible[..., None], shades[:, None], 1.0)
    extent = (0, row.tokens, row.tokens, 0)
    axes.imshow(image, extent=extent, interpolation="nearest", aspect="auto")
    axes.set_xlabel("key position", fontsize=9, color=INK)
    axes.set_ylabel("query position", fontsize=9, color=INK)
    _mark(axes.xaxis, row.tokens, 4)
    _mark(axes.yaxis, row.tokens, 4)
    tidy(axes)


def _mark(axis: Any, length: int, parts: int) -> None:
    """Ticks at parts of the sequence: at these rank borders lie."""
    at = length * np.arange(parts + 1) / parts
    axis.set_ticks(at, [_tokens(value) for value in at])


def _tokens(count: float) -> str:
    """A number of tokens for an axis, in units of 1024 where there are many.

    >>> _tokens(0), _tokens(1536), _tokens(131072), _tokens(98304.5)
    ('0', '1536', '128K', '96K')
    """
    return f"{count / 1024:.0f}K" if count >= 8192 else f"{count:.0f}"


def _draw_strip(axes: Any, row: Row, shades: np.ndarray) -> None:
    length = row.tokens
    axes.imshow(shades[None], extent=(0, length, 0, 1), interpolation="nearest", aspect="auto")
    ids = row.segment_ids
    edges = np.concatenate([[0], np.flatnonzero(np.diff(ids)) + 1, [length]])
    is_wide = np.diff(edges) >= FEWEST_PIXELS_TO_OUTLINE * length / PIXELS
    shown = np.union1d(edges[:-1][is_wide], edges[1:][is_wide])
    axes.vlines(shown[(shown > 0) & (shown < length)], 0, 1, color="white", linewidth=0.8)
    for start, stop in zip(edges[:-1][is_wide], edges[1:][is_wide], strict=True):
        if ids[start] == 0:
            axes.fill_between([start, stop], 0, 1, color="white", alpha=0.75, linewidth=0)
    axes.set_xlim(0, length)
    axes.set_yticks([])
    _mark(axes.xaxis, length, 8 if length < MANY_TOKENS else 4)
    axes.set_title(_strip_title(row, shown.size > 2), fontsize=9, color=INK)
    tidy(axes)
    axes.spines["left"].set_visible(False)


def _strip_title(row: Row, has_lines: bool) -> str:
    holder = _holder(row)
    if np.count_nonzero(np.diff(holder)) > PIXELS:
        return "the row, by rank: mean colors where finer than a pixel"
    return "the row, by rank" + ("; white lines end documents" if has_lines else "")


def _draw_bars(axes: Any, pairs: np.ndarray, colors: np.ndarray, most: float) -> None:
    unit, word = (1e9, "billion") if most >= 1e9 else (1e6, "million")
    work = pairs / unit
    # Bars without space between them: at 256 ranks spaces would flicker.
    axes.bar(np.arange(work.size), work, width=1.0 if work.size > 32 else 0.85, color=colors)
    axes.axhline(work.mean(), color=INK, linewidth=1, linestyle=(0, (4, 2)))
    axes.text(
        1.01,
        work.mean(),
        "mean",
        transform=axes.get_yaxis_transform(),
        va="center",
        color=INK,
        fontsize=9,
    )
    axes.set_xlim(-0.6, work.size - 0.4)
    axes.set_ylim(0, 1.05 * most / unit)
    step = -(-work.size // 8)
    axes.set_xticks(np.arange(0, work.size, step))
    axes.set_xlabel("rank", fontsize=9, color=INK)
    axes.set_ylabel(f"{word} visible pairs", fontsize=9, color=INK)
    tidy(axes)
