"""plait: load-balanced context parallelism for JAX."""

from plait.layout import Contiguous, HalfSwap, Layout, Placed, Striped, Zigzag

__version__ = "0.1.0"

__all__ = ["Contiguous", "HalfSwap", "Layout", "Placed", "Striped", "Zigzag"]
