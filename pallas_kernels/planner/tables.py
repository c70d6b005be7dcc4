"""What the planner kernels know: the problem, and the loads and orders of a domain.

Ranks of a domain lie in the lanes of a warp, several *parts* of them if the domain is larger;
every warp holds them all. Orders come from counting what goes before, ties go by index.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.warp.warps import (
  LANES,
  THREADS,
  chunks,
  divide,
  lookup,
  ones,
  padded,
  thread_index,
  unrolled,
  where,
)

Array = jax.Array
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
  def num_thresholds(self) -> int:
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
  def fields(self) -> int:
    """Parts of a candidate's placement: the expert and the tokens of each slot."""
    return 2 * self.num_slots * self.parts


class Tables(NamedTuple):
  """Vectors in shared memory, in domain order or in *heat* order: by falling load.

  An expert's place in heat order is that of its rank, then its own among those of the rank.
  """

  load: Any  # [R * M], of experts
  rank_load: Any  # [R]
  heat: Any  # [R], the place of a rank
  hot_rank: Any  # [R], the rank in a place
  hot_load: Any
  place: Any  # [R * M], of an expert among those of its rank
  key_load: Any  # [R * M], in heat order
  key_expert: Any  # [R * M], which expert of all
  best: Any  # [5 * 128], what the warps tell each other

  @staticmethod
  def sizes(problem: Problem) -> "Tables":
    ranks, experts = padded(problem.domain_size), padded(problem.domain_experts)
    return Tables(experts, ranks, ranks, ranks, ranks, experts, experts, experts, 5 * THREADS)


class Outcome(NamedTuple):
  """What a placement is judged by, each the same in all lanes of a warp, and the placement."""

  busiest: Array
  replicas: Array
  copies: Array  # the most that a rank sends or receives
  experts: list[Parts]  # per slot, -1 if empty
  tokens: list[Parts]


def sum_sources(load_ref: Any, table: Tables, domain: Array, problem: Problem) -> None:
  """Loads of the domain's experts, from all ranks."""
  experts = [
    jnp.minimum(i, problem.domain_experts - 1) + domain * problem.domain_experts
    for _, i in chunks(problem.domain_experts)
  ]

  def add(source: Array, totals: Parts) -> Parts:
    first = source * problem.num_experts
    return [t + lookup(load_ref, first + e) for t, e in zip(totals, experts, strict=True)]

  # As many loads under way as registers allow: they come from the cache of the whole GPU.
  most = max(1, 128 // len(experts))
  totals = unrolled(problem.num_ranks, add, [e * 0 for e in experts], min(most, 64))
  for (start, _), total in zip(chunks(problem.domain_experts), totals, strict=True):
    table.load[pl.ds(start, THREADS)] = total


def sort(table: Tables, domain: Array, problem: Problem) -> None:
  """Fills the tables. Orders come from counting what goes before; ties go by index."""
  ranks, experts, home = problem.domain_size, problem.domain_experts, problem.num_home
  for start, i in chunks(ranks):
    first = jnp.minimum(i, ranks - 1) * home
    load = unrolled(home, lambda m, x, first=first: x + lookup(table.load, first + m), i * 0)
    table.rank_load[pl.ds(start, THREADS)] = load
  for start, i in chunks(ranks):
    load = table.rank_load[pl.ds(start, THREADS)]

    def count(j: Array, before: Array, load: Array = load, i: Array = i) -> Array:
      other = table.rank_load[j]
      return before + ones((other > load) | ((other == load) & (j < i)))

    table.heat[pl.ds(start, THREADS)] = unrolled(ranks, count, i * 0)
  for start, i in chunks(ranks):

    def find(j: Array, found: Array, i: Array = i) -> Array:
      return where(table.heat[j] == i, j, found)

    rank = unrolled(ranks, find, i * 0)
    table.hot_rank[pl.ds(start, THREADS)] = rank
    table.hot_load[pl.ds(start, THREADS)] = lookup(table.rank_load, rank)
  for start, i in chunks(experts):
    i = jnp.minimum(i, experts - 1)
    load, own = lookup(table.load, i), divide(i, home)[1]

    def count_own(m: Array, before: Array, load=load, own=own, first=i - own) -> Array:
      other = lookup(table.load, first + m)
      return before + ones((other > load) | ((other == load) & (m < own)))

    table.place[pl.ds(start, THREADS)] = unrolled(home, count_own, i * 0)
  for start, i in chunks(experts):
    i = jnp.minimum(i, experts - 1)
    turn, place = divide(i, home)
    first = lookup(table.hot_rank, turn) * home

    def find_own(m: Array, found: Array, first=first, place=place) -> Array:
      return where(lookup(table.place, first + m) == place, first + m, found)

    expert = unrolled(home, find_own, i * 0)
    table.key_load[pl.ds(start, THREADS)] = lookup(table.load, expert)
    table.key_expert[pl.ds(start, THREADS)] = expert + domain * experts


def ranks_of(problem: Problem) -> Parts:
  lane = thread_index() & (LANES - 1)
  return [lane + LANES * part for part in range(problem.parts)]


def rank_loads(table: Tables, problem: Problem) -> tuple[Parts, Parts]:
  """Loads of the ranks and their places in heat order; 0 and none beyond the domain."""
  load, heat = [], []
  for rank in ranks_of(problem):
    inside, index = rank < problem.domain_size, jnp.minimum(rank, problem.domain_size - 1)
    load.append(where(inside, lookup(table.rank_load, index), 0))
    heat.append(where(inside, lookup(table.heat, index), -1))
  return load, heat
