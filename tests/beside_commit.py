"""Times the grouped matmuls of this checkout beside those of another one, and compares their bits.

Both run in turn, in one process, on the same operands. Needs one Hopper GPU::

    git worktree add ../before COMMIT
    python tests/beside_commit.py ../before --problems "wgrad up" --groups equal independent wide

A profiler that counts what each kernel does wants each called once, and told in which order::

    ncu --clock-control none -k regex:mosaic --metrics gpu__time_duration.sum,dram__bytes_read.sum \
      python tests/beside_commit.py ../before --once --groups lognormal
"""

import argparse
import functools
import importlib
import itertools
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from beside_pytorch import NAMES, SHAPES, operands_of, problem_of, repeated

from pallas_kernels import Tunings
from ultraep_jax.bench import timing
from ultraep_jax.bench.kernels import matmul_problems
from ultraep_jax.bench.kernels.matmul_problems import PROBLEMS, group_sizes, used_part
from ultraep_jax.implementation import resolve_tunings
from ultraep_jax.tables import table

PACKAGES = ("pallas_kernels", "ultraep_jax")
# How sizes differ: rows that choose by themselves, and lognormal ones of these widths.
SKEWS = {"independent": 0.0, "lognormal": 0.7, "wide": 1.5}
GROUPS = ("equal", *SKEWS, "zipf")


class Checkout(NamedTuple):
  """What is imported of it.

  Attributes:
    problems: the module of that name.
    tunings: of the GPU at hand.
  """

  problems: ModuleType
  tunings: Tunings


def main(arguments: list[str] | None = None) -> None:
  """Prints a row for each matmul of each shape and kind of groups."""
  parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
  parser.add_argument("other", type=pathlib.Path, help="a folder with both packages")
  parser.add_argument("--shapes", nargs="+", default=SHAPES, help="D x F x slots x rows")
  alone = [name for name in PROBLEMS if "beside" not in name]
  parser.add_argument("--problems", nargs="+", default=NAMES, choices=alone)
  parser.add_argument("--groups", nargs="+", default=["wide"], choices=GROUPS)
  parser.add_argument("--rounds", type=int, default=7, help="turns of each")
  parser.add_argument("--calls", type=int, default=6, help="in each turn")
  parser.add_argument("--once", action="store_true", help="call each once, and time nothing")
  args = parser.parse_args(arguments)
  this = Checkout(matmul_problems, resolve_tunings(None, ("mosaic_gpu",)))
  checkouts = {"other": imported(args.other), "this": this}
  cases = list(itertools.product(args.shapes, args.problems))
  # XLA, which tries layouts while it compiles, crashes under ncu if several threads do.
  all_programs = compiled(checkouts, cases, workers=1 if args.once else 16)
  rows = []
  for (shape, name), programs in zip(cases, all_programs, strict=True):
    operands = operands_of(problem_of(name, shape))
    for groups in args.groups:
      inputs = *operands, jnp.asarray(sizes_of(shape, groups), jnp.int32)
      if args.once:
        for which, program in programs.items():
          jax.block_until_ready(program(*inputs))
          print(shape, name, groups, which, flush=True)
        continue
      seconds, same = measured(programs, inputs, args.rounds, args.calls)
      row = [shape, name, groups, *(x * 1e6 for x in seconds), seconds[1] / seconds[0]]
      rows.append([*row, "same" if same else "different"])
  if not args.once:
    print(table(["", "matmul", "groups", "other, us", "this, us", "of other's", "bits"], rows))


def imported(folder: pathlib.Path) -> Checkout:
  """From the packages in a folder. What is imported already stays as it is.

  Raises:
    SystemExit: they are not there.
  """
  before = _taken_out()
  sys.path.insert(0, str(folder.resolve()))
  try:
    problems = importlib.import_module("ultraep_jax.bench.kernels.matmul_problems")
    tunings = importlib.import_module("ultraep_jax.implementation").resolve_tunings
    if not pathlib.Path(problems.__file__ or "").is_relative_to(folder.resolve()):
      raise SystemExit(f"{folder}: expected the folders {' and '.join(PACKAGES)}")
    return Checkout(problems, tunings(None, ("mosaic_gpu",)))
  finally:
    sys.path.remove(str(folder.resolve()))
    _taken_out()
    sys.modules.update(before)


def _taken_out() -> dict[str, ModuleType]:
  ours = [name for name in sys.modules if name.split(".", maxsplit=1)[0] in PACKAGES]
  return {name: sys.modules.pop(name) for name in ours}


Programs = Mapping[str, Callable[..., Any]]  # one matmul's, of each checkout


def compiled(
  checkouts: Mapping[str, Checkout], cases: Sequence[tuple[str, str]], workers: int
) -> list[Programs]:
  """Of each shape and matmul, as layers run them. Kernels are lowered by one thread alone."""
  lowered = [
    {which: lowered_of(checkout, *case) for which, checkout in checkouts.items()} for case in cases
  ]
  with futures.ThreadPoolExecutor(workers) as pool:
    waiting = [
      {which: pool.submit(program.compile) for which, program in each.items()} for each in lowered
    ]
  return [{which: each.result() for which, each in programs.items()} for programs in waiting]


def lowered_of(checkout: Checkout, shape: str, name: str) -> jax.stages.Lowered:
  problem = problem_of(name, shape, checkout.problems.Problem)
  parts = problem.parts()
  operands = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in parts.shapes]
  sizes = jax.ShapeDtypeStruct(problem.sizes.shape, jnp.int32)
  kernel = functools.partial(parts.kernel, tuning=problem.tuned(checkout.tunings))
  return jax.jit(kernel).lower(*operands, sizes)


def sizes_of(shape: str, groups: str) -> np.ndarray:
  """Of all slots; where all are equal, a few rows may be left."""
  *_, slots, rows = map(int, shape.split("x"))
  rng = np.random.default_rng(0)
  if groups == "equal":
    return np.full(slots, rows // slots)
  if groups == "zipf":
    weight = rng.permutation(1 / np.arange(1, slots + 1) ** 1.2)
    return rng.multinomial(rows, weight / weight.sum())
  return group_sizes(rng, slots, rows, SKEWS[groups])


def measured(
  programs: Programs, arguments: Sequence[jax.Array], rounds: int, calls: int
) -> tuple[list[float], bool]:
  """Median seconds of a call for each checkout, and whether results are alike bit for bit."""

  def used(program: Callable[..., Any]) -> list[jax.Array]:
    return [used_part(x, arguments[-1]) for x in jax.tree.leaves(program(*arguments))]

  one, other = map(used, programs.values())
  same = all(bool((a == b).all()) for a, b in zip(one, other, strict=True))
  del one, other
  runs = {
    name: repeated(functools.partial(program, *arguments), calls)
    for name, program in programs.items()
  }
  seconds = timing.in_turn(runs, rounds, calls)
  return [timing.median(each) for each in seconds.values()], same


if __name__ == "__main__":
  main()
