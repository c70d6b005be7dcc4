"""Where each assignment of a rank runs, in closed form: ``ultraep_jax/route.py`` in two kernels.

The first kernel fills tables (``route_tables``). In the second each block adds up the counts of the
chunks before its own, finds the ordinals inside its chunk by comparing all with all, and looks the
rows up.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import varying
from pallas_kernels.route_tables import (
  BLOCK_AXIS,
  CHUNK,
  END,
  FIELDS,
  FIRST,
  KEPT,
  PIECES,
  START,
  TO_ROW,
  Sizes,
  fill_tables,
  read_chunk,
)
from pallas_kernels.warps import (
  THREADS,
  chunks,
  lookup,
  ones,
  padded,
  store,
  thread_index,
  unrolled,
  where,
)

Array = jax.Array

_PREFETCH = 16  # counts that are loaded at a time
# Only this lowering takes loads per thread. The kernels reach no other device.
_PARAMS = plgpu.CompilerParams(
  lowering_semantics=plgpu.LoweringSemantics.Lane, skip_device_barrier=True
)


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
  sizes = Sizes(
    num_ranks=num_ranks,
    num_experts=quota_EG.shape[0],
    num_slots=num_slots,
    assignments=expert_index_TK.size,
    capacity=capacity,
  )
  inputs = [expert_index_TK, load_GE, replica_expert_GS, quota_EG, rank]
  index, load, replica, quota, rank = varying.vary_alike(*[x.reshape(-1) for x in inputs])
  out_type = jax.typeof(index).update
  slots = sizes.num_home + num_slots
  tables = plgpu.kernel(
    functools.partial(fill_tables, sizes=sizes),
    out_type=[
      out_type(shape=(sizes.chunks * padded(sizes.num_experts),)),
      out_type(shape=(len(FIELDS) * sizes.pairs,)),
      out_type(shape=(slots,)),
      out_type(shape=(1,)),
    ],
    grid=(sizes.chunks + sizes.pair_blocks + 1,),
    grid_names=(BLOCK_AXIS,),
    scratch_types=[plgpu.SMEM((CHUNK,), jnp.int32)],
    compiler_params=_PARAMS,
    kernel_name="route_tables",
  )
  count, pair, group_size_P, num_rounds = tables(index, load, replica, quota, rank)
  rows = plgpu.kernel(
    functools.partial(_rows, sizes=sizes),
    out_type=[out_type(shape=(sizes.assignments,))] * 2,
    grid=(sizes.chunks,),
    grid_names=(BLOCK_AXIS,),
    scratch_types=[
      plgpu.SMEM((CHUNK,), jnp.int32),
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
  sizes: Sizes,
) -> None:
  chunk, ranks = lax.axis_index(BLOCK_AXIS), sizes.num_ranks
  rank = lookup(rank_ref, thread_index() * 0)
  experts = read_chunk(index_ref, chunk_ref, chunk, sizes)
  _add_chunks_before(count_ref, before_ref, chunk, sizes)
  for (start, i), inside, expert in zip(
    chunks(CHUNK), _ordinals(chunk_ref, experts), experts, strict=True
  ):
    del start
    valid = expert < sizes.num_experts
    expert = jnp.minimum(expert, sizes.num_experts - 1)
    ordinal = lookup(before_ref, expert) + inside

    def tell(field: int, host: Array, expert: Array = expert) -> Array:
      return lookup(pair_ref, expert * ranks + host + field * sizes.pairs)

    kept = tell(KEPT, rank)
    place = tell(START, rank) + ordinal - kept
    # The first host whose interval ends after the place.
    host = expert * 0
    for bit in reversed(range((ranks - 1).bit_length())):
      later = host + (1 << bit)
      passed = tell(END, jnp.minimum(later, ranks) - 1) <= place
      host = where(passed, later, host)
    stays = ordinal < kept
    host = where(stays, rank, jnp.minimum(host, ranks - 1))
    row = where(stays, tell(FIRST, rank) + ordinal, tell(TO_ROW, host) + place)
    target = chunk * CHUNK + i
    exists = ones(target < sizes.assignments)
    target = jnp.minimum(target, sizes.assignments - 1)
    store(dest_ref, target, where(valid, host, -1), exists)
    store(row_ref, target, where(valid, row, 0), exists)


def _add_chunks_before(count_ref: Any, before_ref: Any, chunk: Array, sizes: Sizes) -> None:
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
  for segment in range(PIECES):

    def add(j: Array, found: list[Array], segment: int = segment) -> list[Array]:
      other = chunk_ref[segment * THREADS + j]
      same = [expert == other for expert in experts[segment:]]
      same[0] &= thread > j
      return [*found[:segment], *(f + ones(s) for f, s in zip(found[segment:], same, strict=True))]

    found = unrolled(THREADS, add, found)
  return found
