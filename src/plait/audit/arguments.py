"""What a function is compiled with: its arguments as avals, laid out as specs say."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from plait.audit.topology import Topology
from plait.mesh import as_names
from plait.tree import broadcast_prefix, path_name

_NUMBERS = (bool, int, float, complex)


class SpecError(ValueError):
    """A `PartitionSpec` that does not fit the array that it is given for."""


def abstract(
    fn: Any, avals: Sequence[Any], in_specs: Any, mesh: Mesh | None, target: Topology
) -> list[Any]:
    """The arguments to lower a function with, by the rule that `compile_for` states."""
    static = _static_positions(fn, len(avals))
    placed = []
    for position, (aval, specs) in enumerate(zip(avals, _each(in_specs, avals), strict=True)):
        what = f"argument {position}"
        if position in static:
            placed.append(aval)
            continue
        paths, structure = jax.tree.flatten_with_path(aval, is_leaf=_is_shape)
        names = [f"{path_name(path)} of {what}" if path else what for path, _ in paths]
        leaves = [
            _leaf(x, spec, mesh, target, name, fn)
            for (_, x), spec, name in zip(paths, spread(specs, aval, what), names, strict=True)
        ]
        placed.append(jax.tree.unflatten(structure, leaves))
    return placed


def spread(specs: Any, tree: Any, what: str) -> list[PartitionSpec | None]:
    """For each leaf of a tree, the spec of a prefix of the tree; None is no spec."""
    try:
        found = broadcast_prefix(specs, tree, f"the spec of {what},", is_leaf=_is_shape)
    except ValueError as error:
        reason = str(error).replace("\n", " ").rstrip(".")
        raise SpecError(f"{reason}; one PartitionSpec for all of it works") from None
    for spec in found:
        if spec is not None and not isinstance(spec, PartitionSpec):
            raise TypeError(
                f"the spec of {what} is {spec!r}; it needs to be a jax.sharding.PartitionSpec, "
                "such as "
                + (f"PartitionSpec({spec!r})" if type(spec) is str else "PartitionSpec()")
            )
    return found


def check_spec(spec: PartitionSpec, shape: Sequence[int], mesh: Mesh, what: str) -> None:
    """SpecError unless an array of this shape can be laid out so."""
    shape = tuple(shape)
    if len(spec) > len(shape):
        raise SpecError(
            f"the spec of {what} is {spec} and its shape {shape}; a spec needs at most one entry "
            f"a dimension: {PartitionSpec(*spec[: len(shape)])} works"
        )
    for axis, entry in enumerate(spec):
        if entry is PartitionSpec.UNCONSTRAINED:
            continue
        names = as_names(entry)
        for name in names:
            if name not in mesh.shape:
                raise SpecError(
                    f"the spec of {what} is {spec}, which names {name!r}; the mesh has "
                    f"{', '.join(map(repr, mesh.axis_names))}"
                )
        over = math.prod(mesh.shape[name] for name in names)
        if shape[axis] % over:
            works = (*shape[:axis], -(-shape[axis] // over) * over, *shape[axis + 1 :])
            raise SpecError(
                f"the spec of {what} is {spec} and its shape {shape}; axis {axis} is split over "
                f"{over} devices and needs a multiple of {over}: {works} works"
            )


def check_results(out_specs: Any, results: Any, mesh: Mesh) -> None:
    """SpecError unless results, a tree of what has a shape, can be laid out so."""
    paths, _ = jax.tree.flatten_with_path(results)
    specs = spread(out_specs, results, "the results")
    for (path, result), spec in zip(paths, specs, strict=True):
        if spec is not None:
            what = f"result {path_name(path)}" if path else "the result"
            check_spec(spec, result.shape, mesh, what)


def _each(in_specs: Any, avals: Sequence[Any]) -> Sequence[Any]:
    """The specs of each argument."""
    if in_specs is None or isinstance(in_specs, PartitionSpec):
        return [in_specs] * len(avals)
    if not isinstance(in_specs, tuple | list):
        nearest = f"PartitionSpec({in_specs!r})" if type(in_specs) is str else f"({in_specs!r},)"
        raise TypeError(
            f"in_specs is {in_specs!r}; it needs to be a PartitionSpec for all arguments or a "
            f"sequence with an entry for each, such as {nearest}"
        )
    if len(in_specs) != len(avals):
        raise ValueError(
            f"in_specs has {len(in_specs)} entries for {len(avals)} arguments; it needs one for "
            "each, or one PartitionSpec for all"
        )
    return in_specs


def _leaf(
    x: Any, spec: PartitionSpec | None, mesh: Mesh | None, target: Topology, what: str, fn: Any
) -> Any:
    if _is_shape(x):
        raise TypeError(
            f"{what} is {x!r}, integers that look like a shape; it needs an array's shape and "
            f"dtype: jax.ShapeDtypeStruct({tuple(x)!r}, dtype)"
        )
    if type(x) in _NUMBERS:
        return x
    if not (hasattr(x, "shape") and hasattr(x, "dtype")):
        if hasattr(fn, "lower") and not _is_jitted(fn):
            return x  # by the rules of who wrapped it
        raise TypeError(
            f"{what} is {x!r}, a {type(x).__name__}; it needs to be an array, a "
            "jax.ShapeDtypeStruct or a number: bind what is static by functools.partial, or "
            "declare it in static_argnums of jax.jit"
        )
    given = x.sharding if isinstance(x, jax.ShapeDtypeStruct) else None
    sharding: Any = given
    if spec is not None or given is None:
        if mesh is not None:
            spec = PartitionSpec() if spec is None else spec
            check_spec(spec, x.shape, mesh, what)
            sharding = NamedSharding(mesh, spec)
        else:
            sharding = SingleDeviceSharding(target.devices[0])
    weak = bool(getattr(x, "weak_type", False))
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding, weak_type=weak)


def _is_shape(x: Any) -> bool:
    return type(x) in (tuple, list) and len(x) > 0 and all(type(n) is int for n in x)


def _is_jitted(fn: Any) -> bool:
    return type(fn) is type(jax.jit(len))


class _Probe:
    """No array, so that no function is traced with it; it knows whether it was hashed."""

    hashed = False

    def __hash__(self) -> int:
        self.hashed = True
        raise TypeError


def _static_positions(fn: Any, count: int) -> set[int]:
    """Which of so many arguments a jitted function declares static.

    Of an argument jit hashes what is static, and refuses before it calls the function what is no
    array otherwise. There is no other way to ask it.
    """
    found = set()
    for position in range(count if _is_jitted(fn) else 0):
        probe = _Probe()
        with contextlib.suppress(TypeError, ValueError):
            fn.trace(*[0] * position, probe, *[0] * (count - position - 1))
        if probe.hashed:
            found.add(position)
    return found
