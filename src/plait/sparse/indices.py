"""Indices of tokens, in closed form from source positions to slots and back."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from plait.layout import Layout, Striped
from plait.positions import slots_of_positions
from plait.tree import as_int32


def slots(layout: Layout, sequence_length: int, source_positions: Any) -> jax.Array:
    """The slots of source positions, by arithmetic and a table of chunks: no search.

    Args:
      layout: the layout of the sequence.
      sequence_length: its global length, in tokens.
      source_positions: integers of any shape; negative ones, which stand for no token, stay.

    Returns:
      int32 of the same shape: where each token lies when the shards are joined in rank order. Slot
      s is on rank s // (sequence_length / ranks).

    >>> import numpy as np
    >>> from plait import Zigzag
    >>> slots(Zigzag(2), 8, np.array([6, 1, -1])).tolist()
    [2, 1, -1]
    """
    length = layout.check_length(sequence_length)
    given = _checked(source_positions, length, "source_positions")
    return jnp.where(given < 0, given, slots_of_positions(layout, length, jnp.maximum(given, 0)))


def positions(layout: Layout, sequence_length: int, slots: Any) -> jax.Array:
    """The source positions of slots: the inverse of `slots`, with the same arguments.

    From one layout to another indices go by way of positions:
    `slots(target, n, positions(source, n, indices))`.

    >>> import numpy as np
    >>> from plait import Zigzag
    >>> positions(Zigzag(2), 8, np.array([2, 1, -1])).tolist()
    [6, 1, -1]
    """
    length = layout.check_length(sequence_length)
    given = _checked(slots, length, "slots")
    slot, chunk_length = jnp.maximum(given, 0), np.int32(layout.chunk_length(length))
    place, within = lax.div(slot, chunk_length), lax.rem(slot, chunk_length)
    if isinstance(layout, Striped):
        rows = np.int32(length // layout.ranks // chunk_length)
        chunk = lax.rem(place, rows) * np.int32(layout.ranks) + lax.div(place, rows)
    else:
        chunk = jnp.asarray(layout.chunk_table(length).reshape(-1).astype(np.int32))[place]
    return jnp.where(given < 0, given, chunk * chunk_length + within)


def _checked(indices: Any, length: int, name: str) -> jax.Array:
    indices = as_int32(indices, name)
    if not isinstance(indices, jax.Array):
        outside = indices >= length
        if outside.any():
            wrong = int(indices[outside][0])
            raise ValueError(
                f"{name} holds {wrong}, outside the sequence of {length} tokens; the nearest is "
                f"{length - 1}"
            )
    return jnp.asarray(indices).astype(jnp.int32)
