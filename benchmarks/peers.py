"""The forms in which the field writes the zigzag order, beside plait's, to compare.

Each form carries a global array, of any rank, along `axis` from source order to zigzag over
`ranks` ranks, or back: `form(x, ranks, axis, to_contiguous)`. They are written from what the forms
do, and `check` holds each to the same NumPy oracle before anything is compared.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from plait import Zigzag, reorder, restore

Form = Callable[[Any, int, int, bool], jax.Array]


def order(ranks: int, length: int, to_contiguous: bool) -> np.ndarray:
    """The oracle: for each place of the result the place that it comes from, int64 [length]."""
    chunks = np.arange(length).reshape(2 * ranks, -1)
    zigzag = np.concatenate([chunks[[rank, 2 * ranks - 1 - rank]] for rank in range(ranks)]).ravel()
    return np.argsort(zigzag) if to_contiguous else zigzag


def take(x: Any, ranks: int, axis: int, to_contiguous: bool) -> jax.Array:
    """A gather by a table of every token."""
    return jnp.take(x, jnp.asarray(order(ranks, x.shape[axis], to_contiguous)), axis=axis)


def take_along_axis(x: Any, ranks: int, axis: int, to_contiguous: bool) -> jax.Array:
    """A gather by a table of every token, broadcast to the array."""
    table = jnp.asarray(order(ranks, x.shape[axis], to_contiguous))
    return jnp.take_along_axis(
        x, table.reshape([-1 if d == axis else 1 for d in range(x.ndim)]), axis
    )


def take_chunks(x: Any, ranks: int, axis: int, to_contiguous: bool) -> jax.Array:
    """A gather by a table of chunks, two for each rank."""
    chunked = x.reshape(*x.shape[:axis], 2 * ranks, -1, *x.shape[axis + 1 :])
    table = jnp.asarray(order(ranks, 2 * ranks, to_contiguous))
    return jnp.take(chunked, table, axis=axis).reshape(x.shape)


def strided(x: Any, ranks: int, axis: int, to_contiguous: bool) -> jax.Array:
    """Halves split, one of them flipped, and both interleaved; back by slices of stride 2."""
    chunked = x.reshape(*x.shape[:axis], 2 * ranks, -1, *x.shape[axis + 1 :])
    if to_contiguous:
        early = lax.slice_in_dim(chunked, 0, None, 2, axis)
        late = lax.slice_in_dim(chunked, 1, None, 2, axis)
        joined = jnp.concatenate([early, jnp.flip(late, axis)], axis)
    else:
        early, late = jnp.split(chunked, 2, axis)
        joined = jnp.stack([early, jnp.flip(late, axis)], axis + 1)
    return joined.reshape(x.shape)


def plait_local(x: Any, ranks: int, axis: int, to_contiguous: bool) -> jax.Array:
    """plait on an array that one device holds whole."""
    return (restore if to_contiguous else reorder)(x, Zigzag(ranks), axis=axis, local=True)


def plait_sharded(x: Any, ranks: int, axis: int, to_contiguous: bool) -> jax.Array:
    """plait on an array sharded over the mesh axis "context"."""
    return (restore if to_contiguous else reorder)(x, Zigzag(ranks), axis=axis, axis_name="context")


PEERS: dict[str, Form] = {
    "take": take,
    "take_along_axis": take_along_axis,
    "take of chunks": take_chunks,
    "strided": strided,
}


def check(form: Form, ranks: int = 4, length: int = 48) -> None:
    """AssertionError where a form is not the permutation that the oracle states."""
    for axis, shape in ((1, (2, length)), (0, (length, 3)), (2, (1, 2, length, 4))):
        x = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
        for to_contiguous in (False, True):
            wanted = np.take(x, order(ranks, length, to_contiguous), axis=axis)
            run = jax.jit(lambda x, axis=axis, back=to_contiguous: form(x, ranks, axis, back))
            np.testing.assert_array_equal(run(x), wanted)
