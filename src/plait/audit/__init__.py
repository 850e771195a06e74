"""Compile a function for a topology that need not be there, and read what the compiler made.

The compilers of XLA run without their hardware: libtpu describes any TPU slice, jax's CUDA plugin
any NVIDIA host. `compile_for` compiles a jitted function for one and gives a `Report`, whose
`require` states in a test what the program must be. Everything is static: nothing is run.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from plait.audit.floors import moved_tokens
from plait.audit.hlo import Module
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
      *avals: its arguments, trees of `jax.ShapeDtypeStruct`s or arrays, of which only shape and
        dtype are used; a `ShapeDtypeStruct` keeps its sharding.
      mesh: a mesh over the topology's devices, or sizes of axes by name to make one of, whose
        axes are Auto. It is in context (`jax.set_mesh`) while the function is traced.
      in_specs: how the arguments are laid out over the mesh: a `PartitionSpec`, or a sequence of
        one for each argument. Without a mesh, everything is on the topology's first device.
      out_specs: the same for the results; without it the compiler chooses.
      network_floor_bytes: what must leave a device, for the report's ratio; of a relayout
        `moved_tokens` says how many tokens that is.
      unknown_turns: how often to count a loop whose length is data, such as the one over the
        blocks that `plait.attention` visits.

    Returns:
      The `Report`.

    Raises:
      ValueError: an unknown topology, specs without a mesh, a mesh larger than the topology.
      ImportError: what compiles for it, or reads the program, is not installed.

    >>> import jax.numpy as jnp
    >>> x = jax.ShapeDtypeStruct((8, 4), jnp.float32)
    >>> report = compile_for("cpu", lambda x: x[::-1] + 1, x)
    >>> report.require(gathers=0, collectives=0).floor_bytes
    256
    """
    target = topology(target) if isinstance(target, str) else target
    if isinstance(mesh, Mapping):
        mesh = target.mesh(mesh)
    if mesh is None and (in_specs is not None or out_specs is not None):
        raise ValueError(
            "specs are given without a mesh; they need the sizes of its axes, such as "
            f"mesh={{'context': {len(target.devices)}}}"
        )
    if in_specs is None or isinstance(in_specs, PartitionSpec):
        in_specs = (in_specs,) * len(avals)
    elif len(in_specs) != len(avals):
        raise ValueError(
            f"in_specs has {len(in_specs)} entries for {len(avals)} arguments; it needs one for "
            "each, or one PartitionSpec for all"
        )
    arguments = [
        jax.tree.map(lambda x, spec=spec: _place(x, spec, mesh, target), aval)
        for aval, spec in zip(avals, in_specs, strict=True)
    ]
    jitted = fn if hasattr(fn, "lower") else jax.jit(fn)
    if mesh is not None and out_specs is not None:
        if hasattr(fn, "lower"):
            raise ValueError("out_specs is given for a jitted function: say it to jax.jit instead")
        is_spec = lambda x: isinstance(x, PartitionSpec)  # noqa: E731
        laid_out = jax.tree.map(lambda s: NamedSharding(mesh, s), out_specs, is_leaf=is_spec)
        jitted = jax.jit(fn, out_shardings=laid_out)
    if mesh is None:
        compiled, seconds = _compile(jitted, arguments)
    else:
        with jax.set_mesh(mesh):
            compiled, seconds = _compile(jitted, arguments)
    return read_compiled(
        compiled,
        target,
        network_floor_bytes=network_floor_bytes,
        unknown_turns=unknown_turns,
        compile_seconds=seconds,
    )


def _compile(jitted: Any, arguments: list[Any]) -> tuple[Any, float]:
    lowered = jitted.lower(*arguments)
    start = time.perf_counter()
    return lowered.compile(), time.perf_counter() - start


def _place(x: Any, spec: PartitionSpec | None, mesh: Mesh | None, target: Topology) -> Any:
    given = getattr(x, "sharding", None) if isinstance(x, jax.ShapeDtypeStruct) else None
    sharding: Any = given
    if spec is not None or given is None:
        if mesh is not None:
            sharding = NamedSharding(mesh, PartitionSpec() if spec is None else spec)
        else:
            sharding = SingleDeviceSharding(target.devices[0])
    dtype = x.dtype if hasattr(x, "dtype") else jax.numpy.result_type(x)
    return jax.ShapeDtypeStruct(jax.numpy.shape(x), dtype, sharding=sharding)


def read_compiled(
    compiled: Any,
    target: Topology,
    *,
    network_floor_bytes: int | None = None,
    unknown_turns: int = 1,
    compile_seconds: float | None = None,
) -> Report:
    """The report of what `jax.jit(f).lower(...).compile()` gave for a topology.

    Raises:
      ImportError: protobuf, with which the program is read, is not installed.

    >>> compiled = jax.jit(lambda x: x + 1).lower(jax.numpy.zeros(4)).compile()
    >>> read_compiled(compiled, topology("cpu")).counts["add"]
    1
    """
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
