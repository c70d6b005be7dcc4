"""The first planner kernel: each warp makes a candidate, each block hands on its best.

The last block of a domain makes the exact construction, where the slots suffice.

Loads 9, 3, 3, 1, so the mean is 4. Two candidates of one block; it reports the first::

  warp 0   threshold 4   one rule        ──►   busiest 4, 3 copies
  warp 1   threshold 5   another rule    ──►   busiest 5, 2 copies
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.planner import exact as plan_exact
from pallas_kernels.planner import greedy
from pallas_kernels.planner import tables as plan_tables
from pallas_kernels.planner.tables import (
  PROBES,
  Outcome,
  Placement,
  Problem,
  Tables,
  of_ranks,
)
from pallas_kernels.support import Array
from pallas_kernels.warp.branches import one_if, when
from pallas_kernels.warp.warps import (
  INT32_MAX,
  LANES,
  THREADS,
  any_of_warp,
  ceil_div,
  divide,
  each_piece,
  lookup,
  ones,
  over,
  store,
  thread_index,
  warp_max,
  warp_sum,
  where,
)

BLOCK_AXIS, DOMAIN_AXIS = "plan_block", "plan_domain"
# What a block reports of its best candidate.
ABOVE, VALUE, REPLICAS, COPIES, BUSIEST, WARP = range(6)


def kernel(
  load_ref: Any,
  steps_ref: Any,
  cost_ref: Any,
  total_ref: Any,
  report_ref: Any,
  slots_ref: Any,
  *tables: Any,
  problem: Problem,
) -> None:
  """Writes a domain's expert loads, each block's best candidate, and the placements of its warps.

  Args:
    load_ref: ``[G * E]`` int32.
    steps_ref: the steps, int32.
    cost_ref: ``[4]`` int32, rows: of a copy, of a round's capacity, of a copy on the links, and of
      a group.
    total_ref: ``[E]``, the loads of experts.
    report_ref: ``[N * blocks * report]``; of each block the first six tell its best candidate, and
      from the 128th on come the slots that its warps have filled, by rank.
    slots_ref: ``[N * blocks * 4 * placement]``, of each candidate an expert and its tokens for
      each slot; slots that are not filled hold anything.
    tables: ``Tables``.
    problem: the rest.
  """
  table = Tables(*tables)
  block, domain = lax.axis_index(BLOCK_AXIS), lax.axis_index(DOMAIN_AXIS)
  group = plan_tables.sum_loads(load_ref, cost_ref, table, domain, problem)

  @when(block == 0)
  def _() -> None:
    def write(i: Array) -> None:
      load = lookup(table.load, i)
      store(total_ref, domain * problem.domain_experts + i, load, ones(i < problem.domain_experts))

    each_piece(problem.domain_experts, write)

  index = domain * problem.blocks + block
  warp = divide(thread_index(), LANES)[0]

  def placement(candidate: Array) -> Placement:
    return Placement(slots_ref, (index * PROBES + candidate) * problem.placement)

  rows, groups = (of_ranks(x, 0, problem) for x in (table.rank_rows, table.rank_groups))
  load = plan_tables.weighted(rows, groups, group)
  total, zeros = over(warp_sum, load), [part * 0 for part in load]
  nothing = Outcome(over(warp_max, load), over(warp_max, rows), total * 0, total * 0, zeros)
  goal = _goal(total, problem)

  def report(outcome: Outcome) -> None:
    values = _values(outcome, goal, cost_ref, problem)
    _report(values, outcome, table.best, report_ref, index, problem)

  def report_one_of_probes() -> None:
    counted = group * greedy.counts_groups(block, problem)
    plan_tables.sort(table, domain, counted, problem)
    probe = greedy.choose_probe(rows, groups, counted, goal, block, steps_ref, cost_ref, problem)
    report(greedy.run(table, probe, group, placement(warp), problem))

  def report_construction() -> None:
    first = placement(warp * 0)  # the block's warps make one placement, and report the same
    report(plan_exact.construct(table, group, domain, first, problem))

  if not problem.searches:
    report_construction()
    return
  searching = one_if(_may_gain(nothing, total, goal, cost_ref, problem))
  constructing = one_if(block == problem.probe_blocks)
  makers = [lambda: report(nothing), report_one_of_probes, report_construction]
  lax.switch(searching * (1 + constructing), makers[: 2 + problem.constructs])


def _values(outcome: Outcome, goal: Array, cost_ref: Any, problem: Problem) -> tuple[Array, Array]:
  """Whether a second round is needed, and the cost."""
  value = jnp.maximum(outcome.busiest, goal)
  if not problem.by_time:
    return value * 0, value
  copy_rows, capacity, link_rows = (lookup(cost_ref, value * 0 + i) for i in range(3))
  value = jnp.maximum(value, _saturating_mul(outcome.copies, link_rows))
  value = _saturating_add(value, _saturating_mul(outcome.copies, copy_rows))
  return ones(outcome.rows > capacity), value


def _may_gain(
  outcome: Outcome, total: Array, goal: Array, cost_ref: Any, problem: Problem
) -> Array:
  """Whether a candidate with copies could be better than doing nothing.

  As ``may_gain`` in ``ultraep_jax/planning/search.py``, of one domain. ``outcome`` is that of doing
  nothing.
  """
  zero = total * 0
  mean = ceil_div(total, problem.domain_size)
  above, nothing = _values(outcome, goal, cost_ref, problem)
  _, least = _values(Outcome(mean, mean, zero + 1, zero + 1, []), goal, cost_ref, problem)
  return any_of_warp(above + ones(nothing > least))


def _goal(total: Array, problem: Problem) -> Array:
  """``ceil(target * mean)`` for the simplest fraction near the target; 0 without."""
  parts = problem.domain_size
  ratio = Fraction(problem.target or 0)
  ratio = min(ratio, Fraction(parts)).limit_denominator(INT32_MAX // (3 * parts))
  divisor = ratio.denominator * parts
  whole, part = divide(total, divisor)
  quotient = remainder = total * 0
  for bit in f"{ratio.numerator:b}":
    remainder = 2 * remainder + part * int(bit)
    more, remainder = divide(remainder, divisor)
    quotient = 2 * quotient + whole * int(bit) + more
  return quotient + ones(remainder > 0)


def _saturating_mul(left: Array, right: Array) -> Array:
  fits = left <= divide(left * 0 + INT32_MAX, jnp.maximum(right, 1))[0]
  return where(fits, left * right, INT32_MAX)


def _saturating_add(left: Array, right: Array) -> Array:
  return left + jnp.minimum(right, INT32_MAX - left)


def before(left: Sequence[Array], right: Sequence[Array]) -> Array:
  """Whether the keys ``left`` come before ``right``, compared in order."""
  *front, (x, y) = zip(left, right, strict=True)
  result = x < y
  for x, y in reversed(front):
    result = (x < y) | ((x == y) & result)
  return result


def _report(
  values: tuple[Array, Array],
  outcome: Outcome,
  best_ref: Any,
  report_ref: Any,
  index: Array,
  problem: Problem,
) -> None:
  """Writes the first best of the block's warps, and what all have filled."""
  thread = thread_index()
  own = (*values, outcome.replicas, outcome.copies, outcome.busiest)
  for place, key in enumerate(own):
    best_ref[pl.ds(place * THREADS, THREADS)] = key
  best: list[Array] = []
  for warp in range(PROBES):
    first = thread * 0 + warp * LANES
    keys = [lookup(best_ref, first + place * THREADS) for place in range(len(own))]
    keys.append(thread * 0 + warp)
    if warp:
      wins = before(keys[:-1], best[:-1])
      keys = [where(wins, new, old) for new, old in zip(keys, best, strict=True)]
    best = keys
  line = thread * 0
  for place, key in enumerate(best):
    line = where(thread == place, key, line)
  for place, numbers in enumerate([line, *outcome.filled]):
    first = index * problem.report + place * THREADS
    store(report_ref, first + thread, numbers, thread * 0 + 1)
