"""An attention layer of flax.nnx over a sequence that is sharded in zigzag order.

`python examples/nnx_attention.py` runs the layer on one device and over 8 virtual CPU devices, from
the same weights and inputs, and compares the results and all gradients.
"""

import os

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from plait import ContextParallel, Zigzag, segment_positions

jax.config.update("jax_platforms", "cpu")


def rotate(x: jax.Array, positions: jax.Array, base: float = 10_000.0) -> jax.Array:
    """Rotary embedding of [batch, sequence, heads, head_dim] by each token's position."""
    half = x.shape[-1] // 2
    frequencies = base ** (-jnp.arange(half) / half)
    angles = positions[..., None, None] * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


class Attention(nnx.Module):
    """Grouped-query attention with RoPE; causal, within each document of a packed row.

    Only `cp.attention` knows that the sequence is sharded and in another order. Everything else
    goes token by token, so it needs to know nothing.
    """

    def __init__(
        self, cp: ContextParallel, width: int, heads: int, kv_heads: int, *, rngs: nnx.Rngs
    ) -> None:
        self.cp = cp
        head_dim = width // heads
        self.q = nnx.LinearGeneral(width, (heads, head_dim), use_bias=False, rngs=rngs)
        self.k = nnx.LinearGeneral(width, (kv_heads, head_dim), use_bias=False, rngs=rngs)
        self.v = nnx.LinearGeneral(width, (kv_heads, head_dim), use_bias=False, rngs=rngs)
        self.out = nnx.LinearGeneral(
            (heads, head_dim), width, axis=(-2, -1), use_bias=False, rngs=rngs
        )

    def __call__(self, x: jax.Array, positions: jax.Array, segment_ids: jax.Array) -> jax.Array:
        """[batch, sequence, width], all in the order of the layout.

        `positions` count from the start of each document, as RoPE wants them. Of the places in the
        whole sequence, by which the mask goes, the handle takes care.
        """
        q = rotate(self.q(x), positions)
        k = rotate(self.k(x), positions)
        return self.out(self.cp.attention(q, k, self.v(x), segment_ids=segment_ids))


def make_batch(rng: np.random.Generator, rows: int, length: int, width: int) -> dict:
    """Rows of three packed documents and some padding, in source order, on the host."""
    lengths = [length // 2, length // 4, length // 8, length // 8]
    segment_ids = np.tile(np.repeat([1, 2, 3, 0], lengths), (rows, 1)).astype(np.int32)
    return {
        "x": rng.normal(size=(rows, length, width)).astype(np.float32),
        "target": rng.normal(size=(rows, length, width)).astype(np.float32),
        "segment_ids": segment_ids,
        "positions": segment_positions(segment_ids),  # before anything is reordered
    }


def loss(layer: Attention, batch: dict) -> tuple[jax.Array, jax.Array]:
    """The squared error over the tokens that are no padding; and the layer's output."""
    out = layer(batch["x"], batch["positions"], batch["segment_ids"])
    error = ((out - batch["target"]) ** 2).mean(axis=-1)
    total, count = layer.cp.sum_and_count(error, batch["segment_ids"] != 0)
    return total / count, out


@nnx.jit
def step(layer: Attention, batch: dict) -> tuple[jax.Array, nnx.State]:
    """The layer's output, and the gradients of its weights."""
    gradients, out = nnx.grad(loss, has_aux=True)(layer, batch)
    return out, gradients


def relative_difference(found: jax.Array, wanted: jax.Array) -> float:
    """The largest difference by the largest magnitude; NaN if anything is NaN."""
    found, wanted = np.asarray(found), np.asarray(wanted)
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def main(length: int = 1024, rows: int = 2, width: int = 64) -> dict[str, float]:
    """Compare both, print it, and give the relative difference of each tensor by name."""
    make = lambda cp: Attention(cp, width, heads=8, kv_heads=2, rngs=nnx.Rngs(0))  # noqa: E731
    batch = make_batch(np.random.default_rng(0), rows, length, width)

    # One device, source order.
    wanted, wanted_gradients = step(make(ContextParallel(Zigzag(1))), batch)

    # The batch over "data", the sequence over "context", dealt out in zigzag order on the host.
    mesh = jax.make_mesh((2, 4), ("data", "context"), axis_types=(AxisType.Auto,) * 2)
    cp = ContextParallel(Zigzag(4), axis_name="context", batch_axes="data")
    sharded = jax.device_put(cp.reorder(batch), NamedSharding(mesh, P("data", "context")))
    with jax.set_mesh(mesh):
        out, gradients = step(make(cp), sharded)

    differences = {"out": relative_difference(cp.restore(np.asarray(out)), wanted)}
    for name in ("q", "k", "v", "out"):
        differences[f"gradient of {name}"] = relative_difference(
            gradients[name]["kernel"][...], wanted_gradients[name]["kernel"][...]
        )
    for name, difference in differences.items():
        print(f"{name:15} differs by {difference:.1e}")
    worst = np.max(list(differences.values()))
    assert worst < 1e-5, f"zigzag over 4 ranks differs from one device by {worst:.1e}"
    print(f"Zigzag over 4 ranks equals one device: max relative difference {worst:.1e}.")
    return differences


if __name__ == "__main__":
    main()
