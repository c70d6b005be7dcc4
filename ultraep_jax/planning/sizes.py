"""What a layer settles while it is traced, when its loads are not known: slots, buffers, rounds."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp

from ultraep_jax.config import BalanceConfig
from ultraep_jax.devices import known
from ultraep_jax.planning.capacity import least_room, may_hold, row_capacity, rows_of_all
from ultraep_jax.planning.cost import (
  LayerCost,
  copy_bytes,
  grad_bytes,
  layer_cost,
  most_rows,
  multiplied_by_kernel,
)
from ultraep_jax.planning.fit import always_fits, num_slots
from ultraep_jax.types import ExpertWeights, PlanCost

_MEMORY_SHARE = 1 / 8  # of a device, for copies and their gradients by replica_slots="auto"


class Sizes(NamedTuple):
  """Sizes of a layer's program.

  Attributes:
    config: the layer's, with ``replica_slots`` a number.
    capacity: C, rows of a rank's buffer where gradients are taken.
    transient_capacity: C where they are not.
    cost: what the planner weighs, without gradients and with them.
    plans: whether any load of these sizes could be worth a plan; copies never leave a domain.
    one_round: whether every load of these sizes fits the buffer: then the program has no loop over
      rounds, and the host reads nothing.
  """

  config: BalanceConfig
  capacity: int
  transient_capacity: int
  cost: LayerCost
  plans: bool
  one_round: bool


def settle(
  config: BalanceConfig,
  *,
  tokens: int,
  top_k: int,
  num_ranks: int,
  dtype: jnp.dtype,
  weights: ExpertWeights,
  training: bool = False,
) -> Sizes:
  """The sizes of a layer's program.

  Args:
    config: of the layer.
    tokens: T, of a rank.
    top_k: K.
    num_ranks: G.
    dtype: that the layer computes in.
    weights: of a rank's home experts; their shapes and dtype count.
    training: whether to say of a program in which gradients are taken if it plans, and what follows
      from that: planning takes less of its time, and copies more.
  """
  num_home, mean = weights.wo.shape[0], tokens * top_k
  num_experts = num_home * num_ranks
  domain = config.domain_of(num_ranks)
  cost = layer_cost(dtype, weights, 0, config, domain)  # buffers follow from it
  weighs = config.strategy == "quota" and config.objective == "time"
  decides = cost.of_training if training else cost
  # More room spares copies that only make a plan fit. Plain JAX passes over all of it.
  spares = weighs and bool(cost.plan.copy_rows) and multiplied_by_kernel(config, dtype)
  beside = spares and domain > 1 and config.replica_slots != 0 and bool(cost.plan.link_rows)
  token_bytes = weights.wo.shape[-1] * dtype.itemsize

  def rows(weighed: PlanCost, *, kept: bool) -> int:
    copy_rows = int(weighed.copy_rows) + int(weighed.link_rows) + int(weighed.group_rows)
    least = least_room(num_ranks * mean, num_home, copy_rows) if beside else 0
    return row_capacity(tokens, top_k, num_ranks, config, token_bytes, kept=kept, least=least)

  def gains(capacity: int) -> bool:
    if config.strategy != "quota":
      return domain > 1
    may_copy = domain > 1 and config.replica_slots != 0
    return may_copy and decides.with_capacities(capacity, capacity).can_gain(
      config, tokens=tokens, top_k=top_k, num_experts=num_experts, num_ranks=num_ranks
    )

  def fits(capacity: int, *, plans: bool) -> bool:
    return always_fits(
      config if plans else dataclasses.replace(config, strategy="none"),
      num_experts=num_experts,
      num_ranks=num_ranks,
      assignments=mean,
      capacity=capacity,
    )

  config = dataclasses.replace(
    config, replica_slots=_slots(config, num_experts, num_ranks, dtype, weights)
  )
  capacity = rows(cost.training or cost.plan, kept=True)
  plans = gains(capacity)
  all_rows = rows_of_all(tokens, top_k, num_ranks)
  if spares and config.capacity_factor == "auto" and may_hold(all_rows, num_ranks, token_bytes):
    most = most_rows(tokens, top_k, num_home, num_ranks)
    worth = gains(all_rows) or decides.can_gain_much(most, domain)
    if not (worth and fits(capacity, plans=True)):
      # No plan has to fit, and no host waits for a number of rounds.
      capacity, plans = all_rows, plans and worth
  cost = cost.with_capacities(capacity, capacity)
  one_round = fits(capacity, plans=plans)
  transient = capacity
  if one_round and plans and spares:
    transient = max(capacity, rows(cost.plan, kept=False))
    cost = cost.with_capacities(capacity, transient)
  return Sizes(config, capacity, transient, cost, plans, one_round)


def _slots(
  config: BalanceConfig,
  num_experts: int,
  num_ranks: int,
  dtype: jnp.dtype,
  weights: ExpertWeights,
) -> int:
  """S. Other strategies than ``"quota"`` need what they ask for, as their states may have it."""
  slots = num_slots(config, num_experts, num_ranks)
  device = known.resolve(config.device)
  if config.replica_slots != "auto" or config.strategy != "quota" or device is None:
    return slots
  bytes_of_slot = copy_bytes(dtype, weights) + grad_bytes(weights)
  return min(slots, max(int(_MEMORY_SHARE * device["memory_bytes"]) // bytes_of_slot, 1))
