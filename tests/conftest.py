"""Eight virtual CPU devices for every test, set before jax starts a backend."""

import os

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
).strip()
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
import pytest
from hypothesis import settings

settings.register_profile("plait", deadline=None, derandomize=True)
settings.load_profile("plait")


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture
def mesh_of():
    """A mesh of the first n devices with one axis, "context"."""

    def make(ranks: int) -> jax.sharding.Mesh:
        return jax.sharding.Mesh(np.array(jax.devices()[:ranks]), ("context",))

    return make
