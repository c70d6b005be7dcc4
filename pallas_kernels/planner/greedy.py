"""Greedy placement of replicas by one threshold and one rule, a probe in each warp.

The same steps as in ``ultraep_jax/planning/greedy.py``, which explains them, bit for bit.

Loads 9, 3, 3, 1 of four ranks, threshold 4 (the mean), one slot each. Rank 0 has experts of 5 and
4, and a piece goes to the largest slack::

  excess of rank 0 is 5, slack is 1, 1, 3
  5's expert: 3 to rank 3     9 3 3 1 ──► 6 3 3 4
              1 to rank 1             ──► 5 4 3 4
              1 to rank 2             ──► 4 4 4 4
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels.planner.tables import (
  PROBES,
  RULES,
  Outcome,
  Parts,
  Placement,
  Problem,
  Tables,
  of_ranks,
  ranks_of,
  weighted,
)
from pallas_kernels.support import Array
from pallas_kernels.warp.branches import one_if
from pallas_kernels.warp.warps import (
  INT32_MAX,
  LANES,
  any_of_warp,
  ceil_div,
  clip,
  divide,
  lookup,
  ones,
  over,
  shift_right,
  thread_index,
  warp_max,
  warp_min,
  warp_sum,
  where,
)

# Rules in order: sources from hot to cold or back, which rank takes, what a source gives.
_EVEN, _WHOLE, _WHOLE_EVEN = range(3)


class Probe(NamedTuple):
  """One probe's threshold and rule, the same in all lanes."""

  threshold: Array
  group: Array  # rows that a group counts
  direction: Array  # 1 from hot to cold, -1 back
  sources: Array  # ranks above the threshold
  fits: Array  # 1: the smallest slack that suffices takes, 0: the largest
  kind: Array


class _State(NamedTuple):
  rows: Parts
  groups: Parts
  empty: Parts
  turn: Array  # the source's place in heat order
  turns: Array  # sources to come, this one counted
  key: Array  # the expert's place in heat order
  need: Array  # load of the source above the threshold
  left: Array  # of the current expert
  first: Array  # 1 until a piece of the current expert has been taken
  has_end: Array  # 1 once a source has taken a piece of the current expert
  sends: Parts
  replicas: Array
  alive: Array  # whether the last step could change anything


def counts_groups(block: Array, problem: Problem) -> Array:
  """0 in blocks of the last threshold, which by time is the rows that a round holds; else 1."""
  return one_if(block < (problem.num_thresholds - 1) * RULES // PROBES)


def choose_probe(
  rows: Parts,
  groups: Parts,
  group: Array,
  goal: Array,
  block: Array,
  steps_ref: Any,
  cost_ref: Any,
  problem: Problem,
) -> Probe:
  """The threshold and rule of each warp of a block; see ``kernel`` of ``probes.py``.

  Args:
    rows: of ranks.
    groups: of ranks.
    group: rows that a group counts in this block.
    goal: what ``target`` asks for.
    block: this one.
    steps_ref: see there, as the rest.
    cost_ref: likewise.
    problem: likewise.
  """
  probe = block * PROBES + divide(thread_index(), LANES)[0]
  index, rule = divide(probe, RULES)
  columns, kind = divide(rule, 3)
  load = weighted(rows, groups, group)
  mean = ceil_div(over(warp_sum, load), problem.domain_size)
  busiest = over(warp_max, load)
  threshold = mean
  if problem.num_thresholds > 1:
    special = [mean]
    if problem.target is not None:
      special.append(goal)
    if problem.by_time:
      special.append(lookup(cost_ref, probe * 0 + 1))
    step = lookup(steps_ref, jnp.minimum(index, len(problem.steps) - 1))
    span = busiest - mean
    # span * step / 2^15 rounded up, without an intermediate product beyond int32.
    low = shift_right((span & 0x7FFF) * step + 0x7FFF, 15)
    threshold = mean + shift_right(span, 15) * step + low
    for place, value in enumerate(special, len(problem.steps)):
      threshold = where(index == place, value, threshold)
    threshold = jnp.minimum(jnp.maximum(threshold, mean), busiest)
  return Probe(
    threshold=threshold,
    group=group,
    direction=where(rule < RULES // 2, rule * 0 + 1, -1),
    sources=over(warp_sum, [ones(part > threshold) for part in load]),
    fits=columns & 1,
    kind=kind,
  )


def run(
  table: Tables, probe: Probe, group: Array, placement: Placement, problem: Problem
) -> Outcome:
  """Makes all steps of each warp's probe; ``group``: rows that a group costs."""
  rows, groups = (of_ranks(x, 0, problem) for x in (table.rank_rows, table.rank_groups))
  heat = of_ranks(table.heat, -1, problem)
  zero = rows[0] * 0
  zeros = [zero for _ in rows]
  empty = [where(h >= 0, zero + problem.num_slots, 0) for h in heat]
  turn = where(probe.direction > 0, 0, jnp.maximum(probe.sources - 1, 0))
  key = turn * problem.num_home
  need = lookup(table.hot_load, turn) - probe.threshold
  left, one = lookup(table.key_load, key), zero + 1
  turns = probe.sources
  state = _State(rows, groups, empty, turn, turns, key, need, left, one, zero, zeros, zero, one)
  step = functools.partial(_step, table, probe, heat, placement, problem)
  state = lax.while_loop(lambda state: any_of_warp(state.alive), step, state)
  filled = [where(h >= 0, problem.num_slots - e, 0) for h, e in zip(heat, state.empty, strict=True)]
  return Outcome(
    busiest=over(warp_max, weighted(state.rows, state.groups, group)),
    rows=over(warp_max, state.rows),
    replicas=state.replicas,
    copies=over(warp_max, filled + state.sends),
    filled=filled,
  )


def _step(
  table: Tables,
  probe: Probe,
  heat: Parts,
  placement: Placement,
  problem: Problem,
  state: _State,
) -> _State:
  """Moves one piece, or goes on to the next expert or source if it cannot.

  The piece is ``left`` or ``min(max(need, floor), left)``. A need spread evenly over the empty
  slots is no more than the need itself, so the piece is known without the division, and whether
  it reaches the spread need, ``tokens >= ceil(need / slots)``, is asked as
  ``tokens * slots >= need``.
  """
  home, threshold, group = problem.num_home, probe.threshold, probe.group
  need, left = state.need, state.left
  # What follows is looked up before it is known which of it is needed.
  last_key = problem.domain_experts - 1
  next_left = lookup(table.key_load, jnp.minimum(state.key + 1, last_key))
  next_turn = clip(state.turn + probe.direction, problem.domain_size - 1)
  next_need = lookup(table.hot_load, next_turn) - threshold
  first_left = lookup(table.key_load, next_turn * home)
  expert = lookup(table.key_expert, state.key)

  slack = [
    where(empty > 0, jnp.maximum(threshold - group - load, 0), 0)
    for load, empty in zip(weighted(state.rows, state.groups, group), state.empty, strict=True)
  ]
  most = over(warp_max, slack)
  slots = over(
    warp_sum,
    [where(s > 0, empty, 0) for s, empty in zip(slack, state.empty, strict=True)],
  )
  # With no slack anywhere nothing will ever move again.
  active = (state.turns > 0) & (most > 0)
  piece = jnp.minimum(jnp.maximum(need, min(problem.min_tokens, INT32_MAX)), left)
  piece = where(probe.kind == _EVEN, piece, left)
  least_fit = over(warp_min, [where(s >= piece, s, INT32_MAX) for s in slack])
  wanted = where((probe.fits > 0) & (most >= piece), least_fit, most)
  ranks = ranks_of(problem)
  taker = over(
    warp_min,
    [where(s == wanted, rank, INT32_MAX) for s, rank in zip(slack, ranks, strict=True)],
  )
  tokens = jnp.minimum(piece, most)
  moves = active & (tokens >= min(problem.min_tokens, INT32_MAX))
  moves &= (probe.kind == _WHOLE) | _product_reaches(tokens, slots, need)
  tokens = where(moves, tokens, 0)
  whole = moves & (tokens == left)
  given = tokens + where(whole, group, 0)

  last_place = divide(state.key, home)[1] == home - 1
  first = state.first > 0
  expert_done = ~moves | (tokens == left)
  # If nobody takes a first piece of this expert, nobody takes one of a smaller expert.
  source_done = (given >= need) | (~moves & first) | (expert_done & last_place)
  source_done, expert_done = active & source_done, active & (expert_done | source_done)

  takes = [(rank == taker) & moves for rank in ranks]
  counts = ones(moves if problem.count_copies else moves & first)
  sends = [
    s + where(place == state.turn, counts, 0) for s, place in zip(state.sends, heat, strict=True)
  ]
  has_end = state.has_end
  if not problem.count_copies:
    # A source holds the end of an expert's chain, or has to forward its copy.
    by_source = [ones(take & (s > 0)) for take, s in zip(takes, state.sends, strict=True)]
    sends = [s + where(has_end > 0, by, 0) for s, by in zip(sends, by_source, strict=True)]
    has_end = where(expert_done, 0, jnp.maximum(has_end, over(warp_max, by_source)))
  for rank, empty, take in zip(ranks, state.empty, takes, strict=True):
    placement.put((rank + 1) * problem.num_slots - empty, expert, tokens, take)

  def moved(values: Parts, taken: Array, given: Array) -> Parts:
    return [
      value + where(take, taken, 0) - where(place == state.turn, given, 0)
      for value, take, place in zip(values, takes, heat, strict=True)
    ]

  return _State(
    rows=moved(state.rows, tokens, tokens),
    groups=moved(state.groups, tokens * 0 + 1, ones(whole)),
    empty=[empty - ones(take) for empty, take in zip(state.empty, takes, strict=True)],
    turn=where(source_done, next_turn, state.turn),
    turns=state.turns - ones(source_done),
    key=where(source_done, next_turn * home, state.key + ones(expert_done)),
    need=where(source_done, next_need, need - given),
    left=where(source_done, first_left, where(expert_done, next_left, left - tokens)),
    first=where(expert_done, 1, where(moves, 0, state.first)),
    has_end=has_end,
    sends=sends,
    replicas=state.replicas + ones(moves),
    alive=ones(active),
  )


def _product_reaches(left: Array, right: Array, limit: Array) -> Array:
  """``left * right >= limit`` without overflow, for ``right`` below 2^15."""
  low = (left & 0xFFFF) * right
  high, limit_high = shift_right(left, 16) * right + shift_right(low, 16), shift_right(limit, 16)
  return (high > limit_high) | ((high == limit_high) & ((low & 0xFFFF) >= (limit & 0xFFFF)))
