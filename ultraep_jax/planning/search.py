"""The search for the best placement of copies.

Many placements are made side by side (``greedy.py``, and ``exact.py`` where the slots suffice)
and the one that is best for the objective is taken.

Shapes: N domains, R ranks of a domain, M home experts and S slots of a rank, Q candidates of a
domain.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ultraep_jax.planning import exact, greedy
from ultraep_jax.planning.integers import (
  INT32_MAX,
  ceil_div,
  ceil_scale,
  saturating_add,
  saturating_mul,
)
from ultraep_jax.types import Array, PlanCost

# Thresholds between the mean and the busiest rank, falling geometrically in their distance from
# the mean, in units of 2^-15 of the whole distance. The first is the busiest rank: do nothing.
# With up to three special thresholds and twelve rules this makes at most 504 probes.
STEPS = tuple(round(2 ** (15 - 15 * k / 38)) for k in range(39))


class Setup(NamedTuple):
  """What is fixed at trace time."""

  domain_size: int
  num_slots: int
  min_tokens: int
  transfer: Literal["auto", "direct", "relay"]
  by_time: bool
  target: float | None
  steps: tuple[int, ...] = STEPS
  searches: bool = True  # else the exact construction is all there is

  @property
  def count_copies(self) -> bool:
    """Homes send every copy themselves."""
    return self.transfer == "direct"


def may_gain(load_NRM: Array, setup: Setup, cost: PlanCost | None) -> Array:
  """``[]`` bool: whether a candidate with copies could be better than doing nothing.

  Its busiest rank has the mean or more, and makes or sends a copy.
  """
  rows_NR, groups_NR, group_N = greedy.weigh(load_NRM, setup.num_slots, _group_rows(cost))
  load_NR = greedy.weighted(rows_NR, groups_NR, group_N)
  total_N, busiest_N = jnp.sum(load_NR, axis=-1, dtype=jnp.int32), jnp.max(load_NR, axis=-1)
  goal_N = ceil_scale(total_N, setup.target or 0, setup.domain_size)
  least_N = jnp.maximum(ceil_div(total_N, setup.domain_size), goal_N)
  nothing_N = jnp.maximum(busiest_N, goal_N)
  if cost is None:
    return jnp.any(nothing_N > least_N)
  one_N = jnp.ones_like(least_N)
  least_N = jnp.maximum(least_N, saturating_mul(one_N, cost.link_rows))
  least_N = saturating_add(least_N, saturating_mul(one_N, cost.copy_rows))
  above_N = jnp.max(rows_NR, axis=-1) > cost.capacity_rows
  return jnp.any((nothing_N > least_N) | above_N)


def best_placement(load_NRM: Array, setup: Setup, cost: PlanCost | None) -> tuple[Array, Array]:
  """Experts and tokens of the slots, ``[N, R, S]``, of each domain's best candidate."""
  domains, size, per_rank = load_NRM.shape
  slots, min_tokens = setup.num_slots, setup.min_tokens
  constructs = slots >= exact.slots_that_suffice(size * per_rank, size) and min_tokens == 1
  loads = greedy.sort_loads(load_NRM, slots, _group_rows(cost))
  total_N = jnp.sum(loads.rank_NR, axis=-1, dtype=jnp.int32)
  goal_N = ceil_scale(total_N, setup.target or 0, setup.domain_size)
  probes = _probes(*_thresholds(loads, total_N, goal_N, setup, cost, constructs))
  outcome_B = greedy.run(loads, probes, slots, min_tokens, setup.count_copies)
  outcome_NQ = jax.tree.map(lambda leaf: leaf.reshape(domains, -1), outcome_B)
  num_probes = outcome_NQ.busiest.shape[1]
  if constructs:
    exact_N, exact_expert_NRS, exact_tokens_NRS = exact.construct(
      load_NRM, slots, setup.count_copies, loads.group_N
    )
    outcome_NQ = jax.tree.map(
      lambda many, one: jnp.concatenate([many, one[:, None]], axis=1), outcome_NQ, exact_N
    )

  keys_NQ = [jnp.maximum(outcome_NQ.busiest, goal_N[:, None])]
  if cost is not None:
    # What is above the capacity needs a second round. As a cost that could be outweighed, and
    # where copies cost much it would be lost among costs that saturate.
    above_NQ = (outcome_NQ.rows > cost.capacity_rows).astype(jnp.int32)
    transfer_NQ = saturating_mul(outcome_NQ.copies, cost.copy_rows)
    keys_NQ[0] = jnp.maximum(keys_NQ[0], saturating_mul(outcome_NQ.copies, cost.link_rows))
    keys_NQ = [above_NQ, saturating_add(keys_NQ[0], transfer_NQ)]
  keys_NQ += [outcome_NQ.replicas, outcome_NQ.copies, outcome_NQ.busiest]
  best_N = _first_least(*keys_NQ)
  index_N = jnp.arange(domains) * num_probes + jnp.minimum(best_N, num_probes - 1)
  chosen = jax.tree.map(lambda leaf: leaf[index_N], probes)
  expert_NRS, tokens_NRS = greedy.place(loads, chosen, slots, min_tokens)
  if constructs:
    is_exact_N11 = (best_N == num_probes)[:, None, None]
    expert_NRS = jnp.where(is_exact_N11, exact_expert_NRS, expert_NRS)
    tokens_NRS = jnp.where(is_exact_N11, exact_tokens_NRS, tokens_NRS)
  return expert_NRS, tokens_NRS


def _group_rows(cost: PlanCost | None) -> Array | int:
  return 0 if cost is None else cost.group_rows


def _thresholds(
  loads: greedy.Loads,
  total_N: Array,
  goal_N: Array,
  setup: Setup,
  cost: PlanCost | None,
  constructs: bool,
) -> tuple[Array, Array]:
  """Thresholds to try, each between the mean, rounded up, and the busiest rank; rows of a group.

  The last one by time is of rows alone: what a round holds.
  """
  group_N1 = loads.group_N[:, None]
  mean_N, busiest_N = ceil_div(total_N, setup.domain_size), jnp.max(loads.rank_NR, axis=-1)
  if constructs and not setup.by_time and setup.target is None:
    return mean_N[:, None], group_N1  # nothing above it can win
  span_N = busiest_N - mean_N
  # span * step / 2^15 rounded up, without an intermediate product beyond int32.
  high_N1, low_N1 = (span_N >> 15)[:, None], (span_N & 0x7FFF)[:, None]
  step_1T = jnp.array(setup.steps, jnp.int32)[None, :]
  spaced_NT = mean_N[:, None] + high_N1 * step_1T + ((low_N1 * step_1T + 0x7FFF) >> 15)
  special = [mean_N]
  if setup.target is not None:
    special.append(goal_N)
  threshold_NT = jnp.concatenate([spaced_NT, jnp.stack(special, axis=1)], axis=1)
  threshold_NT = jnp.clip(threshold_NT, mean_N[:, None], busiest_N[:, None])
  group_NT = jnp.broadcast_to(group_N1, threshold_NT.shape)
  if cost is None:
    return threshold_NT, group_NT
  mean_N = ceil_div(jnp.sum(loads.rows_NR, axis=-1, dtype=jnp.int32), setup.domain_size)
  room_N1 = jnp.clip(cost.capacity_rows, mean_N, jnp.max(loads.rows_NR, axis=-1))[:, None]
  return (
    jnp.concatenate([threshold_NT, room_N1], axis=1),
    jnp.concatenate([group_NT, group_N1 * 0], axis=1),
  )


def _probes(threshold_NT: Array, group_NT: Array) -> greedy.Probes:
  """Every rule at every threshold; domain by domain, threshold by threshold."""
  shape = (*threshold_NT.shape, len(greedy.RULES))
  threshold_B, group_B = (
    jnp.broadcast_to(x_NT[:, :, None], shape).reshape(-1) for x_NT in (threshold_NT, group_NT)
  )
  return greedy.Probes(
    domain_B=lax.broadcasted_iota(jnp.int32, shape, 0).reshape(-1),
    threshold_B=threshold_B,
    rule_B=lax.broadcasted_iota(jnp.int32, shape, 2).reshape(-1),
    group_B=group_B,
  )


def _first_least(*keys_NQ: Array) -> Array:
  """Per domain, the first candidate with the least keys, compared in order."""
  best_NQ = jnp.ones(keys_NQ[0].shape, jnp.bool_)
  for key_NQ in keys_NQ:
    key_NQ = jnp.where(best_NQ, key_NQ, INT32_MAX)
    best_NQ &= key_NQ == jnp.min(key_NQ, axis=1, keepdims=True)
  return jnp.argmax(best_NQ, axis=1).astype(jnp.int32)
