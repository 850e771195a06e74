import platform
import sys

import jax
import pytest

from errors import refused
from plait.audit import topologies, topology


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("v5q:4x4x8", ["'v5q:4x4x8' is unknown", "v5p:4x4x8"]),
        ("V5P:2x2x4", ["'V5P:2x2x4' is unknown", "near it: v5p:2x2x4"]),
        ("CPU:8", ["'CPU:8' is unknown", "near it: cpu"]),
        ("gpu", ["'gpu' is unknown", "near it: h100:1x1x8, h200:1x1x8, b200:1x1x8"]),
        ("cuda:8", ["'cuda:8' is unknown", "near it: h100:1x1x8, h200:1x1x8, b200:1x1x8"]),
        ("tpu", ["'tpu' is unknown", "near it: v5e:8x16, v5p:4x4x8, v6e:8x16, tpu7x:4x4x4"]),
        ("v5p:100x100x100", ["the largest is 16x16x24", "v5p:16x16x24 does"]),
        ("v5p:4x4x32", ["the largest is 16x16x24", "v5p:4x4x24 does"]),
        ("v6e:32x4", ["the largest is 16x16", "v6e:16x4 does"]),
        ("h100:1x1x9", ["a host has 8 devices", "h100:1x1x8 does"]),
        ("h200:1x8x64", ["a host has 8 devices", "h200:1x8x8 does"]),
        ("", ["'' is unknown", "v5e:8x16", "h200:1x1x8", "cpu"]),
        ("v5p:4x4", ["the shape '4x4'", "3 sizes", "such as v5p:4x4x8"]),
        ("v5p:4x4x0", ["the shape '4x4x0'", "at least 1", "such as v5p:4x4x8"]),
        ("v6e:axb", ["the shape 'axb'", "2 sizes", "such as v6e:8x16"]),
        ("h100:2x4", ["the shape '2x4'", "3 sizes", "such as h100:1x2x4"]),
        ("h100:8", ["the shape '8'", "3 sizes", "such as h100:1x1x8"]),
        ("cpu:9", ["cpu has 8 devices", "cpu:1 to cpu:8", "device_count=9"]),
        ("cpu:0", ["cpu has 8 devices", "cpu:1 to cpu:8"]),
        ("cpu:-1", ["cpu has 8 devices", "cpu:1 to cpu:8"]),
        ("local:99", ["local has 8 devices", "local:1 to local:8"]),
    ],
)
def test_a_topology_that_is_none_is_refused_with_one_that_is(name, words):
    refused(lambda: topology(name), *words)


def test_how_to_get_more_devices_than_one_is_said(monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda *_: ["the only one"])
    refused(
        lambda: topology("cpu:9"),
        "cpu has 1 device; it needs cpu:1, or XLA_FLAGS=--xla_force_host_platform_device_count=9",
    )


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


@pytest.mark.parametrize(
    ("name", "near"),
    [("v5p:3x5x7", "v5p:4x4x8"), ("v5p:3x3x3", "v5p:4x4x4"), ("v6e:3x3", "v6e:4x4")],
)
def test_a_tpu_slice_that_no_one_sells_is_refused(name, near):
    pytest.importorskip("libtpu")
    refused(lambda: topology(name), f"{name!r} does not exist", f"{near} does")
    assert topology(near).name == near


def test_the_largest_slices_exist():
    pytest.importorskip("libtpu")
    assert len(topology("v5p:24x16x16").devices) == 6144
    assert len(topology("v6e:16x16").devices) == 256


@pytest.mark.parametrize("name", [name for name in topologies() if name[1:4].endswith("00")])
def test_nvidia_hosts_need_no_gpu(name):
    pytest.importorskip("jax_cuda13_plugin")
    try:
        found = topology(name)
    except RuntimeError as error:  # without cuDNN it loads only as jax starts
        pytest.skip(str(error))
    assert len(found.devices) == 8
