import numpy as np
import pytest

from errors import refused
from plait import Contiguous, HalfSwap, Placed, Striped, Zigzag
from plait.audit import moved_tokens


def counted(source, target, length):
    """Token by token."""
    sent = [0] * source.ranks
    for token in range(length):
        ranks = [
            int(np.flatnonzero(layout.positions(length) == token)[0]) // (length // layout.ranks)
            for layout in (source, target)
        ]
        sent[ranks[0]] += ranks[0] != ranks[1]
    return max(sent)


@pytest.mark.parametrize(
    ("source", "target", "length", "tokens"),
    [
        # 8 tokens a rank. Zigzag keeps a chunk of 4 only on rank 0 and on the last rank.
        (Contiguous(8), Zigzag(8), 64, 8),
        (Zigzag(8), Contiguous(8), 64, 8),
        (Contiguous(8), HalfSwap(8), 64, 4),
        # One token of every 8 stays.
        (Contiguous(8), Striped(8), 64, 7),
        # Chunks 0 1 | 2 3 become 0 3 | 1 2: each rank sends one of its two.
        (Contiguous(2), Zigzag(2), 8, 2),
        (Zigzag(2), HalfSwap(2), 8, 0),
        (Zigzag(1), Contiguous(1), 8, 0),
        # Rank 0 sends nothing, so that a mean over ranks would be less.
        (Contiguous(3), Placed((0, 0, 1, 2, 2, 1)), 12, 2),
    ],
)
def test_the_tokens_that_must_move_are_counted(source, target, length, tokens):
    assert moved_tokens(source, target, length) == tokens == counted(source, target, length)


def test_what_can_not_be_counted_is_refused():
    refused(lambda: moved_tokens(Zigzag(2), Zigzag(4), 16), "2 ranks", "4", "equally many")
    refused(lambda: moved_tokens(Contiguous(4), Zigzag(4), 20), "length 20", "multiple of 8")
    words = ("source is 'contiguous'", "plait.Contiguous(8)")
    refused(lambda: moved_tokens("contiguous", Zigzag(4), 16), *words, error=TypeError)
    refused(lambda: moved_tokens(Zigzag(4), None, 16), "target is None", error=TypeError)
