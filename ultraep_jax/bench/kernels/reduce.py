"""Checks and times the kernel that sums replica gradients, beside the portable operation.

Run on every GPU of a host: ``ultraep bench reduce``. Gradients are float32 or bfloat16. Checks
compare sums of integers bit for bit over random legal plans: they are exact, but those of bfloat16
homes are rounded. Sums of random numbers are compared with float64. Times are of many calls
chained inside one jit, each adding to the homes of the one before in place; each line is the median
of several runs and names the copies that the busiest rank sends or receives.
"""

import argparse
import functools
import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import TransferTuning, reduce_replicas
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

HOME = 16  # experts of a rank, in the cases that are timed
DTYPES = ("float32", "bfloat16")
# Many tiles a worker, which waits for its peers; and the same with tiles of two halves.
SMALL = TransferTuning(blocks=8, workers=3, tile_bytes=4 * 1024)
FEW = TransferTuning(blocks=2, workers=3, tile_bytes=20 * 1024)
# Integers below which those of copies and of homes are. Sums of so many copies are exact.
_BELOW = {"float32": (2**20, 2**20), "bfloat16": (2**4, 2**11)}
_MOST_RANKS = 17


def main(argv: Sequence[str] | None = None) -> int:
  parser = argparse.ArgumentParser(description="Checks and times the reduction kernel.")
  parser.add_argument("what", nargs="+", choices=["check", "time"])
  add_arguments(parser, plans=10, megabytes=75.5)
  parser.add_argument(
    "--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES, help="of gradients"
  )
  return processes.run(run, parser.parse_args(argv))


def run(args: argparse.Namespace) -> int:
  mesh, tunings = open_mesh(), tunings_of(args.tunings)
  first = next(iter(tunings.values()))
  if "check" in args.what:
    for tuning in (SMALL, FEW, first):
      check(mesh, args.plans, tuning, 50_000 // args.scale, args.dtypes)
  if "time" in args.what:
    cases = time_cases(mesh.size, planner(args))
    for megabytes in args.megabytes:
      size = int(megabytes * 1e6) // args.scale
      operations = {label: kernel(tuning) for label, tuning in tunings.items()}
      if args.portable:
        operations["portable"] = ring
      for dtype, (label, operation) in itertools.product(args.dtypes, operations.items()):
        report(label, operation, mesh, size, dtype, cases, args.calls, args.repeats)
  return 0


Operation = Callable[[list[Array], list[Array], Array, Array], list[Array]]


def kernel(tuning: TransferTuning) -> Operation:
  return functools.partial(reduce_replicas, axis_name=AXIS, tuning=tuning)


def ring(
  replicas: list[Array], homes: list[Array], replica_expert_GS: Array, parent_GS: Array
) -> list[Array]:
  return portable.reduce_replicas(replicas, homes, replica_expert_GS, parent_GS, axis_name=AXIS)


# --- checks ----------------------------------------------------------------------------------


def check(
  mesh: jax.sharding.Mesh,
  plans: int,
  tuning: TransferTuning,
  most_units: int,
  dtypes: Sequence[str] = DTYPES,
) -> None:
  """Raises AssertionError if a sum is wrong; of up to ``_MOST_RANKS`` ranks."""
  assert mesh.size <= _MOST_RANKS, f"expected at most {_MOST_RANKS} ranks, got {mesh.size}"
  rng = np.random.default_rng(0)
  run = sharded(kernel(tuning), mesh)
  cases = ((2, 2, (1,)), (4, 3, (1, 2, 5)), (1, 1, (1, 1)))
  for dtype, (home, slots, rows) in itertools.product(dtypes, cases):
    for index in range(plans):
      if index % 5 == 0:  # another shape is another compilation
        unit = 4 * int(rng.integers(1, most_units))
      placement = random_placement(rng, mesh.size, home, slots)
      sizes = [unit * row for row in rows]
      replicas, homes = gradients(rng, mesh, home, placement, sizes, dtype)
      sums = processes.gather(run(replicas, homes, *placement))
      wanted = reference(replicas, homes, placement[0])
      for got, want in zip(sums, wanted, strict=True):
        wrong = (got != want.astype(jnp.dtype(dtype))).sum()
        where = f"{placement}, {want.shape} {dtype}, {tuning}"
        assert got.dtype == dtype and not wrong, f"{wrong} sums are wrong, {where}"
    print(f"exact: {plans} plans, M{home} S{slots}, {len(rows)} of {dtype}, {tuning}", flush=True)
  for dtype in dtypes:
    placement = random_placement(rng, mesh.size, 2, 2)
    replicas, homes = gradients(rng, mesh, 2, placement, [80 * most_units], dtype, integer=False)
    got, again = (processes.gather(run(replicas, homes, *placement)[0]) for _ in range(2))
    assert (got == again).all(), "two runs differ"
    (want,) = reference(replicas, homes, placement[0], np.float64)
    (size,) = reference([abs(replicas[0])], [abs(homes[0])], placement[0], np.float64)
    error = (abs(got - want) / np.maximum(size, 1e-30)).max()  # a gradient may be 0
    most = 1e-6 if dtype == "float32" else 2**-7  # every rank rounds
    assert error < most, f"relative error {error}, {placement}, {dtype}"
    print(f"repeatable, relative error {error:.1e} {dtype}, {tuning}", flush=True)


def gradients(
  rng: np.random.Generator,
  mesh: jax.sharding.Mesh,
  home: int,
  placement: Placement,
  rows: list[int],
  dtype: str,
  integer: bool = True,
) -> tuple[list[Array], list[Array]]:
  """Integers as ``_BELOW`` says, or normal numbers; NaN in empty slots."""
  expert_R = placement[0].reshape(-1)

  def draw(count: int, row: int, below: int) -> np.ndarray:
    if integer:
      return rng.integers(-below, below, (count, row), np.int32).astype(jnp.dtype(dtype))
    return rng.standard_normal((count, row), np.float32).astype(jnp.dtype(dtype))

  replicas = [draw(expert_R.size, row, _BELOW[dtype][0]) for row in rows]
  for replica in replicas:
    replica[expert_R < 0] = np.nan
  homes = [draw(mesh.size * home, row, _BELOW[dtype][1]) for row in rows]
  return processes.put((replicas, homes), NamedSharding(mesh, P(AXIS)))


def reference(
  replicas: list[Array],
  homes: list[Array],
  replica_expert_GS: np.ndarray,
  dtype: type = np.float32,
) -> list[np.ndarray]:
  """The sums in ``dtype``, in the order of the slots."""
  expert_R = replica_expert_GS.reshape(-1)
  sums = [home.astype(dtype) for home in processes.gather(homes)]
  for total, replica in zip(sums, processes.gather(replicas), strict=True):
    for slot in np.flatnonzero(expert_R >= 0):
      total[expert_R[slot]] += replica[slot].astype(dtype)
  return sums


def sharded(operation: Operation, mesh: jax.sharding.Mesh) -> Callable[..., list[Array]]:
  in_specs = (P(AXIS), P(AXIS), P(), P())
  return jax.jit(
    jax.shard_map(operation, mesh=mesh, in_specs=in_specs, out_specs=P(AXIS), check_vma=False)
  )


# --- times -----------------------------------------------------------------------------------


def report(
  label: str,
  operation: Operation,
  mesh: jax.sharding.Mesh,
  size: int,
  dtype: str,
  cases: dict[str, Placement],
  calls: int,
  repeats: int,
) -> None:
  row = max(size // jnp.dtype(dtype).itemsize, 1)

  @functools.partial(jax.jit, static_argnums=0, out_shardings=NamedSharding(mesh, P(AXIS)))
  def ones(count: int) -> Array:
    return jnp.ones((mesh.size * count, row), dtype)

  def once(home: Array, replica: Array, plan_2GS: Array) -> Array:
    return operation([replica], [home], plan_2GS[0], plan_2GS[1])[0]

  megabytes = row * jnp.dtype(dtype).itemsize / 1e6
  measured = []
  for name, placement in cases.items():
    rest = (ones(placement[0].shape[1]), stacked(placement, mesh))
    seconds = timed((once, (ones(HOME), *rest)), mesh, calls, repeats, donate=True)
    device = device_times("reduce_replicas", once, (ones(HOME), *rest), mesh, donate=True)
    measured.append((name, placement, seconds, device))
  print(times_table(f"{label}, {dtype}", megabytes, measured), flush=True)


if __name__ == "__main__":
  main()
