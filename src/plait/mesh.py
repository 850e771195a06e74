"""Where a call stands: which mesh axes carry the sequence, and whether they are bound here."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from plait.layout import Layout

AxisName = str | tuple[str, ...]
AnyMesh = Mesh | AbstractMesh


def as_names(axis_name: AxisName | None) -> tuple[str, ...]:
    """Axis names as a tuple, major first; () for None."""
    if axis_name is None:
        return ()
    names = (axis_name,) if isinstance(axis_name, str) else axis_name
    if not isinstance(names, tuple | list):
        names = (names,)
    names = tuple(names)
    if not all(isinstance(name, str) for name in names) or len(set(names)) != len(names):
        raise TypeError(
            f"axis_name is {axis_name!r}; it needs to be a mesh axis name, such as 'context', or "
            "a tuple of different ones, major first"
        )
    return names


@dataclasses.dataclass(frozen=True)
class Axes:
    """The mesh axes that a sequence is sharded over: names, major first, and their sizes.

    `mesh_names` are the same names in the order of the mesh. `ppermute` pays attention to no
    other: over a tuple in another order it moves data between the wrong ranks (jax 0.10) or
    raises (jax 0.12).
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    mesh_names: tuple[str, ...]

    @classmethod
    def on(cls, mesh: AnyMesh, names: tuple[str, ...]) -> Axes:
        sizes = tuple(mesh.shape[name] for name in names)
        return cls(names, sizes, tuple(name for name in mesh.axis_names if name in names))

    @property
    def size(self) -> int:
        return math.prod(self.sizes)

    def split(self) -> tuple[Axes, Axes]:
        """The last axis, and those before it: neighbouring ranks, and the groups of these."""
        return tuple(  # type: ignore[return-value]
            Axes(names, sizes, tuple(name for name in self.mesh_names if name in names))
            for names, sizes in (
                (self.names[-1:], self.sizes[-1:]),
                (self.names[:-1], self.sizes[:-1]),
            )
        )

    def rank(self) -> jax.Array:
        """This device's rank: int32 scalar. Only inside a manual region of these axes."""
        return lax.axis_index(self.names)

    def ppermute(self, x: jax.Array, pairs: Iterable[tuple[int, int]]) -> jax.Array:
        """`lax.ppermute` between ranks, whatever the order of the names."""
        in_mesh = [(self._mesh_index(a), self._mesh_index(b)) for a, b in pairs]
        return lax.ppermute(x, self.mesh_names, in_mesh)

    def _mesh_index(self, rank: int) -> int:
        coordinates = {}
        for name, size in zip(reversed(self.names), reversed(self.sizes), strict=True):
            rank, coordinates[name] = divmod(rank, size)
        index = 0
        for name in self.mesh_names:
            index = index * self.sizes[self.names.index(name)] + coordinates[name]
        return index


def manual_axes() -> frozenset[str]:
    """The mesh axes that the surrounding `shard_map` made manual; empty outside."""
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def is_inside(names: tuple[str, ...], what: str) -> bool:
    """Whether all of `names` are bound by the surrounding `shard_map`.

    ValueError where only some are, where others are and none of these, and where `vmap` bound
    them: permuting within a shard would be a wrong answer with the right shape.
    """
    manual = manual_axes()
    missing = [name for name in names if name not in manual]
    if names and not missing:
        return True
    for name in missing:
        if _is_bound(name):
            raise ValueError(
                f"{what}: axis {name!r} is bound by vmap or pmap, which cannot move tokens "
                "between ranks; it needs to be a mesh axis of jax.shard_map"
            )
    if manual:
        named = f"axis_name {'/'.join(map(repr, names))}" if names else "no axis_name"
        raise ValueError(
            f"{what} was called in a region that is manual over {sorted(manual)} with {named}: "
            + (
                f"add {missing} to the axis_names of that jax.shard_map"
                if missing
                else "name the mesh axis of the sequence, or pass local=True to work within the "
                "shard as if it were the whole"
            )
        )
    return False


def _is_bound(name: str) -> bool:
    try:
        lax.axis_size(name)
    except NameError:
        return False
    return True


def bound_axes(names: tuple[str, ...]) -> Axes:
    """The axes of the surrounding `shard_map`, which `is_inside` has found to be bound."""
    return Axes.on(jax.sharding.get_abstract_mesh(), names)


def of_rank(table: np.ndarray, rank: jax.Array) -> jax.Array:
    """table[rank] on the device: a dynamic slice, where indexing would be a gather."""
    return lax.dynamic_index_in_dim(jnp.asarray(table), rank, keepdims=False)


def check_shard(x: jax.Array, names: tuple[str, ...], what: str) -> None:
    """ValueError where the types say that x is the same on every rank, so that it is no shard.

    A forgotten entry of in_specs would otherwise give a loss over n copies, with right shapes.
    """
    same = [
        name
        for name in names
        if lax.axis_size(name) > 1
        and name in jax.typeof(lax.axis_index(name)).mat.varying  # else check_vma is off
        and name not in jax.typeof(x).mat.varying
    ]
    if same:
        raise ValueError(
            f"{what} is the same on every rank of mesh axis {as_entry(tuple(same))!r}, so it is "
            "not a shard of a sequence: shard its sequence axis in the in_specs of jax.shard_map, "
            "or, if copies are meant, say so with jax.lax.pcast(x, axis, to='varying')"
        )


def lay_out(x: Any, mesh: AnyMesh, spec: PartitionSpec) -> Any:
    """x, a small array that goes with a sharded one, on the Explicit axes that `spec` names."""
    typed = explicit_axes(mesh)
    entries = [tuple(n for n in as_names(entry) if n in typed) for entry in spec]
    x = jnp.asarray(x)
    if not typed or [*entries, *[()] * (x.ndim - len(entries))] == typed_spec(x):
        return x
    return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*map(as_entry, entries))))


def as_varying(x: jax.Array, names: Iterable[str]) -> jax.Array:
    """x as a value that may differ along `names`, as `shard_map`'s check of types asks."""
    missing = tuple(name for name in names if name not in jax.typeof(x).mat.varying)
    return lax.pcast(x, missing, to="varying") if missing else x


def find_mesh(arrays: Iterable[Any], names: tuple[str, ...], mesh: AnyMesh | None) -> AnyMesh:
    """The mesh to run over: `mesh`, the one in context, or the one that an array lies on."""
    found: list[AnyMesh] = [] if mesh is None else [mesh]
    if mesh is None:
        found.append(jax.sharding.get_abstract_mesh())
        for x in arrays:
            if not isinstance(x, jax.core.Tracer) and isinstance(
                getattr(x, "sharding", None), NamedSharding
            ):
                found.append(x.sharding.mesh)
            found.append(jax.typeof(x).sharding.mesh)
    for candidate in found:
        if not candidate.empty and set(names) <= set(candidate.axis_names):
            return candidate
    seen = sorted({name for candidate in found for name in candidate.axis_names})
    raise ValueError(
        f"no mesh with axis {'/'.join(map(repr, names))} was found"
        + (f" (axes seen: {seen})" if seen else "")
        + ": call under jax.set_mesh(mesh), pass arrays that lie on such a mesh already, or pass "
        "mesh="
    )


def is_vmapped(mesh: AnyMesh, named: Iterable[str], arrays: Iterable[Any], what: str) -> bool:
    """Whether `jax.vmap(..., spmd_axis_name=...)` around this call maps over an axis of `mesh`.

    jax cannot check the types of a `shard_map` under such a vmap (0.10 to 0.12: its batching of
    loops forgets that axis), so that the check has to be off there. ValueError under a vmap over
    Explicit axes, which jax takes out of the types and does not let `shard_map` make manual.

    Args:
      named: the axes that the specs of the call name; only others can be vmap's.
      arrays: the arguments; where none is traced there is no vmap.
      what: the operation, for the error.
    """
    others = {name for name in mesh.axis_names if mesh.shape[name] > 1} - set(named)
    if not others or not any(isinstance(x, jax.core.Tracer) for x in arrays):
        return False
    found: list[frozenset[str]] = []

    def probe() -> None:
        # No public name lists vmap's axes, but a region leaves out those that are Explicit, and
        # over the others, what vmap broadcasts counts as varying.
        found.append(frozenset(others) - manual_axes())
        broadcast = jax.vmap(lambda x, y: y, in_axes=(0, None))(jnp.zeros(1), jnp.zeros(()))
        found.append(jax.typeof(broadcast).mat.varying)

    jax.eval_shape(jax.shard_map(probe, mesh=mesh, in_specs=(), out_specs=None))
    explicit, spmd = found
    if explicit:
        name = as_entry(tuple(sorted(explicit)))
        raise ValueError(
            f"{what} was called under jax.vmap over arrays that are sharded over mesh axis "
            f"{name!r}, whose type is Explicit, and needs that axis to be Auto: wrap the function "
            f"that calls vmap in jax.sharding.auto_axes(..., axes={name!r}, out_sharding=...) and "
            f"pass spmd_axis_name={name!r} to jax.vmap"
        )
    return bool(spmd)


def explicit_axes(mesh: AnyMesh) -> frozenset[str]:
    """The axes of `mesh` whose sharding is part of an array's type."""
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return frozenset(name for name, kind in types if kind == AxisType.Explicit)


def typed_spec(x: jax.Array) -> list[tuple[str, ...]]:
    """For each dimension of x, the Explicit mesh axes that its type is sharded over."""
    spec = jax.typeof(x).sharding.spec
    entries = list(spec) + [None] * (x.ndim - len(spec))
    return [as_names(entry) for entry in entries]


def sharded_spec(x: jax.Array, axis: int, names: tuple[str, ...], mesh: AnyMesh) -> PartitionSpec:
    """The spec of x inside a `shard_map` that is manual over `names` and every Explicit axis.

    ValueError where Explicit axis types say that `axis` is not sharded over `names`.
    """
    entries = typed_spec(x)
    typed = explicit_axes(mesh) & set(names)
    if typed and typed != set(names):
        raise ValueError(
            f"of the mesh axes {names!r} only {sorted(typed)} are Explicit; all axes of the "
            "sequence need the same axis type, such as Auto"
        )
    if typed and entries[axis] != names:
        wanted = [as_entry(entry) for entry in entries]
        wanted[axis] = as_entry(names)
        raise ValueError(
            f"axis {axis} of {jax.typeof(x)} is not sharded over {as_entry(names)!r}, whose type "
            f"is Explicit: use jax.sharding.reshard(x, P{tuple(wanted)!r}) first"
        )
    entries[axis] = names
    return PartitionSpec(*map(as_entry, entries))


def manual_for(spec: PartitionSpec, names: tuple[str, ...]) -> frozenset[str]:
    """The axes to make manual: those of the sequence, and those that the type is sharded over.

    Explicit axes that the type does not name stay out: inside `jax.vmap` they may be the batch's.
    """
    return frozenset(names).union(*(as_names(entry) for entry in spec))


def as_entry(names: tuple[str, ...]) -> AxisName | None:
    """One entry of a PartitionSpec."""
    return names[0] if len(names) == 1 else names or None


def check_ranks(layout: Layout, size: int, names: tuple[str, ...]) -> None:
    """ValueError where the mesh axes do not have as many devices as the layout has ranks."""
    if layout.ranks != size:
        raise ValueError(
            f"{layout!r} has {layout.ranks} ranks and mesh axis {as_entry(names)!r} has {size} "
            f"devices; they need to be equal: use a layout of {size} ranks"
        )


def check_apart(**axes: tuple[str, ...]) -> None:
    """ValueError where two of the arguments, by name, hold the same mesh axis."""
    names = [name for given in axes.values() for name in given]
    if len(set(names)) < len(names):
        said = " and ".join(f"{what} {as_entry(given)!r}" for what, given in axes.items())
        raise ValueError(f"{said} share a mesh axis; each axis can shard one of them")


def check_manual(x: jax.Array, name: str, what: str) -> None:
    """ValueError where x, inside a region, is still sharded over Explicit axes by its type."""
    sharded = [axis for axes in typed_spec(x) for axis in axes]
    if sharded:
        raise ValueError(
            f"{name} is {jax.typeof(x)}: {what} inside jax.shard_map needs a region that is manual "
            f"over {sharded} too"
        )


def check_whole(x: jax.Array, axis: int, name: str) -> None:
    """ValueError where a local move is asked of an axis that is known to be sharded."""
    sharding = jax.typeof(x).sharding
    if not isinstance(x, jax.core.Tracer) and isinstance(x.sharding, NamedSharding):
        sharding = x.sharding
    spec = sharding.spec
    over = spec[axis] if axis < len(spec) else None
    if over and any(sharding.mesh.shape[a] > 1 for a in as_names(over)):
        raise ValueError(
            f"axis {axis} of {name} is sharded over {over!r} and no axis_name was given: pass "
            f"axis_name={over!r}"
        )
