"""Checks and times the grouped matmuls on one GPU.

Run ``python -m ultraep_jax.bench.grouped_matmul check``, ``time`` or ``sweep``; ``--help`` lists
the options. Times are of whole calls, tables included, each waiting for the one before.
"""

import argparse
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import grouped_matmul as module
from pallas_kernels.grouped_matmul import grouped_matmul, grouped_matmul_wgrad
from ultraep_jax import experts

Array = jax.Array

HOME, REPLICA = 16, 2
MODELS = {"deepseek-v3": (7168, 2048), "qwen3-235b": (4096, 1536), "glm-4.5-106b": (4096, 1408)}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("what", nargs="+", choices=["check", "time", "sweep"])
  parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
  parser.add_argument("--rows", nargs="+", type=int, default=[32768, 65536])
  parser.add_argument("--skew", type=float, default=1.0, help="of the group sizes, 0: equal")
  parser.add_argument("--peers", action="store_true", help="time what else could be used, too")
  args = parser.parse_args()
  actions = {
    "check": check,
    "time": lambda: times(args.models, args.rows, args.skew, args.peers),
    "sweep": lambda: sweep(args.models, args.rows[0], args.skew),
  }
  for what in args.what:
    actions[what]()


def check() -> None:
  """Compares with float32 on group sizes of many kinds; exits at the first that differs."""
  rng = np.random.default_rng(0)
  mixed = [1, 2, 3, 0, 63, 64, 65, 127, 128, 129, 7, 8, 9, 31, 33, 0, 500, 5]
  cases = [
    (2048, 256, 384, 2, False, [mixed, mixed[::-1], *_skewed(rng, 18, (77, 900, 2048))]),
    (1000, 192, 256, 0, True, [[0, 1000, 0, 0], [0, 0, 0, 0], [999, 0, 0, 1], [130, 70, 60, 200]]),
    (8192, 1024, 1408, 2, True, _skewed(rng, 18, (8192, 7000))),
    (8192, 2048, 1024, 2, False, _skewed(rng, 18, (8192, 7000))),
  ]
  for capacity, depth, cols, num_replica, transpose, list_of_sizes in cases:
    for sizes in map(np.array, list_of_sizes):
      error = _check_case(rng, capacity, depth, cols, num_replica, transpose, sizes)
      print(f"check C{capacity} K{depth} N{cols} {sizes.tolist()}: {error:.1e}", flush=True)
      if not error < 6e-3:
        raise SystemExit("wrong")


def _skewed(rng: np.random.Generator, slots: int, used: Iterable[int]) -> list[np.ndarray]:
  return [group_sizes(rng, slots, rows, skew) for rows in used for skew in (0.5, 3.0)]


_forward = jax.jit(grouped_matmul, static_argnames="transpose_rhs")
_wgrad = jax.jit(grouped_matmul_wgrad, static_argnums=3)


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
) -> float:
  used, num_slots = int(sizes.sum()), len(sizes)
  rows = normal(rng, capacity, depth).at[used:].set(jnp.nan)
  grad = normal(rng, capacity, cols).at[used:].set(jnp.nan)
  weights = normal(rng, num_slots, *((cols, depth) if transpose else (depth, cols)))
  num_home = num_slots - num_replica
  group_size = jnp.asarray(sizes, jnp.int32)
  slot = np.append(np.repeat(np.arange(num_slots), sizes), np.full(capacity - used, -1))
  one_hot = jnp.asarray(slot[:, None] == np.arange(num_slots), jnp.float32)
  expected, expected_grad = _expected(rows, grad, weights, one_hot, transpose)
  out = _forward(rows, weights[:num_home], weights[num_home:], group_size, transpose_rhs=transpose)
  errors = [distance(out[:used], expected[:used])]
  if depth % 128 == 0:
    got = jnp.concatenate(_wgrad(rows, grad, group_size, num_home))
    errors.append(distance(got, expected_grad))
  return max(errors)


def times(models: Iterable[str], rows: Iterable[int], skew: float, peers: bool) -> None:
  names = ("kernel", "dense", "ratio", *(("ragged", "portable") if peers else ()))
  print(f"{'model':13} {'rows':>6} {'TFLOP/s of':12}", *(f"{name:>9}" for name in names))
  for model, capacity in itertools.product(models, rows):
    for name, operands, sizes in problems(model, capacity, skew):
      kernel, dense, *others = functions(name)
      rate, peak = (flops(model, sizes) / timed(f, operands, sizes) / 1e12 for f in (kernel, dense))
      peak *= capacity / float(jnp.sum(sizes))
      rates = [flops(model, sizes) / timed(f, operands, sizes, 2) / 1e12 for f in others if peers]
      print(
        f"{model:13} {capacity:6} {name:12} {rate:9.0f} {peak:9.0f} {rate / peak:9.3f}",
        *(f"{rate:9.0f}" for rate in rates),
        flush=True,
      )


def sweep(models: Iterable[str], capacity: int, skew: float) -> None:
  for model, (stages, buffers, band) in itertools.product(
    models, ((4, 2, 2048), (4, 1, 2048), (3, 4, 2048), (4, 2, 1024), (4, 2, 4096))
  ):
    with mock.patch.multiple(module, _STAGES=stages, _BUFFERS=buffers, _BAND=band):
      rates = [
        f"{name} {flops(model, sizes) / timed(functions(name)[0], operands, sizes) / 1e12:.0f}"
        for name, operands, sizes in problems(model, capacity, skew)
      ]
    print(
      f"{model:13} stages {stages} buffers {buffers} band {band}:", ", ".join(rates), flush=True
    )


def flops(model: str, sizes: Array) -> float:
  wide, inner = MODELS[model]
  return 2.0 * float(jnp.sum(sizes)) * wide * inner


def problems(
  model: str, capacity: int, skew: float
) -> Iterable[tuple[str, tuple[Array, ...], Array]]:
  """The matmuls of an expert: into and out of its inner width, and their gradients."""
  rng = np.random.default_rng(0)
  wide, inner = MODELS[model]
  sizes = jnp.asarray(group_sizes(rng, HOME + REPLICA, capacity - 999, skew), jnp.int32)
  key = jax.random.key(0)

  def random(*shape: int) -> Array:
    return jax.random.normal(key, shape, jnp.bfloat16)

  rows, hidden = random(capacity, wide), random(capacity, inner)
  up = random(HOME, wide, inner), random(REPLICA, wide, inner)
  yield "forward up", (rows, *up), sizes
  yield "dgrad up", (hidden, *up), sizes
  yield "wgrad", (rows, hidden), sizes
  down = random(HOME, inner, wide), random(REPLICA, inner, wide)
  yield "forward down", (hidden, *down), sizes
  yield "dgrad down", (rows, *down), sizes


def functions(name: str) -> list[Callable[..., Any]]:
  """The kernel, one dense matmul, ``lax.ragged_dot`` and the portable loop."""
  if name == "wgrad":
    numbers = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    return [
      lambda rows, grad, sizes: grouped_matmul_wgrad(rows, grad, sizes, HOME),
      lambda rows, grad, sizes: jnp.einsum(
        "ck,cn->kn", rows, grad, preferred_element_type=jnp.float32
      ),
      lambda rows, grad, sizes: lax.ragged_dot_general(
        rows, grad, sizes, numbers, preferred_element_type=jnp.float32
      ),
      lambda rows, grad, sizes: experts.grouped_matmul_wgrad(rows, grad, sizes, HOME),
    ]
  transpose = name.startswith("dgrad")

  def joined(rows: Array, home: Array, replica: Array, sizes: Array) -> Array:
    weights = jnp.concatenate([home, replica])
    return lax.ragged_dot(rows, weights.mT if transpose else weights, sizes)

  return [
    functools.partial(grouped_matmul, transpose_rhs=transpose),
    lambda rows, home, replica, sizes: rows @ (home[0].T if transpose else home[0]),
    joined,
    functools.partial(experts.grouped_matmul, transpose_rhs=transpose),
  ]


def timed(
  f: Callable[..., Any], operands: tuple[Array, ...], sizes: Array, count: int = 10
) -> float:
  """Seconds a call, of ``count`` calls in one program that wait for each other."""

  @jax.jit
  def run(operands: tuple[Array, ...], sizes: Array) -> Array:
    def step(_: Any, sizes: Array) -> Array:
      # The next sizes depend on this result, which must be computed as a whole.
      result = lax.optimization_barrier(jax.tree.leaves(f(*operands, sizes))[0])
      return sizes + (result.ravel()[0] > 1e30).astype(jnp.int32)

    return lax.fori_loop(0, count, step, sizes)

  jax.block_until_ready(run(operands, sizes))
  seconds = []
  for _ in range(3):
    start = time.perf_counter()
    jax.block_until_ready(run(operands, sizes))
    seconds.append((time.perf_counter() - start) / count)
  return statistics.median(seconds)


def group_sizes(rng: np.random.Generator, slots: int, used: int, skew: float) -> np.ndarray:
  """Random sizes with the given sum; the larger the skew, the less equal."""
  weight = np.exp(skew * rng.normal(size=slots))
  return rng.multinomial(used, weight / weight.sum())


def normal(rng: np.random.Generator, *shape: int) -> Array:
  return jnp.asarray(rng.normal(size=shape), jnp.bfloat16)


def distance(x: Array, expected: Array) -> float:
  """Relative, NaN counted as infinite; zero if there is nothing to compare."""
  norm = float(jnp.linalg.norm(expected))
  gap = float(jnp.linalg.norm(x.astype(jnp.float32) - expected))
  return gap if norm == 0 else float(np.nan_to_num(gap / norm, nan=np.inf))


if __name__ == "__main__":
  main()
