"""Attention over selected keys alone: multi-head latent attention in its absorbed form.

Every head attends to one latent per token, whose first entries are also its value
(DeepSeek-V2, arXiv 2405.04434, section 2.1), so that ranks exchange latents and not heads of keys
and values.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from plait.exchange import gather_shards
from plait.layout import Layout, at_least_one
from plait.mesh import AnyMesh, Axes, AxisName, as_varying
from plait.names import GATHERED_KEYS
from plait.sparse.indexer import slots_of
from plait.sparse.place import as_positions, place
from plait.tree import as_int32


def sparse_attention(
    q: jax.Array,
    latents: jax.Array,
    positions: jax.Array,
    layout: Layout,
    *,
    value_dim: int,
    scale: float,
    axis_name: AxisName | None = None,
    batch_axes: AxisName | None = None,
    head_axes: AxisName | None = None,
    source_positions: jax.Array | None = None,
    q_block: int = 16,
    mesh: AnyMesh | None = None,
    local: bool = False,
) -> jax.Array:
    """Softmax attention of each query over the keys at some source positions.

    Args:
      q: [batch, sequence, heads, dim]: for MLA the queries, taken through the keys' up-projection,
        and after them the part that RoPE turned; DeepSeek-V3.2 has 128 heads, dim 512 + 64.
      latents: [batch, sequence, dim], of the dtype of q: the normalised latent and the key that
        RoPE turned.
      positions: int32 [batch, sequence, selected] from `select`; -1 is no key, and no position may
        stand twice in a row.
      layout: the layout of the sequence axis.
      value_dim: how many entries of a latent, the first ones, are its value: 512.
      scale: of the scores before softmax.
      axis_name, batch_axes, source_positions, mesh, local: as in `select`.
      head_axes: the mesh axes that the heads of q are sharded over, used outside `jax.shard_map`.
      q_block: queries whose keys are in memory at once.

    Returns:
      [batch, sequence, heads, value_dim], the values still to be taken through the up-projection,
      in the dtype of q and laid out as q is. A token without a key gets 0. Scores and sums are
      float32; reverse-mode derivatives in q and latents.

    Communicates one all-gather of the latents; backward a reduce-scatter of their gradient. Where
    a key lies is found by arithmetic. Causality is the business of `positions`.

    Raises:
      ValueError: shapes, lengths, layouts and meshes that do not fit together, by name.

    >>> import jax.numpy as jnp
    >>> from plait import Zigzag
    >>> q, latents = jnp.zeros((1, 4, 1, 1)), jnp.array([0.0, 30.0, 10.0, 20.0])[None, :, None]
    >>> chosen = jnp.array([[0, -1], [3, 2], [-1, -1], [2, 0]])[None]
    >>> out = sparse_attention(q, latents, chosen, Zigzag(2), value_dim=1, scale=1.0)
    >>> out.ravel().tolist()
    [0.0, 25.0, 0.0, 10.0]
    """
    value_dim = at_least_one("value_dim", value_dim)
    _check(q, latents, positions, value_dim)
    call = _Attend(layout, value_dim, float(scale), at_least_one("q_block", q_block))
    arrays = {
        "q": q,
        "latents": latents,
        "positions": as_int32(positions, "positions"),
        "source_positions": as_positions(source_positions, q.shape[0]),
    }
    (out,) = place(
        call,
        arrays,
        axis_name=axis_name,
        batch_axes=batch_axes,
        mesh=mesh,
        local=local,
        what="sparse_attention",
        head_axes=head_axes,
    )
    return out


def _check(q: Any, latents: Any, positions: Any, value_dim: int) -> None:
    shapes = {"q": (q, 4, "heads, dim]"), "latents": (latents, 3, "dim]")}
    for name, (x, rank, last) in {**shapes, "positions": (positions, 3, "selected]")}.items():
        if x.ndim != rank:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}; it needs to be [batch, sequence, {last}"
            )
    if q.shape[3] != latents.shape[2] or q.dtype != latents.dtype:
        raise ValueError(
            f"q is {q.dtype}[{q.shape[3]}] in each head and latents {latents.dtype}"
            f"[{latents.shape[2]}]; both need the same dim and dtype"
        )
    if not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(f"q and latents are {q.dtype}; they need to be floats, such as bfloat16")
    if value_dim > latents.shape[2]:
        raise ValueError(
            f"value_dim is {value_dim}; it needs to be at most {latents.shape[2]}, the dim of "
            "latents"
        )


@dataclasses.dataclass(frozen=True)
class _Attend:
    layout: Layout
    value_dim: int
    scale: float
    q_block: int

    def run(self, axes: Axes | None, q: Any, latents: Any, chosen: Any, positions: Any) -> tuple:
        tokens = q.shape[1]
        slots = slots_of(self.layout, chosen, positions, tokens, axes)
        if axes is not None:
            latents = gather_shards(latents, 1, axes.names, GATHERED_KEYS)
        names = {name for x in (q, latents, slots) for name in jax.typeof(x).mat.varying}
        q, latents, slots = (as_varying(x, names) for x in (q, latents, slots))
        padding = [(0, 0), (0, -tokens % self.q_block)]
        q = jnp.pad(q, [*padding, (0, 0), (0, 0)])
        slots = jnp.pad(slots, [*padding, (0, 0)], constant_values=-1)
        return (_attend(self, q, latents, slots)[:, :tokens],)

    def blocks(self, *rows: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(x.reshape(-1, self.q_block, *x.shape[1:]) for x in rows)

    def scores(self, q: jax.Array, keys: jax.Array, slots: jax.Array) -> jax.Array:
        """Of [queries, heads, dim] and [queries, selected, dim], -inf where there is no key."""
        dots = _dot("qhd,qsd->qhs", q, keys) * self.scale
        return jnp.where((slots < 0)[:, None], -jnp.inf, dots)


def _rows(latents: jax.Array, slots: jax.Array) -> jax.Array:
    """The latents at some slots, 0 where there is none: [queries, selected, dim]."""
    return jnp.where((slots < 0)[..., None], 0, latents[jnp.maximum(slots, 0)])


def _dot(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(
        equation, a, b, preferred_element_type=jnp.float32, precision=lax.Precision.HIGHEST
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(call: _Attend, q: jax.Array, latents: jax.Array, slots: jax.Array) -> jax.Array:
    return _forward(call, q, latents, slots)[0]


def _forward(call: _Attend, q: Any, latents: Any, slots: Any) -> tuple:
    def of_row(row: tuple) -> tuple[jax.Array, jax.Array]:
        q, latents, slots = row

        def of_block(block: tuple) -> tuple[jax.Array, jax.Array]:
            q, slots = block
            keys = _rows(latents, slots)
            scores = call.scores(q, keys, slots)
            peak = scores.max(axis=-1, keepdims=True)
            p = jnp.exp(scores - jnp.where(peak == -jnp.inf, 0.0, peak))
            total = p.sum(axis=-1)
            out = _dot("qhs,qsd->qhd", p.astype(keys.dtype), keys[..., : call.value_dim])
            out = out / jnp.where(total == 0, 1.0, total)[..., None]
            return out.astype(q.dtype), peak[..., 0] + jnp.log(total)

        out, lse = lax.map(of_block, call.blocks(q, slots))
        return out.reshape(-1, *out.shape[2:]), lse.reshape(-1, lse.shape[2])

    out, lse = lax.map(of_row, (q, latents, slots))
    return out, (q, latents, slots, out, lse)


def _backward(call: _Attend, saved: tuple, d_out: jax.Array) -> tuple:
    q, latents, slots, out, lse = saved
    delta = _dot("bqhd,bqhd->bqh", out, d_out)

    def of_row(row: tuple) -> tuple[jax.Array, jax.Array]:
        q, latents, slots, *rest = row

        def of_block(d_latents: jax.Array, block: tuple) -> tuple[jax.Array, jax.Array]:
            q, slots, d_out, lse, delta = block
            keys = _rows(latents, slots)
            values = keys[..., : call.value_dim]
            shift = jnp.where(lse == -jnp.inf, 0.0, lse)[..., None]
            p = jnp.exp(call.scores(q, keys, slots) - shift)
            d_p = _dot("qhd,qsd->qhs", d_out, values)
            d_dots = (p * (d_p - delta[..., None]) * call.scale).astype(q.dtype)
            d_keys = _dot("qhs,qhd->qsd", d_dots, q)
            d_keys = d_keys.at[..., : call.value_dim].add(
                _dot("qhs,qhd->qsd", p.astype(q.dtype), d_out)
            )
            nowhere = latents.shape[0]  # one past the end: dropped
            d_latents = d_latents.at[jnp.where(slots < 0, nowhere, slots)].add(d_keys, mode="drop")
            return d_latents, _dot("qhs,qsd->qhd", d_dots, keys).astype(q.dtype)

        start = jnp.zeros(latents.shape, jnp.float32)
        start = as_varying(start, jax.typeof(latents).mat.varying)
        d_latents, d_q = lax.scan(of_block, start, call.blocks(q, slots, *rest))
        return d_q.reshape(-1, *d_q.shape[2:]), d_latents.astype(latents.dtype)

    d_q, d_latents = lax.map(of_row, (q, latents, slots, d_out.astype(q.dtype), lse, delta))
    return d_q, d_latents, None


_attend.defvjp(_forward, _backward)
