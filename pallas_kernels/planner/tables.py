"""What the planner kernels know: the problem, and the loads and orders of a domain.

Ranks of a domain lie in the lanes of a warp, several *parts* of them if the domain is larger;
every warp holds them all. Orders come from counting what goes before, ties go by index.

A domain of 40 ranks has two parts::

  part 0   ranks  0 to 31   in lanes 0 to 31
  part 1   ranks 32 to 39   in lanes 0 to  7
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp

from pallas_kernels.support import Array
from pallas_kernels.warp.scatter import barrier, put_at
from pallas_kernels.warp.warps import (
  INT32_MAX,
  LANES,
  THREADS,
  divide,
  each_piece,
  largest_divisor,
  lookup,
  ones,
  over,
  padded,
  store,
  thread_index,
  unrolled,
  warp_sum,
  where,
)

Parts = list[Array]  # of ranks: rank r is in lane r % 32 of part r // 32

PROBES = THREADS // LANES  # of a block, one a warp
RULES = 12


@dataclasses.dataclass(frozen=True)
class Problem:
  """What is fixed at trace time; see ``plan_quota``."""

  num_ranks: int  # G
  num_experts: int  # E
  domain_size: int  # R
  num_slots: int  # S
  min_tokens: int
  count_copies: bool
  by_time: bool
  target: float | None
  steps: tuple[int, ...]  # of thresholds between mean and busiest, in units of 2^-15
  searches: bool = True  # else there is only the construction

  @property
  def num_domains(self) -> int:
    return self.num_ranks // self.domain_size

  @property
  def num_home(self) -> int:
    """M."""
    return self.num_experts // self.num_ranks

  @property
  def domain_experts(self) -> int:
    return self.domain_size * self.num_home

  @property
  def parts(self) -> int:
    return -(-self.domain_size // LANES)

  @property
  def constructs(self) -> bool:
    others = self.num_home * (self.domain_size - 1)
    return self.num_slots * self.domain_size >= others and self.min_tokens == 1

  @property
  def finds_used(self) -> bool:
    """Whether trees ask which slots are used: where many may be empty (docs/lab/kernels.md)."""
    return self.num_slots > 4 and self.num_ranks * self.num_slots > 64

  @property
  def num_thresholds(self) -> int:
    if not self.searches:
      return 0
    if self.constructs and not self.by_time and self.target is None:
      return 1  # the mean: nothing above it can win
    return len(self.steps) + 1 + (self.target is not None) + self.by_time

  @property
  def probe_blocks(self) -> int:
    return self.num_thresholds * RULES // PROBES

  @property
  def blocks(self) -> int:
    return self.probe_blocks + self.constructs

  @property
  def placement(self) -> int:
    """Numbers of a candidate's placement: the expert and the tokens of each slot."""
    return 2 * self.num_slots * self.domain_size

  @property
  def report(self) -> int:
    """Numbers of a block's report: what it ends with, and filled slots of its warps' ranks."""
    return (1 + self.parts) * THREADS


class Tables(NamedTuple):
  """Vectors in shared memory, in domain order or in *heat* order: by falling load.

  An expert's place in heat order is that of its rank, then its own among those of the rank.
  """

  load: Any  # [R * M], rows of experts
  rank_rows: Any  # [R]
  rank_groups: Any  # [R], experts that have rows
  rank_load: Any  # [R], rows and what groups count
  heat: Any  # [R], the place of a rank
  hot_load: Any  # [R], in heat order
  key_load: Any  # [R * M], in heat order
  key_expert: Any  # [R * M], which expert of all
  best: Any  # [5 * 128], what the warps tell each other

  @staticmethod
  def sizes(problem: Problem) -> "Tables":
    ranks, experts = padded(problem.domain_size), padded(problem.domain_experts)
    of_ranks = ranks, ranks, ranks
    return Tables(experts, *of_ranks, ranks, ranks, experts, experts, 5 * THREADS)


class Placement(NamedTuple):
  """Where a candidate's copies are written: an expert and its tokens for each slot of a rank."""

  slots_ref: Any
  first: Array  # of the candidate

  def put(self, slot: Array, expert: Array, tokens: Array, mask: Array) -> None:
    """Fills slots, counted over the ranks of the domain, for threads whose mask is set."""
    index, mask = self.first + 2 * slot, ones(mask)
    store(self.slots_ref, index, expert, mask)
    store(self.slots_ref, index + 1, tokens, mask)


class Outcome(NamedTuple):
  """What a placement is judged by, each the same in all lanes of a warp."""

  busiest: Array  # load
  rows: Array  # the most of a rank
  replicas: Array
  copies: Array  # the most that a rank sends or receives
  filled: Parts  # slots of each rank


def sum_loads(
  load_ref: Any, cost_ref: Any, table: Tables, domain: Array, problem: Problem
) -> Array:
  """Loads of the domain's experts, from all ranks, and of its ranks.

  Returns:
    Rows that a group costs, in each thread: fewer where loads would not fit int32.
  """
  pieces = padded(problem.domain_experts) // THREADS
  together = largest_divisor(pieces, 8)

  def sum_sources(group: Array, _: None) -> None:
    places = [thread_index() + (group * together + i) * THREADS for i in range(together)]
    experts = [
      jnp.minimum(i, problem.domain_experts - 1) + domain * problem.domain_experts for i in places
    ]

    def add(source: Array, totals: Parts) -> Parts:
      first = source * problem.num_experts
      return [t + lookup(load_ref, first + e) for t, e in zip(totals, experts, strict=True)]

    # As many loads under way as registers allow: they come from the cache of the whole GPU.
    totals = unrolled(problem.num_ranks, add, [e * 0 for e in experts], min(128 // together, 64))
    for i, total in zip(places, totals, strict=True):
      put_at(table.load, i, total)

  unrolled(pieces // together, sum_sources, None, most=1)
  barrier()

  def sum_experts(rank: Array) -> None:
    first = jnp.minimum(rank, problem.domain_size - 1) * problem.num_home

    def add(m: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
      (rows, groups), load = sums, lookup(table.load, first + m)
      return rows + load, groups + ones(load > 0)

    rows, groups = unrolled(problem.num_home, add, (rank * 0, rank * 0))
    put_at(table.rank_rows, rank, rows)
    put_at(table.rank_groups, rank, groups)

  each_piece(problem.domain_size, sum_experts)
  barrier()
  rows = of_ranks(table.rank_rows, 0, problem)
  if not problem.by_time:
    return rows[0] * 0
  most = problem.domain_size * (problem.num_home + problem.num_slots)
  room = divide(INT32_MAX - over(warp_sum, rows), most)[0]
  return jnp.minimum(lookup(cost_ref, rows[0] * 0 + 3), room)


def sort(table: Tables, domain: Array, group: Array, problem: Problem) -> None:
  """Fills loads, and the tables in their heat order, where a group counts so many rows.

  A place is the number of those before; ties go by index.
  """
  ranks, experts, home = problem.domain_size, problem.domain_experts, problem.num_home

  def weigh_rank(rank: Array) -> None:
    groups = lookup(table.rank_groups, rank)
    put_at(table.rank_load, rank, lookup(table.rank_rows, rank) + group * groups)

  each_piece(ranks, weigh_rank)
  barrier()

  def place_rank(rank: Array) -> None:
    load = lookup(table.rank_load, rank)

    def count(j: Array, before: Array) -> Array:
      # Before the rank are those of as much load and more; behind it, those of more.
      return before + ones(lookup(table.rank_load, rank * 0 + j) > load - ones(j < rank))

    place = unrolled(ranks, count, rank * 0)
    put_at(table.heat, rank, place, rank < ranks)
    put_at(table.hot_load, place, load, rank < ranks)

  each_piece(ranks, place_rank)
  barrier()

  def place_expert(i: Array) -> None:
    inside, i = i < experts, jnp.minimum(i, experts - 1)
    load, (rank, own) = lookup(table.load, i), divide(i, home)
    first = i - own

    def count(m: Array, before: Array) -> Array:
      return before + ones(lookup(table.load, first + m) > load - ones(m < own))

    place = lookup(table.heat, rank) * home + unrolled(home, count, i * 0)
    put_at(table.key_load, place, load, inside)
    put_at(table.key_expert, place, i + domain * experts, inside)

  each_piece(experts, place_expert)
  barrier()


def weighted(rows: Parts, groups: Parts, group: Array) -> Parts:
  """Loads of ranks: their rows, and ``group`` for each of their groups."""
  return [x + group * y for x, y in zip(rows, groups, strict=True)]


def ranks_of(problem: Problem) -> Parts:
  lane = thread_index() & (LANES - 1)
  return [lane + LANES * part for part in range(problem.parts)]


def of_ranks(table_ref: Any, missing: int, problem: Problem) -> Parts:
  """Each rank's element of a vector in domain order; ``missing`` beyond the domain."""
  last = problem.domain_size - 1
  return [
    where(rank <= last, lookup(table_ref, jnp.minimum(rank, last)), missing)
    for rank in ranks_of(problem)
  ]
