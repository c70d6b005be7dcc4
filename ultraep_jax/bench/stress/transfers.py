"""Random transfers by kernels, many in one program, each compared on the devices bit for bit.

Data are new in every repetition, so that what an earlier one left in a buffer is wrong. The plain
reference is an ``all_gather`` and a gather. Matrices that are multiplied in the meantime, the same
on all ranks, must stay the same: kernels must not write into the memory of others either.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.compute_on import compute_on
from jax.sharding import PartitionSpec as P

from ultraep_jax.bench.kernels.portable import AXIS
from ultraep_jax.bench.stress import plans as stress_plans
from ultraep_jax.bench.stress.operations import Crossing, Operations, as_bits
from ultraep_jax.mesh import after
from ultraep_jax.tools import processes
from ultraep_jax.types import Array

BATCH = 250  # repetitions of a program
_HOME, _SLOTS, _TOKENS, _TOP_K = 4, 3, 509, 4

# Values of an expert: no multiples of a tile, many tiles for each worker of a few.
_COPIED = ((51_216, "bfloat16"), (25_008, "float32"), (70_032, "int8"))
# Values of an expert, and how many integers those of copies and of homes are drawn from: sums are
# exact in float32; in bfloat16 those of up to 16 copies are, and the home's is rounded.
_SUMMED = {
  "float32": ((60_016, 5_008), (2**21 - 1, 2**21 - 1)),
  "bfloat16": ((63_488, 16), (31, 2**12 - 1)),
}
_CARRIED = ((1_032, "bfloat16"), (24, "float32"))  # of a token
# Values of a row, of both signs, and how many of them there are; sums by gates are exact.
_COMBINED = ((1_152, "bfloat16", 9, True), (640, "float32", 2**17 + 1, False))

# --- checks ----------------------------------------------------------------------------------
# Each returns the elements of one rank that are wrong after one repetition.


def _bits(salt: Array, sizes: Sequence[int], dtype: Any = jnp.uint32) -> Array:
  """Random bits: others on every rank, for every salt and at every place."""
  rank = lax.axis_index(AXIS).astype(jnp.uint32)
  x = lax.iota(jnp.uint32, math.prod(sizes)).reshape(sizes) * jnp.uint32(0x9E3779B1)
  x += salt.astype(jnp.uint32) * jnp.uint32(0x85EBCA77) + rank * jnp.uint32(0xC2B2AE3D)
  for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
    x = (x ^ (x >> jnp.uint32(shift))) * jnp.uint32(factor)
  return (x ^ (x >> jnp.uint32(16))).astype(f"uint{8 * jnp.dtype(dtype).itemsize}")


def _integers(salt: Array, sizes: Sequence[int], count: int) -> Array:
  """Random int32, each one of the ``count`` around 0; ``count`` is odd."""
  return (_bits(salt, sizes) % jnp.uint32(count)).astype(jnp.int32) - count // 2


def _one_zero(array: Array) -> Array:
  """The bits, of zero without a sign. Comparing numbers may take tiny ones for zero."""
  bits = as_bits(array)
  return jnp.where(bits == jnp.asarray(1 << (8 * bits.itemsize - 1), bits.dtype), 0, bits)


def _count(wrong: Array) -> Array:
  return jnp.sum(wrong, dtype=jnp.int32)


def _check_replicate(ops: Operations, salt: Array, plan: Any, scale: int) -> Array:
  replica_GS, parent_GS = plan
  bits = [_bits(salt + i, (_HOME, _cut(n, scale)), dtype) for i, (n, dtype) in enumerate(_COPIED)]
  arrays = [lax.bitcast_convert_type(b, d) for b, (_, d) in zip(bits, _COPIED, strict=True)]
  expert_S = replica_GS[lax.axis_index(AXIS)]
  wrong, copies = jnp.int32(0), ops.replicate(arrays, replica_GS, parent_GS)
  for got, sent in zip(copies, bits, strict=True):
    sent = after(sent, expert_S[0] + 1, *copies)
    want_SX = lax.all_gather(sent, AXIS, tiled=True)[jnp.maximum(expert_S, 0)]
    differs_SX = as_bits(got) != want_SX
    wrong += _count(differs_SX & (expert_S >= 0)[:, None])
  return wrong


def _check_reduce(ops: Operations, salt: Array, plan: Any, scale: int) -> Array:
  """Integers, with NaN in empty slots."""
  replica_GS, _ = plan
  rank, expert_N = lax.axis_index(AXIS), replica_GS.reshape(-1)
  target_N = jnp.where(expert_N // _HOME == rank, expert_N % _HOME, _HOME)
  target_N = jnp.where(expert_N >= 0, target_N, _HOME)
  empty_S1 = (replica_GS[rank] < 0)[:, None]
  wrong = jnp.int32(0)
  for dtype, (sizes, counts) in _SUMMED.items():
    salt, sizes = _once_counted(salt, wrong) + 5, [_cut(n, scale, 16) for n in sizes]
    replicas, homes = (
      [_held(_integers(salt + 2 * i + j, (rows, n), count), dtype) for i, n in enumerate(sizes)]
      for j, (rows, count) in enumerate(zip((replica_GS.shape[1], _HOME), counts, strict=True))
    )
    given = [jnp.where(empty_S1, jnp.nan, x.astype(dtype)) for x in replicas]
    sums = ops.reduce_replicas(given, [x.astype(dtype) for x in homes], *plan)
    for got, replica, home in zip(sums, replicas, homes, strict=True):
      replica = after(replica, replica_GS[rank, 0] + 1, *sums)
      replica_NX = lax.all_gather(replica, AXIS, tiled=True)
      total_MX = home.at[target_N].add(replica_NX, mode="drop")
      want_MX = total_MX.astype(jnp.float32).astype(dtype)
      wrong += _count(_one_zero(got) != _one_zero(want_MX))
  return wrong


def _held(integers: Array, dtype: str) -> Array:
  """The integers that a dtype has in place of these; a cast there and back could be left out."""
  kept = jnp.finfo(dtype)
  return lax.reduce_precision(integers.astype(jnp.float32), kept.nexp, kept.nmant).astype(jnp.int32)


def _crossing(routes: Any, capacity: int) -> Crossing:
  dest_GTK, row_GTK = routes
  rank = lax.axis_index(AXIS)
  received_GTK = jnp.where(dest_GTK == rank, row_GTK, -1)
  return Crossing(capacity, dest_GTK[rank], row_GTK[rank], received_GTK)


def _sources(to: Crossing) -> Array:
  """``[C]``: the token that feeds each row of this rank, counted over all ranks, −1 if none."""
  num_ranks, num_tokens, _ = to.received_GTK.shape
  token_GT1 = lax.iota(jnp.int32, num_ranks * num_tokens).reshape(num_ranks, num_tokens, 1)
  row_GTK = jnp.where(to.received_GTK < 0, to.capacity, to.received_GTK)
  token_GTK = jnp.broadcast_to(token_GT1, row_GTK.shape)
  return jnp.full(to.capacity, -1, jnp.int32).at[row_GTK].set(token_GTK, mode="drop")


def _check_dispatch(ops: Operations, salt: Array, routes: Any, scale: int) -> Array:
  to = _crossing(routes, routes[0].size)
  sizes = [(to.dest_TK.shape[0], _cut(n, scale, 8)) for n, _ in _CARRIED]
  bits = [_bits(salt + i, s, d) for i, (s, (_, d)) in enumerate(zip(sizes, _CARRIED, strict=True))]
  arrays = [lax.bitcast_convert_type(b, d) for b, (_, d) in zip(bits, _CARRIED, strict=True)]
  source_C = _sources(to)
  wrong = jnp.int32(0)
  value_TK = _bits(salt + 1, to.dest_TK.shape).astype(jnp.float32)
  came = ops.dispatch(arrays, value_TK, to)
  wrong += _count(came.received_GTK != to.received_GTK)
  wrong += _count(came.value_GTK != lax.all_gather(value_TK, AXIS))
  for got, sent in zip(came.arrays, bits, strict=True):
    want_CX = lax.all_gather(sent, AXIS, tiled=True)[jnp.maximum(source_C, 0)]
    differs_CX = as_bits(got) != want_CX
    wrong += _count(differs_CX & (source_C >= 0)[:, None])
  return wrong


def _check_combine(ops: Operations, salt: Array, routes: Any, scale: int) -> Array:
  """Integers and gates of 1, 1/2 and 1/4, whose sums are exact; NaN in unused rows.

  Without gates, any number of each row comes back, too.
  """
  to, rank = _crossing(routes, routes[0].size), lax.axis_index(AXIS)
  used_C1 = (_sources(to) >= 0)[:, None]
  power_GTK = lax.all_gather(_bits(salt, to.dest_TK.shape) % jnp.uint32(3), AXIS)
  gate_GTK = 1 / (1 << power_GTK.astype(jnp.int32)).astype(jnp.float32)
  wrong = jnp.int32(0)
  for i, (width, dtype, count, weighted) in enumerate(_COMBINED):
    integer_CD = _integers(salt + 1 + i, (to.capacity, _cut(width, scale, 16)), count)
    rows_CD = jnp.where(used_C1, integer_CD.astype(dtype), jnp.asarray(jnp.nan, dtype))
    if weighted:
      got_TD = ops.combine(rows_CD, gate_GTK, to)
    else:
      value_C = _bits(salt + 1 + i, (to.capacity,)).astype(jnp.float32)
      got_TD, value_TK = ops.combine_values(rows_CD, jnp.where(used_C1[:, 0], value_C, jnp.nan), to)
      every_GC, here_TK = lax.all_gather(value_C, AXIS), to.dest_TK >= 0
      want_TK = jnp.where(here_TK, every_GC[jnp.maximum(to.dest_TK, 0), to.row_TK], 0)
      wrong += _count(as_bits(value_TK) != as_bits(want_TK))
    all_GCD = lax.all_gather(integer_CD.astype(dtype), AXIS)
    want_TD = jnp.zeros(got_TD.shape, jnp.float32)
    for k in range(to.dest_TK.shape[1]):
      dest_T = to.dest_TK[:, k]
      gate_T = gate_GTK[rank, :, k] if weighted else jnp.float32(1)
      gate_T = jnp.where(dest_T >= 0, gate_T, 0)
      row_TD = all_GCD[jnp.maximum(dest_T, 0), to.row_TK[:, k]].astype(jnp.float32)
      want_TD += gate_T[:, None] * row_TD
    wrong += _count(_one_zero(got_TD) != _one_zero(want_TD.astype(dtype)))
  return wrong


def _cut(size: int, scale: int, unit: int = 16) -> int:
  """A size divided by ``scale``, in units."""
  return max(size // scale // unit, 1) * unit


def _once_counted[T](tree: T, wrong: Array) -> T:
  """The same values, for a check that must come after the one that counted."""
  return jax.tree.map(lambda leaf: after(leaf, wrong, 1 - wrong), tree)


# --- repetitions -----------------------------------------------------------------------------


Check = Callable[[Operations, Array, Any, int], Array]
CHECKS: dict[str, tuple[Check, bool]] = {  # True: along trees, False: routes of tokens
  "replicate": (_check_replicate, True),
  "reduce_replicas": (_check_reduce, True),
  "dispatch": (_check_dispatch, False),
  "combine": (_check_combine, False),
}


class Problem(NamedTuple):
  """Where the repetitions run and how large they are."""

  mesh: jax.sharding.Mesh
  scale: int = 1
  seed: int = 0
  streams: bool = False

  def plans(self, trees: bool) -> Iterator[stress_plans.Named]:
    """Plans or routes without end, of sizes that do not change."""
    rng = np.random.default_rng(self.seed)
    if trees:
      return stress_plans.placements(rng, self.mesh.size, _HOME, _SLOTS)
    return stress_plans.routes(rng, self.mesh.size, max(_TOKENS // self.scale, 3), _TOP_K)


def stress(
  name: str, operations: Sequence[Operations], problem: Problem, repetitions: int
) -> list[str]:
  """Repeats one of ``CHECKS`` for all ``operations`` and says what is wrong.

  Repetitions are rounded up to whole programs of up to ``BATCH``. Prints what it does.
  """
  count = min(repetitions, BATCH)
  batches = -(-repetitions // count)
  plans = problem.plans(CHECKS[name][1])
  # A repetition has 32 salts; every check takes up to ten, for each of two tunings.
  salts = (problem.seed * 1_000_003 + 32 * np.arange(batches * count)).astype(np.uint32)
  run, seconds = program(name, operations, problem), 0.0
  names, wrong, drifted = [], [], 0
  for salt_N in np.split(salts, batches):
    named = [next(plans) for _ in range(count)]
    arguments = (salt_N, jax.tree.map(lambda *parts: np.stack(parts), *[n.plan for n in named]))
    if not names:
      start = time.perf_counter()
      run = run.lower(*arguments).compile()
      print(f"{name}: compiled in {time.perf_counter() - start:.1f} s", flush=True)
    start = time.perf_counter()
    wrong_GN, drifted_G = processes.gather(run(*arguments))
    seconds += time.perf_counter() - start
    names += [each.name for each in named]
    wrong.append(wrong_GN)
    drifted += int(drifted_G.sum())
  print(f"{name}: {batches * count} x {len(operations)} calls in {seconds:.1f} s", flush=True)
  found = _describe(np.concatenate(wrong, axis=1), names)
  if drifted:
    found.append(f"{drifted} elements of the matrices multiplied beside differ between ranks")
  return found


def _describe(wrong_GN: np.ndarray, names: Sequence[str]) -> list[str]:
  if not wrong_GN.any():
    return []
  bad_N, bad_G = np.flatnonzero(wrong_GN.any(axis=0)), np.flatnonzero(wrong_GN.any(axis=1))
  return [
    f"{wrong_GN.sum(dtype=np.int64)} wrong elements in {bad_N.size} of {len(names)} repetitions, "
    f"on ranks {bad_G.tolist()}, first in repetition {bad_N[0]} ({names[bad_N[0]]})"
  ]


def program(name: str, operations: Sequence[Operations], problem: Problem) -> Any:
  """A jitted function of salts ``[N]`` and plans: wrong elements ``[G, N]`` and matrices' ``[G]``.

  Each step of its loop also multiplies matrices, whatever the transfers do.
  """
  check, size = CHECKS[name][0], _cut(2048, problem.scale)
  multiply: Any = _multiply
  if problem.streams:
    multiply = compute_on(
      _multiply, compute_type="gpu_stream:1", out_memory_spaces=jax.memory.Space.Device
    )

  def on_rank(salt_N: Array, plan_N: Any) -> tuple[Array, Array]:
    start = (lax.iota(jnp.int32, size * size) * 40_503 % 9 - 4).reshape(size, size)

    def repeat(matrix: Array, step: tuple[Array, Any]) -> tuple[Array, Array]:
      salt, plan = step
      matrix = multiply(matrix)
      total = jnp.int32(0)
      for i, ops in enumerate(operations):
        salt, plan = _once_counted((salt, plan), total)
        total += check(ops, salt + jnp.uint32(16 * i), plan, problem.scale)
      return matrix, total

    matrix, wrong_N = lax.scan(repeat, start.astype(jnp.bfloat16), (salt_N, plan_N))
    drifted = _count(matrix != lax.all_gather(matrix, AXIS)[0])
    return wrong_N[None], drifted[None]

  return jax.jit(
    jax.shard_map(on_rank, mesh=problem.mesh, in_specs=P(), out_specs=P(AXIS), check_vma=False),
    # Command buffers put everything on one stream.
    compiler_options={"xla_gpu_enable_command_buffer": ""} if problem.streams else None,
  )


def _multiply(matrix: Array) -> Array:
  """Small integers to small integers: exact, in whatever order products are summed."""
  for _ in range(3):
    product = jnp.matmul(matrix, matrix, preferred_element_type=jnp.float32)
    matrix = (product.astype(jnp.int32) % 9 - 4).astype(matrix.dtype)
  return matrix
