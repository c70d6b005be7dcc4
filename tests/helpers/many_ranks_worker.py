"""A layer on many virtual devices, forward and all gradients, against a dense one.

Arguments: coordinator's port, number of processes, this process, then ``ranks:domain``, where
a domain of ``auto`` is as JAX tells nodes. Prints a JSON object.
"""

import json
import sys

import jax
import jax.numpy as jnp
import kept_programs
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ultraep_jax as uep

TOKENS, TOP_K, WIDTH, INNER, PER_RANK, SLOTS = 24, 8, 32, 16, 4, 2


def main() -> None:
  port, processes, process, case = sys.argv[1:]
  if int(processes) > 1:
    jax.distributed.initialize(
      f"localhost:{port}", int(processes), int(process), heartbeat_timeout_seconds=10
    )
    kept_programs.keep_in_every_process()
  ranks, domain = case.split(":")
  print(json.dumps(run(int(ranks), domain if domain == "auto" else int(domain))), flush=True)


def run(ranks: int, domain: int | str) -> dict[str, float]:
  mesh = Mesh(jax.devices()[:ranks], ("expert",), axis_types=(AxisType.Auto,))
  by_rank, experts, rng = (
    NamedSharding(mesh, P("expert")),
    PER_RANK * ranks,
    np.random.default_rng(0),
  )

  def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
    return (scale * rng.normal(size=shape)).astype(np.float32)

  def put(value: np.ndarray) -> jax.Array:
    return jax.make_array_from_callback(value.shape, by_rank, lambda index: value[index])

  load_GE = uep.testing.zipf_loads(0, experts, ranks, TOKENS, TOP_K, 4.0)
  index = uep.testing.expert_indices(0, load_GE, TOP_K).reshape(-1, TOP_K).astype(np.int32)
  weights = uep.ExpertWeights(
    normal(experts, WIDTH, INNER, scale=WIDTH**-0.5),
    normal(experts, WIDTH, INNER, scale=WIDTH**-0.5),
    normal(experts, INNER, WIDTH, scale=INNER**-0.5),
  )
  x, cotangent = normal(len(index), WIDTH), normal(len(index), WIDTH)
  gate = rng.random(index.shape).astype(np.float32)
  config = uep.BalanceConfig(
    replica_slots=SLOTS, objective="balance", domain_size=domain, capacity_factor=1.25
  )

  def balanced(x, gate, weights, index):
    y, stats = uep.sharded_moe(x, index, gate, weights, config=config)
    return y, stats.scalars()

  def dense(x, gate, weights, index):
    return uep.testing.dense_moe(x, index, gate, weights), {}

  def differentiated(layer):
    def loss(x, gate, weights, index, cotangent):
      y, aux = layer(x, gate, weights, index)
      return jnp.sum(y * cotangent), (y, aux)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))

  arguments = x, gate, weights, index, cotangent
  (_, (expected_y, _)), expected_grads = jax.device_get(differentiated(dense)(*arguments))
  with jax.set_mesh(mesh):
    (_, (y, scalars)), grads = differentiated(balanced)(*jax.tree.map(put, arguments))
  pairs = zip(
    jax.tree.leaves((y, grads)), jax.tree.leaves((expected_y, expected_grads)), strict=True
  )
  errors = [own_relative_error(got, expected) for got, expected in pairs]
  return {"error": float(np.max(errors))} | {k: float(v) for k, v in scalars.items()}


def own_relative_error(got: jax.Array, expected: np.ndarray) -> float:
  """Of this process's part: gathering all of it would take longer than the layer."""
  parts = [(np.asarray(shard.data), expected[shard.index]) for shard in got.addressable_shards]
  a, b = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
  return float(np.linalg.norm(a - b) / np.linalg.norm(b))


if __name__ == "__main__":
  main()
