"""Attention as Pallas kernels for TPUs; the kernels themselves are in `flash_kernels`.

FlashAttention-2 (arXiv 2307.08691) over lists of blocks. jax has such kernels too, Splash
Attention, but they take the position of a key to be its index, so keys that were gathered from a
balanced layout would have to be put back in source order first; and their lse of a query that sees
nothing is not -inf. Here positions and segment ids of queries and keys are data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from plait.attention.kernels.base import Kernel, Scores, Tags
from plait.attention.kernels.flash_kernels import LANES, Statics, backward, forward
from plait.layout import at_least_one
from plait.mesh import as_varying

LEAST_BLOCK = 256
"""Smaller blocks would be all overhead: rather let larger ones straddle chunks."""

MOST_VISITS = 1 << 17
"""In one list: 512 KiB, half of the scalar memory of a TPU, and few enough for `Visits`."""


@dataclasses.dataclass(frozen=True)
class Flash(Kernel):
    """Attention in blocks as Pallas kernels for TPUs.

    Blocks that the mask empties are not visited at all, forward or backward, and blocks that it
    leaves whole skip its arithmetic: the grid runs over a list of visits, made on the device from
    the blocks' least and most positions and segment ids, so that positions may be data. Lists are
    exact for every row of the batch, also under `jax.vmap`. Keys shared by a group of heads are
    read once for each head.

    Scores and sums are float32; float32 inputs are multiplied in full float32.

    Attributes:
      q_block, k_block: most tokens in a block of queries and of keys; on a TPU multiples of 128.
      interpret: whether to run on any platform, slowly, by Pallas' interpreter. Blocks may then
        have any size.
    """

    q_block: int = 512
    k_block: int = 512
    interpret: bool = False

    def __post_init__(self) -> None:
        for name in ("q_block", "k_block"):
            block = at_least_one(name, getattr(self, name))
            if block % LANES and not self.interpret:
                raise ValueError(
                    f"{name} is {block}; a TPU needs a multiple of {LANES}, such as "
                    f"{max(1, round(block / LANES)) * LANES}"
                )
            object.__setattr__(self, name, block)

    def fitted(self, q_chunk: int, k_chunk: int) -> Flash:
        """With blocks that do not straddle chunks, where chunks are long enough to allow it."""
        return dataclasses.replace(
            self, q_block=_fit(self.q_block, q_chunk), k_block=_fit(self.k_block, k_chunk)
        )

    def why_not(self, q: Any, k: Any, v: Any) -> str | None:
        """See `Kernel.why_not`; any mask will do, since it is traced into the kernels."""
        dtypes = {jnp.dtype(x.dtype).name for x in (q, k, v)}
        if len(dtypes) > 1 or not dtypes <= {"float32", "bfloat16"}:
            return f"q, k and v are {sorted(dtypes)}; Flash needs all float32 or all bfloat16"
        blocks = self._blocks(q.shape[1], k.shape[1])
        counts = -(-q.shape[1] // blocks[0]), -(-k.shape[1] // blocks[1])
        if counts[0] * counts[1] > MOST_VISITS:
            return (
                f"{q.shape[1]} queries over {k.shape[1]} keys are {counts[0] * counts[1]} blocks "
                f"of {blocks[0]} x {blocks[1]}; Flash keeps at most {MOST_VISITS} in mind: larger "
                "blocks make fewer"
            )
        return None

    def forward(
        self, scores: Scores, q: jax.Array, k: jax.Array, v: jax.Array, q_tags: Tags, k_tags: Tags
    ) -> tuple[jax.Array, jax.Array]:
        """See `Kernel.forward`.

        Raises:
          ValueError: what `why_not` says.
        """
        statics, *tags = self._prepare(scores, q, k, v, q_tags, k_tags)
        return _forward(statics, *_alike(q, k, v, *tags))

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
        """See `Kernel.backward`."""
        statics, *tags = self._prepare(scores, q, k, v, q_tags, k_tags, dtype)
        return _backward(statics, *_alike(q, k, v, d_out, lse, delta, *tags))

    def _blocks(self, queries: int, keys: int) -> tuple[int, int]:
        unit = 1 if self.interpret else LANES
        whole = [-(-length // unit) * unit for length in (queries, keys)]
        return min(self.q_block, whole[0]), min(self.k_block, whole[1])

    def _prepare(
        self,
        scores: Scores,
        q: Any,
        k: Any,
        v: Any,
        q_tags: Tags,
        k_tags: Tags,
        dtype: Any = jnp.float32,
    ) -> tuple:
        """What is static, and the tags of queries and of keys."""
        reason = self.why_not(q, k, v)
        if reason is not None:
            raise ValueError(reason)
        q_block, k_block = self._blocks(q.shape[1], k.shape[1])
        hangs_over = bool(q.shape[1] % q_block or k.shape[1] % k_block)
        statics = Statics(
            q_block=q_block,
            k_block=k_block,
            interpret=self.interpret,
            mask=scores.mask,
            masks_ids=hangs_over or q_tags.segment_ids is not None,
            scale=scores.scale,
            softcap=scores.softcap,
            dtype=dtype,
        )
        return statics, _tags(*q_tags, q_block), _tags(*k_tags, k_block)


def _fit(at_most: int, chunk: int) -> int:
    unit = LANES if at_most % LANES == 0 else 1
    blocks = range(at_most // unit * unit, min(LEAST_BLOCK, at_most) - 1, -unit)
    return next((block for block in blocks if chunk % block == 0), at_most)


def _tags(positions: jax.Array, ids: jax.Array | None, block: int) -> jax.Array:
    """Positions and segment ids as int32 [batch, 2, tokens], with padding up to whole blocks."""
    pair = _alike(positions, jnp.ones_like(positions) if ids is None else ids)
    tags = jnp.stack([x.astype(jnp.int32) for x in pair], axis=1)
    return jnp.pad(tags, [(0, 0), (0, 0), (0, -tags.shape[2] % block)])


def _alike(*arrays: Any) -> list[jax.Array]:
    """The arrays as varying over all the mesh axes that any of them varies over."""
    converted = [jnp.asarray(x) for x in arrays]
    names = sorted({name for x in converted for name in jax.typeof(x).mat.varying})
    return [as_varying(x, names) for x in converted]


def _by_rows(kernel: Callable[..., Any], s: Statics, *arrays: jax.Array) -> Any:
    """kernel(s, *arrays), whose arrays and results all have the batch first.

    Under `jax.vmap` there are more rows, where jax would loop over calls (and in jax 0.12 fail to
    in `jax.shard_map` with check_vma). Rows whose list of visits would be too long are taken in
    turn.
    """

    @custom_vmap
    def call(*arrays: jax.Array) -> Any:
        if arrays[0].shape[0] * s.blocks(arrays[-2], arrays[-1]) <= MOST_VISITS:
            return kernel(s, *arrays)
        rows = lax.map(lambda row: kernel(s, *(x[None] for x in row)), arrays)
        return jax.tree.map(lambda x: x[:, 0], rows)

    @call.def_vmap
    def _(size: int, is_batched: list[bool], *arrays: jax.Array) -> Any:
        whole = (
            x if batched else jnp.broadcast_to(x, (size, *x.shape))
            for x, batched in zip(arrays, is_batched, strict=True)
        )  # fmt: skip
        results = call(*(x.reshape(-1, *x.shape[2:]) for x in whole))
        results = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), results)
        return results, jax.tree.map(lambda _: True, results)

    return call(*arrays)


def _forward(s: Statics, q: Any, k: Any, v: Any, q_tags: Any, k_tags: Any) -> tuple:
    queries = q.shape[1]
    q, k, v = (_heads_first(x, b) for x, b in ((q, s.q_block), (k, s.k_block), (v, s.k_block)))
    out, lse = _by_rows(forward, s, q, k, v, q_tags, k_tags)
    return _heads_last(out, queries), lse[:, :, 0, :queries].swapaxes(1, 2)


def _backward(
    s: Statics, q: Any, k: Any, v: Any, d_out: Any, lse: Any, delta: Any, q_tags: Any, k_tags: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    queries, keys = q.shape[1], k.shape[1]
    d_out = _heads_first(d_out.astype(q.dtype), s.q_block)
    q, k, v = (_heads_first(x, b) for x, b in ((q, s.q_block), (k, s.k_block), (v, s.k_block)))
    lse, delta = (_heads_first(x[..., None], s.q_block).swapaxes(2, 3) for x in (lse, delta))
    d_q, d_k, d_v = _by_rows(backward, s, q, k, v, d_out, lse, delta, q_tags, k_tags)
    return _heads_last(d_q, queries), _heads_last(d_k, keys), _heads_last(d_v, keys)


def _heads_first(x: jax.Array, block: int) -> jax.Array:
    """[batch, tokens, heads, ...] as [batch, heads, tokens, ...], a block of tokens at least.

    The last of several blocks may hang over the end: what a kernel reads there is as padding.
    """
    x = x.swapaxes(1, 2)
    short = max(0, block - x.shape[2])
    return jnp.pad(x, [(0, 0), (0, 0), (0, short), (0, 0)]) if short else x


def _heads_last(x: jax.Array, tokens: int) -> jax.Array:
    return x[:, :, :tokens].swapaxes(1, 2)
