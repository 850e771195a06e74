"""Documents into rows of equal length, and outputs back out of them."""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from plait.layout import at_least_one
from plait.mask import Mask
from plait.packing.balance import balance_rows
from plait.packing.checks import as_lengths
from plait.packing.work import chunk_work
from plait.tree import as_fill, check_unmasked

LongDocuments = Literal["error", "cut", "drop"]


class Piece(NamedTuple):
    """Tokens start to stop of one document, the number of which counts from 0."""

    document: int
    start: int
    stop: int

    @property
    def length(self) -> int:
        """Tokens in the piece."""
        return self.stop - self.start


@dataclasses.dataclass(frozen=True)
class PackRecord:
    """Which tokens of which documents stand where, in rows of equal length.

    Attributes:
      rows: the pieces of each row, in the order in which they stand, from the row's start on and
        without space between them; the rest of the row is padding.
      sequence_length: tokens in a row.
      document_lengths: of all documents, those that were dropped included.
      groups: the rows are those of the first group, then of the second, equally many each.

    >>> record = pack([3, 5, 2], sequence_length=6)
    >>> record.rows
    ((Piece(document=0, start=0, stop=3), Piece(document=2, start=0, stop=2)), \
(Piece(document=1, start=0, stop=5),))
    >>> print(record)
    3 documents in 2 rows of 6: 2 tokens of padding (16.7%), 0 cut, 0 dropped
    """

    rows: tuple[tuple[Piece, ...], ...]
    sequence_length: int
    document_lengths: tuple[int, ...]
    groups: int = 1

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and tokens in a row, as arrays packed by this record begin."""
        return len(self.rows), self.sequence_length

    @property
    def padding(self) -> int:
        """Tokens of padding in all rows.

        >>> pack([3, 5, 2], sequence_length=6).padding
        2
        """
        return len(self.rows) * self.sequence_length - sum(
            piece.length for row in self.rows for piece in row
        )

    @property
    def cut(self) -> tuple[int, ...]:
        """The documents that are in more than one piece.

        >>> pack([3, 7], sequence_length=4, long="cut").cut
        (1,)
        """
        return tuple(np.flatnonzero(self._pieces_of_documents > 1).tolist())

    @property
    def dropped(self) -> tuple[int, ...]:
        """The documents that are in no row.

        >>> pack([3, 7], sequence_length=4, long="drop").dropped
        (1,)
        """
        return tuple(np.flatnonzero(self._pieces_of_documents == 0).tolist())

    @functools.cached_property
    def _pieces_of_documents(self) -> np.ndarray:
        documents = [piece.document for row in self.rows for piece in row]
        return np.bincount(documents, minlength=len(self.document_lengths))

    @property
    def segment_ids(self) -> np.ndarray:
        """1, 2, 3 for the pieces of each row in turn, 0 for padding: int32 [rows, sequence].

        >>> pack([3, 5, 2], sequence_length=6).segment_ids.tolist()
        [[1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 1, 0]]
        """
        ids = np.zeros(self.shape, np.int32)
        for row, pieces in zip(ids, self.rows, strict=True):
            lengths = [piece.length for piece in pieces]
            row[: sum(lengths)] = np.repeat(np.arange(1, len(pieces) + 1), lengths)
        return ids

    @property
    def segment_positions(self) -> np.ndarray:
        """The position of each token in its piece, 0 for padding: int32 [rows, sequence].

        What `plait.segment_positions` makes of the ids. The second piece of a document that was
        cut starts at 0 too, as no token of it sees the first.

        >>> pack([3, 5, 2], sequence_length=6).segment_positions.tolist()
        [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 0]]
        """
        positions = np.zeros(self.shape, np.int32)
        for row, pieces in zip(positions, self.rows, strict=True):
            at = 0
            for piece in pieces:
                row[at : at + piece.length] = np.arange(piece.length)
                at += piece.length
        return positions

    def work(self, mask: Mask | None = None) -> np.ndarray:
        """The attention work of each row in (query, key) pairs, int64 [rows]; None: causal.

        >>> pack([3, 5, 2], sequence_length=6).work().tolist()
        [9, 15]
        """
        return np.array(
            [chunk_work(row, self.sequence_length, mask=mask)[0] for row in self.segment_ids],
            np.int64,
        )

    def apply(self, documents: Sequence[Any], fill: Any) -> np.ndarray:
        """Arrays of documents, such as their tokens, packed by this record.

        Args:
          documents: for each document an array [length, ...], all of one dtype and, but for the
            length, one shape.
          fill: the value of padding, such as 0 for tokens, -100 for labels.

        Returns:
          [rows, sequence, ...] of the documents' dtype.

        Raises:
          ValueError, TypeError: arrays of another length than was packed, by the number of the
            document, or of another dtype or shape than the first, and a fill that the dtype cannot
            hold.

        >>> record = pack([3, 5, 2], sequence_length=6)
        >>> record.apply([np.arange(10, 13), np.arange(20, 25), np.arange(30, 32)], fill=0).tolist()
        [[10, 11, 12, 30, 31, 0], [20, 21, 22, 23, 24, 0]]
        """
        arrays = self._checked_documents(documents)
        first = arrays[0]
        value = as_fill(fill, first.dtype, "the documents")
        packed = np.full((*self.shape, *first.shape[1:]), value, first.dtype)
        for row, pieces in zip(packed, self.rows, strict=True):
            at = 0
            for piece in pieces:
                row[at : at + piece.length] = arrays[piece.document][piece.start : piece.stop]
                at += piece.length
        return packed

    def _checked_documents(self, documents: Sequence[Any]) -> list[np.ndarray]:
        if len(documents) != len(self.document_lengths):
            raise ValueError(
                f"there are {len(documents)} documents; the record is of "
                f"{len(self.document_lengths)}: give those that were dropped too"
            )
        arrays = []
        for index, (document, length) in enumerate(
            zip(documents, self.document_lengths, strict=True)
        ):
            check_unmasked(document, f"document {index}")
            array = np.asarray(document)
            if array.shape[:1] != (length,):
                raise ValueError(
                    f"document {index} has shape {array.shape}; it was packed with {length} "
                    f"tokens, so it needs to be ({length}, ...)"
                )
            arrays.append(array)
            if (array.dtype, array.shape[1:]) != (arrays[0].dtype, arrays[0].shape[1:]):
                raise ValueError(
                    f"document {index} is {array.dtype} with {array.shape[1:]} a token, document "
                    f"0 is {arrays[0].dtype} with {arrays[0].shape[1:]}; all need to be alike"
                )
        return arrays

    def __str__(self) -> str:
        rows, length = self.shape
        return (
            f"{len(self.document_lengths)} documents in {rows} rows of {length}: {self.padding} "
            f"tokens of padding ({self.padding / max(rows * length, 1):.1%}), {len(self.cut)} "
            f"cut, {len(self.dropped)} dropped"
        )


def pack(
    document_lengths: Sequence[int] | np.ndarray,
    sequence_length: int,
    *,
    long: LongDocuments = "error",
    groups: int = 1,
    mask: Mask | None = None,
) -> PackRecord:
    """Documents into rows of equal length, few of them: best-fit decreasing.

    The longest first, each into the row that it fills best; at most 11/9 of the least possible
    number of rows, and 4 more ("Worst-case performance bounds for simple one-dimensional packing
    algorithms", SIAM Journal on Computing 3, 1974). No token is lost or doubled, and what is cut,
    dropped or padded is said in the record. Rows stand in the order of their first documents.

    Args:
      document_lengths: tokens of each document.
      sequence_length: tokens in a row.
      long: what becomes of documents longer than a row: "error" refuses them; "cut" cuts them
        into pieces of a row and a rest, which do not see each other; "drop" leaves them out.
      groups: data-parallel groups that the rows are dealt to by their work, equally many each,
        group by group (`balance_rows`). Where needed there are empty rows, all padding.
      mask: what the work of a row is counted by, where there are groups; None: `Causal()`.

    Returns:
      A `PackRecord`.

    Raises:
      ValueError, TypeError: lengths that are no integers, empty or beyond int32, by the number of
        the document, and documents longer than a row unless `long` says what to do.

    >>> print(pack([3, 9, 5, 2], sequence_length=6, long="cut"))
    4 documents in 4 rows of 6: 5 tokens of padding (20.8%), 1 cut, 0 dropped
    >>> pack([6, 2, 2, 2, 6, 3, 3, 1], sequence_length=6, groups=2).work().reshape(2, -1).tolist()
    [[21, 12, 0], [9, 21, 1]]
    """
    lengths = as_lengths(document_lengths, least=1)
    row_length = at_least_one("sequence_length", sequence_length)
    groups = at_least_one("groups", groups)
    rows = _best_fit(_pieces(lengths, row_length, long), row_length)
    rows += [()] * (-len(rows) % groups)
    record = PackRecord(tuple(rows), row_length, tuple(lengths.tolist()), groups)
    if groups == 1 or not rows:
        return record
    order = balance_rows(record.work(mask), groups).order
    return dataclasses.replace(record, rows=tuple(record.rows[row] for row in order))


def unpack(outputs: Any, record: PackRecord) -> list[np.ndarray | None]:
    """Outputs for each token of packed rows, as one array for each document.

    Args:
      outputs: [rows, sequence, ...] in source order: restore them from their layout first.
      record: what `pack` returned.

    Returns:
      For each document an array [length, ...], put together where it was cut; None for documents
      that were dropped.

    Raises:
      ValueError: outputs of another shape than the record's rows.

    >>> record = pack([3, 5, 2], sequence_length=6)
    >>> [document.tolist() for document in unpack(np.arange(12).reshape(2, 6), record)]
    [[0, 1, 2], [6, 7, 8, 9, 10], [3, 4]]
    """
    check_unmasked(outputs, "outputs")
    outputs = np.asarray(outputs)
    if outputs.shape[:2] != record.shape:
        raise ValueError(
            f"outputs has shape {outputs.shape}; the record has {record.shape[0]} rows of "
            f"{record.shape[1]} tokens, so it needs to be {record.shape} and any features"
        )
    dropped = set(record.dropped)
    documents = [
        None if index in dropped else np.empty((length, *outputs.shape[2:]), outputs.dtype)
        for index, length in enumerate(record.document_lengths)
    ]
    for row, pieces in zip(outputs, record.rows, strict=True):
        at = 0
        for piece in pieces:
            document = documents[piece.document]
            assert document is not None
            document[piece.start : piece.stop] = row[at : at + piece.length]
            at += piece.length
    return documents


def _pieces(lengths: np.ndarray, row_length: int, long: str) -> list[Piece]:
    """The pieces to be packed: whole documents, and what `long` makes of the others."""
    if long not in ("error", "cut", "drop"):
        raise ValueError(f"long is {long!r}; it needs to be 'error', 'cut' or 'drop'")
    too_long = np.flatnonzero(lengths > row_length)
    if too_long.size and long == "error":
        first = int(too_long[0])
        others = f" (and {too_long.size - 1} more)" if too_long.size > 1 else ""
        raise ValueError(
            f"document {first}{others} has length {lengths[first]}, more than a row of "
            f"{row_length}: say long='cut' or 'drop', or take rows of {lengths.max()}"
        )
    return [
        Piece(document, start, min(start + row_length, length))
        for document, length in enumerate(lengths.tolist())
        if length <= row_length or long == "cut"
        for start in range(0, length, row_length)
    ]


def _best_fit(pieces: list[Piece], row_length: int) -> list[tuple[Piece, ...]]:
    """Rows of pieces, each in the row that it leaves least room in."""
    rows: list[list[Piece]] = []
    with_room: list[tuple[int, int]] = []  # (tokens of room, row), ascending
    for piece in sorted(pieces, key=lambda piece: -piece.length):
        at = bisect.bisect_left(with_room, (piece.length, -1))
        if at < len(with_room):
            room, row = with_room.pop(at)
        else:
            room, row = row_length, len(rows)
            rows.append([])
        rows[row].append(piece)
        if room > piece.length:
            bisect.insort(with_room, (room - piece.length, row))
    return sorted(tuple(sorted(row)) for row in rows)
