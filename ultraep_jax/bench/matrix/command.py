"""Measures what balancing by default costs and gains: shapes, batches and loads of a matrix.

Run on every GPU of a host: ``ultraep bench matrix``. *Regret* is the time balanced
by default settings over the best of not balanced, which may have the default buffer and run
rounds, or a buffer for the worst case. All run in one program and in turn. ``ideal`` makes loads
equal and is wrong; the bound is what no plan can go below; the floor comes from FLOPs, bytes and
launches.

On one GPU ``--ratios 1`` says what the layer costs where nothing can be balanced.

By default a few groups in which every two of shape, tokens and pass meet; ``--all`` measures the
product, ``--minutes`` says when to begin no further group.
"""

import argparse
import functools
import json
import pathlib
import time
from collections.abc import Mapping, Sequence
from concurrent import futures
from typing import Any, get_args

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ultraep_jax.bench import timing
from ultraep_jax.bench.layer.problem import AXIS, SHAPES, Arrays, Shape
from ultraep_jax.bench.layer.variants import bound
from ultraep_jax.bench.machine import devices
from ultraep_jax.bench.matrix import report
from ultraep_jax.bench.matrix.cells import (
  HIGHEST,
  LOADS,
  PASSES,
  RATIOS,
  TOKENS,
  Cell,
  Group,
  choose,
)
from ultraep_jax.bench.matrix.floor import floor
from ultraep_jax.bench.matrix.loads import choices, imbalance, load_matrix
from ultraep_jax.bench.matrix.rates import rates_here
from ultraep_jax.config import BalanceConfig, Implementation
from ultraep_jax.files import check_output, write_text
from ultraep_jax.moe import moe
from ultraep_jax.tools import processes
from ultraep_jax.tools.arguments import factor, nonnegative, positive
from ultraep_jax.types import Array, ExpertWeights

BALANCED = "balanced"
UNBALANCED = ("none", "none, worst-case buffer")
SPECS = (P(AXIS), P(None, AXIS), P(AXIS), P(AXIS))
_STEPS = 2  # loads of a cell, which calls cycle through


def main(argv: Sequence[str] | None = None) -> int:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  add_arguments(parser)
  args = parser.parse_args(argv)
  check_output(args.json)
  check_output(args.plot)
  return processes.run(run, args)


def add_arguments(parser: argparse.ArgumentParser) -> None:
  parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
  parser.add_argument("--tokens", nargs="+", type=positive, default=list(TOKENS), help="per rank")
  parser.add_argument(
    "--ratios", nargs="+", type=_ratio, default=list(RATIOS), help="numbers of at least 1, or max"
  )
  parser.add_argument("--loads", nargs="+", default=list(LOADS), choices=LOADS)
  parser.add_argument("--passes", nargs="+", default=list(PASSES), choices=PASSES)
  parser.add_argument("--all", action="store_true", help="all groups, not a pairwise choice")
  parser.add_argument("--minutes", type=nonnegative, default=9.0, help="begin no group after these")
  parser.add_argument("--ranks", type=positive, help="default: all devices")
  parser.add_argument("--scale", type=positive, default=1, help="divide widths, to try it on a CPU")
  parser.add_argument("--implementation", default="auto", choices=get_args(Implementation))
  parser.add_argument("--repeats", type=positive, default=5)
  parser.add_argument("--json", type=pathlib.Path, help="write the results to this file too")
  parser.add_argument("--plot", type=pathlib.Path, help="draw the heat maps")
  processes.add_argument(parser)


def _ratio(text: str) -> str:
  if text != HIGHEST:
    factor(text)
  return text


def run(args: argparse.Namespace) -> int:
  uneven = any(ratio == HIGHEST or float(ratio) > 1 for ratio in args.ratios)
  found = devices(args.ranks, least=2 if uneven else 1, full_size=args.scale == 1)
  axis_types = (jax.sharding.AxisType.Auto,)
  mesh = jax.make_mesh((len(found),), (AXIS,), axis_types=axis_types, devices=found)
  print(f"jax {jax.__version__}, {mesh.size} x {found[0].device_kind}", flush=True)
  groups = choose(
    args.shapes, args.tokens, args.ratios, args.loads, args.passes, pairwise=not args.all
  )
  end = time.monotonic() + 60 * args.minutes
  rows: list[dict[str, Any]] = []
  for done, (group, cells) in enumerate(groups.items()):
    if time.monotonic() > end:
      print(f"no time for {len(groups) - done} of {len(groups)} groups", flush=True)
      break
    try:
      rows += measure_group(mesh, group, cells, args)
    except Exception as error:  # memory, say; the others are worth having
      print(f"{group}: {type(error).__name__}: {str(error)[:300]}", flush=True)
    if args.json and jax.process_index() == 0:
      results = {"jax": jax.__version__, "device": f"{mesh.size} x {found[0].device_kind}"}
      write_text(args.json, json.dumps(results | {"rows": rows}, indent=1))
  print("\n".join(report.summarise(rows)), flush=True)
  if args.plot and jax.process_index() == 0 and rows:
    report.draw(rows).savefig(args.plot, dpi=130)
  return 0 if rows else 1


def variants(ranks: int, implementation: Any) -> dict[str, BalanceConfig]:
  """The default settings, and what they compete with."""
  make = functools.partial(BalanceConfig, implementation=implementation)
  return {
    BALANCED: make(),
    UNBALANCED[0]: make(strategy="none"),
    UNBALANCED[1]: make(strategy="none", capacity_factor=float(ranks)),
    "ideal": make(strategy="ideal"),
  }


def measure_group(
  mesh: jax.sharding.Mesh, group: Group, cells: Sequence[Cell], args: argparse.Namespace
) -> list[dict[str, Any]]:
  """Compiles the variants once and times each cell's loads."""
  shape = SHAPES[group.shape]
  shape = shape._replace(width=shape.width // args.scale, inner=shape.inner // args.scale)
  sizes = argparse.Namespace(experts=shape.experts, tokens=group.tokens)
  arrays = Arrays.make(mesh, shape, sizes)
  calls = 8 if group.tokens >= 2048 else 32
  index = {cell: _index(mesh, cell, shape) for cell in cells}
  arguments = (arrays.x, next(iter(index.values())), arrays.gate, arrays.weights)
  lowered = {}
  for name, config in variants(mesh.size, args.implementation).items():
    with timing.quiet():
      chained = timing.chain(_one_call(config, group.direction), calls)
      lowered[name] = _on_mesh(mesh, lambda *a, f=chained: f(*a)[None], P(AXIS)).lower(*arguments)
  scalars = _on_mesh(mesh, _scalars(variants(mesh.size, args.implementation)[BALANCED]), P())
  with futures.ThreadPoolExecutor() as pool:
    compiled = dict(zip(lowered, pool.map(_try_compile, lowered.values()), strict=True))
  rows = []
  for cell in cells:
    arguments = (arrays.x, index[cell], arrays.gate, arrays.weights)
    runs = {n: functools.partial(c, *arguments) for n, c in compiled.items() if callable(c)}
    seconds = timing.in_turn(runs, args.repeats, calls)
    stats = [jax.device_get(scalars(*_of_step(arguments, step))) for step in range(_STEPS)]
    times = {name: timing.median(values) for name, values in seconds.items()}
    rows.append(_row(mesh.size, cell, shape, times, np.asarray(index[cell]), stats))
  print(report.cells_table(rows), flush=True)
  return rows


def _try_compile(lowered: Any) -> Any:
  try:
    return lowered.compile()
  except Exception as error:
    print(f"{type(error).__name__}: {str(error)[:300]}", flush=True)
    return None


def _index(mesh: jax.sharding.Mesh, cell: Cell, shape: Shape) -> Array:
  steps = [
    choices(seed, cell.loads, cell.ratio, shape.experts, mesh.size, cell.group.tokens, shape.top_k)
    for seed in range(_STEPS)
  ]
  return processes.put(np.stack(steps), NamedSharding(mesh, P(None, AXIS)))


def _on_mesh(mesh: jax.sharding.Mesh, function: Any, out_specs: Any) -> Any:
  return jax.jit(
    jax.shard_map(function, mesh=mesh, in_specs=SPECS, out_specs=out_specs, check_vma=False)
  )


def _one_call(config: BalanceConfig, direction: str) -> Any:
  """``(i, x, index, gate, weights) -> results`` of the i-th call."""

  def call(i: Array, x: Array, index: Array, gate: Array, weights: ExpertWeights) -> Any:
    def layer(x: Array, gate: Array, weights: ExpertWeights) -> Array:
      return moe(x, index[i % len(index)], gate, weights, config=config, axis_name=AXIS)[0]

    if direction == "forward":
      return layer(x, gate, weights)
    y, vjp = jax.vjp(layer, x, gate, weights)
    return y, vjp(y)

  return call


def _scalars(config: BalanceConfig) -> Any:
  def on_rank(x: Array, index: Array, gate: Array, weights: ExpertWeights) -> Any:
    return moe(x, index[0], gate, weights, config=config, axis_name=AXIS)[1].scalars()

  return on_rank


def _of_step(arguments: tuple[Any, ...], step: int) -> tuple[Any, ...]:
  x, index, gate, weights = arguments
  return x, index[step : step + 1], gate, weights


def _row(
  ranks: int,
  cell: Cell,
  shape: Shape,
  seconds: Mapping[str, float],
  index: np.ndarray,
  stats: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
  group = cell.group
  best = min(seconds[name] for name in UNBALANCED if name in seconds)
  loads = [load_matrix(step, shape.experts, ranks) for step in index]
  # No plan goes below this with as many slots as experts; equal loads lie at or below it too.
  least = max(bound(load_GE, shape.experts // ranks) for load_GE in loads)
  ideal = seconds.get("ideal", float("nan"))
  lowest = floor(shape, ranks, group.tokens, group.direction, rates_here())
  return {
    "shape": group.shape,
    "tokens": group.tokens,
    "direction": group.direction,
    "ratio": cell.ratio,
    "loads": cell.loads,
    "before": max(imbalance(step, shape.experts, ranks) for step in index),
    "after": max(float(each["imbalance_after"]) for each in stats),
    "bound": least,
    "rounds": max(float(each["rounds"]) for each in stats),
    "copies": float(np.mean([each["replicas"] for each in stats])),
    "ms": {name: 1e3 * value for name, value in seconds.items()},
    "best_unbalanced_ms": 1e3 * best,
    "regret": seconds[BALANCED] / best,
    "extra_us": 1e6 * (seconds[BALANCED] - best),
    "of_bound": least * ideal / seconds[BALANCED],
    "floor_ms": 1e3 * lowest.seconds,
    "floor_parts_ms": {name: 1e3 * value for name, value in lowest._asdict().items()},
    "ideal_over_floor": ideal / lowest.seconds,
  }


if __name__ == "__main__":
  raise SystemExit(main())
