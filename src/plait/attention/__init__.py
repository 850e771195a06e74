"""Attention over a sequence in any layout, sharded or not."""

from plait.attention.count import count_blocks
from plait.attention.front import Strategy, attention
from plait.attention.kernels import Blockwise

__all__ = ["Blockwise", "Strategy", "attention", "count_blocks"]
