"""Ulysses, and Ulysses inside a ring: heads are dealt to the ranks, which then see all tokens.

DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv 2309.14509); USP (Fang and Zhao 2024,
arXiv 2405.07719).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from plait.attention.kernels import attend
from plait.attention.strategies.base import Shards, Task, Tokens
from plait.attention.strategies.ring import ring
from plait.exchange import gather_shards
from plait.layout import Contiguous, Layout, Striped, Zigzag
from plait.mesh import Axes, as_varying
from plait.names import GATHERED_KEYS, GATHERED_VALUES, named
from plait.permute import Relayout, permute

Partial = tuple[jax.Array, jax.Array]


def ulysses(task: Task, tokens: Tokens) -> Partial:
    """(out, lse) of this rank's queries: two all-to-alls to heads, the kernel, one back."""
    axes = task.shards.axes
    assert axes is not None
    data = tokens.positions, tokens.segment_ids, tokens.q.shape[0]
    tags = task.shards.all_tags(*data)
    q, k, v = _to_heads(tokens, axes)
    return _to_tokens(attend(task.kernel, task.scores, q, k, v, tags, tags), q.dtype, axes)


def usp(task: Task, tokens: Tokens) -> Partial:
    """(out, lse) of this rank's queries: heads over the last mesh axis, a ring over the others."""
    shards = task.shards
    assert shards.axes is not None
    inner, outer = shards.axes.split()
    q, k, v = _to_heads(tokens, inner)
    grouped = group_layout(shards.layout, inner.size)
    positions, ids = tokens.positions, tokens.segment_ids
    if ids is not None:
        ids = gather_shards(ids, 1, inner.names)
    arrays = (q, k, v, ids)
    back: Callable[[jax.Array], jax.Array] = lambda x: x  # noqa: E731
    if positions is not None or grouped is None:
        if positions is None:
            positions = shards.tags(None, None, 1).positions[0]
        positions = gather_shards(positions, positions.ndim - 1, inner.names)
        grouped = Contiguous(outer.size)
    else:
        within: Any = dataclasses.replace(shards.layout, ranks=inner.size)  # type: ignore[type-var]
        move = Relayout(within, Contiguous(inner.size), q.shape[1])
        arrays = jax.tree.map(lambda x: permute(x, move, 1), arrays)
        back = lambda x: permute(x, move.inverse(), 1)  # noqa: E731
    q, k, v, ids = arrays
    around = dataclasses.replace(task, shards=Shards(grouped, shards.length, outer))
    out, lse = ring(around, Tokens(q, k, v, ids, positions))
    return _to_tokens((back(out), back(lse)), tokens.q.dtype, inner)


def group_layout(layout: Layout, size: int) -> Layout | None:
    """The layout of the tokens of groups of `size` ranks, each group's put in order, if any.

    >>> group_layout(Zigzag(8), 2)
    Zigzag(4)
    """
    groups = layout.ranks // size
    if isinstance(layout, Striped):
        return Striped(groups, layout.stripe * size)
    if isinstance(layout, Contiguous | Zigzag):
        return dataclasses.replace(layout, ranks=groups)
    return None


def _to_heads(tokens: Tokens, axes: Axes) -> tuple[jax.Array, jax.Array, jax.Array]:
    """All tokens of this rank's heads. Of fewer kv heads than ranks each has as many copies as
    ranks attend to it."""
    copies = math.lcm(tokens.k.shape[2], axes.size) // tokens.k.shape[2]
    k, v = (jnp.repeat(x, copies, axis=2) if copies > 1 else x for x in (tokens.k, tokens.v))
    q, k, v = (_all_to_all(x, axes, 2, 1) for x in (tokens.q, k, v))
    return q, named(k, GATHERED_KEYS), named(v, GATHERED_VALUES)


def _to_tokens(parts: Partial, dtype: Any, axes: Axes) -> Partial:
    """The parts where their tokens are; out travels in the dtype it will have."""
    out, lse = parts
    return _all_to_all(out.astype(dtype), axes, 1, 2), _all_to_all(lse, axes, 1, 2)


def _all_to_all(x: jax.Array, axes: Axes, split: int, concat: int) -> jax.Array:
    x = as_varying(x, axes.names)
    return lax.all_to_all(x, axes.names, split_axis=split, concat_axis=concat, tiled=True)
