"""Real text without a download: the standard library's own source, packed into rows of bytes."""

from __future__ import annotations

import dataclasses
import os
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

NOT_LIBRARY = frozenset(
    {"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"}
)


@dataclasses.dataclass(frozen=True)
class Piece:
    """Bytes start to stop of one file, which lie in a row from a slot on: one document."""

    path: str
    start: int
    stop: int
    row: int
    slot: int

    @property
    def size(self) -> int:
        """Its bytes, which are its tokens."""
        return self.stop - self.start


@dataclasses.dataclass(frozen=True)
class Packed:
    """Rows of documents, and where each document came from.

    Attributes:
      tokens: int32 [rows, sequence], byte values; 0 in padding, where 0 is a legal byte too.
      segment_ids: int32 [rows, sequence]; documents count from 1 in each row, 0 is padding.
      pieces: the documents.
      left_out: bytes of the last file that found no room.
    """

    tokens: np.ndarray
    segment_ids: np.ndarray
    pieces: tuple[Piece, ...]
    left_out: int

    @property
    def files(self) -> int:
        return len({piece.path for piece in self.pieces})

    @property
    def cuts(self) -> int:
        """How many times a file was cut because it is longer than a row."""
        return sum(piece.start > 0 for piece in self.pieces)

    @property
    def real_tokens(self) -> int:
        return sum(piece.size for piece in self.pieces)

    @property
    def padding(self) -> int:
        """Slots that hold no token."""
        return self.tokens.size - self.real_tokens


def standard_library() -> Path:
    """Where the running interpreter keeps the source of its standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def read_files(root: Path, seed: int) -> Iterator[tuple[str, bytes]]:
    """The Python files below `root`, in an order that the seed decides; read as they are taken.

    Tests and installed packages are left out, as they are not the same on any two machines, and
    empty files, which hold no token.
    """
    paths = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in NOT_LIBRARY]
        here = Path(folder).relative_to(root)
        paths += [(here / name).as_posix() for name in files if name.endswith(".py")]
    # The order in which a file system lists its files is its own.
    paths.sort()
    for index in np.random.default_rng(seed).permutation(len(paths)):
        data = (root / paths[index]).read_bytes()
        if data:
            yield paths[index], data


def pack(files: Iterable[tuple[str, bytes]], sequence_length: int, rows: int) -> Packed:
    """Documents packed into rows, first fit; takes only as many files as the rows hold.

    A file longer than a row is cut into pieces of a row, each a document of its own. Packing ends
    at the first piece that fits nowhere: what is left of its file is counted in `left_out`.

    Args:
      files: names and contents; no content is empty.
      sequence_length: slots in a row.
      rows: the most rows to fill; fewer come back where the files run out.

    >>> packed = pack([("a", b"abc"), ("b", b"defghi"), ("c", b"j")], sequence_length=4, rows=3)
    >>> packed.segment_ids.tolist()
    [[1, 1, 1, 2], [1, 1, 1, 1], [1, 1, 0, 0]]
    >>> packed.pieces[-1], packed.cuts, packed.padding
    (Piece(path='c', start=0, stop=1, row=0, slot=3), 1, 2)
    """
    used: list[int] = []
    contents: list[list[bytes]] = []
    pieces: list[Piece] = []

    def place(path: str, data: bytes, start: int) -> bool:
        size = min(sequence_length, len(data) - start)
        row = next((row for row, n in enumerate(used) if n + size <= sequence_length), len(used))
        if row == rows:
            return False
        if row == len(used):
            used.append(0)
            contents.append([])
        pieces.append(Piece(path, start, start + size, row, used[row]))
        contents[row].append(data[start : start + size])
        used[row] += size
        return True

    left_out = 0
    for path, data in files:
        for start in range(0, len(data), sequence_length):
            if not place(path, data, start):
                left_out = len(data) - start
                break
        if left_out:
            break

    tokens = np.zeros((len(used), sequence_length), np.int32)
    segment_ids = np.zeros_like(tokens)
    for row, documents in enumerate(contents):
        tokens[row, : used[row]] = np.frombuffer(b"".join(documents), np.uint8)
        lengths = [len(document) for document in documents]
        segment_ids[row, : used[row]] = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    return Packed(tokens, segment_ids, tuple(pieces), left_out)
