"""Times the grouped matmuls beside PyTorch's: ``python tests/beside_pytorch.py``.

Needs one Hopper GPU and PyTorch >= 2.8, whose ``_grouped_mm`` is called. Both have groups of the
same sizes and run in turn, in one process. Weight gradients are bfloat16, ours of copies float32.
"""

import argparse
import functools
import importlib
from collections.abc import Callable
from concurrent import futures
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ultraep_jax.bench import timing
from ultraep_jax.bench.kernels.matmul_problems import REPLICA, Problem
from ultraep_jax.implementation import resolve_tunings
from ultraep_jax.tables import table

SHAPES = (
  "2880x2880x64x32768",
  "2048x768x64x65536",
  "2048x512x256x81920",
  "7168x2048x16x65536",
  "4096x1536x16x65536",
  "3072x1536x128x65536",
  "2048x1024x32x65536",
)
NAMES = ("forward up", "forward down", "dgrad up", "dgrad down", "wgrad up", "wgrad down")


def main() -> None:
  """Prints a row for each matmul of each shape."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--shapes", nargs="+", default=SHAPES, help="D x F x slots x rows")
  parser.add_argument("--rounds", type=int, default=7, help="turns of each")
  parser.add_argument("--calls", type=int, default=8, help="in each turn")
  args = parser.parse_args()
  problems = [problem_of(name, shape) for shape in args.shapes for name in NAMES]
  with futures.ThreadPoolExecutor(16) as workers:
    programs = list(workers.map(compiled, problems))
  rows = []
  for problem, program in zip(problems, programs, strict=True):
    runs = {
      "ours": repeated(ours(problem, program), args.calls, pytorch().cuda.synchronize),
      "PyTorch's": repeated(theirs(problem), args.calls, pytorch().cuda.synchronize),
    }
    mine, other = map(timing.median, timing.in_turn(runs, args.rounds, args.calls).values())
    rates = (problem.flop / seconds / 1e12 for seconds in (mine, other))
    shape = f"D{problem.wide} F{problem.inner} P{len(problem.sizes)} C{problem.rows}"
    rows.append([shape, problem.name, mine * 1e6, other * 1e6, *rates, other / mine])
  header = ["", "matmul", "us", "PyTorch, us", "TFLOP/s", "PyTorch, TFLOP/s", "times as fast"]
  print(table(header, rows, digits=2))


def problem_of(name: str, shape: str, kind: type[Problem] = Problem) -> Problem:
  """Of a class like this one, perhaps that of another commit."""
  wide, inner, slots, rows = map(int, shape.split("x"))
  return kind.of(name, f"{wide}x{inner}", rows, home=slots - REPLICA, replica=REPLICA)


def compiled(problem: Problem) -> Callable[..., Any]:
  """As the layer runs it."""
  parts = problem.parts()
  tunings = resolve_tunings(None, ("mosaic_gpu",))
  shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in parts.shapes]
  sizes = jax.ShapeDtypeStruct(problem.sizes.shape, jnp.int32)
  kernel = functools.partial(parts.kernel, tuning=problem.tuned(tunings))
  return jax.jit(kernel).lower(*shapes, sizes).compile()


def ours(problem: Problem, program: Callable[..., Any]) -> Callable[[], Any]:
  operands = operands_of(problem)
  return functools.partial(program, *operands, jnp.asarray(problem.sizes, jnp.int32))


def operands_of(problem: Problem) -> list[jax.Array]:
  """All but the group sizes."""
  shapes = problem.parts().shapes
  keys = jax.random.split(jax.random.key(0), len(shapes))
  normal = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
  return [normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


def pytorch() -> Any:
  """Where there is none, tests that collect this file do without."""
  return importlib.import_module("torch")


def theirs(problem: Problem) -> Callable[[], Any]:
  torch = pytorch()
  ends = torch.tensor(np.cumsum(problem.sizes), dtype=torch.int32, device="cuda")
  normal = functools.partial(torch.randn, dtype=torch.bfloat16, device="cuda")
  slots, (contracted, cols) = len(problem.sizes), problem.widths
  if problem.operation == "wgrad":
    used = int(ends[-1])
    rows, grads = (normal(problem.rows, width)[:used] for width in problem.widths)
    return lambda: torch._grouped_mm(rows.T, grads, offs=ends)
  rows = normal(problem.rows, contracted)
  if problem.operation == "dgrad":
    weights = normal(slots, contracted, cols)
  else:
    weights = normal(slots, cols, contracted).transpose(1, 2)
  return lambda: torch._grouped_mm(rows, weights, offs=ends)


def repeated(
  call: Callable[[], Any], calls: int, wait: Callable[[], None] = lambda: None
) -> Callable[[], None]:
  """Waits for the GPU once, after the last call; ``wait`` for what is not JAX's."""

  def run() -> None:
    result: Any = None
    for _ in range(calls):
      result = call()
    jax.block_until_ready(result)
    wait()

  return run


if __name__ == "__main__":
  main()
