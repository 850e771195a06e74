"""One of several processes, for `test_processes.py` here and in `cli/`.

What it is to do comes first: `step` runs the sharded moves against the oracle and a training step,
whose results are printed as JSON; `loop` sums over all devices for ever, but for a fault that a
process may be told of. Tests also import `training_step`, to run it in one process.
"""

import argparse
import faulthandler
import json
import os
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import oracle
from plait import Blockwise, ContextParallel, HalfSwap, Placed, Striped, Zigzag
from plait.cli import processes
from plait.cli.processes import on_mesh

COMMAND = "one process"
LAYOUTS = [Zigzag(8), HalfSwap(8), Striped(8), Placed(np.tile([3, 1, 2, 0, 7, 6, 5, 4], 3))]


SEQUENCE = P(None, "context")


def mesh_of(context, data=1, tensor=1):
    """A mesh of all devices on which each process has as few ranks of the context as can be."""
    devices = np.array(jax.devices()).reshape(context, data, tensor)
    return Mesh(devices, ("context", "data", "tensor"))


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
            source, there = on_mesh((x, moved), NamedSharding(mesh, SEQUENCE))
            assert_shards(jax.jit(cp.reorder)(source), moved)
            assert_shards(jax.jit(cp.restore)(there), x)
            assert_shards(jax.jit(cp.all_gather)(there), x)
            next_ids = jax.jit(cp.lookahead)(on_mesh(ids, NamedSharding(mesh, SEQUENCE)))
            assert_shards(next_ids, oracle.lookahead(ids, layout, 1, -100))


def check_placing(mesh):
    """A batch of which this process has only what its own devices hold, the rest being -1."""
    ranks = mesh.shape["context"]
    cp = ContextParallel(HalfSwap(ranks), "context", batch_axes="data")
    whole = np.arange(4 * 6 * 2 * ranks, dtype=np.int32).reshape(4, -1)
    orders = np.stack([np.random.default_rng(row).permutation(whole.shape[1]) for row in range(4)])
    sharding = NamedSharding(mesh, P("data", "context"))
    fixed = np.broadcast_to(cp.source_positions(whole.shape[1]), whole.shape)
    for positions in (None, orders):
        order = fixed if positions is None else positions
        mine = np.full_like(whole, -1)
        for rows, slots in sharding.addressable_devices_indices_map(whole.shape).values():
            for row in range(4)[rows]:
                held = order[row, slots]
                mine[row, held] = whole[row, held]
        assert jax.process_count() == 1 or (mine == -1).any()
        moved = cp.device_put(mine, mesh, source_positions=positions)
        assert_shards(moved, np.take_along_axis(whole, order, axis=1))


def training_step(mesh):
    """Loss, gradient norm and checksums of the updated weights: one step of a one-layer model."""
    layout = Zigzag(mesh.shape["context"])
    cp = ContextParallel(layout, "context", batch_axes="data", head_axes="tensor")
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 32, (2, 128)).astype(np.int32)
    ids = np.stack([np.repeat([1, 2, 0], [70, 50, 8]), np.repeat([1, 2], [9, 119])])
    shapes = {"embed": (32, 16), "qkv": (16, 3, 2, 8), "out": (2, 8, 16)}
    specs = {"embed": P(), "qkv": P(None, None, "tensor"), "out": P("tensor")}
    weights = {
        name: on_mesh(
            rng.normal(size=shape, scale=0.3).astype(np.float32), NamedSharding(mesh, specs[name])
        )
        for name, shape in shapes.items()
    }
    by_token = NamedSharding(mesh, P("data", "context"))
    tokens, ids = on_mesh(cp.reorder([tokens, ids.astype(np.int32)]), by_token)

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

    def step(weights, tokens, ids):
        value, gradients = jax.value_and_grad(loss)(weights, tokens, ids)
        norm = jnp.sqrt(sum((g**2).sum() for g in jax.tree.leaves(gradients)))
        updated = jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)
        return value, norm, [jnp.abs(w).sum() for w in updated.values()]

    with jax.set_mesh(mesh):
        results = jax.jit(step, out_shardings=NamedSharding(mesh, P()))(weights, tokens, ids)
    return [float(x) for x in jax.tree.leaves(results)]


def run_step(with_moves):
    check_placing(mesh_of(2, 2, 2))
    results = {"2x2x2": training_step(mesh_of(2, 2, 2))}
    if with_moves:
        check_moves(mesh_of(8))
        results["8"] = training_step(mesh_of(8))
    text = json.dumps(results)
    processes.check_same(COMMAND, "the training step", text.encode())
    if jax.process_index() == 0:
        print(text, flush=True)


def run_loop(fault, seconds):
    mesh = mesh_of(jax.device_count())
    ones = on_mesh(np.ones(mesh.size), NamedSharding(mesh, P("context")))
    total = jax.jit(jnp.sum)
    for turn in range(int(10 * seconds)):
        assert float(total(ones)) == mesh.size
        if turn == 5 and fault == "error":
            raise RuntimeError("a fault of this process alone")
        if turn == 5 and fault:
            os.kill(os.getpid(), getattr(signal, fault))
        time.sleep(0.1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["step", "loop"])
    parser.add_argument("--moves", action="store_true")
    parser.add_argument("--fault", default="", help="error, or a signal")
    parser.add_argument("--faulty", type=int, help="the process that has the fault")
    parser.add_argument("--heartbeat-seconds", type=int, default=60)
    parser.add_argument("--coordinator")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--process-id", type=int)
    a = parser.parse_args()
    faulthandler.dump_traceback_later(240, exit=True)  # rather than that a test hangs
    place = a.coordinator, a.processes, a.process_id
    with processes.joined(COMMAND, *place, heartbeat_seconds=a.heartbeat_seconds):
        if a.what == "step":
            run_step(a.moves)
        else:
            run_loop(a.fault if jax.process_index() == a.faulty else "", seconds=120)


if __name__ == "__main__":
    main()
