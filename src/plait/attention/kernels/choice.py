"""Which kernel a call takes, and why."""

from __future__ import annotations

import difflib
from typing import Any, NamedTuple

import jax

from plait.attention.kernels.base import Kernel
from plait.attention.kernels.blockwise import Blockwise
from plait.attention.kernels.flash import Flash

KERNELS: dict[str, type[Blockwise] | type[Flash]] = {"blockwise": Blockwise, "flash": Flash}


class KernelChoice(NamedTuple):
    """A kernel, and the sentence that says why it was chosen."""

    kernel: Kernel
    reason: str


def choose_kernel(
    q: Any,
    k: Any,
    v: Any,
    *,
    kernel: Kernel | str = "auto",
    platform: str | None = None,
    fully_manual: bool = True,
) -> KernelChoice:
    """The kernel that attention takes for arrays as a kernel gets them, and why.

    Args:
      q: [batch, queries, heads, head_dim], an array or anything with a shape and a dtype.
      k, v: [batch, keys, kv_heads, head_dim], all the keys that are in one place at once.
      kernel: as in `plait.attention`.
      platform: "tpu", "gpu" or "cpu"; jax's default backend by default.
      fully_manual: whether the call stands where every mesh axis is manual, as it does outside
        `jax.shard_map` with a mesh. Pallas kernels can be had nowhere else.

    >>> import jax.numpy as jnp
    >>> x = jax.ShapeDtypeStruct((1, 4096, 8, 128), jnp.bfloat16)
    >>> choose_kernel(x, x, x, platform="tpu").kernel
    Flash(q_block=512, k_block=512, interpret=False)
    >>> choose_kernel(x, x, x, platform="tpu", fully_manual=False).reason
    'Pallas kernels need every mesh axis to be manual'
    """
    if isinstance(kernel, Kernel):
        return KernelChoice(kernel, "it was asked for")
    if kernel in KERNELS:
        return KernelChoice(KERNELS[kernel](), "it was asked for")
    if kernel != "auto":
        known = ", ".join(map(repr, ("auto", *KERNELS)))
        near = difflib.get_close_matches(str(kernel), KERNELS, 1, 0)[0]
        raise ValueError(
            f"kernel is {kernel!r}; it needs to be one of {known}, such as {near!r}, or a kernel "
            "such as Blockwise()"
        )
    platform = jax.default_backend() if platform is None else platform
    if platform != "tpu":
        return KernelChoice(Blockwise(), f"it runs on {platform}; Flash is for TPUs")
    if not fully_manual:
        return KernelChoice(Blockwise(), "Pallas kernels need every mesh axis to be manual")
    why_not = Flash().why_not(q, k, v)
    if why_not is not None:
        return KernelChoice(Blockwise(), why_not)
    return KernelChoice(Flash(), "it is the fastest on TPUs")
