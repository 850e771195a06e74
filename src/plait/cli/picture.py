"""The picture of the demo: who holds which part of a sequence, and how much work that is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from plait import Causal, Layout, Mask

INK, FAINT = "#222222", "#8a8a8a"


def rank_colors(ranks: int) -> np.ndarray:
    """One color a rank, dark to light: RGBA [ranks, 4]."""
    return matplotlib.colormaps["viridis"](np.linspace(0.05, 0.95, ranks))


def draw(layouts: Mapping[str, Layout], segment_ids: np.ndarray, mask: Mask, path: Path) -> None:
    """Save the picture of one row of documents; the suffix of the path says the format.

    On the left, for each layout, the keys that each query sees along the sequence, in the color of
    the rank that holds it: the area of a color is the work of that rank. On the right the same
    areas as bars.

    Args:
      layouts: what to draw, by name, all of as many ranks.
      segment_ids: int32 [sequence], in source order.
      mask: the mask.
      path: where to save; the folder exists.
    """
    ranks = next(iter(layouts.values())).ranks
    colors = rank_colors(ranks)
    figure = Figure(figsize=(12, 1.6 + 2.3 * len(layouts)), layout="constrained", dpi=150)
    axes: Any = figure.subplots(
        len(layouts), 2, squeeze=False, sharex="col", sharey="col", width_ratios=(5, 3)
    )
    documents = int(segment_ids.max())
    figure.suptitle(
        f"{_words(mask)} attention over {documents} document{'s' if documents != 1 else ''} in one "
        f"sequence of {segment_ids.size:,} tokens, laid out over {ranks} ranks",
        color=INK,
        fontsize=14,
    )
    for (name, layout), (sequence, bars) in zip(layouts.items(), axes, strict=True):
        keys = mask.keys_seen(segment_ids)
        _draw_sequence(sequence, name, layout, segment_ids, keys, colors)
        _draw_bars(bars, layout.work(segment_ids.size, mask, segment_ids), colors)
    axes[-1, 0].set_xlabel("source position (tokens); the strip shows which rank holds it")
    axes[-1, 1].set_xlabel("rank")
    figure.savefig(path)


def _words(mask: Mask) -> str:
    return "Causal" if mask == Causal() else repr(mask)


def _draw_sequence(
    axes: Any,
    name: str,
    layout: Layout,
    segment_ids: np.ndarray,
    keys: np.ndarray,
    colors: np.ndarray,
) -> None:
    length = segment_ids.size
    holder = np.repeat(np.arange(layout.ranks), length // layout.ranks)[layout.slots(length)]
    top = keys.max()
    strip = (-0.34 * top, -0.10 * top)
    # An image, not a polygon a rank: under stripes of one token every column changes color.
    columns = colors[holder][None]
    axes.imshow(columns, extent=(0, length, *strip), aspect="auto", interpolation="nearest")
    shape = axes.imshow(columns, extent=(0, length, 0, top), aspect="auto", interpolation="nearest")
    outline = axes.fill_between(np.arange(length) + 0.5, keys, color="none")
    shape.set_clip_path(outline.get_paths()[0], transform=axes.transData)
    axes.plot(np.arange(length) + 0.5, keys, color=INK, linewidth=0.6)

    edges = np.flatnonzero(np.diff(segment_ids)) + 1
    axes.vlines(edges, strip[0], 1.08 * top, color=INK, linewidth=0.8, linestyle=(0, (4, 2)))
    if (segment_ids == 0).any():
        start = int(np.flatnonzero(segment_ids)[-1]) + 1
        # Held by a rank like any other token, but no work.
        axes.fill_between([start, length], *strip, color="white", alpha=0.6, linewidth=0)
        if length - start > length / 10:
            middle = (start + length) / 2
            axes.text(middle, 0.04 * top, "padding", ha="center", color=FAINT, fontsize=9)
    _number_runs(axes, layout, segment_ids, float(np.mean(strip)))
    axes.set_xlim(0, length)
    axes.set_ylim(1.1 * strip[0], 1.12 * top)
    axes.set_yticks([tick for tick in MaxNLocator(4).tick_values(0, int(top)) if tick <= top])
    axes.set_title(name, loc="left", color=INK, fontweight="bold")
    axes.set_ylabel("keys seen\nby the query")
    tidy(axes)


def _number_runs(axes: Any, layout: Layout, segment_ids: np.ndarray, height: float) -> None:
    length = segment_ids.size
    for rank in range(layout.ranks):
        for start, stop in layout.runs(length, rank):
            if stop - start < length / 40:
                continue
            middle = (start + stop) / 2
            # The colors of the first half of the ranks are dark, except where padding is paled.
            is_dark = rank < layout.ranks / 2 and segment_ids[int(middle)] != 0
            color = "white" if is_dark else INK
            axes.text(middle, height, rank, color=color, ha="center", va="center", fontsize=8)


def _draw_bars(axes: Any, pairs: np.ndarray, colors: np.ndarray) -> None:
    work = pairs / 1e6
    mean = work.mean()
    axes.bar(np.arange(work.size), work, color=colors)
    axes.axhline(mean, color=INK, linewidth=1, linestyle=(0, (4, 2)))
    axes.set_title(f"busiest / mean = {np.max(work) / mean:.2f}", loc="right", color=INK)
    axes.text(
        1.01, mean, "mean", transform=axes.get_yaxis_transform(), va="center", color=INK, fontsize=9
    )
    axes.set_xticks(np.arange(0, work.size, -(-work.size // 16)))
    axes.set_ylabel("work (million\nvisible pairs)")
    tidy(axes)


def tidy(axes: Any) -> None:
    """Axes without a frame, in the ink of the picture."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=INK, labelsize=9)
