"""What every strategy is given: the kernel, and where in the text the tokens of a rank are."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from plait.attention.kernels import Kernel, Scores, Tags
from plait.exchange import gather_shards
from plait.layout import Layout
from plait.mesh import Axes
from plait.positions import positions_of_rank, positions_of_slots


@dataclasses.dataclass(frozen=True)
class Shards:
    """A sequence of `length` tokens over the ranks of `axes`; None where one device holds it."""

    layout: Layout
    length: int
    axes: Axes | None

    def tags(self, positions: Any, segment_ids: Any, batch: int) -> Tags:
        """Of this rank's tokens. Positions that are given replace those of the layout."""
        if positions is None:
            if self.axes is None:
                positions = positions_of_slots(self.layout, self.length)
            else:
                positions = positions_of_rank(self.layout, self.length, self.axes.rank())
        return Tags(jnp.broadcast_to(positions, (batch, positions.shape[-1])), segment_ids)

    def all_tags(self, positions: Any, segment_ids: Any, batch: int) -> Tags:
        """Of the tokens of all ranks, in rank order; what are arrays is gathered."""
        if self.axes is None:
            return self.tags(positions, segment_ids, batch)
        names = self.axes.names
        if positions is None:
            positions = positions_of_slots(self.layout, self.length)
        else:
            positions = gather_shards(positions, positions.ndim - 1, names)
        if segment_ids is not None:
            segment_ids = gather_shards(segment_ids, 1, names)
        return Tags(jnp.broadcast_to(positions, (batch, positions.shape[-1])), segment_ids)


@dataclasses.dataclass(frozen=True)
class Task:
    """The attention to compute: all that is known when a call is traced."""

    kernel: Kernel
    scores: Scores
    shards: Shards


@dataclasses.dataclass(frozen=True)
class Tokens:
    """This rank's arrays: [batch, tokens, heads, head_dim], ids [batch, tokens] or None.

    `positions` are int32 [tokens] or [batch, tokens] where they are data, else None.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    segment_ids: jax.Array | None
    positions: jax.Array | None
