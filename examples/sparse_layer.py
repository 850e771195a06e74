"""DeepSeek sparse attention in one layer: a lightning indexer, then attention to what it selects.

`python examples/sparse_layer.py` runs the layer on one device and over 8 virtual CPU devices, from
the same weights and inputs, and says for how many tokens the two select other keys, and why.

The formulas are those of DeepSeek-V3.2 (arXiv 2512.02556): multi-head latent attention with 128
heads of 128 + 64 and an indexer of 64 heads of 128, at the sizes that `Sizes` says by default.
"""

import dataclasses
import math
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

from plait import ContextParallel, Zigzag, segment_positions, sparse

jax.config.update("jax_platforms", "cpu")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of DeepSeek-V3.2; the tests have smaller ones."""

    width: int = 7168
    heads: int = 128
    q_latent: int = 1536
    kv_latent: int = 512
    nope: int = 128
    rope: int = 64
    value: int = 128
    index_heads: int = 64
    index_dim: int = 128
    top_k: int = 2048

    @property
    def scale(self) -> float:
        """Of the scores: YaRN's correction for 40 times the context is squared in."""
        return (self.nope + self.rope) ** -0.5 * (1 + 0.1 * math.log(40)) ** 2


def rotate(x: jax.Array, positions: jax.Array, *, interleaved: bool) -> jax.Array:
    """Rotary embedding of [batch, sequence, heads, dim]: pairs side by side, or halves apart."""
    half = x.shape[-1] // 2
    angles = positions[..., None, None] * 10_000.0 ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    turned = a * cos - b * sin, b * cos + a * sin
    if interleaved:
        return jnp.stack(turned, axis=-1).reshape(x.shape).astype(x.dtype)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


class SparseAttention(nnx.Module):
    """The layer. All but the three calls of `plait.sparse` goes token by token."""

    def __init__(self, cp: ContextParallel, sizes: Sizes, *, rngs: nnx.Rngs) -> None:
        self.cp, self.sizes = cp, sizes
        s = sizes
        linear = lambda *shape: nnx.LinearGeneral(*shape, use_bias=False, rngs=rngs)  # noqa: E731
        norm = lambda size: nnx.RMSNorm(size, epsilon=1e-6, rngs=rngs)  # noqa: E731
        self.q_down, self.q_norm = linear(s.width, s.q_latent), norm(s.q_latent)
        self.q_up = linear(s.q_latent, (s.heads, s.nope + s.rope))
        self.kv_down, self.kv_norm = linear(s.width, s.kv_latent + s.rope), norm(s.kv_latent)
        self.k_up = linear(s.kv_latent, (s.heads, s.nope))
        self.v_up = linear(s.kv_latent, (s.heads, s.value))
        self.out = nnx.LinearGeneral(
            (s.heads, s.value), s.width, axis=(-2, -1), use_bias=False, rngs=rngs
        )
        self.index_q = linear(s.q_latent, (s.index_heads, s.index_dim))
        self.index_k = linear(s.width, s.index_dim)
        self.index_norm = nnx.LayerNorm(s.index_dim, epsilon=1e-6, rngs=rngs)
        self.index_w = linear(s.width, s.index_heads)

    def __call__(
        self, x: jax.Array, positions: jax.Array, segment_ids: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(out, selected source positions, their index scores), all in the order of the layout.

        The scores are what the indexer is trained by; nothing else gives it gradients.
        """
        where = {
            "layout": self.cp.layout,
            "axis_name": self.cp.axis_name,
            "batch_axes": self.cp.batch_axes,
        }
        q_latent = self.q_norm(self.q_down(x))
        q, k, w = self.indexer(jax.lax.stop_gradient((x, q_latent)), positions)
        selected, _ = sparse.select(
            q, k, w, top_k=self.sizes.top_k, segment_ids=segment_ids, **where
        )
        scores = sparse.index_scores(q, k, w, selected, **where)
        q, latents = self.absorbed(x, q_latent, positions)
        mixed = sparse.sparse_attention(
            q,
            latents,
            selected,
            value_dim=self.sizes.kv_latent,
            scale=self.sizes.scale,
            **where,
        )
        values = jnp.einsum("bshc,chv->bshv", mixed, self.v_up.kernel[...])
        return self.out(values), selected, scores

    def indexer(
        self, inputs: tuple, positions: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The queries, keys and weights of the lightning indexer: RoPE first, in halves."""
        x, q_latent = inputs
        q, k = self.index_q(q_latent), self.index_norm(self.index_k(x))[:, :, None]
        q, k = (
            jnp.concatenate(
                [rotate(y[..., : self.sizes.rope], positions, interleaved=False),
                 y[..., self.sizes.rope :]], axis=-1
            )
            for y in (q, k)
        )  # fmt: skip
        w = self.index_w(x).astype(jnp.float32)
        return q, k[:, :, 0], w * (self.sizes.index_heads * self.sizes.index_dim) ** -0.5

    def absorbed(
        self, x: jax.Array, q_latent: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Queries taken through the keys' up-projection, and the latents that they meet."""
        q = self.q_up(q_latent)
        q_nope = jnp.einsum("bshn,chn->bshc", q[..., : self.sizes.nope], self.k_up.kernel[...])
        q_rope = rotate(q[..., self.sizes.nope :], positions, interleaved=True)
        kv = self.kv_down(x)
        latent = self.kv_norm(kv[..., : self.sizes.kv_latent])
        k_rope = rotate(kv[:, :, None, self.sizes.kv_latent :], positions, interleaved=True)
        return (
            jnp.concatenate([q_nope, q_rope], axis=-1),
            jnp.concatenate([latent, k_rope[:, :, 0]], axis=-1),
        )


SMALL = Sizes(
    width=64, heads=4, q_latent=32, kv_latent=24, nope=8, rope=4, value=8,
    index_heads=3, index_dim=12, top_k=48,
)  # fmt: skip


def make_batch(rng: np.random.Generator, rows: int, length: int, width: int) -> dict:
    """Rows of three packed documents and some padding, in source order, on the host."""
    lengths = [length // 2, length // 4, length // 8, length // 8]
    segment_ids = np.tile(np.repeat([1, 2, 3, 0], lengths), (rows, 1)).astype(np.int32)
    return {
        "x": rng.normal(size=(rows, length, width)).astype(np.float32),
        "segment_ids": segment_ids,
        "positions": segment_positions(segment_ids),  # before anything is reordered
    }


@nnx.jit
def run(layer: SparseAttention, batch: dict) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The layer's results."""
    return layer(batch["x"], batch["positions"], batch["segment_ids"])


def main(length: int = 512, rows: int = 2, sizes: Sizes = SMALL) -> dict[str, float]:
    """Compare both, print it, and give what differs by name."""
    make = lambda cp: SparseAttention(cp, sizes, rngs=nnx.Rngs(0))  # noqa: E731
    batch = make_batch(np.random.default_rng(0), rows, length, sizes.width)
    on_one = run(make(ContextParallel(Zigzag(1))), batch)
    wanted, wanted_selected, wanted_scores = map(np.asarray, on_one)

    mesh = jax.make_mesh((2, 4), ("data", "context"), axis_types=(AxisType.Auto,) * 2)
    cp = ContextParallel(Zigzag(4), axis_name="context", batch_axes="data")
    sharded = jax.device_put(cp.reorder(batch), NamedSharding(mesh, P("data", "context")))
    with jax.set_mesh(mesh):
        found = run(make(cp), sharded)
    out, selected, scores = (cp.restore(np.asarray(x)) for x in found)

    # The same sets, but where projections of other numbers of rows were rounded otherwise: of two
    # scores that are equal up to rounding, one or the other is then the last that is kept.
    differs = (np.sort(selected, axis=-1) != np.sort(wanted_selected, axis=-1)).any(axis=-1)
    error = np.abs(out - wanted)[~differs].max() / np.abs(wanted).max()
    print(f"Zigzag over 4 ranks and one device select the same keys for {(~differs).sum():,} of")
    print(f"{differs.size:,} tokens; there the outputs differ by {error:.1e}, relative.")
    if differs.any():
        gap = np.abs(scores[differs] - wanted_scores[differs]).max()
        print(f"For the others the scores of what was selected differ by at most {gap:.1e}.")
    assert error < 1e-5, f"zigzag over 4 ranks differs from one device by {error:.1e}"
    return {"rows that differ": int(differs.sum()), "rows": differs.size, "out": float(error)}


if __name__ == "__main__":
    main()
