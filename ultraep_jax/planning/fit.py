"""Replica slots, and whether a layer can need a second round at all, told from its sizes."""

import math

from ultraep_jax.config import BalanceConfig
from ultraep_jax.planning.exact import slots_that_suffice
from ultraep_jax.planning.integers import simplest


def num_slots(config: BalanceConfig, num_experts: int, num_ranks: int) -> int:
  """S; ``replica_slots="auto"`` counts as what suffices for every load of a domain.

  >>> num_slots(BalanceConfig(), 128, 8), num_slots(BalanceConfig(replica_slots=2), 128, 8)
  (14, 2)
  """
  if config.replica_slots != "auto":
    return config.replica_slots
  domain = config.domain_of(num_ranks)
  return slots_that_suffice(num_experts // num_ranks * domain, domain)


def always_fits(
  config: BalanceConfig, *, num_experts: int, num_ranks: int, assignments: int, capacity: int
) -> bool:
  """Whether every load of a layer of these sizes fits one round of its ranks' buffers.

  It does where a buffer holds the assignments of all ranks. It also does where the plan is known
  to end at ``ceil(mean)``, which is never above the assignments that a rank brings: by strategy
  ``"quota"`` or ``"exact"`` in one domain, with slots that suffice for every load. ``"quota"`` may
  leave that balance alone for copies of ``min_tokens_per_replica``, and by balance for a
  ``target``; by time it takes a plan that fits before any other. ``"ideal"`` deals assignments out
  evenly, but for one a source rank where some are masked.

  Args:
    config: ``strategy``, ``replica_slots``, ``domain_size``, ``objective``, ``target`` and
      ``min_tokens_per_replica`` count.
    num_experts: E.
    num_ranks: G.
    assignments: T * K of one rank, masked ones counted.
    capacity: C, rows of one rank's buffer, which is also ``PlanCost.capacity_rows``.

  >>> config, rows = BalanceConfig(replica_slots=32), {"assignments": 512, "capacity": 544}
  >>> always_fits(config, num_experts=128, num_ranks=2, **rows)
  True
  >>> always_fits(config, num_experts=128, num_ranks=4, **rows)
  True
  >>> always_fits(config, num_experts=256, num_ranks=4, **rows)
  False
  """
  if capacity >= num_ranks * assignments:
    return True
  if config.strategy == "ideal":
    return capacity >= assignments + num_ranks
  if config.domain_of(num_ranks) != num_ranks or capacity < assignments:
    return False
  if num_slots(config, num_experts, num_ranks) < slots_that_suffice(num_experts, num_ranks):
    return False
  if config.strategy != "quota":
    return config.strategy == "exact"
  if config.min_tokens_per_replica > 1:
    return False
  if config.objective == "time" or config.target is None:
    return True
  return math.ceil(simplest(config.target, num_ranks) * assignments) <= capacity
