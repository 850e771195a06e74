"""Attention over a sequence in any layout, sharded or not."""

from plait.attention.cost import Choice, Machine, Shapes, choose_strategy
from plait.attention.count import count_blocks
from plait.attention.front import Strategy, attention
from plait.attention.kernels import Blockwise, Flash, KernelChoice, choose_kernel

__all__ = [
    "Blockwise",
    "Choice",
    "Flash",
    "KernelChoice",
    "Machine",
    "Shapes",
    "Strategy",
    "attention",
    "choose_kernel",
    "choose_strategy",
    "count_blocks",
]
