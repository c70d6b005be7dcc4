"""No balancing: every assignment runs on its expert's home."""

import jax.numpy as jnp

from ultraep_jax.config import BalanceConfig
from ultraep_jax.planning.plan import home_quota
from ultraep_jax.types import Array, Plan, PlanCost


def plan(load_GE: Array, config: BalanceConfig, cost: PlanCost | None = None) -> Plan:
  """A plan without replica slots, whatever ``config.replica_slots`` says.

  Args:
    load_GE: ``[G, E]`` int32, the load matrix.
    config: not used.
    cost: not used.

  Raises:
    TypeError: ``load_GE`` is not int32.
    ValueError: ``load_GE`` is not as in ``plan_quotas``.
  """
  quota_EG = home_quota(load_GE)
  empty_GS = jnp.zeros((load_GE.shape[0], 0), jnp.int32)
  return Plan(replica_expert=empty_GS, quota=quota_EG, parent=empty_GS)
