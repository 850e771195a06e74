"""Masks: which keys a query sees, as functions of source positions and segment ids.

Never of slots: the same mask is then right in every layout. A mask also bounds a block of queries
against a block of keys from their smallest and largest positions, and counts exactly.
"""

from __future__ import annotations

import abc
import dataclasses
from types import ModuleType
from typing import Any

import numpy as np

from plait.layout import Layout


class Mask(abc.ABC):
    """Which keys a query sees within its document."""

    @abc.abstractmethod
    def visible(self, q_positions: Any, k_positions: Any) -> Any:
        """Whether a query at one source position sees a key at another; arrays broadcast."""

    @abc.abstractmethod
    def may_see(self, q_least: Any, q_most: Any, k_least: Any, k_most: Any) -> Any:
        """False only where no query within these positions sees a key within those."""

    @abc.abstractmethod
    def keys_seen(self, segment_ids: np.ndarray) -> np.ndarray:
        """How many keys each query sees: int64, in the source order of the ids [sequence]."""


@dataclasses.dataclass(frozen=True)
class Causal(Mask):
    """A query sees the keys at its own and earlier source positions.

    >>> import numpy as np
    >>> Causal().keys_seen(np.array([1, 1, 1, 2, 2, 0])).tolist()
    [1, 2, 3, 1, 2, 0]
    """

    def visible(self, q_positions: Any, k_positions: Any) -> Any:
        return k_positions <= q_positions

    def may_see(self, q_least: Any, q_most: Any, k_least: Any, k_most: Any) -> Any:
        return k_least <= q_most

    def keys_seen(self, segment_ids: np.ndarray) -> np.ndarray:
        order = np.argsort(segment_ids, kind="stable")
        in_order = segment_ids[order]
        starts = np.flatnonzero(np.diff(in_order, prepend=in_order[0] - 1))
        lengths = np.diff(starts, append=in_order.size)
        seen = np.empty(segment_ids.size, np.int64)
        seen[order] = np.arange(in_order.size) - np.repeat(starts, lengths) + 1
        return np.where(segment_ids == 0, 0, seen)


@dataclasses.dataclass(frozen=True)
class Full(Mask):
    """A query sees every key of its document.

    >>> import numpy as np
    >>> Full().keys_seen(np.array([1, 1, 1, 2, 2, 0])).tolist()
    [3, 3, 3, 2, 2, 0]
    """

    def visible(self, q_positions: Any, k_positions: Any) -> Any:
        return True

    def may_see(self, q_least: Any, q_most: Any, k_least: Any, k_most: Any) -> Any:
        return True

    def keys_seen(self, segment_ids: np.ndarray) -> np.ndarray:
        _, which, counts = np.unique(segment_ids, return_inverse=True, return_counts=True)
        return np.where(segment_ids == 0, 0, counts[which])


def visible_pairs(
    layout: Layout,
    sequence_length: int,
    mask: Mask | None = None,
    segment_ids: np.ndarray | None = None,
) -> np.ndarray:
    """The attention work of each rank: exactly how many (query, key) pairs its queries see.

    Args:
      layout: the layout.
      sequence_length: tokens in the sequence.
      mask: the mask; Causal() by default.
      segment_ids: integers in source order, [sequence] or [batch, sequence], whose rows add up;
        0 is padding. None: one document.

    Returns:
      int64 [ranks].

    >>> from plait import Contiguous, Zigzag
    >>> visible_pairs(Contiguous(2), 8).tolist(), visible_pairs(Zigzag(2), 8).tolist()
    ([10, 26], [18, 18])
    """
    mask = Causal() if mask is None else mask
    length = layout.check_length(sequence_length)
    ids = np.ones(length, np.int32) if segment_ids is None else np.asarray(segment_ids)
    if ids.shape[-1:] != (length,) or ids.ndim > 2:
        raise ValueError(
            f"segment_ids has shape {ids.shape}; it needs to be ({length},) or (batch, {length})"
        )
    positions = layout.positions(length)
    seen = sum(mask.keys_seen(row) for row in np.atleast_2d(ids))
    return np.asarray(seen)[positions].reshape(layout.ranks, -1).sum(axis=1)


_FAR = np.iinfo(np.int32).max


@dataclasses.dataclass(frozen=True)
class BlockBounds:
    """The least and most source position and segment id in each block; padding does not count."""

    least: Any
    most: Any
    least_id: Any
    most_id: Any

    @classmethod
    def of(cls, positions: Any, segment_ids: Any, block: int, xp: ModuleType) -> BlockBounds:
        """Bounds of blocks along the last axis, whose length is a multiple of `block`."""
        shape = (*positions.shape[:-1], -1, block)
        positions, ids = positions.reshape(shape), segment_ids.reshape(shape)
        real = ids != 0
        return cls(
            xp.where(real, positions, _FAR).min(axis=-1),
            xp.where(real, positions, -1).max(axis=-1),
            xp.where(real, ids, _FAR).min(axis=-1),
            xp.where(real, ids, -_FAR).max(axis=-1),
        )


def block_map(mask: Mask, q: BlockBounds, k: BlockBounds) -> Any:
    """Which blocks must be computed: bool [q blocks, k blocks], False only for empty ones."""
    q_least, q_most = q.least[..., :, None], q.most[..., :, None]
    k_least, k_most = k.least[..., None, :], k.most[..., None, :]
    same_document = (q.least_id[..., :, None] <= k.most_id[..., None, :]) & (
        k.least_id[..., None, :] <= q.most_id[..., :, None]
    )
    return same_document & mask.may_see(q_least, q_most, k_least, k_most)
