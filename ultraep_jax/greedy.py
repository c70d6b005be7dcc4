"""Greedy placement of replicas: many thresholds and rules, tried side by side.

A probe fixes a threshold and three choices. Ranks above the threshold give their excess away,
one piece at a time, to ranks below it that have a free replica slot. The reference system tries
three thresholds one after the other with one rule; whether a threshold works is not monotone,
so here every probe runs, and ``plan.py`` judges what each one ends with.

Axes: N domains, R ranks of a domain, M experts of a rank, B probes (of all domains), S slots.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from ultraep_jax.types import Array

_INT32_MAX = 2**31 - 1


class Loads(NamedTuple):
  """Home loads of every domain, and the orders in which they are given away.

  Attributes:
    rank_NR: load of each rank.
    hottest_NR: ranks by falling load.
    expert_NRM: load of each rank's experts, falling.
    index_NRM: which of the rank's M experts that is.
  """

  rank_NR: Array
  hottest_NR: Array
  expert_NRM: Array
  index_NRM: Array


class Probes(NamedTuple):
  """What distinguishes probes. All ``[B]``.

  Attributes:
    domain: which domain is planned.
    threshold: load above which a rank gives and up to which a rank takes.
    hot_first: sources take turns from hot to cold, else from cold to hot.
    best_fit: a piece goes to the smallest slack that holds it, else to the largest.
    even_pieces: no piece is smaller than the need over the free slots.
  """

  domain: Array
  threshold: Array
  hot_first: Array
  best_fit: Array
  even_pieces: Array


class Outcome(NamedTuple):
  """What the judge needs to know of a placement. All ``[B]`` int32.

  Attributes:
    busiest: load of the busiest rank.
    replicas: copies made.
    slots: most slots filled on one rank.
    egress: most copies, or most experts with a copy, that one home gave away.
  """

  busiest: Array
  replicas: Array
  slots: Array
  egress: Array


class _State(NamedTuple):
  load_BR: Array
  free_BR: Array  # empty slots
  last_BR: Array  # copy that the rank took last, as R·M index; tells who holds the current one
  turn_B: Array  # position in the order of sources
  pick_B: Array  # position in the source's order of experts
  moved_B: Array  # tokens this source gave away
  taken_B: Array  # tokens of this expert given away
  sent_B: Array  # copies (or experts with a copy) of this source
  replicas_B: Array
  egress_B: Array


class _Move(NamedTuple):
  """One piece per probe; ``tokens`` is 0 where a probe moves nothing."""

  key_B: Array
  rank_B: Array
  tokens_B: Array


def sort_loads(load_NRM: Array) -> Loads:
  """Orders ranks and experts by falling load, ties by index."""
  rank_NR = jnp.sum(load_NRM, axis=-1)
  index_NRM = jnp.argsort(-load_NRM, axis=-1, stable=True).astype(jnp.int32)
  return Loads(
    rank_NR=rank_NR,
    hottest_NR=jnp.argsort(-rank_NR, axis=-1, stable=True).astype(jnp.int32),
    expert_NRM=jnp.take_along_axis(load_NRM, index_NRM, axis=-1),
    index_NRM=index_NRM,
  )


def run_probes(
  loads: Loads, probes: Probes, slots: int, min_tokens: int, count_copies: bool
) -> Outcome:
  """Runs every probe to its end and reports how it ended.

  Args:
    count_copies: egress counts copies (each is sent by the home) instead of experts (the home
      sends one copy of each, holders pass it on).
  """
  step = _stepper(loads, probes, min_tokens, count_copies)
  active = _activity(loads, probes)
  state = lax.while_loop(
    lambda state: jnp.any(active(state)), lambda state: step(state)[0], _start(loads, probes, slots)
  )
  return Outcome(
    busiest=jnp.max(state.load_BR, axis=-1),
    replicas=state.replicas_B,
    slots=slots - jnp.min(state.free_BR, axis=-1),
    egress=state.egress_B,
  )


def record_probes(
  loads: Loads, probes: Probes, slots: int, min_tokens: int
) -> tuple[Array, Array]:
  """Runs probes again, keeping their placements.

  Returns:
    ``[B, R, S]`` int32, the copied expert as index into the domain's R·M, −1 if empty; and
    ``[B, R, S]`` int32, the tokens it serves.
  """
  step = _stepper(loads, probes, min_tokens, count_copies=False)
  active = _activity(loads, probes)
  start = _start(loads, probes, slots)
  shape = (*start.load_BR.shape, slots)
  slot_S = jnp.arange(slots)[None, None, :]
  rank_R = jnp.arange(shape[1])[None, :]
  experts_per_rank = loads.expert_NRM.shape[-1]

  def body(carry):
    state, expert_BRS, tokens_BRS = carry
    after, move = step(state)
    key_B = probes.domain * loads.hottest_NR.shape[-1] * experts_per_rank + move.key_B
    home_B = move.key_B // experts_per_rank
    expert_B = home_B * experts_per_rank + jnp.take(loads.index_NRM.reshape(-1), key_B)
    here_BR = (rank_R == move.rank_B[:, None]) & (move.tokens_B > 0)[:, None]
    here_BRS = here_BR[:, :, None] & (slot_S == (slots - state.free_BR)[:, :, None])
    expert_BRS = jnp.where(here_BRS, expert_B[:, None, None], expert_BRS)
    tokens_BRS = jnp.where(here_BRS, move.tokens_B[:, None, None], tokens_BRS)
    return after, expert_BRS, tokens_BRS

  zero_BRS = jnp.broadcast_to(start.turn_B[:, None, None], shape)
  _, expert_BRS, tokens_BRS = lax.while_loop(
    lambda carry: jnp.any(active(carry[0])), body, (start, zero_BRS - 1, zero_BRS)
  )
  return expert_BRS, tokens_BRS


def _start(loads: Loads, probes: Probes, slots: int) -> _State:
  load_BR = jnp.take(loads.rank_NR, probes.domain, axis=0)
  # Made from the loads, so that the carry has their type inside shard_map.
  zero_BR, zero_B = load_BR * 0, probes.threshold * 0
  return _State(load_BR, zero_BR + slots, zero_BR - 1, *(7 * (zero_B,)))


def _activity(loads: Loads, probes: Probes):
  above_BR = jnp.take(loads.rank_NR, probes.domain, axis=0) > probes.threshold[:, None]
  sources_B = jnp.sum(above_BR, axis=-1, dtype=jnp.int32)
  return lambda state: state.turn_B < sources_B


def _stepper(loads: Loads, probes: Probes, min_tokens: int, count_copies: bool):
  """A function that lets every probe try to move one piece."""
  ranks, per_rank = loads.expert_NRM.shape[1:]
  rank_R = jnp.arange(ranks)[None, :]
  above_BR = jnp.take(loads.rank_NR, probes.domain, axis=0) > probes.threshold[:, None]
  sources_B = jnp.sum(above_BR, axis=-1, dtype=jnp.int32)
  rank_base_B = probes.domain * ranks
  hottest, rank_load = loads.hottest_NR.reshape(-1), loads.rank_NR.reshape(-1)
  expert_load = loads.expert_NRM.reshape(-1)
  least = min(min_tokens, _INT32_MAX)

  def step(state: _State) -> tuple[_State, _Move]:
    active_B = state.turn_B < sources_B
    turn_B = jnp.where(probes.hot_first, state.turn_B, sources_B - 1 - state.turn_B)
    source_B = jnp.take(hottest, rank_base_B + jnp.clip(turn_B, 0, ranks - 1))
    key_B = source_B * per_rank + state.pick_B
    excess_B = jnp.take(rank_load, rank_base_B + source_B) - probes.threshold
    need_B = excess_B - state.moved_B
    left_B = jnp.take(expert_load, rank_base_B * per_rank + key_B) - state.taken_B

    may_BR = (state.free_BR > 0) & (state.last_BR != key_B[:, None])
    slack_BR = jnp.where(may_BR, jnp.maximum(probes.threshold[:, None] - state.load_BR, 0), 0)
    room_B = jnp.max(slack_BR, axis=-1)
    free_B = jnp.sum(jnp.where(slack_BR > 0, state.free_BR, 0), axis=-1)
    even_B = jnp.where(probes.even_pieces, -(-need_B // jnp.maximum(free_B, 1)), 1)
    floor_B = jnp.maximum(even_B, least)
    piece_B = jnp.minimum(jnp.maximum(need_B, floor_B), left_B)
    fit_B = jnp.min(jnp.where(slack_BR >= piece_B[:, None], slack_BR, _INT32_MAX), axis=-1)
    choice_B = jnp.where(probes.best_fit & (room_B >= piece_B), fit_B, room_B)
    chosen_BR = slack_BR == choice_B[:, None]
    rank_B = jnp.min(jnp.where(chosen_BR, rank_R, ranks), axis=-1)
    tokens_B = jnp.minimum(piece_B, room_B)
    moves_B = active_B & (tokens_B >= floor_B)
    tokens_B = jnp.where(moves_B, tokens_B, 0)

    takes_BR = moves_B[:, None] & (rank_R == rank_B[:, None])
    gives_BR = rank_R == source_B[:, None]
    change_BR = jnp.where(takes_BR, tokens_B[:, None], jnp.where(gives_BR, -tokens_B[:, None], 0))

    fresh_B = state.taken_B == 0
    expert_ends_B = ~moves_B | (tokens_B == left_B)
    # Nobody takes a piece of an untouched expert: later experts are smaller, none will do.
    stuck_B = ~moves_B & fresh_B
    last_B = expert_ends_B & (state.pick_B == per_rank - 1)
    source_ends_B = active_B & (stuck_B | last_B | (tokens_B >= need_B))
    expert_ends_B |= source_ends_B
    sent_B = state.sent_B + (moves_B & (fresh_B | count_copies)).astype(jnp.int32)
    after = _State(
      load_BR=state.load_BR + change_BR,
      free_BR=state.free_BR - takes_BR.astype(jnp.int32),
      last_BR=jnp.where(takes_BR, key_B[:, None], state.last_BR),
      turn_B=state.turn_B + source_ends_B.astype(jnp.int32),
      pick_B=jnp.where(source_ends_B, 0, state.pick_B + (active_B & expert_ends_B)),
      moved_B=jnp.where(source_ends_B, 0, state.moved_B + tokens_B),
      taken_B=jnp.where(expert_ends_B, 0, state.taken_B + tokens_B),
      sent_B=jnp.where(source_ends_B, 0, sent_B),
      replicas_B=state.replicas_B + moves_B.astype(jnp.int32),
      egress_B=jnp.maximum(state.egress_B, sent_B),
    )
    return after, _Move(key_B, rank_B, tokens_B)

  return step
