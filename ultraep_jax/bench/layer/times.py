"""Times of the bench of a layer: compiled variants, run in turn, and what they say they did."""

import argparse
import concurrent.futures
import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from ultraep_jax.bench import contest, timing
from ultraep_jax.bench.layer import peers
from ultraep_jax.bench.layer.problem import Problem, specs, tokens_spec
from ultraep_jax.bench.layer.variants import BALANCED, bound, capacity, layer, one_call
from ultraep_jax.config import BalanceConfig
from ultraep_jax.planning.fit import num_slots
from ultraep_jax.strategies import eplb
from ultraep_jax.tables import table_of_records
from ultraep_jax.tools.errors import described
from ultraep_jax.tools.progress import progress
from ultraep_jax.types import Array, ExpertWeights

KERNELS = {
  "plan": ("plan",),
  "loads": ("gather",),
  "dispatch": ("dispatch",),
  "combine": ("combine",),
  "replicate": ("replicate",),
  "reduce": ("reduce_replicas",),
  "matmul": ("grouped_matmul", "gated_matmul", "ragged", "transposed_ragged", "nvjet", "sm90"),
  "between matmuls": ("gated_grads",),
  "collectives": ("nccl",),
  "waiting": ("stream_executor::gpu::MultiGpuBarrier",),
}


@dataclasses.dataclass(frozen=True)
class Case:
  """One measurement; variants of it are timed in turn."""

  name: str
  ratio: float
  direction: str


def check(
  mesh: jax.sharding.Mesh, name: str, ratio: float, problem: Problem, args: argparse.Namespace
) -> None:
  """Raises AssertionError unless balanced variants' results are those of the portable layer."""

  @jax.jit
  def errors(got: Any, want: Any) -> list[Array]:
    return jax.tree.leaves(jax.tree.map(contest.distance, got, want))

  want = _results(mesh, "portable", problem, args)
  for variant in checked(args.variants):
    found = [float(e) for e in errors(_results(mesh, variant, problem, args), want)]
    text = ", ".join(f"{e:.1e}" for e in found)
    print(
      f"{name} {ratio} {variant}: relative to portable: y alone, y, x, gate, weights: {text}",
      flush=True,
    )
    assert max(found) < 1e-2, (variant, found)


def checked(variants: Iterable[str]) -> list[str]:
  """Those of variants that ``check`` compares with the portable layer."""
  return [name for name in variants if name in BALANCED and name != "portable"]


def _results(
  mesh: jax.sharding.Mesh, variant: str, problem: Problem, args: argparse.Namespace
) -> Any:
  """Of a call forward and of one with gradients, with the first loads."""
  apply = layer(variant, problem, args)

  def both(*arguments: Any) -> Any:
    return [one_call(apply, each)(jnp.int32(0), *arguments) for each in ("forward", "train")]

  function = jax.shard_map(
    both, mesh=mesh, in_specs=specs(mesh), out_specs=tokens_spec(mesh), check_vma=False
  )
  return jax.jit(function)(*problem.arguments)


class Programs:
  """Compiled variants. One serves all loads for which it would be the same."""

  def __init__(self, mesh: jax.sharding.Mesh, args: argparse.Namespace) -> None:
    self.mesh, self.args = mesh, args
    self.ready: dict[tuple[Any, ...], Any] = {}

  def key(self, case: Case, problem: Problem, variant: str) -> tuple[Any, ...]:
    if variant in peers.LAYERS:  # their buffers are made to measure
      return case.name, case.direction, variant, problem.busiest
    return case.name, case.direction, variant, capacity(variant, problem, self.args)

  def compile(self, cases: Sequence[tuple[Case, Problem]]) -> None:
    """Compiles everything, several programs at a time, while the next ones are lowered."""
    needed = {
      self.key(case, problem, variant): (case, problem, variant)
      for case, problem in cases
      for variant in self.args.variants
    }
    with concurrent.futures.ThreadPoolExecutor(self.args.compile_workers) as pool:
      futures = {}
      for key, which in progress(needed.items(), "lower", "program"):
        futures[key] = pool.submit(self._lower(*which).compile)
      for key, future in progress(futures.items(), "compile", "program"):
        try:
          self.ready[key] = future.result()
        except Exception as error:
          print(f"{key}: {described(error)}", flush=True)

  def _lower(self, case: Case, problem: Problem, variant: str) -> Any:
    apply = layer(variant, problem, self.args)
    chained = timing.chain(one_call(apply, case.direction), self.args.calls)

    def on_rank(*args: Any) -> Array:
      return chained(*args)[None]

    mesh = self.mesh
    function = jax.shard_map(
      on_rank, mesh=mesh, in_specs=specs(mesh), out_specs=tokens_spec(mesh), check_vma=False
    )
    with timing.quiet():
      return jax.jit(function).lower(*problem.arguments)


def measure(
  case: Case, problem: Problem, programs: Programs, args: argparse.Namespace
) -> list[dict[str, Any]]:
  compiled = {v: programs.ready.get(programs.key(case, problem, v)) for v in args.variants}
  compiled = {v: program for v, program in compiled.items() if program is not None}
  runs = {v: functools.partial(c, *problem.arguments) for v, c in compiled.items()}
  seconds = {v: timing.median(s) for v, s in timing.in_turn(runs, args.repeats, args.calls).items()}
  rows = []
  for variant, run in runs.items():
    row: dict[str, Any] = {
      "shape": case.name,
      "ratio": case.ratio,
      "pass": case.direction,
      "variant": variant,
      "ms": seconds[variant] * 1e3,
      "of_ideal": seconds["ideal"] / seconds[variant] if "ideal" in seconds else None,
      "over_none": seconds["none"] / seconds[variant] if "none" in seconds else None,
      "temp_gb": getattr(compiled[variant].memory_analysis(), "temp_size_in_bytes", 0) / 1e9,
    }
    if variant in BALANCED and args.statistics:
      row |= after(programs.mesh, problem, variant, args)
    if args.profile:
      row["kernels_us"] = timing.kernel_times(run, args.calls)
      row["kinds_us"] = timing.grouped(row["kernels_us"], KERNELS)
    rows.append(row)
  print(times_table(rows), flush=True)
  return rows


def after(
  mesh: jax.sharding.Mesh, problem: Problem, variant: str, args: argparse.Namespace
) -> dict[str, float]:
  """What the balanced layer says that it did, the worst or the mean over the loads."""
  apply = layer(variant, problem, args)

  def scalars(
    x: Array, index: Array, gate: Array, weights: ExpertWeights, state: eplb.History
  ) -> Any:
    _, stats = apply(x, index, gate, weights, state)
    return lax.all_gather(stats.scalars(), mesh.axis_names)  # several meshes' differ

  tokens, _, *others = specs(mesh)
  function = jax.jit(
    jax.shard_map(
      scalars, mesh=mesh, in_specs=(tokens, tokens, *others), out_specs=P(), check_vma=False
    )
  )
  arrays = problem.arrays
  each = [
    jax.device_get(
      function(
        arrays.x,
        problem.index[n],
        arrays.gate,
        arrays.weights,
        problem.state(n),
      )
    )
    for n in range(len(problem.index))
  ]
  worst = {k: float(max(e[k].max() for e in each)) for k in ("imbalance_before", "imbalance_after")}
  mean = {k: float(np.mean([e[k] for e in each])) for k in ("replicas", "replica_megabytes")}
  _, ranks, experts = problem.load_NGE.shape
  slots = num_slots(BalanceConfig(replica_slots=args.slots), experts, ranks)
  least = max(bound(load_GE, slots) for load_GE in problem.load_NGE)
  return worst | mean | {"rounds": float(max(e["rounds"].max() for e in each)), "bound": least}


def times_table(rows: Sequence[Mapping[str, Any]]) -> str:
  """The variants of one case, as a table."""
  columns = {
    "": "shape",
    "ratio": "ratio",
    "pass": "pass",
    "variant": "variant",
    "ms": "ms",
    "of ideal": "of_ideal",
    "x none": "over_none",
    "GB": "temp_gb",
    "before": "imbalance_before",
    "after": "imbalance_after",
    "bound": "bound",
    "copies": "replicas",
    "rounds": "rounds",
  }
  kinds = [row.get("kinds_us", {}) for row in rows]
  known = [{**dict.fromkeys(columns.values()), **row} for row in rows]  # peers plan nothing
  return table_of_records(columns, known, parts={" us": kinds})
