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

__all__ = ["Blockwise", "Kernel", "Scores", "Tags", "attend", "delta_of", "merge", "named_attended"]
