"""Where each assignment of a rank runs, in closed form: ``ultraep_jax/route.py`` in two kernels.

The first kernel has blocks of three kinds, side by side: some count the experts of a chunk of
assignments each, some fill tables of what a rank and a host have to do with each other for each
expert, one tells sizes. In the second each block adds up the counts of the chunks before its
own, finds the ordinals inside its chunk by comparing all with all, and looks the rows up.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.branches import when
from pallas_kernels.warps import (
  THREADS,
  ceil_div,
  chunks,
  clip,
  divide,
  lookup,
  ones,
  padded,
  store,
  thread_index,
  unrolled,
  where,
)

Array = jax.Array

_PIECES = 4  # of 128 assignments, in a chunk
_CHUNK = _PIECES * THREADS
_PREFETCH = 16  # counts that are loaded at a time
_BLOCK_AXIS = "route_block"
# Only this lowering takes loads per thread. The kernels reach no other device.
_PARAMS = plgpu.CompilerParams(
  lowering_semantics=plgpu.LoweringSemantics.Lane, skip_device_barrier=True
)
# What a pair of an expert and a host is told: the end of the host's interval of the expert's line,
# what to add to a place in it for the row, the first row of this rank's own assignments, how many
# of its own the host keeps, and where this rank's interval begins.
_FIELDS = _END, _TO_ROW, _FIRST, _KEPT, _START = range(5)


@dataclasses.dataclass(frozen=True)
class _Sizes:
  num_ranks: int
  num_experts: int
  num_slots: int
  assignments: int
  capacity: int

  @property
  def num_home(self) -> int:
    return self.num_experts // self.num_ranks

  @property
  def pairs(self) -> int:
    return self.num_ranks * self.num_experts

  @property
  def chunks(self) -> int:
    return -(-self.assignments // _CHUNK)

  @property
  def pair_blocks(self) -> int:
    return -(-self.pairs // THREADS)


def route_rows(
  expert_index_TK: Array,
  load_GE: Array,
  replica_expert_GS: Array,
  quota_EG: Array,
  rank: Array,
  *,
  capacity: int,
) -> tuple[Array, Array, Array, Array]:
  """Routes one rank's assignments; the result is that of ``ultraep_jax.route_tokens``.

  Args:
    expert_index_TK: ``[T, K]`` int32, this rank's choices; out of range is masked.
    load_GE: ``[G, E]`` int32, assignments of each source rank to each expert.
    replica_expert_GS: ``[G, S]`` int32, the expert in each slot, −1 if empty.
    quota_EG: ``[E, G]`` int32, assignments of an expert that run on a rank.
    rank: ``[]`` int32, this rank.
    capacity: rows that a rank computes in one round.

  Returns:
    ``dest_TK``, −1 if masked, ``row_TK``, 0 if masked, ``group_size_P`` of this rank and
    ``num_rounds``, ``[]``, of the busiest; all int32.

  Raises:
    NotImplementedError: no slots, no assignments, or too many experts for shared memory.
    ValueError: shapes do not fit together.
    TypeError: an array is not int32.
  """
  _check(expert_index_TK, load_GE, replica_expert_GS, quota_EG)
  num_ranks, num_slots = replica_expert_GS.shape
  sizes = _Sizes(
    num_ranks=num_ranks,
    num_experts=quota_EG.shape[0],
    num_slots=num_slots,
    assignments=expert_index_TK.size,
    capacity=capacity,
  )
  inputs = [expert_index_TK, load_GE, replica_expert_GS, quota_EG, rank]
  index, load, replica, quota, rank = _vary_alike([x.reshape(-1) for x in inputs])
  out_type = jax.typeof(index).update
  slots = sizes.num_home + num_slots
  tables = plgpu.kernel(
    functools.partial(_tables, sizes=sizes),
    out_type=[
      out_type(shape=(sizes.chunks * padded(sizes.num_experts),)),
      out_type(shape=(len(_FIELDS) * sizes.pairs,)),
      out_type(shape=(slots,)),
      out_type(shape=(1,)),
    ],
    grid=(sizes.chunks + sizes.pair_blocks + 1,),
    grid_names=(_BLOCK_AXIS,),
    scratch_types=[plgpu.SMEM((_CHUNK,), jnp.int32)],
    compiler_params=_PARAMS,
    kernel_name="route_tables",
  )
  count, pair, group_size_P, num_rounds = tables(index, load, replica, quota, rank)
  rows = plgpu.kernel(
    functools.partial(_rows, sizes=sizes),
    out_type=[out_type(shape=(sizes.assignments,))] * 2,
    grid=(sizes.chunks,),
    grid_names=(_BLOCK_AXIS,),
    scratch_types=[
      plgpu.SMEM((_CHUNK,), jnp.int32),
      plgpu.SMEM((padded(sizes.num_experts),), jnp.int32),
    ],
    compiler_params=_PARAMS,
    kernel_name="route_rows",
  )
  dest, row = rows(index, rank, count, pair)
  shape = expert_index_TK.shape
  return dest.reshape(shape), row.reshape(shape), group_size_P, num_rounds.reshape(())


def _check(
  expert_index_TK: Array, load_GE: Array, replica_expert_GS: Array, quota_EG: Array
) -> None:
  num_experts, num_ranks = quota_EG.shape
  if load_GE.shape != (num_ranks, num_experts):
    raise ValueError(f"load_GE: expected shape {(num_ranks, num_experts)}, got {load_GE.shape}")
  if replica_expert_GS.ndim != 2 or replica_expert_GS.shape[0] != num_ranks:
    raise ValueError(
      f"replica_expert_GS: expected shape [{num_ranks}, S], got {replica_expert_GS.shape}"
    )
  arrays = {
    "expert_index_TK": expert_index_TK,
    "load_GE": load_GE,
    "replica_expert_GS": replica_expert_GS,
    "quota_EG": quota_EG,
  }
  for name, array in arrays.items():
    if array.dtype != jnp.int32:
      raise TypeError(f"{name}: expected int32, got {array.dtype}")
  if expert_index_TK.size == 0 or replica_expert_GS.size == 0:
    raise NotImplementedError(
      "expert_index_TK, replica_expert_GS: expected assignments and slots, got shapes "
      f"{expert_index_TK.shape} and {replica_expert_GS.shape}"
    )
  if num_experts > 32_768:
    raise NotImplementedError(f"quota_EG: expected at most 32768 experts, got {num_experts}")


def _vary_alike(arrays: list[Array]) -> list[Array]:
  """Types all arrays as varying over the mesh axes of any; the outputs take theirs."""
  axes = [frozenset(jax.typeof(x).manual_axis_type.varying) for x in arrays]
  missing = [tuple(sorted(frozenset().union(*axes) - own)) for own in axes]
  return [lax.pcast(x, m, to="varying") if m else x for x, m in zip(arrays, missing, strict=True)]


def _read_chunk(index_ref: Any, chunk_ref: Any, chunk: Array, sizes: _Sizes) -> list[Array]:
  """A chunk's experts, E where there is none, in shared memory and in the threads."""
  pieces = []
  for start, i in chunks(_CHUNK):
    place = chunk * _CHUNK + i
    expert = lookup(index_ref, jnp.minimum(place, sizes.assignments - 1))
    valid = (expert >= 0) & (expert < sizes.num_experts) & (place < sizes.assignments)
    pieces.append(where(valid, expert, sizes.num_experts))
    chunk_ref[pl.ds(start, THREADS)] = pieces[-1]
  return pieces


# --- tables ----------------------------------------------------------------------------------


def _tables(
  index_ref: Any,
  load_ref: Any,
  replica_ref: Any,
  quota_ref: Any,
  rank_ref: Any,
  count_ref: Any,
  pair_ref: Any,
  size_ref: Any,
  rounds_ref: Any,
  chunk_ref: Any,
  *,
  sizes: _Sizes,
) -> None:
  block = lax.axis_index(_BLOCK_AXIS)
  first_pair, last = sizes.chunks, sizes.chunks + sizes.pair_blocks
  rank = lookup(rank_ref, thread_index() * 0)

  @when(block < first_pair)
  def _() -> None:
    _count(index_ref, chunk_ref, count_ref, block, sizes)

  @when((block >= first_pair) & (block < last))
  def _() -> None:
    pair = (block - first_pair) * THREADS + thread_index()
    _tell_pairs(load_ref, replica_ref, quota_ref, rank, pair_ref, pair, sizes)

  @when(block == last)
  def _() -> None:
    _tell_sizes(replica_ref, quota_ref, rank, size_ref, rounds_ref, sizes)


def _count(index_ref: Any, chunk_ref: Any, count_ref: Any, chunk: Array, sizes: _Sizes) -> None:
  """How often each expert is in a chunk."""
  _read_chunk(index_ref, chunk_ref, chunk, sizes)
  experts = [e for _, e in chunks(sizes.num_experts)]

  def add(j: Array, counts: list[Array]) -> list[Array]:
    expert = chunk_ref[j]
    return [c + ones(e == expert) for c, e in zip(counts, experts, strict=True)]

  counts = unrolled(_CHUNK, add, [e * 0 for e in experts])
  first = chunk * padded(sizes.num_experts)
  for expert, count in zip(experts, counts, strict=True):
    store(count_ref, first + expert, count, expert * 0 + 1)


def _tell_pairs(
  load_ref: Any,
  replica_ref: Any,
  quota_ref: Any,
  rank: Array,
  pair_ref: Any,
  pair: Array,
  sizes: _Sizes,
) -> None:
  """Fills ``_FIELDS`` for a pair of an expert and a host per thread."""
  ranks, experts, home, slots = (
    sizes.num_ranks,
    sizes.num_experts,
    sizes.num_home,
    sizes.num_slots,
  )
  index = jnp.minimum(pair, sizes.pairs - 1)
  expert, host = divide(index, ranks)

  def along_line(j: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
    end, start = carry
    load, quota = lookup(load_ref, j * experts + expert), lookup(quota_ref, expert * ranks + j)
    kept = jnp.minimum(load, quota)
    return end + where(j <= host, quota - kept, 0), start + where(j < rank, load - kept, 0)

  end, start = unrolled(ranks, along_line, (index * 0, index * 0))
  quota = lookup(quota_ref, index)
  kept = jnp.minimum(lookup(load_ref, host * experts + expert), quota)
  host_start = end - (quota - kept)
  earlier = clip(start - host_start, end - host_start) + where(host < rank, kept, 0)

  # Rows on the host before the expert's slot, which is a home slot or one of the replicas.
  own = expert - host * home

  def add_home(m: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
    before, total = carry
    rows = lookup(quota_ref, (host * home + m) * ranks + host)
    return before + where(m < own, rows, 0), total + rows

  before, total = unrolled(home, add_home, (index * 0, index * 0))
  before = where((own >= 0) & (own < home), before, 0)

  def add_replica(s: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
    before, total = carry
    other = lookup(replica_ref, host * slots + s)
    rows = where(other >= 0, lookup(quota_ref, jnp.maximum(other, 0) * ranks + host), 0)
    return where(other == expert, total, before), total + rows

  before, _ = unrolled(slots, add_replica, (before, total))
  first = before + earlier
  values = {
    _END: end,
    _TO_ROW: first - jnp.maximum(start, host_start),
    _FIRST: first,
    _KEPT: kept,
    _START: start,
  }
  for field, value in values.items():
    store(pair_ref, index + field * sizes.pairs, value, ones(pair == index))


def _tell_sizes(
  replica_ref: Any, quota_ref: Any, rank: Array, size_ref: Any, rounds_ref: Any, sizes: _Sizes
) -> None:
  """Rows of each slot of this rank, and the rounds that the busiest rank needs."""
  slots = sizes.num_home + sizes.num_slots
  for _, i in chunks(slots):
    replica = clip(i - sizes.num_home, i * 0 + sizes.num_slots - 1)
    replica = lookup(replica_ref, rank * sizes.num_slots + replica)
    home = rank * sizes.num_home + jnp.minimum(i, sizes.num_home - 1)
    expert = where(i < sizes.num_home, home, replica)
    quota = lookup(quota_ref, jnp.maximum(expert, 0) * sizes.num_ranks + rank)
    store(size_ref, jnp.minimum(i, slots - 1), where(expert >= 0, quota, 0), ones(i < slots))
  hosts = [jnp.minimum(g, sizes.num_ranks - 1) for _, g in chunks(sizes.num_ranks)]

  def add(e: Array, loads: list[Array]) -> list[Array]:
    first = e * sizes.num_ranks
    return [x + lookup(quota_ref, first + g) for x, g in zip(loads, hosts, strict=True)]

  loads = unrolled(sizes.num_experts, add, [g * 0 for g in hosts], 64)
  busiest = functools.reduce(jnp.maximum, loads)
  busiest = thread_index() * 0 + jnp.max(busiest)
  rounds = jnp.maximum(ceil_div(busiest, sizes.capacity), 1)
  store(rounds_ref, busiest * 0, rounds, ones(thread_index() == 0))


# --- rows ------------------------------------------------------------------------------------


def _rows(
  index_ref: Any,
  rank_ref: Any,
  count_ref: Any,
  pair_ref: Any,
  dest_ref: Any,
  row_ref: Any,
  chunk_ref: Any,
  before_ref: Any,
  *,
  sizes: _Sizes,
) -> None:
  chunk, ranks = lax.axis_index(_BLOCK_AXIS), sizes.num_ranks
  rank = lookup(rank_ref, thread_index() * 0)
  experts = _read_chunk(index_ref, chunk_ref, chunk, sizes)
  _add_chunks_before(count_ref, before_ref, chunk, sizes)
  for (start, i), inside, expert in zip(
    chunks(_CHUNK), _ordinals(chunk_ref, experts), experts, strict=True
  ):
    del start
    valid = expert < sizes.num_experts
    expert = jnp.minimum(expert, sizes.num_experts - 1)
    ordinal = lookup(before_ref, expert) + inside

    def tell(field: int, host: Array, expert: Array = expert) -> Array:
      return lookup(pair_ref, expert * ranks + host + field * sizes.pairs)

    kept = tell(_KEPT, rank)
    place = tell(_START, rank) + ordinal - kept
    # The first host whose interval ends after the place.
    host = expert * 0
    for bit in reversed(range((ranks - 1).bit_length())):
      later = host + (1 << bit)
      passed = tell(_END, jnp.minimum(later, ranks) - 1) <= place
      host = where(passed, later, host)
    stays = ordinal < kept
    host = where(stays, rank, jnp.minimum(host, ranks - 1))
    row = where(stays, tell(_FIRST, rank) + ordinal, tell(_TO_ROW, host) + place)
    target = chunk * _CHUNK + i
    exists = ones(target < sizes.assignments)
    target = jnp.minimum(target, sizes.assignments - 1)
    store(dest_ref, target, where(valid, host, -1), exists)
    store(row_ref, target, where(valid, row, 0), exists)


def _add_chunks_before(count_ref: Any, before_ref: Any, chunk: Array, sizes: _Sizes) -> None:
  """Assignments to each expert in earlier chunks, to shared memory."""
  width = padded(sizes.num_experts)
  experts = [e for _, e in chunks(sizes.num_experts)]

  def add(group: Array, sums: list[Array]) -> list[Array]:
    for offset in range(_PREFETCH):
      other = group * _PREFETCH + offset
      first = lax.min(other, jnp.int32(sizes.chunks - 1)) * width
      sums = [
        s + where(e * 0 + other < chunk, lookup(count_ref, first + e), 0)
        for s, e in zip(sums, experts, strict=True)
      ]
    return sums

  groups = lax.div(chunk + (_PREFETCH - 1), jnp.int32(_PREFETCH))
  sums = lax.fori_loop(0, groups, add, [e * 0 for e in experts])
  for (start, _), total in zip(chunks(sizes.num_experts), sums, strict=True):
    before_ref[pl.ds(start, THREADS)] = total


def _ordinals(chunk_ref: Any, experts: list[Array]) -> list[Array]:
  """Equal experts earlier in the chunk."""
  thread = thread_index()
  found = [expert * 0 for expert in experts]
  for segment in range(_PIECES):

    def add(j: Array, found: list[Array], segment: int = segment) -> list[Array]:
      other = chunk_ref[segment * THREADS + j]
      same = [expert == other for expert in experts[segment:]]
      same[0] &= thread > j
      return [*found[:segment], *(f + ones(s) for f, s in zip(found[segment:], same, strict=True))]

    found = unrolled(THREADS, add, found)
  return found
