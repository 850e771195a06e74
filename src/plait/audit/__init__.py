"""Compile a function for a topology that need not be there, and read what the compiler made.

The compilers of XLA run without their hardware: libtpu describes any TPU slice, jax's CUDA plugin
any NVIDIA host. `compile_for` compiles a jitted function for one and gives a `Report`, whose
`require` states in a test what the program must be. Everything is static: nothing is run.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from plait.audit.arguments import abstract, check_results
from plait.audit.floors import moved_tokens
from plait.audit.hlo import Module, check_turns
from plait.audit.report import Collective, Operation, Report, RequirementError, read_module
from plait.audit.topology import Topology, topologies, topology

__all__ = [
    "Collective",
    "Operation",
    "Report",
    "RequirementError",
    "Topology",
    "compile_for",
    "moved_tokens",
    "read_compiled",
    "topologies",
    "topology",
]


def compile_for(
    target: str | Topology,
    fn: Any,
    *avals: Any,
    mesh: Mesh | Mapping[str, int] | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
    network_floor_bytes: int | None = None,
    unknown_turns: int = 1,
) -> Report:
    """Compile a function for a topology and read the program of one device.

    Args:
      target: a topology or its name, as `topology` takes it.
      fn: a function, or a jitted one, which keeps its own options.
      *avals: its arguments. What a jitted function declares static goes to it as it is. All else
        is a tree of `jax.ShapeDtypeStruct`s, which keep their shardings, of arrays, of which only
        shape and dtype are used, and of Python numbers, which are scalars of weak type as in any
        call of a jitted function. What is no array, such as a string, is bound by
        `functools.partial` where it is not static.
      mesh: a mesh over the topology's devices, or sizes of axes by name to make one of, whose
        axes are Auto. It is in context (`jax.set_mesh`) while the function is traced.
      in_specs: how the arguments are laid out over the mesh: a `PartitionSpec` for all, or a
        sequence with an entry for each: a `PartitionSpec` or, as for `jax.shard_map`, a tree of
        them that is a prefix of the argument's; None is no spec. Python numbers and static
        arguments have none. Without a mesh, everything is on the topology's first device.
      out_specs: the same for the results, as one tree; without it the compiler chooses.
      network_floor_bytes: what must leave a device, for the report's ratio; of a relayout
        `moved_tokens` says how many tokens that is.
      unknown_turns: how often to count a loop whose length is data, such as the one over the
        blocks that `plait.attention` visits.

    Returns:
      The `Report`.

    Raises:
      ValueError: an unknown topology, specs without a mesh or that do not fit, a mesh larger than
        the topology, a negative `unknown_turns`.
      TypeError: an argument that is no tree of arrays and numbers, such as a bare shape.
      ImportError: what compiles for it, or reads the program, is not installed.

    >>> import jax.numpy as jnp
    >>> x = jax.ShapeDtypeStruct((8, 4), jnp.float32)
    >>> report = compile_for("cpu", lambda x: x[::-1] + 1, x)
    >>> report.require(gathers=0, collectives=0).floor_bytes
    256
    """
    target = _as_topology(target)
    check_turns(unknown_turns)
    mesh = _as_mesh(mesh, target)
    if mesh is None and (in_specs is not None or out_specs is not None):
        raise ValueError(
            "specs are given without a mesh; they need the sizes of its axes, such as "
            f"mesh={{'context': {len(target.devices)}}}"
        )
    if out_specs is not None and hasattr(fn, "lower"):
        raise ValueError("out_specs is given for a jitted function: say it to jax.jit instead")
    arguments = abstract(fn, avals, in_specs, mesh, target)
    with _placed_on(mesh, target, arguments):
        jitted = fn if hasattr(fn, "lower") else jax.jit(fn)
        if mesh is not None and out_specs is not None:
            check_results(out_specs, jitted.trace(*arguments).out_info, mesh)
            is_spec = lambda x: isinstance(x, PartitionSpec)  # noqa: E731
            laid_out = jax.tree.map(lambda s: NamedSharding(mesh, s), out_specs, is_leaf=is_spec)
            jitted = jax.jit(fn, out_shardings=laid_out)
        lowered = jitted.lower(*arguments)
        start = time.perf_counter()
        with _uncached(target):
            compiled = lowered.compile()
        seconds = time.perf_counter() - start
    return read_compiled(
        compiled,
        target,
        network_floor_bytes=network_floor_bytes,
        unknown_turns=unknown_turns,
        compile_seconds=seconds,
    )


def _as_topology(target: Any) -> Topology:
    return target if isinstance(target, Topology) else topology(target)


def _as_mesh(mesh: Any, target: Topology) -> Mesh | None:
    if mesh is None or isinstance(mesh, Mesh):
        return mesh
    if not isinstance(mesh, Mapping):
        raise TypeError(
            f"mesh is {mesh!r}; it needs to be a jax.sharding.Mesh or the sizes of axes by name, "
            f"such as {{'context': {len(target.devices)}}}"
        )
    return target.mesh(mesh)


def _placed_on(mesh: Mesh | None, target: Topology, arguments: list[Any]) -> Any:
    """A context in which a function is compiled for the target, whatever its arguments say."""
    if mesh is not None:
        return jax.set_mesh(mesh)
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(arguments)):
        return contextlib.nullcontext()
    # Numbers alone, or nothing, lie on no device.
    return jax.default_device(target.devices[0])


@contextlib.contextmanager
def _uncached(target: Topology) -> Iterator[None]:
    """What is compiled here for devices that are not there stays out of jax's cache on disk.

    From there jax could not load a TPU's program, which it would say in a warning every time.
    """
    option = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, option)
    if target.chip is not None:
        jax.config.update(option, math.inf)
    try:
        yield
    finally:
        jax.config.update(option, before)


def read_compiled(
    compiled: Any,
    target: str | Topology,
    *,
    network_floor_bytes: int | None = None,
    unknown_turns: int = 1,
    compile_seconds: float | None = None,
) -> Report:
    """The report of what `jax.jit(f).lower(...).compile()` gave for a topology or its name.

    Raises:
      TypeError: what is not compiled.
      ValueError: what is compiled for other devices than the topology's, where it has arguments
        or results that say so.
      ImportError: protobuf, with which the program is read, is not installed.

    >>> compiled = jax.jit(lambda x: x + 1).lower(jax.numpy.zeros(4)).compile()
    >>> read_compiled(compiled, topology("cpu")).counts["add"]
    1
    """
    target = _as_topology(target)
    _check_compiled(compiled)
    _check_devices(compiled, target)
    (module,) = compiled.runtime_executable().hlo_modules()
    costs = compiled.cost_analysis() or {}
    return read_module(
        Module(module.as_serialized_hlo_module_proto(), unknown_turns),
        topology=target.name,
        memory=compiled.memory_analysis(),
        compiler_bytes=costs.get("bytes accessed"),
        clock_hz=target.chip.clock_hz if target.chip else None,
        network_floor_bytes=network_floor_bytes,
        compile_seconds=compile_seconds,
    )


def _check_compiled(compiled: Any) -> None:
    if hasattr(compiled, "runtime_executable"):
        return
    call = ".compile()" if hasattr(compiled, "compile") else ".lower(...).compile()"
    raise TypeError(
        f"compiled is a {type(compiled).__name__}, which is no compiled program; call "
        + (
            f"{call} on it"
            if hasattr(compiled, call[1:].partition("(")[0])
            else f"jax.jit(f){call}"
        )
    )


def _check_devices(compiled: Any, target: Topology) -> None:
    """ValueError where the shardings of a program are known to be of other devices."""
    known = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    devices = {device for sharding in known for device in sharding.device_set}
    kinds = {device.device_kind for device in devices}
    wanted = {device.device_kind for device in target.devices}
    if not kinds <= wanted or len(devices) > len(target.devices):
        raise ValueError(
            f"the program is compiled for {len(devices)} x {', '.join(sorted(kinds))} and "
            f"{target.name} is {len(target.devices)} x {', '.join(sorted(wanted))}; it needs the "
            "topology that it was compiled for"
        )
