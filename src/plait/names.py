"""The names by which `jax.checkpoint` policies know what plait moved or computed.

Each is a tuple, to be unpacked into `jax.checkpoint_policies.save_only_these_names`: what a policy
saves, the backward pass does not repeat.

>>> import jax
>>> policy = jax.checkpoint_policies.save_only_these_names(*GATHERED, *ATTENDED)
"""

from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters import ad

GATHERED_KEYS, GATHERED_VALUES, GATHERED_OTHER = (
    "plait_gathered_keys",
    "plait_gathered_values",
    "plait_gathered",
)

GATHERED = (GATHERED_KEYS, GATHERED_VALUES, GATHERED_OTHER)
"""Whole sequences on every rank: attention's keys and values, and all else that is gathered."""

RELAID = ("plait_relaid",)
"""What `reorder`, `restore` and `relayout` moved between ranks."""

ATTENDED = ("plait_attention_out", "plait_attention_lse")
"""What attention's backward pass needs of its forward pass."""


def _let_names_be_transposed() -> None:
    """A name is the identity, which jax gives no transpose: moves are linear, and need one."""
    (equation,) = jax.make_jaxpr(lambda x: checkpoint_name(x, "x"))(0.0).eqns
    ad.primitive_transposes.setdefault(equation.primitive, lambda ct, *_, **__: [ct])


_let_names_be_transposed()


def named(x: Any, name: str) -> Any:
    """x under a name for policies; as it is where nothing is traced and a name would be a copy."""
    return checkpoint_name(x, name) if isinstance(x, jax.core.Tracer) else x
