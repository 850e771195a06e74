"""The front door of attention: what is asked is checked here, and laid out over the mesh."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from plait.attention.cost import Shapes, choose_strategy
from plait.attention.kernels import Kernel, Scores, choose_kernel
from plait.attention.strategies import STRATEGIES, Shards, Task, Tokens
from plait.layout import Layout, Striped
from plait.mask import Causal, Mask, check_mask
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
    manual_axes,
    typed_spec,
)
from plait.tree import as_int32

Strategy = Literal["auto", "all_gather", "ring", "ulysses", "usp"]


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
    strategy: Strategy = "all_gather",
    kernel: Kernel | Literal["auto", "blockwise", "flash"] = "auto",
    scale: float | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
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
      strategy: how queries meet the keys of other ranks. "all_gather": every rank gathers all
        keys and values. "ring": they travel from rank to rank, two ranks' keys in memory at most.
        "ulysses": heads are dealt over the ranks, each of which then has all tokens of its heads.
        "usp": heads over the last mesh axis of `axis_name`, a ring over those before it. "auto":
        the one with the least estimate of `plait.choose_strategy`, which says why.
      kernel: "blockwise", pure JAX; "flash", Pallas kernels for TPUs; or a `Blockwise` or `Flash`
        with block sizes. "auto" is "flash" on TPUs where it can be had, else "blockwise";
        `plait.choose_kernel` says why.
      scale: of the scores before softmax; head_dim ** -0.5 by default.
      softcap: scores become softcap * tanh(score / softcap) before they are masked (Gemma 2).
      sinks: float [heads], one more score in each head's softmax, of a key without a value
        (gpt-oss); a token that sees nothing still gets 0.
      mesh: the mesh, where neither `jax.set_mesh` nor the arrays say it.
      local: take the arrays to hold the whole sequence, although the call stands in a manual
        region.

    Returns:
      [batch, sequence, heads, v_head_dim] in the dtype of q, laid out as q is. A token that sees
      nothing gets 0. Reverse-mode derivatives only.

    Communicates, forward and then backward, and segment ids and source positions beside it where
    they are given:

    | strategy     | forward                                       | backward                     |
    | ------------ | --------------------------------------------- | ---------------------------- |
    | "all_gather" | an all-gather of k and of v                   | reduce-scatters of d_k, d_v  |
    | "ring"       | n - 1 permutes of k and of v, overlapped      | as many, and n of d_k, d_v   |
    | "ulysses"    | all-to-alls of q, k and v, and one of out     | the same of their gradients  |
    | "usp"        | as "ulysses" over one axis, "ring" over others | the same                    |

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
        if isinstance(positions, jax.Array):  # narrow ones would wrap in a window
            positions = positions.astype(jnp.int32)
    if not isinstance(layout, Layout):
        raise TypeError(f"layout is {layout!r}; it needs to be a layout, such as Zigzag(8)")
    _check_shapes(q, k, v, ids, positions, mask)
    sinks = _check_sinks(sinks, q)
    scale = q.shape[-1] ** -0.5 if scale is None else _as_float("scale", scale)
    scores = Scores(mask, scale, _as_softcap(softcap))
    call = _Call(layout, scores, kernel, strategy)
    choose_kernel(q, k, v, kernel=kernel)  # raises where there is none of that name
    axes: Axes | None = None
    if inside:
        axes = bound_axes(names)
        check_ranks(layout, axes.size, names)
        _check_strategy(strategy, q, k, names, 1, axes)
        for name, x in (("q", q), ("k", k), ("v", v), ("segment_ids", ids)):
            if x is not None:
                check_shard(jnp.asarray(x), names, name)
        if positions is not None:
            check_shard(jnp.asarray(positions), names, "source_positions")
        _check_manual(q)
        return call.run(q, k, v, ids, positions, sinks, axes)
    batch, heads = as_names(batch_axes), as_names(head_axes)
    if local and manual_axes():
        _check_strategy(strategy, q, k, names, 1, None)
        return call.run(q, k, v, ids, positions, sinks, None)
    if local:
        names = ()
    if len({*names, *batch, *heads}) < len((*names, *batch, *heads)):
        raise ValueError(
            f"axis_name {as_entry(names)!r}, batch_axes {as_entry(batch)!r} and head_axes "
            f"{as_entry(heads)!r} share a mesh axis; each axis can shard one of them"
        )
    if not (names or batch or heads or any(typed_spec(jnp.asarray(q)))):
        _check_strategy(strategy, q, k, names, 1, None)
        return _on_one_device(call)(q, k, v, ids, positions, sinks)
    mesh = find_mesh([q], (*names, *batch, *heads), mesh)
    if names:
        axes = Axes.on(mesh, names)
        check_ranks(layout, axes.size, names)
    specs = [_head_spec(x, mesh, batch, names, heads) for x in (q, k, v)]
    _check_divides(q, k, mesh, specs[0])
    if len({(spec[0], spec[2]) for spec in specs}) > 1:
        raise ValueError(
            f"q, k and v are sharded as {specs[0]}, {specs[1]} and {specs[2]}; batch and heads "
            "need to lie on the same mesh axes in all three"
        )
    over = math.prod(mesh.shape[name] for name in as_names(specs[0][2]))
    _check_strategy(strategy, q, k, names, over, axes)
    ids_spec = PartitionSpec(specs[0][0], specs[0][1])
    positions_spec = None
    if positions is not None:
        positions_spec = ids_spec if positions.ndim == 2 else PartitionSpec(specs[0][1])
        positions = lay_out(positions, mesh, positions_spec)
    if ids is not None:
        ids = lay_out(ids, mesh, ids_spec)
    sinks_spec = PartitionSpec(specs[0][2])
    if sinks is not None:
        sinks = lay_out(sinks, mesh, sinks_spec)
    arguments = (
        *specs,
        None if ids is None else ids_spec,
        positions_spec,
        None if sinks is None else sinks_spec,
    )
    named = {name for entry in specs[0] for name in as_names(entry)}
    vmapped = is_vmapped(mesh, named, (q, k, v, ids, positions, sinks), "attention")
    return _over_mesh(call, axes, mesh, arguments, vmapped)(q, k, v, ids, positions, sinks)


@dataclasses.dataclass(frozen=True)
class _Call:
    """What of a call is known when it is traced."""

    layout: Layout
    scores: Scores
    kernel: Kernel | str
    strategy: str

    def run(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        segment_ids: jax.Array | None,
        positions: jax.Array | None,
        sinks: jax.Array | None,
        axes: Axes | None,
    ) -> jax.Array:
        """On this rank's shard where there are axes, on the whole sequence where there are none."""
        length = q.shape[1] * (1 if axes is None else axes.size)
        keys = (jax.ShapeDtypeStruct((x.shape[0], length, *x.shape[2:]), x.dtype) for x in (k, v))
        kernel, _ = choose_kernel(q, *keys, kernel=self.kernel, fully_manual=_is_fully_manual())
        if positions is None:
            self.layout.check_length(length, "axis 1 of q")
        check_mask(self.scores.mask, length)
        if positions is None:
            kernel = fitted(kernel, self.layout, length)
        real = None if segment_ids is None else (segment_ids != 0)[..., None, None]
        if real is not None:  # what padding holds, NaN too, must reach nobody
            q, k, v = (jnp.where(real, x, 0) for x in (q, k, v))
        task = Task(kernel, self.scores, Shards(self.layout, length, axes))
        strategy = self.strategy
        if axes is None or axes.size == 1:
            strategy = "all_gather"
        elif strategy == "auto":
            strategy = self._cheapest(q, k, v, positions, length, axes)
        out, lse = STRATEGIES[strategy](task, Tokens(q, k, v, segment_ids, positions))
        if sinks is not None:
            out = _with_sinks(out, lse, sinks)
        if real is not None:  # nor may the gradients of what padding gives
            out = jnp.where(real, out, 0)
        return out.astype(q.dtype)

    def _cheapest(self, q: Any, k: Any, v: Any, positions: Any, length: int, axes: Axes) -> str:
        batch, _, heads, head_dim = q.shape
        shapes = Shapes(batch, heads, k.shape[2], head_dim, v.shape[3], q.dtype.itemsize)
        return choose_strategy(
            self.layout,
            length,
            shapes,
            axis_sizes=axes.sizes,
            mask=self.scores.mask,
            positions_are_data=positions is not None,
        ).strategy


def _is_fully_manual() -> bool:
    """Whether every mesh axis is manual here, and there is one."""
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and frozenset(mesh.manual_axes) == frozenset(mesh.axis_names)


def _with_sinks(out: jax.Array, lse: jax.Array, sinks: jax.Array) -> jax.Array:
    """Every head's softmax with one more score in the sum, that of a key without a value."""
    blind = lse == -jnp.inf
    lse = jnp.where(blind, 0.0, lse)
    total = jnp.logaddexp(lse, as_varying(sinks.astype(lse.dtype), jax.typeof(lse).mat.varying))
    return out * jnp.where(blind, 0.0, jnp.exp(lse - total))[..., None]


@functools.lru_cache(maxsize=256)
def _on_one_device(call: _Call) -> Any:
    return jax.jit(functools.partial(call.run, axes=None))


@functools.lru_cache(maxsize=256)
def _over_mesh(call: _Call, axes: Axes | None, mesh: AnyMesh, specs: tuple, vmapped: bool) -> Any:
    run: Any = functools.partial(call.run, axes=axes)

    def body(*arrays: Any) -> jax.Array:
        out = run(*arrays)
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


def fitted(kernel: Kernel, layout: Layout, length: int) -> Kernel:
    """The kernel with blocks that do not straddle the chunks of the layout."""
    per_rank = length // layout.ranks
    if isinstance(layout, Striped):
        return kernel.fitted(per_rank, per_rank)
    chunk = layout.chunk_length(length)
    return kernel.fitted(chunk, chunk)


def _as_float(name: str, value: Any) -> float:
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"{name} is {value}, a traced array; it needs to be a float"
            + (": multiply q by it instead" if name == "scale" else "")
        )
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{name} is {number}; it needs to be a finite float, such as 1.0")
    return number


def _as_softcap(value: Any) -> float | None:
    number = None if value is None else _as_float("softcap", value)
    if number is not None and not number > 0:
        raise ValueError(f"softcap is {number}; it needs to be above 0, such as 50.0, or None")
    return number


def _check_manual(q: jax.Array) -> None:
    sharded = [name for names in typed_spec(q) for name in names]
    if sharded:
        raise ValueError(
            f"q is {jax.typeof(q)}: attention inside jax.shard_map needs a region that is manual "
            f"over {sharded} too"
        )


def _check_strategy(
    strategy: str, q: Any, k: Any, names: tuple[str, ...], heads_over: int, axes: Axes | None
) -> None:
    """ValueError where a strategy cannot serve these heads or mesh axes."""
    if strategy not in ("auto", *STRATEGIES):
        known = ", ".join(map(repr, ("auto", *STRATEGIES)))
        near = difflib.get_close_matches(str(strategy), STRATEGIES, 1, 0)[0]
        raise ValueError(f"strategy is {strategy!r}; it needs to be one of {known}: {near!r}?")
    if axes is None or axes.size == 1 or strategy not in ("ulysses", "usp"):
        return
    if strategy == "usp" and len(names) < 2:
        raise ValueError(
            f"strategy 'usp' deals heads over the last of several mesh axes; axis_name is "
            f"{as_entry(names)!r}: name two, such as ('ring', 'heads'), or use 'ulysses'"
        )
    size = axes.sizes[-1] if strategy == "usp" else axes.size
    heads, over = q.shape[2] // heads_over, names[-1:] if strategy == "usp" else names
    dealt = math.lcm(k.shape[2] // heads_over, size)
    if heads % dealt:
        raise ValueError(
            f"strategy {strategy!r} deals {heads} heads of q with {k.shape[2] // heads_over} of k "
            f"and v over the {size} devices of mesh axis {as_entry(over)!r}; the heads of q need "
            f"to be a multiple of {dealt}, such as {max(1, round(heads / dealt)) * dealt}: or use "
            "'ring'"
        )


def _check_sinks(sinks: Any, q: Any) -> jax.Array | None:
    if sinks is None:
        return None
    sinks = jnp.asarray(sinks)
    if sinks.shape != q.shape[2:3] or not jnp.issubdtype(sinks.dtype, jnp.floating):
        raise ValueError(
            f"sinks has shape {sinks.shape} and dtype {sinks.dtype}; it needs to be a float for "
            f"each of the {q.shape[2]} heads of q"
        )
    return sinks


def _check_shapes(q: Any, k: Any, v: Any, ids: Any, positions: Any, mask: Any) -> None:
    check_mask(mask, 1)
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


def _check_divides(q: Any, k: Any, mesh: AnyMesh, spec: PartitionSpec) -> None:
    batch, names, heads = (as_names(entry) for entry in spec[:3])
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
