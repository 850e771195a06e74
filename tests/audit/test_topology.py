import platform
import sys

import pytest

from errors import refused
from plait.audit import topologies, topology


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("v5q:4x4x8", ["'v5q:4x4x8' is unknown", "v5p:4x4x8"]),
        ("V5P:4x4x8", ["'V5P:4x4x8' is unknown", "v5p:4x4x8"]),
        ("", ["'' is unknown", "v5e:8x16", "h200:1x1x8", "cpu"]),
        ("v5p:4x4", ["the shape '4x4'", "3 sizes", "such as v5p:4x4x8"]),
        ("v5p:4x4x0", ["the shape '4x4x0'", "at least 1", "such as v5p:4x4x8"]),
        ("v6e:axb", ["the shape 'axb'", "2 sizes", "such as v6e:8x16"]),
        ("h100:8", ["the shape '8'", "3 sizes", "such as h100:1x1x8"]),
        ("cpu:9", ["cpu has 8 devices", "cpu:1 to cpu:8", "device_count=9"]),
        ("cpu:0", ["cpu has 8 devices", "cpu:1 to cpu:8"]),
        ("cpu:-1", ["cpu has 8 devices", "cpu:1 to cpu:8"]),
        ("local:99", ["local has 8 devices", "local:1 to local:8"]),
    ],
)
def test_a_topology_that_is_none_is_refused_with_one_that_is(name, words):
    refused(lambda: topology(name), *words)


def test_devices_of_this_machine_are_counted():
    assert [len(topology(name).devices) for name in ("cpu", "cpu:3", "local:8")] == [8, 3, 8]


def test_a_mesh_takes_the_first_devices():
    mesh = topology("cpu:8").mesh({"data": 2, "context": 3})
    assert dict(mesh.shape) == {"data": 2, "context": 3}
    assert [device.id for device in mesh.devices.flat] == [0, 1, 2, 3, 4, 5]
    assert dict(topology("cpu:4").mesh().shape) == {"context": 4}
    refused(lambda: topology("cpu:4").mesh({"a": 3, "b": 2}), "takes 6 devices", "cpu:4 has 4")


def test_a_missing_compiler_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    for module in ("libtpu", "jax_cuda12_plugin", "jax_cuda13_plugin"):
        monkeypatch.setitem(sys.modules, module, None)
    refused(lambda: topology("v5p"), "needs libtpu", "plait[audit]", error=ImportError)
    refused(lambda: topology("b200"), "CUDA plugin", "plait[audit-gpu]", error=ImportError)


def test_a_machine_without_a_tpu_compiler_is_named(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    refused(lambda: topology("v5p"), "x86-64 Linux alone", "aarch64", error=RuntimeError)


@pytest.mark.parametrize(
    ("name", "full_name", "devices"),
    [
        ("v5e:4x4", "v5e:4x4", 16),
        ("v5p", "v5p:4x4x8", 128),
        ("v6e:2x4", "v6e:2x4", 8),
        ("tpu7x:2x2x1", "tpu7x:2x2x1", 8),  # two devices a chip
    ],
)
def test_tpu_slices_need_no_tpu(name, full_name, devices):
    pytest.importorskip("libtpu")
    found = topology(name)
    assert (found.name, len(found.devices)) == (full_name, devices)
    assert {device.platform for device in found.devices} == {"tpu"}
    assert found.chip.name == name.partition(":")[0]


def test_a_tpu_slice_that_no_one_sells_is_refused():
    pytest.importorskip("libtpu")
    refused(lambda: topology("v5p:3x5x7"), "'v5p:3x5x7' does not exist", "v5p:4x4x8 does")


@pytest.mark.parametrize("name", [name for name in topologies() if name[1:4].endswith("00")])
def test_nvidia_hosts_need_no_gpu(name):
    pytest.importorskip("jax_cuda13_plugin")
    try:
        found = topology(name)
    except RuntimeError as error:  # without cuDNN it loads only as jax starts
        pytest.skip(str(error))
    assert len(found.devices) == 8
