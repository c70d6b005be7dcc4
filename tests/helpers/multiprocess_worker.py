"""One process of a multi-process run of the layer; see test_multiprocess.py.

Arguments: coordinator port, number of processes, this process, output file, steps.
"""

import pathlib
import sys

import jax
import jax.numpy as jnp
import kept_programs
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ultraep_jax as uep

E, D, F, K, TOKENS = 16, 8, 12, 2, 12
CONFIG = uep.BalanceConfig(replica_slots=1, objective="balance", capacity_factor=1.0)


def main() -> None:
  port, processes, process, out, steps = sys.argv[1:]
  if int(processes) > 1:
    jax.distributed.initialize(
      f"localhost:{port}", int(processes), int(process), heartbeat_timeout_seconds=10
    )
    kept_programs.keep_in_every_process()
  run(pathlib.Path(out), int(steps))


def run(out: pathlib.Path, steps: int) -> None:
  """Writes the results of the first step, and does the rest to be there."""
  mesh = jax.make_mesh((2, 4), ("data", "expert"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
  rng = np.random.default_rng(0)
  total = TOKENS * mesh.size

  def put(value: np.ndarray, spec: P) -> jax.Array:
    sharding = NamedSharding(mesh, spec)
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

  by_token = P(("data", "expert"))
  x = put(rng.normal(size=(total, D)).astype(np.float32), by_token)
  scores = 2 * rng.normal(size=E) + rng.gumbel(size=(total, E))
  index = put(np.argsort(-scores, axis=1)[:, :K].astype(np.int32), by_token)
  gate = put(rng.random((total, K)).astype(np.float32), by_token)
  weights = uep.ExpertWeights(
    *(
      put(rng.normal(size=shape).astype(np.float32), P("expert"))
      for shape in ((E, D, F), (E, D, F), (E, F, D))
    )
  )

  @jax.jit
  def step(x, index, gate, weights):
    def loss(x, gate, weights):
      y, stats = uep.sharded_moe(x, index, gate, weights, config=CONFIG)
      return jnp.sum(y**2), (y, stats.scalars())

    (_, (y, scalars)), grads = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(
      x, gate, weights
    )
    return jax.lax.with_sharding_constraint((y, grads), NamedSharding(mesh, P())), scalars

  with jax.set_mesh(mesh):
    for i in range(steps):
      results = jax.block_until_ready(step(x, index, gate, weights))
      if i == 0:
        np.savez(out, *map(np.asarray, jax.tree.leaves(results)))
      print(f"step {i}", flush=True)


if __name__ == "__main__":
  main()
