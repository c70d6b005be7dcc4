"""The first kernel of routing: what the second one looks up.

It has blocks of three kinds, side by side: some count the experts of a chunk of assignments each,
some fill tables of what a rank and a host have to do with each other for each expert, one tells
sizes.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

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

PIECES = 4  # of 128 assignments, in a chunk
CHUNK = PIECES * THREADS
BLOCK_AXIS = "route_block"
# What a pair of an expert and a host is told: the end of the host's interval of the expert's line,
# what to add to a place in it for the row, the first row of this rank's own assignments, how many
# of its own the host keeps, and where this rank's interval begins.
FIELDS = END, TO_ROW, FIRST, KEPT, START = range(5)


@dataclasses.dataclass(frozen=True)
class Sizes:
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
    return -(-self.assignments // CHUNK)

  @property
  def pair_blocks(self) -> int:
    return -(-self.pairs // THREADS)


def read_chunk(index_ref: Any, chunk_ref: Any, chunk: Array, sizes: Sizes) -> list[Array]:
  """A chunk's experts, E where there is none, in shared memory and in the threads."""
  pieces = []
  for start, i in chunks(CHUNK):
    place = chunk * CHUNK + i
    expert = lookup(index_ref, jnp.minimum(place, sizes.assignments - 1))
    valid = (expert >= 0) & (expert < sizes.num_experts) & (place < sizes.assignments)
    pieces.append(where(valid, expert, sizes.num_experts))
    chunk_ref[pl.ds(start, THREADS)] = pieces[-1]
  return pieces


def fill_tables(
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
  sizes: Sizes,
) -> None:
  block = lax.axis_index(BLOCK_AXIS)
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


def _count(index_ref: Any, chunk_ref: Any, count_ref: Any, chunk: Array, sizes: Sizes) -> None:
  """How often each expert is in a chunk."""
  read_chunk(index_ref, chunk_ref, chunk, sizes)
  experts = [e for _, e in chunks(sizes.num_experts)]

  def add(j: Array, counts: list[Array]) -> list[Array]:
    expert = chunk_ref[j]
    return [c + ones(e == expert) for c, e in zip(counts, experts, strict=True)]

  counts = unrolled(CHUNK, add, [e * 0 for e in experts])
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
  sizes: Sizes,
) -> None:
  """Fills ``FIELDS`` for a pair of an expert and a host per thread."""
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
    END: end,
    TO_ROW: first - jnp.maximum(start, host_start),
    FIRST: first,
    KEPT: kept,
    START: start,
  }
  for field, value in values.items():
    store(pair_ref, index + field * sizes.pairs, value, ones(pair == index))


def _tell_sizes(
  replica_ref: Any, quota_ref: Any, rank: Array, size_ref: Any, rounds_ref: Any, sizes: Sizes
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
