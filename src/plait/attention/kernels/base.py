"""What a kernel is: exact attention of some queries over some keys, given their positions.

A kernel knows source positions and segment ids and nothing of meshes, ranks or slots. What it
gives for one part of the keys, `merge` joins with what it gave for others.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from plait.mask import Mask
from plait.mesh import as_varying
from plait.names import ATTENDED, named


class Tags(NamedTuple):
    """What tells tokens apart: int32 source positions and segment ids, [batch, tokens] each."""

    positions: jax.Array
    segment_ids: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Scores:
    """How a dot product becomes a score: scaled, capped to +-softcap by tanh, and masked."""

    mask: Mask
    scale: float
    softcap: float | None = None

    def of(self, dots: jax.Array) -> tuple[jax.Array, Any]:
        """The scores before the mask, and their derivative in the dot products."""
        scaled = dots * self.scale
        if self.softcap is None:
            return scaled, self.scale
        capped = jnp.tanh(scaled / self.softcap)
        return self.softcap * capped, self.scale * (1 - capped * capped)


class Kernel(abc.ABC):
    """What a strategy asks of a kernel; frozen and hashable, as it is static under `jax.jit`."""

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        mask: Mask,
        q_positions: jax.Array,
        k_positions: jax.Array,
        q_segment_ids: jax.Array | None = None,
        k_segment_ids: jax.Array | None = None,
        scale: float,
        softcap: float | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """(out, lse) as `forward` says, with gradients in q, k and v."""
        q_tags, k_tags = Tags(q_positions, q_segment_ids), Tags(k_positions, k_segment_ids)
        return attend(self, Scores(mask, scale, softcap), q, k, v, q_tags, k_tags)

    def fitted(self, q_chunk: int, k_chunk: int) -> Kernel:
        """The kernel with blocks that do not straddle chunks, if it has blocks."""
        return self

    def why_not(self, q: Any, k: Any, v: Any) -> str | None:
        """Why this kernel cannot take such arrays, in a sentence; None where it can.

        Args:
          q, k, v: arrays, or anything with their shape and dtype, as in `forward`.
        """
        return None

    @abc.abstractmethod
    def forward(
        self, scores: Scores, q: jax.Array, k: jax.Array, v: jax.Array, q_tags: Tags, k_tags: Tags
    ) -> tuple[jax.Array, jax.Array]:
        """Exact attention of the queries over the keys.

        Args:
          q: [batch, queries, heads, head_dim].
          k: [batch, keys, kv_heads, head_dim]; kv_heads divides heads.
          v: [batch, keys, kv_heads, v_head_dim].
          q_tags, k_tags: of the queries and of the keys; segment ids in both or in neither.

        Returns:
          (out, lse): out float32 [batch, queries, heads, v_head_dim], and the log of the sum of
          the exponentials of the scores, float32 [batch, queries, heads]. A query that sees
          nothing has out 0 and lse -inf.
        """

    @abc.abstractmethod
    def backward(
        self,
        scores: Scores,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        d_out: jax.Array,
        lse: jax.Array,
        delta: jax.Array,
        q_tags: Tags,
        k_tags: Tags,
        *,
        dtype: Any = jnp.float32,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """What these keys contribute to the gradients of a softmax over these and other keys.

        Args:
          d_out: the gradient of the final out, in any float dtype.
          lse: the final log-sum-exp, over all keys.
          delta: float32 [batch, queries, heads]: sum(out * d_out) less the gradient of lse.
          dtype: of the gradients; None for those of q, k and v, where nothing is to be added.
          Others as in `forward`.

        Returns:
          d_q, d_k, d_v.
        """


def attend(
    kernel: Kernel,
    scores: Scores,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_tags: Tags,
    k_tags: Tags,
) -> tuple[jax.Array, jax.Array]:
    """(out, lse) of a kernel, both float32, with gradients in q, k and v; no forward mode."""
    leaves = (q, k, v, q_tags, k_tags)
    names = {name for x in jax.tree.leaves(leaves) for name in jax.typeof(x).mat.varying}
    q, k, v, q_tags, k_tags = jax.tree.map(lambda x: as_varying(x, names), leaves)
    return _attend(kernel, scores, q, k, v, q_tags, k_tags)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(kernel: Kernel, scores: Scores, *arrays: Any) -> tuple[jax.Array, jax.Array]:
    return kernel.forward(scores, *arrays)


def _attend_forward(kernel: Kernel, scores: Scores, *arrays: Any) -> tuple:
    out, lse = kernel.forward(scores, *arrays)
    saved = named_attended(out, lse, arrays[0].dtype)
    return (out, lse), (*arrays, *saved)


def _attend_backward(kernel: Kernel, scores: Scores, saved: tuple, cotangents: tuple) -> tuple:
    q, k, v, q_tags, k_tags, out, lse = saved
    d_out, d_lse = cotangents
    delta = delta_of(out, d_out, d_lse)
    d_out = d_out.astype(q.dtype)
    return (
        *kernel.backward(scores, q, k, v, d_out, lse, delta, q_tags, k_tags, dtype=None),
        jax.tree.map(lambda _: None, q_tags),
        jax.tree.map(lambda _: None, k_tags),
    )


def named_attended(out: jax.Array, lse: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """What the backward pass needs of the forward's results, by the names of `ATTENDED`."""
    out, lse = (named(x, name) for x, name in zip((out.astype(dtype), lse), ATTENDED, strict=True))
    return out, lse


_attend.defvjp(_attend_forward, _attend_backward)


def delta_of(out: jax.Array, d_out: jax.Array, d_lse: jax.Array) -> jax.Array:
    """What the backward of softmax subtracts from each row: float32 [batch, queries, heads]."""
    return jnp.einsum("bshd,bshd->bsh", out, d_out, preferred_element_type=jnp.float32) - d_lse


Partial = tuple[jax.Array, jax.Array]
"""(out, lse), float32, of some queries over a part of the keys."""


def merge(one: Partial, other: Partial) -> Partial:
    """The attention over both parts of the keys; where both are empty, again out 0, lse -inf."""
    (out, lse), (other_out, other_lse) = one, other
    peak = jnp.maximum(lse, other_lse)
    peak = jnp.where(peak == -jnp.inf, 0.0, peak)
    weight, other_weight = jnp.exp(lse - peak), jnp.exp(other_lse - peak)
    total = weight + other_weight
    shares = (w / jnp.where(total == 0, 1.0, total) for w in (weight, other_weight))
    share, other_share = (x[..., None] for x in shares)
    return out * share + other_out * other_share, peak + jnp.log(total)
