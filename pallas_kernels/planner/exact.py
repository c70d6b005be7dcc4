"""Exact balance by construction, with slots that suffice for every load.

The same steps as in ``ultraep_jax/planning/exact.py``, which explains them, bit for bit. A block
makes one construction: each warp holds all ranks in its lanes, and the threads of the block are
the experts of the rank that gives.

Loads 9, 3, 3, 1, so cap 4. The most loaded rank fills the least loaded one, which is then done::

  9 3 3 1   rank 0 gives 3 to rank 3   ──►   6 3 3 ·
  6 3 3 ·   rank 0 gives 1 to rank 1   ──►   5 · 3 ·
  5 · 3 ·   rank 0 gives 1 to rank 2   ──►   4 · · ·
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels.planner.tables import (
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
from pallas_kernels.warp.scatter import barrier, fill, put_at
from pallas_kernels.warp.warps import (
  INT32_MAX,
  any_of_warp,
  ceil_div,
  chunks,
  clip,
  divide,
  lookup,
  ones,
  over,
  over_all,
  unrolled,
  warp_max,
  warp_min,
  warp_sum,
  where,
)

_COPIED, _ENDED = 1, 2  # marks of an expert with copies; ended: one of them is forwarded by nobody
_UNIT = 1 << 16  # two numbers in one int32: shared memory holds fewer experts


class _State(NamedTuple):
  rows: Parts
  filled: Parts
  sends: Parts


class _Gift(NamedTuple):
  """What the giver gives of 128 of its experts."""

  given: Array  # bool
  expert: Array
  left: Array
  mark: Array
  mark_before: Array


def construct(
  table: Tables, group: Array, domain: Array, placement: Placement, problem: Problem
) -> Outcome:
  """While a rank is above the mean it gives the least loaded rank its whole deficit.

  ``table.load`` ends as what is left at home; the marks lie in ``table.key_load``. The outcome's
  loads are rows and ``group`` for each group of them.
  """
  ranks, rows = ranks_of(problem), of_ranks(table.rank_rows, 0, problem)
  zeros = [rank * 0 for rank in ranks]
  cap = ceil_div(over(warp_sum, rows), problem.domain_size)
  fill(table.key_load, problem.domain_experts, 0)
  barrier()

  def first_with(value: Array, values: Parts) -> Array:
    found = [where(x == value, r, INT32_MAX) for r, x in zip(ranks, values, strict=True)]
    return over(warp_min, found)

  def plus(values: Parts, rank: Array, more: Array) -> Parts:
    return [x + where(r == rank, more, 0) for r, x in zip(ranks, values, strict=True)]

  def step(state: _State) -> _State:
    beyond = [where(r < problem.domain_size, r * 0, INT32_MAX) for r in ranks]
    open_rows = [jnp.maximum(x, y) for x, y in zip(state.rows, beyond, strict=True)]
    most, least = over(warp_max, state.rows), over(warp_min, open_rows)
    giver, receiver = first_with(most, state.rows), first_with(least, open_rows)
    deficit = cap - least
    # As in greedy placement, the first copy of an expert that a giver receives ends a chain.
    sent = [where(r == receiver, x, 0) for r, x in zip(ranks, state.sends, strict=True)]
    ends = ones(over(warp_max, sent) > 0)
    if problem.count_copies:
      ends = ends * 0
    gifts = []
    for _, m in chunks(problem.num_home):
      gift, tokens, place = _give(table, giver, m, deficit, ends, problem)
      slot = receiver * problem.num_slots + place
      expert = gift.expert + domain * problem.domain_experts
      placement.put(slot, expert, tokens, gift.given)
      gifts.append(gift)
    # All threads have read before any writes: sums over warps are barriers, too.
    counts = [ones(g.given) + _UNIT * ones(g.given & (g.mark_before == 0)) for g in gifts]
    again = [ones(g.given & (g.mark_before == _ENDED)) for g in gifts]
    firsts, filled = divide(over_all(warp_sum, counts, table.best), _UNIT)
    forwards = over_all(warp_sum, again, table.best) * ends
    for gift in gifts:
      put_at(table.load, gift.expert, gift.left, gift.given)
      put_at(table.key_load, gift.expert, gift.mark, gift.given)
    barrier()
    sends = plus(state.sends, giver, filled if problem.count_copies else firsts)
    return _State(
      rows=plus(plus(state.rows, receiver, deficit), giver, -deficit),
      filled=plus(state.filled, receiver, filled),
      sends=plus(sends, receiver, forwards),
    )

  def above(state: _State) -> Array:
    return any_of_warp(ones(over(warp_max, state.rows) > cap))

  state = lax.while_loop(above, step, _State(rows, zeros, zeros))
  groups = _home_groups(table, problem) if problem.by_time else zeros
  groups = [x + y for x, y in zip(groups, state.filled, strict=True)]
  return Outcome(
    busiest=over(warp_max, weighted(state.rows, groups, group)),
    rows=over(warp_max, state.rows),
    replicas=over(warp_sum, state.filled),
    copies=over(warp_max, state.filled + state.sends),
    filled=state.filled,
  )


def _home_groups(table: Tables, problem: Problem) -> Parts:
  """Of each rank, its experts that have rows at home."""
  home, last = problem.num_home, problem.domain_size - 1

  def count(rank: Array) -> Array:
    first = jnp.minimum(rank, last) * home
    groups = unrolled(home, lambda m, n: n + ones(lookup(table.load, first + m) > 0), rank * 0)
    return where(rank <= last, groups, 0)

  return [count(rank) for rank in ranks_of(problem)]


def _give(
  table: Tables, giver: Array, m: Array, deficit: Array, ends: Array, problem: Problem
) -> tuple[_Gift, Array, Array]:
  """The gift of the experts ``m``, the tokens, and the experts' places in falling order."""
  home = problem.num_home
  inside, m = m < home, jnp.minimum(m, home - 1)
  first = giver * home
  left, mark = lookup(table.load, first + m), lookup(table.key_load, first + m)

  def count(j: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
    before, place = sums
    other = lookup(table.load, first + j)
    goes_first = other > left - ones(j < m)  # of equals, the earlier
    return before + where(goes_first, other, 0), place + ones(goes_first)

  before, place = unrolled(home, count, (m * 0, m * 0))
  tokens = clip(deficit - before, left)
  gift = _Gift(
    given=inside & (tokens > 0),
    expert=first + m,
    left=left - tokens,
    mark=jnp.maximum(mark, _COPIED + ends),
    mark_before=mark,
  )
  return gift, tokens, place
