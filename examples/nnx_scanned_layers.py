"""Layers of flax.nnx in one scan, rematerialised, but for the keys and values that were gathered.

`python examples/nnx_scanned_layers.py` runs a stack of layers on one device and over 8 virtual CPU
devices, compares results and gradients, and counts what the compiled gradient communicates: with a
policy that saves nothing the backward pass gathers all keys and values again; with one that saves
them by name it does not.
"""

import re
from collections.abc import Callable

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import plait
from nnx_attention import Attention, make_batch, relative_difference
from plait import ContextParallel, Zigzag

Policy = Callable[..., bool]

SAVE_NOTHING = jax.checkpoint_policies.nothing_saveable
SAVE_GATHERED = jax.checkpoint_policies.save_only_these_names(*plait.GATHERED)


class Layer(nnx.Module):
    """Attention behind a norm and beside a residual."""

    def __init__(self, cp: ContextParallel, width: int, *, rngs: nnx.Rngs) -> None:
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.attention = Attention(cp, width, heads=8, kv_heads=2, rngs=rngs)

    def __call__(self, x: jax.Array, positions: jax.Array, segment_ids: jax.Array) -> jax.Array:
        return x + self.attention(self.norm(x), positions, segment_ids)


class Stack(nnx.Module):
    """Layers whose weights are stacked along a first axis, and which one scan runs through.

    So a program of any number of layers is as long, and as quick to compile, as that of one.
    """

    def __init__(
        self, cp: ContextParallel, width: int, layers: int, policy: Policy, *, rngs: nnx.Rngs
    ) -> None:
        self.cp, self.policy = cp, policy

        @nnx.split_rngs(splits=layers)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stacked(rngs: nnx.Rngs) -> Layer:
            return Layer(cp, width, rngs=rngs)

        self.layers = stacked(rngs)

    def __call__(self, x: jax.Array, positions: jax.Array, segment_ids: jax.Array) -> jax.Array:
        # Inside a scan nothing can merge both passes, so there is no need to prevent it.
        @nnx.scan(in_axes=(0, nnx.Carry, None, None), out_axes=nnx.Carry)
        @nnx.remat(policy=self.policy, prevent_cse=False)
        def run(layer: Layer, x: jax.Array, positions: jax.Array, ids: jax.Array) -> jax.Array:
            return layer(x, positions, ids)

        return run(self.layers, x, positions, segment_ids)


def loss(stack: Stack, batch: dict) -> tuple[jax.Array, jax.Array]:
    """The squared error over the tokens that are no padding; and the output."""
    out = stack(batch["x"], batch["positions"], batch["segment_ids"])
    error = ((out - batch["target"]) ** 2).mean(axis=-1)
    total, count = stack.cp.sum_and_count(error, batch["segment_ids"] != 0)
    return total / count, out


@nnx.jit
def step(stack: Stack, batch: dict) -> tuple[jax.Array, nnx.State]:
    """The output, and the gradients of all weights."""
    gradients, out = nnx.grad(loss, has_aux=True)(stack, batch)
    return out, gradients


def main(
    length: int = 512, rows: int = 2, width: int = 64, layers: int = 4
) -> dict[str, float | int]:
    """Compare, count and print; gives the differences and the counts by name."""

    def make(cp: ContextParallel, policy: Policy) -> Stack:
        return Stack(cp, width, layers, policy, rngs=nnx.Rngs(0))

    batch = make_batch(np.random.default_rng(0), rows, length, width)
    wanted, wanted_gradients = step(make(ContextParallel(Zigzag(1)), SAVE_GATHERED), batch)

    mesh = jax.make_mesh((2, 4), ("data", "context"), axis_types=(AxisType.Auto,) * 2)
    cp = ContextParallel(Zigzag(4), axis_name="context", batch_axes="data")
    sharded = jax.device_put(cp.reorder(batch), NamedSharding(mesh, P("data", "context")))
    found: dict[str, float | int] = {}
    with jax.set_mesh(mesh):
        for name, policy in (("nothing", SAVE_NOTHING), ("gathered", SAVE_GATHERED)):
            stack = make(cp, policy)
            compiled = step.lower(stack, sharded).compile()
            out, gradients = compiled(stack, sharded)
            pairs = [(cp.restore(np.asarray(out)), wanted)]
            pairs += zip(jax.tree.leaves(gradients), jax.tree.leaves(wanted_gradients), strict=True)
            differences = [relative_difference(*pair) for pair in pairs]
            gathers = len(re.findall(r" all-gather(?:-start)?\(", compiled.as_text()))
            found[f"difference, saving {name}"] = worst = float(np.max(differences))
            found[f"all-gathers, saving {name}"] = gathers
            print(f"saving {name:8}: {gathers} all-gathers in the program of a layer,")
            print(f"  and results and gradients differ from one device's by {worst:.1e}")
            assert worst < 1e-5, f"zigzag over 4 ranks differs from one device by {worst:.1e}"
    return found


if __name__ == "__main__":
    main()
