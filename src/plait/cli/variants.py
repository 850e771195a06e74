"""What `plait audit` compiles: plait's own moves, or a function that the user names."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import inspect
import math
import operator
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from plait import ContextParallel, Contiguous, Layout
from plait.audit import Topology, moved_tokens
from plait.cli.arguments import UserError

AXIS = "context"
SHAPE = "1,131072,1,576"


@dataclasses.dataclass(frozen=True)
class Variant:
    """One program to compile: the arguments of `plait.audit.compile_for`."""

    name: str
    fn: Callable[..., Any]
    avals: tuple[jax.ShapeDtypeStruct, ...]
    in_specs: tuple[PartitionSpec, ...] | None
    out_specs: Any
    network_floor_bytes: int | None = None


@dataclasses.dataclass(frozen=True)
class Move:
    """A move of one array whose sequence is sharded.

    Attributes:
      make: the function to compile, given the handle, the sequence axis and the length.
      floor: the most tokens that a rank must send, given the layout and the length.
      gathers: whether every rank ends with the whole array.
      every_layout: whether it differs so much from layout to layout, or compiles so fast, that
        it is shown for each of them unasked.
    """

    make: Callable[[ContextParallel, int, int], Callable[[Any], Any]]
    floor: Callable[[Layout, int], int]
    gathers: bool = False
    every_layout: bool = True


def _method(name: str) -> Callable[[ContextParallel, int, int], Callable[[Any], Any]]:
    return lambda cp, axis, _: functools.partial(getattr(cp, name), axis=axis)


def _take(cp: ContextParallel, axis: int, length: int) -> Callable[[Any], Any]:
    order = cp.layout.positions(length)
    return lambda x: jnp.take(x, order, axis=axis)


def _there(layout: Layout, length: int) -> int:
    return moved_tokens(Contiguous(layout.ranks), layout, length)


def _back(layout: Layout, length: int) -> int:
    return moved_tokens(layout, Contiguous(layout.ranks), length)


def _everywhere(layout: Layout, length: int) -> int:
    return (layout.ranks - 1) * length // layout.ranks


MOVES: dict[str, Move] = {
    "reorder": Move(_method("reorder"), _there),
    "restore": Move(_method("restore"), _back),
    "all_gather": Move(_method("all_gather"), _everywhere, gathers=True, every_layout=False),
    "jnp.take": Move(_take, _there, every_layout=False),
}


def of_moves(
    layouts: Mapping[str, Layout],
    moves: Sequence[str] | None,
    aval: jax.ShapeDtypeStruct,
    axis: int,
) -> list[Variant]:
    """The moves of an array in the layouts.

    Without `moves` all of them, those that are slow to compile in the first layout alone.

    Raises:
      UserError: an axis that the array does not have, a length that a layout does not accept.
    """
    shape = aval.shape
    if not shape:
        raise UserError(
            "plait audit: --shape is ''; a move needs a sequence axis: 1,131072,1,576 works"
        )
    if not -len(shape) <= axis < len(shape):
        raise UserError(
            f"plait audit: --axis is {axis}; --shape {_text(shape)} has the axes 0 to "
            f"{len(shape) - 1}: {len(shape) - 1} works"
        )
    axis %= len(shape)
    length = shape[axis]
    _check_length(shape, axis, layouts)
    bytes_of_token = math.prod(shape) // length * aval.dtype.itemsize
    sharded = PartitionSpec(*[None] * axis, AXIS)
    first = next(iter(layouts))
    return [
        Variant(
            name=f"{layout_name} {name}",
            fn=MOVES[name].make(ContextParallel(layout, AXIS), axis, length),
            avals=(aval,),
            in_specs=(sharded,),
            out_specs=PartitionSpec() if MOVES[name].gathers else sharded,
            network_floor_bytes=MOVES[name].floor(layout, length) * bytes_of_token,
        )
        for layout_name, layout in layouts.items()
        for name in moves or MOVES
        if moves or layout_name == first or MOVES[name].every_layout
    ]


def _check_length(shape: Sequence[int], axis: int, layouts: Mapping[str, Layout]) -> None:
    length = shape[axis]
    multiple = math.lcm(*(layout.multiple for layout in layouts.values()))
    for layout in layouts.values():
        if length < 1 or length % layout.multiple:
            works = [*shape]
            works[axis] = max(-(-length // multiple), 1) * multiple
            raise UserError(
                f"plait audit: --shape is {_text(shape)}; {layout!r} needs a multiple of "
                f"{layout.multiple} along axis {axis}: {_text(works)} works"
            )


def _text(shape: Sequence[int]) -> str:
    return ",".join(map(str, shape))


def of_function(
    path: str,
    avals: Sequence[jax.ShapeDtypeStruct],
    in_specs: Sequence[PartitionSpec] | None,
    out_specs: Sequence[PartitionSpec] | None,
) -> Variant:
    """The function "module:name", on arguments of the given shapes.

    Raises:
      UserError: it is not found, or already jitted where `out_specs` are given.
    """
    fn = _load(path)
    _check_call(path, fn, len(avals))
    if out_specs and hasattr(fn, "lower"):
        raise UserError(
            f"plait audit: --out-spec is given and {path} is jitted already: say out_shardings to "
            "jax.jit instead"
        )
    return Variant(
        name=path,
        fn=fn,
        avals=tuple(avals),
        in_specs=None if in_specs is None else tuple(in_specs),
        out_specs=out_specs and (out_specs[0] if len(out_specs) == 1 else tuple(out_specs)),
    )


def _check_call(path: str, fn: Callable[..., Any], count: int) -> None:
    """UserError unless the function takes so many arguments, one after the other."""
    try:
        signature = inspect.signature(fn)
    except ValueError:  # what it takes is not known
        return
    parameters = signature.parameters.values()
    required = [p for p in parameters if p.default is p.empty]
    by_name = [p.name for p in required if p.kind is p.KEYWORD_ONLY]
    if by_name:
        raise UserError(
            f"plait audit: {path} takes {by_name[0]!r} by name alone and --shape gives arguments "
            f"in their order: functools.partial({path.partition(':')[2]}, {by_name[0]}=...) in the "
            "module works"
        )
    try:
        signature.bind(*[None] * count)
    except TypeError as error:
        least = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in required)
        if not count:
            raise UserError(
                "plait audit: a function needs the --shape of each of its arguments: "
                f"--shape {SHAPE} works"
            ) from None
        works = f"--shape {least} times, in their order," if least else "leaving --shape out"
        raise UserError(
            f"plait audit: --shape is given for {count} arguments and {path} takes others "
            f"({error}): {works} works"
        ) from None


_ABSENT = object()


def _load(path: str) -> Callable[..., Any]:
    module_name, _, name = path.partition(":")
    if not module_name or not name or "/" in path:
        raise UserError(
            f"plait audit: the function is {path!r}; it needs to be MODULE:FUNCTION, such as "
            "model:forward for forward in model.py of the current directory"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there and itself imports what is not
        works = (
            f"{module_name.removesuffix('.py')}:{name} works, without .py"
            if module_name.endswith(".py")
            else f"the path of {module_name}.py works with dots for slashes and without .py"
        )
        raise UserError(
            f"plait audit: the function is {path!r} and no module {error.name!r} is installed or "
            f"in the current directory: {works}"
        ) from None
    try:
        found = operator.attrgetter(name)(module)
    except AttributeError:
        found = _ABSENT
    if not callable(found):
        known = [n for n, value in vars(module).items() if _is_own_function(value, module_name)]
        near = difflib.get_close_matches(name, known, n=1, cutoff=0)
        works = f"{module_name}:{near[0]} works" if near else "it has no function at all"
        what = (
            f"{module_name} has no function {name!r}"
            if found is _ABSENT
            else f"{name} is no function but of type {type(found).__name__}"
        )
        raise UserError(f"plait audit: the function is {path!r}; {what}: {works}")
    return found


def _is_own_function(value: Any, module_name: str) -> bool:
    return callable(value) and getattr(value, "__module__", None) == module_name


def parse_aval(shape: str, dtype: str) -> jax.ShapeDtypeStruct:
    """The argument of a shape such as "1,131072,1,576" and a dtype such as "bfloat16".

    >>> parse_aval("8,16", "int32")
    ShapeDtypeStruct(shape=(8, 16), dtype=int32)
    """
    sizes = [size.strip() for size in shape.split(",")] if shape.strip() else []
    if not all(size.isdecimal() for size in sizes):
        raise UserError(
            f"plait audit: --shape is {shape!r}; it needs sizes with commas between: "
            "1,131072,1,576 works"
        )
    if not _is_dtype(dtype):
        raise UserError(
            f"plait audit: --dtype is {dtype!r}; it needs the name of a dtype that jax has on, "
            f"such as bfloat16, float32, int32: {_near_dtype(dtype)} works"
        )
    return jax.ShapeDtypeStruct(tuple(map(int, sizes)), jnp.dtype(dtype))


def _is_dtype(name: str) -> bool:
    try:
        return jnp.dtype(name) == jax.dtypes.canonicalize_dtype(jnp.dtype(name))
    except TypeError:
        return False


_ABBREVIATED = {"bf": "bfloat", "f": "float", "fp": "float", "i": "int", "s": "int", "u": "uint"}


def _near_dtype(name: str) -> str:
    """The dtype that an abbreviation such as "bf16" means; else bfloat16.

    >>> _near_dtype("bf16"), _near_dtype("f32"), _near_dtype("float64")
    ('bfloat16', 'float32', 'bfloat16')
    """
    letters = name.rstrip("0123456789")
    long = _ABBREVIATED.get(letters, "") + name[len(letters) :]
    return long if _is_dtype(long) else "bfloat16"


def parse_spec(flag: str, text: str, sizes: Mapping[str, int]) -> PartitionSpec:
    """The `PartitionSpec` of ",context" or "data,context+model": a mesh axis or none a dimension.

    >>> parse_spec("--spec", ",context", {"context": 8}) == PartitionSpec(None, "context")
    True
    """
    entries = [[a.strip() for a in e.split("+")] for e in text.split(",")] if text.strip() else []
    axes = [axis for entry in entries if entry != [""] for axis in entry]
    for axis in axes:
        if axis not in sizes or axes.count(axis) > 1:
            what = f"names {axis!r} twice" if axis in sizes else f"names {axis!r}"
            raise UserError(
                f"plait audit: {flag} is {text!r} and {what}; the mesh has the axes "
                f"{', '.join(sizes)}, each to be named once at most: {next(iter(sizes))!r} works"
            )
    return PartitionSpec(
        *(None if e == [""] else e[0] if len(e) == 1 else tuple(e) for e in entries)
    )


def check_spec(spec: PartitionSpec, aval: jax.ShapeDtypeStruct, sizes: Mapping[str, int]) -> None:
    """UserError unless an argument of this shape can be laid out so."""
    if len(spec) > len(aval.shape):
        raise UserError(
            f"plait audit: --spec names {len(spec)} dimensions and --shape {_text(aval.shape)} has "
            f"{len(aval.shape)}: give a --spec of at most as many"
        )
    for axis, entry in enumerate(spec):
        names = (entry,) if isinstance(entry, str) else entry or ()
        over = math.prod(sizes[name] for name in names)
        if aval.shape[axis] % over:
            works = [*aval.shape]
            works[axis] = -(-works[axis] // over) * over
            raise UserError(
                f"plait audit: --shape is {_text(aval.shape)}; axis {axis} is sharded over "
                f"{over} devices: {_text(works)} works"
            )


def parse_mesh(text: str) -> dict[str, int]:
    """The sizes of axes from "data=2,context=64".

    >>> parse_mesh("data=2,context=64")
    {'data': 2, 'context': 64}
    """
    pairs = [[half.strip() for half in pair.split("=")] for pair in text.split(",")]
    good = [p for p in pairs if len(p) == 2 and p[0] and p[1].isdecimal() and int(p[1])]
    sizes = {name: int(size) for name, size in good}
    if len(sizes) != len(pairs):
        raise UserError(
            f"plait audit: --mesh is {text!r}; it needs each axis once with its size, such as "
            "data=2,context=64: context=8 works"
        )
    return sizes


def check_mesh(given: str, sizes: Mapping[str, int], target: Topology) -> None:
    """UserError if the axes take more devices than the topology has.

    `given` is the argument as the user wrote it.
    """
    needed, there = int(np.prod([*sizes.values()])), len(target.devices)
    if needed > there:
        name = next(iter(sizes))
        works = f"--ranks {there}" if given.startswith("--ranks") else f"--mesh {name}={there}"
        raise UserError(
            f"plait audit: {given} takes {needed} devices and {target.name} has {there}: {works} "
            "works"
        )
