import json
import sys

import jax
import jax.numpy as jnp
import pytest

from errors import refused
from plait.audit import Operation, Report, compile_for, proto

pytest.importorskip("google.protobuf")


def test_a_report_is_json_and_names_what_is_not_known_null():
    report = compile_for("cpu", lambda: None)
    assert report.floor_bytes == 0
    plain = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert plain["hbm_ratio"] is plain["traffic_ratio"] is plain["estimated_seconds"] is None


def test_a_report_as_json_has_the_ratios():
    x = jax.ShapeDtypeStruct((64,), jnp.float32)
    plain = compile_for("cpu", lambda x: x + 1, x).to_dict()
    assert plain["floor_bytes"] == 512
    assert plain["hbm_ratio"] == 1.0


def test_bytes_by_kind_count_every_turn_and_put_the_largest_first():
    operations = tuple(
        Operation(kind, kind, executions, accessed, 0, "")
        for kind, executions, accessed in (("copy", 1, 10), ("fusion", 3, 4), ("tuple", 1, 0))
    )
    report = Report("cpu", (*operations, operations[0]), (), 0, 0, 0, 0, 0, 0, 0)
    assert list(report.bytes_by_kind.items()) == [("copy", 20), ("fusion", 12)]


@pytest.mark.parametrize("module", ["google", "google.protobuf"])
def test_missing_protobuf_is_named_with_its_extra(monkeypatch, module):
    for name in [n for n in sys.modules if n.startswith("google")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    make = proto._module_class.__wrapped__
    refused(make, "needs protobuf", "pip install 'plait[audit]'", error=ImportError)
