"""All layouts with all strategies over the same rows of documents."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from plait.attention.cost import Prices
from plait.attention.kernels import Blockwise
from plait.attention.strategies.ulysses import group_layout
from plait.cli.plan.code import code
from plait.cli.plan.documents import Packed
from plait.cli.plan.estimates import (
    Option,
    Recommendation,
    Work,
    estimate,
    of_groups,
    recommend,
    refusals,
)
from plait.cli.plan.layouts import Candidate, Row, candidates
from plait.cli.plan.pairs import pairs_between_ranks, tiles_between_ranks
from plait.cli.progress import Progress
from plait.layout import Layout

FOR_POSITIONS_AS_DATA = ("all_gather", "ring")
"""The others balance any layout: to make one for each batch would gain nothing."""


@dataclasses.dataclass(frozen=True, eq=False)
class Compared:
    """All rows in one layout.

    Attributes:
      first: the first row, to be drawn.
      pairs: that are seen, int64 [rows, ranks].
      padding: the share of it in all rows.
      options: the layout with each strategy.
    """

    candidate: Candidate
    first: Row
    pairs: np.ndarray
    padding: float
    options: list[Option]


def compare(
    candidate: Candidate,
    packed: Packed,
    prices: Prices,
    kernel: Blockwise,
    inner: int,
    strategies: Sequence[str],
    progress: Callable[[str], None],
) -> Compared:
    """The rows in one layout, and what it costs with each strategy."""
    rows, works = [], []
    for number, lengths in enumerate(packed.rows, 1):
        progress(f"{candidate.name}: row {number} of {len(packed.rows)}")
        row = candidate.lay_out(lengths, packed.sequence_length)
        rows.append(row)
        works.append(_work(candidate, row, prices, kernel, inner))
    usable = [s for s in strategies if not candidate.per_batch or s in FOR_POSITIONS_AS_DATA]
    return Compared(
        candidate,
        first=rows[0],
        pairs=np.array([work.pairs.sum(axis=1) for work in works]),
        padding=sum(row.padding for row in rows) / sum(row.tokens for row in rows),
        options=estimate(candidate.name, works, inner, usable),
    )


def _work(candidate: Candidate, row: Row, prices: Prices, kernel: Blockwise, inner: int) -> Work:
    def tiles(layout: Layout) -> np.ndarray:
        return tiles_between_ranks(layout, row.segment_ids, candidate.kernel(layout, row, kernel))

    of_ranks, of_all_groups = tiles(row.layout), None
    if inner > 1:
        # Attention puts a group's tokens in order where the group then holds a layout's shard.
        grouped = None if candidate.per_batch else group_layout(row.layout, inner)
        of_all_groups = tiles(grouped) if grouped else of_groups(of_ranks, inner)
    return Work(
        pairs_between_ranks(row.layout, row.segment_ids),
        of_ranks,
        of_all_groups,
        dataclasses.replace(prices, length=row.tokens),
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """All that was found.

    Attributes:
      source: in words, where the documents are from.
      refused: of each strategy why it cannot be had, or None.
      program: the code to write, where something fits.
    """

    packed: Packed
    source: str
    prices: Prices
    kernel: Blockwise
    axes: tuple[int, int] | None
    refused: dict[str, str | None]
    layouts: list[Compared]
    recommended: Recommendation
    program: str | None

    @property
    def mean_pairs(self) -> float:
        """Visible pairs of the mean rank in a row, the same in all layouts."""
        return float(self.layouts[0].pairs.mean())


def make_plan(
    packed: Packed,
    source: str,
    prices: Prices,
    kernel: Blockwise,
    axes: tuple[int, int] | None = None,
) -> Plan:
    """Compare all layouts and strategies over the rows, and choose."""
    inner = axes[1] if axes else 1
    tile = kernel.q_block, kernel.k_block
    refused = refusals(prices, inner)
    strategies = [strategy for strategy, why_not in refused.items() if why_not is None]
    progress = Progress()
    layouts = [
        compare(candidate, packed, prices, kernel, inner, strategies, progress)
        for candidate in candidates(prices.ranks, packed.has_documents, tile)
    ]
    progress.done()
    options = [option for one in layouts for option in one.options]
    recommended = recommend(options, prices.machine)
    program = None
    if taken := recommended.option:
        program = code(
            taken.layout,
            taken.strategy,
            prices.ranks,
            packed.sequence_length,
            has_documents=packed.has_documents,
            tile=tile,
            axis_sizes=axes,
        )
    return Plan(packed, source, prices, kernel, axes, refused, layouts, recommended, program)
