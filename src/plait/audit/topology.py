"""Topologies to compile for: TPU slices and NVIDIA hosts that need not be there, and local ones."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import os
import platform
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh


@dataclasses.dataclass(frozen=True)
class Chip:
    """What an estimate needs to know of a chip, for what jax calls one device of it.

    `clock_hz` turns the TPU compiler's cycles into seconds; it is the published peak rate over
    the width of the matrix units. `hbm_bytes_per_second` is the published bandwidth. `largest` has
    the sizes of the largest slice there is, or of a host the devices; 0 is any number.
    """

    name: str
    kind: str
    default: str
    largest: tuple[int, ...]
    hbm_bytes_per_second: float
    clock_hz: float | None = None
    gpu_target: str = ""

    def __str__(self) -> str:
        return f"{self.name}:{self.default}"

    def sizes(self, shape: str) -> list[int] | None:
        """The sizes of a shape such as "4x4x8", or None where it has others than the chip's."""
        sizes = [int(s) if s.isdecimal() else 0 for s in shape.split("x")]
        return sizes if len(sizes) == len(self.largest) and min(sizes) > 0 else None

    def fits(self, sizes: list[int]) -> list[int]:
        """The sizes, those that are too large for any slice made smaller."""
        if self.kind == "gpu":
            return [
                min(s, most) if most else s for s, most in zip(sizes, self.largest, strict=True)
            ]
        fitted = list(sizes)
        # A slice may be turned: the smallest size against the smallest of the largest slice.
        ascending = sorted(range(len(sizes)), key=sizes.__getitem__)
        for place, most in zip(ascending, self.largest, strict=True):
            fitted[place] = min(sizes[place], most)
        return fitted

    def near(self, shape: str) -> str:
        """A topology near to one of this chip that there is none of."""
        sizes = self.sizes(shape)
        if self.kind == "gpu" and shape.count("x") < 2:
            sizes = self.sizes("x".join(["1"] * (2 - shape.count("x")) + [shape]))
        if sizes is None:
            return str(self)
        if self.kind == "tpu":  # slices are 1, 2 or a multiple of 4 chips along each dimension
            sizes = [s if s < 3 else max(4, round(s / 4) * 4) for s in sizes]
        return f"{self.name}:{'x'.join(map(str, self.fits(sizes)))}"


def _nvidia(name: str, major: int, cores: int, bandwidth: float, memory: float, ghz: float) -> Chip:
    """A `GpuTargetConfig` of XLA, in so far as the compiler asks for it."""
    target = f"""
gpu_device_info {{
  cuda_compute_capability {{ major: {major} }}
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: 2048
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  core_count: {cores}
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  clock_rate_ghz: {ghz}
  memory_bandwidth: {int(bandwidth)}
  device_memory_size: {int(memory)}
  l2_cache_size: {50 if major == 9 else 126}000000
}}
platform_name: "CUDA"
device_description_str: "NVIDIA {name.upper()}"
"""
    return Chip(name, "gpu", "1x1x8", (0, 0, 8), bandwidth, gpu_target=target)


CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip("v5e", "tpu", "8x16", (16, 16), 0.819e12, 1.5e9),
        Chip("v5p", "tpu", "4x4x8", (16, 16, 24), 2.765e12, 1.75e9),
        Chip("v6e", "tpu", "8x16", (16, 16), 1.64e12, 1.75e9),
        Chip("tpu7x", "tpu", "4x4x4", (16, 24, 24), 3.69e12, 2.2e9),
        _nvidia("h100", 9, 132, 3.35e12, 80e9, 1.98),
        _nvidia("h200", 9, 132, 4.8e12, 141e9, 1.98),
        _nvidia("b200", 10, 148, 8.0e12, 180e9, 1.96),
    )
}
"""By name. A TPU's shape is of its chips; an NVIDIA host's is slices x hosts x devices."""


@dataclasses.dataclass(frozen=True)
class Topology:
    """Devices that a program can be compiled for.

    Make one with `plait.audit.topology`. `chip` is None for devices of the machine itself.
    """

    name: str
    devices: tuple[Any, ...]
    chip: Chip | None = None

    def mesh(self, axes: Mapping[str, int] | None = None) -> Mesh:
        """A mesh of Auto axes over its first devices; by default one axis "context" over all.

        Args:
          axes: the axes' sizes by name, major first.

        Raises:
          TypeError: a size that is no integer.
          ValueError: no axes, a size below 1, axes that need more devices than there are.
        """
        sizes = {"context": len(self.devices)} if axes is None else dict(axes)
        _check_sizes(sizes, len(self.devices))
        needed = int(np.prod(list(sizes.values())))
        if needed > len(self.devices):
            raise ValueError(
                f"a mesh of {sizes} takes {needed} devices and {self.name} has "
                f"{len(self.devices)}; it needs to take from 1 to {len(self.devices)}"
            )
        devices = np.array(self.devices[:needed]).reshape(tuple(sizes.values()))
        return Mesh(devices, tuple(sizes))


def _check_sizes(sizes: Mapping[str, Any], devices: int) -> None:
    if not sizes:
        raise ValueError(
            "the mesh has no axes; it needs the size of at least one by name, such as "
            f"{{'context': {devices}}}"
        )
    for name, size in sizes.items():
        if not isinstance(name, str):
            raise TypeError(
                f"an axis of the mesh is named {name!r}; it needs a string, such as {str(name)!r}"
            )
        what = f"axis {name!r} of the mesh has the size {size!r}; it needs an integer of at least 1"
        if isinstance(size, bool) or not isinstance(size, int | np.integer):
            isnumber = isinstance(size, float) and size == size
            text = isinstance(size, str) and size.isdecimal()
            raise TypeError(f"{what}, such as {max(1, int(size)) if isnumber or text else 1}")
        if size < 1:
            raise ValueError(f"{what}, such as 1")


def topologies() -> tuple[str, ...]:
    """The topologies that `topology` knows, each with its default shape.

    >>> "v5p:4x4x8" in topologies() and "h200:1x1x8" in topologies()
    True
    """
    return (*map(str, CHIPS.values()), "cpu", "local")


def topology(name: str) -> Topology:
    """The topology of a name such as "v5p:4x4x8", "h200:1x8x8", "cpu:8" or "local".

    A chip's name alone takes its default shape, which `topologies` lists. "v5e", "v5p", "v6e" and
    "tpu7x" are shaped in chips (of tpu7x each is two devices) and need libtpu; "h100", "h200" and
    "b200" in slices x hosts x devices, and need jax's CUDA plugin; neither needs the hardware.
    "cpu" or "cpu:N" are the host's devices, "local" those of jax's default backend.

    Raises:
      TypeError: what is no name.
      ValueError: an unknown name or a shape that does not exist.
      ImportError: the compiler of that platform is not installed.
      RuntimeError: a TPU compiler was asked for on what is not x86-64 Linux.

    >>> topology("cpu").devices[0].platform
    'cpu'
    >>> topology("v5q:4x4x8")
    Traceback (most recent call last):
    ValueError: topology 'v5q:4x4x8' is unknown; near it: v5p:4x4x8, v5e:8x16
    """
    if not isinstance(name, str):
        raise TypeError(
            f"topology is {name!r}; it needs a name, such as 'v5p:4x4x8' or 'cpu', or what "
            "plait.audit.topology gives for one"
        )
    base, _, shape = name.partition(":")
    if base in ("cpu", "local"):
        return _local(name, base, shape)
    if base not in CHIPS:
        near = _near_names(base, shape)
        known = f"near it: {', '.join(near)}" if near else f"known are {', '.join(topologies())}"
        raise ValueError(f"topology {name!r} is unknown; {known}")
    chip = CHIPS[base]
    shape = shape or chip.default
    sizes = chip.sizes(shape)
    if sizes is None:
        raise ValueError(
            f"topology {name!r} has the shape {shape!r}; {base} needs {len(chip.largest)} sizes of "
            f"at least 1, such as {chip.near(shape)}"
        )
    if chip.fits(sizes) != sizes:
        most = "x".join(map(str, chip.largest))
        limit = "a host has 8 devices at most" if chip.kind == "gpu" else f"the largest is {most}"
        raise ValueError(f"topology {name!r} does not exist: {limit}; {chip.near(shape)} does")
    devices = (_tpu if chip.kind == "tpu" else _gpu)(chip, shape)
    return Topology(f"{base}:{shape}", tuple(devices), chip)


_KINDS = {"gpu": "gpu", "cuda": "gpu", "nvidia": "gpu", "tpu": "tpu"}


def _near_names(base: str, shape: str) -> list[str]:
    """Topologies that an unknown name may have meant."""
    base = base.lower()
    if base in _KINDS:
        return [str(chip) for chip in CHIPS.values() if chip.kind == _KINDS[base]]
    known = [*CHIPS, "cpu", "local"]
    near = [base] if base in known else difflib.get_close_matches(base, known, n=2, cutoff=0.5)
    return [
        name
        if name not in CHIPS
        else CHIPS[name].near(shape)
        if CHIPS[name].sizes(shape)
        else str(CHIPS[name])
        for name in near
    ]


def _local(name: str, base: str, count: str) -> Topology:
    devices = jax.devices("cpu") if base == "cpu" else jax.devices()
    wanted = int(count) if count.isdecimal() else len(devices) if not count else 0
    if not 1 <= wanted <= len(devices):
        hint = (
            f", or XLA_FLAGS=--xla_force_host_platform_device_count={wanted} before jax starts"
            if base == "cpu" and wanted
            else ""
        )
        several = len(devices) > 1
        raise ValueError(
            f"topology {name!r} is not here: {base} has {len(devices)} device{'s' * several}; it "
            f"needs {base}:1{f' to {base}:{len(devices)}' * several}{hint}"
        )
    return Topology(name, tuple(devices[:wanted]))


# What libtpu asks of its surroundings where there is no TPU.
_LIBTPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}

# The CUDA plugin refuses to load where cuDNN and a driver are missing, unless this is set.
_SKIP_CUDA_CHECKS = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"


def _tpu(chip: Chip, shape: str) -> list[Any]:
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise RuntimeError(
            f"compiling for {chip.name} needs libtpu, which exists for x86-64 Linux alone; this "
            f"is {platform.system()} on {platform.machine()}"
        )
    if importlib.util.find_spec("libtpu") is None:
        raise ImportError(
            f"compiling for {chip.name} needs libtpu, which is not installed: "
            "pip install 'plait[audit]'"
        )
    os.environ.setdefault(_SKIP_CUDA_CHECKS, "1")
    jax.default_backend()  # A TPU of this machine's own has to start without these settings.
    for variable, value in _LIBTPU.items():
        os.environ.setdefault(variable, value)
    return _describe(f"{chip.name}:{shape}", f"{chip.name}:{shape}", platform="tpu")


def _gpu(chip: Chip, shape: str) -> list[Any]:
    plugins = ("jax_cuda13_plugin", "jax_cuda12_plugin")
    if not any(importlib.util.find_spec(plugin) for plugin in plugins):
        raise ImportError(
            f"compiling for {chip.name} needs jax's CUDA plugin, which is not installed: "
            "pip install 'plait[audit-gpu]'"
        )
    os.environ.setdefault(_SKIP_CUDA_CHECKS, "1")
    return _describe(
        f"{chip.name}:{shape}",
        "",
        platform="cuda",
        topology=shape,
        target_config=chip.gpu_target,
    )


def _describe(name: str, described: str, **arguments: Any) -> list[Any]:
    from jax.experimental import topologies as jax_topologies

    try:
        return jax_topologies.get_topology_desc(described, **arguments).devices
    except NotImplementedError as error:
        raise RuntimeError(
            f"topology {name!r} needs jax's CUDA plugin, which did not load when jax started: set "
            f"{_SKIP_CUDA_CHECKS}=1 before jax's first operation"
        ) from error
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).partition("\n")[0]
        base, _, shape = name.partition(":")
        near = CHIPS[base].near(shape)
        hint = "" if near == name else f"; {near} does"  # this libtpu may know fewer shapes
        raise ValueError(
            f"topology {name!r} does not exist, the compiler says: {reason}{hint}"
        ) from error
