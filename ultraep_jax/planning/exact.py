"""Exact balance by construction, with ``slots_that_suffice`` slots a rank.

While a rank is above ``cap``, the mean rounded up, the most loaded rank gives the least loaded
rank its whole deficit, the largest remaining experts first. The receiver then is at the cap and
closed. The deficit is at most ``cap``, hence below the giver's load; the giver has not received,
so all its load is of its own M experts: a receiver holds experts of one home. A giver may fall
below the cap and receive later. Every step closes a rank, so R − 1 steps are enough. (The
argument behind Walker's alias tables; docs/internals.md counts the slots.)
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from ultraep_jax.planning.greedy import Outcome, weighted
from ultraep_jax.planning.integers import ceil_div
from ultraep_jax.types import Array


class _State(NamedTuple):
  left_NRM: Array  # tokens that an expert has at home
  copies_NRM: Array
  has_end_NRM: Array  # whether an expert has a copy that is forwarded by nobody
  forwards_NR: Array  # copies that ranks that have given forward
  load_NR: Array
  expert_NRS: Array
  tokens_NRS: Array


def slots_that_suffice(num_experts: int, num_ranks: int) -> int:
  """Replica slots of a rank with which every load can be balanced exactly: ``ceil(M (G - 1) / G)``.

  No fewer suffice for every load.

  Args:
    num_experts: of a domain.
    num_ranks: of a domain.

  >>> slots_that_suffice(128, 2), slots_that_suffice(256, 64), slots_that_suffice(8, 1)
  (32, 4, 0)
  """
  num_home = num_experts // num_ranks
  return -(-num_home * (num_ranks - 1) // num_ranks)


def construct(
  load_NRM: Array, num_slots: int, count_copies: bool, group_N: Array | None = None
) -> tuple[Outcome, Array, Array]:
  """Balances the rows of every domain exactly.

  Args:
    load_NRM: ``[N, R, M]`` int32, home loads.
    num_slots: S, at least ``slots_that_suffice``.
    count_copies: homes send every copy themselves.
    group_N: what a group of rows adds to the outcome's loads; ``None``: nothing.

  Returns:
    ``[N]`` outcomes; ``[N, R, S]`` int32, the expert copied into each slot, in ``[0, R * M)``,
    −1 if empty; and ``[N, R, S]`` int32, the tokens that the copy serves.
  """
  load_NR = jnp.sum(load_NRM, axis=-1, dtype=jnp.int32)
  num_domains, num_ranks = load_NR.shape
  total_N = jnp.sum(load_NR, axis=-1, dtype=jnp.int32)
  cap_N = ceil_div(total_N, num_ranks)
  # Zeros made from the load vary over the same mesh axes, as a carry inside shard_map must.
  zero_NRS = jnp.broadcast_to(load_NR[:, :, None] * 0, (num_domains, num_ranks, num_slots))
  zero_NRM, zero_NR = load_NRM * 0, load_NR * 0
  start = _State(load_NRM, zero_NRM, zero_NRM > 0, zero_NR, load_NR, zero_NRS - 1, zero_NRS)
  state = lax.while_loop(
    lambda state: jnp.any(state.load_NR > cap_N[:, None]),
    lambda state: _step(state, cap_N),
    start,
  )
  sent_NRM = state.copies_NRM if count_copies else jnp.minimum(state.copies_NRM, 1)
  sends_NR = jnp.sum(sent_NRM, axis=-1, dtype=jnp.int32)
  sends_NR += 0 if count_copies else state.forwards_NR
  filled_NR = jnp.sum(state.expert_NRS >= 0, axis=-1, dtype=jnp.int32)
  groups_NR = filled_NR + jnp.sum(state.left_NRM > 0, axis=-1, dtype=jnp.int32)
  group_N = total_N * 0 if group_N is None else group_N
  outcome = Outcome(
    busiest=jnp.max(weighted(state.load_NR, groups_NR, group_N), axis=-1),
    rows=jnp.max(state.load_NR, axis=-1),
    replicas=jnp.sum(filled_NR, axis=-1, dtype=jnp.int32),
    copies=jnp.max(jnp.maximum(filled_NR, sends_NR), axis=-1),
  )
  return outcome, state.expert_NRS, state.tokens_NRS


def _step(state: _State, cap_N: Array) -> _State:
  num_domains, num_ranks, per_rank = state.left_NRM.shape
  num_slots = state.expert_NRS.shape[-1]
  domain_N = jnp.arange(num_domains)
  giver_N = jnp.argmax(state.load_NR, axis=-1).astype(jnp.int32)
  active_N = jnp.max(state.load_NR, axis=-1) > cap_N
  receiver_N = jnp.argmin(state.load_NR, axis=-1)  # below the cap, so it is open
  deficit_N = jnp.where(active_N, cap_N - state.load_NR[domain_N, receiver_N], 0)

  left_NM = state.left_NRM[domain_N, giver_N]
  order_NM = jnp.argsort(-left_NM, axis=-1, stable=True).astype(jnp.int32)
  largest_NM = jnp.take_along_axis(left_NM, order_NM, axis=-1)
  before_NM = jnp.cumsum(largest_NM, axis=-1, dtype=jnp.int32) - largest_NM
  given_NM = jnp.clip(deficit_N[:, None] - before_NM, 0, largest_NM)
  gives_NM = given_NM > 0
  expert_NM = jnp.where(gives_NM, giver_N[:, None] * per_rank + order_NM, -1)
  held = min(num_slots, per_rank)  # no more are given
  unused = ((0, 0), (0, num_slots - held))
  expert_NS = jnp.pad(expert_NM[:, :held], unused, constant_values=-1)
  tokens_NS = jnp.pad(given_NM[:, :held], unused)

  rank_NR = lax.broadcasted_iota(jnp.int32, (num_domains, num_ranks), 1)
  receives_NR = (rank_NR == receiver_N[:, None]) & active_N[:, None]
  change_NR = receives_NR.astype(jnp.int32) - (rank_NR == giver_N[:, None]).astype(jnp.int32)
  given_from = (domain_N[:, None], giver_N[:, None], order_NM)
  # As in ``greedy.py``, the first copy of an expert that a giver receives ends a chain.
  by_giver_N = jnp.any(state.copies_NRM[domain_N, receiver_N] > 0, axis=-1)
  gives_by_giver_NM = gives_NM & by_giver_N[:, None]
  forwards_N = jnp.sum(gives_by_giver_NM & state.has_end_NRM[given_from], axis=-1, dtype=jnp.int32)
  return _State(
    left_NRM=state.left_NRM.at[given_from].add(-given_NM),
    copies_NRM=state.copies_NRM.at[given_from].add(gives_NM.astype(jnp.int32)),
    has_end_NRM=state.has_end_NRM.at[given_from].max(gives_by_giver_NM),
    forwards_NR=state.forwards_NR + jnp.where(receives_NR, forwards_N[:, None], 0),
    load_NR=state.load_NR + change_NR * deficit_N[:, None],
    expert_NRS=jnp.where(receives_NR[:, :, None], expert_NS[:, None, :], state.expert_NRS),
    tokens_NRS=jnp.where(receives_NR[:, :, None], tokens_NS[:, None, :], state.tokens_NRS),
  )
