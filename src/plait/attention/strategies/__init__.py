"""Strategies: how the queries of one rank meet the keys of all of them; no mask arithmetic."""

from plait.attention.strategies.all_gather import all_gather_keys

__all__ = ["all_gather_keys"]
