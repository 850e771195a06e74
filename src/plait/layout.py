"""Layouts: which rank holds which part of a sequence, and in what order.

A layout is a bijection from slots (indices along the array axis, rank-major) to source positions
(indices in the text). It is built from chunks: runs of positions that stay together. Everything
here is NumPy on the host; layouts are frozen and hashable, so that they can be static arguments
of `jax.jit`.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np

_LARGEST_LENGTH = np.iinfo(np.int32).max


def at_least_one(name: str, value: Any) -> int:
    """The value as an int; errors name it and the nearest that works."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        nearest = max(1, int(value)) if isinstance(value, float | bool) and value == value else 1
        raise TypeError(
            f"{name} is {value!r}; it needs to be an integer, such as {nearest}"
        ) from None
    if number < 1:
        raise ValueError(f"{name} is {number}; it needs to be at least 1")
    return number


class SeesKeys(Protocol):
    """A mask, as far as counting its work goes."""

    def keys_seen(self, segment_ids: np.ndarray) -> np.ndarray: ...


class Layout(abc.ABC):
    """A bijection from slots to source positions, with ascending positions within each rank."""

    kind: ClassVar[str]
    ranks: int

    @property
    @abc.abstractmethod
    def multiple(self) -> int:
        """The sequence length must be a multiple of this number of tokens."""

    @abc.abstractmethod
    def chunk_length(self, sequence_length: int) -> int:
        """Tokens in one chunk, the longest run that every rank keeps together."""

    @abc.abstractmethod
    def _chunk_table(self, chunks: int) -> np.ndarray:
        """The chunk that each rank holds in each place, [ranks, chunks per rank], ascending."""

    def chunk_table(self, sequence_length: int) -> np.ndarray:
        """Chunks by rank: int64 [ranks, chunks per rank], ascending within each rank.

        >>> Zigzag(2).chunk_table(8).tolist()
        [[0, 3], [1, 2]]
        """
        length = self.check_length(sequence_length)
        return self._chunk_table(length // self.chunk_length(length))

    def positions(self, sequence_length: int) -> np.ndarray:
        """Source position of each slot: int32 [sequence_length].

        Raises ValueError where the length is not a multiple of `multiple`.

        >>> Zigzag(2).positions(8).tolist()
        [0, 1, 6, 7, 2, 3, 4, 5]
        """
        table = self.chunk_table(sequence_length)
        length = self.chunk_length(sequence_length)
        within = np.arange(length, dtype=np.int32)
        return ((table * length).astype(np.int32)[..., None] + within).reshape(-1)

    def slots(self, sequence_length: int) -> np.ndarray:
        """Slot of each source position, the inverse of `positions`: int32 [sequence_length].

        >>> Zigzag(2).slots(8).tolist()
        [0, 1, 4, 5, 6, 7, 2, 3]
        """
        positions = self.positions(sequence_length)
        slots = np.empty_like(positions)
        slots[positions] = np.arange(positions.size, dtype=np.int32)
        return slots

    def runs(self, sequence_length: int, rank: int) -> tuple[tuple[int, int], ...]:
        """The positions of one rank as half-open runs (start, stop), ascending and merged.

        >>> Zigzag(4).runs(32, 1)
        ((4, 8), (24, 28))
        >>> Zigzag(4).runs(32, 3)
        ((12, 20),)
        """
        length = self.chunk_length(sequence_length)
        table = self.chunk_table(sequence_length)
        if not 0 <= operator.index(rank) < self.ranks:
            raise ValueError(
                f"rank is {rank}; {self!r} has ranks 0 to {self.ranks - 1}: the nearest is "
                f"{min(max(rank, 0), self.ranks - 1)}"
            )
        chunks = table[rank]
        breaks = np.flatnonzero(np.diff(chunks) != 1) + 1
        return tuple(
            (int(run[0]) * length, (int(run[-1]) + 1) * length) for run in np.split(chunks, breaks)
        )

    def work(
        self, sequence_length: int, mask: SeesKeys, segment_ids: np.ndarray | None = None
    ) -> np.ndarray:
        """The attention work of each rank: exactly how many (query, key) pairs its queries see.

        Args:
          sequence_length: tokens in the sequence.
          mask: the mask, such as `plait.Causal()`.
          segment_ids: integers in source order, [sequence] or [batch, sequence], whose rows add
            up; 0 is padding. None: one document.

        Returns:
          int64 [ranks].

        >>> from plait import Causal
        >>> Contiguous(2).work(8, Causal()).tolist(), Zigzag(2).work(8, Causal()).tolist()
        ([10, 26], [18, 18])
        """
        length = self.check_length(sequence_length)
        if not hasattr(mask, "keys_seen"):
            raise TypeError(
                f"mask is a {type(mask).__name__}; it needs to be a plait.Mask, such as Causal()"
            )
        ids = np.ones(length, np.int32) if segment_ids is None else np.asarray(segment_ids)
        if ids.shape[-1:] != (length,) or ids.ndim > 2:
            raise ValueError(
                f"segment_ids has shape {ids.shape}; it needs to be ({length},) or (batch, "
                f"{length})"
            )
        seen = sum(mask.keys_seen(row) for row in np.atleast_2d(ids))
        return np.asarray(seen)[self.positions(length)].reshape(self.ranks, -1).sum(axis=1)

    def padded_length(self, sequence_length: int) -> int:
        """The smallest length this layout accepts that holds `sequence_length` tokens.

        >>> Zigzag(4).padded_length(2999)
        3000
        """
        length = at_least_one("sequence_length", sequence_length)
        return -(-length // self.multiple) * self.multiple

    def check_length(self, sequence_length: int, what: str = "the sequence") -> int:
        """The length as an int; ValueError, naming `what`, where the layout does not accept it."""
        try:
            length = operator.index(sequence_length)
        except TypeError:
            raise TypeError(
                f"sequence_length is {sequence_length!r}; {self!r} needs an integer that is a "
                f"multiple of {self.multiple}"
            ) from None
        if length < 1 or length % self.multiple:
            raise ValueError(
                f"{what} has length {length}; {self!r} needs a multiple of {self.multiple}: "
                f"pad to {self.padded_length(max(length, 1))} (ContextParallel.pad)"
            )
        if length > _LARGEST_LENGTH:
            raise ValueError(
                f"{what} has length {length}; source positions are int32, so at most "
                f"{_LARGEST_LENGTH // self.multiple * self.multiple} tokens fit"
            )
        return length

    def to_dict(self) -> dict[str, Any]:
        """Plain data (JSON types) from which `from_dict` makes an equal layout.

        >>> HalfSwap(4).to_dict()
        {'layout': 'half_swap', 'ranks': 4}
        """
        fields: dict[str, Any] = {}
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            fields[field.name] = list(value) if isinstance(value, tuple) else value
        return {"layout": self.kind, **fields}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Layout:
        """The layout that `to_dict` described.

        >>> Layout.from_dict({"layout": "zigzag", "ranks": 4})
        Zigzag(4)
        """
        fields = dict(data)
        kind = fields.pop("layout", None)
        kinds = {cls.kind: cls for cls in (Contiguous, Zigzag, HalfSwap, Striped, Placed)}
        if kind not in kinds:
            raise ValueError(f"layout is {kind!r}; it needs to be one of {sorted(kinds)}")
        try:
            return kinds[kind](**fields)
        except TypeError as error:
            raise ValueError(f"{dict(data)!r} does not describe a {kind} layout: {error}") from None


@dataclasses.dataclass(frozen=True, repr=False)
class _ByRanks(Layout):
    """What the layouts that a number of ranks determines have in common."""

    ranks: int
    _chunks_per_rank: ClassVar[int]

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", at_least_one("ranks", self.ranks))

    @property
    def multiple(self) -> int:
        return self.ranks * self._chunks_per_rank

    def chunk_length(self, sequence_length: int) -> int:
        return self.check_length(sequence_length) // self.multiple

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.ranks})"


class Contiguous(_ByRanks):
    """Source order: rank r holds the r-th run of the sequence.

    Under a causal mask the last rank does (2n - 1) / n times the mean attention work.

    >>> Contiguous(2).positions(4).tolist()
    [0, 1, 2, 3]
    """

    kind = "contiguous"
    _chunks_per_rank = 1

    def _chunk_table(self, chunks: int) -> np.ndarray:
        return np.arange(chunks).reshape(self.ranks, -1)


class Zigzag(_ByRanks):
    """2n chunks; rank r holds chunks r and 2n - 1 - r: equal causal work for every rank.

    The default of the field: what MaxText, Megatron, PyTorch and ring-flash-attention compute,
    and what TransformerEngine's DUAL_CHUNK_SWAP computes. Also known as head-tail or dual chunk
    swap. Some docstrings print another order, which is `HalfSwap`, beside code that computes this
    one.

    >>> Zigzag(2).positions(8).tolist()
    [0, 1, 6, 7, 2, 3, 4, 5]
    """

    kind = "zigzag"
    _chunks_per_rank = 2

    def _chunk_table(self, chunks: int) -> np.ndarray:
        rank = np.arange(self.ranks)
        return np.stack([rank, chunks - 1 - rank], axis=1)


class HalfSwap(_ByRanks):
    """Rank r keeps the first half of its contiguous shard and swaps the second with rank n-1-r.

    Rank r holds chunks 2r and 2n - 1 - 2r of 2n, ascending. Balanced for a causal mask like
    `Zigzag`, in total and at every step of a ring, at half the traffic of a relayout from or to
    source order. For models that need source order in every layer (convolution or recurrence
    beside global attention). Bad for sliding windows and prefixes in a ring: rank r's two halves
    lie far apart for small r, and the work of a step differs between ranks.

    The order is plait's own: no other framework uses it, so do not feed it to a kernel that
    expects zigzag. Some docstrings in the field print this order for dual chunk swap, while the
    code beside them computes `Zigzag`.

    >>> HalfSwap(4).positions(16).tolist()
    [0, 1, 14, 15, 4, 5, 10, 11, 6, 7, 8, 9, 2, 3, 12, 13]
    """

    kind = "half_swap"
    _chunks_per_rank = 2

    def _chunk_table(self, chunks: int) -> np.ndarray:
        kept = 2 * np.arange(self.ranks)
        return np.sort(np.stack([kept, chunks - 1 - kept], axis=1), axis=1)


@dataclasses.dataclass(frozen=True, repr=False)
class Striped(Layout):
    """Stripe t, a run of `stripe` tokens, goes to rank t mod n.

    Near-equal causal work: rank n-1 does n-1 stripes a row of stripes more than rank 0.
    From striped attention (arXiv 2311.09431), where the stripe is one token.

    >>> Striped(2).positions(6).tolist()
    [0, 2, 4, 1, 3, 5]
    >>> Striped(2, stripe=2).positions(8).tolist()
    [0, 1, 4, 5, 2, 3, 6, 7]
    """

    ranks: int
    stripe: int = 1
    kind = "striped"

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", at_least_one("ranks", self.ranks))
        object.__setattr__(self, "stripe", at_least_one("stripe", self.stripe))

    @property
    def multiple(self) -> int:
        return self.ranks * self.stripe

    def chunk_length(self, sequence_length: int) -> int:
        self.check_length(sequence_length)
        return self.stripe

    def _chunk_table(self, chunks: int) -> np.ndarray:
        return np.arange(chunks).reshape(-1, self.ranks).T

    def __repr__(self) -> str:
        return f"Striped({self.ranks}, stripe={self.stripe})"


@dataclasses.dataclass(frozen=True, repr=False)
class Placed(Layout):
    """Chunk c of the sequence goes to rank chunk_ranks[c]; every rank gets equally many.

    For assignments found by a solver, one per batch. `tokens_per_chunk`, where given, pins the
    one sequence length that the layout accepts: an assignment made for one batch of documents
    then cannot be applied to a batch of another length.

    >>> Placed((0, 1, 1, 0)).positions(8).tolist()
    [0, 1, 6, 7, 2, 3, 4, 5]
    """

    chunk_ranks: Sequence[int]
    tokens_per_chunk: int | None = None
    kind = "placed"

    def __post_init__(self) -> None:
        given = np.asarray(self.chunk_ranks)
        if given.ndim != 1 or given.size == 0 or not np.issubdtype(given.dtype, np.integer):
            raise ValueError(
                f"chunk_ranks has shape {given.shape} and dtype {given.dtype}; it needs to be a "
                "list of at least one rank number, such as (0, 1, 1, 0)"
            )
        if given.min() < 0:
            raise ValueError(
                f"chunk_ranks[{int(np.argmin(given))}] is {given.min()}; ranks count from 0"
            )
        counts = np.bincount(given)
        if (counts != counts[0]).any():
            odd = int(np.flatnonzero(counts != counts[0])[0])
            raise ValueError(
                f"chunk_ranks gives {counts[0]} chunks to rank 0 and {counts[odd]} to rank {odd}; "
                f"every rank needs equally many: {given.size} chunks over {counts.size} ranks are "
                f"{given.size / counts.size:g} each"
            )
        object.__setattr__(self, "chunk_ranks", tuple(given.tolist()))
        if self.tokens_per_chunk is not None:
            tokens = at_least_one("tokens_per_chunk", self.tokens_per_chunk)
            object.__setattr__(self, "tokens_per_chunk", tokens)

    @classmethod
    def zigzag_documents(cls, document_lengths: Sequence[int], ranks: int) -> Placed:
        """Zigzag inside each document: rank r holds pieces r and 2n-1-r of every document.

        `document_lengths` are in source order, each a multiple of 2 * ranks; zeros are allowed
        and hold nothing. Slots are rank-major, as in every layout. The layout accepts only the
        sum of the lengths.

        >>> Placed.zigzag_documents([4, 12], ranks=2).positions(16).tolist()
        [0, 3, 4, 5, 6, 13, 14, 15, 1, 2, 7, 8, 9, 10, 11, 12]
        """
        ranks = at_least_one("ranks", ranks)
        lengths = [operator.index(length) for length in document_lengths]
        for index, length in enumerate(lengths):
            if length < 0 or length % (2 * ranks):
                nearest = -(-max(length, 1) // (2 * ranks)) * 2 * ranks
                raise ValueError(
                    f"document {index} has length {length}; zigzag over {ranks} ranks needs a "
                    f"multiple of {2 * ranks}: pad it to {nearest}"
                )
        if not any(lengths):
            raise ValueError(
                f"document_lengths is {lengths}; at least one document of "
                f"{2 * ranks} tokens is needed"
            )
        pieces = np.array([length // (2 * ranks) for length in lengths])
        tokens = math.gcd(*pieces.tolist())
        piece_ranks = np.concatenate([np.arange(ranks), np.arange(ranks)[::-1]])
        repeats = np.repeat(pieces // tokens, 2 * ranks)
        return cls(tuple(np.repeat(np.tile(piece_ranks, pieces.size), repeats).tolist()), tokens)

    @functools.cached_property
    def _order(self) -> np.ndarray:
        return np.argsort(np.asarray(self.chunk_ranks), kind="stable").reshape(self.ranks, -1)

    @functools.cached_property
    def ranks(self) -> int:  # type: ignore[override]
        return max(self.chunk_ranks) + 1

    @property
    def multiple(self) -> int:
        return len(self.chunk_ranks) * (self.tokens_per_chunk or 1)

    def padded_length(self, sequence_length: int) -> int:
        length = super().padded_length(sequence_length)
        if self.tokens_per_chunk is not None and length > self.multiple:
            raise ValueError(
                f"the sequence has length {sequence_length}; {self!r} was made for exactly "
                f"{self.multiple} tokens"
            )
        return length

    def check_length(self, sequence_length: int, what: str = "the sequence") -> int:
        if self.tokens_per_chunk is not None and sequence_length != self.multiple:
            raise ValueError(
                f"{what} has length {sequence_length}; {self!r} was made for exactly "
                f"{self.multiple} tokens"
            )
        return super().check_length(sequence_length, what)

    def chunk_length(self, sequence_length: int) -> int:
        return self.check_length(sequence_length) // len(self.chunk_ranks)

    def _chunk_table(self, chunks: int) -> np.ndarray:
        return self._order

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.chunk_ranks, self.tokens_per_chunk))

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        if len(self.chunk_ranks) > 16:
            shown = f"<{len(self.chunk_ranks)} chunks over {self.ranks} ranks>"
        else:
            shown = repr(self.chunk_ranks)
        pinned = "" if self.tokens_per_chunk is None else f", {self.tokens_per_chunk}"
        return f"Placed({shown}{pinned})"
