"""The layouts that a plan compares, and the rows of documents in each."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from plait.attention.front import fitted
from plait.attention.kernels import Blockwise
from plait.cli.arguments import LAYOUTS
from plait.layout import Layout, Placed
from plait.packing import balance_segments

FEWEST_CHUNKS, MOST_CHUNKS = 8, 16
"""Of a rank in a balanced layout: fewer balance worse, more are small for kernels."""


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
    """One row of documents in a layout.

    Attributes:
      segment_ids: int32 in source order, [tokens of the row]; 0 is padding.
    """

    layout: Layout
    segment_ids: np.ndarray

    @property
    def tokens(self) -> int:
        """Tokens of the row, padding included."""
        return self.segment_ids.size

    @property
    def padding(self) -> int:
        """Tokens of padding."""
        return int((self.segment_ids == 0).sum())


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A kind of layout.

    Attributes:
      lay_out: the row of documents of given lengths, for a sequence length.
      per_batch: each batch has its own layout, and source positions go into attention as data.
    """

    name: str
    lay_out: Callable[[np.ndarray, int], Row]
    per_batch: bool = False

    def kernel(self, layout: Layout, row: Row, kernel: Blockwise) -> Blockwise:
        """The kernel with the blocks that attention gives it: fitted to chunks that it knows."""
        known: Any = kernel if self.per_batch else fitted(kernel, layout, row.tokens)
        return known


def candidates(ranks: int, has_documents: bool, tile: tuple[int, int]) -> list[Candidate]:
    """What there is to choose from; without documents nothing that goes by them.

    >>> [candidate.name for candidate in candidates(4, True, (256, 256))]
    ['contiguous', 'zigzag', 'half-swap', 'striped', 'zigzag documents', 'balanced']
    """

    def fixed(layout: Layout) -> Callable[[np.ndarray, int], Row]:
        return lambda lengths, total: Row(layout, segment_ids(lengths, lengths, total))

    found = [Candidate(name, fixed(layout(ranks))) for name, layout in LAYOUTS.items()]
    if has_documents:
        found += [
            Candidate("zigzag documents", functools.partial(_zigzag, ranks), per_batch=True),
            Candidate("balanced", functools.partial(_balanced, ranks, tile), per_batch=True),
        ]
    return found


def segment_ids(lengths: Sequence[int] | np.ndarray, room: np.ndarray, total: int) -> np.ndarray:
    """Ids 1, 2, 3 of documents that each stand at the start of their room; 0 is padding.

    >>> segment_ids([3, 1], np.array([4, 2]), 8).tolist()
    [1, 1, 1, 0, 2, 0, 0, 0]
    """
    ids = np.zeros(total, np.int32)
    starts = np.cumsum(room) - room
    for number, (start, length) in enumerate(zip(starts, lengths, strict=True), 1):
        ids[start : start + length] = number
    return ids


def chunk_of(ranks: int, sequence_length: int, tile: tuple[int, int]) -> int:
    """Tokens in a chunk of a balanced layout: of equal ones the most that are 16 a rank or fewer.

    Where it leaves 8 a rank or more, a multiple of the tile: positions are data to the kernel, and
    its blocks would straddle others.

    >>> chunk_of(4, 4096, (64, 64)), chunk_of(4, 4096, (128, 128)), chunk_of(4, 40, (128, 128))
    (64, 128, 1)
    """
    share = sequence_length // ranks
    numbers = [c for c in range(min(MOST_CHUNKS, share), 0, -1) if share % c == 0]
    step = math.lcm(*tile)
    fitting = (c for c in numbers if c >= FEWEST_CHUNKS and share // c % step == 0)
    return share // next(fitting, numbers[0])


def _balanced(ranks: int, tile: tuple[int, int], lengths: np.ndarray, total: int) -> Row:
    ids = segment_ids(lengths, lengths, total)
    return Row(balance_segments(ids, ranks, chunk=chunk_of(ranks, total, tile)).layout, ids)


def _zigzag(ranks: int, lengths: np.ndarray, total: int) -> Row:
    """Documents padded to a multiple of two pieces a rank; the row grows where it must."""
    step = 2 * ranks
    room = -(-lengths // step) * step
    longer = max(total, int(room.sum()))
    layout = Placed.zigzag_documents([*room.tolist(), longer - int(room.sum())], ranks)
    return Row(layout, segment_ids(lengths, room, longer))
