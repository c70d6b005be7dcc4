"""The first planner kernel: each warp makes a candidate, each block hands on its best.

The last block of a domain makes the exact construction, where the slots suffice.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.planner import exact as plan_exact
from pallas_kernels.planner import greedy
from pallas_kernels.planner import tables as plan_tables
from pallas_kernels.planner.tables import PROBES, Outcome, Problem, Tables, rank_loads
from pallas_kernels.warp.branches import when
from pallas_kernels.warp.warps import (
  INT32_MAX,
  LANES,
  THREADS,
  chunks,
  divide,
  lookup,
  ones,
  over,
  padded,
  store,
  thread_index,
  warp_sum,
  where,
)

Array = jax.Array

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
    cost_ref: ``[2]`` int32, rows: of a copy, of a round's capacity.
    total_ref: ``[N * padded(R * M)]``, the loads of experts.
    report_ref: ``[N * blocks * 128]``; of each block's 128 the first six are used.
    slots_ref: ``[N * blocks * fields * 128]``, per slot and part the experts, then the tokens.
    tables: ``Tables``.
    problem: the rest.
  """
  table = Tables(*tables)
  block, domain = lax.axis_index(BLOCK_AXIS), lax.axis_index(DOMAIN_AXIS)
  plan_tables.sum_sources(load_ref, table, domain, problem)

  @when(block == 0)
  def _() -> None:
    for start, _ in chunks(problem.domain_experts):
      first = domain * padded(problem.domain_experts) + start
      total_ref[pl.ds(first, THREADS)] = table.load[pl.ds(start, THREADS)]

  plan_tables.sort(table, domain, problem)

  def report(outcome: Outcome, goal: Array) -> None:
    value = jnp.maximum(outcome.busiest, goal)
    above = value * 0
    if problem.by_time:
      copy_rows, capacity = (lookup(cost_ref, value * 0 + i) for i in range(2))
      above = ones(outcome.busiest > capacity)
      value = _saturating_add(value, _saturating_mul(outcome.copies, copy_rows))
    index = domain * problem.blocks + block
    _report((above, value), outcome, table.best, report_ref, slots_ref, index, problem)

  @when(block < problem.probe_blocks)
  def _() -> None:
    load, _ = rank_loads(table, problem)
    total = over(warp_sum, load)
    goal = _goal(total, problem)
    probe = greedy.choose_probe(load, total, goal, block, steps_ref, cost_ref, problem)
    report(greedy.run(table, probe, problem), goal)

  if problem.constructs:

    @when(block == problem.probe_blocks)
    def _() -> None:
      load, _ = rank_loads(table, problem)
      total = over(warp_sum, load)
      report(plan_exact.construct(table, total, domain, problem), _goal(total, problem))


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
  slots_ref: Any,
  index: Array,
  problem: Problem,
) -> None:
  """Writes the first best of the block's warps, and the placements of all."""
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
  always = thread * 0 + 1
  store(report_ref, index * THREADS + thread, line, always)
  first = index * (problem.fields * THREADS) + thread
  for slot in range(problem.num_slots):
    for part in range(problem.parts):
      field = 2 * (slot * problem.parts + part)
      for offset, values in enumerate((outcome.experts, outcome.tokens)):
        store(slots_ref, first + (field + offset) * THREADS, values[slot][part], always)
