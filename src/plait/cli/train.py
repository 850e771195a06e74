"""Training the same model on the same batches, the sequence laid out in one way or another.

The devices may be those of several processes that all call `train` alike: each makes the shards of
its own devices only, and what is read on the host, losses and norms, lies on every device.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from plait import ContextParallel, Contiguous, Layout, segment_positions
from plait.cli.model import Attend, ByteTransformer, loss
from plait.cli.processes import on_mesh

AXIS = "context"


@dataclasses.dataclass(frozen=True)
class Run:
    """What one run measured: one entry a step; seconds without compilation."""

    losses: list[float]
    gradient_norms: list[float]
    seconds: list[float]

    @property
    def seconds_a_step(self) -> float:
        """The median over the steps after the first, which also warms up allocators."""
        return float(np.median(self.seconds[1:] or self.seconds))


def optimizer(steps: int) -> optax.GradientTransformation:
    """AdamW after a warm-up.

    Runs that differ only in the order of float32 sums are to be compared, and Adam's division by
    the root of the second moment turns the rounding error of a gradient near 0 into a step of
    full size. Within 50 steps runs with the usual epsilon of 1e-8 and no warm-up came to differ
    by 8e-5, relative; with these, by 1e-6 at most.
    """
    schedule = optax.linear_schedule(0.0, 3e-3, transition_steps=max(steps // 2, 1))
    return optax.adamw(schedule, b2=0.95, eps=1e-5, weight_decay=0.01)


def initial_weights(seed: int) -> Any:
    """The weights that every run starts from, on the host: they do not depend on a layout."""
    cp = ContextParallel(Contiguous(1))
    # One compilation, where eager calls would take one for each small operation.
    weights = jax.jit(lambda: nnx.state(ByteTransformer(cp, rngs=nnx.Rngs(seed)), nnx.Param))
    return jax.device_get(weights())


def train(
    layout: Layout | None,
    tokens: np.ndarray,
    segment_ids: np.ndarray,
    weights: Any,
    attend: Attend,
    *,
    devices: list[Any],
    on_progress: Callable[[], None] = lambda: None,
) -> Run:
    """One step a row.

    Args:
      layout: how the sequence lies over as many devices as it has ranks. None: the reference, on
        one device and in source order.
      tokens, segment_ids: int32 [rows, sequence], in source order.
      weights: from `initial_weights`.
      attend: mask, strategy and kernel of attention.
      devices: the devices to choose from, the same in every process.
      on_progress: called after compilation and after each step.
    """
    cp = ContextParallel(Contiguous(1)) if layout is None else ContextParallel(layout, AXIS)
    ranks = cp.layout.ranks
    mesh = jax.make_mesh((ranks,), (AXIS,), axis_types=(AxisType.Auto,), devices=devices[:ranks])
    replicated, by_sequence = NamedSharding(mesh, P()), NamedSharding(mesh, P(None, AXIS))

    def to_devices(row: int) -> Any:
        ids = segment_ids[row : row + 1]
        # In source order: once the tokens are reordered, positions can't be counted any more.
        batch = {"tokens": tokens[row : row + 1], "segment_ids": ids}
        batch["positions"] = segment_positions(ids)
        return on_mesh(cp.reorder(batch), by_sequence)

    model = nnx.eval_shape(lambda: ByteTransformer(cp, attend, rngs=nnx.Rngs(0)))
    nnx.update(model, weights)
    adamw = nnx.Optimizer(model, optimizer(len(tokens)), wrt=nnx.Param)
    graph, host_state = nnx.split((model, adamw))

    with jax.set_mesh(mesh):
        state = on_mesh(jax.device_get(host_state), replicated)

        def step(state: Any, batch: Any) -> tuple[Any, jax.Array, jax.Array]:
            model, adamw = nnx.merge(graph, state)
            value, gradients = nnx.value_and_grad(loss)(model, batch)
            adamw.update(model, gradients)
            squares = [jnp.vdot(x, x) for x in jax.tree.leaves(gradients)]
            return nnx.state((model, adamw)), value, jnp.sqrt(sum(squares))

        first = to_devices(0)
        step = jax.jit(step, out_shardings=replicated, donate_argnums=0)
        compiled = step.lower(state, first).compile()
        on_progress()

        losses, norms, seconds = [], [], []
        for row in range(len(tokens)):
            batch = jax.block_until_ready(to_devices(row))
            start = time.perf_counter()
            state, value, norm = jax.block_until_ready(compiled(state, batch))
            seconds.append(time.perf_counter() - start)
            losses.append(float(value))
            norms.append(float(norm))
            on_progress()
    return Run(losses, norms, seconds)
