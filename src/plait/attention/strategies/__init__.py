"""Strategies: how the queries of one rank meet the keys of all of them; no mask arithmetic."""

from collections.abc import Callable

import jax

from plait.attention.strategies.all_gather import all_gather
from plait.attention.strategies.base import Shards, Task, Tokens
from plait.attention.strategies.ring import ring
from plait.attention.strategies.ulysses import ulysses, usp

STRATEGIES: dict[str, Callable[[Task, Tokens], tuple[jax.Array, jax.Array]]] = {
    "all_gather": all_gather,
    "ring": ring,
    "ulysses": ulysses,
    "usp": usp,
}

__all__ = ["STRATEGIES", "Shards", "Task", "Tokens"]
