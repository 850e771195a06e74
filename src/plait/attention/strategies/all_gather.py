"""Strategies: how the queries of one rank meet the keys of all of them.

A strategy moves keys and values and knows nothing of masks; what it moves carries a name for
`jax.checkpoint` policies.
"""

from __future__ import annotations

from typing import Any

import jax

from plait.exchange import gather_shards
from plait.mesh import Axes
from plait.names import GATHERED_KEYS, GATHERED_VALUES


def all_gather_keys(
    k: jax.Array,
    v: jax.Array,
    k_positions: jax.Array,
    k_segment_ids: jax.Array | None,
    axes: Axes | None,
) -> tuple[Any, Any, Any, Any]:
    """Every rank's keys, values and what describes them, as they lie: [batch, sequence, ...].

    The kernels take positions, so nothing is restored. The transpose is a reduce-scatter.
    """
    if axes is None or axes.size == 1:
        return k, v, k_positions, k_segment_ids
    k = gather_shards(k, 1, axes.names, GATHERED_KEYS)
    v = gather_shards(v, 1, axes.names, GATHERED_VALUES)
    if k_segment_ids is not None:
        k_segment_ids = gather_shards(k_segment_ids, 1, axes.names)
    return k, v, k_positions, k_segment_ids
