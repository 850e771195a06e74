"""A host's batch as global arrays: what reorder and device_put give, read slot by slot."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import one_process
import oracle
import plait
from errors import refused
from plait import ContextParallel, Contiguous, HalfSwap, Placed, Striped, Zigzag

LAYOUTS = [Contiguous(4), Zigzag(4), HalfSwap(4), Striped(4, 3), Placed((0, 3, 1, 2, 2, 3, 1, 0))]


def mesh():
    return Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "context"))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.kind)
def test_what_reorder_and_device_put_give(layout, rng):
    cp = ContextParallel(layout, "context", batch_axes="data")
    batch = {
        "tokens": rng.integers(0, 99, (4, 48)).astype(np.int32),
        "images": rng.normal(size=(2, 3, 48, 5)).astype(np.float16),
        "step": np.float32(3),
        "nothing": None,
    }
    axes = {"tokens": 1, "images": -2, "step": None, "nothing": None}
    found = cp.device_put(batch, mesh(), axis=axes)
    assert found["step"] is batch["step"]
    assert found["nothing"] is None
    for name, spec in {"tokens": ("data", "context"), "images": ("data", None, "context")}.items():
        assert found[name].sharding == NamedSharding(mesh(), P(*spec))
        wanted = oracle.reorder(batch[name], layout, axes[name])
        oracle.same_bits(np.asarray(found[name]), wanted)


def test_positions_that_differ_from_row_to_row(rng):
    x = rng.integers(0, 99, (4, 24, 2))
    orders = np.stack([rng.permutation(24) for _ in range(4)])
    cp = ContextParallel(Contiguous(4), "context", batch_axes="data")
    found = cp.device_put(x, mesh(), source_positions=orders)
    for row in range(4):
        np.testing.assert_array_equal(found[row], x[row, orders[row]])


def test_each_process_reads_what_its_devices_hold():
    """In `test_processes.py` with several."""
    one_process.check_placing(one_process.mesh_of(2, 2, 2))


def test_errors_name_what_is_wrong(rng):
    x, cp = np.zeros((4, 24)), ContextParallel(Zigzag(4), "context", batch_axes="data")
    refused(lambda: cp.device_put({"x": x[:, :20]}, mesh()), "'x'", "20", "24")
    refused(lambda: cp.device_put({"x": x[:3]}, mesh()), "'x'", "3 rows", "2")
    refused(lambda: cp.device_put(x[0], mesh(), axis=0), "axis 0", "axis 1")
    refused(lambda: plait.device_put(x, Zigzag(2), mesh(), axis_name="context"), "2 ranks", "4")
    orders = np.tile(np.arange(24), (4, 1))
    refused(lambda: cp.device_put(x, mesh(), source_positions=orders[0]), "(24,)", "[batch")
    refused(lambda: cp.device_put(x, mesh(), source_positions=orders[:2]), "(2, 24)", "(4, 24)")
    orders[2, 5] = 6
    refused(lambda: cp.device_put(x, mesh(), source_positions=orders), "row 2", "0 to 23")
