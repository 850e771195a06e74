"""At DeepSeek-V3.2's sizes, 128K tokens over 128 ranks, compiled for a TPU slice."""

import pytest

import bench_sparse
from plait import audit

pytest.importorskip("libtpu", reason="libtpu: pip install 'plait[audit]' on x86-64 Linux")

RANKS, LENGTH = 128, 131072
MASK = 4 * LENGTH * LENGTH // RANKS
"""Bytes of one rank's rows of the S x S mask, in float32."""


@pytest.fixture(scope="module")
def topology():
    return audit.topology("v5p:4x4x8")


def test_selection_is_linear_in_the_sequence(topology):
    report = bench_sparse.compile_select(topology, LENGTH, RANKS, turns=1)
    assert report.temp_bytes <= 128 * 2**20
    report.require(gathers=0, scatters=0)
    assert max(o.accessed_bytes for o in report.operations) < MASK / 4
    received = sorted(c.bytes for c in report.collectives)
    keys = 2 * LENGTH * bench_sparse.INDEX_DIM
    assert received[-1] == keys
    assert sum(received[:-1]) == keys / RANKS  # the shard, put in order before it is gathered


@pytest.mark.slow
def test_attention_exchanges_latents_alone(topology):
    report = bench_sparse.compile_attention(topology, LENGTH, RANKS)
    latents = 2 * LENGTH * (bench_sparse.LATENT + bench_sparse.ROPE)
    assert [c.bytes for c in report.collectives] == [latents, latents]
    assert report.temp_bytes <= 2**30


@pytest.mark.slow
def test_a_whole_layer_fits(topology):
    report = bench_sparse.compile_layer(topology, LENGTH, RANKS)
    total = report.temp_bytes + report.argument_bytes + report.output_bytes
    assert total <= 3 * 2**30  # of 95 GiB
    assert max(o.accessed_bytes for o in report.operations) < 2 * MASK
