"""Exact balance by construction, where every rank has as many slots as home experts (S >= M).

The same steps as in ``ultraep_jax/exact.py``, which explains them, bit for bit. A warp holds each
rank's remaining loads in the rank's lane.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.planner.tables import Outcome, Parts, Problem, Tables, rank_loads, ranks_of
from pallas_kernels.warp.warps import (
  INT32_MAX,
  any_of_warp,
  ceil_div,
  clip,
  lookup,
  ones,
  over,
  warp_max,
  warp_min,
  warp_sum,
  where,
)

Array = jax.Array

_add = functools.partial(functools.reduce, jnp.add)


class _State(NamedTuple):
  load: Parts
  left: list[Parts]  # per home expert of the rank in the lane
  copies: list[Parts]
  has_end: Parts  # bit m: home expert m has a copy that is forwarded by nobody
  forwards: Parts
  experts: list[Parts]
  tokens: list[Parts]


def _bit(index: int) -> int:
  """That bit of an int32, of which the last is the sign."""
  return 1 << index if index < 31 else -(1 << 31)


def construct(table: Tables, total: Array, domain: Array, problem: Problem) -> Outcome:
  """While a rank is above the mean it gives the least loaded rank its whole deficit."""
  ranks, home, parts = ranks_of(problem), range(problem.num_home), range(problem.parts)
  load, heat = rank_loads(table, problem)
  zero = load[0] * 0
  cap = ceil_div(total, problem.domain_size)
  inside = [h >= 0 for h in heat]
  left = [
    [
      lookup(table.load, jnp.minimum(rank, problem.domain_size - 1) * problem.num_home + m)
      for rank in ranks
    ]
    for m in home
  ]
  zeros = [zero for _ in ranks]
  none = [zeros for _ in home]
  empty = [[zero - 1 for _ in ranks] for _ in home]

  def step(state: _State) -> _State:
    most = over(warp_max, state.load)
    open_load = [where(i, x, INT32_MAX) for i, x in zip(inside, state.load, strict=True)]
    least = over(warp_min, open_load)
    active = most > cap
    deficit = where(active, cap - least, 0)

    def first_with(loads: Parts, load: Array) -> Array:
      return over(
        warp_min, [where(x == load, r, INT32_MAX) for x, r in zip(loads, ranks, strict=True)]
      )

    giver, receiver = first_with(state.load, most), first_with(open_load, least)
    given, order = [], []
    for part, rank in enumerate(ranks):
      lefts = [state.left[m][part] for m in home]
      before_M, place_M = [], []
      for m in home:
        before = place = zero
        for j in home:
          if j != m:
            larger = lefts[j] >= lefts[m] if j < m else lefts[j] > lefts[m]
            before, place = before + where(larger, lefts[j], 0), place + ones(larger)
        before_M.append(before)
        place_M.append(place)
      deficit_here = where(rank == giver, deficit, 0)
      given.append([clip(deficit_here - before_M[m], lefts[m]) for m in home])
      order.append(place_M)
    gives = [[ones(given[p][m] > 0) for p in parts] for m in home]
    receives = [active & (rank == receiver) for rank in ranks]
    has_end, forwards = state.has_end, state.forwards
    if not problem.count_copies:
      # As in greedy placement, the first copy of an expert that a giver receives ends a chain.
      copies = [_add([state.copies[m][p] for m in home]) for p in parts]
      by_giver = over(warp_max, [where(r, c, 0) for r, c in zip(receives, copies, strict=True)])
      given_bits = [_add([where(gives[m][p] > 0, _bit(m), 0) for m in home]) for p in parts]
      again = [[ones((has_end[p] & given_bits[p] & _bit(m)) != 0) for m in home] for p in parts]
      count = where(by_giver > 0, over(warp_sum, [_add(x) for x in again]), 0)
      forwards = [x + where(r, count, 0) for x, r in zip(forwards, receives, strict=True)]
      has_end = [
        x | where(by_giver > 0, bits, 0) for x, bits in zip(has_end, given_bits, strict=True)
      ]
    experts, tokens = [], []
    for place in home:  # of the giver's experts, the one in this place
      here = [[where(order[part][m] == place, given[part][m], 0) for m in home] for part in parts]
      amount = over(warp_sum, [_add(x) for x in here])
      own = over(
        warp_sum,
        [_add([where(x[m] > 0, m, 0) for m in home]) for x in here],
      )
      expert = (domain * problem.domain_size + giver) * problem.num_home + own
      expert = where(amount > 0, expert, -1)
      experts.append(
        [where(r, expert, old) for r, old in zip(receives, state.experts[place], strict=True)]
      )
      tokens.append(
        [where(r, amount, old) for r, old in zip(receives, state.tokens[place], strict=True)]
      )
    return _State(
      load=[
        x + where(rank == receiver, deficit, 0) - where(rank == giver, deficit, 0)
        for x, rank in zip(state.load, ranks, strict=True)
      ],
      left=[[state.left[m][p] - given[p][m] for p in parts] for m in home],
      copies=[[state.copies[m][p] + gives[m][p] for p in parts] for m in home],
      has_end=has_end,
      forwards=forwards,
      experts=experts,
      tokens=tokens,
    )

  def above(state: _State) -> Array:
    return any_of_warp(_add([ones(x > cap) for x in state.load]))

  state = lax.while_loop(above, step, _State(load, left, none, zeros, zeros, empty, none))
  filled = [_add([ones(state.experts[m][p] >= 0) for m in home]) for p in parts]
  sent = state.copies
  if not problem.count_copies:
    sent = [[jnp.minimum(c, 1) for c in copies] for copies in sent]
    sent.append(state.forwards)
  sends = [_add([copies[p] for copies in sent]) for p in parts]
  unused = range(problem.num_slots - problem.num_home)
  return Outcome(
    busiest=over(warp_max, state.load),
    replicas=over(warp_sum, filled),
    copies=over(warp_max, filled + sends),
    experts=(state.experts + [empty[0] for _ in unused])[: problem.num_slots],
    tokens=(state.tokens + [none[0] for _ in unused])[: problem.num_slots],
  )
