"""The attention of each rank, timed alone on one device.

Virtual devices share the cores of one machine, so that in a step all ranks wait for the work of
all. What a step would cost on devices of their own is seen only when each rank has the machine to
itself.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import jax
import numpy as np

from plait import Blockwise, Layout, Mask, reorder

REPEATS = 2


def time_ranks(
    layout: Layout,
    segment_ids: np.ndarray,
    device: Any,
    mask: Mask,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
) -> np.ndarray:
    """Seconds of the forward attention of one layer: float64 [rows, ranks].

    The kernel and the positions are those of the training step, with what it gathers from other
    ranks in place; queries, keys and values are random, as no time depends on them.

    Args:
      layout: the layout.
      segment_ids: int32 [rows, sequence], in source order.
      device: where to run.
      mask: the mask.
      heads, kv_heads, head_dim: of the model.
    """
    rows, length = segment_ids.shape
    chunk = layout.chunk_length(length)
    kernel = Blockwise().fitted(chunk, chunk)
    by_rank = (1, layout.ranks, length // layout.ranks)
    random = np.random.default_rng(0)
    put = functools.partial(jax.device_put, device=device)
    q = put(random.standard_normal((1, by_rank[-1], heads, head_dim), np.float32))
    k = put(random.standard_normal((1, length, kv_heads, head_dim), np.float32))
    positions = layout.positions(length)[None]
    ids = reorder(segment_ids, layout)

    def run(row: int, rank: int) -> float:
        ids_of_row = ids[row : row + 1]
        data = {
            "q_positions": positions.reshape(by_rank)[:, rank],
            "k_positions": positions,
            "q_segment_ids": ids_of_row.reshape(by_rank)[:, rank],
            "k_segment_ids": ids_of_row,
        }
        data = jax.block_until_ready(put(data))
        seconds = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            jax.block_until_ready(_attend(kernel, mask, q, k, k, **data))
            seconds.append(time.perf_counter() - start)
        # Whatever else the machine does can only add to the time.
        return min(seconds)

    run(0, 0)  # compiles
    return np.array([[run(row, rank) for rank in range(layout.ranks)] for row in range(rows)])


@functools.partial(jax.jit, static_argnums=(0, 1))
def _attend(
    kernel: Blockwise, mask: Mask, q: jax.Array, k: jax.Array, v: jax.Array, **data: Any
) -> Any:
    return kernel(q, k, v, mask=mask, scale=q.shape[-1] ** -0.5, **data)
