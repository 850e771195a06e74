"""One process of `plait bench balance`: `python balance_worker.py SPEC`, with the spec as JSON.

It pins itself to the core that it is told, before jax starts and makes its threads, and prints a
line of JSON for every sample that it takes.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from plait import Blockwise, Causal, ContextParallel, Layout, count_blocks
from plait.cli.arguments import LAYOUTS

WAYS = ("forward", "forward+backward")
FEWEST_ROUNDS = 3
"""Taken even where time is up: with fewer there are no quartiles."""

ROWS_CHECKED = 4


@dataclasses.dataclass(frozen=True)
class Spec:
    """What a process is to do.

    Attributes:
      part: "alone", "processes" or "devices".
      ranks: how many ranks the sequence is cut for; alone takes several numbers in turn.
      core: the one to run on; None is any.
      process, port: which of two processes this is, and where the first one listens.
      rounds, seconds: no round begins after so many, nor after so long, but for the fewest.
    """

    part: str
    ranks: tuple[int, ...]
    layouts: tuple[str, ...]
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    block: int
    rounds: int
    seconds: float
    core: int | None = None
    process: int = 0
    port: int = 0

    @classmethod
    def from_json(cls, text: str) -> Spec:
        values = json.loads(text)
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})

    def array(self, tokens: int, heads: int, seed: int) -> np.ndarray:
        """Random [1, tokens, heads, head_dim]; no time depends on what it holds."""
        shape = (1, tokens, heads, self.head_dim)
        return np.random.default_rng(seed).standard_normal(shape, np.float32)


def alone(spec: Spec) -> Iterator[dict[str, Any]]:
    """The kernel with one rank's queries and all keys: in round 0 every rank, then the busiest.

    Where several ranks have most blocks, they take turns from round to round.
    """
    cases = {(n, name): _of_ranks(spec, n, name) for n in spec.ranks for name in spec.layouts}
    start = time.monotonic()
    for turn in range(spec.rounds):
        if turn >= FEWEST_ROUNDS and time.monotonic() - start > spec.seconds:
            return
        for ranks in spec.ranks:
            for way in WAYS:
                for name in _turned(spec.layouts, turn):
                    runs, blocks = cases[ranks, name]
                    busiest = np.flatnonzero(blocks == blocks.max())
                    chosen = range(ranks) if turn == 0 else [int(busiest[turn % len(busiest)])]
                    for rank in chosen:
                        yield {
                            "ranks": ranks,
                            "way": way,
                            "layout": name,
                            "round": turn,
                            "rank": rank,
                            "blocks": int(blocks[rank]),
                            **_timed(functools.partial(runs[way], rank)),
                        }


def _of_ranks(spec: Spec, ranks: int, name: str) -> tuple[dict[str, Callable], np.ndarray]:
    """By way, a function that attends for a rank; and the blocks that each rank computes."""
    layout = LAYOUTS[name](ranks)
    kernel = _fitted(spec, layout)
    mine = spec.tokens // ranks
    q, d_out = (jnp.asarray(spec.array(mine, spec.heads, seed)) for seed in (0, 1))
    k, v = (jnp.asarray(spec.array(spec.tokens, spec.kv_heads, seed)) for seed in (2, 3))
    positions = layout.positions(spec.tokens)[None]
    k_positions = jnp.asarray(positions)
    of_rank = [jnp.asarray(x) for x in np.split(positions, ranks, axis=1)]

    runs = {
        "forward": lambda rank: _forward(kernel, q, k, v, of_rank[rank], k_positions),
        "forward+backward": lambda rank: _step(kernel, q, k, v, d_out, of_rank[rank], k_positions),
    }
    for rank in range(ranks):
        _check(runs["forward"](rank), q, k, v, positions[0], rank)
    jax.block_until_ready(runs["forward+backward"](0))
    blocks, _ = count_blocks(layout, spec.tokens, kernel=kernel)
    return runs, blocks


def _fitted(spec: Spec, layout: Layout) -> Blockwise:
    chunk = layout.chunk_length(spec.tokens)
    return Blockwise(spec.block, spec.block).fitted(chunk, chunk)


@functools.partial(jax.jit, static_argnums=0)
def _forward(kernel: Blockwise, q: Any, k: Any, v: Any, q_positions: Any, k_positions: Any) -> Any:
    out, _ = kernel(
        q,
        k,
        v,
        mask=Causal(),
        q_positions=q_positions,
        k_positions=k_positions,
        q_segment_ids=None,
        k_segment_ids=None,
        scale=q.shape[-1] ** -0.5,
    )
    return out


@functools.partial(jax.jit, static_argnums=0)
def _step(kernel: Blockwise, q: Any, k: Any, v: Any, d_out: Any, *positions: Any) -> Any:
    out, pull = jax.vjp(lambda *x: _forward(kernel, *x, *positions), q, k, v)
    return out, *pull(d_out)


def _check(out: Any, q: Any, k: Any, v: Any, positions: np.ndarray, rank: int) -> None:
    """Hold some rows of what a rank computed to softmax written out."""
    out, q, k, v = (np.asarray(x[0], np.float64) for x in (out, q, k, v))
    k, v = (np.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (k, v))
    for row in np.linspace(0, len(q) - 1, ROWS_CHECKED).astype(int):
        seen = positions <= positions[rank * len(q) + row]
        weights = np.exp(np.einsum("hd,thd->ht", q[row], k[seen]) * q.shape[-1] ** -0.5)
        wanted = np.einsum("ht,thd->hd", weights, v[seen]) / weights.sum(axis=1)[:, None]
        np.testing.assert_allclose(out[row], wanted, rtol=1e-4, atol=1e-4)


def sharded(spec: Spec) -> Iterator[dict[str, Any]]:
    """`cp.attention` over all devices, of one process or of two, as a user jits it."""
    (ranks,) = spec.ranks
    mesh = Mesh(np.array(jax.devices()), ("context",))
    sharding = NamedSharding(mesh, P(None, "context"))

    def placed(x: np.ndarray) -> jax.Array:
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    heads = (spec.heads, spec.kv_heads, spec.kv_heads, spec.heads)
    arrays = [placed(spec.array(spec.tokens, h, seed)) for seed, h in enumerate(heads)]
    with jax.set_mesh(mesh):
        meet = jax.jit(jnp.sum)

        def time_is_up(mine: bool) -> bool:
            """Whether any process says so; none goes on before all have come here."""
            return bool(meet(placed(np.full((1, ranks), mine, np.int32))) > 0)

        runs = {}
        for name in spec.layouts:
            cp = ContextParallel(LAYOUTS[name](ranks), "context")
            for way, run in _ways(cp, Blockwise(spec.block, spec.block)).items():
                runs[way, name] = functools.partial(run, *arrays)
                jax.block_until_ready(runs[way, name]())
        start = time.monotonic()
        for turn in range(spec.rounds):
            late = time.monotonic() - start > spec.seconds
            if time_is_up(late) and turn >= FEWEST_ROUNDS:
                return
            for way in WAYS:
                for name in _turned(spec.layouts, turn):
                    time_is_up(False)
                    yield {
                        "ranks": ranks,
                        "way": way,
                        "layout": name,
                        "round": turn,
                        "rank": spec.process,
                        **_timed(runs[way, name]),
                    }


def _ways(cp: ContextParallel, kernel: Blockwise) -> dict[str, Callable]:
    attend = functools.partial(cp.attention, kernel=kernel)

    def step(q: Any, k: Any, v: Any, d_out: Any) -> tuple:
        out, pull = jax.vjp(attend, q, k, v)
        return out, *pull(d_out)

    return {
        "forward": jax.jit(lambda q, k, v, _: attend(q, k, v)),
        "forward+backward": jax.jit(step),
    }


def _turned(names: tuple[str, ...], turn: int) -> tuple[str, ...]:
    """Another one first in every round, so that a drift of the machine favours none."""
    return names[turn % len(names) :] + names[: turn % len(names)]


def _timed(run: Callable[[], Any]) -> dict[str, float]:
    """Seconds by the clock, and of the CPU that this process was given meanwhile."""
    wall, cpu = time.perf_counter(), time.process_time()
    jax.block_until_ready(run())
    return {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}


def main(spec: Spec) -> None:
    """Take the samples that the spec asks for and print each on a line of its own."""
    parent = os.getppid()
    if spec.core is not None:
        os.sched_setaffinity(0, {spec.core})
    if spec.part == "processes":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{spec.port}", spec.ranks[0], spec.process)
    for sample in (alone if spec.part == "alone" else sharded)(spec):
        print(json.dumps({"part": spec.part, **sample}), flush=True)
        if os.getppid() != parent:  # whoever asked is gone, and a core is not to be kept busy
            return


if __name__ == "__main__":
    main(Spec.from_json(sys.argv[1]))
