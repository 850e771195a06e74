"""Strategies with the kernels at 128K tokens over 128 ranks, compiled for a TPU slice."""

import pytest

import bench_attention
from plait import audit

pytest.importorskip("libtpu", reason="libtpu: pip install 'plait[audit]' on x86-64 Linux")

RANKS, LENGTH = 128, 131072
SENT = {  # over the whole slice every gather is an all-reduce
    "all_gather": {"all-reduce": 4},
    "ring": {"collective-permute": 762},
    "ulysses": {"all-to-all": 8},
}
CASES = [
    # The last is how much temporary memory there may be, in MB: of the ring by Flash libtpu 0.0.52
    # takes 1,261 and 0.0.42 takes 1,598.
    ("Llama-3-70B", "all_gather", "flash", 1500),
    ("Llama-3-70B", "ring", "flash", 250),
    ("Llama-3-70B", "ring", "blockwise", 300),
    ("DeepSeek-V3.2", "ring", "flash", 1600),
    ("DeepSeek-V3.2", "ulysses", "flash", 500),
    ("DeepSeek-V3.2", "ulysses", "blockwise", 2500),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "strategy", "kernel", "most"), CASES)
def test_forward_and_backward_compile(model, strategy, kernel, most):
    topology = audit.topology("v5p:4x4x8")
    found = bench_attention.measure(model, strategy, kernel, topology, LENGTH, RANKS)
    assert {kind: times for kind, (times, _) in found["sent"].items()} == SENT[strategy]
    assert found["temp_bytes"] <= most * 1e6
