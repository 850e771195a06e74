"""Masks: which keys a query sees, as functions of source positions and segment ids.

Never of slots: the same mask is then right in every layout. What a query sees is a union of
intervals of source positions, and everything follows from these: whether a query sees a key,
whether a block of scores is empty, full or partial, and how many keys each query sees.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import operator
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from plait.layout import at_least_one

Interval = tuple[Any, Any]
"""The first and the last source position of the keys seen; None where there is no bound."""

_FAR = 2**30
"""Beyond every source position, and small enough for int32 sums with a window."""


class Mask(abc.ABC):
    """Which keys a query sees within its document; `&` and `|` join masks.

    A mask of one's own says its intervals:

    >>> @dataclasses.dataclass(frozen=True)
    ... class Sinks(Mask):
    ...     count: int
    ...     def intervals(self, q_positions, xp):
    ...         return ((None, xp.minimum(q_positions, self.count - 1)),)
    >>> mask = SlidingWindow(1) | Sinks(1)
    >>> mask.visible(np.arange(4)[:, None], np.arange(4)).astype(int)
    array([[1, 0, 0, 0],
           [1, 1, 0, 0],
           [1, 1, 1, 0],
           [1, 0, 1, 1]])
    """

    @abc.abstractmethod
    def intervals(self, q_positions: Any, xp: ModuleType) -> tuple[Interval, ...]:
        """The intervals of source positions, ends included, whose union a query sees.

        Args:
          q_positions: int32 of any shape.
          xp: numpy or jax.numpy, whichever the positions belong to.

        Returns:
          Pairs (first, last), each of the shape of `q_positions`, or None for no bound. Both ends
          must never fall as the position of the query rises: blocks are bounded by their ends.
        """

    def visible(self, q_positions: Any, k_positions: Any) -> Any:
        """Whether a query at one source position sees a key at another; arrays broadcast."""
        return _any(
            _inside(k_positions, k_positions, first, last)
            for first, last in self.intervals(q_positions, _namespace(q_positions))
        )

    def may_see(self, q_least: Any, q_most: Any, k_least: Any, k_most: Any) -> Any:
        """False only where no query within these positions sees a key within those."""
        ends = zip(*(self._ends(q) for q in (q_least, q_most)), strict=True)
        return _any(_inside(k_most, k_least, low[0], high[1]) for low, high in ends)

    def sees_all(self, q_least: Any, q_most: Any, k_least: Any, k_most: Any) -> Any:
        """True only where every query within these positions sees every key within those."""
        ends = zip(*(self._ends(q) for q in (q_least, q_most)), strict=True)
        return _any(_inside(k_least, k_most, high[0], low[1]) for low, high in ends)

    def _ends(self, q_positions: Any) -> tuple[Interval, ...]:
        return self.intervals(q_positions, _namespace(q_positions))

    def keys_seen(self, segment_ids: np.ndarray) -> np.ndarray:
        """How many keys each query sees: int64, in the source order of the ids [sequence].

        >>> (Causal() & Chunked(4)).keys_seen(np.array([1, 1, 1, 1, 1, 2, 2, 0])).tolist()
        [1, 2, 3, 4, 1, 1, 2, 0]
        """
        ids = np.asarray(segment_ids)
        length, positions = ids.size, np.arange(ids.size)
        _, document = np.unique(ids, return_inverse=True)
        members = np.sort(document * (length + 1) + positions)

        def members_to(position: Any) -> Any:
            """How many tokens of each query's document lie at or before a position."""
            inside = np.clip(position, -1, length - 1)
            return np.searchsorted(members, document * (length + 1) + inside, side="right")

        intervals = self.intervals(positions, np)
        firsts = np.stack([np.broadcast_to(0 if a is None else a, ids.shape) for a, _ in intervals])
        lasts = np.stack(
            [np.broadcast_to(length if b is None else b, ids.shape) for _, b in intervals]
        )
        order = np.argsort(firsts, axis=0)
        seen, reached = np.zeros(length, np.int64), np.full(length, -1)
        for first, last in zip(
            np.take_along_axis(firsts, order, 0), np.take_along_axis(lasts, order, 0), strict=True
        ):
            first = np.maximum(first, reached + 1)
            seen += np.maximum(members_to(last) - members_to(first - 1), 0)
            reached = np.maximum(reached, last)
        return np.where(ids == 0, 0, seen)

    def __and__(self, other: Mask) -> Mask:
        return _Both(self, other) if isinstance(other, Mask) else NotImplemented

    def __or__(self, other: Mask) -> Mask:
        return _Either(self, other) if isinstance(other, Mask) else NotImplemented


def _namespace(x: Any) -> ModuleType:
    return jnp if isinstance(x, jax.Array) else np


def _inside(left: Any, right: Any, first: Any, last: Any) -> Any:
    """first <= left and right <= last, where there are bounds."""
    if first is None:
        return True if last is None else right <= last
    return left >= first if last is None else (left >= first) & (right <= last)


def _any(parts: Any) -> Any:
    found: Any = False
    for part in parts:
        if part is True:
            return True
        found = part if found is False else found | part
    return found


@dataclasses.dataclass(frozen=True)
class Causal(Mask):
    """A query sees the keys at its own and earlier source positions.

    >>> Causal().keys_seen(np.array([1, 1, 1, 2, 2, 0])).tolist()
    [1, 2, 3, 1, 2, 0]
    """

    def intervals(self, q_positions: Any, xp: ModuleType) -> tuple[Interval, ...]:
        return ((None, q_positions),)


@dataclasses.dataclass(frozen=True)
class Full(Mask):
    """A query sees every key of its document.

    >>> Full().keys_seen(np.array([1, 1, 1, 2, 2, 0])).tolist()
    [3, 3, 3, 2, 2, 0]
    """

    def intervals(self, q_positions: Any, xp: ModuleType) -> tuple[Interval, ...]:
        return ((None, None),)


@dataclasses.dataclass(frozen=True)
class SlidingWindow(Mask):
    """A query sees itself, the `left` keys before it and the `right` keys after it.

    What is often called a window of w tokens is `SlidingWindow(w - 1)`.

    >>> SlidingWindow(1).keys_seen(np.array([1, 1, 1, 2, 2, 0])).tolist()
    [1, 2, 2, 1, 2, 0]
    """

    left: int
    right: int = 0

    def __post_init__(self) -> None:
        for name in ("left", "right"):
            object.__setattr__(self, name, _tokens(name, getattr(self, name)))

    def intervals(self, q_positions: Any, xp: ModuleType) -> tuple[Interval, ...]:
        return ((q_positions - self.left, q_positions + self.right),)


@dataclasses.dataclass(frozen=True)
class Chunked(Mask):
    """A query sees the keys of its own chunk: of `size` source positions, from position 0 on.

    Causal within chunks is `Causal() & Chunked(size)`.

    >>> Chunked(2).keys_seen(np.array([1, 1, 1, 2, 2, 0])).tolist()
    [2, 2, 1, 1, 1, 0]
    """

    size: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", _tokens("size", at_least_one("size", self.size)))

    def intervals(self, q_positions: Any, xp: ModuleType) -> tuple[Interval, ...]:
        first = q_positions - xp.remainder(q_positions, np.int32(self.size))
        return ((first, first + (self.size - 1)),)


@dataclasses.dataclass(frozen=True)
class PrefixLM(Mask):
    """A query sees the first `length` source positions, and itself and all keys before it.

    The prefix is one of the sequence, not of each packed document.

    >>> PrefixLM(2).keys_seen(np.array([1, 1, 1, 2, 2, 0])).tolist()
    [2, 2, 3, 1, 2, 0]
    """

    length: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "length", _tokens("length", self.length))

    def intervals(self, q_positions: Any, xp: ModuleType) -> tuple[Interval, ...]:
        return ((None, xp.maximum(q_positions, np.int32(self.length - 1))),)


def check_mask(mask: Any, sequence_length: int) -> None:
    """TypeError or ValueError, in a sentence, where something is no mask that blocks can follow.

    A mask whose intervals fall back as queries go on would have blocks skipped that it shows.
    """
    if not isinstance(mask, Mask):
        given = repr(mask) if isinstance(mask, str) else f"a {type(mask).__name__}"
        raise TypeError(f"mask is {given}; it needs to be a plait.Mask, such as Causal()")
    try:
        hash(mask)
    except TypeError:
        raise TypeError(
            f"mask {type(mask).__name__} cannot be hashed; make it a frozen dataclass of numbers"
        ) from None
    if sequence_length > _FAR:
        raise ValueError(
            f"the sequence has {sequence_length} tokens; masks need int32 to hold any position and "
            f"window: at most {_FAR}"
        )
    _check_ends_rise(mask, sequence_length)


@functools.lru_cache(maxsize=64)
def _check_ends_rise(mask: Mask, sequence_length: int) -> None:
    intervals = mask.intervals(np.arange(sequence_length, dtype=np.int32), np)
    if not intervals or not all(isinstance(i, tuple) and len(i) == 2 for i in intervals):
        raise TypeError(
            f"{mask!r}.intervals gives {intervals!r:.60}; it needs to give a tuple of at least one "
            "pair (first, last)"
        )
    for interval in intervals:
        for name, end in zip(("first", "last"), interval, strict=True):
            falls = np.flatnonzero(
                np.diff(np.broadcast_to(0 if end is None else end, sequence_length)) < 0
            )
            if falls.size:
                at = int(falls[0])
                raise ValueError(
                    f"the {name} position that {mask!r} shows falls from query {at} to {at + 1}; "
                    "it needs to rise or stay: split the mask into intervals that do, joined by |"
                )


def _tokens(name: str, value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}; it needs to be an integer of tokens") from None
    if not 0 <= number <= _FAR:
        nearest = min(max(number, 0), _FAR)
        raise ValueError(f"{name} is {number}; it needs to be 0 to {_FAR}, such as {nearest}")
    return number


@dataclasses.dataclass(frozen=True)
class _Both(Mask):
    one: Mask
    other: Mask

    def intervals(self, q_positions: Any, xp: ModuleType) -> tuple[Interval, ...]:
        ours, theirs = (m.intervals(q_positions, xp) for m in (self.one, self.other))
        return tuple(
            (_bound(xp.maximum, a, c), _bound(xp.minimum, b, d)) for a, b in ours for c, d in theirs
        )

    def __repr__(self) -> str:
        return f"{self.one!r} & {self.other!r}"


def _bound(tighter: Any, a: Any, b: Any) -> Any:
    return b if a is None else a if b is None else tighter(a, b)


@dataclasses.dataclass(frozen=True)
class _Either(Mask):
    one: Mask
    other: Mask

    def intervals(self, q_positions: Any, xp: ModuleType) -> tuple[Interval, ...]:
        return (*self.one.intervals(q_positions, xp), *self.other.intervals(q_positions, xp))

    def __repr__(self) -> str:
        return f"({self.one!r} | {self.other!r})"


@dataclasses.dataclass(frozen=True)
class BlockBounds:
    """The least and most source position and segment id in each block; padding does not count.

    `padded` says where a block holds padding.
    """

    least: Any
    most: Any
    least_id: Any
    most_id: Any
    padded: Any

    @classmethod
    def of(cls, positions: Any, segment_ids: Any, block: int, xp: ModuleType) -> BlockBounds:
        """Bounds of blocks along the last axis, whose length is a multiple of `block`."""
        shape = (*positions.shape[:-1], -1, block)
        positions, ids = positions.reshape(shape), segment_ids.reshape(shape)
        real = ids != 0
        return cls(
            xp.where(real, positions, _FAR).min(axis=-1),
            xp.where(real, positions, -1).max(axis=-1),
            xp.where(real, ids, np.iinfo(np.int32).max).min(axis=-1),
            xp.where(real, ids, -np.iinfo(np.int32).max).max(axis=-1),
            ~real.all(axis=-1),
        )

    def along(self, dimension: int) -> BlockBounds:
        """With a dimension of size 1 inserted, to broadcast against other blocks."""
        index = (..., slice(None), None) if dimension == -1 else (..., None, slice(None))
        return BlockBounds(*(getattr(self, f.name)[index] for f in dataclasses.fields(self)))


def block_map(mask: Mask, q: BlockBounds, k: BlockBounds) -> Any:
    """Which blocks must be computed: bool [q blocks, k blocks], False only for empty ones."""
    q, k = q.along(-1), k.along(-2)
    same_document = (q.least_id <= k.most_id) & (k.least_id <= q.most_id)
    return same_document & mask.may_see(q.least, q.most, k.least, k.most)


def full_blocks(mask: Mask, q: BlockBounds, k: BlockBounds) -> Any:
    """Which blocks need no mask: bool [q blocks, k blocks], True only where every pair is seen."""
    q, k = q.along(-1), k.along(-2)
    one_document = (q.least_id == k.most_id) & (k.least_id == q.most_id)
    return (
        one_document
        & (q.least_id == q.most_id)
        & ~(q.padded | k.padded)
        & mask.sees_all(q.least, q.most, k.least, k.most)
    )
