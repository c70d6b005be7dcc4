"""Measures one MoE layer: balanced, not balanced, forced equal, and as JAX users write it today.

Run on every GPU of a host: ``ultraep bench layer``. All variants run in one
program and in turn, on the same loads, which change with every call. Nobody drops a token: where
nothing bounds the busiest rank's load, buffers are made to measure. ``--processes`` gives each GPU
a process of its own; times are then those of the first.

``eplb`` places copies in the slots by a window of earlier loads (``--loads drifting`` gives it a
chance) and sends them again in every call; EPLB as published also moves homes. ``quota-time``
weighs copies against what they save.

``--bounds`` and ``--memory`` print tables that need no clock.
"""

import argparse
import dataclasses
import importlib.util
import itertools
import json
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any, get_args

import jax

from ultraep_jax.bench.layer import plot as layer_plot
from ultraep_jax.bench.layer import tables as layer_tables
from ultraep_jax.bench.layer.problem import (
  AXIS,
  LARGE,
  LOADS,
  SHAPES,
  Arrays,
  Problem,
  mesh_of,
  scaled,
)
from ultraep_jax.bench.layer.times import Case, Programs, check, checked, measure
from ultraep_jax.bench.layer.variants import ELSEWHERE, VARIANTS
from ultraep_jax.bench.machine import devices
from ultraep_jax.config import Implementation
from ultraep_jax.files import check_output, write_text
from ultraep_jax.tools import processes
from ultraep_jax.tools.arguments import factor, positive, slot_count
from ultraep_jax.tools.errors import CommandError

PASSES = ("forward", "train")


def main(argv: Sequence[str] | None = None) -> int:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  add_arguments(parser)
  args = parser.parse_args(argv)
  if args.variants is None:
    args.variants = [name for name in VARIANTS if args.data == 1 or name != "eplb"]
  check_output(args.json)
  check_output(args.plot)
  if args.plot and not {"ideal"} < set(args.variants):
    parser.error("--plot: expected ideal and others among --variants, got " + str(args.variants))
  if args.check and not checked(args.variants):
    parser.error("--check: expected a balanced one among --variants, got " + str(args.variants))
  if args.data > 1 and "eplb" in args.variants:
    parser.error("--data: expected no eplb among --variants: its history covers one mesh only")
  if args.plot and importlib.util.find_spec("matplotlib") is None:
    parser.error("--plot: expected Matplotlib, got none: in the clone, pip install -e '.[paper]'")
  return processes.run(run, args)


def add_arguments(parser: argparse.ArgumentParser) -> None:
  parser.add_argument("--shapes", nargs="+", default=list(LARGE), choices=list(SHAPES))
  parser.add_argument("--ratios", nargs="+", type=factor, default=[1.0, 1.3, 2.0, 3.0])
  parser.add_argument("--loads", default="zipf", choices=LOADS)
  parser.add_argument("--passes", nargs="+", default=list(PASSES), choices=PASSES)
  parser.add_argument(
    "--variants",
    nargs="+",
    choices=[*VARIANTS, *ELSEWHERE],
    help=f"default: {' '.join(VARIANTS)}; with --data no eplb",
  )
  processes.add_argument(parser)
  parser.add_argument("--ranks", type=positive, help="default: all devices")
  parser.add_argument(
    "--data",
    type=positive,
    default=1,
    metavar="N",
    help="meshes of experts beside one another, each with its own tokens and loads (1)",
  )
  parser.add_argument("--experts", type=positive, help="default: 16 a rank of their mesh")
  parser.add_argument("--tokens", type=positive, default=8192, help="per rank")
  parser.add_argument("--top-k", type=positive)
  parser.add_argument("--slots", type=slot_count, default="auto", help="replica slots a rank")
  parser.add_argument("--objective", default="balance", choices=["balance", "time"])
  parser.add_argument("--implementation", default="auto", choices=get_args(Implementation))
  parser.add_argument("--dispatch-dtype", choices=["float8_e4m3fn"], help="that tokens cross in")
  parser.add_argument(
    "--steps", type=positive, default=4, help="load matrices that calls cycle through"
  )
  parser.add_argument(
    "--window", type=positive, default=20, help="steps before, which eplb has seen"
  )
  parser.add_argument("--calls", type=positive, default=8, help="calls chained inside one jit")
  parser.add_argument("--repeats", type=positive, default=5)
  parser.add_argument("--scale", type=positive, default=1, help="divide widths, to try it on a CPU")
  parser.add_argument(
    "--profile", action="store_true", help="times by kind of kernel, from a trace"
  )
  parser.add_argument(
    "--check", action="store_true", help="compare balanced variants with the portable layer first"
  )
  parser.add_argument("--json", type=pathlib.Path, help="write the results to this file too")
  parser.add_argument("--plot", type=pathlib.Path, help="draw times over those of ideal")
  parser.add_argument(
    "--bounds",
    action="store_true",
    help="instead of times, what 2, 4, 8 and M slots reach on flat loads, and could at best",
  )
  parser.add_argument(
    "--memory",
    nargs="?",
    type=factor,
    const=3.0,
    metavar="RATIO",
    help="instead of times, what none, quota and ideal take at this ratio (3)",
  )
  parser.add_argument("--no-statistics", dest="statistics", action="store_false")
  parser.add_argument("--compile-workers", type=positive, default=8, help="programs at a time")


def run(args: argparse.Namespace) -> int:
  found = devices(
    args.ranks,
    least=2 if max(args.ratios) > 1 else 1,
    full_size=args.scale == 1 and not args.bounds,
  )
  if len(found) % args.data:
    raise CommandError(f"--data: expected a divisor of {len(found)} devices, got {args.data}")
  if len(found) == args.data and max(args.ratios) > 1:
    raise CommandError(
      f"--data: expected at least two devices a mesh for ratios above 1, got {len(found)} in all"
    )
  mesh = mesh_of(found, args.data)
  print(f"jax {jax.__version__}, {mesh.size} x {found[0].device_kind}", flush=True)
  results: dict[str, Any] = {
    "jax": jax.__version__,
    "device": f"{mesh.size} x {found[0].device_kind}",
    "arguments": {k: v for k, v in vars(args).items() if not isinstance(v, pathlib.Path)},
  }

  def save() -> None:
    if args.json and jax.process_index() == 0:
      write_text(args.json, json.dumps(results, indent=1))

  if args.bounds:
    top_k = {scaled(name, args).top_k for name in args.shapes}
    results["bounds"] = [
      row for k in sorted(top_k) for row in layer_tables.bounds(args, mesh.shape[AXIS], k)
    ]
    save()
  if args.memory is not None:
    problems = make_problems(mesh, [args.memory], args)
    named = [(name, problem) for (name, _), problem in problems.items()]
    results["memory"] = layer_tables.memory(mesh, named, args)
    save()
  if args.bounds or args.memory is not None:
    return 0

  problems = make_problems(mesh, args.ratios, args)
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
  results["rows"] = []
  for case in cases:
    results["rows"] += measure(case, problems[case.name, case.ratio], programs, args)
    save()
  if args.plot and jax.process_index() == 0:
    layer_plot.draw(results["rows"]).savefig(args.plot, dpi=130)
  return 0


def make_problems(
  mesh: jax.sharding.Mesh, ratios: Iterable[float], args: argparse.Namespace
) -> dict[tuple[str, float], Problem]:
  """A problem for each shape and ratio."""
  problems, made = {}, {}
  for name in args.shapes:
    arrays = Arrays.make(mesh, scaled(name, args), args)
    for ratio in ratios:
      sizes = ratio, arrays.gate.shape, arrays.weights.wo.shape[0]
      if sizes not in made:  # loads take longer to make than to measure
        made[sizes] = Problem.make(mesh, arrays, ratio, args)
      problems[name, ratio] = dataclasses.replace(made[sizes], arrays=arrays)
  return problems


if __name__ == "__main__":
  raise SystemExit(main())
