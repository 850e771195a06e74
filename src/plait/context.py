"""One handle for the facts that every call needs: layout, mesh axes of sequence, batch, heads."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh

from plait import exchange, padding
from plait.attention import Strategy, attention
from plait.attention.kernels import Kernel
from plait.layout import Layout
from plait.lookahead import lookahead
from plait.mask import Mask
from plait.mesh import AnyMesh, AxisName, as_entry, as_names
from plait.placing import device_put
from plait.positions import source_positions
from plait.reduce import sum_and_count
from plait.select import select
from plait.tree import Axis


@dataclasses.dataclass(frozen=True, init=False)
class ContextParallel:
    """The facts of context parallelism, said once; its methods are the library.

    Frozen and hashable, so that it can be a static argument of `jax.jit` or a field of a module.
    Every method is a free function of the same name with these facts filled in; the functions
    state shapes, errors and what is communicated.

    Methods may be called inside `jax.shard_map`, on this rank's shards, and outside, on global
    arrays; the sequence length is always the global one.

    Args:
      layout: the layout of the sequence axis.
      axis_name: the mesh axis that the sequence is sharded over, or a tuple of axes, major first.
        None: one device holds the whole sequence.
      batch_axes, head_axes: the mesh axes of batch and heads, which attention needs to know.

    >>> import numpy as np
    >>> from plait import Zigzag
    >>> cp = ContextParallel(Zigzag(2))
    >>> batch = {"tokens": np.arange(8)[None], "step": np.array(3)}
    >>> cp.reorder(batch, axis={"tokens": 1, "step": None})["tokens"]
    array([[0, 1, 6, 7, 2, 3, 4, 5]])
    """

    layout: Layout
    axis_name: AxisName | None
    batch_axes: tuple[str, ...]
    head_axes: tuple[str, ...]

    def __init__(
        self,
        layout: Layout,
        axis_name: AxisName | None = None,
        *,
        batch_axes: AxisName | None = (),
        head_axes: AxisName | None = (),
    ) -> None:
        if not isinstance(layout, Layout):
            raise TypeError(f"layout is {layout!r}; it needs to be a layout, such as Zigzag(8)")
        names, batch, heads = as_names(axis_name), as_names(batch_axes), as_names(head_axes)
        used = (*names, *batch, *heads)
        if len(set(used)) != len(used):
            raise ValueError(
                f"axis_name {as_entry(names)!r}, batch_axes {batch!r} and head_axes {heads!r} "
                "share a mesh axis; each axis can shard one of them"
            )
        object.__setattr__(self, "layout", layout)
        object.__setattr__(self, "axis_name", as_entry(names))
        object.__setattr__(self, "batch_axes", batch)
        object.__setattr__(self, "head_axes", heads)

    def to_dict(self) -> dict[str, Any]:
        """Plain data (JSON types) from which `from_dict` makes an equal handle."""
        return {
            "layout": self.layout.to_dict(),
            "axis_name": list(as_names(self.axis_name)),
            "batch_axes": list(self.batch_axes),
            "head_axes": list(self.head_axes),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ContextParallel:
        """The handle that `to_dict` described.

        >>> from plait import Zigzag
        >>> cp = ContextParallel(Zigzag(8), "context", batch_axes="data")
        >>> ContextParallel.from_dict(cp.to_dict()) == cp
        True
        """
        known = {"layout", "axis_name", "batch_axes", "head_axes"}
        if set(data) != known:
            raise ValueError(
                f"the keys are {sorted(data)}; a ContextParallel needs {sorted(known)}"
            )
        return cls(
            Layout.from_dict(data["layout"]),
            tuple(data["axis_name"]),
            batch_axes=tuple(data["batch_axes"]),
            head_axes=tuple(data["head_axes"]),
        )

    def reorder(
        self, tree: Any, axis: Axis = 1, *, mesh: AnyMesh | None = None, local: bool = False
    ) -> Any:
        """Carry every leaf from source order to the layout; see `plait.reorder`."""
        return exchange.reorder(
            tree, self.layout, axis=axis, axis_name=self.axis_name, mesh=mesh, local=local
        )

    def restore(
        self, tree: Any, axis: Axis = 1, *, mesh: AnyMesh | None = None, local: bool = False
    ) -> Any:
        """Carry every leaf from the layout to source order; see `plait.restore`."""
        return exchange.restore(
            tree, self.layout, axis=axis, axis_name=self.axis_name, mesh=mesh, local=local
        )

    def relayout(
        self,
        tree: Any,
        to: Layout,
        axis: Axis = 1,
        *,
        mesh: AnyMesh | None = None,
        local: bool = False,
    ) -> Any:
        """Carry every leaf from the layout to another; see `plait.relayout`."""
        return exchange.relayout(
            tree, self.layout, to, axis=axis, axis_name=self.axis_name, mesh=mesh, local=local
        )

    def all_gather(
        self,
        tree: Any,
        axis: Axis = 1,
        order: Literal["source", "layout"] = "source",
        *,
        mesh: AnyMesh | None = None,
        local: bool = False,
    ) -> Any:
        """The whole of every leaf on every rank, in source order; see `plait.all_gather`."""
        return exchange.all_gather(
            tree,
            self.layout,
            axis=axis,
            axis_name=self.axis_name,
            order=order,
            mesh=mesh,
            local=local,
        )

    def lookahead(
        self,
        x: Any,
        by: int = 1,
        axis: int = 1,
        *,
        segment_ids: Any = None,
        fill: Any = None,
        mesh: AnyMesh | None = None,
        local: bool = False,
    ) -> Any:
        """The value of x `by` positions on, in the place of each; see `plait.lookahead`."""
        return lookahead(
            x,
            self.layout,
            by,
            axis=axis,
            segment_ids=segment_ids,
            fill=fill,
            axis_name=self.axis_name,
            mesh=mesh,
            local=local,
        )

    def select(
        self,
        x: Any,
        source_positions: Any,
        axis: int = 1,
        *,
        mesh: AnyMesh | None = None,
        local: bool = False,
    ) -> Any:
        """The rows of x at some source positions, on every rank; see `plait.select`."""
        return select(
            x,
            source_positions,
            self.layout,
            axis=axis,
            axis_name=self.axis_name,
            mesh=mesh,
            local=local,
        )

    def device_put(
        self, tree: Any, mesh: Mesh, axis: Axis = 1, *, source_positions: Any = None
    ) -> Any:
        """A host's batch as global arrays in the order of the layout; see `plait.device_put`."""
        return device_put(
            tree,
            self.layout,
            mesh,
            axis=axis,
            axis_name=self.axis_name,
            batch_axes=self.batch_axes,
            source_positions=source_positions,
        )

    def pad(self, tree: Any, fill: Any, axis: Axis = 1) -> Any:
        """Every leaf, in source order, padded to a length that the layout accepts."""
        return padding.pad(tree, self.layout, fill, axis=axis)

    def unpad(self, tree: Any, sequence_length: int, axis: Axis = 1) -> Any:
        """Every leaf, in source order, cut to its first tokens: undoes `pad`."""
        return padding.unpad(tree, sequence_length, axis=axis)

    def sum_and_count(
        self, values: jax.Array, mask: jax.Array | None = None, *, local: bool = False
    ) -> tuple[jax.Array, jax.Array]:
        """The sum over the tokens of all ranks and their number; see `plait.sum_and_count`."""
        return sum_and_count(
            values,
            mask,
            axis_name=self.axis_name,
            batch_axes=self.batch_axes,
            local=local,
        )

    def attention(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
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
        """Exact attention over the sequence; see `plait.attention`."""
        return attention(
            q,
            k,
            v,
            self.layout,
            axis_name=self.axis_name,
            batch_axes=self.batch_axes,
            head_axes=self.head_axes,
            mask=mask,
            segment_ids=segment_ids,
            source_positions=source_positions,
            strategy=strategy,
            kernel=kernel,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
            mesh=mesh,
            local=local,
        )

    def source_positions(self, sequence_length: int) -> np.ndarray | jax.Array:
        """The source position of every slot, or of this rank's; see `plait.source_positions`."""
        return source_positions(self.layout, sequence_length, axis_name=self.axis_name)
