"""Layouts made for one batch of documents: equal tokens and near-equal work for every rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from plait.layout import Placed, at_least_one
from plait.mask import Mask
from plait.packing.checks import as_ids, as_lengths
from plait.packing.solver import assign, lower_bound
from plait.packing.work import as_tile, attention_work, check_tile, other_work

CHUNKS_PER_RANK = 16


def max_over_mean(work: np.ndarray) -> float:
    """The heaviest over the mean, 1 where there is no work at all.

    >>> max_over_mean(np.array([3, 1]))
    1.5
    """
    return float(work.max() / work.mean()) if work.any() else 1.0


@dataclasses.dataclass(frozen=True, eq=False)
class Balance:
    """A layout made for one batch, and how even it is.

    Attributes:
      layout: the layout, for exactly this length; a rank holds its chunks in ascending order.
      segment_ids: int32, of the batch that it was made for, padding included.
      work: what was balanced, of each rank: int64 or float64 [ranks].
      lower_bound: what the heaviest rank does at least in any layout of these chunks.
      pairs: exact (query, key) pairs of each rank, int64 [ranks].
      tile_pairs: pairs in all tiles that a kernel computes, int64 [ranks]; None without a tile.
    """

    layout: Placed
    segment_ids: np.ndarray
    work: np.ndarray
    lower_bound: float
    pairs: np.ndarray
    tile_pairs: np.ndarray | None

    @property
    def ratio(self) -> float:
        """The heaviest rank's work over the mean: how long all wait for one, 1 at best."""
        return max_over_mean(self.work)

    @property
    def above_bound(self) -> float:
        """How far the heaviest rank is above the lower bound, as a fraction; 0 is optimal."""
        return float(self.work.max() / self.lower_bound - 1) if self.lower_bound else 0.0

    def __str__(self) -> str:
        return (
            f"{self.layout}: the heaviest rank has {self.ratio:.5f} times the mean work, "
            f"{self.above_bound:.2%} above the lower bound"
        )


def balance(
    document_lengths: Sequence[int] | np.ndarray,
    ranks: int,
    *,
    sequence_length: int | None = None,
    chunk: int | None = None,
    mask: Mask | None = None,
    tile: tuple[int, int] | None = None,
    token_work: float | np.ndarray = 0,
    key_work: float = 0,
    tolerance: float = 1e-4,
) -> Balance:
    """A layout for documents that lie one after the other: equal tokens, near-equal work a rank.

    Documents may have any lengths and are cut wherever a chunk ends; padding comes once, at the
    end of the pack. Whatever the layout, attention stays exact: it goes by source positions.

    Args:
      document_lengths: tokens of each document, in source order. A length of 0 holds nothing.
      ranks: ranks of the context axis.
      sequence_length: tokens of the pack, padding included. None: as few as the chunks allow.
      chunk: tokens in a chunk, the longest run that stays together. None: a sixteenth of a rank's
        share, rounded up to a multiple of the tile. Smaller chunks balance better: a rank should
        hold at least 8. It should be a multiple of the kernel's blocks, which don't know where
        the chunks end if positions are data.
      mask, tile, token_work, key_work: how work is counted, as in `chunk_work`: by exact pairs, or
        by the tiles of a kernel, and with work beside attention. An array of token work has an
        entry for each token of the documents, [tokens].
      tolerance: as in `assign`.

    Returns:
      A `Balance`.

    Raises:
      ValueError, TypeError: lengths that are no integers, negative or beyond int32, by the number
        of the document; a sequence that is too short or no multiple; what `chunk_work` raises.

    >>> made = balance([5, 11, 3], ranks=2, chunk=2)
    >>> made.layout, made.segment_ids.tolist()[-4:]
    (Placed((0, 0, 1, 1, 0, 1, 1, 0, 0, 1), 2), [3, 3, 3, 0])
    >>> made.work.tolist(), made.lower_bound
    ([43, 44], 44)
    """
    lengths = as_lengths(document_lengths, least=0)
    ranks = at_least_one("ranks", ranks)
    tokens = int(lengths.sum())
    step = 1 if tile is None else int(np.lcm(*as_tile(tile)))
    if chunk is None and sequence_length is None:
        chunk = max(-(-tokens // (CHUNKS_PER_RANK * ranks * step)), 1) * step
    if sequence_length is None:
        multiple = ranks * at_least_one("chunk", chunk)
        sequence_length = max(-(-tokens // multiple), 1) * multiple
    sequence_length = at_least_one("sequence_length", sequence_length)
    if tokens > sequence_length:
        raise ValueError(
            f"the documents have {tokens} tokens and sequence_length is {sequence_length}; it "
            f"needs to be at least {tokens}: `pack` makes rows of a given length"
        )
    ids = np.zeros(sequence_length, np.int32)
    ids[:tokens] = np.repeat(np.arange(1, lengths.size + 1), lengths)
    extra = np.asarray(token_work)
    if extra.shape == (tokens,):
        extra = np.pad(extra, (0, sequence_length - tokens))
    elif extra.ndim:
        raise ValueError(
            f"token_work has shape {extra.shape}; it needs to be a number, or an array of the "
            f"tokens of the documents, ({tokens},)"
        )
    return balance_segments(
        ids,
        ranks,
        chunk=chunk,
        mask=mask,
        tile=tile,
        token_work=extra,
        key_work=key_work,
        tolerance=tolerance,
    )


def balance_segments(
    segment_ids: Any,
    ranks: int,
    *,
    chunk: int | None = None,
    mask: Mask | None = None,
    tile: tuple[int, int] | None = None,
    token_work: float | np.ndarray = 0,
    key_work: float = 0,
    tolerance: float = 1e-4,
) -> Balance:
    """As `balance`, for a batch that has segment ids already.

    Args:
      segment_ids: integers in source order, [sequence] or [batch, sequence]: one layout for all
        rows, whose work adds up; 0 is padding, wherever it stands.
      chunk: tokens in a chunk; the sequence is a multiple of `ranks * chunk`. None: a sixteenth of
        a rank's share.
      Others as in `balance`; an array of token work has the shape of the ids.

    Returns:
      A `Balance`.

    Raises:
      ValueError: a sequence that is no multiple, and what `chunk_work` raises.

    >>> ids = np.array([1, 1, 1, 1, 1, 1, 2, 0])
    >>> made = balance_segments(ids, 2, chunk=2)
    >>> made.layout, made.work.tolist(), made.ratio
    (Placed((1, 1, 0, 0), 2), [12, 10], 1.0909090909090908)
    """
    ids = as_ids(segment_ids)
    ranks = at_least_one("ranks", ranks)
    length = ids.shape[-1]
    multiple = ranks * (CHUNKS_PER_RANK if chunk is None else at_least_one("chunk", chunk))
    if length % multiple:
        chunks = f"{CHUNKS_PER_RANK} chunks" if chunk is None else f"chunks of {chunk} tokens"
        raise ValueError(
            f"the sequence has length {length}; {chunks} on each of {ranks} ranks need a multiple "
            f"of {multiple}: pad to {-(-length // multiple) * multiple}, or give another chunk"
        )
    if chunk is None:
        chunk = length // multiple
    if tile is not None:
        check_tile(chunk, as_tile(tile))
    pairs = attention_work(ids, chunk, mask, None)
    tiles = None if tile is None else attention_work(ids, chunk, mask, tile)
    work = pairs if tiles is None else tiles
    work = work + other_work(ids, chunk, mask, token_work, key_work)
    of = assign(work, ranks, tolerance=tolerance)

    def of_ranks(chunks: np.ndarray) -> np.ndarray:
        return chunks[np.argsort(of, kind="stable")].reshape(ranks, -1).sum(axis=1)

    return Balance(
        layout=Placed(of.tolist(), chunk),
        segment_ids=ids,
        work=of_ranks(work),
        lower_bound=lower_bound(work, ranks),
        pairs=of_ranks(pairs),
        tile_pairs=None if tiles is None else of_ranks(tiles),
    )


@dataclasses.dataclass(frozen=True, eq=False)
class RowBalance:
    """Rows dealt to data-parallel groups, and how even that is.

    Attributes:
      rows: the rows of each group, int64 [groups, rows per group], ascending.
      work: the work of each group, [groups].
      lower_bound: what the heaviest group does at least, however rows are dealt.
    """

    rows: np.ndarray
    work: np.ndarray
    lower_bound: float

    @property
    def order(self) -> np.ndarray:
        """The rows group by group, int64 [rows]: `x[order]` is a batch to shard over groups.

        >>> balance_rows([8, 1, 2, 7], groups=2).order.tolist()
        [0, 1, 2, 3]
        """
        return self.rows.reshape(-1)

    @property
    def ratio(self) -> float:
        """The heaviest group's work over the mean, 1 at best."""
        return max_over_mean(self.work)


def balance_rows(row_work: Any, groups: int, *, tolerance: float = 1e-4) -> RowBalance:
    """Deal rows of equal tokens to data-parallel groups, equally many each, so that none waits.

    Rows with equal tokens differ in attention work: one document of a whole row is its square, many
    short ones next to nothing.

    Args:
      row_work: the work of each row, [rows], such as `PackRecord.work()`.
      groups: how many groups; the rows are a multiple.
      tolerance: as in `assign`.

    Raises:
      ValueError: what `assign` raises.

    >>> dealt = balance_rows([8, 7, 6, 5, 4, 2, 2, 2], groups=2)
    >>> dealt.work.tolist(), dealt.ratio
    ([18, 18], 1.0)
    """
    of = assign(row_work, groups, tolerance=tolerance)
    rows = np.argsort(of, kind="stable").reshape(at_least_one("groups", groups), -1)
    work = np.asarray(row_work)
    return RowBalance(rows, work[rows].sum(axis=1), lower_bound(work, groups))
