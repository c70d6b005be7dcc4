"""Checks and times the grouped matmuls on one GPU.

Run ``python -m ultraep_jax bench grouped_matmul check``, ``time`` or ``sweep``; ``--help`` lists
the options. Times are of whole calls, tables included, each waiting for the one before; ratios
are to one dense matmul of as many operations, timed in turns with the kernels.
"""

import argparse
import dataclasses
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import tiles
from pallas_kernels.gated_matmul import Gated, gated_beside, gated_matmul
from pallas_kernels.grouped_matmul import grouped_matmul, grouped_matmul_sum
from pallas_kernels.grouped_matmul_wgrad import grouped_matmul_wgrad
from pallas_kernels.matmul_pipeline import WARPGROUPS, Tuning
from ultraep_jax import experts

Array = jax.Array
Kernel = Callable[..., Any]

HOME, REPLICA = 16, 2
MODELS = {"deepseek-v3": (7168, 2048), "qwen3-235b": (4096, 1536), "glm-4.5-106b": (4096, 1408)}
PRODUCTS = ("forward up", "forward down", "dgrad up", "dgrad down")
PROBLEMS = (*PRODUCTS, "wgrad", "gated", "gated only", "gated split", "sum")

# What may hang, if anything does, is last.
VARIANTS = {
  "together": Tuning(),
  "deferred": Tuning("deferred"),
  "in turns": Tuning("in_turns", stages=6),
  "deferred bare": Tuning("deferred", auto_barriers=False),
  "in turns bare": Tuning("in_turns", stages=6, auto_barriers=False),
  "deferred 1024": Tuning("deferred", band=1024),
  "in turns 1024": Tuning("in_turns", stages=6, band=1024),
  "deferred pairs": Tuning("deferred", cluster=2),
  "in turns pairs": Tuning("in_turns", stages=6, cluster=2),
}
MORE_VARIANTS = {
  "in turns 5/4": Tuning("in_turns", stages=5, buffers=4),
  "deferred 4096": Tuning("deferred", band=4096),
  "in turns 4096": Tuning("in_turns", stages=6, band=4096),
  "deferred x3": Tuning("deferred", blocks=396),
  "in turns x3": Tuning("in_turns", stages=6, blocks=396),
}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("what", nargs="+", choices=["check", "time", "sweep"])
  parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
  parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=PROBLEMS)
  parser.add_argument("--variants", nargs="+", choices=VARIANTS | MORE_VARIANTS, default=VARIANTS)
  parser.add_argument("--rows", nargs="+", type=int, default=[32768, 65536])
  parser.add_argument("--skew", type=float, default=1.0, help="of the group sizes, 0: equal")
  parser.add_argument("--peers", action="store_true", help="time what else could be used, too")
  parser.add_argument("--seconds", type=float, default=1e9, help="after which no sweep begins")
  args = parser.parse_args()
  end = time.monotonic() + args.seconds
  for what in args.what:
    if what == "check":
      check()
      continue
    for name, capacity, model in itertools.product(args.problems, args.rows, args.models):
      if what == "sweep" and time.monotonic() > end:
        print(f"{model} {capacity} {name}: no time left", flush=True)
        continue
      problem = problem_of(name, model, capacity, args.skew)
      if what == "time":
        compare(problem, {"kernel": problem.kernel, **(problem.peers if args.peers else {})})
      else:
        compare(problem, {v: problem.tuned((VARIANTS | MORE_VARIANTS)[v]) for v in args.variants})


# --- right ------------------------------------------------------------------------------------


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
      errors = _check_case(rng, capacity, depth, cols, num_replica, transpose, sizes)
      report = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
      print(f"check C{capacity} K{depth} N{cols} {sizes.tolist()}: {report}", flush=True)
      if not max(errors.values()) < 6e-3:
        raise SystemExit("wrong")


def _skewed(rng: np.random.Generator, slots: int, used: Iterable[int]) -> list[np.ndarray]:
  return [group_sizes(rng, slots, rows, skew) for rows in used for skew in (0.5, 3.0)]


_forward = jax.jit(grouped_matmul, static_argnames="transpose_rhs")
_sum = jax.jit(grouped_matmul_sum, static_argnames="transpose_rhs")
_gated = jax.jit(functools.partial(gated_matmul, activation=jax.nn.silu, keep_hidden=True))
_wgrad = jax.jit(grouped_matmul_wgrad, static_argnums=3)


def gated_split(
  rows: Array, gate: Array, up: Array, *operands: Array, moving: bool = True, **kwargs: Any
) -> Gated:
  """``gated_matmul`` with home and replica slots apart, beside a transfer of nothing or none."""
  more_gate, more_up, sizes = operands
  nothing = tiles.Transfer(
    operands=(),
    out_type=(),
    scratch_types=(),
    buffers=[plgpu.SMEM((128,), jnp.int32)],
    body=lambda *_: None,
    finish=lambda _: None,
    tuning=tiles.Tuning(blocks=12, workers=WARPGROUPS),
    name="nothing",
  )
  gated, _ = gated_beside(
    nothing if moving else None,
    lambda _: (more_gate, more_up),
    *(rows, gate, up, sizes, jax.nn.silu),
    **kwargs,
  )
  return gated


_split = jax.jit(functools.partial(gated_split, keep_hidden=True))


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
  errors = {"product": distance(out[:used], expected[:used])}
  twice = _sum([rows] * 2, [home] * 2, [replica] * 2, group_size, transpose_rhs=transpose)
  errors["sum"] = distance(twice[:used], 2 * expected[:used])
  if not transpose:
    operands = rows, home, home, replica, replica, group_size
    inner, gate, up = (x[:used] for x in _gated(*operands))
    if num_replica:  # the same bits
      apart = _split(*operands)
      same = zip(apart, (inner, gate, up), strict=True)
      errors["split"] = float(any(jnp.any(x[:used] != y) for x, y in same))
    errors["gated"] = max(distance(x, expected[:used]) for x in (gate, up))
    gate = gate.astype(jnp.float32)
    errors["inner"] = distance(inner, jax.nn.silu(gate) * gate)
  if depth % 128 == 0:
    got = jnp.concatenate(_wgrad(rows, grad, group_size, num_home))
    errors["wgrad"] = distance(got, expected_grad)
  return errors


# --- fast -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Problem:
  """A matmul of an expert, or some of them.

  Attributes:
    title: model, rows and what it computes.
    operands: of all functions, before the group sizes.
    sizes: group sizes.
    flop: of the used rows.
    tuned: the kernel of a tuning.
    kernel: the kernel as it is.
    dense: as many operations on all rows in one dense matmul.
    dense_operands: of that.
    peers: other implementations.
  """

  title: str
  operands: tuple[Array, ...]
  sizes: Array
  flop: float
  tuned: Callable[[Tuning], Kernel]
  kernel: Kernel
  dense: Kernel
  dense_operands: tuple[Array, ...]
  peers: Mapping[str, Kernel]


def compare(problem: Problem, kernels: Mapping[str, Kernel], rounds: int = 3) -> None:
  """Times kernels in turns with the dense matmul, and their results against the first one's."""

  def prepare(kernel: Kernel, operands: tuple[Array, ...]) -> Callable[[], Array]:
    return functools.partial(chained(kernel, 10), operands, problem.sizes)

  runs = {"dense": prepare(problem.dense, problem.dense_operands)}
  jax.block_until_ready(runs["dense"]())
  notes, first = {}, None
  for name, kernel in kernels.items():
    try:
      run = prepare(kernel, problem.operands)
      result = used_part(run(), problem.sizes)
      first = result.astype(jnp.float32) if first is None else first
      error = distance(result, first)
      runs[name], notes[name] = run, "" if error < 6e-3 else f"  DIFFERS by {error:.1e}"
    except Exception as error:  # of one variant, which the others shall outlive
      print(f"{problem.title:30} {name:15} {type(error).__name__}: {error!s:.150}", flush=True)
  seconds = {name: [] for name in runs}
  for _, (name, run) in itertools.product(range(rounds), runs.items()):
    start = time.perf_counter()
    jax.block_until_ready(run())
    seconds[name].append((time.perf_counter() - start) / 10)
  used = float(problem.sizes.sum()) / problem.operands[0].shape[0]
  dense = statistics.median(seconds.pop("dense")) * used
  for name, times in seconds.items():
    median = statistics.median(times)
    print(
      f"{problem.title:30} {name:15} {median * 1e6:7.0f} µs {problem.flop / median / 1e12:6.0f}"
      f" of {problem.flop / dense / 1e12:4.0f} TFLOP/s, ratio {dense / median:.3f}{notes[name]}",
      flush=True,
    )


def chained(f: Kernel, count: int) -> Callable[[tuple[Array, ...], Array], Array]:
  """Calls that wait for each other, in one program; the last one's first result."""

  def call(operands: tuple[Array, ...], sizes: Array) -> Array:
    # Barriers, lest only a part be computed, or what does not read the sizes only once.
    operands, sizes = lax.optimization_barrier((operands, sizes))
    return lax.optimization_barrier(jax.tree.leaves(f(*operands, sizes)))[0]

  @jax.jit
  def run(operands: tuple[Array, ...], sizes: Array) -> Array:
    def step(_: Any, sizes: Array) -> Array:
      # The next sizes depend on this result.
      return sizes + (call(operands, sizes).ravel()[0] > 1e30).astype(jnp.int32)

    return call(operands, lax.fori_loop(0, count - 1, step, sizes))

  return run


@jax.jit
def used_part(result: Array, sizes: Array) -> Array:
  """A matrix whose unused rows are zero; results by slot as they are."""
  if result.ndim == 3:
    return result
  used = jnp.arange(result.shape[0]) < sizes.sum()
  return jnp.where(used[:, None], result, 0)


def problem_of(name: str, model: str, capacity: int, skew: float) -> Problem:
  """One of the matmuls of an expert: into and out of its inner width, their gradients, fused."""
  rng = np.random.default_rng(0)
  wide, inner = MODELS[model]
  sizes = jnp.asarray(group_sizes(rng, HOME + REPLICA, capacity - 999, skew), jnp.int32)
  kernel, operands, dense, dense_operands, peers = parts_of(name, capacity, wide, inner)
  products = 2 if name.startswith("gated") or name == "sum" else 1
  return Problem(
    title=f"{model} {capacity} {name}",
    operands=operands,
    sizes=sizes,
    flop=2.0 * products * float(sizes.sum()) * wide * inner,
    tuned=lambda tuning: functools.partial(kernel, tuning=tuning),
    kernel=kernel,
    dense=dense,
    dense_operands=dense_operands,
    peers=peers,
  )


Parts = tuple[Kernel, tuple[Array, ...], Kernel, tuple[Array, ...], dict[str, Kernel]]


def parts_of(name: str, capacity: int, wide: int, inner: int) -> Parts:
  """Kernel, operands, dense matmul, its operands, and peers."""
  keys = iter(jax.random.split(jax.random.key(0), 8))

  def random(*shape: int) -> Array:
    return jax.random.normal(next(keys), shape, jnp.bfloat16)

  def pair(*shape: int) -> tuple[Array, Array]:
    return random(HOME, *shape), random(REPLICA, *shape)

  if name == "wgrad":
    return _wgrad_problem(random(capacity, wide), random(capacity, inner))
  if name.startswith("gated"):
    operands = random(capacity, wide), *pair(wide, inner), *pair(wide, inner)
    return _gated_problem(*operands, keep=name != "gated only", split=name == "gated split")
  if name == "sum":
    rows = random(capacity, inner), random(capacity, inner)
    return _sum_problem(*rows, *pair(wide, inner), *pair(wide, inner))
  transpose = name.startswith("dgrad")
  shape = (wide, inner) if name.endswith("up") else (inner, wide)
  rows = random(capacity, shape[1] if transpose else shape[0])
  return _product_problem(rows, *pair(*shape), transpose=transpose)


def _product_problem(rows: Array, home: Array, replica: Array, *, transpose: bool) -> Parts:
  def joined(rows: Array, home: Array, replica: Array, sizes: Array) -> Array:
    weights = jnp.concatenate([home, replica])
    return lax.ragged_dot(rows, weights.mT if transpose else weights, sizes)

  def dense(rows: Array, weight: Array, _: Array) -> Array:
    return rows @ (weight.T if transpose else weight)

  portable = functools.partial(experts.grouped_matmul, transpose_rhs=transpose)
  kernel = functools.partial(grouped_matmul, transpose_rhs=transpose)
  peers = {"ragged": joined, "portable": portable}
  return kernel, (rows, home, replica), dense, (rows, home[0]), peers


def _wgrad_problem(rows: Array, grad: Array) -> Parts:
  numbers = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])

  def kernel(rows: Array, grad: Array, sizes: Array, **tuning: Any) -> Any:
    return grouped_matmul_wgrad(rows, grad, sizes, HOME, **tuning)

  def dense(rows: Array, grad: Array, _: Array) -> Array:
    return jnp.einsum("ck,cn->kn", rows, grad, preferred_element_type=jnp.float32)

  def ragged(rows: Array, grad: Array, sizes: Array) -> Array:
    return lax.ragged_dot_general(rows, grad, sizes, numbers, preferred_element_type=jnp.float32)[
      :HOME
    ]

  def portable(rows: Array, grad: Array, sizes: Array) -> Any:
    return experts.grouped_matmul_wgrad(rows, grad, sizes, HOME)

  operands = rows, grad
  return kernel, operands, dense, operands, {"ragged": ragged, "portable": portable}


def _gated_problem(
  rows: Array, gate: Array, more_gate: Array, up: Array, more_up: Array, *, keep: bool, split: bool
) -> Parts:
  whole = functools.partial(gated_matmul, activation=jax.nn.silu, keep_hidden=keep)
  apart = functools.partial(gated_split, keep_hidden=keep)
  still = functools.partial(apart, moving=False)

  def unfused(
    rows: Array, gate: Array, up: Array, more_gate: Array, more_up: Array, sizes: Array
  ) -> Any:
    gate_CF = grouped_matmul(rows, gate, more_gate, sizes)
    up_CF = grouped_matmul(rows, up, more_up, sizes)
    inner_CF = jax.nn.silu(gate_CF) * up_CF
    return (inner_CF, gate_CF, up_CF) if keep else inner_CF

  def dense(rows: Array, weight: Array, _: Array) -> Array:
    return rows @ weight

  operands = rows, gate, up, more_gate, more_up
  dense_operands = rows, jnp.concatenate([gate[0], up[0]], axis=1)
  if split:
    return apart, operands, dense, dense_operands, {"no transfer": still, "whole": whole}
  return whole, operands, dense, dense_operands, {"unfused": unfused}


def _sum_problem(
  rows: Array, other: Array, home: Array, more: Array, other_home: Array, other_more: Array
) -> Parts:
  def kernel(
    rows: Array, other: Array, home: Array, more: Array, *operands: Array, **tuning: Any
  ) -> Array:
    other_home, other_more, sizes = operands
    add = functools.partial(grouped_matmul_sum, transpose_rhs=True, **tuning)
    return add([rows, other], [home, other_home], [more, other_more], sizes)

  def separate(rows: Array, other: Array, home: Array, more: Array, *operands: Array) -> Array:
    other_home, other_more, sizes = operands
    one = functools.partial(grouped_matmul, transpose_rhs=True)
    return one(rows, home, more, sizes) + one(other, other_home, other_more, sizes)

  def dense(rows: Array, weight: Array, _: Array) -> Array:
    return rows @ weight.T

  operands = rows, other, home, more, other_home, other_more
  joined = (
    jnp.concatenate([rows, other], axis=1),
    jnp.concatenate([home[0], other_home[0]], axis=1),
  )
  return kernel, operands, dense, joined, {"separate": separate}


def group_sizes(rng: np.random.Generator, slots: int, used: int, skew: float) -> np.ndarray:
  """Random sizes with the given sum; the larger the skew, the less equal."""
  weight = np.exp(skew * rng.normal(size=slots))
  return rng.multinomial(used, weight / weight.sum())


def normal(rng: np.random.Generator, *shape: int) -> Array:
  return jnp.asarray(rng.normal(size=shape), jnp.bfloat16)


@jax.jit
def _norms(x: Array, expected: Array) -> tuple[Array, Array]:
  return jnp.linalg.norm(x.astype(jnp.float32) - expected), jnp.linalg.norm(expected)


def distance(x: Array, expected: Array) -> float:
  """Relative, NaN counted as infinite; zero if there is nothing to compare."""
  gap, norm = map(float, _norms(x, expected))
  return gap if norm == 0 else float(np.nan_to_num(gap / norm, nan=np.inf))


if __name__ == "__main__":
  main()
