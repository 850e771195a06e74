"""Documents given by where they start and end, as kernels for variable lengths take them."""

from __future__ import annotations

from typing import Any

import numpy as np

from plait.tree import as_int32


def lengths_of(offsets: Any) -> np.ndarray:
    """The lengths of documents from their offsets (`cu_seqlens`): int32 [documents].

    Args:
      offsets: integers [documents + 1], from 0, each document's end the next one's start. A last
        offset that is repeated, to fill an array of fixed length, adds no document.

    Raises:
      ValueError: offsets that do not start at 0, decrease, or repeat before the last, by number.

    >>> lengths_of([0, 16, 40, 40, 40]).tolist()
    [16, 24]
    """
    ends = as_int32(np.asarray(offsets), "offsets")
    if ends.ndim != 1 or ends.size < 2 or ends[0] != 0:
        raise ValueError(
            f"offsets is {ends.tolist()!r:.60}; it needs to be a list of at least two that starts "
            "at 0, such as [0, 16, 40]"
        )
    lengths = np.diff(ends)
    if (lengths < 0).any():
        at = int(np.argmax(lengths < 0))
        raise ValueError(
            f"offsets fall from {ends[at]} to {ends[at + 1]} after document {at}; each needs to be "
            "at least the one before it"
        )
    count = int(np.max(np.flatnonzero(lengths), initial=-1)) + 1
    if not lengths[:count].all():
        at = int(np.argmin(lengths))
        raise ValueError(
            f"document {at} is empty, its offsets both {ends[at]}; it needs at least 1 token"
        )
    return lengths[:count]
