"""A small causal transformer over bytes, as a user of plait would write it."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from plait import Causal, ContextParallel, Mask
from plait.attention import Strategy

VOCABULARY = 256


def rotate(x: jax.Array, positions: jax.Array, base: float = 10_000.0) -> jax.Array:
    """Rotary position embedding (arXiv 2104.09864).

    Args:
      x: [batch, sequence, heads, head_dim].
      positions: int32 [batch, sequence], each token's position within its document.
      base: the ratio of the longest wavelength to the shortest.
    """
    half = x.shape[-1] // 2
    frequencies = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions[..., None, None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


@dataclasses.dataclass(frozen=True)
class Attend:
    """How attention is asked for: the arguments of `ContextParallel.attention`."""

    strategy: Strategy = "all_gather"
    mask: Mask = dataclasses.field(default_factory=Causal)
    kernel: Literal["auto", "blockwise"] = "auto"


class Attention(nnx.Module):
    """Grouped-query attention; the one layer that sees more than its own token."""

    def __init__(
        self,
        cp: ContextParallel,
        attend: Attend,
        width: int,
        heads: int,
        kv_heads: int,
        *,
        rngs: nnx.Rngs,
    ) -> None:
        self.cp, self.attend, self.heads, self.kv_heads = cp, attend, heads, kv_heads
        head_dim = width // heads
        self.q = nnx.Linear(width, heads * head_dim, use_bias=False, rngs=rngs)
        self.k = nnx.Linear(width, kv_heads * head_dim, use_bias=False, rngs=rngs)
        self.v = nnx.Linear(width, kv_heads * head_dim, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(heads * head_dim, width, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array, positions: jax.Array, segment_ids: jax.Array) -> jax.Array:
        q = self.q(x).reshape(*x.shape[:2], self.heads, -1)
        k = self.k(x).reshape(*x.shape[:2], self.kv_heads, -1)
        v = self.v(x).reshape(*x.shape[:2], self.kv_heads, -1)
        q, k = rotate(q, positions), rotate(k, positions)
        attended = self.cp.attention(
            *(q, k, v),
            segment_ids=segment_ids,
            mask=self.attend.mask,
            strategy=self.attend.strategy,
            kernel=self.attend.kernel,
        )
        return self.out(attended.reshape(*x.shape[:2], -1))


class SwiGLU(nnx.Module):
    """The gated feed-forward layer (arXiv 2002.05202)."""

    def __init__(self, width: int, hidden: int, *, rngs: nnx.Rngs) -> None:
        self.gate = nnx.Linear(width, hidden, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(width, hidden, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(hidden, width, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    """Attention and a feed-forward layer, each behind a norm and beside a residual."""

    def __init__(
        self,
        cp: ContextParallel,
        attend: Attend,
        width: int,
        heads: int,
        kv_heads: int,
        *,
        rngs: nnx.Rngs,
    ) -> None:
        self.norm_attention = nnx.RMSNorm(width, rngs=rngs)
        self.attention = Attention(cp, attend, width, heads, kv_heads, rngs=rngs)
        self.norm_mlp = nnx.RMSNorm(width, rngs=rngs)
        self.mlp = SwiGLU(width, 2 * width, rngs=rngs)

    def __call__(self, x: jax.Array, positions: jax.Array, segment_ids: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm_attention(x), positions, segment_ids)
        return x + self.mlp(self.norm_mlp(x))


class ByteTransformer(nnx.Module):
    """Embedding, blocks, norm, and the embedding again as the head."""

    def __init__(
        self,
        cp: ContextParallel,
        attend: Attend = Attend(),
        *,
        width: int = 128,
        heads: int = 4,
        kv_heads: int = 2,
        layers: int = 2,
        rngs: nnx.Rngs,
    ) -> None:
        self.cp = cp
        # Small enough for the tied head's first logits to be near 0, and the first loss ln(256).
        init = nnx.initializers.normal(0.02)
        self.embedding = nnx.Embed(VOCABULARY, width, embedding_init=init, rngs=rngs)
        self.blocks = nnx.List(
            [Block(cp, attend, width, heads, kv_heads, rngs=rngs) for _ in range(layers)]
        )
        self.norm = nnx.RMSNorm(width, rngs=rngs)

    def __call__(
        self, tokens: jax.Array, positions: jax.Array, segment_ids: jax.Array
    ) -> jax.Array:
        """Logits [batch, sequence, 256] of the next byte; all arguments int32 [batch, sequence]."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, positions, segment_ids)
        return self.embedding.attend(self.norm(x))


def loss(model: ByteTransformer, batch: dict[str, jax.Array]) -> jax.Array:
    """The mean over labelled tokens of -log p(next byte), in nats.

    The sum over all tokens by the count of all tokens: a mean of the ranks' means would weigh
    a rank that holds much padding as much as the others.
    """
    tokens, segment_ids = batch["tokens"], batch["segment_ids"]
    logits = model(tokens, batch["positions"], segment_ids)
    labels = model.cp.lookahead(tokens, segment_ids=segment_ids)
    labelled = labels >= 0
    log_p = jax.nn.log_softmax(logits.astype(jnp.float32))
    of_label = jnp.take_along_axis(log_p, jnp.where(labelled, labels, 0)[..., None], axis=-1)
    total, count = model.cp.sum_and_count(-of_label[..., 0], labelled)
    return total / jnp.maximum(count, 1)
