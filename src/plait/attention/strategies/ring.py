"""The ring strategy: keys and values travel from rank to rank while queries stay.

Ring attention (Liu et al. 2023, arXiv 2310.01889): what is needed next is on its way while what
is there is used. In the backward pass the gradients of keys and values travel with them, a step
behind, and come home at the end.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from plait.attention.kernels import Kernel, Scores, Tags, delta_of, merge, named_attended
from plait.attention.strategies.base import Task, Tokens
from plait.layout import Layout
from plait.mask import BlockBounds, Causal, Full, Mask, block_map
from plait.mesh import Axes, as_varying, of_rank
from plait.positions import positions_of_rank

FEWEST_SCANNED = 2
"""Steps of equal length that are a loop of the program; fewer are written out."""


def ring(task: Task, tokens: Tokens) -> tuple[jax.Array, jax.Array]:
    """(out, lse) of this rank's queries over the keys of all ranks."""
    shards = task.shards
    assert shards.axes is not None
    tags = shards.tags(tokens.positions, tokens.segment_ids, tokens.q.shape[0])
    is_data = tokens.positions is not None
    layout = None if is_data else shards.layout
    walk = _Ring(
        kernel=task.kernel,
        scores=task.scores,
        axes=shards.axes,
        layout=layout,
        length=shards.length,
        shifts=needed_shifts(layout, shards.length, shards.axes.size, task.scores.mask),
    )
    arrays = (tokens.q, tokens.k, tokens.v, tags)
    names = {*shards.axes.names}
    names.update(n for x in jax.tree.leaves(arrays) for n in jax.typeof(x).mat.varying)
    return _ring(walk, *jax.tree.map(lambda x: as_varying(x, names), arrays))


def is_nested(layout: Layout, sequence_length: int) -> bool:
    """Whether each rank holds two chunks and these pairs lie within each other.

    So they do in `Zigzag` and `HalfSwap`. Of two ranks, the one whose first chunk comes later
    then sees, causally, the first chunk of the other with all its queries, and is seen by the
    other's second chunk alone: half of the pairs either way, and nothing partial.

    >>> from plait import Contiguous, HalfSwap, Zigzag
    >>> [is_nested(layout, 48) for layout in (Zigzag(3), HalfSwap(3), Contiguous(3))]
    [True, True, False]
    """
    table = layout.chunk_table(sequence_length)
    if table.shape[1] != 2:
        return False
    seconds = table[np.argsort(table[:, 0]), 1]
    return bool((np.diff(seconds) < 0).all())


@functools.lru_cache(maxsize=256)
def needed_shifts(
    layout: Layout | None, sequence_length: int, ranks: int, mask: Mask
) -> tuple[int, ...]:
    """The steps t, ascending from 0, at which some rank sees keys of the rank t before it.

    Where positions are data, the layout None, every step is.
    """
    if layout is None:
        return tuple(range(ranks))
    positions = layout.positions(sequence_length).reshape(ranks, -1)
    runs = max(layout.chunk_table(sequence_length).shape[1], 1)
    block = positions.shape[1] // runs if runs <= 64 else positions.shape[1]
    bounds = BlockBounds.of(positions, np.ones_like(positions), block, np)
    flat = BlockBounds(*(getattr(bounds, f.name).ravel() for f in dataclasses.fields(bounds)))
    blocks = positions.shape[1] // block
    sees = block_map(mask, flat, flat).reshape(ranks, blocks, ranks, blocks).any(axis=(1, 3))
    query, key = np.nonzero(sees)
    return tuple(sorted({0, *((query - key) % ranks).tolist()}))


@dataclasses.dataclass(frozen=True)
class _Ring:
    kernel: Kernel
    scores: Scores
    axes: Axes
    layout: Layout | None
    length: int
    shifts: tuple[int, ...]

    @functools.cached_property
    def halves(self) -> bool:
        """Whether every step but the first is half a square, with nothing to mask by position."""
        return (
            self.layout is not None
            and type(self.scores.mask) is Causal
            and is_nested(self.layout, self.length)
        )

    def pass_on(self, held: Any, by: int) -> Any:
        """What the rank `by` before this one holds."""
        ranks = self.axes.size
        pairs = [(rank, (rank + by) % ranks) for rank in range(ranks)]
        return jax.tree.map(lambda x: self.axes.ppermute(x, pairs), held)

    def key_tags(self, shift: Any, sent: Any, own: Tags) -> Tags:
        """Of the keys that have come from `shift` ranks away; positions are made, not sent."""
        if self.layout is None:
            return sent
        positions = positions_of_rank(self.layout, self.length, self.source(shift))
        positions = jnp.broadcast_to(positions, own.positions.shape)
        positions = as_varying(positions, jax.typeof(own.positions).mat.varying)
        return Tags(positions, sent["segment_ids"])

    def source(self, shift: Any) -> jax.Array:
        """The rank `shift` before this one."""
        ranks = np.int32(self.axes.size)
        return lax.rem(self.axes.rank() - shift + ranks, ranks)

    def walk(self, step: Callable, held: Any, carry: Any) -> Any:
        """carry = step(shift, gap, held, carry) for every shift but 0, which is the rank itself.

        `held` is passed on meanwhile; `gap` is what the shift before this one was less.
        """
        if len(self.shifts) == 1:
            return carry
        gaps = [*np.diff(self.shifts).tolist(), None]
        steps = zip(self.shifts[1:], gaps, gaps[1:], strict=False)
        held = self.pass_on(held, self.shifts[1])
        for (gap, next_gap), group in itertools.groupby(steps, key=lambda s: s[1:]):
            shifts = [shift for shift, *_ in group]
            if next_gap is None:
                return step(np.int32(shifts[0]), gap, held, carry)

            def turn(state: tuple, shift: Any, gap: int = gap, next_gap: int = next_gap) -> tuple:
                held, carry = state
                coming = self.pass_on(held, next_gap)
                return (coming, step(shift, gap, held, carry)), None

            if len(shifts) < FEWEST_SCANNED:
                for shift in shifts:
                    (held, carry), _ = turn((held, carry), np.int32(shift))
            else:
                (held, carry), _ = lax.scan(turn, (held, carry), jnp.asarray(shifts, jnp.int32))
        raise AssertionError("the last step has no next gap")

    def sees_first_half(self, shift: Any) -> jax.Array:
        """Whether all queries see the first half of the keys; else the second half sees all."""
        assert self.layout is not None
        firsts = self.layout.chunk_table(self.length)[:, 0].astype(np.int32)
        return of_rank(firsts, self.source(shift)) < of_rank(firsts, self.axes.rank())


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(walk: _Ring, q: Any, k: Any, v: Any, tags: Tags) -> tuple[jax.Array, jax.Array]:
    return _forward(walk, q, k, v, tags)


def _forward(walk: _Ring, q: Any, k: Any, v: Any, tags: Tags) -> tuple[jax.Array, jax.Array]:
    def step(shift: Any, gap: int, held: tuple, carry: tuple) -> tuple:
        k, v, sent = held
        k_tags = walk.key_tags(shift, sent, tags)
        if not walk.halves:
            part = walk.kernel.forward(walk.scores, q, k, v, tags, k_tags)
        else:
            part = lax.cond(
                walk.sees_first_half(shift),
                functools.partial(_first_keys, walk),
                functools.partial(_last_queries, walk),
                *(q, k, v, tags, k_tags),
            )
        return merge(carry, part)

    own = walk.kernel.forward(walk.scores, q, k, v, tags, tags)
    return walk.walk(step, (k, v, _sent(walk, tags)), own)


def _sent(walk: _Ring, tags: Tags) -> Any:
    """What of the tags travels with the keys: their positions only where they are data."""
    if walk.layout is None:
        return tags
    return {"segment_ids": tags.segment_ids}


def _everything(scores: Scores) -> Scores:
    return dataclasses.replace(scores, mask=Full())


def _half(x: Any, last: bool) -> Any:
    """The first or last half of the tokens."""
    middle = x.shape[1] // 2
    return x[:, middle:] if last else x[:, :middle]


def _halves(last: bool, *trees: Any) -> Any:
    return jax.tree.map(lambda x: _half(x, last), trees)


def _first_keys(walk: _Ring, q: Any, k: Any, v: Any, q_tags: Tags, k_tags: Tags) -> tuple:
    k, v, k_tags = _halves(False, k, v, k_tags)
    return walk.kernel.forward(_everything(walk.scores), q, k, v, q_tags, k_tags)


def _last_queries(walk: _Ring, q: Any, k: Any, v: Any, q_tags: Tags, k_tags: Tags) -> tuple:
    q, q_tags = _halves(True, q, q_tags)
    out, lse = walk.kernel.forward(_everything(walk.scores), q, k, v, q_tags, k_tags)
    return _beside(out, first=False), _beside(lse, first=False, fill=-jnp.inf)


def _beside(x: jax.Array, first: bool, fill: float = 0.0) -> jax.Array:
    """x as one half of the tokens, `fill` in the other."""
    empty = jnp.full_like(x, fill)
    return jnp.concatenate([x, empty] if first else [empty, x], axis=1)


def _ring_forward(walk: _Ring, q: Any, k: Any, v: Any, tags: Tags) -> tuple:
    out, lse = _forward(walk, q, k, v, tags)
    return (out, lse), (q, k, v, tags, *named_attended(out, lse, q.dtype))


def _ring_backward(walk: _Ring, saved: tuple, cotangents: tuple) -> tuple:
    q, k, v, tags, out, lse = saved
    d_out, d_lse = cotangents
    final = (d_out.astype(q.dtype), lse, delta_of(out, d_out, d_lse))

    def step(shift: Any, gap: int, held: tuple, carry: tuple) -> tuple:
        k, v, sent = held
        d_q, sums = carry
        coming = walk.pass_on(sums, gap)
        k_tags = walk.key_tags(shift, sent, tags)
        if not walk.halves:
            parts = _backward(walk, walk.scores, q, k, v, final, tags, k_tags)
        else:
            parts = lax.cond(
                walk.sees_first_half(shift),
                functools.partial(_backward_first_keys, walk),
                functools.partial(_backward_last_queries, walk),
                *(q, k, v, final, tags, k_tags),
            )
        more_q, *more = parts
        return d_q + more_q, tuple(a + b for a, b in zip(coming, more, strict=True))

    d_q, *sums = _backward(walk, walk.scores, q, k, v, final, tags, tags)
    d_q, sums = walk.walk(step, (k, v, _sent(walk, tags)), (d_q, tuple(sums)))
    d_k, d_v = walk.pass_on(sums, -walk.shifts[-1])  # home again
    gradients = (d.astype(x.dtype) for d, x in zip((d_q, d_k, d_v), (q, k, v), strict=True))
    return (*gradients, jax.tree.map(lambda _: None, tags))


def _backward(
    walk: _Ring, scores: Scores, q: Any, k: Any, v: Any, final: tuple, q_tags: Tags, k_tags: Tags
) -> tuple[jax.Array, jax.Array, jax.Array]:
    d_out, lse, delta = final
    return walk.kernel.backward(scores, q, k, v, d_out, lse, delta, q_tags, k_tags)


def _backward_first_keys(
    walk: _Ring, q: Any, k: Any, v: Any, final: tuple, q_tags: Tags, k_tags: Tags
) -> tuple:
    k, v, k_tags = _halves(False, k, v, k_tags)
    scores = _everything(walk.scores)
    d_q, d_k, d_v = _backward(walk, scores, q, k, v, final, q_tags, k_tags)
    return d_q, _beside(d_k, first=True), _beside(d_v, first=True)


def _backward_last_queries(
    walk: _Ring, q: Any, k: Any, v: Any, final: tuple, q_tags: Tags, k_tags: Tags
) -> tuple:
    q, final, q_tags = _halves(True, q, final, q_tags)
    scores = _everything(walk.scores)
    d_q, d_k, d_v = _backward(walk, scores, q, k, v, final, q_tags, k_tags)
    return _beside(d_q, first=False), d_k, d_v


_ring.defvjp(_ring_forward, _ring_backward)
