"""Local moves on a TPU as one copy: a Pallas kernel whose index map is the permutation.

Every block of the result is read once from where it comes from and written once: no gather, no
temporary memory, one operation. `plan` says which arrays it can take; what it refuses is moved by
`Relayout.apply`, which runs everywhere and which this is tested against.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

MOST_BYTES = 2 << 20
"""Of a block: read and written through two buffers each, four of them fit every TPU's memory."""

LEAST_BYTES = 16 << 10
"""Of a block: with smaller ones a copy would be all overhead of its steps."""

DTYPES = frozenset({"float32", "bfloat16", "int32", "uint32", "int16", "uint16", "int8", "uint8"})
"""What the compiler loads and stores as it is on every TPU that plait is compiled for in tests."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """How an array is copied: over which view of it, and in blocks of which shape.

    A view has the array's dimensions, those of size 1 left out, and the sequence last where
    `sequence_last`: where the last dimension does not fill the 128 lanes, XLA lays the array out
    so, and the view is free.
    """

    view: tuple[int, ...]
    axis: int
    sequence_last: bool
    block: tuple[int, ...]


def plan(shape: tuple[int, ...], axis: int, dtype: Any, chunk_length: int) -> Plan | None:
    """How to copy an array whose chunks along `axis` are permuted, or None where it cannot be.

    | the array, axes of size 1 aside     | blocks                                             |
    | ----------------------------------- | -------------------------------------------------- |
    | sequence last: [.., S]              | [.., rows, part of a chunk in multiples of 128]    |
    | [.., S, D], D a multiple of 128     | [.., part of a chunk in multiples of 8 to 32, D]   |
    | [.., S, D], D any other             | as sequence last, over the view [.., D, S]         |
    | [.., S, .., H, D], D as above       | [.., part of a chunk, .., H, D]                    |
    | [.., S, .., H, D], D any other      | none: XLA's layout of it is not known              |
    | chunks or dtypes that do not tile   | none                                               |

    >>> plan((1, 16, 4096, 192), 2, jnp.bfloat16, 512).block
    (8, 192, 512)
    >>> plan((1, 4096, 576), 1, jnp.bfloat16, 24) is None
    True
    """
    dtype = jnp.dtype(dtype)
    if dtype.name not in DTYPES or 0 in shape:
        return None
    kept = [d for d, size in enumerate(shape) if size > 1 or d == axis]
    view, axis = [shape[d] for d in kept], kept.index(axis)
    lanes_filled = view[-1] % 128 == 0 and axis < len(view) - 1
    sequence_last = not lanes_filled and axis == len(view) - 2
    if sequence_last:
        view[axis], view[axis + 1] = view[axis + 1], view[axis]
        axis += 1
    if not lanes_filled and axis < len(view) - 1:
        return None
    if len(view) == 1:
        return None
    block = _block(view, axis, dtype.itemsize, chunk_length)
    return None if block is None else Plan(tuple(view), axis, sequence_last, block)


def _block(view: list[int], axis: int, itemsize: int, chunk_length: int) -> tuple[int, ...] | None:
    """The largest block, minor dimensions first, that the compiler and its memory take."""
    rows = 8 * max(1, 4 // itemsize)
    choices = []
    for dimension, size in enumerate(view):
        unit = {len(view) - 1: 128, len(view) - 2: rows}.get(dimension, 1)
        whole = chunk_length if dimension == axis else size
        parts = [part for part in range(whole, 0, -1) if whole % part == 0 and part % unit == 0]
        if dimension != axis and size not in parts:
            parts.insert(0, size)  # a whole dimension needs no multiple
        choices.append(parts)
    if not all(choices):
        return None
    block = [parts[-1] for parts in choices]
    for dimension in reversed(range(len(view))):
        others = itemsize * math.prod(block) // block[dimension]
        fitting = [part for part in choices[dimension] if part * others <= MOST_BYTES]
        block[dimension] = max(fitting, default=block[dimension])
    if not LEAST_BYTES <= itemsize * math.prod(block) <= MOST_BYTES:
        return None
    return tuple(block)


def copy_blocks(
    x: jax.Array, sources: np.ndarray, planned: Plan, *, interpret: bool = False
) -> jax.Array:
    """x with its chunks permuted: the chunk at place c comes from place `sources[c]`.

    With `interpret` the kernel runs on any platform, slowly.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    shape, axis, block = x.shape, planned.axis, planned.block
    if planned.sequence_last:
        *before, features, length = planned.view
        x = x.reshape(*before, length, features).swapaxes(axis - 1, axis)
    else:
        x = x.reshape(planned.view)
    parts = planned.view[axis] // len(sources) // block[axis]  # blocks in a chunk

    def source(*indices: Any) -> tuple[Any, ...]:
        *place, table = indices
        chunk = lax.div(place[axis], np.int32(parts))
        place[axis] = table[chunk] * parts + lax.rem(place[axis], np.int32(parts))
        return tuple(place)

    copied = pl.pallas_call(
        _copy,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=tuple(size // part for size, part in zip(planned.view, block, strict=True)),
            in_specs=[pl.BlockSpec(block, source)],
            out_specs=pl.BlockSpec(block, lambda *indices: indices[:-1]),
        ),
        out_shape=jax.typeof(x),
        interpret=interpret,
    )(jnp.asarray(sources, jnp.int32), x)
    if planned.sequence_last:
        copied = copied.swapaxes(axis - 1, axis)
    return copied.reshape(shape)


def _copy(_: Any, source: Any, target: Any) -> None:
    target[...] = source[...]
