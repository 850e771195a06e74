"""Virtual CPU devices for a command, while jax has not started."""

from __future__ import annotations

import jax


def start_on_cpu(count: int = 1) -> None:
    """Have jax start on the CPU alone, with so many devices; without effect once it has started."""
    try:
        jax.config.update("jax_num_cpu_devices", count)
        jax.config.update("jax_platforms", "cpu")
    except RuntimeError:  # jax has started already: its devices are what there is
        pass
