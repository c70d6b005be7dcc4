"""Checks and times the grouped matmuls on one GPU.

Run ``ultraep bench grouped_matmul check`` or ``time``; ``--help`` lists the options.
Times are of whole calls, tables included, one right after the other; ratios are to one dense
matmul of as many operations, timed in turns with the kernels. ``bench tune`` compares tunings.
"""

import argparse
import functools
import itertools
import statistics
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import grouped_matmul, grouped_matmul_sum, grouped_matmul_wgrad
from ultraep_jax.bench import contest
from ultraep_jax.bench.kernels.by_copies import gated_by_copies, matmul_by_copies
from ultraep_jax.bench.kernels.matmul_problems import (
  DENSE,
  PROBLEMS,
  Problem,
  group_sizes,
  swiglu_matmul,
)
from ultraep_jax.bench.layer.problem import LARGE, SHAPES
from ultraep_jax.bench.machine import devices_for_kernels
from ultraep_jax.implementation import resolve_tunings
from ultraep_jax.tables import table
from ultraep_jax.tools.arguments import nonnegative, positive
from ultraep_jax.tools.errors import CommandError
from ultraep_jax.types import Array


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("what", nargs="+", choices=["check", "time"])
  parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(LARGE))
  parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=list(PROBLEMS))
  parser.add_argument("--rows", nargs="+", type=positive, default=[32768, 65536])
  parser.add_argument("--skew", type=nonnegative, default=1.0, help="of the group sizes, 0: equal")
  parser.add_argument(
    "--scale", type=positive, default=1, help="divide all sizes, to try it on a CPU"
  )
  parser.add_argument("--peers", action="store_true", help="time what else could be used, too")
  parser.add_argument("--compile-workers", type=positive, default=16, help="threads")
  args = parser.parse_args()
  devices_for_kernels()
  if "check" in args.what:
    check()
  if "time" in args.what:
    problems = [
      Problem.of(name, model, rows, args.scale, args.skew)
      for name, rows, model in itertools.product(args.problems, args.rows, args.shapes)
    ]
    time_problems(problems, args.peers, contest.Pace(workers=args.compile_workers))


# --- right ------------------------------------------------------------------------------------


def check() -> None:
  """Compares with float32 on group sizes of many kinds; exits at the first that differs."""
  rng = np.random.default_rng(0)
  mixed = [1, 2, 3, 0, 63, 64, 65, 127, 128, 129, 7, 8, 9, 31, 33, 0, 500, 5]
  cases = [
    (2048, 256, 384, 2, False, [mixed, mixed[::-1], *_skewed(rng, 18, (77, 900, 2048))]),
    (1000, 192, 256, 0, True, [[0, 1000, 0, 0], [0, 0, 0, 0], [999, 0, 0, 1], [130, 70, 60, 200]]),
    (8192, 1024, 1408, 2, True, _skewed(rng, 18, (8192, 7000))),
    (8192, 2880, 2880, 2, True, _skewed(rng, 18, (8192, 7000))),
    (8200, 2880, 448, 2, False, _skewed(rng, 18, (8200, 7000))),
    (2048, 64, 320, 2, False, [mixed]),
    (1, 64, 64, 1, False, [[1, 0, 0, 0], [0, 0, 0, 1]]),
    (7, 192, 448, 0, False, [[3, 0, 4, 0], [0, 5, 0, 0]]),
    (63, 448, 192, 1, True, [[20, 0, 1, 42], [0, 0, 63, 0]]),
    (255, 2880, 1856, 1, False, [[1, 155, 0, 99], [255, 0, 0, 0]]),
    (8192, 2048, 1024, 2, False, _skewed(rng, 18, (8192, 7000))),
  ]
  for capacity, depth, cols, num_replica, transpose, list_of_sizes in cases:
    for sizes in map(np.array, list_of_sizes):
      errors = _check_case(rng, capacity, depth, cols, num_replica, transpose, sizes)
      text = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
      print(f"check C{capacity} K{depth} N{cols} {sizes.tolist()}: {text}", flush=True)
      if not max(errors.values()) < 6e-3:
        raise CommandError("wrong results")


def _skewed(rng: np.random.Generator, slots: int, used: Iterable[int]) -> list[np.ndarray]:
  return [group_sizes(rng, slots, rows, skew) for rows in used for skew in (0.5, 3.0)]


_forward = jax.jit(grouped_matmul, static_argnames="transpose_rhs")
_sum = jax.jit(grouped_matmul_sum, static_argnames="transpose_rhs")
_gated = jax.jit(functools.partial(swiglu_matmul, keep_hidden=True))
_gated_by_copies = jax.jit(functools.partial(gated_by_copies, keep_hidden=True))
_by_copies = jax.jit(matmul_by_copies)
_wgrad = jax.jit(grouped_matmul_wgrad, static_argnums=3, static_argnames="dtype")
_distance = jax.jit(contest.distance)


@functools.partial(jax.jit, static_argnames="transpose")
def _expected(
  rows: Array, grad: Array, weights: Array, one_hot: Array, transpose: bool
) -> tuple[Array, Array]:
  rows, grad, weights = (x.astype(jnp.float32) for x in (rows, grad, weights))
  used = jnp.any(one_hot > 0, axis=1)[:, None]
  rows, grad = jnp.where(used, rows, 0), jnp.where(used, grad, 0)
  weights = weights.mT if transpose else weights
  dot = functools.partial(jnp.dot, precision="highest")
  out = jnp.zeros((rows.shape[0], weights.shape[2]))
  for mine, weight in zip(one_hot.T, weights, strict=True):
    out += dot(rows * mine[:, None], weight)
  return out, lax.map(lambda mine: dot((rows * mine[:, None]).T, grad), one_hot.T)


def _check_case(
  rng: np.random.Generator,
  capacity: int,
  depth: int,
  cols: int,
  num_replica: int,
  transpose: bool,
  sizes: np.ndarray,
) -> dict[str, float]:
  used, num_slots = int(sizes.sum()), len(sizes)
  rows = normal(rng, capacity, depth).at[used:].set(jnp.nan)
  grad = normal(rng, capacity, cols).at[used:].set(jnp.nan)
  weights = normal(rng, num_slots, *((cols, depth) if transpose else (depth, cols)))
  num_home = num_slots - num_replica
  group_size = jnp.asarray(sizes, jnp.int32)
  slot = np.append(np.repeat(np.arange(num_slots), sizes), np.full(capacity - used, -1))
  one_hot = jnp.asarray(slot[:, None] == np.arange(num_slots), jnp.float32)
  expected, expected_grad = _expected(rows, grad, weights, one_hot, transpose)
  home, replica = weights[:num_home], weights[num_home:]
  out = _forward(rows, home, replica, group_size, transpose_rhs=transpose)
  errors: dict[str, Array | float] = {"product": _distance(out[:used], expected[:used])}
  twice = _sum([rows] * 2, [home] * 2, [replica] * 2, group_size, transpose_rhs=transpose)
  errors["sum"] = _distance(twice[:used], 2 * expected[:used])
  if not transpose:
    operands = rows, home, home, replica, replica, group_size
    inner, gate, up = (x[:used] for x in jax.tree.leaves(_gated(*operands)))
    if num_replica:  # the same bits
      results = [_by_copies(rows, home, replica, group_size), _gated_by_copies(*operands)]
      same = zip(jax.tree.leaves(results), (out[:used], inner, gate, up), strict=True)
      errors["by copies"] = float(any(jnp.any(x[:used] != y) for x, y in same))
    errors["gated"] = max(float(_distance(x, expected[:used])) for x in (gate, up))
    gate = gate.astype(jnp.float32)
    errors["inner"] = _distance(inner, jax.nn.silu(gate) * gate)
  got = jnp.concatenate(_wgrad(rows, grad, group_size, num_home))
  errors["wgrad"] = _distance(got, expected_grad)
  rounded = jnp.concatenate(_wgrad(rows, grad, group_size, num_home, dtype=jnp.bfloat16))
  errors["rounded wgrad"] = float(jnp.any(rounded != got.astype(jnp.bfloat16)))
  into = jnp.asarray(rng.normal(size=(num_home, depth, cols)), jnp.float32)
  added = _wgrad(rows, grad, group_size, num_home, into_MKN=into)[0] - into
  errors["added wgrad"] = _distance(added, expected_grad[:num_home])
  into, dtype = into.astype(jnp.bfloat16), jnp.bfloat16
  added = _wgrad(rows, grad, group_size, num_home, into_MKN=into, dtype=dtype)[0]
  want = into.astype(jnp.float32) + rounded[:num_home].astype(jnp.float32)
  errors["rounded added wgrad"] = float(jnp.any(added != want.astype(dtype)))
  return {name: float(error) for name, error in errors.items()}


# --- fast -------------------------------------------------------------------------------------


def time_problems(problems: list[Problem], peers: bool, pace: contest.Pace) -> None:
  """Times the kernels as the layer runs them, and peers, whose results are compared."""
  tunings = resolve_tunings(None, ("mosaic_gpu",))
  contests = []
  for problem in problems:
    parts = problem.parts()
    kernels = {"kernel": functools.partial(parts.kernel, tuning=problem.tuned(tunings))}
    contests.append(problem.contest({**kernels, **(parts.peers if peers else {})}))
  for problem, (_, outcome) in zip(problems, contest.hold(contests, pace), strict=True):
    report(problem, outcome)


def report(problem: Problem, outcome: contest.Outcome) -> None:
  """A row for each program but the dense one."""
  medians = {name: statistics.median(times) for name, times in outcome.seconds.items()}
  dense = statistics.median(outcome.others.get(DENSE, [float("nan")]))
  rows = []
  for name, seconds in medians.items():
    ratio, rate = problem.ratio(seconds, dense), problem.flop / seconds / 1e12
    row = [f"{seconds * 1e6:.0f}", f"{rate:.0f}", f"{rate / ratio:.0f}", f"{ratio:.3f}"]
    rows.append([problem.title, name, *row])
  for name, reason in outcome.failures.items():
    rows.append([problem.title, name, None, None, None, reason])
  print(table(["", "program", "µs", "TFLOP/s", "of dense", "ratio"], rows), flush=True)


def normal(rng: np.random.Generator, *shape: int) -> Array:
  return jnp.asarray(rng.normal(size=shape), jnp.bfloat16)


if __name__ == "__main__":
  main()
