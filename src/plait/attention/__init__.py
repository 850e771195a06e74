"""Attention over a sequence in any layout, sharded or not."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from plait.attention.kernels import Blockwise
from plait.attention.strategies import all_gather_keys
from plait.exchange import gather_shards
from plait.layout import Layout, Striped
from plait.mask import BlockBounds, Causal, Mask, block_map
from plait.mesh import (
    AnyMesh,
    Axes,
    AxisName,
    as_entry,
    as_names,
    as_varying,
    bound_axes,
    check_ranks,
    check_shard,
    explicit_axes,
    find_mesh,
    is_inside,
    is_vmapped,
    lay_out,
    typed_spec,
)
from plait.positions import positions_of_rank, positions_of_slots
from plait.tree import as_int32

__all__ = ["Blockwise", "attention", "count_blocks"]


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    layout: Layout,
    *,
    axis_name: AxisName | None = None,
    batch_axes: AxisName | None = None,
    head_axes: AxisName | None = None,
    mask: Mask | None = None,
    segment_ids: jax.Array | None = None,
    source_positions: jax.Array | None = None,
    strategy: Literal["all_gather"] = "all_gather",
    kernel: Blockwise | Literal["auto", "blockwise"] = "auto",
    scale: float | None = None,
    mesh: AnyMesh | None = None,
    local: bool = False,
) -> jax.Array:
    """Exact attention over a sequence whose tokens lie in the order of `layout`.

    Args:
      q: [batch, sequence, heads, head_dim], as in `jax.nn.dot_product_attention`; float32,
        bfloat16 or float16 (accumulation is float32).
      k: [batch, sequence, kv_heads, head_dim]; kv_heads divides heads (GQA, MQA).
      v: [batch, sequence, kv_heads, v_head_dim].
      layout: the layout of the sequence axis.
      axis_name: the mesh axis, or axes, major first, that the sequence is sharded over. Inside
        `jax.shard_map` the arrays are this rank's shards; outside, global arrays. None: one
        device holds the sequence.
      batch_axes, head_axes: the mesh axes that batch and heads are sharded over, used outside
        `jax.shard_map`, where every axis of the mesh is made manual. An axis that is not named is
        taken to hold copies.
      mask: Causal() by default; by source position.
      segment_ids: integers [batch, sequence] in the order of the layout. Tokens see their own
        document only; 0 is padding, which sees and is seen by nothing.
      source_positions: int32 [sequence] or [batch, sequence] in the order of the arrays. For
        layouts that change with every batch: given, they replace those of `layout`, from which
        then only the number of ranks is taken, and new values compile nothing anew.
      strategy: "all_gather": every rank gathers all keys and values.
      kernel: "blockwise" or a `Blockwise` with block sizes; "auto" is "blockwise".
      scale: of the scores before softmax; head_dim ** -0.5 by default.
      mesh: the mesh, where neither `jax.set_mesh` nor the arrays say it.
      local: take the arrays to hold the whole sequence, although the call stands in a manual
        region.

    Returns:
      [batch, sequence, heads, v_head_dim] in the dtype of q, laid out as q is. A token that sees
      nothing gets 0. Reverse-mode derivatives only.

    Communicates an all-gather of k and of v, and of segment ids and source positions where they
    are given; in the backward pass a reduce-scatter of the gradients of k and v.

    Raises:
      ValueError: shapes, lengths, layouts and meshes that do not fit together, by name.

    >>> import jax.numpy as jnp
    >>> from plait import Zigzag
    >>> x = jnp.ones((1, 8, 2, 4))
    >>> attention(x, x, x, Zigzag(2)).shape
    (1, 8, 2, 4)
    """
    names = as_names(axis_name)
    mask = Causal() if mask is None else mask
    inside = not local and is_inside(names, "attention")
    ids = None if segment_ids is None else as_int32(segment_ids, "segment_ids")
    positions = source_positions
    if positions is not None:
        positions = as_int32(positions, "source_positions")
    _check_shapes(q, k, v, ids, positions, mask)
    _check_strategy(strategy)
    scale = q.shape[-1] ** -0.5 if scale is None else _as_float(scale)
    call = _Call(layout, mask, _kernel(kernel), scale)
    axes: Axes | None = None
    if inside:
        axes = bound_axes(names)
        check_ranks(layout, axes.size, names)
        for name, x in (("q", q), ("k", k), ("v", v), ("segment_ids", ids)):
            if x is not None:
                check_shard(jnp.asarray(x), names, name)
        if positions is not None:
            check_shard(jnp.asarray(positions), names, "source_positions")
        _check_manual(q)
        return call.run(q, k, v, ids, positions, axes)
    batch, heads = as_names(batch_axes), as_names(head_axes)
    if local:
        return call.run(q, k, v, ids, positions, None)
    if not (names or batch or heads or any(typed_spec(jnp.asarray(q)))):
        return _on_one_device(call)(q, k, v, ids, positions)
    mesh = find_mesh([q], (*names, *batch, *heads), mesh)
    if names:
        axes = Axes.on(mesh, names)
        check_ranks(layout, axes.size, names)
    _check_divides(q, k, mesh, names, batch, heads)
    specs = [_head_spec(x, mesh, batch, names, heads) for x in (q, k, v)]
    if len({(spec[0], spec[2]) for spec in specs}) > 1:
        raise ValueError(
            f"q, k and v are sharded as {specs[0]}, {specs[1]} and {specs[2]}; batch and heads "
            "need to lie on the same mesh axes in all three"
        )
    ids_spec = PartitionSpec(specs[0][0], specs[0][1])
    positions_spec = None
    if positions is not None:
        positions_spec = ids_spec if positions.ndim == 2 else PartitionSpec(specs[0][1])
        positions = lay_out(positions, mesh, positions_spec)
    if ids is not None:
        ids = lay_out(ids, mesh, ids_spec)
    arguments = (*specs, None if ids is None else ids_spec, positions_spec)
    named = {name for entry in specs[0] for name in as_names(entry)}
    vmapped = is_vmapped(mesh, named, (q, k, v, ids, positions), "attention")
    return _over_mesh(call, axes, mesh, arguments, vmapped)(q, k, v, ids, positions)


@dataclasses.dataclass(frozen=True)
class _Call:
    """What of a call is known when it is traced."""

    layout: Layout
    mask: Mask
    kernel: Blockwise
    scale: float

    def run(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        segment_ids: jax.Array | None,
        positions: jax.Array | None,
        axes: Axes | None,
    ) -> jax.Array:
        """On this rank's shard where there are axes, on the whole sequence where there are none."""
        length = q.shape[1] * (1 if axes is None else axes.size)
        kernel = self.kernel
        if positions is not None:
            q_positions = positions
            k_positions = positions
            if axes is not None:
                k_positions = gather_shards(positions, positions.ndim - 1, axes.names)
        else:
            self.layout.check_length(length, "axis 1 of q")
            k_positions = positions_of_slots(self.layout, length)
            q_positions = k_positions
            if axes is not None:
                q_positions = positions_of_rank(self.layout, length, axes.rank())
            kernel = _fitted(kernel, self.layout, length)
        k, v, k_positions, k_segment_ids = all_gather_keys(k, v, k_positions, segment_ids, axes)
        out, _ = kernel(
            q,
            k,
            v,
            mask=self.mask,
            q_positions=jnp.broadcast_to(q_positions, q.shape[:2]),
            k_positions=jnp.broadcast_to(k_positions, k.shape[:2]),
            q_segment_ids=segment_ids,
            k_segment_ids=k_segment_ids,
            scale=self.scale,
        )
        return out


@functools.lru_cache(maxsize=256)
def _on_one_device(call: _Call) -> Any:
    return jax.jit(lambda q, k, v, ids, positions: call.run(q, k, v, ids, positions, None))


@functools.lru_cache(maxsize=256)
def _over_mesh(call: _Call, axes: Axes | None, mesh: AnyMesh, specs: tuple, vmapped: bool) -> Any:
    def body(q: Any, k: Any, v: Any, ids: Any, positions: Any) -> jax.Array:
        out = call.run(q, k, v, ids, positions, axes)
        return as_varying(out, [n for entry in specs[0] for n in as_names(entry)])

    return jax.jit(
        jax.shard_map(
            body,
            mesh=mesh,
            in_specs=specs,
            out_specs=specs[0],
            axis_names=frozenset(mesh.axis_names),
            check_vma=not vmapped,
        )
    )


def _fitted(kernel: Blockwise, layout: Layout, length: int) -> Blockwise:
    per_rank = length // layout.ranks
    if isinstance(layout, Striped):
        return kernel.fitted(per_rank, per_rank)
    chunk = layout.chunk_length(length)
    return kernel.fitted(chunk, chunk)


def count_blocks(
    layout: Layout,
    sequence_length: int,
    *,
    mask: Mask | None = None,
    segment_ids: np.ndarray | None = None,
    kernel: Blockwise | Literal["auto", "blockwise"] = "auto",
) -> tuple[np.ndarray, int]:
    """The blocks of scores that the blockwise kernel computes on each rank, and of how many.

    Counted on the host by the rule that the kernel itself follows, for the all-gather strategy.

    Args:
      segment_ids: integers in source order, [sequence] or [batch, sequence]; rows add up.
      Others as in `attention`.

    Returns:
      (computed, total): int64 [ranks], and the number of blocks of one rank, skipped ones
      included.

    >>> from plait import Contiguous, Zigzag
    >>> count_blocks(Contiguous(2), 1024)[0].tolist(), count_blocks(Zigzag(2), 1024)[0].tolist()
    ([3, 7], [5, 5])
    """
    mask = Causal() if mask is None else mask
    length = layout.check_length(sequence_length)
    ids = np.ones((1, length), np.int32) if segment_ids is None else np.asarray(segment_ids)
    ids = np.atleast_2d(as_int32(ids, "segment_ids"))[:, layout.positions(length)]
    positions = np.broadcast_to(layout.positions(length), ids.shape)
    fitted = _fitted(_kernel(kernel), layout, length)
    k = _host_bounds(positions, ids, min(fitted.k_block, length))
    computed = []
    for rank in range(layout.ranks):
        mine = slice(rank * length // layout.ranks, (rank + 1) * length // layout.ranks)
        block = min(fitted.q_block, length // layout.ranks)
        q = _host_bounds(positions[:, mine], ids[:, mine], block)
        needed = block_map(mask, q, k)
        computed.append(int(needed.sum()))
    return np.array(computed), int(needed.size)


def _host_bounds(positions: np.ndarray, ids: np.ndarray, block: int) -> BlockBounds:
    padding = [(0, 0), (0, -positions.shape[-1] % block)]
    return BlockBounds.of(np.pad(positions, padding), np.pad(ids, padding), block, np)


def _kernel(kernel: Any) -> Blockwise:
    if isinstance(kernel, Blockwise):
        return kernel
    if kernel not in ("auto", "blockwise"):
        raise ValueError(f"kernel is {kernel!r}; it needs to be 'auto', 'blockwise' or Blockwise()")
    return Blockwise()


def _as_float(scale: Any) -> float:
    if isinstance(scale, jax.core.Tracer):
        raise TypeError(
            f"scale is {scale}, a traced array; it needs to be a float: multiply q by it instead"
        )
    return float(scale)


def _check_manual(q: jax.Array) -> None:
    sharded = [name for names in typed_spec(q) for name in names]
    if sharded:
        raise ValueError(
            f"q is {jax.typeof(q)}: attention inside jax.shard_map needs a region that is manual "
            f"over {sharded} too"
        )


def _check_strategy(strategy: str) -> None:
    if strategy != "all_gather":
        raise ValueError(f"strategy is {strategy!r}; it needs to be 'all_gather'")


def _check_shapes(q: Any, k: Any, v: Any, ids: Any, positions: Any, mask: Any) -> None:
    if not isinstance(mask, Mask):
        raise TypeError(f"mask is {mask!r}; it needs to be a plait.mask.Mask, such as Causal()")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, jax.Array | np.ndarray):
            raise TypeError(f"{name} is a {type(x).__name__}; it needs to be an array")
        if x.ndim != 4:
            raise ValueError(
                f"{name} has shape {x.shape}; it needs [batch, sequence, heads, head_dim]"
            )
        if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
            raise TypeError(f"{name} has dtype {x.dtype}; it needs float32, bfloat16 or float16")
        if 0 in x.shape:
            raise ValueError(f"{name} has shape {x.shape}; every dimension needs to be at least 1")
    if k.shape[:2] != q.shape[:2] or v.shape[:3] != k.shape[:3] or k.shape[3] != q.shape[3]:
        raise ValueError(
            f"q {q.shape}, k {k.shape} and v {v.shape} do not fit: batch and sequence need to be "
            "equal in all three, heads in k and v, and head_dim in q and k"
        )
    if q.shape[2] % k.shape[2]:
        nearest = max(1, round(q.shape[2] / k.shape[2])) * k.shape[2]
        raise ValueError(
            f"q has {q.shape[2]} heads and k has {k.shape[2]}; the heads of k need to divide those "
            f"of q, such as {nearest} heads of q"
        )
    if ids is not None and ids.shape != q.shape[:2]:
        raise ValueError(f"segment_ids has shape {ids.shape}; it needs to be {q.shape[:2]}")
    if positions is not None and positions.shape not in (q.shape[:2], q.shape[1:2]):
        raise ValueError(
            f"source_positions has shape {positions.shape}; it needs to be {q.shape[1:2]} or "
            f"{q.shape[:2]}"
        )


def _check_divides(q: Any, k: Any, mesh: AnyMesh, names: tuple, batch: tuple, heads: tuple) -> None:
    wanted = (
        ("batch", q.shape[0], batch),
        ("sequence", q.shape[1], names),
        ("heads of q", q.shape[2], heads),
        ("heads of k and v", k.shape[2], heads),
    )
    for what, length, axes in wanted:
        size = math.prod(mesh.shape[name] for name in axes)
        if length % size:
            raise ValueError(
                f"{what}: {length} do not divide over the {size} devices of mesh axes {axes!r}; "
                f"the nearest number that does is {max(1, round(length / size)) * size}"
            )


def _head_spec(
    x: jax.Array, mesh: AnyMesh, batch: tuple, names: tuple, heads: tuple
) -> PartitionSpec:
    """The spec of [batch, sequence, heads, head_dim]: by type on Explicit axes, else as named."""
    typed, explicit = typed_spec(x), explicit_axes(mesh)
    entries = []
    for dimension, (what, named) in enumerate(
        (("batch", batch), ("sequence", names), ("heads", heads), ("head_dim", ()))
    ):
        by_type = typed[dimension]
        entry = tuple(name for name in named if name not in explicit or name in by_type)
        unnamed = set(by_type) - set(named)
        if unnamed and (named or dimension in (1, 3)):
            raise ValueError(
                f"{what} of {jax.typeof(x)} is sharded over {as_entry(by_type)!r}; the call says "
                f"{as_entry(named)!r}: name the axes that the array is sharded over"
            )
        if dimension == 1 and entry != named:
            raise ValueError(
                f"the sequence of {jax.typeof(x)} is not sharded over {as_entry(named)!r}, whose "
                "type is Explicit: use jax.sharding.reshard first"
            )
        entries.append(as_entry(entry or by_type))
    return PartitionSpec(*entries)
