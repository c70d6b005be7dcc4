"""Greedy placement of replicas: many thresholds and rules, tried side by side.

A probe fixes a threshold and a rule. Ranks above the threshold give their excess away, piece by
piece, to ranks below it that have an empty replica slot. Whether this succeeds is not monotone in
the threshold, and no rule is best everywhere, so every probe runs to its end, one piece per step,
and ``plan.py`` judges what each ends with. A probe that cannot place all its excess is judged
like the others: what it has placed is a legal plan.

A rank may give more than its excess, if a rule moves whole experts, and then take from others.
One that takes has no more to give: it is never above the threshold again.

A rank's *load* is its rows, and what its *groups* cost in rows: its experts that have any, and the
copies that it holds (``PlanCost.group_rows``). An expert that is given away whole takes its group
along. Without a cost of groups, loads are rows; a probe for what fits a round counts rows alone.

Shapes: N domains, R ranks of a domain, M experts of a rank, S slots of a rank, B probes of all
domains. A *key* names an expert by its home rank and its place there in falling order of load.
"""

import itertools
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from ultraep_jax.planning.integers import INT32_MAX
from ultraep_jax.types import Array

# What a source gives: pieces of what it needs to give, each at least that spread over the empty
# slots (EVEN), all that is left of its expert (WHOLE), or such pieces that are also that large
# (WHOLE_EVEN). A taker that a whole expert fills up takes one copy, of one home: so does the
# alias method that ``exact.py`` is made after.
_EVEN, _WHOLE, _WHOLE_EVEN = range(3)
# Sources take turns from hot to cold or from cold to hot; a piece goes to the largest slack or to
# the smallest that suffices, if one does; what a source gives. On the same budget of probes
# twelve rules end lower than eight (without _WHOLE_EVEN) at more thresholds.
RULES = tuple(itertools.product((True, False), (False, True), (_EVEN, _WHOLE, _WHOLE_EVEN)))


class Loads(NamedTuple):
  """Home loads of every domain, and the orders in which they are given away (int32).

  Attributes:
    rows_NR: rows of each rank.
    groups_NR: experts of each rank that have rows.
    group_N: rows that a group costs.
    hottest_NR: ranks in falling order of load.
    fullest_NR: ranks in falling order of rows.
    expert_NRM: rows of a rank's experts, falling.
    index_NRM: the expert in that place, in ``[0, M)``.
  """

  rows_NR: Array
  groups_NR: Array
  group_N: Array
  hottest_NR: Array
  fullest_NR: Array
  expert_NRM: Array
  index_NRM: Array

  @property
  def rank_NR(self) -> Array:
    """Load of each rank."""
    return weighted(self.rows_NR, self.groups_NR, self.group_N)


class Probes(NamedTuple):
  """What to try.

  Attributes:
    domain_B: int32, the domain that is planned.
    threshold_B: int32, the load down to which ranks give and up to which they take.
    rule_B: int32, index into ``RULES``.
    group_B: int32, rows that a group counts: what it costs, or 0.
  """

  domain_B: Array
  threshold_B: Array
  rule_B: Array
  group_B: Array


class Outcome(NamedTuple):
  """What a placement is judged by, int32, any shape.

  Attributes:
    busiest: load of the busiest rank.
    rows: the most rows of a rank.
    replicas: copies made.
    copies: the most that a rank has to send or to receive, as ``plan_quotas`` counts them.
  """

  busiest: Array
  rows: Array
  replicas: Array
  copies: Array


class _State(NamedTuple):
  load_BR: Array
  whole_BR: Array  # experts that the rank has given away whole
  empty_BR: Array  # empty slots
  turn_B: Array  # sources that are done
  place_B: Array  # place of the current expert on the current source
  given_B: Array  # load that the current source has given away
  taken_B: Array  # of these, tokens of the current expert
  has_end_B: Array  # whether the current expert has a copy that is forwarded by nobody
  sends_BR: Array  # copies that the rank sends, but for those that ranks without turn forward
  replicas_B: Array


class _Piece(NamedTuple):
  """What a probe moves in one step; nothing if ``tokens_B`` is 0."""

  key_B: Array
  rank_B: Array
  tokens_B: Array


class _Search(NamedTuple):
  loads: Loads
  probes: Probes
  load_BR: Array  # as the probe counts it
  order_BR: Array  # ranks in falling order of it
  sources_B: Array  # ranks above the threshold
  hot_first_B: Array  # the columns of RULES
  fits_B: Array
  kind_B: Array


def sort_loads(load_NRM: Array, num_slots: int, group_rows: Array | int = 0) -> Loads:
  """Orders ranks and experts by falling load, ties by index.

  Args:
    load_NRM: rows of experts.
    num_slots: S.
    group_rows: rows that a group costs; less where loads would not fit int32.
  """
  rows_NR, groups_NR, group_N = weigh(load_NRM, num_slots, group_rows)
  rank_NR = weighted(rows_NR, groups_NR, group_N)
  hottest_NR, fullest_NR = (
    jnp.argsort(-keys_NR, axis=-1, stable=True).astype(jnp.int32) for keys_NR in (rank_NR, rows_NR)
  )
  index_NRM = jnp.argsort(-load_NRM, axis=-1, stable=True).astype(jnp.int32)
  expert_NRM = jnp.take_along_axis(load_NRM, index_NRM, axis=-1)
  return Loads(rows_NR, groups_NR, group_N, hottest_NR, fullest_NR, expert_NRM, index_NRM)


def weigh(load_NRM: Array, num_slots: int, group_rows: Array | int) -> tuple[Array, Array, Array]:
  """Rows and groups of ranks, ``[N, R]``, and rows that a group costs, ``[N]``."""
  _, size, per_rank = load_NRM.shape
  rows_NR = jnp.sum(load_NRM, axis=-1, dtype=jnp.int32)
  groups_NR = jnp.sum(load_NRM > 0, axis=-1, dtype=jnp.int32)
  room_N = INT32_MAX - jnp.sum(rows_NR, axis=-1, dtype=jnp.int32)
  return rows_NR, groups_NR, jnp.minimum(group_rows, room_N // (size * (per_rank + num_slots)))


def weighted(rows_NR: Array, groups_NR: Array, group_N: Array) -> Array:
  """Loads of ranks, of domains or of probes."""
  return rows_NR + group_N[:, None] * groups_NR


def run(
  loads: Loads, probes: Probes, num_slots: int, min_tokens: int, count_copies: bool
) -> Outcome:
  """Runs all probes.

  Args:
    loads: home loads.
    probes: what to try.
    num_slots: S.
    min_tokens: no copy serves fewer tokens.
    count_copies: homes send every copy themselves.

  Returns:
    ``[B]`` outcomes.
  """
  search = _search(loads, probes)

  def body(state: _State) -> _State:
    return _step(search, state, min_tokens, count_copies)[0]

  state = lax.while_loop(
    lambda state: jnp.any(_active(search, state)), body, _start(search, num_slots)
  )
  groups_BR = loads.groups_NR[probes.domain_B] + num_slots - state.empty_BR - state.whole_BR
  rows_BR = state.load_BR - probes.group_B[:, None] * groups_BR
  return Outcome(
    busiest=jnp.max(weighted(rows_BR, groups_BR, loads.group_N[probes.domain_B]), axis=-1),
    rows=jnp.max(rows_BR, axis=-1),
    replicas=state.replicas_B,
    copies=jnp.max(jnp.maximum(num_slots - state.empty_BR, state.sends_BR), axis=-1),
  )


def place(loads: Loads, probes: Probes, num_slots: int, min_tokens: int) -> tuple[Array, Array]:
  """Runs a few probes again and keeps their placements, which ``run`` would carry for all.

  Returns:
    ``[B, R, S]`` int32, the expert copied into each slot, in ``[0, R * M)``, −1 if empty; and
    ``[B, R, S]`` int32, the tokens that the copy serves.
  """
  search = _search(loads, probes)
  start = _start(search, num_slots)
  per_rank = loads.index_NRM.shape[-1]
  rank_BR = lax.broadcasted_iota(jnp.int32, start.load_BR.shape, 1)
  slot_BRS = lax.broadcasted_iota(jnp.int32, (*start.load_BR.shape, num_slots), 2)

  def body(carry: tuple[_State, Array, Array]) -> tuple[_State, Array, Array]:
    state, expert_BRS, tokens_BRS = carry
    after, piece = _step(search, state, min_tokens, count_copies=False)
    home_B = piece.key_B // per_rank
    expert_B = home_B * per_rank + _lookup(loads.index_NRM, probes.domain_B, piece.key_B)
    next_BR = jnp.where(rank_BR == piece.rank_B[:, None], num_slots - state.empty_BR, -1)
    next_BR = jnp.where(piece.tokens_B[:, None] > 0, next_BR, -1)
    fills_BRS = slot_BRS == next_BR[:, :, None]
    expert_BRS = jnp.where(fills_BRS, expert_B[:, None, None], expert_BRS)
    tokens_BRS = jnp.where(fills_BRS, piece.tokens_B[:, None, None], tokens_BRS)
    return after, expert_BRS, tokens_BRS

  zero_BRS = slot_BRS * 0 + start.load_BR[:, :, None] * 0
  _, expert_BRS, tokens_BRS = lax.while_loop(
    lambda carry: jnp.any(_active(search, carry[0])), body, (start, zero_BRS - 1, zero_BRS)
  )
  return expert_BRS, tokens_BRS


def _lookup(table: Array, domain_B: Array, index_B: Array) -> Array:
  """``table[domain]``, or of a probe, flattened, at ``index``."""
  size = table.size // table.shape[0]
  return jnp.take(table.reshape(-1), domain_B * size + index_B, mode="clip")


def _search(loads: Loads, probes: Probes) -> _Search:
  rows_BR, groups_BR = loads.rows_NR[probes.domain_B], loads.groups_NR[probes.domain_B]
  load_BR = weighted(rows_BR, groups_BR, probes.group_B)
  hottest_BR, fullest_BR = loads.hottest_NR[probes.domain_B], loads.fullest_NR[probes.domain_B]
  order_BR = jnp.where(probes.group_B[:, None] > 0, hottest_BR, fullest_BR)
  sources_B = jnp.sum(load_BR > probes.threshold_B[:, None], axis=-1, dtype=jnp.int32)
  columns_B = [jnp.array(column)[probes.rule_B] for column in zip(*RULES, strict=True)]
  return _Search(loads, probes, load_BR, order_BR, sources_B, *columns_B)


def _start(search: _Search, num_slots: int) -> _State:
  load_BR = search.load_BR
  # Zeros made from the load vary over the same mesh axes, as a carry inside shard_map must.
  zero_BR, zero_B = load_BR * 0, load_BR[:, 0] * 0
  return _State(
    load_BR=load_BR,
    whole_BR=zero_BR,
    empty_BR=zero_BR + num_slots,
    turn_B=zero_B,
    place_B=zero_B,
    given_B=zero_B,
    taken_B=zero_B,
    has_end_B=zero_B > 0,
    sends_BR=zero_BR,
    replicas_B=zero_B,
  )


def _active(search: _Search, state: _State) -> Array:
  return state.turn_B < search.sources_B


def _step(
  search: _Search, state: _State, min_tokens: int, count_copies: bool
) -> tuple[_State, _Piece]:
  """Every probe moves one piece, or goes on to its next expert or source if none can move."""
  loads, probes, start_BR, order_BR, sources_B, hot_first_B, fits_B, kind_B = search
  threshold_B, group_B = probes.threshold_B, probes.group_B
  num_ranks, per_rank = loads.expert_NRM.shape[1:]
  rank_BR = lax.broadcasted_iota(jnp.int32, state.load_BR.shape, 1)
  probe_B = lax.broadcasted_iota(jnp.int32, threshold_B.shape, 0)

  active_B = _active(search, state)
  turn_B = jnp.where(hot_first_B, state.turn_B, sources_B - 1 - state.turn_B)
  source_B = _lookup(order_BR, probe_B, jnp.clip(turn_B, 0, num_ranks - 1))
  key_B = source_B * per_rank + state.place_B
  need_B = _lookup(start_BR, probe_B, source_B) - state.given_B - threshold_B
  left_B = _lookup(loads.expert_NRM, probes.domain_B, key_B) - state.taken_B

  # A rank that has taken of the current expert has no slack left for a group and a row, or the
  # expert would be done: nobody takes two copies of it.
  slack_BR = jnp.maximum((threshold_B - group_B)[:, None] - state.load_BR, 0)
  slack_BR = jnp.where(state.empty_BR > 0, slack_BR, 0)
  most_B = jnp.max(slack_BR, axis=-1)
  slots_B = jnp.sum(jnp.where(slack_BR > 0, state.empty_BR, 0), axis=-1, dtype=jnp.int32)
  share_B = jnp.where(kind_B == _WHOLE, 1, -(-need_B // jnp.maximum(slots_B, 1)))
  floor_B = jnp.maximum(share_B, min(min_tokens, INT32_MAX))
  # A need below the floor is rounded up: the source then ends below the threshold.
  piece_B = jnp.minimum(jnp.maximum(need_B, floor_B), left_B)
  piece_B = jnp.where(kind_B == _EVEN, piece_B, left_B)
  least_fit_B = jnp.min(jnp.where(slack_BR >= piece_B[:, None], slack_BR, INT32_MAX), axis=-1)
  wanted_B = jnp.where(fits_B & (most_B >= piece_B), least_fit_B, most_B)
  wanted_BR = jnp.where(slack_BR == wanted_B[:, None], rank_BR, num_ranks)
  taker_B = jnp.min(wanted_BR, axis=-1)
  tokens_B = jnp.minimum(piece_B, most_B)
  moves_B = active_B & (tokens_B >= floor_B)
  tokens_B = jnp.where(moves_B, tokens_B, 0)
  whole_B = moves_B & (tokens_B == left_B)
  given_B = tokens_B + jnp.where(whole_B, group_B, 0)

  first_B = state.taken_B == 0
  expert_done_B = active_B & (~moves_B | (tokens_B == left_B))
  # If nobody takes a first piece of this expert, nobody takes one of a smaller expert.
  source_done_B = active_B & (
    (given_B >= need_B) | (~moves_B & first_B) | (expert_done_B & (state.place_B == per_rank - 1))
  )
  expert_done_B |= source_done_B

  takes_BR = (rank_BR == taker_B[:, None]) & moves_B[:, None]
  gives_BR = rank_BR == source_B[:, None]
  sends_BR = gives_BR & (moves_B & (first_B | count_copies))[:, None]
  # Of an expert's copies, one that a source holds can be the last of a chain; each further one
  # is forwarded by a rank that sends copies of its own experts too.
  by_source_BR = takes_BR & (state.sends_BR > 0) & (not count_copies)
  sends_BR |= by_source_BR & state.has_end_B[:, None]
  has_end_B = state.has_end_B | jnp.any(by_source_BR, axis=-1)
  after = _State(
    load_BR=state.load_BR
    + jnp.where(takes_BR, (tokens_B + group_B)[:, None], 0)
    - jnp.where(gives_BR, given_B[:, None], 0),
    whole_BR=state.whole_BR + (gives_BR & whole_B[:, None]).astype(jnp.int32),
    empty_BR=state.empty_BR - takes_BR.astype(jnp.int32),
    turn_B=state.turn_B + source_done_B.astype(jnp.int32),
    place_B=jnp.where(source_done_B, 0, state.place_B + expert_done_B.astype(jnp.int32)),
    given_B=jnp.where(source_done_B, 0, state.given_B + given_B),
    taken_B=jnp.where(expert_done_B, 0, state.taken_B + tokens_B),
    has_end_B=has_end_B & ~expert_done_B,
    sends_BR=state.sends_BR + sends_BR.astype(jnp.int32),
    replicas_B=state.replicas_B + moves_B.astype(jnp.int32),
  )
  return after, _Piece(key_B, taker_B, tokens_B)
