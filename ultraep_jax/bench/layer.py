"""Measures one MoE layer: balanced, not balanced, forced equal, and as JAX users write it today.

Run on every GPU of a host: ``python -m ultraep_jax bench layer``. All variants run in one
process and in turn, on the same loads, which change with every call. Every variant has the buffers
that its busiest rank needs, and drops nothing.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import itertools
import json
import pathlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ultraep_jax import testing
from ultraep_jax.bench import peers, timing
from ultraep_jax.config import BalanceConfig
from ultraep_jax.moe import moe
from ultraep_jax.progress import progress
from ultraep_jax.types import Array, ExpertWeights

AXIS = "expert"


class Shape(NamedTuple):
  """Sizes of an expert layer: hidden width, inner width, experts chosen per token."""

  width: int
  inner: int
  top_k: int


SHAPES = {
  "qwen3-235b": Shape(4096, 1536, 8),
  "glm4.5-106b": Shape(4096, 1408, 8),
  "deepseek-v3": Shape(7168, 2048, 8),
}
PASSES = ("forward", "train")
VARIANTS = ("none", "quota", "ideal", "plain", "tuned")
KERNELS = {
  "plan": ("plan",),
  "dispatch": ("dispatch",),
  "combine": ("combine",),
  "replicate": ("replicate",),
  "reduce": ("reduce_replicas",),
  "matmul": ("grouped_matmul", "gated_matmul", "ragged", "transposed_ragged", "nvjet", "sm90"),
  "collectives": ("nccl",),
}


def main(argv: Sequence[str] | None = None) -> int:
  parser = argparse.ArgumentParser(description=__doc__)
  add_arguments(parser)
  return run(parser.parse_args(argv))


def add_arguments(parser: argparse.ArgumentParser) -> None:
  parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
  parser.add_argument("--ratios", nargs="+", type=float, default=[1.0, 1.3, 2.0, 3.0])
  parser.add_argument("--loads", default="zipf", choices=["zipf", "flat"])
  parser.add_argument("--passes", nargs="+", default=list(PASSES), choices=PASSES)
  parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
  parser.add_argument("--experts", type=int, help="default: 16 a rank")
  parser.add_argument("--tokens", type=int, default=8192, help="per rank")
  parser.add_argument("--top-k", type=int)
  parser.add_argument("--slots", type=int, default=2)
  parser.add_argument("--objective", default="balance", choices=["balance", "time"])
  parser.add_argument("--implementation", default="auto")
  parser.add_argument("--dispatch-dtype", choices=["float8_e4m3fn"], help="that tokens cross in")
  parser.add_argument("--steps", type=int, default=4, help="load matrices that calls cycle through")
  parser.add_argument("--calls", type=int, default=8, help="calls chained inside one jit")
  parser.add_argument("--repeats", type=int, default=5)
  parser.add_argument("--scale", type=int, default=1, help="divide widths, to try it on a CPU")
  parser.add_argument(
    "--profile", action="store_true", help="times by kind of kernel, from a trace"
  )
  parser.add_argument("--check", action="store_true", help="compare with the portable layer first")
  parser.add_argument("--json", type=pathlib.Path, help="write the results to this file too")
  parser.add_argument("--no-statistics", dest="statistics", action="store_false")
  parser.add_argument("--compile-workers", type=int, default=8, help="programs at a time")


@dataclasses.dataclass(frozen=True)
class Case:
  """One measurement; variants of it are timed in turn."""

  name: str
  ratio: float
  direction: str


def run(args: argparse.Namespace) -> int:
  mesh = jax.make_mesh((jax.device_count(),), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
  print(f"jax {jax.__version__}, {mesh.size} x {jax.devices()[0].device_kind}", flush=True)
  problems, made = {}, {}
  for name in args.shapes:
    arrays = Arrays.make(mesh, scaled(name, args), args)
    for ratio in args.ratios:
      sizes = ratio, arrays.gate.shape, arrays.weights.wo.shape[0]
      if sizes not in made:  # loads take longer to make than to measure
        made[sizes] = Problem.make(mesh, arrays, ratio, args)
      problems[name, ratio] = dataclasses.replace(made[sizes], arrays=arrays)
  cases = [
    Case(*key, direction)
    for direction in args.passes
    for key in itertools.product(args.shapes, args.ratios)
  ]
  if args.check:
    for (name, ratio), problem in problems.items():
      check(mesh, name, ratio, problem, args)
  programs = Programs(mesh, args)
  programs.compile([(case, problems[case.name, case.ratio]) for case in cases])
  results = []
  for case in cases:
    results += measure(case, problems[case.name, case.ratio], programs, args)
    if args.json:
      args.json.write_text(json.dumps(results, indent=1))
  return 0


def scaled(name: str, args: argparse.Namespace) -> Shape:
  shape = SHAPES[name]
  return Shape(shape.width // args.scale, shape.inner // args.scale, args.top_k or shape.top_k)


@dataclasses.dataclass(frozen=True)
class Arrays:
  """What all loads of a shape share, sharded."""

  x: Array
  gate: Array
  weights: ExpertWeights
  cotangent: Array

  @classmethod
  def make(cls, mesh: jax.sharding.Mesh, shape: Shape, args: argparse.Namespace) -> "Arrays":
    ranks, width, inner = mesh.size, shape.width, shape.inner
    experts = args.experts or 16 * ranks

    def normal(seed: int, scale: float, *sizes: int) -> Array:
      @functools.partial(jax.jit, out_shardings=NamedSharding(mesh, P(AXIS)))
      def make_array(key: Array) -> Array:
        return (scale * jax.random.normal(key, sizes)).astype(jnp.bfloat16)

      return make_array(jax.random.key(seed))

    weights = ExpertWeights(
      normal(1, width**-0.5, experts, width, inner),
      normal(2, width**-0.5, experts, width, inner),
      normal(3, inner**-0.5, experts, inner, width),
    )
    total = ranks * args.tokens
    gate = np.random.default_rng(0).random((total, shape.top_k)).astype(np.float32)
    return cls(
      normal(0, 1.0, total, width),
      jax.device_put(gate, NamedSharding(mesh, P(AXIS))),
      weights,
      normal(4, 1.0, total, width),
    )


@dataclasses.dataclass(frozen=True)
class Problem:
  """The arrays that all variants work on, and the loads on the host."""

  load_NGE: np.ndarray
  index: Array  # [N, G * T, K]
  arrays: Arrays

  @classmethod
  def make(
    cls, mesh: jax.sharding.Mesh, arrays: Arrays, ratio: float, args: argparse.Namespace
  ) -> "Problem":
    ranks, tokens, top_k = mesh.size, args.tokens, arrays.gate.shape[1]
    experts = arrays.weights.wo.shape[0]
    loads = []
    for seed in range(args.steps):
      if ratio == 1.0:
        loads.append(testing.balanced_loads(seed, experts, ranks, tokens, top_k))
      else:
        make = testing.zipf_loads if args.loads == "zipf" else testing.flat_loads
        loads.append(make(seed, experts, ranks, tokens, top_k, ratio))
    index = [
      testing.expert_indices(seed, load, top_k).reshape(-1, top_k)
      for seed, load in enumerate(loads)
    ]
    sharded = jax.device_put(np.stack(index).astype(np.int32), NamedSharding(mesh, P(None, AXIS)))
    return cls(np.stack(loads), sharded, arrays)

  @property
  def busiest(self) -> float:
    """Busiest over mean rank, the worst of all loads."""
    steps, ranks, experts = self.load_NGE.shape
    rank_NG = self.load_NGE.sum(axis=1).reshape(steps, ranks, experts // ranks).sum(-1)
    return float((rank_NG.max(axis=1) / rank_NG.mean(axis=1)).max())

  @property
  def arguments(self) -> tuple[Any, ...]:
    a = self.arrays
    return a.x, self.index, a.gate, a.weights, a.cotangent


SPECS = (P(AXIS), P(None, AXIS), P(AXIS), P(AXIS), P(AXIS))


Layer = Callable[[Array, Array, Array, ExpertWeights], tuple[Array, Any]]


def layer(variant: str, problem: Problem, args: argparse.Namespace) -> Layer:
  """The layer of a variant on one rank's part; also returns what it did, if it says so."""
  if variant in peers.LAYERS:
    buffers = peers.Buffers.of(problem.load_NGE)

    def peer(x: Array, index: Array, gate: Array, weights: ExpertWeights) -> tuple[Array, None]:
      return peers.LAYERS[variant](x, index, gate, weights, buffers, AXIS), None

    return peer
  slack = 1.0625
  config = BalanceConfig(
    replica_slots=args.slots,
    strategy=variant,
    objective=args.objective,
    implementation=args.implementation,
    dispatch_dtype=args.dispatch_dtype,
    capacity_factor=max(slack, problem.busiest) if variant == "none" else slack,
  )
  return functools.partial(moe, config=config, axis_name=AXIS)


def one_call(variant: str, problem: Problem, args: argparse.Namespace, direction: str) -> Any:
  """``(i, x, index, gate, weights, cotangent) -> results`` of the i-th call."""
  apply = layer(variant, problem, args)

  def forward(
    i: Array, x: Array, index: Array, gate: Array, weights: ExpertWeights, cotangent: Array
  ) -> Any:
    del cotangent
    return apply(x, index[i % index.shape[0]], gate, weights)[0]

  def train(
    i: Array, x: Array, index: Array, gate: Array, weights: ExpertWeights, cotangent: Array
  ) -> Any:
    def run_layer(x: Array, gate: Array, weights: ExpertWeights) -> Array:
      return apply(x, index[i % index.shape[0]], gate, weights)[0]

    y, vjp = jax.vjp(run_layer, x, gate, weights)
    return y, vjp(cotangent)

  return forward if direction == "forward" else train


def check(
  mesh: jax.sharding.Mesh, name: str, ratio: float, problem: Problem, args: argparse.Namespace
) -> None:
  """Raises AssertionError unless output and gradients are those of the portable layer."""

  def results(implementation: str) -> Any:
    changed = argparse.Namespace(**vars(args) | {"implementation": implementation})
    call = functools.partial(one_call("quota", problem, changed, "train"), jnp.int32(0))
    function = jax.shard_map(call, mesh=mesh, in_specs=SPECS, out_specs=P(AXIS), check_vma=False)
    return jax.jit(function)(*problem.arguments)

  @jax.jit
  def errors(got: Any, want: Any) -> list[Array]:
    def error(a: Array, b: Array) -> Array:
      a, b = a.astype(jnp.float32), b.astype(jnp.float32)
      return jnp.linalg.norm(a - b) / jnp.linalg.norm(b)

    return jax.tree.leaves(jax.tree.map(error, got, want))

  found = [float(e) for e in errors(results(args.implementation), results("portable"))]
  text = ", ".join(f"{e:.1e}" for e in found)
  print(f"{name} {ratio}: relative to portable: y, x, gate, weights: {text}", flush=True)
  assert max(found) < 1e-2, found


class Programs:
  """Compiled variants. One serves all loads for which it would be the same."""

  def __init__(self, mesh: jax.sharding.Mesh, args: argparse.Namespace) -> None:
    self.mesh, self.args = mesh, args
    self.ready: dict[tuple[Any, ...], Any] = {}

  def key(self, case: Case, problem: Problem, variant: str) -> tuple[Any, ...]:
    depends = variant == "none" or variant in peers.LAYERS  # their buffers are made to measure
    return case.name, case.direction, variant, problem.busiest if depends else None

  def compile(self, cases: Sequence[tuple[Case, Problem]]) -> None:
    """Compiles everything, several programs at a time."""
    lowered = {}
    for case, problem in cases:
      for variant in self.args.variants:
        key = self.key(case, problem, variant)
        if key not in lowered:
          lowered[key] = self._lower(case, problem, variant)
    workers = min(len(lowered), self.args.compile_workers)
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
      futures = {key: pool.submit(program.compile) for key, program in lowered.items()}
      for key, future in progress(futures.items(), "compile", "program"):
        try:
          self.ready[key] = future.result()
        except Exception as error:
          print(f"{key}: {type(error).__name__}: {str(error)[:300]}", flush=True)

  def _lower(self, case: Case, problem: Problem, variant: str) -> Any:
    chained = timing.chain(one_call(variant, problem, self.args, case.direction), self.args.calls)

    def on_rank(*args: Any) -> Array:
      return chained(*args)[None]

    function = jax.jit(
      jax.shard_map(on_rank, mesh=self.mesh, in_specs=SPECS, out_specs=P(AXIS), check_vma=False)
    )
    with warnings.catch_warnings():
      warnings.simplefilter("ignore", UserWarning)  # "ideal" says that its results are wrong
      return function.lower(*problem.arguments)


def measure(
  case: Case, problem: Problem, programs: Programs, args: argparse.Namespace
) -> list[dict[str, Any]]:
  compiled = {v: programs.ready.get(programs.key(case, problem, v)) for v in args.variants}
  compiled = {v: program for v, program in compiled.items() if program is not None}
  runs = {v: functools.partial(c, *problem.arguments) for v, c in compiled.items()}
  seconds = {v: timing.median(s) for v, s in timing.in_turn(runs, args.repeats, args.calls).items()}
  stats = after(programs.mesh, problem, args) if "quota" in runs and args.statistics else {}
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
    if variant == "quota":
      row |= stats
    if args.profile:
      row["kernels_us"] = timing.kernel_times(run, args.calls)
      row["kinds_us"] = timing.grouped(row["kernels_us"], KERNELS)
    rows.append(row)
    print(describe(row), flush=True)
  return rows


def after(mesh: jax.sharding.Mesh, problem: Problem, args: argparse.Namespace) -> dict[str, float]:
  """What the balanced layer says that it did, the worst or the mean over the loads."""
  apply = layer("quota", problem, args)

  def scalars(x: Array, index: Array, gate: Array, weights: ExpertWeights) -> Any:
    _, stats = apply(x, index, gate, weights)
    return stats.scalars()

  function = jax.jit(
    jax.shard_map(scalars, mesh=mesh, in_specs=(P(AXIS),) * 4, out_specs=P(), check_vma=False)
  )
  each = [
    jax.device_get(function(problem.arrays.x, index, problem.arrays.gate, problem.arrays.weights))
    for index in problem.index
  ]
  worst = {k: float(max(e[k] for e in each)) for k in ("imbalance_before", "imbalance_after")}
  mean = {k: float(np.mean([e[k] for e in each])) for k in ("replicas", "replica_megabytes")}
  return worst | mean | {"rounds": float(max(e["rounds"] for e in each))}


def describe(row: dict[str, Any]) -> str:
  text = f"{row['shape']:12} {row['ratio']:4.1f} {row['pass']:8} {row['variant']:6}"
  text += f" {row['ms']:8.3f} ms"
  if row["of_ideal"] is not None:
    text += f" {row['of_ideal']:6.1%} of ideal"
  if row["over_none"] is not None:
    text += f" {row['over_none']:5.2f} x none"
  text += f" {row['temp_gb']:6.2f} GB"
  if "imbalance_after" in row:
    text += f" imbalance {row['imbalance_before']:.3f} -> {row['imbalance_after']:.4f}"
    text += f" replicas {row['replicas']:.1f} rounds {row['rounds']:.0f}"
  if "kinds_us" in row:
    text += " | us: " + ", ".join(f"{k} {v:.0f}" for k, v in row["kinds_us"].items())
  return text


if __name__ == "__main__":
  raise SystemExit(main())
