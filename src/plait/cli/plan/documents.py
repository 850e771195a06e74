"""Documents to plan for: read or drawn, and packed into the rows that are looked at."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable

import numpy as np

from plait.cli.plan.files import LARGEST
from plait.packing import PackRecord, pack

SPARE = 1.05
"""Tokens drawn or sampled for the rows that are looked at, as a multiple: so that they are full."""

LONG_TAIL = ((0.71, 32, 2**10), (0.23, 2**10, 2**12), (0.047, 2**12, 2**14), (0.01, 2**14, 2**16))
"""Shares of documents, and from how many to how many tokens; the rest is longer."""

DISTRIBUTIONS = ("long-tail", "uniform", "equal:TOKENS")


def distribution(flag: str) -> Callable[[str], str]:
    """The `type` of an argument that is a distribution of lengths.

    >>> distribution("--distribution")("equal")
    Traceback (most recent call last):
    argparse.ArgumentError: --distribution is 'equal'; it needs to be long-tail, uniform or \
equal:TOKENS: equal:4096 works
    """

    def parse(text: str) -> str:
        name, _, tokens = text.partition(":")
        is_equal = name == "equal" and tokens.isdecimal() and 1 <= int(tokens) <= LARGEST
        if text not in DISTRIBUTIONS[:2] and not is_equal:
            works = "equal:4096" if name == "equal" else "long-tail"
            raise argparse.ArgumentError(
                None,
                f"{flag} is {text!r}; it needs to be {', '.join(DISTRIBUTIONS[:2])} or "
                f"{DISTRIBUTIONS[2]}: {works} works",
            )
        return text

    return parse


def draw(name: str, tokens: int, row_length: int, rng: np.random.Generator) -> np.ndarray:
    """Lengths of documents that have so many tokens together, or the first few more: int64.

    "long-tail": 71% of the documents of up to 1K tokens, 94% up to 4K, 98.7% up to 16K, 99.7% up
    to 64K, evenly by logarithm between these, and none longer than a quarter of a row. "uniform":
    from 1 token to a quarter of a row. "equal:512": all of 512.

    >>> draw("equal:512", 1500, 4096, np.random.default_rng(0)).tolist()
    [512, 512, 512]
    """
    longest = max(row_length // 4, 1)
    drawn: list[np.ndarray] = []
    missing = tokens
    while missing > 0:
        if name == "long-tail":
            batch = _long_tail(longest, rng)
        elif name == "uniform":
            batch = rng.integers(1, longest, 4096, endpoint=True)
        else:
            length = int(name.partition(":")[2])
            batch = np.full(-(-missing // length), length)
        upto = np.cumsum(batch)
        drawn.append(batch[: int(np.searchsorted(upto, missing)) + 1])
        missing -= int(upto[-1])
    return np.concatenate(drawn)


def _long_tail(longest: int, rng: np.random.Generator) -> np.ndarray:
    shares, least, most = (list(x) for x in zip(*LONG_TAIL, strict=True))
    shares.append(1 - sum(shares))
    least.append(most[-1])
    most.append(max(longest, most[-1]))
    band = rng.choice(len(shares), 4096, p=shares)
    low, high = (np.log(np.asarray(edges, np.float64))[band] for edges in (least, most))
    lengths = np.exp(low + (high - low) * rng.random(band.size))
    return np.minimum(np.ceil(lengths), longest).astype(np.int64)


@dataclasses.dataclass(frozen=True)
class Packed:
    """Rows of documents.

    Attributes:
      rows: lengths of the documents of each row, int64, in the order in which they stand.
      sequence_length: tokens of a row.
      documents: how many were packed.
      cut: how many of them are longer than a row.
    """

    rows: tuple[np.ndarray, ...]
    sequence_length: int
    documents: int
    cut: int

    @property
    def has_documents(self) -> bool:
        """Whether any row is something else than one document."""
        return any(len(row) > 1 or row.sum() < self.sequence_length for row in self.rows)


def one_document(sequence_length: int) -> Packed:
    """One row that is one document."""
    return Packed((np.array([sequence_length]),), sequence_length, 1, 0)


def sample(
    lengths: np.ndarray, packs: int, sequence_length: int, rng: np.random.Generator
) -> np.ndarray:
    """Of many documents as many, at random and in their order, as fill the rows.

    >>> sample(np.full(1000, 10), 2, 50, np.random.default_rng(0)).size
    11
    """
    order = rng.permutation(lengths.size)
    upto = np.cumsum(lengths[order])
    enough = int(np.searchsorted(upto, math.ceil(SPARE * packs * sequence_length))) + 1
    return lengths[np.sort(order[:enough])]


def pack_rows(
    lengths: np.ndarray, packs: int, sequence_length: int, rng: np.random.Generator
) -> Packed:
    """The documents in rows, those longer than a row cut; no more than so many rows are kept.

    Of more, the emptiest is left out, where the documents ended, and then as many as it takes, at
    random.
    """
    record = pack(lengths, sequence_length, long="cut")
    kept = _kept(record, packs, rng)
    rows = tuple(np.array([piece.length for piece in record.rows[row]]) for row in kept)
    return Packed(rows, sequence_length, lengths.size, int((lengths > sequence_length).sum()))


def _kept(record: PackRecord, packs: int, rng: np.random.Generator) -> np.ndarray:
    count = len(record.rows)
    if count <= packs:
        return np.arange(count)
    tokens = [sum(piece.length for piece in row) for row in record.rows]
    full = np.delete(np.arange(count), int(np.argmin(tokens)))
    return np.sort(rng.choice(full, packs, replace=False))
