"""Source positions: where in the text the tokens of a rank, or of every slot, come from."""

from __future__ import annotations

from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from plait.layout import Layout, Striped
from plait.mesh import AxisName, as_names, bound_axes, check_ranks, is_inside, of_rank

Ids = TypeVar("Ids", np.ndarray, jax.Array)


def source_positions(
    layout: Layout, sequence_length: int, *, axis_name: AxisName | None = None
) -> np.ndarray | jax.Array:
    """The source position of every slot, or inside `jax.shard_map` of this rank's slots.

    Args:
      layout: the layout.
      sequence_length: the global length, in tokens.
      axis_name: the mesh axes of the sequence.

    Returns:
      On the host int32 NumPy [sequence_length]. In a region that is manual over `axis_name` a
      jax array, int32 [sequence_length / ranks], computed on the device: no table of the length
      of the sequence enters the program.

    >>> from plait import Zigzag
    >>> source_positions(Zigzag(2), 8).tolist()
    [0, 1, 6, 7, 2, 3, 4, 5]
    """
    names = as_names(axis_name)
    layout.check_length(sequence_length)
    if not names or not is_inside(names, "source_positions"):
        return layout.positions(sequence_length)
    axes = bound_axes(names)
    check_ranks(layout, axes.size, names)
    return positions_of_rank(layout, sequence_length, axes.rank())


def positions_of_rank(layout: Layout, sequence_length: int, rank: jax.Array) -> jax.Array:
    """The source positions of one rank, which may be traced: int32 [sequence_length / ranks]."""
    per_rank = sequence_length // layout.ranks
    if isinstance(layout, Striped):
        slot = lax.iota(jnp.int32, per_rank)
        row, within = _divmod(slot, layout.stripe)
        return (row * layout.ranks + rank) * layout.stripe + within
    length = layout.chunk_length(sequence_length)
    starts = layout.chunk_table(sequence_length).astype(np.int32) * np.int32(length)
    return _spread(of_rank(starts, rank), length)


def positions_of_slots(layout: Layout, sequence_length: int) -> jax.Array:
    """`layout.positions` computed on the device: int32 [sequence_length]."""
    if isinstance(layout, Striped):
        ranks = lax.iota(jnp.int32, layout.ranks)[:, None]
        return positions_of_rank(layout, sequence_length, ranks).reshape(-1)
    length = layout.chunk_length(sequence_length)
    starts = layout.chunk_table(sequence_length).astype(np.int32) * np.int32(length)
    return _spread(jnp.asarray(starts.reshape(-1)), length)


def _spread(starts: jax.Array, length: int) -> jax.Array:
    return (starts[:, None] + lax.iota(jnp.int32, length)[None]).reshape(-1)


def _divmod(x: jax.Array, by: int) -> tuple[jax.Array, jax.Array]:
    """Of non-negative int32, which stays int32 where jax's default is 64 bits."""
    return lax.div(x, np.int32(by)), lax.rem(x, np.int32(by))


def slots_of_positions(
    layout: Layout, sequence_length: int, source_positions: jax.Array
) -> jax.Array:
    """The slots of some source positions, of any shape, by arithmetic and a table of chunks."""
    length = layout.chunk_length(sequence_length)
    chunk, within = _divmod(source_positions, length)
    if isinstance(layout, Striped):
        row, rank = _divmod(chunk, layout.ranks)
        return (rank * (sequence_length // layout.ranks // length) + row) * length + within
    place = np.argsort(layout.chunk_table(sequence_length).reshape(-1)).astype(np.int32)
    return jnp.asarray(place)[chunk] * length + within


def segment_positions(segment_ids: Ids) -> Ids:
    """The position of each token within its document, in source order; 0 where the id is 0.

    What RoPE takes for packed documents. Count before reordering: from ids in another order the
    positions within documents can't be told, and a count would be silently wrong.

    Args:
      segment_ids: integers [..., sequence] in source order, one run of equal ids a document; 0 is
        padding. An id that comes back after another document is an error where the ids are NumPy.

    Returns:
      int32 of the same shape, NumPy for NumPy.

    >>> import numpy as np
    >>> segment_positions(np.array([1, 1, 1, 2, 2, 0])).tolist()
    [0, 1, 2, 0, 1, 0]
    """
    host = isinstance(segment_ids, np.ndarray)
    ids = segment_ids if host else jnp.asarray(segment_ids)
    if ids.ndim < 1 or not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ValueError(
            f"segment_ids has shape {ids.shape} and dtype {ids.dtype}; it needs to be integers "
            "[..., sequence]"
        )
    xp = np if host else jnp
    index = xp.broadcast_to(xp.arange(ids.shape[-1], dtype=np.int32), ids.shape)
    is_start = xp.concatenate(
        [xp.ones_like(ids[..., :1], dtype=bool), ids[..., 1:] != ids[..., :-1]], axis=-1
    )
    starts = xp.where(is_start, index, np.int32(0))
    if host:
        _check_one_run_a_document(np.asarray(ids), np.asarray(is_start))
    started = (
        np.maximum.accumulate(starts, axis=-1) if host else lax.cummax(starts, axis=ids.ndim - 1)
    )
    return xp.where(ids == 0, np.int32(0), index - started)


def _check_one_run_a_document(ids: np.ndarray, is_start: np.ndarray) -> None:
    rows = ids.reshape(-1, ids.shape[-1])
    for row, (row_ids, starts) in enumerate(zip(rows, is_start.reshape(rows.shape), strict=True)):
        documents, runs = np.unique(row_ids[starts & (row_ids != 0)], return_counts=True)
        if (runs > 1).any():
            raise ValueError(
                f"segment id {documents[runs > 1][0]} of row {row} comes back after another "
                "document; each document needs an id of its own, such as 1, 2, 3 in turn"
            )
