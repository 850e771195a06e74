"""Every strategy with every kernel at 128K tokens over 128 ranks, compiled for a TPU slice."""

import pytest

import bench_attention
from plait import audit

pytest.importorskip("libtpu", reason="libtpu: pip install 'plait[audit]' on x86-64 Linux")

RANKS, LENGTH = 128, 131072
# Temporary memory, at most, in MB; and what is sent, by kind: one slice, so gathers are reductions.
SENT = {
    "all_gather": {"all-reduce": 4},
    "ring": {"collective-permute": 762},
    "ulysses": {"all-to-all": 8},
}
TEMP = {
    ("Llama-3-70B", "all_gather"): 1500,
    ("Llama-3-70B", "ring"): 250,
    ("DeepSeek-V3.2", "all_gather"): 28000,
    ("DeepSeek-V3.2", "ring"): 1500,
    ("DeepSeek-V3.2", "ulysses"): 2500,
}


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["flash", "blockwise"])
@pytest.mark.parametrize(("model", "strategy"), TEMP)
def test_forward_and_backward_compile(model, strategy, kernel):
    topology = audit.topology("v5p:4x4x8")
    found = bench_attention.measure(model, strategy, kernel, topology, LENGTH, RANKS)
    assert {kind: times for kind, (times, _) in found["sent"].items()} == SENT[strategy]
    assert found["temp_bytes"] <= TEMP[model, strategy] * 1e6
