"""Packs of documents: rows of equal length, and layouts that give every rank equal work.

On the host and in NumPy: `pack` puts documents into rows, `balance` makes the layout for one batch,
`unpack` gives outputs back by document.
"""

from plait.packing.balance import (
    Balance,
    RowBalance,
    balance,
    balance_rows,
    balance_segments,
)
from plait.packing.needed import keys_needed
from plait.packing.offsets import lengths_of
from plait.packing.pack import PackRecord, Piece, pack, unpack
from plait.packing.solver import assign, lower_bound
from plait.packing.work import chunk_work

__all__ = [
    "Balance",
    "PackRecord",
    "Piece",
    "RowBalance",
    "assign",
    "balance",
    "balance_rows",
    "balance_segments",
    "chunk_work",
    "keys_needed",
    "lengths_of",
    "lower_bound",
    "pack",
    "unpack",
]
