"""A function of a batch at one rank and at several, in every layout: does it give the same?"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from plait.context import ContextParallel
from plait.exchange import reorder, restore
from plait.layout import Contiguous, HalfSwap, Layout, Striped, Zigzag, at_least_one
from plait.mesh import AxisName, as_entry, as_names, check_ranks
from plait.testing.difference import difference
from plait.tree import Axis, as_axis, broadcast_prefix, map_axis, path_name

KINDS = (Contiguous, Zigzag, HalfSwap, Striped)
RANKS_OF_ONE_DEVICE = 8


def assert_layout_invariant(
    fn: Callable[[ContextParallel, Any], Any],
    batch: Any,
    *,
    axis: Axis = 1,
    out_axis: Axis | Literal["auto"] = "auto",
    layouts: Sequence[Layout] | None = None,
    ranks: int | None = None,
    mesh: Mesh | None = None,
    axis_name: AxisName | None = "context",
    batch_axes: AxisName | None = (),
    head_axes: AxisName | None = (),
    rtol: float | None = None,
    atol: float | None = None,
) -> None:
    """Assert that a loss, a layer or a model gives the same at one rank and at several.

    `fn(cp, batch)` is compiled and run once on one device, in source order, and once for each
    layout, with that layout's handle and the batch in its order, sharded over its ranks. What it
    returns is compared, output by output. So let it return every layer's output, in order: the
    first that differs is the faulty one. Gradients are outputs like others. That `fn` is right at
    one rank is taken for granted.

    Args:
      fn: a function of a `ContextParallel` and a batch that `jax.jit` can trace. It returns a
        pytree of arrays. The mesh is in context (`jax.set_mesh`).
      batch: a pytree in source order, whose sequences all have the same length.
      axis: the sequence axis of its leaves, as in `reorder`; None for a leaf without one, which
        every device gets whole, or as it is if it is no array.
      out_axis: the sequence axis of the outputs, or a pytree prefix of axes; None for what has
        none and is compared as it is. "auto": the axis of the batch where that is one number, else
        1, for the outputs that are as long as the sequence there, and None for the others.
      layouts: the layouts to try. None: Contiguous, Zigzag, HalfSwap and Striped of `ranks`.
      ranks: the number of ranks of these. None: the ranks of `mesh`, or as many as there are
        devices (at most 8 without `axis_name`) and as the sequence can be cut into.
      mesh: the mesh to run on; the batch is sharded along the sequence alone. None: a mesh of this
        process's devices with one Auto axis. One device runs on a mesh of the same axes.
      axis_name, batch_axes, head_axes: those of the handle that `fn` gets. `axis_name=None` needs
        one device only: it holds the whole sequence, in the order of the layout.
      rtol, atol: floats agree where |found - wanted| <= atol + rtol * |wanted|, where both are NaN
        and where both are the same infinity; other dtypes need to be equal. Default of rtol: 1e-4
        or four times the precision (eps) of the output's dtype, whichever is more; a float32
        output of a bfloat16 model needs more than that. Default of atol: rtol times the root mean
        square of the output, in which no value counts for more than 1000 times the median.

    Raises:
      AssertionError: the first output that differs, by name, with the layout, the first source
        position that differs, both values, and how much differs where.
      ValueError: too few devices, sequences that no number of ranks divides, an output that has
        no such axis, no outputs at all.

    >>> def right(cp, batch):
    ...     return {"previous": cp.lookahead(batch["x"], -1, fill=0.0), "sum": batch["x"].sum()}
    >>> def wrong(cp, batch):
    ...     return {"previous": jnp.roll(batch["x"], 1, axis=1).at[:, 0].set(0)}
    >>> batch = {"x": np.arange(16, dtype=np.float32)[None]}
    >>> assert_layout_invariant(right, batch, ranks=2, axis_name=None)
    >>> assert_layout_invariant(wrong, batch, ranks=2, axis_name=None)
    Traceback (most recent call last):
    AssertionError: output 'previous' in Zigzag(2) differs from one rank's: at source position 4 \
(slot 8, rank 1), index [0, 4], it is 15.0 and should be 3.0; 2 of 16 values differ, by up to 12, \
at source positions 4 and 12 (rtol 0.0001, atol 0.000796)
    """
    names = as_names(axis_name)
    length = _sequence_length(batch, axis)
    wanted_layouts = _layouts(layouts, ranks, mesh, names, length)
    if all(layout.ranks == 1 for layout in wanted_layouts):
        raise ValueError(
            "every layout has 1 rank, which leaves nothing to differ; at least 2 are needed: more "
            "devices, or axis_name=None and ranks=2"
        )
    handles = [
        ContextParallel(layout, axis_name, batch_axes=batch_axes, head_axes=head_axes)
        for layout in (Contiguous(1), *wanted_layouts)
    ]
    runs = (
        _run(fn, cp, batch, axis, out_axis, length, _mesh_of(cp.layout, mesh, names))
        for cp in handles
    )
    wanted = next(runs)
    if not wanted:
        raise ValueError("fn returned no arrays, so that there is nothing to compare")
    for layout, found in zip(wanted_layouts, runs, strict=True):
        paths = [[output.name for output in outputs] for outputs in (wanted, found)]
        if paths[0] != paths[1]:
            raise AssertionError(
                f"fn returned {', '.join(paths[1]) or 'nothing'} in {layout!r} and "
                f"{', '.join(paths[0])} at one rank"
            )
        for one, other in zip(wanted, found, strict=True):
            message = difference(one.value, other.value, layout, one.axis, rtol, atol)
            if message is None:
                continue
            hint = (
                "; it was compared as it is: if one of its axes is the sequence, say so by out_axis"
                if one.axis is None and length in one.value.shape
                else ""
            )
            raise AssertionError(f"{one.name} in {layout!r} {message}{hint}")


@dataclasses.dataclass(frozen=True)
class _Output:
    """One array that fn returned, on the host and in source order."""

    name: str
    axis: int | None
    value: np.ndarray


def _run(
    fn: Callable[[ContextParallel, Any], Any],
    cp: ContextParallel,
    batch: Any,
    axis: Axis,
    out_axis: Axis,
    length: int,
    mesh: Mesh | None,
) -> list[_Output]:
    leaves, structure = jax.tree.flatten(batch)
    axes = broadcast_prefix(axis, batch, "axis")
    arrays = {
        place: _laid_out(leaf, axis, cp, mesh)
        for place, (leaf, axis) in enumerate(zip(leaves, axes, strict=True))
        if isinstance(leaf, jax.Array | np.ndarray | np.generic)
    }
    auto = axis if isinstance(axis, int) else 1
    returned: list[tuple[str, int | None]] = []

    def traced(arrays: dict[int, jax.Array]) -> list[jax.Array]:
        given = [arrays.get(place, leaf) for place, leaf in enumerate(leaves)]
        outputs = fn(cp, jax.tree.unflatten(structure, given))
        returned[:], values = _outputs(outputs, out_axis, auto, length)
        return values

    with jax.set_mesh(mesh) if mesh else contextlib.nullcontext():
        values = jax.jit(traced)(arrays)
    found = []
    for (name, of_sequence), value in zip(returned, values, strict=True):
        on_host = np.asarray(value)
        if of_sequence is not None:
            on_host = restore(on_host, cp.layout, axis=of_sequence)
        found.append(_Output(name, of_sequence, on_host))
    return found


def _laid_out(leaf: Any, axis: int | None, cp: ContextParallel, mesh: Mesh | None) -> Any:
    if axis is not None:
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        leaf = reorder(leaf if is_key else np.asarray(leaf), cp.layout, axis=axis)
    if mesh is None:
        return leaf
    before = [None] * (0 if axis is None else axis % leaf.ndim)
    spec = PartitionSpec() if axis is None else PartitionSpec(*before, cp.axis_name)
    return jax.device_put(leaf, NamedSharding(mesh, spec))


def _outputs(
    outputs: Any, out_axis: Axis, auto: int, length: int
) -> tuple[list[tuple[str, int | None]], list[jax.Array]]:
    """Name and sequence axis of every output, and the outputs, in the order of dicts as written."""
    by_name = {}
    if not isinstance(out_axis, str):
        paths = jax.tree.leaves_with_path(outputs)
        axes = broadcast_prefix(out_axis, outputs, "out_axis")
        by_name = {path: axis for (path, _), axis in zip(paths, axes, strict=True)}
    elif out_axis != "auto":
        raise ValueError(f"out_axis is {out_axis!r}; it needs to be axes or 'auto'")
    described, values = [], []
    for path, value in _leaves_as_written(outputs):
        name = f"output {path_name(path)}" if path else "the output"
        if not isinstance(value, jax.Array | np.ndarray | np.generic | int | float | complex):
            raise TypeError(f"{name} is a {type(value).__name__}; an array is needed")
        value = jnp.asarray(value)
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            value = jax.random.key_data(value)
        if not by_name:
            fits = -value.ndim <= auto < value.ndim and value.shape[auto] == length
            axis = auto % value.ndim if fits else None
        elif (axis := by_name[path]) is not None:
            axis = as_axis(axis, value.ndim, name, may_pass=True)
            if value.shape[axis] != length:
                raise ValueError(
                    f"axis {axis} of {name} has length {value.shape[axis]}; the sequence "
                    f"has {length}: in out_axis an output without a sequence needs None"
                )
        described.append((name, axis))
        values.append(value)
    return described, values


def _leaves_as_written(tree: Any, path: tuple = ()) -> Iterator[tuple[tuple, Any]]:
    """Leaves with their paths; dicts as they were filled, layer by layer, where jax sorts keys."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _leaves_as_written(value, (*path, jax.tree_util.DictKey(key)))
        return
    for below, value in jax.tree.leaves_with_path(tree, is_leaf=lambda x: isinstance(x, dict)):
        if isinstance(value, dict):
            yield from _leaves_as_written(value, (*path, *below))
        else:
            yield (*path, *below), value


def _sequence_length(batch: Any, axis: Axis) -> int:
    lengths: dict[str, int] = {}

    def note(leaf: Any, axis: int, name: str) -> Any:
        lengths[name] = leaf.shape[axis]
        return leaf

    map_axis(note, batch, axis)
    if not lengths:
        raise ValueError(
            "no leaf of the batch has a sequence axis; at least one needs an axis that is not None"
        )
    (first, length), *others = lengths.items()
    for name, other in others:
        if other != length:
            raise ValueError(
                f"the sequence of {name} has length {other} and that of {first} has {length}; "
                "they need to be equal: give a leaf without that sequence the axis None"
            )
    return length


def _layouts(
    layouts: Sequence[Layout] | None,
    ranks: int | None,
    mesh: Mesh | None,
    names: tuple[str, ...],
    length: int,
) -> list[Layout]:
    if layouts is not None:
        chosen = [] if isinstance(layouts, Layout) else list(layouts)
        if ranks is not None:
            raise ValueError("both layouts and ranks were given; layouts know their ranks")
        if not chosen or not all(isinstance(layout, Layout) for layout in chosen):
            raise TypeError(f"layouts is {layouts!r}; it needs layouts, such as [Zigzag(4)]")
        return chosen
    if mesh is not None and names:
        ranks = _ranks_of(mesh, names) if ranks is None else ranks
    if ranks is not None:
        return [kind(at_least_one("ranks", ranks)) for kind in KINDS]
    most = len(jax.local_devices()) if names else RANKS_OF_ONE_DEVICE
    if most == 1:
        raise ValueError(_too_few(2, 1))
    for number in range(most, 1, -1):
        if length % (2 * number) == 0:
            return [kind(number) for kind in KINDS]
    nearest = min(-(-length // (2 * n)) * 2 * n for n in range(2, most + 1))
    raise ValueError(
        f"the sequence has length {length}; zigzag and half swap over n ranks need a multiple of "
        f"2n, and none of 2 to {most} ranks fits: {nearest} tokens would do, or other layouts="
    )


def _ranks_of(mesh: Mesh, names: tuple[str, ...]) -> int:
    missing = [name for name in names if name not in mesh.axis_names]
    if missing:
        raise ValueError(
            f"the mesh has axes {list(mesh.axis_names)}, and axis_name is {as_entry(names)!r}: "
            "axis_name needs to be one of them, or a tuple of some"
        )
    return math.prod(mesh.shape[name] for name in names)


def _mesh_of(layout: Layout, mesh: Mesh | None, names: tuple[str, ...]) -> Mesh | None:
    """A mesh with a device for each rank: `mesh`, or for one rank a mesh of its axes."""
    ranks = layout.ranks
    if mesh is not None and names:
        size = _ranks_of(mesh, names)
        if ranks == 1 < size:
            one = mesh.devices.reshape(-1)[:1].reshape((1,) * mesh.devices.ndim)
            return Mesh(one, mesh.axis_names, axis_types=mesh.axis_types)
        check_ranks(layout, size, names)
        return mesh
    if mesh is not None or not names:
        return mesh
    if len(names) > 1:
        raise ValueError(f"axis_name is {names!r}; a sequence over several axes needs mesh=")
    devices = jax.local_devices()
    if len(devices) < ranks:
        raise ValueError(_too_few(ranks, len(devices)))
    return Mesh(np.array(devices[:ranks]), names)


def _too_few(needed: int, there: int) -> str:
    return (
        f"{needed} ranks need {needed} devices and {there} "
        f"{'is' if there == 1 else 'are'} here: the environment variable "
        f"XLA_FLAGS=--xla_force_host_platform_device_count={max(8, needed)} gives "
        f"{max(8, needed)} CPU devices when set before jax starts, and axis_name=None needs one "
        "device only"
    )
