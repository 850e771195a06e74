"""Eight virtual CPU devices for every test, set before jax starts a backend.

Compiling is most of what the tests do, so LLVM is told not to optimise, which changes no HLO, and
what was compiled to be run is not compiled again to be read.
"""

import os
import tempfile

os.environ["XLA_FLAGS"] = " ".join(
    (
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        "--xla_backend_optimization_level=0",
    )
).strip()
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
import pytest
from hypothesis import settings

settings.register_profile("plait", deadline=None, derandomize=True)
settings.load_profile("plait")

_compiled = tempfile.TemporaryDirectory()
jax.config.update("jax_compilation_cache_dir", _compiled.name)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture
def mesh_of():
    """A mesh of the first n devices with one axis, "context"."""

    def make(ranks: int) -> jax.sharding.Mesh:
        return jax.sharding.Mesh(np.array(jax.devices()[:ranks]), ("context",))

    return make
