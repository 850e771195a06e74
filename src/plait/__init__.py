"""plait: load-balanced context parallelism for JAX.

Lays a long sequence out over the ranks of a mesh axis so that every rank does equal work, moves
tokens between layouts without a gather, and keeps right what a reordered sequence touches.
Start at `ContextParallel`.
"""

from plait.attention import (
    Blockwise,
    Flash,
    Machine,
    Shapes,
    attention,
    choose_kernel,
    choose_strategy,
    count_blocks,
)
from plait.context import ContextParallel
from plait.exchange import all_gather, relayout, reorder, restore
from plait.layout import Contiguous, HalfSwap, Layout, Placed, Striped, Zigzag
from plait.lookahead import lookahead
from plait.mask import Causal, Chunked, Full, Mask, PrefixLM, SlidingWindow
from plait.names import ATTENDED, GATHERED, RELAID
from plait.padding import pad, unpad
from plait.placing import device_put
from plait.positions import segment_positions, source_positions
from plait.reduce import sum_and_count
from plait.select import select

__version__ = "0.1.0"

__all__ = [
    "ATTENDED",
    "GATHERED",
    "RELAID",
    "Blockwise",
    "Causal",
    "Chunked",
    "ContextParallel",
    "Contiguous",
    "Flash",
    "Full",
    "HalfSwap",
    "Layout",
    "Machine",
    "Mask",
    "Placed",
    "PrefixLM",
    "Shapes",
    "SlidingWindow",
    "Striped",
    "Zigzag",
    "all_gather",
    "attention",
    "choose_kernel",
    "choose_strategy",
    "count_blocks",
    "device_put",
    "lookahead",
    "pad",
    "relayout",
    "reorder",
    "restore",
    "segment_positions",
    "select",
    "source_positions",
    "sum_and_count",
    "unpad",
]
