"""EPLB on the exact load of the batch, ``strategy="eplb+"``: what knowing the load alone is worth.

Replicas are placed for the load that the router has just chosen; every copy of an expert still
serves an equal share, where the quota planner decides shares and places together.
"""

import jax.numpy as jnp

from ultraep_jax.config import BalanceConfig
from ultraep_jax.planning.fit import num_slots
from ultraep_jax.planning.plan import check_load, plan_slots
from ultraep_jax.strategies import placement
from ultraep_jax.types import Array, Plan, PlanCost


def plan(load_GE: Array, config: BalanceConfig, cost: PlanCost | None = None) -> Plan:
  """Replicates by load, packs, and splits each expert's load evenly over its copies.

  Args:
    load_GE: ``[G, E]`` int32, the load matrix.
    config: ``replica_slots``, ``domain_size`` and ``transfer`` count.
    cost: not used.

  Raises:
    TypeError: ``load_GE`` is not int32.
    ValueError: ``load_GE`` or ``domain_size`` is not as in ``plan_quotas``.
  """
  del cost
  check_load(load_GE)
  num_ranks, num_experts = load_GE.shape
  load_E = jnp.sum(load_GE, axis=0, dtype=jnp.int32)
  replica_expert_GS = placement.place_replicas(
    load_E.astype(jnp.float32),
    num_ranks=num_ranks,
    num_slots=num_slots(config, num_experts, num_ranks),
    domain_size=config.domain_of(num_ranks),
  )
  expert_GS, tokens_GS = placement.split_evenly(load_E, replica_expert_GS)
  return plan_slots(load_E, expert_GS, tokens_GS, config.transfer)
