"""Lists of the blocks of scores that a kernel has to compute, for a grid that runs over them.

A visit is one int32, so that a list of them fits a TPU's scalar memory: which row of the batch,
which outer and which inner block, what is to be done there, and whether it is the first or the
last one of its outer block. The outer blocks are those that something is accumulated for: blocks of
queries for the output and the gradient of q, blocks of keys for the gradients of k and v.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from plait.mask import BlockBounds, Mask, block_map, full_blocks

NOTHING, PARTIAL, FULL = 0, 1, 2
"""What is to be done: nothing seen, write zeros; compute with the mask; compute without."""

_FLAG_BITS = 4
_NONE = -1


@dataclasses.dataclass(frozen=True)
class Visits:
    """How visits over so many outer and inner blocks are written as one int32, and read."""

    outer_blocks: int
    inner_blocks: int

    @property
    def _inner_bits(self) -> int:
        return (self.inner_blocks - 1).bit_length()

    @property
    def _outer_bits(self) -> int:
        return (self.outer_blocks - 1).bit_length()

    def list(self, needed: Any, full: Any) -> tuple[jax.Array, jax.Array]:
        """The visits in order and how many they are: int32 [batch * outer * inner], int32 [].

        An outer block that needs nothing has one visit all the same: its result must be written.

        Args:
          needed, full: bool [batch, outer, inner].
        """
        never = ~needed.any(axis=-1, keepdims=True)
        row, outer, inner = (lax.broadcasted_iota(jnp.int32, needed.shape, d) for d in range(3))
        visited = needed | (never & (inner == 0))
        nth = jnp.cumsum(visited, axis=-1, dtype=jnp.int32)
        counts = nth[..., -1]
        kind = jnp.where(full, FULL, jnp.where(needed, PARTIAL, NOTHING))
        place = ((row << self._outer_bits | outer) << self._inner_bits) | inner
        flags = kind << 2 | (nth == counts[..., None]) << 1 | (nth == 1)
        before = jnp.cumsum(counts.reshape(-1), dtype=jnp.int32).reshape(counts.shape) - counts
        target = before[..., None] + nth - 1
        visits = jnp.where(visited, place << _FLAG_BITS | flags, _NONE)
        return _compressed(visits.reshape(-1), target.reshape(-1)), counts.sum(dtype=jnp.int32)

    def place(self, visit: Any) -> tuple[Any, Any, Any]:
        """The row of the batch, the outer and the inner block; by shifts, for index maps."""
        place = visit >> _FLAG_BITS
        outer = place >> self._inner_bits
        return (
            outer >> self._outer_bits,
            outer & ((1 << self._outer_bits) - 1),
            place & ((1 << self._inner_bits) - 1),
        )


def _compressed(visits: jax.Array, target: jax.Array) -> jax.Array:
    """The visits, each moved down to its target, in order; then zeros.

    By one bit of the distance at a time, the lowest first, so that none lands on another (Warren,
    Hacker's Delight, 7-4). The TPU compiler takes a minute to sort as long a list.
    """
    distance = jnp.where(visits == _NONE, 0, jnp.arange(visits.size, dtype=jnp.int32) - target)
    for bit in range((visits.size - 1).bit_length()):
        moves = (distance >> bit) & 1 == 1
        arrived = _shifted(jnp.where(moves, visits, _NONE), 1 << bit, _NONE)
        visits = jnp.where(arrived != _NONE, arrived, jnp.where(moves, _NONE, visits))
        brought = _shifted(jnp.where(moves, distance, 0), 1 << bit, 0)
        distance = jnp.where(arrived != _NONE, brought, jnp.where(moves, 0, distance))
    return jnp.where(visits == _NONE, 0, visits)


def _shifted(x: jax.Array, by: int, fill: int) -> jax.Array:
    return jnp.concatenate([x[by:], jnp.full_like(x[:by], fill)])


def kind(visit: Any) -> Any:
    """NOTHING, PARTIAL or FULL."""
    return (visit >> 2) & 3


def is_last(visit: Any) -> Any:
    """Whether it is the last visit of its outer block."""
    return (visit >> 1) & 1 == 1


def is_first(visit: Any) -> Any:
    """Whether it is the first visit of its outer block."""
    return visit & 1 == 1


def list_visits(
    mask: Mask, q: BlockBounds, k: BlockBounds, outer: Literal["q", "k"]
) -> tuple[jax.Array, jax.Array]:
    """The visits that a mask needs, in closed form from the blocks' bounds, and their number.

    Args:
      q, k: bounds of blocks of queries and of keys, [batch, blocks].
      outer: whose blocks are the outer ones.
    """
    needed = block_map(mask, q, k)
    full = needed & full_blocks(mask, q, k)
    if outer == "k":
        needed, full = needed.swapaxes(1, 2), full.swapaxes(1, 2)
    return Visits(*needed.shape[1:]).list(needed, full)
