import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
from plait import Contiguous, HalfSwap, Placed, Striped, Zigzag, block_copy
from plait.permute import Relayout, permute
from sweeps import slow

BIG = Placed((0, 1, 1, 0, 1, 0, 2, 2, 3, 3, 2, 3), tokens_per_chunk=512)

# shape, axis, dtype, and the block of a zigzag move over 4 ranks as the table of `plan` says.
TAKEN = [
    ((8, 8192), 1, "int32", (8, 1024)),
    ((1, 2048, 7168), 1, "bfloat16", (128, 7168)),
    ((1, 4, 4096, 192), 2, "bfloat16", (4, 192, 512)),
    ((2, 4096, 128), 1, "uint16", (2, 512, 128)),
    ((1, 4096, 576), 1, "int8", (576, 512)),
    ((1, 4096, 1, 576), 1, "float32", (576, 512)),
    ((2, 1024, 8, 128), 1, "bfloat16", (2, 128, 8, 128)),
    ((2048, 256), 0, "uint32", (256, 256)),
    ((1, 4096, 8, 64), 1, "bfloat16", (8, 64, 512)),
    ((1, 4096, 3, 128), 1, "float32", (3, 512, 128)),
    ((2, 3, 4096, 100), 2, "bfloat16", (3, 100, 2, 512)),
]
REFUSED = [
    ((1, 4, 4096, 192), 2, "float16", "not a dtype that every TPU stores"),
    ((1, 4, 8 * 24, 192), 2, "bfloat16", "chunks of 24 tokens do not fill 128 lanes"),
    ((4, 8 * 12, 1024), 1, "bfloat16", "chunks of 12 tokens do not fill tiles of 16 rows"),
    ((8, 1024), 1, "int32", "blocks of 4 KiB are all overhead"),
    ((8192,), 0, "int32", "one dimension"),
    ((0, 4096, 128), 1, "bfloat16", "nothing to move"),
]


def planned(shape, axis, dtype, layout=None):
    move = Relayout(Contiguous(4), layout or Zigzag(4), shape[axis])
    return move, block_copy.plan(shape, axis, jnp.dtype(dtype), move.chunk_length)


@pytest.mark.parametrize(("shape", "axis", "dtype", "block"), TAKEN, ids=str)
def test_blocks(shape, axis, dtype, block):
    _, plan = planned(shape, axis, dtype)
    assert plan.block == block
    size = math.prod(block) * jnp.dtype(dtype).itemsize
    assert block_copy.LEAST_BYTES <= size <= block_copy.MOST_BYTES


@pytest.mark.parametrize(("shape", "axis", "dtype", "why"), REFUSED, ids=str)
def test_what_does_not_tile_is_refused(shape, axis, dtype, why):
    assert planned(shape, axis, dtype)[1] is None, why


@pytest.mark.parametrize(
    "layout", [Zigzag(4), slow(HalfSwap(4)), slow(Striped(4, 512)), BIG], ids=repr
)
@pytest.mark.parametrize(("shape", "axis", "dtype", "block"), TAKEN, ids=str)
def test_equal_to_the_plain_form_and_the_oracle(shape, axis, dtype, block, layout):
    shape = tuple(
        512 * 12 if d == axis else min(s, 256) if s != 576 else s for d, s in enumerate(shape)
    )
    x = np.random.default_rng(0).integers(0, 100, shape).astype(dtype)
    move, plan = planned(shape, axis, dtype, layout)
    for way, wanted in ((move, oracle.reorder), (move.inverse(), oracle.restore)):
        copied = block_copy.copy_blocks(jnp.asarray(x), way.sources, plan, interpret=True)
        oracle.same_bits(copied, wanted(x, layout, axis))
        oracle.same_bits(permute(jnp.asarray(x), way, axis), np.asarray(copied))


def test_a_chunk_of_several_blocks():
    x = np.arange(8192 * 8 * 128, dtype=np.int32).reshape(8192, 8, 128)
    move, plan = planned(x.shape, 0, x.dtype)
    assert move.chunk_length // plan.block[0] == 2
    copied = block_copy.copy_blocks(jnp.asarray(x), move.sources, plan, interpret=True)
    oracle.same_bits(copied, oracle.reorder(x, Zigzag(4), 0))


def test_the_kernel_is_differentiated_as_the_move(monkeypatch):
    """On a TPU the primitive lowers to the kernel, there and in the derivative: as here by hand."""
    from plait import permute as module

    monkeypatch.setattr(block_copy, "copy_blocks", _interpreted(block_copy.copy_blocks))
    x = np.random.default_rng(1).normal(size=(2, 4096, 128)).astype(np.float32)
    move, plan = planned(x.shape, 1, x.dtype)
    lowered = jax.jit(
        lambda x: module._lower_block_copy(x, bijection=move.inverse(), axis=1, planned=plan)
    )
    (pulled,) = jax.vjp(lambda x: permute(x, move, 1), jnp.asarray(x))[1](jnp.asarray(x))
    oracle.same_bits(lowered(x), np.asarray(pulled))


def _interpreted(copy):
    return lambda x, sources, plan: copy(x, sources, plan, interpret=True)
