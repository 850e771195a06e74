import jax
import pytest


@pytest.fixture(autouse=True, scope="session")
def _started_jax():
    """Started before `plait demo` can ask for fewer devices than the other tests need."""
    jax.devices()
