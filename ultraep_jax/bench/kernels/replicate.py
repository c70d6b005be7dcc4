"""Checks and times the replication kernel beside the portable operation.

Run on every GPU of a host: ``ultraep bench replicate``. Checks compare random
experts bit for bit over random legal plans. Times are of many calls chained inside one jit; each
line is the median of several runs and names the copies that the busiest rank sends or receives.
"""

import argparse
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import TransferTuning, replicate
from ultraep_jax.bench.kernels.portable import AXIS, timed
from ultraep_jax.bench.kernels.transfers import (
  Placement,
  add_arguments,
  device_times,
  open_mesh,
  planner,
  random_placement,
  stacked,
  time_cases,
  times_table,
  tunings_of,
)
from ultraep_jax.tools import processes
from ultraep_jax.transport import replicate as portable
from ultraep_jax.types import Array

DTYPES = ("bfloat16", "float32", "float8_e4m3fn", "int8")


def main(argv: Sequence[str] | None = None) -> int:
  parser = argparse.ArgumentParser(description="Checks and times the replication kernel.")
  add_arguments(parser, plans=20, megabytes=37.7)
  return processes.run(run, parser.parse_args(argv))


def run(args: argparse.Namespace) -> int:
  mesh, tunings = open_mesh(), tunings_of(args.tunings)
  first = next(iter(tunings.values()))
  check(mesh, args.plans, first, 200_000 // args.scale)
  cases = time_cases(mesh.size, planner(args))
  for megabytes in args.megabytes:
    arrays = random_experts(mesh, 16, [(int(megabytes * 1e6) // (16 * args.scale) * 8,)])
    for label, tuning in tunings.items():
      kernel = functools.partial(replicate, axis_name=AXIS, tuning=tuning)
      report(label, kernel, mesh, arrays, cases, args.calls, args.repeats)
    if args.portable:
      report("portable", ring, mesh, arrays, cases, args.calls, args.repeats)
  return 0


Operation = Callable[[list[Array], Array, Array], list[Array]]


def ring(arrays: list[Array], replica_expert_GS: Array, parent_GS: Array) -> list[Array]:
  return portable.replicate(arrays, replica_expert_GS, parent_GS, axis_name=AXIS)


# --- checks ----------------------------------------------------------------------------------


def check(mesh: jax.sharding.Mesh, plans: int, tuning: TransferTuning, most_units: int) -> None:
  """Raises AssertionError unless every copy equals its expert bit for bit."""
  rng = np.random.default_rng(0)
  run = sharded(functools.partial(replicate, axis_name=AXIS, tuning=tuning), mesh)
  for home, slots, dtypes in ((2, 2, DTYPES[:1]), (4, 3, DTYPES), (1, 1, DTYPES[1:2])):
    for index in range(plans):
      if index % 5 == 0:  # another shape is another compilation
        row = 16 * int(rng.integers(1, most_units))
      shapes = [(row * (1 + i),) for i in range(len(dtypes))]
      arrays = random_experts(mesh, home, shapes, dtypes, seed=index)
      placement = random_placement(rng, mesh.size, home, slots)
      copies = processes.gather(run(arrays, *placement))
      expert_R = placement[0].reshape(-1)
      for copy, array in zip(copies, processes.gather(arrays), strict=True):
        got, want = copy.view(np.uint8), array.view(np.uint8)
        wrong = (got[expert_R >= 0] != want[expert_R[expert_R >= 0]]).sum()
        assert not wrong, f"{wrong} bytes differ, {placement}, {shapes}, {dtypes}"
    print(f"correct: {plans} plans, M{home} S{slots} {dtypes}", flush=True)


def random_experts(
  mesh: jax.sharding.Mesh,
  home: int,
  shapes: list[tuple[int, ...]],
  dtypes: tuple[str, ...] = ("bfloat16",),
  seed: int = 0,
) -> list[Array]:
  @functools.partial(jax.jit, out_shardings=NamedSharding(mesh, P(AXIS)))
  def make(key: Array) -> list[Array]:
    keys = jax.random.split(key, len(shapes))
    bits = [
      jax.random.bits(k, (mesh.size * home, *s), f"uint{8 * jnp.dtype(d).itemsize}")
      for k, s, d in zip(keys, shapes, dtypes, strict=True)
    ]
    return [lax.bitcast_convert_type(b, d) for b, d in zip(bits, dtypes, strict=True)]

  return make(jax.random.key(seed))


def sharded(operation: Operation, mesh: jax.sharding.Mesh) -> Callable[..., list[Array]]:
  in_specs = (P(AXIS), P(), P())
  return jax.jit(
    jax.shard_map(operation, mesh=mesh, in_specs=in_specs, out_specs=P(AXIS), check_vma=False)
  )


# --- times -----------------------------------------------------------------------------------


def report(
  label: str,
  operation: Operation,
  mesh: jax.sharding.Mesh,
  arrays: list[Array],
  cases: dict[str, Placement],
  calls: int,
  repeats: int,
) -> None:
  megabytes = sum(array[0].nbytes for array in arrays) / 1e6

  def once(plan_2GS: Array, *arrays: Array) -> Array:
    copies = operation(list(arrays), plan_2GS[0], plan_2GS[1])
    bits = lax.bitcast_convert_type(copies[0].reshape(-1)[0], jnp.uint16)
    return plan_2GS + (bits.astype(jnp.int32) >> 20)  # a zero that the compiler cannot see

  measured = []
  for name, placement in cases.items():
    plan_2GS = stacked(placement, mesh)
    seconds = timed((once, (plan_2GS, *arrays)), mesh, calls, repeats)
    device = device_times("replicate", once, (plan_2GS, *arrays), mesh)
    measured.append((name, placement, seconds, device))
  print(times_table(label, megabytes, measured), flush=True)


if __name__ == "__main__":
  main()
