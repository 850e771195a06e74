"""From documents to gradients: packed, balanced batches give what each document gives alone."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import oracle
from plait import Blockwise, ContextParallel, Contiguous
from plait.packing import balance_segments, pack, unpack

ROWS, RANKS, LENGTH = 2, 4, 96


def lengths_in_two_rows(rng):
    while True:
        lengths = rng.integers(1, 70, 5)
        if lengths.sum() > 120 and len(pack(lengths, LENGTH).rows) == ROWS:
            return lengths


@pytest.mark.parametrize(("strategy", "batches"), [("all_gather", 20), ("ring", 3)])
def test_a_pack_gives_what_documents_give_alone(strategy, batches, rng):
    """Outputs and gradients; each row of each batch has an order of its own, compiled once."""
    mesh = Mesh(np.array(jax.devices()).reshape(ROWS, RANKS), ("data", "context"))
    cp = ContextParallel(Contiguous(RANKS), "context", batch_axes="data")
    traces = []

    @jax.jit
    def step(q, k, v, d_out, ids, positions):
        traces.append(1)

        def attend(q, k, v):
            return cp.attention(
                q, k, v, segment_ids=ids, source_positions=positions, strategy=strategy,
                kernel=Blockwise(8, 8),
            )  # fmt: skip

        out, pull = jax.vjp(attend, q, k, v)
        return out, *pull(d_out)

    for batch in range(batches):
        lengths = lengths_in_two_rows(rng)
        record = pack(lengths, LENGTH, groups=ROWS)
        documents = [rng.normal(size=(4, n, 2, 8)).astype(np.float32) for n in lengths]
        arrays = [record.apply([d[i] for d in documents], fill=0) for i in range(4)]
        orders = np.stack(
            [
                balance_segments(ids, RANKS, chunk=8).layout.positions(LENGTH)
                for ids in record.segment_ids
            ]
        )
        positions = np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1))
        there = cp.device_put(
            [*arrays, record.segment_ids, positions], mesh, source_positions=orders
        )
        np.testing.assert_array_equal(there[-1], orders)
        with jax.set_mesh(mesh):
            found = step(*there)
        back = [
            unpack(np.asarray(x)[np.arange(ROWS)[:, None], np.argsort(orders)], record)
            for x in found
        ]
        for number, (q, k, v, d_out) in enumerate(documents):
            seen = oracle.visible(np.arange(len(q)))
            wanted = oracle.attention(q[None], k[None], v[None], seen, d_out=d_out[None])
            for x, b in zip(back, wanted, strict=True):
                bound = 2e-6 * np.abs(b).max() + 1e-6
                np.testing.assert_allclose(x[number], b[0], rtol=0, atol=bound, err_msg=str(batch))
    assert len(traces) == 1
