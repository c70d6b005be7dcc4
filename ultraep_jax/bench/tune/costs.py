"""Measures what the planner weighs on the GPUs here, and writes it into their description.

Run ``ultraep bench costs --write FILE``: rates of experts' matmuls by width and the
gap of a launch, on several GPUs also copies alone and beside a matmul, and what a layer that may
copy takes more than one that cannot. Programs that are compared run in turn.
"""

import argparse
import datetime
import functools
import math
import pathlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from pallas_kernels import replicate
from ultraep_jax import testing
from ultraep_jax.bench import contest, timing
from ultraep_jax.bench.kernels import beside
from ultraep_jax.bench.kernels.matmul_problems import Problem
from ultraep_jax.bench.kernels.portable import AXIS
from ultraep_jax.bench.layer.problem import SHAPES, TUNED, random_normal
from ultraep_jax.bench.machine import devices_for_kernels
from ultraep_jax.bench.tune import description
from ultraep_jax.config import BalanceConfig
from ultraep_jax.devices import known
from ultraep_jax.devices.device import Device
from ultraep_jax.devices.facts import FACTS, Fact, Matmul
from ultraep_jax.files import check_output
from ultraep_jax.planning.cost import reading_seconds
from ultraep_jax.sharded import sharded_moe
from ultraep_jax.tables import table
from ultraep_jax.tools.arguments import nonnegative, positive
from ultraep_jax.transport.replicate import COPYING
from ultraep_jax.types import Array, ExpertWeights

# The matmuls of a layer, and how often each runs.
FORWARD: Mapping[str, int] = {"gated only": 1, "forward down": 1}
BACKWARD: Mapping[str, int] = {"dgrad down": 1, "sum": 1, "wgrad up": 2, "wgrad down": 1}
LAUNCHES = (8, 72)  # of two programs that differ in nothing else
COPIES = (1, 4)
MANY = 8  # copies of each rank beside a matmul, as plans with slots for every load have
EXPERT = SHAPES["qwen3-235b"]  # is copied
_EXPERT_SIZE = 3 * EXPERT.width * EXPERT.inner
LAYER = SHAPES["qwen3-30b"]  # may copy; of its experts each rank has a quarter
_HOME, _TOKENS = LAYER.experts // 4, 4096
_TRAINED = ", with gradients"

Runs = Mapping[str, Callable[[], Any]]
Seconds = Mapping[str, float]


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the program."""
  parser = argparse.ArgumentParser(description=__doc__)
  add = parser.add_argument
  add("--shapes", nargs="+", choices=SHAPES, default=list(TUNED), help="of the matmuls")
  add("--rows", type=positive, default=32768, help="of a matmul")
  add("--write", type=pathlib.Path, help="the JSON file to make, or to put results into")
  add("--seconds", type=nonnegative, default=120.0, help="after which no matmul is begun")
  add("--calls", type=positive, default=20, help="calls chained inside one jit")
  add("--repeats", type=positive, default=5, help="turns of each program")
  args = parser.parse_args(argv)
  devices_for_kernels()
  check_output(args.write)
  run(args)
  return 0


def run(args: argparse.Namespace) -> None:
  mesh = jax.make_mesh((jax.device_count(),), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
  kind = jax.devices()[0].device_kind
  here = f"{mesh.size} x {kind}, jax {jax.__version__}"
  path: pathlib.Path | None = args.write
  data = None if path is None else description.load(path, kind, here)
  print(here, flush=True)
  device = known.resolve() or Device.load(known.NEAREST)
  matmuls = measure_matmuls(device, args)
  values = launch_facts(_medians(launch_runs(args.calls), args))
  if mesh.size > 1:
    for make, read in (
      (copy_runs, copy_facts),
      (beside_runs, beside_facts),
      (balance_runs, balance_facts),
    ):
      values |= read(_medians(make(mesh, args.calls), args))
  source = f"ultraep bench costs, {datetime.date.today()}, jax {jax.__version__}"
  facts = {name: Fact(value, FACTS[name][0], "measured", source) for name, value in values.items()}
  matmuls = [each._replace(source=f"{source}; {each.source}") for each in matmuls]
  found = [[n, f"{f.value:.4g}", f"{device[n]:.4g}", f.unit] for n, f in facts.items()]
  print(table(["constant", "here", "before", "unit"], found), flush=True)
  rates = [[str(m.widths), f"{m.forward:.4g}", f"{m.backward:.4g}"] for m in matmuls]
  print(table(["widths", "forward FLOP/s", "backward FLOP/s"], rates), flush=True)
  if path and data:
    description.save(path, description.with_facts(data, facts, matmuls))


def _medians(runs: Runs, args: argparse.Namespace) -> dict[str, float]:
  """Seconds of a call."""
  seconds = timing.in_turn(runs, args.repeats, args.calls)
  medians = {name: timing.median(values) for name, values in seconds.items()}
  print(", ".join(f"{name}: {1e6 * x:.1f} us" for name, x in medians.items()), flush=True)
  return medians


# --- matmuls ---------------------------------------------------------------------------------


def measure_matmuls(device: Device, args: argparse.Namespace) -> list[Matmul]:
  """Of all shapes for which the time sufficed."""
  names = [*FORWARD, *BACKWARD]
  problems = [Problem.of(name, model, args.rows) for model in args.shapes for name in names]
  pace = contest.Pace(rounds=args.repeats, end=time.monotonic() + args.seconds)
  seconds: dict[str, dict[str, float]] = {}
  outcomes = contest.hold([_contest(device, problem) for problem in problems], pace)
  for problem, (_, outcome) in zip(problems, outcomes, strict=True):
    if "kernel" not in outcome.seconds:
      print(f"{problem.title}: {outcome.failures}", file=sys.stderr)
      continue
    median = timing.median(outcome.seconds["kernel"])
    seconds.setdefault(problem.model, {})[problem.name] = median
  whole = {model: times for model, times in seconds.items() if len(times) == len(names)}
  return [
    rates(device, Problem.of(names[0], model, args.rows), times) for model, times in whole.items()
  ]


def _contest(device: Device, problem: Problem) -> contest.Contest:
  kernel = functools.partial(problem.parts().kernel, tuning=problem.tuned(device.tunings))
  return problem.contest({"kernel": kernel})


def rates(device: Device, problem: Problem, seconds: Seconds) -> Matmul:
  """FLOP/s of padded rows, without what reading the weights adds, from the seconds of all parts."""
  tile = device["matmul_tile"]
  padded = tile * float(np.ceil(problem.sizes / tile).sum())
  widths = problem.wide, problem.inner
  found = []
  for work, (direction, parts) in enumerate((("forward", FORWARD), ("backward", BACKWARD)), 1):
    total = sum(count * seconds[name] for name, count in parts.items())
    reading = np.count_nonzero(problem.sizes) * reading_seconds(device, *widths, direction)
    found.append(work * 2 * padded * 3 * math.prod(widths) / (total - float(reading)))
  note = f"{problem.sizes.sum()} rows of {len(problem.sizes)} slots, kernels one by one"
  return Matmul(widths, found[0], found[1], "measured", note)


# --- launches --------------------------------------------------------------------------------


def launch_runs(calls: int) -> Runs:
  """Chains of kernels that do next to nothing."""

  def chain_of(count: int) -> Callable[[], Any]:
    def call(_: Array, x: Array) -> Array:
      for _launch in range(count):
        x = lax.optimization_barrier(x + 1)
      return x

    return functools.partial(jax.jit(timing.chain(call, calls)), jnp.ones(128))

  return {str(count): chain_of(count) for count in LAUNCHES}


def launch_facts(seconds: Seconds) -> dict[str, float]:
  few, many = LAUNCHES
  return {"launch_seconds": (seconds[str(many)] - seconds[str(few)]) / (many - few)}


def balance_load(ranks: int) -> np.ndarray:
  """``[G, E]``, equal: no plan copies anything."""
  return testing.balanced_loads(0, _HOME * ranks, ranks, _TOKENS, LAYER.top_k)


def balance_runs(mesh: jax.sharding.Mesh, calls: int) -> Runs:
  """A layer of equal loads that may copy, and one that cannot; both have room for all rows.

  Forward, and the same with gradients.
  """
  ranks, width, inner, top_k = mesh.size, LAYER.width, LAYER.inner, LAYER.top_k
  experts = _HOME * ranks
  index = testing.expert_indices(0, balance_load(ranks), top_k)
  index = jnp.asarray(index.reshape(-1, top_k))
  into = random_normal(mesh, 0, 0.02, experts, width, inner)
  out = random_normal(mesh, 1, 0.02, experts, inner, width)
  x = random_normal(mesh, 2, 1.0, ranks * _TOKENS, width)
  arguments = index, x, jnp.ones(index.shape), ExpertWeights(into, into, out)

  def layer(strategy: str, *, trained: bool) -> Callable[[], Any]:
    config = BalanceConfig(strategy=strategy, objective="balance", capacity_factor=float(ranks))

    def call(_: Array, index: Array, *operands: Any) -> Any:
      def forward(x: Array, gate: Array, weights: ExpertWeights) -> Array:
        return sharded_moe(x, index, gate, weights, config=config, mesh=mesh)[0]

      if not trained:
        return forward(*operands)
      y, vjp = jax.vjp(forward, *operands)
      return y, vjp(y)

    return functools.partial(jax.jit(timing.chain(call, calls)), *arguments)

  return {
    name + suffix: layer(name, trained=bool(suffix))
    for suffix in ("", _TRAINED)
    for name in ("none", "quota")
  }


def balance_facts(seconds: Seconds) -> dict[str, float]:
  """None that noise hides: a description would else say that balancing costs nothing."""
  facts = {"balance_seconds": "", "balance_training_seconds": _TRAINED}
  more = {fact: seconds["quota" + of] - seconds["none" + of] for fact, of in facts.items()}
  return {fact: value for fact, value in more.items() if value > 0}


# --- copies ----------------------------------------------------------------------------------


def copy_runs(mesh: jax.sharding.Mesh, calls: int) -> Runs:
  """One and several experts of one rank to the next, alone."""
  ranks, most = mesh.size, max(COPIES)
  home = random_normal(mesh, 0, 1.0, ranks * most, _EXPERT_SIZE)

  def push(count: int) -> Callable[[], Any]:
    expert_GS, parent_GS = np.full((2, ranks, most), -1, np.int32)
    expert_GS[1, :count], parent_GS[1, :count] = np.arange(count), 0

    def call(_: Array, home: Array) -> Array:
      plan = jnp.asarray(expert_GS), jnp.asarray(parent_GS)
      return replicate([home], *plan, axis_name=AXIS)[0]

    def local(home: Array) -> Array:
      return timing.chain(call, calls)(home)[None]

    specs = {"in_specs": P(AXIS), "out_specs": P(AXIS), "check_vma": False}
    return functools.partial(jax.jit(jax.shard_map(local, mesh=mesh, **specs)), home)

  return {str(count): push(count) for count in COPIES}


def copy_facts(seconds: Seconds) -> dict[str, float]:
  few, many = COPIES
  size = 2 * _EXPERT_SIZE
  one = (seconds[str(many)] - seconds[str(few)]) / (many - few)
  return {"copy_rate": size / one}


def beside_runs(mesh: jax.sharding.Mesh, calls: int) -> Runs:
  """A first matmul whose copies are there, come before it, and come beside it."""
  plan = many_copies(mesh.size, beside.TOKENS * EXPERT.top_k)
  rows = int(beside.TOKENS * EXPERT.top_k * beside.CAPACITY_FACTOR)
  arrays = beside.random_arrays(mesh, rows, EXPERT.width, EXPERT.inner)
  arguments = (*arrays, *(beside.on_ranks(mesh, part) for part in plan))
  variants = beside.variants({"copying": COPYING})
  return {
    name: functools.partial(beside.sharded(timing.chain(call, calls), mesh), *arguments)
    for name, call in variants.items()
  }


def many_copies(ranks: int, rows: int) -> beside.Plan:
  """Ranks hold copies of the next one's first experts; all slots of a rank share its rows."""
  next_G1 = (np.arange(ranks)[:, None] + 1) % ranks
  parent_GS = np.repeat(next_G1, MANY, axis=1).astype(np.int32)
  expert_GS = parent_GS * beside.HOME + np.arange(MANY, dtype=np.int32)
  slots = beside.HOME + MANY
  rows_GP = np.full((ranks, slots), rows // slots, np.int32)
  return beside.Plan(rows_GP, *(np.stack([part] * ranks) for part in (expert_GS, parent_GS)))


def beside_facts(seconds: Seconds) -> dict[str, float]:
  known_there, before, riding = (
    seconds[name] for name in ("copies known", "copies before", "beside, copying")
  )
  exposed = (riding - known_there) / (before - known_there)
  return {"copy_exposed_forward": float(np.clip(exposed, 0, 1))}


if __name__ == "__main__":
  raise SystemExit(main())
