import pytest

import remat
from plait import audit

GATHER, REDUCE = ("all-gather", 67108864, 2), ("all-reduce", 67108864, 2)


def test_the_table_by_hand():
    rows = [{"name": "`X`", "temp_bytes": int(1.947e9), "collectives": [REDUCE, GATHER]}]
    text = remat.table(rows, audit.topology("cpu:8"), 32768, 8)
    assert "32,768 tokens over 8 ranks of cpu:8" in text
    line = "| `X` | 2 all-gather of 67.1 MB, 2 all-reduce of 67.1 MB | 1,947 MB |"
    assert text.endswith(line), text


@pytest.mark.slow
def test_a_layer_counts_its_collectives(monkeypatch):
    """Compiled for virtual CPU devices: keys and values, at 2 heads of 8 in float32 or less."""
    pytest.importorskip("google.protobuf", reason="protobuf: pip install 'plait[audit]'")
    for name, value in (("HEADS", 4), ("KV_HEADS", 2), ("HEAD_DIM", 8), ("LAYERS", 3)):
        monkeypatch.setattr(remat, name, value)
    target = audit.topology("cpu:8")

    def gathers(form):
        found = remat.measure(form, target, 128, 8)["collectives"]
        return sum(count for kind, _, count in found if kind == "all-gather")

    assert [gathers(form) for form in remat.FORMS] == [2, 4, 2, 4, 2]
