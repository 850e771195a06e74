import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import oracle
import plait
from plait import ContextParallel, Placed, Zigzag
from plait.positions import positions_of_slots, slots_of_positions
from sweeps import slow
from test_layout import layouts


@pytest.mark.parametrize("ranks", [1, slow(2), 3, slow(8)])
def test_of_this_rank(ranks, mesh_of):
    for layout in layouts(ranks):
        length = layout.multiple * (1 if isinstance(layout, Placed) else 2)
        cp = ContextParallel(layout, "context")
        fn = jax.shard_map(
            lambda cp=cp, length=length: cp.source_positions(length),
            mesh=mesh_of(ranks),
            in_specs=(),
            out_specs=P("context"),
        )
        wanted = oracle.positions(layout, length).astype(np.int32)
        oracle.same_bits(jax.jit(fn)(), wanted)
        oracle.same_bits(cp.source_positions(length), wanted)
        oracle.same_bits(positions_of_slots(layout, length), wanted)
        slots = slots_of_positions(layout, length, jnp.arange(length))
        np.testing.assert_array_equal(wanted[np.asarray(slots)], np.arange(length))


def test_two_mesh_axes_in_the_other_order():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
    cp = ContextParallel(Zigzag(8), ("b", "a"))
    fn = jax.shard_map(
        lambda: cp.source_positions(32), mesh=mesh, in_specs=(), out_specs=P(("b", "a"))
    )
    np.testing.assert_array_equal(jax.jit(fn)(), oracle.positions(Zigzag(8), 32))


def test_no_table_of_the_sequence_in_the_program(mesh_of):
    cp = ContextParallel(Zigzag(8), "context")
    fn = jax.shard_map(
        lambda: cp.source_positions(1 << 20), mesh=mesh_of(8), in_specs=(), out_specs=P("context")
    )
    assert len(jax.jit(fn).lower().as_text()) < 10_000


def test_segment_positions_by_hand():
    """Counted after reordering they would be [0,1,0,1,2,2,3,4]; by slot, [0,1,6,7,2,3,4,5]."""
    ids = np.array([1, 1, 1, 2, 2, 2, 2, 2])
    counted = plait.segment_positions(ids)
    np.testing.assert_array_equal(counted, [0, 1, 2, 0, 1, 2, 3, 4])
    np.testing.assert_array_equal(plait.segment_positions(jnp.asarray(ids)), counted)
    moved = plait.reorder(counted, Zigzag(2), axis=0)
    np.testing.assert_array_equal(moved, [0, 1, 3, 4, 2, 0, 1, 2])


def test_segment_positions_of_a_batch_with_padding():
    ids = np.array([[0, 1, 1, 0, 0, 2], [3, 3, 1, 1, 1, 0]])
    wanted = [[0, 0, 1, 0, 0, 0], [0, 1, 0, 1, 2, 0]]
    for array in (ids, jnp.asarray(ids)):
        found = plait.segment_positions(array)
        assert found.dtype == np.int32
        np.testing.assert_array_equal(found, wanted)
    with pytest.raises(ValueError, match="float64"):
        plait.segment_positions(np.zeros(3))


def test_rope_rows_of_packed_documents():
    layout = Placed.zigzag_documents([4, 4], ranks=2)
    np.testing.assert_array_equal(layout.positions(8).reshape(2, 4), [[0, 3, 4, 7], [1, 2, 5, 6]])
    within = plait.segment_positions(np.array([1, 1, 1, 1, 2, 2, 2, 2]))
    moved = plait.reorder(within, layout, axis=0).reshape(2, 4)
    np.testing.assert_array_equal(moved, [[0, 3, 0, 3], [1, 2, 1, 2]])


def test_an_id_that_comes_back_is_refused():
    with pytest.raises(ValueError, match="segment id 1 of row 1 comes back"):
        plait.segment_positions(np.array([[1, 1, 2, 0], [1, 2, 1, 0]]))


def test_errors():
    with pytest.raises(ValueError, match=r"2999.*3000"):
        plait.source_positions(Zigzag(4), 2999)
