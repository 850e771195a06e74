"""One of two processes of four devices each: `python two_processes.py PORT PROCESS_ID`.

Runs the sharded moves against the oracle and prints what a training step gave, as JSON. Imported
by test_processes.py, which runs the same step in one process of eight devices.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import oracle
from plait import Blockwise, ContextParallel, HalfSwap, Placed, Striped, Zigzag

LAYOUTS = [Zigzag(8), HalfSwap(8), Striped(8), Placed(np.tile([3, 1, 2, 0, 7, 6, 5, 4], 3))]


SEQUENCE = P(None, "context")


def on_mesh(x, mesh, spec=SEQUENCE):
    """A global array of which each process makes only the shards of its own devices."""
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda i: x[i])


def assert_shards(array, wanted):
    for shard in array.addressable_shards:
        oracle.same_bits(shard.data, wanted[shard.index])


def check_moves(mesh):
    for layout in LAYOUTS:
        cp = ContextParallel(layout, "context")
        x = np.arange(2 * 72 * layout.multiple, dtype=np.float32).reshape(2, -1)
        ids = np.sort(x.astype(np.int32) % 5, axis=1)
        moved = cp.reorder(x)
        with jax.set_mesh(mesh):
            source, there = on_mesh(x, mesh), on_mesh(moved, mesh)
            assert_shards(jax.jit(cp.reorder)(source), moved)
            assert_shards(jax.jit(cp.restore)(there), x)
            assert_shards(jax.jit(cp.all_gather)(there), x)
            assert_shards(
                jax.jit(cp.lookahead)(on_mesh(ids, mesh)), oracle.lookahead(ids, layout, 1, -100)
            )


def training_step(mesh):
    """Loss, gradient norm and updated weights of one step of a one-layer model."""
    cp = ContextParallel(Zigzag(8), "context")
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 32, (1, 128)).astype(np.int32)
    ids = np.repeat([1, 2, 0], [70, 50, 8]).astype(np.int32)[None]
    weights = {
        name: rng.normal(size=shape, scale=0.3).astype(np.float32)
        for name, shape in {"embed": (32, 16), "qkv": (16, 3, 2, 8), "out": (2, 8, 16)}.items()
    }

    def loss(weights, tokens, ids):
        x = weights["embed"][tokens]
        q, k, v = jnp.unstack(jnp.einsum("bsd,dthf->tbshf", x, weights["qkv"]))
        attended = cp.attention(q, k, v, segment_ids=ids, kernel=Blockwise(8, 8))
        x = x + jnp.einsum("bshf,hfd->bsd", attended, weights["out"])
        labels = cp.lookahead(tokens, segment_ids=ids)
        log_p = jax.nn.log_softmax(x @ weights["embed"].T)
        picked = (jax.nn.one_hot(labels, 32) * log_p).sum(axis=-1)
        total, count = cp.sum_and_count(-picked, labels >= 0)
        return total / count

    @jax.jit
    def step(weights, tokens, ids):
        value, gradients = jax.value_and_grad(loss)(weights, tokens, ids)
        norm = jnp.sqrt(sum((g**2).sum() for g in jax.tree.leaves(gradients)))
        return value, norm, jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)

    with jax.set_mesh(mesh):
        tokens, ids = (on_mesh(x, mesh) for x in cp.reorder([tokens, ids]))
        weights = jax.tree.map(lambda w: on_mesh(w, mesh, P()), weights)
        value, norm, weights = step(weights, tokens, ids)
    checksum = [float(np.abs(np.asarray(w.addressable_data(0))).sum()) for w in weights.values()]
    return [float(value), float(norm), *checksum]


def main(port, process_id):
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(process_id))
    assert jax.device_count() == 8
    assert jax.local_device_count() == 4
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("context",))
    check_moves(mesh)
    print(json.dumps(training_step(mesh)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
