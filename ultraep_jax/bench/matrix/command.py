"""Measures what balancing by default costs and gains: shapes, batches and loads of a matrix.

Run on every GPU of a host: ``ultraep bench matrix``. *Regret* is the time balanced
by default settings over the best of not balanced, which may have the default buffer and run
rounds, or a buffer for the worst case. All run in one process and in turn. ``ideal`` makes loads
equal and is wrong; the bound is what no plan can go below; the floor comes from FLOPs, bytes and
launches.

With ``--weights float32``, as Flax keeps parameters, a layer casts its weights in every call, and
their gradients are float32.

On one GPU ``--ratios 1`` says what the layer costs where nothing can be balanced.

By default a few cells in which every two of shape, tokens, ratio, loads and pass meet; ``--all``
measures the product, ``--minutes`` says when to begin no further group.
"""

import argparse
import functools
import json
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ultraep_jax.bench import timing
from ultraep_jax.bench.layer.problem import AXIS, SHAPES, Arrays, Shape, mesh_of, shape_of
from ultraep_jax.bench.layer.variants import bound
from ultraep_jax.bench.machine import devices
from ultraep_jax.bench.matrix import report
from ultraep_jax.bench.matrix.cells import (
  HIGHEST,
  LOADS,
  PASSES,
  RATIOS,
  TOKENS,
  WEIGHTS,
  Cell,
  Group,
  choose,
)
from ultraep_jax.bench.matrix.floor import floor
from ultraep_jax.bench.matrix.loads import choices, imbalance, load_matrix
from ultraep_jax.bench.matrix.programs import (
  BALANCED,
  STEPS,
  UNBALANCED,
  compile_group,
  of_step,
)
from ultraep_jax.bench.matrix.rates import rates_here
from ultraep_jax.config import Implementation
from ultraep_jax.files import check_output, write_text
from ultraep_jax.tools import processes
from ultraep_jax.tools.arguments import factor, nonnegative, positive
from ultraep_jax.tools.errors import described
from ultraep_jax.types import Array


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
  parser.add_argument(
    "--shapes",
    nargs="+",
    type=_shape,
    default=list(SHAPES),
    help=f"of {', '.join(SHAPES)}, or DxFxEXPERTSxTOP_K, as 2048x1408x60x4",
  )
  parser.add_argument("--tokens", nargs="+", type=positive, default=list(TOKENS), help="per rank")
  parser.add_argument(
    "--ratios", nargs="+", type=_ratio, default=list(RATIOS), help="numbers of at least 1, or max"
  )
  parser.add_argument("--loads", nargs="+", default=list(LOADS), choices=LOADS)
  parser.add_argument("--passes", nargs="+", default=list(PASSES), choices=PASSES)
  parser.add_argument(
    "--weights",
    default=WEIGHTS[0],
    choices=WEIGHTS,
    help="dtype of weights and of their gradients; tokens have bfloat16",
  )
  parser.add_argument("--all", action="store_true", help="all cells, not a pairwise choice")
  parser.add_argument("--minutes", type=nonnegative, default=9.0, help="begin no group after these")
  parser.add_argument("--ranks", type=positive, help="default: all devices")
  parser.add_argument("--scale", type=positive, default=1, help="divide widths, to try it on a CPU")
  parser.add_argument("--implementation", default="auto", choices=get_args(Implementation))
  parser.add_argument("--repeats", type=positive, default=5)
  parser.add_argument("--json", type=pathlib.Path, help="write the results to this file too")
  parser.add_argument("--plot", type=pathlib.Path, help="draw the heat maps")
  processes.add_argument(parser)


def _shape(text: str) -> str:
  try:
    shape_of(text)
  except ValueError as error:
    raise argparse.ArgumentTypeError(str(error)) from None
  return text


def _ratio(text: str) -> str:
  if text != HIGHEST:
    factor(text)
  return text


def run(args: argparse.Namespace) -> int:
  uneven = any(ratio == HIGHEST or float(ratio) > 1 for ratio in args.ratios)
  found = devices(args.ranks, least=2 if uneven else 1, full_size=args.scale == 1)
  mesh = mesh_of(found)
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
      print(f"{group}: {described(error)}", flush=True)
    if args.json and jax.process_index() == 0:
      results = {"jax": jax.__version__, "device": f"{mesh.size} x {found[0].device_kind}"}
      write_text(args.json, json.dumps(results | {"rows": rows}, indent=1))
  print("\n".join(report.summarise(rows)), flush=True)
  if args.plot and jax.process_index() == 0 and rows:
    report.draw(rows).savefig(args.plot, dpi=130)
  return 0 if rows else 1


def measure_group(
  mesh: jax.sharding.Mesh, group: Group, cells: Sequence[Cell], args: argparse.Namespace
) -> list[dict[str, Any]]:
  """Compiles the contenders once and times each cell's loads."""
  shape = shape_of(group.shape).narrowed(args.scale)
  if shape.experts % mesh.size:
    raise ValueError(f"expected experts in multiples of {mesh.size} ranks, got {shape.experts}")
  sizes = argparse.Namespace(experts=shape.experts, tokens=group.tokens)
  arrays = Arrays.make(mesh, shape, sizes, args.weights)
  calls = [(arrays.x, _index(mesh, cell, shape), arrays.gate, arrays.weights) for cell in cells]
  programs = compile_group(mesh, group, args.implementation, calls[0])
  rows = []
  for cell, arguments in zip(cells, calls, strict=True):
    runs = {n: functools.partial(c, *arguments) for n, c in programs.variants.items()}
    seconds = timing.in_turn(runs, args.repeats, programs.calls)
    stats = [jax.device_get(programs.scalars(*of_step(arguments, n))) for n in range(STEPS)]
    times = {name: timing.median(values) for name, values in seconds.items()}
    index = np.asarray(arguments[1])
    rows.append(_row(mesh.size, cell, shape, args.weights, times, index, stats))
  print(report.cells_table(rows), flush=True)
  return rows


def _index(mesh: jax.sharding.Mesh, cell: Cell, shape: Shape) -> Array:
  steps = [
    choices(seed, cell.loads, cell.ratio, shape.experts, mesh.size, cell.group.tokens, shape.top_k)
    for seed in range(STEPS)
  ]
  return processes.put(np.stack(steps), NamedSharding(mesh, P(None, AXIS)))


def _row(
  ranks: int,
  cell: Cell,
  shape: Shape,
  weights: str,
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
  weight_bytes = np.dtype(weights).itemsize
  lowest = floor(shape, ranks, group.tokens, group.direction, rates_here(), weight_bytes)
  return {
    "shape": group.shape,
    "tokens": group.tokens,
    "direction": group.direction,
    "weights": weights,
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
