import argparse
import json

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

import bench_step
import oracle
import pages
import plait
from plait import Zigzag, audit

SHAPE = {"heads": 4, "kv_heads": 2, "head_dim": 12, "v_head_dim": 8}


def test_every_form_gives_the_attention_of_the_oracle(mesh_of, rng):
    """Also "none", which leaves the keys where they lie: else it would be no reference."""
    tokens, layout, mesh = 64, Zigzag(8), mesh_of(8)
    values = [
        rng.normal(size=x.shape).astype(np.float32) for x in bench_step.arguments(SHAPE, tokens)
    ]
    q, k, v, d_out = (x.swapaxes(1, 2) for x in values)
    seen = oracle.visible(np.arange(tokens), np.ones((1, tokens), np.int32))
    wanted = oracle.attention(q, k, v, seen, d_out=d_out)
    sharding = NamedSharding(mesh, bench_step.SPEC)
    arrays = [jax.device_put(plait.reorder(x, layout, axis=2), sharding) for x in values]
    for form in bench_step.FORMS:
        with jax.set_mesh(mesh):
            found = jax.jit(bench_step.layer(form, 8))(*arrays)
        for name, got, right in zip(("out", "dq", "dk", "dv"), found, wanted, strict=True):
            restored = plait.restore(np.asarray(got), layout, axis=2).swapaxes(1, 2)
            message = f"{form}: {name}"
            np.testing.assert_allclose(restored, right, rtol=2e-5, atol=2e-5, err_msg=message)


def test_turns_by_hand():
    """128K over 128: blocks of 256, so 1024 tokens are 4 blocks of queries, which see 1026."""
    assert bench_step.turns(131072, 128) == 257  # 256.5, rounded up
    assert bench_step.turns(2048, 1) == 5  # blocks see 1, 2, .., 8 of 8: 36 / 8


def program(seconds, hbm, opaque=()):
    return {
        "seconds": seconds,
        "hbm_bytes": hbm,
        "temp_bytes": int(2e9),
        "opaque": list(opaque),
        "collectives": [["all-reduce", 805306368, 1], ["all-reduce", 805306368, 1]],
    }


RESULTS = {
    "topology": "v5p:4x4x8",
    "ranks": 128,
    "tokens": 131072,
    "versions": {"jax": "1.2.3", "libtpu": "4.5.6"},
    "layers": {
        "A": {
            **SHAPE,
            "key_bytes": int(1.6e9),
            "matmul_flops": int(9e12),
            "matmul_seconds": 0.02,
            "permute_seconds": 0.001,
            "programs": {
                "none": program(0.1, 10e9),
                "take": program(0.15, 20e9, ["gather_fusion"]),
                "strided": program(0.2, 30e9),
                "plait": program(0.1, 11e9),
            },
        }
    },
}


def test_shares_by_hand():
    strided = bench_step.shares(RESULTS["layers"]["A"], "strided")
    assert strided["seconds"] == pytest.approx(0.1)
    assert strided["of_program"] == pytest.approx(0.5)
    assert strided["of_peak"] == pytest.approx(0.1 / 0.12)
    assert (strided["hbm_bytes"], strided["temp_bytes"]) == (20e9, 0)
    plaits = bench_step.shares(RESULTS["layers"]["A"], "plait")
    assert plaits["seconds"] == pytest.approx(0.001)  # its permutes on the busiest link
    assert plaits["of_program"] == pytest.approx(0.001 / 0.101)


def test_the_table_says_what_is_a_bound():
    text = bench_step.table(RESULTS)
    assert "jax 1.2.3, libtpu 4.5.6" in text
    assert "| none | 10.0 | 2.00 | 100 | | | |" in text
    assert "| take | 20.0 (+10.0) | 2.00 | 150 | ≥ 50.0 | ≥ 33.3% | ≥ 71.4% |" in text
    assert "| strided | 30.0 (+20.0) | 2.00 | 200 | 100 | 50.0% | 83.3% |" in text
    assert "| plait | 11.0 (+1.00) | 2.00 | 101 | 1.00 | 1.0% | 4.8% |" in text
    assert "take: gather_fusion" in text
    assert "* none: 2 all-reduce of 805 MB" in text


def test_the_page_is_rewritten_from_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "DOCS", tmp_path)
    page, source = tmp_path / "performance.md", tmp_path / "results.json"
    page.write_text("a\n<!-- bench step -->\nold\n<!-- end of bench step -->\nb\n")
    source.write_text(json.dumps(RESULTS))
    parser = argparse.ArgumentParser()
    bench_step.add_arguments(parser)
    assert bench_step.run(parser.parse_args(["--from", str(source), "--docs"])) == 0
    text = page.read_text()
    assert bench_step.table(RESULTS) in text
    assert text.startswith("a\n<!-- bench step -->\n")
    assert text.endswith("<!-- end of bench step -->\nb\n")
    assert "old" not in text


@pytest.mark.slow
def test_a_tiny_layer_compiled_for_a_tpu(monkeypatch):
    pytest.importorskip("libtpu", reason="libtpu: pip install 'plait[audit]' on x86-64 Linux")
    shape = {"heads": 2, "kv_heads": 2, "head_dim": 128, "v_head_dim": 128}
    monkeypatch.setitem(bench_step.LAYERS, "tiny", shape)
    target = audit.topology("v5p:2x2x2")
    found = bench_step.results_of(["tiny"], ["none", "plait"], target, 4096, 8, lambda line: None)
    facts = found["layers"]["tiny"]
    pairs = 512 * 4097 // 2  # of one rank: an eighth of 4096 * 4097 / 2
    assert facts["matmul_flops"] == 2 * 7 * 2 * 128 * pairs  # seven matmuls for each of 2 heads
    none, plaits = facts["programs"]["none"], facts["programs"]["plait"]
    kinds = [kind for kind, _, _ in plaits["collectives"]]
    assert kinds.count("collective-permute") == 8  # K and V, forward and backward, two each
    assert none["seconds"] > 0
    # A few shards of eight, forward and backward.
    assert 0 < bench_step.shares(facts, "plait")["hbm_bytes"] < 2 * facts["key_bytes"]
    assert "| plait |" in bench_step.table(found)
