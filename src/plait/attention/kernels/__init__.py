"""Kernels: exact attention of some queries over some keys, given their positions; no meshes."""

from plait.attention.kernels.base import (
    Kernel,
    Scores,
    Tags,
    attend,
    delta_of,
    merge,
    named_attended,
)
from plait.attention.kernels.blockwise import Blockwise
from plait.attention.kernels.choice import KernelChoice, choose_kernel
from plait.attention.kernels.flash import Flash

__all__ = [
    "Blockwise",
    "Flash",
    "Kernel",
    "KernelChoice",
    "Scores",
    "Tags",
    "attend",
    "choose_kernel",
    "delta_of",
    "merge",
    "named_attended",
]
