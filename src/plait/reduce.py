"""Sums over all tokens of all ranks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from plait.mesh import AxisName, as_names, as_varying, check_shard, is_inside, manual_axes


def sum_and_count(
    values: jax.Array,
    mask: jax.Array | None = None,
    *,
    axis_name: AxisName | None = None,
    batch_axes: AxisName | None = None,
    local: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The sum of per-token values over the tokens of all ranks, and how many tokens those are.

    The mean over tokens is the sum divided by the count, after sums and counts of all
    micro-batches have been added up: a mean of means of ranks or of micro-batches weighs tokens
    unequally, and a rank without tokens makes it NaN.

    Args:
      values: any shape, a float dtype; where the mask is 0, NaN too is left out.
      mask: the same shape, bool or 0 and 1; None counts every token.
      axis_name: the mesh axes of the sequence, as in `relayout`.
      batch_axes: the mesh axes of the batch; those that are manual here are summed over as well.
      local: sum over what this call is given, although it stands in a manual region.

    Inside `jax.shard_map`, take gradients with check_vma=True (jax's default) or outside the
    region: with check_vma=False jax transposes the sum over ranks to another sum, and a gradient
    taken inside is n times too large. Axes of the batch that are manual there and that
    `batch_axes` does not name are not summed over.

    Returns:
      (sum, count): float32 and int32 scalars, equal on every rank.

    >>> import jax.numpy as jnp
    >>> total, count = sum_and_count(jnp.arange(1.0, 9.0), jnp.array([0, 0, 0, 0, 0, 0, 1, 1]))
    >>> float(total), int(count)
    (15.0, 2)
    """
    values = jnp.asarray(values)
    kept = kept_tokens(values, mask)
    total = jnp.where(kept, values, 0).sum(dtype=jnp.float32)
    count = kept.sum(dtype=jnp.int32)
    names = as_names(axis_name)
    if local or not is_inside(names, "sum_and_count"):
        return total, count
    over = (*names, *(name for name in as_names(batch_axes) if name in manual_axes()))
    check_shard(total, over, "values")
    return lax.psum(as_varying(total, over), over), lax.psum(as_varying(count, over), over)


def kept_tokens(values: jax.Array, mask: jax.Array | None) -> jax.Array:
    """Where the mask is not 0: bool, in the shape of the values, which the mask needs to have."""
    if mask is None:
        return jnp.ones(values.shape, bool)
    mask = jnp.asarray(mask)
    if jnp.issubdtype(mask.dtype, jnp.inexact):
        raise TypeError(
            f"mask has dtype {mask.dtype}; it needs bool or integers, such as "
            "mask != 0: to weigh tokens, multiply the values and sum the weights likewise"
        )
    if mask.shape != values.shape:
        raise ValueError(
            f"mask has shape {mask.shape} and values have shape {values.shape}; they need to be "
            "equal"
        )
    return mask != 0
