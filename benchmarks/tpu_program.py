"""What the TPU compiler makes of the sharded moves, on a machine without a TPU.

Needs an x86-64 Linux machine and libtpu: `pip install libtpu`, then
`python benchmarks/tpu_program.py`. Prints, for each move of [1, 131072, 1, 576] bfloat16 over 128
ranks of v5p:4x4x8, the collectives and the bytes of HBM that the compiler counts, on one device.
These are static figures of the compiler and not clocks.
"""

import collections
import os
import re

os.environ.update(
    JAX_PLATFORMS="cpu",
    TPU_SKIP_MDS_QUERY="1",
    TPU_WORKER_HOSTNAMES="localhost",
    TPU_ACCELERATOR_TYPE="v5p-256",
    ALLOW_MULTIPLE_LIBTPU_LOAD="1",
)

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from plait import ContextParallel, HalfSwap, Striped, Zigzag

RANKS, SHAPE = 128, (1, 131072, 1, 576)
COLLECTIVES = r"(collective-permute|all-to-all|all-gather|all-reduce|reduce-scatter)(?:-start)?\("


def main() -> None:
    topology = topologies.get_topology_desc(platform="tpu", topology_name="v5p:4x4x8")
    mesh = Mesh(np.array(topology.devices).reshape(-1), ("context",))
    spec = P(None, "context")
    x = jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
    shard = 2 * np.prod(SHAPE) / RANKS
    moves = {"jnp.take": lambda x: jnp.take(x, Zigzag(RANKS).positions(SHAPE[1]), axis=1)}
    for layout in (Zigzag(RANKS), HalfSwap(RANKS), Striped(RANKS)):
        cp = ContextParallel(layout, "context")
        for move in (cp.restore, cp.reorder):
            moves[f"{layout!r} {move.__name__}"] = lambda x, move=move: move(x, mesh=mesh)
    print(f"one shard is {shard / 1e6:.2f} MB; reading and writing it once is 2 shards\n")
    print(f"{'move':32} {'MB':>8} {'shards':>7}  collectives")
    for name, move in moves.items():
        compiled = jax.jit(move, out_shardings=x.sharding).lower(x).compile()
        kinds = collections.Counter(re.findall(r"\s" + COLLECTIVES, compiled.as_text()))
        size = compiled.cost_analysis()["bytes accessed"]
        shown = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        print(f"{name:32} {size / 1e6:8.2f} {size / shard:7.2f}  {shown}", flush=True)


if __name__ == "__main__":
    main()
