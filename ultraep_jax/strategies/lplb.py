"""Replicas from the history of loads, tokens split by a linear programme: DeepSeek's LPLB.

The placement is by history, with one replica at most of an expert, as LPLB ties each redundant
expert to one original. How much each copy serves is decided for the batch: the split with the
least busy busiest rank that the placement allows. To be used like ``eplb``.

That linear programme is a flow from experts to the ranks that have them, so it is solved exactly
and in integers, by shortest augmenting paths. A threshold begins at the mean, rounded up. Load
above it moves along paths of copies to ranks below it. Where no path leads there, all load of the
ranks that the paths reach must stay on them, so that no split ends below their mean: the threshold
rises to it, and what has been moved remains right.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import Partial

from ultraep_jax.config import BalanceConfig
from ultraep_jax.planning.integers import ceil_div
from ultraep_jax.planning.plan import plan_slots
from ultraep_jax.strategies import eplb, placement
from ultraep_jax.types import Array, Plan, PlanCost

_FAR = 1 << 30  # a distance that no path has

init = eplb.init
update = functools.partial(eplb.update, max_copies=2)


def planner(state: eplb.History) -> Partial:
  """A planner with the history's replicas and the best split of this batch's load over them.

  To be used like ``eplb.planner``.
  """
  return Partial(lplb, state)


def lplb(
  state: eplb.History, load_GE: Array, config: BalanceConfig, cost: PlanCost | None = None
) -> Plan:
  """The plan by a history: what ``planner`` binds to it."""
  del cost
  replica_expert_GS, load_E = eplb.check_history(state, load_GE, config)
  size = config.domain_of(replica_expert_GS.shape[0])
  tokens_GS = split(load_E, replica_expert_GS, domain_size=size)
  expert_GS, tokens_GS = placement.drop_idle(replica_expert_GS, tokens_GS)
  return plan_slots(load_E, expert_GS, tokens_GS, config.transfer)


class _Flow(NamedTuple):
  served_GP: Array  # home experts first, then slots
  threshold: Array


def split(load_E: Array, replica_expert_GS: Array, *, domain_size: int) -> Array:
  """Splits loads over copies so that each domain's busiest rank is as little busy as can be.

  Args:
    load_E: ``[E]`` int32.
    replica_expert_GS: ``[G, S]`` int32, the expert in each slot, −1 if empty; at most once on a
      rank, not on its home and inside its domain.
    domain_size: ranks of a domain.

  Returns:
    ``[G, S]`` int32, what each slot serves.
  """
  num_ranks, num_slots = replica_expert_GS.shape
  domains, per_rank = num_ranks // domain_size, load_E.shape[0] // num_ranks
  load_NRM = load_E.reshape(domains, domain_size, per_rank)
  first_N = jnp.arange(domains, dtype=jnp.int32) * (domain_size * per_rank)
  expert_NRS = replica_expert_GS.reshape(domains, domain_size, num_slots)
  expert_NRS = jnp.where(expert_NRS < 0, -1, expert_NRS - first_N[:, None, None])
  return jax.vmap(_split)(load_NRM, expert_NRS).reshape(num_ranks, num_slots)


def _split(load_RM: Array, replica_RS: Array) -> Array:
  """``split`` of one domain, whose ranks are called G from here on."""
  num_ranks, per_rank = load_RM.shape
  home_GM = jnp.arange(load_RM.size, dtype=jnp.int32).reshape(num_ranks, per_rank)
  expert_GP = jnp.concatenate([home_GM, replica_RS], axis=1)
  idle_GS = replica_RS * 0 + load_RM[0, 0] * 0
  served_GP = jnp.concatenate([load_RM, idle_GS], axis=1)

  def step(flow: _Flow) -> _Flow:
    far_E, far_G = _distances(expert_GP, flow)
    load_G = jnp.sum(flow.served_GP, axis=1, dtype=jnp.int32)
    reaches_G = (load_G > flow.threshold) & (far_G < _FAR)
    source = jnp.argmax(jnp.where(reaches_G, load_G, -1)).astype(jnp.int32)
    moved = _augment(expert_GP, flow, far_E, far_G, source)
    stuck_G = far_G >= _FAR
    # Paths that lead nowhere: their ranks, all at or above the threshold, can only share.
    total = jnp.sum(jnp.where(stuck_G, load_G, 0), dtype=jnp.int32)
    mean = ceil_div(total, jnp.maximum(jnp.sum(stuck_G, dtype=jnp.int32), 1))
    raised = flow._replace(threshold=jnp.maximum(mean, flow.threshold))
    moves = jnp.any(reaches_G)
    return _Flow(*(jnp.where(moves, a, b) for a, b in zip(moved, raised, strict=True)))

  def unfinished(flow: _Flow) -> Array:
    return jnp.max(jnp.sum(flow.served_GP, axis=1, dtype=jnp.int32)) > flow.threshold

  mean = ceil_div(jnp.sum(load_RM, dtype=jnp.int32), num_ranks)
  return lax.while_loop(unfinished, step, _Flow(served_GP, mean)).served_GP[:, per_rank:]


def _distances(expert_GP: Array, flow: _Flow) -> tuple[Array, Array]:
  """Steps from each expert and each rank to a rank below the threshold, along served load.

  A rank passes load on through an expert that it serves, to any rank that has this expert.
  """
  num_experts = expert_GP.size  # an upper bound; the last place is for empty slots
  index_GP = jnp.where(expert_GP < 0, num_experts, expert_GP)
  load_G = jnp.sum(flow.served_GP, axis=1, dtype=jnp.int32)
  start_G = jnp.where(load_G < flow.threshold, 0, _FAR)

  def relax(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
    _, far_G, _ = state
    to_GP = jnp.broadcast_to(far_G[:, None], expert_GP.shape)
    far_E = jnp.full(num_experts + 1, _FAR, jnp.int32).at[index_GP].min(to_GP, mode="drop")
    far_E = far_E.at[num_experts].set(_FAR)
    through_GP = jnp.where(flow.served_GP > 0, far_E[index_GP], _FAR)
    nearer_G = jnp.minimum(far_G, jnp.min(through_GP, axis=1) + 1)
    return far_E, jnp.minimum(nearer_G, _FAR), far_G

  def changed(state: tuple[Array, Array, Array]) -> Array:
    return jnp.any(state[1] != state[2])

  far_E = jnp.full(num_experts + 1, _FAR, jnp.int32) + start_G[0] * 0
  far_E, far_G, _ = lax.while_loop(changed, relax, (far_E, start_G, start_G - 1))
  return far_E, far_G


def _augment(expert_GP: Array, flow: _Flow, far_E: Array, far_G: Array, source: Array) -> _Flow:
  """Moves load along a shortest path from a rank: as much as its narrowest step allows."""
  load_G = jnp.sum(flow.served_GP, axis=1, dtype=jnp.int32)

  def step_from(rank: Array) -> tuple[Array, Array, Array]:
    """The slot that load leaves, the rank that it goes to, and its slot there."""
    distance_P = jnp.where(flow.served_GP[rank] > 0, far_E[expert_GP[rank]], _FAR)
    distance_P = jnp.where(expert_GP[rank] < 0, _FAR, distance_P)
    slot = jnp.argmin(distance_P)
    has_GP = expert_GP == expert_GP[rank, slot]
    to = jnp.argmin(jnp.where(jnp.any(has_GP, axis=1), far_G, _FAR + 1)).astype(jnp.int32)
    return slot, to, jnp.argmax(has_GP[to])

  def narrow(state: tuple[Array, Array]) -> tuple[Array, Array]:
    rank, amount = state
    slot, to, _ = step_from(rank)
    return to, jnp.minimum(amount, flow.served_GP[rank, slot])

  def on_the_way(state: tuple[Array, Array]) -> Array:
    return (far_G[state[0]] > 0) & (far_G[state[0]] < _FAR)

  start = (source, load_G[source] - flow.threshold)
  sink, amount = lax.while_loop(on_the_way, narrow, start)
  amount = jnp.minimum(amount, flow.threshold - load_G[sink])

  def move(state: tuple[Array, Array]) -> tuple[Array, Array]:
    rank, served_GP = state
    slot, to, there = step_from(rank)
    served_GP = served_GP.at[rank, slot].add(-amount).at[to, there].add(amount)
    return to, served_GP

  served_GP = lax.while_loop(on_the_way, move, (source, flow.served_GP))[1]
  return flow._replace(served_GP=served_GP)
