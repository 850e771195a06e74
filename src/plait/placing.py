"""From a batch on the host to global arrays in the order of a layout, a slot at a time."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from plait.layout import Layout
from plait.mesh import Axes, AxisName, as_entry, as_names, check_ranks
from plait.tree import Axis, as_int32, map_axis


def device_put(
    tree: Any,
    layout: Layout,
    mesh: Mesh,
    *,
    axis: Axis = 1,
    axis_name: AxisName | None = None,
    batch_axes: AxisName | None = None,
    source_positions: Any = None,
) -> Any:
    """Every leaf of a host's batch, in source order, as a global array in the order of the layout.

    What `reorder` and then `jax.device_put` give, on one host or many; but each host reads only
    the rows and tokens that its own devices hold, and no reordered copy of the batch is made. All
    hosts pass the same batch, or batches that agree where their own devices read.

    Args:
      tree: NumPy arrays, in source order.
      layout: the layout that the results are in.
      mesh: the mesh to put them on.
      axis: the sequence axis, for all leaves or a tree of them.
      axis_name: the mesh axes that the sequence is sharded over; None: every device has all of it.
      batch_axes: the mesh axes that axis 0 is sharded over.
      source_positions: integers [batch, sequence], for layouts that differ from row to row: the
        source position of each slot, which replace those of `layout`.

    Returns:
      The tree of global arrays. A leaf whose axis is None stays as it is.

    Raises:
      ValueError: lengths that the layout or the mesh do not divide, and positions that are not
        each position once, by name.

    >>> import jax
    >>> import numpy as np
    >>> from plait import Zigzag
    >>> mesh = jax.make_mesh((1,), ("context",))
    >>> device_put(np.arange(4)[None], Zigzag(1), mesh, axis_name="context").tolist()
    [[0, 1, 2, 3]]
    """
    names, batch = as_names(axis_name), as_names(batch_axes)
    if names:
        check_ranks(layout, Axes.on(mesh, names).size, names)
    over_rows = Axes.on(mesh, batch).size
    positions = None
    if source_positions is not None:
        positions = _checked_positions(source_positions)

    def put(x: Any, axis: int, name: str) -> jax.Array:
        x = np.asarray(x)
        length = layout.check_length(x.shape[axis], f"axis {axis} of {name}")
        if axis == 0 and (batch or positions is not None):
            raise ValueError(
                f"axis 0 of {name} is the sequence, so it has no batch to shard or to index: it "
                "needs [batch, sequence, ...] and axis 1"
            )
        if axis and x.shape[0] % over_rows:
            raise ValueError(
                f"{name} has {x.shape[0]} rows; it needs a multiple of {over_rows}, the devices of "
                f"mesh axis {as_entry(batch)!r}"
            )
        if positions is not None and positions.shape != (x.shape[0], length):
            raise ValueError(
                f"source_positions has shape {positions.shape}; for {name} of shape {x.shape} it "
                f"needs to be {(x.shape[0], length)}"
            )
        entries = [as_entry(batch) if d == 0 else None for d in range(axis)]
        sharding = NamedSharding(mesh, PartitionSpec(*entries, as_entry(names)))

        def read(index: tuple[slice, ...]) -> np.ndarray:
            part = x[tuple(slice(None) if d == axis else s for d, s in enumerate(index))]
            if positions is None:
                return np.take(part, layout.positions(length)[index[axis]], axis=axis)
            order = positions[index[0], index[axis]]
            shape = [size if d in (0, axis) else 1 for d, size in enumerate(part.shape)]
            shape[axis] = order.shape[1]
            return np.take_along_axis(part, order.reshape(shape), axis=axis)

        return jax.make_array_from_callback(x.shape, sharding, read)

    return map_axis(put, tree, axis)


def _checked_positions(source_positions: Any) -> np.ndarray:
    positions = np.asarray(as_int32(np.asarray(source_positions), "source_positions"))
    if positions.ndim != 2:
        raise ValueError(
            f"source_positions has shape {positions.shape}; it needs to be [batch, sequence]"
        )
    wrong = (np.sort(positions, axis=1) != np.arange(positions.shape[1])).any(axis=1)
    if wrong.any():
        raise ValueError(
            f"row {int(np.argmax(wrong))} of source_positions is not each of the positions 0 to "
            f"{positions.shape[1] - 1} once"
        )
    return positions
