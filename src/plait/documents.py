"""Sums, means and maxima over the tokens of each document of all ranks.

Documents are told apart by a comparison with every id, [..., sequence, documents], which XLA
fuses into the reduction on TPU and GPU. `jax.ops.segment_sum` would be a scatter, one token after
the other, and its derivative a gather; a matmul with one-hot rows would multiply NaN by 0 and be
rounded to bfloat16 by a TPU's default.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax

from plait.layout import at_least_one
from plait.mesh import AxisName, as_names, as_varying, check_shard, is_inside
from plait.reduce import kept_tokens
from plait.tree import as_int32

How = Literal["sum", "mean", "max"]


def reduce_documents(
    values: jax.Array,
    segment_ids: jax.Array,
    *,
    documents: int,
    how: How = "sum",
    mask: jax.Array | None = None,
    axis_name: AxisName | None = None,
    local: bool = False,
) -> jax.Array:
    """The sum, mean or maximum of per-token values over each document, over all ranks.

    For losses by sequence and log-probabilities by sample. It goes by segment ids alone, so that
    the order of the tokens does not matter: every layout works, one for each batch included.

    Args:
      values: [..., sequence], such as [batch, sequence]; a float dtype, integers or bool.
      segment_ids: integers of the same shape; the tokens of id d + 1 are those of document d of
        their row, and 0 is padding, which belongs to none.
      documents: how many documents a row has at most; known when the program is traced.
      how: "sum", "mean" or "max".
      mask: the same shape, bool or 0 and 1; None counts every token. Where it is 0, and in
        padding, NaN too is left out.
      axis_name: the mesh axes of the sequence, as in `relayout`. Rows are not added up, so that
        the mesh axes of the batch need not be known.
      local: reduce over what this call is given, although it stands in a manual region.

    A document without tokens has sum 0, mean 0 and maximum -inf. Its mean is no measurement: the
    documents that have tokens are those whose sum of ones is above 0. Tokens that share a maximum
    share its derivative equally; the derivative of an infinite maximum is 0.

    Inside `jax.shard_map`, take gradients with check_vma=True (jax's default) or outside the
    region, as with `sum_and_count`. Sharded, it communicates [..., documents]: a sum over the ranks
    for "sum", two for "mean", two and a maximum for "max".

    Returns:
      float32 [..., documents], equal on every rank.

    Raises:
      ValueError: an id above `documents` or below 0, where the ids are NumPy, or the call is not
        traced; where they are traced, every document of their row is NaN, so that no token vanishes
        from a loss unseen. Shapes that differ.
      TypeError: values that are no real numbers, ids that are no integers.

    >>> import jax.numpy as jnp
    >>> values = jnp.array([[1.0, 2.0, 6.0, 7.0, 9.0]])
    >>> segment_ids = jnp.array([[1, 1, 2, 2, 0]])
    >>> reduce_documents(values, segment_ids, documents=3, how="mean").tolist()
    [[1.5, 6.5, 0.0]]
    """
    documents = at_least_one("documents", documents)
    if how not in get_args(How):
        raise ValueError(f"how is {how!r}; it needs to be one of {list(get_args(How))}")
    values = jnp.asarray(values)
    ids = _checked_ids(segment_ids, values, documents)
    names = as_names(axis_name)
    inside = not local and is_inside(names, "reduce_documents")

    def over_ranks(reduce: Callable, x: jax.Array) -> jax.Array:
        return reduce(as_varying(x, names), names) if inside else x

    one_by_one = 1 + lax.iota(jnp.int32, documents)
    belongs = kept_tokens(values, mask)[..., None] & (ids[..., None] == one_by_one)
    values = values.astype(jnp.float32)[..., None]
    elsewhere = jnp.where((ids < 0) | (ids > documents), jnp.nan, 0).astype(jnp.float32)[..., None]
    of_documents = jnp.where(belongs, values, elsewhere)
    if inside:
        check_shard(of_documents, names, "values")
    if how == "max":
        return _maxima(values, belongs, elsewhere, over_ranks)
    total = over_ranks(lax.psum, of_documents.sum(axis=-2))
    if how == "sum":
        return total
    count = over_ranks(lax.psum, belongs.sum(axis=-2, dtype=jnp.int32))
    return total / jnp.maximum(count, 1).astype(jnp.float32)


def _maxima(
    values: jax.Array,
    belongs: jax.Array,
    elsewhere: jax.Array,
    over_ranks: Callable[[Callable, jax.Array], jax.Array],
) -> jax.Array:
    """The maxima, to which a sum adds nothing but what a maximum over ranks lacks.

    That is a derivative, and NaN, which the maximum over ranks passes over on some platforms.
    """
    fixed = lax.stop_gradient(values)
    largest = over_ranks(lax.pmax, jnp.where(belongs, fixed, -jnp.inf).max(axis=-2))
    at_largest = belongs & ((fixed == largest[..., None, :]) | jnp.isnan(fixed))
    finite = jnp.where(jnp.isinf(fixed), 0, values)
    nothing = finite - lax.stop_gradient(finite)
    added = over_ranks(lax.psum, jnp.where(at_largest, nothing, elsewhere).sum(axis=-2))
    share = over_ranks(lax.psum, at_largest.sum(axis=-2, dtype=jnp.int32))
    return largest + added / jnp.maximum(share, 1).astype(jnp.float32)


def _checked_ids(segment_ids: Any, values: jax.Array, documents: int) -> jax.Array:
    if not any(jnp.issubdtype(values.dtype, k) for k in (jnp.floating, jnp.integer, jnp.bool_)):
        raise TypeError(
            f"values have dtype {values.dtype}; they need real numbers, such as float32"
        )
    ids = as_int32(segment_ids, "segment_ids")
    if ids.shape != values.shape or ids.ndim < 1:
        raise ValueError(
            f"segment_ids has shape {ids.shape} and values have shape {values.shape}; they need "
            "to be equal, [..., sequence]"
        )
    if ids.size:
        # Of an array that lies on several processes, each can read one number.
        _check_range(ids.min(), ids.max(), documents)
    return jnp.asarray(ids).astype(jnp.int32)


def _check_range(least: Any, most: Any, documents: int) -> None:
    if isinstance(least, jax.core.Tracer):
        return
    least, most = int(least), int(most)
    if least < 0 or most > documents:
        raise ValueError(
            f"segment_ids holds {most if most > documents else least}; with documents="
            f"{documents} ids are 0 (padding) to {documents}"
            + (f": documents={most} is needed" if most > documents else "")
        )
