"""Exact balance by construction, ``strategy="exact"``: no rank above the mean, rounded up.

Nothing is searched: each rank receives from at most one home. The quota planner reaches the same
balance and takes fewer copies where it finds them.
"""

import jax.numpy as jnp

from ultraep_jax.config import BalanceConfig
from ultraep_jax.planning import exact
from ultraep_jax.planning.plan import check_load, join_domains, plan_slots
from ultraep_jax.strategies import placement
from ultraep_jax.types import Array, Plan, PlanCost


def plan(load_GE: Array, config: BalanceConfig, cost: PlanCost | None = None) -> Plan:
  """The plan of ``exact.construct``: the busiest rank has the mean of its domain, rounded up.

  Args:
    load_GE: ``[G, E]`` int32, the load matrix.
    config: ``replica_slots``, ``domain_size`` and ``transfer`` count.
    cost: not used.

  Raises:
    TypeError: ``load_GE`` is not int32.
    ValueError: ``replica_slots`` is below ``exact.slots_that_suffice``, or ``load_GE`` or
      ``domain_size`` is not as in ``plan_quotas``.
  """
  del cost
  check_load(load_GE)
  num_ranks, num_experts = load_GE.shape
  per_rank = num_experts // num_ranks
  size = placement.domain_size_of(num_ranks, config.domain_size)
  enough = exact.slots_that_suffice(size * per_rank, size)
  if config.replica_slots < enough:
    raise ValueError(
      f"replica_slots: expected at least {enough}, which suffice for every load, for "
      f'strategy="exact", got {config.replica_slots}'
    )
  load_E = jnp.sum(load_GE, axis=0, dtype=jnp.int32)
  _, expert_NRS, tokens_NRS = exact.construct(
    load_E.reshape(-1, size, per_rank), config.replica_slots, count_copies=False
  )
  return plan_slots(
    load_E, join_domains(expert_NRS, per_rank), join_domains(tokens_NRS), config.transfer
  )
