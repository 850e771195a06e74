"""The blocks of scores that ranks compute, counted on the host."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from plait.attention.front import fitted
from plait.attention.kernels import Blockwise, Flash, choose_kernel
from plait.layout import Layout
from plait.mask import BlockBounds, Causal, Mask, block_map, check_mask
from plait.tree import as_int32


def count_blocks(
    layout: Layout,
    sequence_length: int,
    *,
    mask: Mask | None = None,
    segment_ids: np.ndarray | None = None,
    kernel: Blockwise | Flash | Literal["auto", "blockwise", "flash"] = "auto",
) -> tuple[np.ndarray, int]:
    """The blocks of scores that the kernel computes on each rank, and of how many.

    Counted on the host by the rule that the kernels themselves follow, for the all-gather strategy.

    Args:
      segment_ids: integers in source order, [sequence] or [batch, sequence]; rows add up.
      Others as in `attention`.

    Returns:
      (computed, total): int64 [ranks], and the number of blocks of one rank, skipped ones
      included.

    >>> from plait import Contiguous, Zigzag
    >>> count_blocks(Contiguous(2), 1024)[0].tolist(), count_blocks(Zigzag(2), 1024)[0].tolist()
    ([3, 7], [5, 5])
    """
    mask = Causal() if mask is None else mask
    length = layout.check_length(sequence_length)
    ids = np.ones((1, length), np.int32) if segment_ids is None else np.asarray(segment_ids)
    if ids.shape[-1:] != (length,) or ids.ndim > 2:
        raise ValueError(
            f"segment_ids has shape {ids.shape}; it needs to be ({length},) or (batch, {length})"
        )
    check_mask(mask, length)
    ids = np.atleast_2d(as_int32(ids, "segment_ids"))[:, layout.positions(length)]
    positions = np.broadcast_to(layout.positions(length), ids.shape)
    blocks: Any = fitted(_with_blocks(kernel), layout, length)
    k = _host_bounds(positions, ids, min(blocks.k_block, length))
    computed = []
    for rank in range(layout.ranks):
        mine = slice(rank * length // layout.ranks, (rank + 1) * length // layout.ranks)
        block = min(blocks.q_block, length // layout.ranks)
        q = _host_bounds(positions[:, mine], ids[:, mine], block)
        needed = block_map(mask, q, k)
        computed.append(int(needed.sum()))
    return np.array(computed), int(needed.size)


def _host_bounds(positions: np.ndarray, ids: np.ndarray, block: int) -> BlockBounds:
    padding = [(0, 0), (0, -positions.shape[-1] % block)]
    return BlockBounds.of(np.pad(positions, padding), np.pad(ids, padding), block, np)


def _with_blocks(kernel: Any) -> Any:
    return (
        Blockwise() if kernel == "auto" else choose_kernel(None, None, None, kernel=kernel).kernel
    )
