"""The all-gather strategy: every rank gathers the keys and values of all."""

from __future__ import annotations

import jax

from plait.attention.kernels import attend
from plait.attention.strategies.base import Task, Tokens
from plait.exchange import gather_shards
from plait.names import GATHERED_KEYS, GATHERED_VALUES


def all_gather(task: Task, tokens: Tokens) -> tuple[jax.Array, jax.Array]:
    """(out, lse) of this rank's queries.

    Keys are gathered as they lie, since kernels take positions. The transpose is a
    reduce-scatter.
    """
    q, k, v, axes = tokens.q, tokens.k, tokens.v, task.shards.axes
    if axes is not None and axes.size > 1:
        k = gather_shards(k, 1, axes.names, GATHERED_KEYS)
        v = gather_shards(v, 1, axes.names, GATHERED_VALUES)
    data = tokens.positions, tokens.segment_ids, q.shape[0]
    q_tags, k_tags = task.shards.tags(*data), task.shards.all_tags(*data)
    return attend(task.kernel, task.scores, q, k, v, q_tags, k_tags)
