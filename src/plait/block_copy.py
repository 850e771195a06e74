"""Local moves on a TPU as one copy: a Pallas kernel whose index map is the permutation.

Every block of the result is read once from where it comes from and written once: no gather, no
temporary memory, one operation. `plan` says which arrays it can take; what it refuses is moved by
`Relayout.apply`, which runs everywhere and which this is tested against.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

MOST_BYTES = 2 << 20
"""Of a block: read and written through two buffers each, four of them fit every TPU's memory."""

LEAST_BYTES = 16 << 10
"""Of a block: with smaller ones a copy would be all overhead of its steps."""

DTYPES = frozenset({"float32", "bfloat16", "int32", "uint32", "int16", "uint16", "int8", "uint8"})
"""What the compiler loads and stores as it is on every TPU that plait is compiled for in tests."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """How an array is copied: over which view of it, and in blocks of which shape.

    `order` lists the array's dimensions in the order of the view, those of size 1 left out; it is
    the order that XLA lays them out in, so the view is free.
    """

    order: tuple[int, ...]
    view: tuple[int, ...]
    axis: int
    block: tuple[int, ...]


def plan(shape: tuple[int, ...], axis: int, dtype: Any, chunk_length: int) -> Plan | None:
    """How to copy an array whose chunks along `axis` are permuted, or None where it cannot be.

    It cannot where the chunks do not tile as the sequence then lies, with one dimension alone,
    and with a dtype that is not in `DTYPES`. Where the sequence lies:

    | the array, axes of size 1 aside     | in memory, major to minor | a chunk in multiples of |
    | ----------------------------------- | ------------------------- | ----------------------- |
    | [B, S], B a multiple of 8           | [B, S]                    | 128                     |
    | [S, D], D a multiple of 128         | [S, D]                    | 8 to 32, by dtype       |
    | [H, S, D], D any other              | [H, D, S]                 | 128                     |
    | [S, H, D], D and H fill their tiles | [S, H, D]                 | 1                       |
    | [S, H, D], H does not               | [H, S, D]                 | 8 to 32                 |

    >>> plan((1, 16, 4096, 192), 2, jnp.bfloat16, 512).block
    (8, 192, 512)
    >>> plan((1, 4096, 576), 1, jnp.bfloat16, 24) is None
    True
    """
    dtype = jnp.dtype(dtype)
    if dtype.name not in DTYPES or 0 in shape:
        return None
    kept = [d for d, size in enumerate(shape) if size > 1 or d == axis]
    if len(kept) == 1:
        return None
    order = _as_laid_out(shape, kept, dtype.itemsize)
    view, place = tuple(shape[d] for d in order), order.index(axis)
    block = _block(view, place, dtype.itemsize, chunk_length)
    return None if block is None else Plan(order, view, place, block)


def _as_laid_out(shape: tuple[int, ...], kept: list[int], itemsize: int) -> tuple[int, ...]:
    """The dimensions from major to minor, as XLA lays an array out on a TPU.

    The two that fill tiles of 8 rows of 128 with the least padding are last; of equals, those that
    came latest. Tiles of 4, 2 or 1 rows are for arrays with no more, in rows of 4 bytes at least.
    """

    def padding(pair: tuple[int, int]) -> float:
        rows, lanes = shape[pair[0]], shape[pair[1]]
        tile = next((tile for tile in (1, 2, 4) if rows <= tile and tile * itemsize >= 4), 8)
        return -(-rows // tile) * tile / rows * (-(-lanes // 128) * 128 / lanes)

    latest_first = sorted(itertools.permutations(kept, 2), key=lambda pair: (-pair[1], -pair[0]))
    pair = min(latest_first, key=padding)
    return (*(d for d in kept if d not in pair), *pair)


def _block(
    view: tuple[int, ...], axis: int, itemsize: int, chunk_length: int
) -> tuple[int, ...] | None:
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
    shape, axis, block = x.shape, planned.axis, planned.block
    kept = sorted(planned.order)
    x = x.reshape([shape[d] for d in kept]).transpose([kept.index(d) for d in planned.order])
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
    return copied.transpose([planned.order.index(d) for d in kept]).reshape(shape)


def _copy(_: Any, source: Any, target: Any) -> None:
    target[...] = source[...]
