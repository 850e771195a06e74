"""Kernels: exact attention of some queries over some keys, given their positions; no meshes."""

from plait.attention.kernels.blockwise import Blockwise

__all__ = ["Blockwise"]
