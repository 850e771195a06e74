import enum
import functools
import importlib.util
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import oracle
import plait
from errors import refused
from hlo import collectives, sequential, text
from plait import ContextParallel, Striped, Zigzag
from plait.integrations import maxtext
from plait.integrations.maxtext import (
    ReorderStrategy,
    reorder_causal_load_balanced,
    reorder_mask_load_balancing,
    reorder_sequence,
    roll_and_mask,
)
from sweeps import slow

STATIC = ("cp_size", "seq_dim", "to_contiguous")
DTYPES = [
    np.int32,
    np.uint8,
    np.bool_,
    np.float32,
    np.complex64,
    jnp.bfloat16,
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.int4,
]


def load_layer():
    path = pathlib.Path(__file__).resolve().parents[2] / "benchmarks" / "maxtext_layer.py"
    spec = importlib.util.spec_from_file_location("maxtext_layer", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def gathered(x, cp_size, axis, to_contiguous):
    """The chunks of zigzag order picked one by one with jnp.take; axis counts from the front."""
    chunks = x.reshape(*x.shape[:axis], 2 * cp_size, -1, *x.shape[axis + 1 :])
    order = [chunk for rank in range(cp_size) for chunk in (rank, 2 * cp_size - 1 - rank)]
    if to_contiguous:
        order = [order.index(chunk) for chunk in range(2 * cp_size)]
    return jnp.take(chunks, jnp.array(order), axis=axis).reshape(x.shape)


def bits(rng, shape, dtype):
    """Any bit pattern of the dtype, NaN payloads included."""
    dtype = np.dtype(dtype)
    if dtype in (np.bool_, ml_dtypes.int4):
        return rng.integers(0, 2, shape).astype(dtype)
    raw = rng.integers(0, 256, (*shape, dtype.itemsize), dtype=np.uint8)
    return raw.view(dtype).reshape(shape)


def test_zigzag_by_hand():
    there = reorder_sequence(np.arange(8)[None], 2)
    assert there.tolist() == [[0, 1, 6, 7, 2, 3, 4, 5]]
    wanted = [0, 1, 14, 15, 2, 3, 12, 13, 4, 5, 10, 11, 6, 7, 8, 9]
    assert reorder_sequence(jnp.arange(16), 4, seq_dim=-1).tolist() == wanted
    back = [0, 1, 4, 5, 8, 9, 12, 13, 14, 15, 10, 11, 6, 7, 2, 3]
    assert reorder_sequence(jnp.arange(16), 4, 0, True).tolist() == back


@pytest.mark.parametrize("to_contiguous", [False, True])
@pytest.mark.parametrize("cp_size", [2, 4, 6])
@pytest.mark.parametrize(
    ("shape", "seq_dim"),
    [((24,), 0), ((24,), -1), ((2, 24), 1), ((24, 3), -2), ((2, 3, 48, 5), 2), ((2, 3, 24, 5), -2)],
)
def test_equals_the_gather_form(shape, seq_dim, cp_size, to_contiguous, rng):
    x = jnp.asarray(rng.normal(size=shape).astype(np.float32))
    wanted = gathered(x, cp_size, seq_dim % len(shape), to_contiguous)
    jitted = jax.jit(reorder_sequence, static_argnames=STATIC)
    for fn in (reorder_sequence, jitted):
        oracle.same_bits(fn(x, cp_size, seq_dim, to_contiguous), wanted)
    on_host = reorder_sequence(np.asarray(x), cp_size, seq_dim, to_contiguous)
    assert type(on_host) is np.ndarray
    oracle.same_bits(on_host, wanted)
    assert not sequential(text(functools.partial(jitted, cp_size=cp_size, seq_dim=seq_dim), x))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_every_bit_of_every_dtype(dtype, rng):
    x = bits(rng, (2, 16, 3), dtype)
    for to_contiguous, move in ((False, oracle.reorder), (True, oracle.restore)):
        wanted = move(x, Zigzag(4), 1)
        for array in (x, jax.device_put(x)):
            oracle.same_bits(reorder_sequence(array, 4, to_contiguous=to_contiguous), wanted)


def test_none_passes_through():
    assert reorder_sequence(None, 3) is None
    assert jax.jit(reorder_sequence, static_argnames=STATIC)(None, cp_size=2) is None


def test_derivative_is_the_way_back(rng):
    x = jnp.asarray(rng.normal(size=(2, 16)).astype(np.float32))
    _, pull = jax.vjp(lambda x: reorder_sequence(x, 4), x)
    oracle.same_bits(pull(x)[0], gathered(x, 4, 1, True))


@pytest.mark.parametrize("kind", [np.zeros, jnp.zeros])
def test_reorder_sequence_refuses(kind):
    x = kind((2, 24))
    refused(lambda: reorder_sequence(x, 1), "cp_size is 1", "even", "such as 2")
    refused(lambda: reorder_sequence(x, 3), "cp_size is 3", "such as 4")
    refused(lambda: reorder_sequence(x, 0), "cp_size is 0", "an even number, such as 2")
    refused(lambda: reorder_sequence(x, -3), "cp_size is -3", "an even number, such as 2")
    refused(lambda: reorder_sequence(x, 2.0), "cp_size is 2.0", "such as 2", error=TypeError)
    refused(lambda: reorder_sequence(x, "4"), "'4'", "an even number, such as 4", error=TypeError)
    refused(lambda: reorder_sequence(x, "3"), "'3'", "such as 4", error=TypeError)
    refused(lambda: reorder_sequence(x, None), "None", "such as 2", error=TypeError)
    refused(lambda: reorder_sequence(x, True), "True", "such as 2", error=TypeError)
    refused(lambda: reorder_sequence(x[:, :0], 2), "length 0", "multiple of 4")
    refused(lambda: reorder_sequence(x, 8), "length 24", "multiple of 16")
    refused(lambda: reorder_sequence(x, 2, 2), "axis 2 of 'tensor'")
    refused(lambda: reorder_sequence(x, 2, None), "seq_dim is None", error=TypeError)
    jitted = jax.jit(reorder_sequence, static_argnames=STATIC)
    refused(lambda: jitted(x, cp_size=8), "length 24")


def test_what_would_be_lost_or_misread_is_refused():
    x = np.arange(8)
    masked = np.ma.array(x, mask=x > 4)
    words = ("'tensor' is a masked array", "filled(0)")
    refused(lambda: reorder_sequence(masked, 2, 0), *words, error=TypeError)
    refused(lambda: reorder_mask_load_balancing(masked, 2, 0), *words, error=TypeError)
    batch = {"inputs": masked[None]}
    refused(lambda: reorder_causal_load_balanced(batch, 2), "'inputs' is a masked", error=TypeError)
    batch = {"images": masked}
    assert reorder_causal_load_balanced(batch, 2)["images"] is masked
    for given in ("False", 0, None):
        words = (f"to_contiguous is {given!r}", "True or False")
        refused(lambda given=given: reorder_sequence(x, 2, 0, given), *words, error=TypeError)
    oracle.same_bits(reorder_sequence(x, 2, 0, np.bool_(False)), reorder_sequence(x, 2, 0))


def test_no_option_is_named_that_is_not_there():
    """What plait.reorder says of an array without the axis, a user of these names can not do."""

    def says(call, *words, error):
        with pytest.raises(error) as raised:
            call()
        message = str(raised.value)
        assert all(word in message for word in words), message
        assert "axis None" not in message
        assert "or None" not in message

    scalar, rows = np.float32(3), np.arange(8)[None].tolist()
    cp = ContextParallel(Zigzag(2))
    says(lambda: reorder_sequence(scalar, 2), "'tensor'", "0 dimensions", error=ValueError)
    says(lambda: reorder_sequence(rows, 2), "'tensor.0.0' is a int", "np.asarray", error=TypeError)
    says(lambda: reorder_mask_load_balancing(None, 2, 1), "tensor is None", error=TypeError)
    batch = {"inputs": rows}
    says(lambda: reorder_causal_load_balanced(batch, 4), "'inputs.0.0' is a int", error=TypeError)
    says(lambda: roll_and_mask(scalar, cp), "0 dimensions", error=ValueError)
    refused(lambda: plait.reorder(scalar, Zigzag(2)), "the axis None to pass it through")


def test_a_batch_may_have_keys_of_any_kind():
    x = np.arange(8)[None]
    batch = {"inputs": x, 3: x, ("a", 1): "text", None: None}
    found = reorder_causal_load_balanced(batch, 2)
    assert list(found) == list(batch)
    assert found["inputs"].tolist() == [[0, 1, 6, 7, 2, 3, 4, 5]]
    assert all(found[key] is batch[key] for key in list(batch)[1:])
    for given in ([x], x, None):
        words = (f"batch is a {type(given).__name__}", "such as {'inputs': tokens}")
        refused(lambda g=given: reorder_causal_load_balanced(g, 4), *words, error=TypeError)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("to_contiguous", [False, True])
def test_arrays_sharded_over_a_mesh(kind, to_contiguous, rng):
    """As MaxText calls it: outside shard_map, on global arrays, jitted and not."""
    mesh = jax.make_mesh((2, 4), ("data", "context"), axis_types=(kind,) * 2)
    x = rng.normal(size=(4, 64, 3)).astype(np.float32)
    for spec in (P("data"), P("data", "context"), P(None, ("context", "data"))):
        array = jax.device_put(x, NamedSharding(mesh, spec))
        ranks = {P("data"): 6, P("data", "context"): 4}.get(spec, 8)
        sizes = (2, 4, 8) if kind == AxisType.Auto or spec == P("data") else (ranks,)
        for cp_size in sizes:
            wanted = gathered(jnp.asarray(x), cp_size, 1, to_contiguous)
            move = functools.partial(reorder_sequence, cp_size=cp_size, to_contiguous=to_contiguous)
            with jax.set_mesh(mesh):
                for fn in (move, jax.jit(move)):
                    oracle.same_bits(fn(array), wanted)
            if spec != P("data") and cp_size == ranks:
                kept = move(array).sharding
                assert kept.is_equivalent_to(array.sharding, 3), kept


def test_what_sharded_arrays_cost(rng):
    """Known to be sharded, it is the two permutes of ContextParallel.reorder."""
    mesh = jax.make_mesh((2, 4), ("data", "context"), axis_types=(AxisType.Explicit,) * 2)
    spec = NamedSharding(mesh, P("data", "context"))
    x = jax.device_put(np.zeros((4, 64, 8), np.float32), spec)
    with jax.set_mesh(mesh):
        found = collectives(text(lambda x: reorder_sequence(x, 4), x))
    assert found == [("collective-permute", 2 * 8 * 8 * 4)] * 2
    refused(lambda: reorder_sequence(x, 8), "over 4 devices", "cp_size is 8", "cp_size=4")


def test_inside_shard_map_on_a_whole_axis(mesh_of, rng):
    """MaxText restores keys, gathered before, inside its region: [batch, heads, sequence, dim]."""
    x = jnp.asarray(rng.normal(size=(1, 2, 32, 3)).astype(np.float32))
    for check_vma in (False, True):
        restored = jax.shard_map(
            lambda x: reorder_sequence(tensor=x, cp_size=4, seq_dim=2, to_contiguous=True),
            mesh=mesh_of(4),
            in_specs=P(),
            out_specs=P(),
            check_vma=check_vma,
        )
        oracle.same_bits(jax.jit(restored)(x), gathered(x, 4, 2, True))


def batch_of(rng, length=16):
    keys = [*sorted(maxtext.REORDERED_KEYS), "images", "true_length"]
    return {key: rng.integers(0, 99, (2, length)).astype(np.int32) for key in keys}


def test_batch_by_hand():
    """Ranks 0 and 1 of two: zigzag gives each an early and a late run, stripes every second."""
    row = np.arange(8)[None]
    batch = {"inputs": row, "targets_loss_mask": row, "targets": None, "positions": row}
    for strategy, wanted in (
        ("dual_chunk_swap", [0, 1, 6, 7, 2, 3, 4, 5]),
        ("striped", [0, 2, 4, 6, 1, 3, 5, 7]),
    ):
        found = reorder_causal_load_balanced(batch, 2, strategy)
        assert found["inputs"].tolist() == found["targets_loss_mask"].tolist() == [wanted]
        assert found["targets"] is None
        assert found["positions"] is row
    assert list(found) == list(batch)


def test_reordered_keys_are_those_of_maxtext():
    kinds = [f"{side}{what}" for side in ("inputs", "targets") for what in ("", "_position")]
    kinds += ["inputs_segmentation", "targets_segmentation", "targets_loss_mask"]
    assert {*kinds, "corruption_mask"} == maxtext.REORDERED_KEYS


@pytest.mark.parametrize("hardware", ["tpu", "gpu", "gpu_multiprocess", "cpu"])
@pytest.mark.parametrize(
    ("strategy", "cp_size", "layout"),
    [
        (ReorderStrategy.DUAL_CHUNK_SWAP, 4, Zigzag(4)),
        (ReorderStrategy.STRIPED, 4, Striped(4)),
        (ReorderStrategy.STRIPED, 3, Striped(3)),
        (ReorderStrategy.STRIPED, 1, Striped(1)),
    ],
)
def test_batch_on_every_platform(strategy, cp_size, layout, hardware, rng):
    batch = batch_of(rng, 24)
    jitted = jax.jit(reorder_causal_load_balanced, static_argnums=(1, 2, 3))
    for fn in (reorder_causal_load_balanced, jitted):
        found = fn(batch, cp_size, strategy, hardware)
        for key, value in batch.items():
            moved = key in maxtext.REORDERED_KEYS
            oracle.same_bits(found[key], oracle.reorder(value, layout, 1) if moved else value)


@pytest.mark.parametrize("strategy", list(ReorderStrategy))
def test_sharded_batch(strategy, rng):
    mesh = jax.make_mesh((2, 4), ("data", "context"), axis_types=(AxisType.Auto,) * 2)
    batch = batch_of(rng)
    arrays = jax.device_put(batch, NamedSharding(mesh, P("data", "context")))
    jitted = jax.jit(reorder_causal_load_balanced, static_argnums=(1, 2))
    for fn in (reorder_causal_load_balanced, jitted):
        found = fn(arrays, 4, strategy)
        for key in maxtext.REORDERED_KEYS:
            oracle.same_bits(found[key], oracle.reorder(batch[key], strategy.layout(4), 1))
        oracle.same_bits(found["images"], batch["images"])


def test_batch_refuses(rng):
    batch = batch_of(rng)
    refused(lambda: reorder_causal_load_balanced(batch, 3), "cp_size is 3")
    refused(lambda: reorder_causal_load_balanced(batch, 5, "striped"), "'corruption_mask'", "5")
    for size, nearest in ((0, 1), (-2, 1)):
        words = (f"cp_size is {size}", f"at least 1, such as {nearest}")
        refused(lambda n=size: reorder_causal_load_balanced(batch, n, "striped"), *words)
    short = {"inputs": np.arange(8)[None]}
    words = ("'inputs' has length 8", "Striped(3", "multiple of 3")
    refused(lambda: reorder_causal_load_balanced(short, 3, "striped"), *words)
    batch["targets"] = batch["targets"][:, :12]
    refused(lambda: reorder_causal_load_balanced(batch, 8), "'targets'", "length 12")
    refused(lambda: reorder_causal_load_balanced(batch, 4, "auto"), "'auto'", "trainer")
    refused(lambda: reorder_causal_load_balanced(batch, 4, "zigzag"), "'zigzag'", "'striped'")
    refused(lambda: reorder_causal_load_balanced(batch, 4, None), "None")
    refused(lambda: reorder_causal_load_balanced({"inputs": [1]}, 4), "'inputs.0'", error=TypeError)


def test_strategies_of_maxtext_and_transformer_engine():
    of_maxtext = enum.Enum(
        "ReorderStrategy",
        {"AUTO": "auto", "DUAL_CHUNK_SWAP": "dual_chunk_swap", "STRIPED": "striped"},
    )
    of_te = enum.Enum("ReorderStrategy", {"DualChunkSwap": 0, "Striped": 1})
    swap, striped = ReorderStrategy.DUAL_CHUNK_SWAP, ReorderStrategy.STRIPED
    for value in (swap, "dual_chunk_swap", "DUAL_CHUNK_SWAP", "DualChunkSwap"):
        assert ReorderStrategy(value) is swap
    assert ReorderStrategy(of_maxtext.DUAL_CHUNK_SWAP) is ReorderStrategy(of_te.DualChunkSwap)
    for value in ("striped", "STRIPED", "Striped", of_maxtext.STRIPED, of_te.Striped):
        assert ReorderStrategy(value) is striped
    refused(lambda: ReorderStrategy(of_maxtext.AUTO), "AUTO", "trainer")
    refused(lambda: ReorderStrategy(0), "is 0")
    assert {member.name: member.value for member in ReorderStrategy} == {
        "DUAL_CHUNK_SWAP": "dual_chunk_swap",
        "STRIPED": "striped",
    }


def test_mask_on_the_host():
    """The rows of a causal mask of four, for two ranks: 0 and 3, then 1 and 2."""
    found = reorder_mask_load_balancing(np.tri(4, dtype=int), 2, 0)
    assert type(found) is np.ndarray
    assert found.tolist() == [[1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]]
    rows = reorder_mask_load_balancing(np.arange(16)[None, :, None, None], 4, 1)[0, :, 0, 0]
    assert rows.tolist() == [0, 1, 14, 15, 2, 3, 12, 13, 4, 5, 10, 11, 6, 7, 8, 9]
    assert type(reorder_mask_load_balancing(jnp.arange(8), 2, 0)) is np.ndarray
    refused(lambda: reorder_mask_load_balancing(np.zeros(12), 3, 0), "cp_size is 3")
    refused(lambda: reorder_mask_load_balancing(np.zeros(12), 4, 0), "length 12")
    traced = jax.jit(lambda x: reorder_mask_load_balancing(x, 2, 0))
    refused(lambda: traced(jnp.zeros(8)), "traced", "NumPy", error=TypeError)


def rolled_contiguously(x, shift, segment_ids=None):
    """One device, source order: jnp.roll, then 0 where another document or nothing arrives."""
    rolled = jnp.roll(x, shift, axis=1).at[:, shift:].set(jnp.zeros((), x.dtype))
    if segment_ids is None:
        return rolled
    ahead = jnp.roll(segment_ids, shift, axis=1).at[:, shift:].set(0)
    keep = (ahead == segment_ids) & (segment_ids != 0)
    return jnp.where(keep.reshape(*keep.shape, *[1] * (x.ndim - 2)), rolled, 0).astype(x.dtype)


def packed_batch(rng, length):
    """Documents of odd lengths, one of a single token, padding at the end and in between."""
    ids = np.zeros((2, length), np.int32)
    for row, lengths in enumerate(([5, 1, 7, length - 15], [length // 2 - 1, 3, 2])):
        ids[row, : sum(lengths)] = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    ids[0, 5] = 0
    return ids, {
        "ids": rng.integers(1, 99, (2, length)).astype(np.int32),
        "targets": rng.integers(1, 99, (2, length)).astype(np.int32),
        "mask": np.ones((2, length), np.int32),
        "bool_mask": np.ones((2, length), np.bool_),
        "positions": plait.segment_positions(np.sort(ids, axis=1)),
        "embeddings": rng.normal(size=(2, length, 5)).astype(jnp.bfloat16),
        "absent": None,
    }


LAYOUTS = [
    ReorderStrategy.DUAL_CHUNK_SWAP.layout(2),
    ReorderStrategy.DUAL_CHUNK_SWAP.layout(8),
    Zigzag(3),
    slow(ReorderStrategy.STRIPED.layout(3)),
    slow(ReorderStrategy.STRIPED.layout(4)),
]


@pytest.mark.parametrize("packed", [slow(False), True])
@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_multi_token_prediction(layout, packed, mesh_of, rng):
    """Every depth equals the single-device contiguous roll, from any rank, in any layout."""
    length = 3 * layout.multiple * -(-32 // (3 * layout.multiple))
    segment_ids, tree = packed_batch(rng, length)
    cp = ContextParallel(layout, "context")
    wanted = {
        -by: {
            key: rolled_contiguously(jnp.asarray(x), -by, segment_ids if packed else None)
            for key, x in tree.items()
            if x is not None
        }
        for by in (1, 2, 3)
    }
    tree, ids = plait.reorder((tree, segment_ids), layout)
    ids = ids if packed else None
    mesh = mesh_of(layout.ranks)
    on_devices = jax.jit(
        lambda tree, ids, shift: roll_and_mask(tree, cp, shift, segment_ids=ids, mesh=mesh),
        static_argnums=2,
    )
    on_one = jax.jit(
        lambda tree, ids, shift: roll_and_mask(
            tree, ContextParallel(layout), shift, segment_ids=ids
        ),
        static_argnums=2,
    )

    def on_host(tree, ids, shift):
        return roll_and_mask(tree, cp, shift, segment_ids=ids)

    for roll in (on_host, on_one, on_devices):
        again = tree
        for shift in (-1, -2, -3):
            again = roll(again, ids, -1)
            found = roll(tree, ids, shift)
            assert found["absent"] is None
            for key, value in wanted[shift].items():
                value = oracle.reorder(np.asarray(value), layout, 1)
                oracle.same_bits(found[key], value)
                oracle.same_bits(again[key], value)


@pytest.mark.parametrize("layout", [Zigzag(4), Striped(4)], ids=repr)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_gradient_of_rolled_embeddings(kind, layout, rng):
    """bfloat16 embeddings beside a data axis: the gradient is that of the contiguous roll."""
    mesh = jax.make_mesh((2, 4), ("data", "context"), axis_types=(kind,) * 2)
    spec = NamedSharding(mesh, P("data", "context"))
    cp = ContextParallel(layout, "context")
    segment_ids, tree = packed_batch(rng, 32)
    x, w = tree["embeddings"], rng.normal(size=(2, 32, 5)).astype(jnp.bfloat16)

    def contiguous(x):
        return (rolled_contiguously(x, -2, segment_ids) * w).astype(jnp.float32).sum()

    wanted = jax.grad(contiguous)(jnp.asarray(x))
    here = [plait.reorder(a, layout) for a in (x, segment_ids, w)]
    with jax.set_mesh(mesh):
        arrays = [jax.device_put(a, spec) for a in here]

        def sharded(x, ids, w):
            rolled = roll_and_mask({"x": x}, cp, -2, segment_ids=ids)["x"]
            return (rolled * w).astype(jnp.float32).sum()

        found = jax.jit(jax.grad(sharded))(*arrays)
    oracle.same_bits(found, oracle.reorder(np.asarray(wanted), layout, 1))


def test_multi_token_prediction_inside_shard_map(mesh_of, rng):
    layout = Zigzag(4)
    segment_ids, tree = packed_batch(rng, 32)
    wanted = rolled_contiguously(jnp.asarray(tree["ids"]), -1, segment_ids)
    ids, segment_ids = plait.reorder((tree["ids"], segment_ids), layout)
    cp = ContextParallel(layout, "context")
    rolled = jax.shard_map(
        lambda x, ids: roll_and_mask(x, cp, segment_ids=ids),
        mesh=mesh_of(4),
        in_specs=P(None, "context"),
        out_specs=P(None, "context"),
    )
    found = jax.jit(rolled)(ids, segment_ids)
    oracle.same_bits(found, oracle.reorder(np.asarray(wanted), layout, 1))
    kinds = collectives(text(rolled, ids, segment_ids))
    assert kinds == [("collective-permute", 2 * 4)] * 4  # one token a row: ids, segment ids


def test_deeper_targets_stay_in_the_document():
    """Rolling the segment ids along would give 5 two after 2, from the document after it."""
    cp = ContextParallel(Zigzag(2))
    tokens, ids = np.arange(1, 9)[None], np.array([[1, 1, 1, 2, 2, 2, 2, 2]])
    tokens, ids = cp.reorder((tokens, ids))
    assert tokens.tolist() == [[1, 2, 7, 8, 3, 4, 5, 6]]
    assert roll_and_mask(tokens, cp, -2, segment_ids=ids).tolist() == [[3, 0, 0, 0, 0, 6, 7, 8]]


def test_roll_and_mask_refuses():
    cp, x = ContextParallel(Zigzag(2)), np.zeros((1, 8))
    assert roll_and_mask(x, cp, 0) is x
    refused(lambda: roll_and_mask(x, cp, 1), "shift is 1", "such as -1")
    refused(lambda: roll_and_mask(x, cp, 0.5), "shift is 0.5", error=TypeError)
    refused(lambda: roll_and_mask(x[:, :6], cp), "length 6")
    refused(lambda: roll_and_mask(x, cp, segment_ids=np.ones((1, 4), int)), "segment_ids")
    refused(lambda: roll_and_mask({"a": 3}, cp), "'a'", error=TypeError)


@pytest.mark.parametrize(
    "shape",
    [
        {"heads": 4, "kv_heads": 2, "head_dim": 8, "v_head_dim": 8},
        {"heads": 4, "kv_heads": 4, "head_dim": 12, "v_head_dim": 8},
    ],
    ids=["gqa", "mla"],
)
def test_layer_before_and_after(shape, rng):
    """The benchmark's layers: equal to each other in every bit, and right by the oracle."""
    layer = load_layer()
    names = ("data", "context", "tensor")
    mesh = jax.make_mesh((1, 4, 2), names, axis_types=(AxisType.Auto,) * 3)
    structs = layer.arguments(mesh, shape, batch=2, sequence=64, dtype=jnp.float32)
    segment_ids = np.repeat([[1, 2, 3, 0], [1, 1, 1, 1]], [13, 17, 30, 4], axis=1)
    values = [
        segment_ids.astype(np.int32)
        if struct.dtype == jnp.int32
        else rng.normal(size=struct.shape).astype(np.float32)
        for struct in structs
    ]
    q, k, v, ids, d_out = values
    seen = oracle.visible(np.arange(64), ids)
    by_oracle = oracle.attention(
        *(x.swapaxes(1, 2) for x in (q, k, v)), seen, d_out=d_out.swapaxes(1, 2)
    )
    axes = [1 if x.ndim == 2 else 2 for x in values]
    arrays = [
        jax.device_put(plait.reorder(x, Zigzag(4), axis=axis), struct.sharding)
        for x, axis, struct in zip(values, axes, structs, strict=True)
    ]
    found = {}
    for name, fn, options in (
        ("strided", layer.before, {"restore": layer.strided}),
        ("take", layer.before, {"restore": layer.take}),
        ("after", layer.after, {}),
    ):
        run = layer.with_gradients(fn, mesh=mesh, **options)
        found[name] = jax.jit(run)(*arrays)
    for strided, take, after, wanted in zip(*found.values(), by_oracle, strict=True):
        oracle.same_bits(strided, after)
        oracle.same_bits(take, after)
        restored = plait.restore(np.asarray(after), Zigzag(4), axis=2).swapaxes(1, 2)
        np.testing.assert_allclose(restored, wanted, rtol=2e-5, atol=2e-5)


def test_what_the_layers_ask_for():
    """Backward, before: an all-reduce of all keys and values; after: their reduce-scatter."""
    layer = load_layer()
    names = ("data", "context", "tensor")
    mesh = jax.make_mesh((1, 8, 1), names, axis_types=(AxisType.Auto,) * 3)
    shape = {"heads": 2, "kv_heads": 2, "head_dim": 12, "v_head_dim": 8}
    keys = 4 * 2 * 64 * (12 + 8)  # bytes of k and v, float32

    def asked(fn):
        lowered = layer.lowered(fn, mesh, shape, batch=1, sequence=64, dtype=jnp.float32)
        found = {}
        for kind, size in collectives(lowered.compile().as_text()):
            found[kind] = found.get(kind, 0) + size
        return found

    gathered = keys + 4 * 64  # and the segment ids
    before, after = asked(layer.before), asked(layer.after)
    assert before["all-gather"] == after["all-gather"] == gathered
    assert "reduce-scatter" not in before
    assert "all-reduce" not in after
    assert before["all-reduce"] == after["reduce-scatter"] * 8 == keys
    assert after["collective-permute"] * 8 == gathered + keys


def test_plait_imports_no_integration():
    code = "import plait, sys; assert not any('integrations' in name for name in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
