"""Document lengths out of files; what is wrong in them is named by file and line or record."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from plait.cli.arguments import UserError

LARGEST = int(np.iinfo(np.int32).max)
BATCH = 2**16
"""Records between two looks at the clock."""

LENGTH, TOKENS = "length", "input_ids"
"""The columns that are read unless others are named: of lengths or text, and of lists of tokens."""


@dataclasses.dataclass(frozen=True)
class Reader:
    """How a file is read.

    Attributes:
      column: of JSONL and Parquet.
      is_tokenized: the column has lists of tokens, which are counted; else lengths, or text.
      bytes_per_token: by which the UTF-8 bytes of text are counted, a begun token as one.
    """

    command: str
    column: str
    is_tokenized: bool
    bytes_per_token: float

    def read(self, path: Path, progress: Callable[[str], None]) -> tuple[np.ndarray, bool]:
        """Lengths of all documents, int64, and whether they were counted from text.

        Raises:
          UserError: a file that cannot be read, and a record that is no length of 1 to 2^31 - 1.
        """
        kinds = {".txt": _txt, ".npy": _npy, ".jsonl": _jsonl, ".parquet": _parquet}
        suffix = path.suffix.lower()
        if suffix not in kinds:
            raise self.refuse(
                f"{str(path)!r} has the suffix {suffix!r}; it needs to be one of "
                f"{', '.join(kinds)}: one length a line works in a .txt"
            )
        if self.is_tokenized and suffix in (".txt", ".npy"):
            raise self.refuse(
                f"{str(path)!r} has no columns, and --tokenized counts the lists of one; it needs "
                "to be a .jsonl or .parquet: --lengths works for numbers"
            )
        batches: list[np.ndarray] = []
        count, is_text = 0, False
        try:
            for batch, of_text in kinds[suffix](self, path):
                batches.append(batch)
                is_text = of_text
                count += batch.size
                progress(f"reading {path.name}: {count:,} documents")
        except OSError as error:
            why = error.strerror or error
            raise self.refuse(f"{str(path)!r} can't be read ({why})") from None
        except UnicodeDecodeError:
            raise self.refuse(f"{str(path)!r} is no UTF-8 text, as a {suffix} is") from None
        if not count:
            raise self.refuse(f"{str(path)!r} has no documents in it; at least one is needed")
        return np.concatenate(batches), is_text

    def refuse(self, message: str) -> UserError:
        """The error to raise."""
        return UserError(f"{self.command}: {message}")

    def checked(self, where: str, value: Any) -> int:
        """The length, if it is one."""
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.refuse(
                f"{where} is {_shown(value)}; a length needs to be an integer, such as 512"
            )
        if not 1 <= value <= LARGEST:
            raise self.refuse(
                f"{where} is {value}; a length needs to be 1 to {LARGEST}: "
                f"{min(max(value, 1), LARGEST)} works"
            )
        return value

    def tokens_of(self, utf8_bytes: Any) -> Any:
        """How many tokens text of so many bytes is taken to be."""
        return np.ceil(np.asarray(utf8_bytes) / self.bytes_per_token).astype(np.int64)

    def check_text(self, where: str, text: str) -> None:
        """UserError where what should be numbers was written as strings."""
        if text.strip().isdecimal():
            raise self.refuse(
                f"{where} is the text {_shown(text)}; a length needs to be a number, and text is "
                f"counted in bytes: {text.strip()} works"
            )

    def no_column(self, where: str, columns: list[str]) -> UserError:
        """The error to raise where a record or file does not have the column."""
        works = f"--column {columns[0]} works if that is it" if columns else "there is none"
        return self.refuse(
            f"{where} has no column {self.column!r}; it has {', '.join(map(repr, columns))}: "
            f"{works}"
        )

    def mixed(self, where: str, value: Any) -> UserError:
        """The error to raise for a value of another kind than the column is read for."""
        if self.is_tokenized:
            needed = "--tokenized counts lists of tokens: --lengths reads numbers and text"
        elif isinstance(value, list):
            needed = "--lengths reads numbers and text: --tokenized counts lists of tokens"
        else:
            needed = "it needs to be a length or a text, and the same in all records"
        return self.refuse(f"{where} is {_shown(value)}; {needed}")


Batches = Iterator[tuple[np.ndarray, bool]]


def _txt(reader: Reader, path: Path) -> Batches:
    def parse(where: str, line: str) -> int:
        try:
            value: Any = int(line)
        except ValueError:
            value = line
        return reader.checked(where, value)

    return _by_line(reader, path, lambda where, line: (parse(where, line), False))


def _jsonl(reader: Reader, path: Path) -> Batches:
    def parse(where: str, line: str) -> tuple[int, bool]:
        try:
            record = json.loads(line)
        except ValueError as error:
            raise reader.refuse(f"{where} is no JSON ({error})") from None
        if not isinstance(record, dict):
            raise reader.refuse(
                f"{where} is {_shown(record)}; it needs to be an object, such as "
                f'{{"{reader.column}": 512}}'
            )
        if reader.column not in record:
            raise reader.no_column(where, [*record])
        value = record[reader.column]
        where = f"{reader.column!r} in {where}"
        if isinstance(value, list) and reader.is_tokenized:
            return reader.checked(where, len(value)), False
        if reader.is_tokenized or isinstance(value, list | dict):
            raise reader.mixed(where, value)
        if isinstance(value, str):
            size = len(value.encode("utf-8", "surrogatepass"))
            return reader.checked(where, int(reader.tokens_of(size))), True
        return reader.checked(where, value), False

    return _by_line(reader, path, parse)


def _by_line(reader: Reader, path: Path, parse: Callable[[str, str], tuple[int, bool]]) -> Batches:
    """Lengths a line each; blank lines may only stand at the end."""
    lengths: list[int] = []
    blank = 0
    is_text: bool | None = None
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                blank = blank or number
                continue
            if blank:
                raise reader.refuse(f"line {blank} of {path} is empty; it needs to hold a document")
            where = f"line {number} of {path}"
            length, of_text = parse(where, line.strip())
            if is_text is None and of_text:
                reader.check_text(where, str(json.loads(line)[reader.column]))
            if is_text not in (None, of_text):
                raise reader.mixed(where, json.loads(line)[reader.column])
            is_text = of_text
            lengths.append(length)
            if len(lengths) == BATCH:
                yield np.array(lengths, np.int64), is_text
                lengths = []
    if lengths:
        yield np.array(lengths, np.int64), bool(is_text)


def _npy(reader: Reader, path: Path) -> Batches:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise reader.refuse(f"{str(path)!r} is no array that NumPy can read ({error})") from None
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise reader.refuse(
            f"{str(path)!r} has shape {array.shape} and dtype {array.dtype}; it needs to hold one "
            "integer a document, such as int32 of shape (1000,)"
        )
    for start in range(0, array.size, BATCH):
        batch = np.asarray(array[start : start + BATCH])
        yield _in_range(reader, batch, f"of {path}", start), False


def _parquet(reader: Reader, path: Path) -> Batches:
    if importlib.util.find_spec("pyarrow") is None:
        raise reader.refuse(
            f"pyarrow, which reads {str(path)!r}, is missing: pip install 'plait[parquet]'"
        )
    arrow, compute, parquet = map(
        importlib.import_module, ("pyarrow", "pyarrow.compute", "pyarrow.parquet")
    )
    try:
        file = parquet.ParquetFile(path)
    except arrow.ArrowInvalid as error:
        first_line = str(error).partition("\n")[0]
        raise reader.refuse(f"{str(path)!r} is no Parquet file ({first_line})") from None
    schema = file.schema_arrow
    if reader.column not in schema.names:
        raise reader.no_column(str(path), list(schema.names))
    kind = schema.field(reader.column).type
    types = arrow.types
    is_list = types.is_list(kind) or types.is_large_list(kind)
    is_text = types.is_string(kind) or types.is_large_string(kind)
    if is_list != reader.is_tokenized or not (is_list or is_text or types.is_integer(kind)):
        needed = "lists of tokens" if reader.is_tokenized else "integers or strings"
        other = "--tokenized" if is_list else "--lengths"
        works = f"{other} works for it" if is_list or is_text else "--column names another"
        raise reader.refuse(
            f"column {reader.column!r} of {path} is {kind}; it needs to be {needed}: {works}"
        )
    of = f"of {reader.column!r} in {path}"
    start = 0
    for records in file.iter_batches(BATCH, columns=[reader.column]):
        column = records.column(0)
        if column.null_count:
            at = start + int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
            raise reader.refuse(f"record {at} {of} is null; it needs to be a document's")
        if is_text and not start and len(column):
            reader.check_text(f"record 0 {of}", column[0].as_py())
        if is_list:
            column = compute.list_value_length(column)
        elif is_text:
            column = compute.binary_length(column)
        batch = column.to_numpy(zero_copy_only=False)
        yield _in_range(reader, reader.tokens_of(batch) if is_text else batch, of, start), is_text
        start += batch.size


def _in_range(reader: Reader, batch: np.ndarray, of: str, start: int) -> np.ndarray:
    """The lengths as int64; records are counted from 0, as NumPy and pyarrow do."""
    wrong = np.flatnonzero((batch < 1) | (batch > LARGEST))
    if wrong.size:
        reader.checked(f"record {start + int(wrong[0])} {of}", int(batch[wrong[0]]))
    return batch.astype(np.int64)


def _shown(value: Any) -> str:
    """The value for a message, cut where it is long."""
    shown = repr(value)
    return shown if len(shown) <= 40 else f"{shown[:37]}..."
