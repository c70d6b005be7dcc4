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
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping
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
SKEWS = {"equal": None, "independent": 0.0, "lognormal": 0.7, "wide": 1.5}


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
  parser.add_argument("--groups", nargs="+", default=["wide"], choices=list(SKEWS))
  parser.add_argument("--rounds", type=int, default=7, help="turns of each")
  parser.add_argument("--calls", type=int, default=6, help="in each turn")
  parser.add_argument("--once", action="store_true", help="call each once, and time nothing")
  args = parser.parse_args(arguments)
  this = Checkout(matmul_problems, resolve_tunings(None, ("mosaic_gpu",)))
  checkouts = {"other": imported(args.other), "this": this}
  rows = []
  for shape in args.shapes:
    for name in args.problems:
      programs = compiled(checkouts, name, shape)
      for groups in args.groups:
        sizes = sizes_of(shape, groups)
        if args.once:
          for which in called_once(programs, sizes):
            print(shape, name, groups, which, flush=True)
          continue
        seconds, same = measured(programs, sizes, args.rounds, args.calls)
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


class Programs(NamedTuple):
  """A matmul's, of group sizes, by checkout."""

  by_checkout: Mapping[str, Callable[..., Any]]
  operands: list[jax.Array]


def compiled(checkouts: Mapping[str, Checkout], name: str, shape: str) -> Programs:
  """As layers run them."""
  operands = operands_of(problem_of(name, shape))
  lowered = []
  for problems, tunings in checkouts.values():
    problem = problem_of(name, shape, problems.Problem)
    kernel = functools.partial(problem.parts().kernel, tuning=problem.tuned(tunings))
    sizes = jax.ShapeDtypeStruct(problem.sizes.shape, jnp.int32)
    lowered.append(jax.jit(kernel).lower(*operands, sizes))
  with futures.ThreadPoolExecutor() as workers:
    programs = workers.map(lambda each: each.compile(), lowered)
    return Programs(dict(zip(checkouts, programs, strict=True)), operands)


def sizes_of(shape: str, groups: str) -> np.ndarray:
  """Of all slots; where all are equal, a few rows may be left."""
  *_, slots, rows = map(int, shape.split("x"))
  if (skew := SKEWS[groups]) is None:
    return np.full(slots, rows // slots)
  return group_sizes(np.random.default_rng(0), slots, rows, skew)


def called_once(programs: Programs, sizes: np.ndarray) -> Iterator[str]:
  """The names of the checkouts, each when its call has ended."""
  arguments = *programs.operands, jnp.asarray(sizes, jnp.int32)
  for name, program in programs.by_checkout.items():
    jax.block_until_ready(program(*arguments))
    yield name


def measured(
  programs: Programs, sizes: np.ndarray, rounds: int, calls: int
) -> tuple[list[float], bool]:
  """Median seconds of a call for each checkout, and whether results are alike bit for bit."""
  arguments = *programs.operands, jnp.asarray(sizes, jnp.int32)

  def used(program: Callable[..., Any]) -> list[jax.Array]:
    return [used_part(x, arguments[-1]) for x in jax.tree.leaves(program(*arguments))]

  one, other = map(used, programs.by_checkout.values())
  same = all(bool((a == b).all()) for a, b in zip(one, other, strict=True))
  del one, other
  runs = {
    name: repeated(functools.partial(program, *arguments), calls)
    for name, program in programs.by_checkout.items()
  }
  seconds = timing.in_turn(runs, rounds, calls)
  return [timing.median(each) for each in seconds.values()], same


if __name__ == "__main__":
  main()
