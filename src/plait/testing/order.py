"""Is an array in the order that it is said to be in? By the source positions that came with it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from plait.context import ContextParallel
from plait.layout import HalfSwap, Layout, Striped, Zigzag
from plait.mesh import (
    as_names,
    as_varying,
    bound_axes,
    check_ranks,
    check_shard,
    is_inside,
    manual_axes,
)
from plait.positions import positions_of_rank, positions_of_slots

_MOST_RANKS_TRIED = 1024
_UNKNOWN = np.iinfo(np.int64).min


def check_order(source_positions: Any, layout: Layout | ContextParallel) -> None:
    """Raise where source positions that travelled with a batch are not in the order of a layout.

    Let `np.arange(sequence_length)` travel with the tokens through the pipeline, and check at its
    end what came of it: a batch that was reordered twice, or never, or for another number of ranks
    has the right shape and the wrong loss.

    Args:
      source_positions: integers [..., sequence], such as [batch, sequence], of the whole sequence:
        a NumPy array, or a jax array, sharded or not. Of one that lies on several processes each
        looks at its own part.
      layout: the layout that the batch is said to be in, or the handle of it.

    Raises:
      ValueError: the first slot that holds another position, and the layout that it looks like.
      TypeError: no integers, or an array that is traced, whose values only exist when the
        program runs: check the arrays that go into it, or use `in_order` inside.

    >>> from plait import Zigzag
    >>> check_order([0, 1, 6, 7, 2, 3, 4, 5], Zigzag(2))
    >>> check_order(np.arange(8), Zigzag(2))
    Traceback (most recent call last):
    ValueError: source_positions are not in the order of Zigzag(2): slot 2 holds position 2 and \
should hold 6; they look like source order, as if they had not been reordered
    """
    layout = _handle(layout).layout
    if isinstance(source_positions, jax.core.Tracer):
        raise TypeError(
            "source_positions are traced, so that their values are not known here: call "
            "check_order on the arrays that go into the compiled function, or "
            "plait.testing.in_order inside it"
        )
    x = (
        source_positions
        if isinstance(source_positions, jax.Array)
        else np.asarray(source_positions)
    )
    length = _checked_length(x, layout)
    order = layout.positions(length)
    wrong = []
    for index, part in _parts(x):
        starts = [entry.indices(size)[0] for entry, size in zip(index, x.shape, strict=True)]
        there = np.argwhere(part != order[index[-1]])
        if there.size:
            wrong.append((*(there[0] + starts).tolist(), int(part[tuple(there[0])])))
    if not wrong:
        return
    *row, slot, held = min(wrong)
    at = f"slot {slot}" + (f" of row {', '.join(map(str, row))}" if row else "")
    raise ValueError(
        f"source_positions are not in the order of {layout!r}: {at} holds position {held} and "
        f"should hold {order[slot]}; {_looks_like(_row(x, row), layout)}"
    )


def in_order(source_positions: jax.Array, layout: Layout | ContextParallel) -> jax.Array:
    """Whether source positions are in the order of a layout, as a value on the device.

    For use inside `jax.jit` and `jax.shard_map`, where nothing can be raised: make the loss NaN
    where it is False, report it with the metrics, or give it to `jax.experimental.checkify.check`.

    Args:
      source_positions: integers [..., sequence]; inside `jax.shard_map`, this rank's.
      layout: the handle of the layout, whose axes say what a rank is, or a layout, for arrays of
        the whole sequence.

    Returns:
      bool scalar; inside `jax.shard_map` the same on every rank, and over those batch axes of the
      handle that are manual there.

    >>> from plait import Zigzag
    >>> bool(in_order(jnp.array([0, 1, 6, 7, 2, 3, 4, 5]), Zigzag(2)))
    True
    >>> jax.jit(lambda at, loss: jnp.where(in_order(at, Zigzag(2)), loss, jnp.nan))(
    ...     jnp.arange(8), 0.5
    ... ).item()
    nan
    """
    cp = _handle(layout)
    names = as_names(cp.axis_name)
    x = jnp.asarray(source_positions)
    if not is_inside(names, "in_order"):
        length = _checked_length(x, cp.layout)
        return (x == positions_of_slots(cp.layout, length)).all()
    axes = bound_axes(names)
    check_ranks(cp.layout, axes.size, names)
    check_shard(x, names, "source_positions")
    length = _checked_length(x, cp.layout, axes.size)
    over = (*names, *(name for name in cp.batch_axes if name in manual_axes()))
    wrong = (x != positions_of_rank(cp.layout, length, axes.rank())).any().astype(jnp.int32)
    return lax.psum(as_varying(wrong, over), over) == 0


def _handle(layout: Layout | ContextParallel) -> ContextParallel:
    return layout if isinstance(layout, ContextParallel) else ContextParallel(layout)


def _checked_length(x: Any, layout: Layout, ranks: int = 1) -> int:
    if x.ndim < 1 or not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(
            f"source_positions have shape {x.shape} and dtype {x.dtype}; they need to be integers "
            "[..., sequence]"
        )
    length = x.shape[-1] * ranks
    return layout.check_length(length, f"axis {x.ndim - 1} of source_positions")


def _parts(x: Any) -> Iterator[tuple[tuple[slice, ...], np.ndarray]]:
    """The parts of an array that this process holds, each with its place in the whole."""
    if not isinstance(x, jax.Array):
        yield (slice(None),) * x.ndim, x
        return
    seen = set()
    for shard in x.addressable_shards:
        place = tuple(entry.indices(size) for entry, size in zip(shard.index, x.shape, strict=True))
        if place not in seen:
            seen.add(place)
            yield shard.index, np.asarray(shard.data)


def _row(x: Any, row: list[int]) -> np.ndarray:
    """One row as far as this process holds it, and `_UNKNOWN`."""
    known = np.full(x.shape[-1], _UNKNOWN, np.int64)
    for index, part in _parts(x):
        ranges = [range(*e.indices(n)) for e, n in zip(index[:-1], x.shape, strict=False)]
        if all(at in places for at, places in zip(row, ranges, strict=True)):
            inside = tuple(at - places.start for at, places in zip(row, ranges, strict=True))
            known[index[-1]] = part[inside]
    return known


def _looks_like(row: np.ndarray, layout: Layout) -> str:
    known = row != _UNKNOWN
    positions, counts = np.unique(row[known], return_counts=True)
    outside = positions[(positions < 0) | (positions >= row.size)]
    if outside.size:
        return f"position {outside[0]} lies outside the sequence of {row.size} tokens"
    if (counts > 1).any():
        return (
            f"position {positions[counts > 1][0]} comes up more than once, so that they are no "
            "source positions, which never restart: segment_positions do"
        )
    if (row == np.arange(row.size))[known].all():
        return "they look like source order, as if they had not been reordered"
    names = [name for name, order in _known_orders(row, layout) if (order == row)[known].all()]
    return f"they look like {' or '.join(names) or 'no layout that is known here'}"


def _known_orders(row: np.ndarray, layout: Layout) -> Iterator[tuple[str, np.ndarray]]:
    length, order = row.size, layout.positions(row.size)
    yield f"{layout!r} applied twice", order[order]
    yield f"the inverse of {layout!r}, as if they had been restored", layout.slots(length)
    stripe = int(np.argmax(np.diff(row) != 1)) + 1
    for ranks in (layout.ranks, *range(2, min(length, _MOST_RANKS_TRIED) + 1)):
        if length % ranks:
            continue
        for other in (Zigzag(ranks), HalfSwap(ranks), Striped(ranks, stripe)):
            if length % other.multiple == 0:
                yield repr(other), other.positions(length)
