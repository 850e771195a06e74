"""Moves between source order and zigzag by the clock, on the devices of this machine or pod.

    python benchmarks/on_hardware.py --out results.json

Over all of `jax.devices()` as one axis, "context": reorder and restore of sharded tensors, and an
all-gather to source order inside `shard_map`, forward and backward, by each form in `peers.py` and
by plait. Every result is compared with a NumPy oracle before anything is timed. The JSON has for
each the median and the spread of a call, and its ratio to a copy of the result's bytes that is
timed in the same run; a profiler trace of one call each lies beside it.

The default sizes need about 1 GB on every device; `--tokens 131072` is what the documentation's
static figures are of. On a pod, start it on every host: `--distributed` where jax finds the others
by itself (Cloud TPU, Slurm), else with `--coordinator`, `--processes` and `--process`. Process 0
writes. It needs jax, NumPy and plait, and nothing else.
"""

import argparse
import contextlib
import json
import os
import pathlib
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import peers
from plait import ContextParallel, Zigzag, __version__


class Tensor(NamedTuple):
    """A tensor that long-context training reorders; -1 in its shape stands for the sequence."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def axis(self) -> int:
        return self.shape.index(-1)

    def of(self, tokens: int) -> tuple[int, ...]:
        return tuple(tokens if size == -1 else size for size in self.shape)


TENSORS = {
    "tokens": Tensor((8, -1), "int32"),
    "hidden": Tensor((1, -1, 7168), "bfloat16"),
    "K": Tensor((1, 16, -1, 192), "bfloat16"),
    "V": Tensor((1, 16, -1, 128), "bfloat16"),
    "latent": Tensor((1, -1, 576), "bfloat16"),
    "KV": Tensor((1, -1, 8, 128), "bfloat16"),
}


class Case(NamedTuple):
    """One thing to time: a jitted function, its argument, and what it has to give."""

    operation: str
    form: str
    run: Callable[[jax.Array], jax.Array]
    argument: jax.Array
    wanted: np.ndarray


class WrongResultError(AssertionError):
    """A form gave something else than the oracle."""


def cases(tensor: Tensor, tokens: int, mesh: Mesh) -> Iterator[Case]:
    """Every operation by every form; "copy" comes first in each operation."""
    ranks, axis = mesh.size, tensor.axis
    spec = P(*["context" if d == axis else None for d in range(len(tensor.shape))])
    sharded, whole = NamedSharding(mesh, spec), NamedSharding(mesh, P())
    # Small integers, which every dtype here holds exactly; at random, so that no wrong order of
    # tokens passes. Sums of up to 256 of -1, 0 and 1, as the backward pass makes, are exact too.
    values = np.random.default_rng(0).integers(-1, 2, tensor.of(tokens), dtype=np.int8)
    if tensor.dtype == "int32":
        values = np.arange(values.size, dtype=np.int32).reshape(values.shape)
    values = values.astype(jnp.dtype(tensor.dtype))
    moved = {
        back: np.take(values, peers.order(ranks, tokens, back), axis=axis) for back in (False, True)
    }
    x, all_of_x = _placed(values, sharded), _placed(values, whole)

    for back, operation in ((False, "reorder"), (True, "restore")):
        yield Case(operation, "copy", jax.jit(jnp.copy), x, values)
        for name, form in {**peers.PEERS, "plait": peers.plait_sharded}.items():
            move = jax.jit(
                lambda x, form=form, back=back: form(x, ranks, axis, back), out_shardings=sharded
            )
            yield Case(operation, name, move, x, moved[back])

    forms = gathers(ranks, axis)
    yield Case("gather", "copy", jax.jit(jnp.copy), all_of_x, values)
    for name, gather in forms.items():
        region = jax.shard_map(gather, mesh=mesh, in_specs=spec, out_specs=P(), check_vma=False)
        yield Case("gather", name, jax.jit(region), x, values if name == "none" else moved[True])
    if tensor.dtype == "int32":
        return

    shard = jax.ShapeDtypeStruct(sharded.shard_shape(values.shape), values.dtype)
    # Every rank's gradient is the same, so that their sum is `ranks` times it.
    sums = {
        as_is: order * values.dtype.type(ranks)
        for as_is, order in ((True, values), (False, moved[False]))
    }
    yield Case("gather, backward", "copy", jax.jit(jnp.copy), all_of_x, values)
    for name, gather in forms.items():
        back = _transposed(gather, shard)
        region = jax.shard_map(back, mesh=mesh, in_specs=P(), out_specs=spec, check_vma=False)
        yield Case("gather, backward", name, jax.jit(region), all_of_x, sums[name == "none"])


def gathers(ranks: int, axis: int) -> dict[str, Callable[[jax.Array], jax.Array]]:
    """By form: a shard to the whole sequence in source order; "none" leaves it as it lies."""
    cp = ContextParallel(Zigzag(ranks), "context")

    def gathered(x: jax.Array) -> jax.Array:
        return lax.all_gather(x, "context", axis=axis, tiled=True)

    def then(form: peers.Form) -> Callable[[jax.Array], jax.Array]:
        return lambda x: form(gathered(x), ranks, axis, True)

    after = {name: then(form) for name, form in peers.PEERS.items()}
    return {"none": gathered, **after, "plait": lambda x: cp.all_gather(x, axis=axis)}


def _transposed(gather: Callable[..., jax.Array], shard: jax.ShapeDtypeStruct) -> Callable:
    def back(gradient: jax.Array) -> jax.Array:
        _, pull = jax.vjp(gather, jnp.zeros(shard.shape, shard.dtype))
        return pull(gradient)[0]

    return back


def _placed(values: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """A global array, of which every process puts its part on its devices."""
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])


def check(case: Case) -> None:
    """WrongResultError, in every process, where any device of any process holds a wrong part."""
    result = case.run(case.argument)
    right = result.shape == case.wanted.shape and all(
        np.array_equal(np.asarray(shard.data), case.wanted[shard.index])
        for shard in result.addressable_shards
    )
    if jax.process_count() > 1:
        right = bool(np.all(multihost_utils.process_allgather(np.array(right))))
    if not right:
        raise WrongResultError(f"{case.operation} by {case.form} is not what the oracle says")


def timed(case: Case, repeats: int, calls: int) -> dict[str, Any]:
    """Seconds of one call: median and spread of `repeats` measurements of `calls` calls each.

    The calls are dispatched one behind the other, so that the host keeps ahead of the devices.
    """
    jax.block_until_ready(case.run(case.argument))
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        result = None
        for _ in range(calls):
            result = case.run(case.argument)
        jax.block_until_ready(result)
        samples.append((time.perf_counter() - start) / calls)
    low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
    return {
        "median_seconds": median,
        "quartile_seconds": [low, high],
        "least_seconds": min(samples),
        "most_seconds": max(samples),
    }


def measure(name: str, mesh: Mesh, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each operation and form of a tensor; a form that fails has its error instead."""
    tensor, rows, traced, copy_seconds = TENSORS[name], [], [], float("nan")
    for case in cases(tensor, arguments.tokens, mesh):
        row: dict[str, Any] = {
            "tensor": name,
            "shape": list(tensor.of(arguments.tokens)),
            "dtype": tensor.dtype,
            "operation": case.operation,
            "form": case.form,
        }
        rows.append(row)
        try:
            start = time.perf_counter()
            check(case)
            row["first_call_seconds"] = time.perf_counter() - start
            row.update(timed(case, arguments.repeats, arguments.calls))
        except (WrongResultError, jax.errors.JaxRuntimeError) as error:
            row["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
            continue
        if case.form == "copy":
            copy_seconds = row["median_seconds"]
        row["ratio_to_copy"] = row["median_seconds"] / copy_seconds
        traced.append(case)
    if arguments.trace is not None:
        trace(traced, arguments.trace / name)
    return rows


def trace(ran: list[Case], folder: pathlib.Path) -> None:
    """One call of each case in a profile of process 0's devices, under its operation and form."""
    first = jax.process_index() == 0
    with jax.profiler.trace(str(folder)) if first else contextlib.nullcontext():
        for case in ran:
            with jax.profiler.TraceAnnotation(f"{case.operation}, {case.form}"):
                jax.block_until_ready(case.run(case.argument))


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = [
        "| tensor | operation | form | ms | quartiles | / copy |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        start = f"| {row['tensor']} | {row['operation']} | {row['form']} "
        if "error" in row:
            lines.append(f"{start}| {row['error']} | | |")
            continue
        low, high = (f"{1e3 * seconds:.3g}" for seconds in row["quartile_seconds"])
        figures = f"{1e3 * row['median_seconds']:.3g} | {low} to {high}"
        lines.append(f"{start}| {figures} | {row['ratio_to_copy']:.2f} |")
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    """What the figures are of."""
    device = jax.devices()[0]
    return {
        "device_kind": device.device_kind,
        "platform": device.platform,
        "runtime": device.client.platform_version,
        "devices": jax.device_count(),
        "processes": jax.process_count(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "plait": __version__,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "libtpu_init_args": os.environ.get("LIBTPU_INIT_ARGS", ""),
    }


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=pathlib.Path, required=True, help="the JSON to write")
    parser.add_argument("--tokens", type=int, default=8192, help="length of the sequence")
    parser.add_argument("--tensors", nargs="+", choices=TENSORS, default=list(TENSORS))
    parser.add_argument("--repeats", type=int, default=20, help="measurements of each")
    parser.add_argument("--calls", type=int, default=10, help="calls in a measurement")
    parser.add_argument(
        "--trace", type=pathlib.Path, help="folder of the traces; by default OUT with .traces"
    )
    parser.add_argument("--no-trace", action="store_true", help="make no traces")
    parser.add_argument("--distributed", action="store_true", help="jax.distributed.initialize()")
    parser.add_argument("--coordinator", help="host:port of process 0")
    parser.add_argument("--processes", type=int, help="how many processes there are")
    parser.add_argument("--process", type=int, help="which of them this is, from 0")
    arguments = parser.parse_args(argv)
    if min(arguments.repeats, arguments.calls) < 1 or arguments.repeats < 2:
        parser.error("--repeats needs to be at least 2 and --calls at least 1")
    if arguments.trace is None:
        arguments.trace = arguments.out.with_suffix(".traces")
    if arguments.no_trace:
        arguments.trace = None
    return arguments


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    if arguments.coordinator:
        jax.distributed.initialize(arguments.coordinator, arguments.processes, arguments.process)
    elif arguments.distributed:
        jax.distributed.initialize()
    mesh = Mesh(np.array(jax.devices()), ("context",))
    multiple = Zigzag(mesh.size).multiple
    if arguments.tokens < multiple or arguments.tokens % multiple:
        nearest = max(1, round(arguments.tokens / multiple)) * multiple
        print(
            f"--tokens is {arguments.tokens}; zigzag over {mesh.size} devices needs a multiple of "
            f"{multiple}: {nearest} works",
            file=sys.stderr,
        )
        return 2
    rows = []
    with jax.set_mesh(mesh):
        for name in arguments.tensors:
            rows += measure(name, mesh, arguments)
    failed = [row for row in rows if "error" in row]
    if jax.process_index() == 0:
        settings = {key: getattr(arguments, key) for key in ("tokens", "repeats", "calls")}
        results = {"machine": machine(), "settings": settings, "rows": rows}
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")
        print(table(rows))
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
