"""What a move cannot do without: the tokens that have to change their rank."""

from __future__ import annotations

import numpy as np

from plait.layout import Layout


def moved_tokens(source: Layout, target: Layout, sequence_length: int) -> int:
    """The most tokens that any rank has to send, to carry a sequence from one layout to another.

    Times the bytes of a token it is the `network_floor_bytes` of a relayout.

    Args:
      source: the layout before.
      target: the layout after, of as many ranks.
      sequence_length: of the whole sequence, in tokens.

    Raises:
      TypeError: what is no layout.
      ValueError: a length that a layout does not accept, layouts of different numbers of ranks.

    >>> from plait import Contiguous, HalfSwap, Zigzag
    >>> moved_tokens(Contiguous(8), Zigzag(8), 64), moved_tokens(Contiguous(8), HalfSwap(8), 64)
    (8, 4)
    """
    for name, layout in (("source", source), ("target", target)):
        if not isinstance(layout, Layout):
            raise TypeError(
                f"{name} is {layout!r}; it needs to be a layout, such as plait.Contiguous(8)"
            )
    if source.ranks != target.ranks:
        raise ValueError(
            f"{source!r} has {source.ranks} ranks and {target!r} has {target.ranks}; a move needs "
            f"equally many, such as {source.ranks} for both"
        )
    # Before the division: a layout says better than a remainder what length it takes.
    before, after = (layout.slots(sequence_length) for layout in (source, target))
    shard = sequence_length // source.ranks
    rank_before, rank_after = before // shard, after // shard
    sent = np.bincount(rank_before[rank_before != rank_after], minlength=source.ranks)
    return int(np.max(sent))
