"""The quota planner: which experts to copy where, and how many assignments each copy serves.

Here a load matrix becomes a plan; ``search.py`` places the copies. All arithmetic is in integers,
so every rank computes the same plan, on every backend.

Shapes: N domains, R ranks of a domain; see ``types.py`` for the rest.
"""

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

import pallas_kernels as kernels
from ultraep_jax import implementation
from ultraep_jax.checks import check_array, check_config
from ultraep_jax.config import BalanceConfig
from ultraep_jax.implementation import Implementations, first_that_can
from ultraep_jax.planning import exact, fit
from ultraep_jax.planning.integers import INT32_MAX
from ultraep_jax.planning.relay import transfer_tree
from ultraep_jax.planning.search import Setup, best_placement, may_gain
from ultraep_jax.types import Array, Plan, PlanCost


def plan_quotas(load_GE: Array, config: BalanceConfig, cost: PlanCost | None = None) -> Plan:
  """Plans replicas and quotas for a load matrix (after Algorithm 1 of the UltraEP paper).

  Each domain plans alone on the loads of its home experts. The candidates are greedy placements
  for many thresholds and rules, doing nothing and, if the slots suffice for every load
  (``exact.slots_that_suffice``) and ``min_tokens_per_replica == 1``, a construction whose busiest
  rank has the mean rounded up. Taken is, with ties to fewer replicas, then to fewer ``copies``,
  then to the less busy rank, then to the first candidate:

  - ``objective="balance"``: the candidate with the lowest maximum load;
  - ``objective="time"``: of the candidates in which no rank has more than ``capacity_rows``, or of
    all if there are none, the least cost in rows,
    ``max(busiest, link_rows * copies) + copy_rows * copies``, saturating at 2^31 − 1. Here a rank's
    load, in thresholds too, is its rows and ``group_rows`` for each group of rows that it computes;
  - with ``target``, a busiest load below ``ceil(target * mean)`` counts as that in a cost.

  ``copies`` is the most that a rank has to receive or send, on whose links the transfer waits. It
  receives a copy for each slot that it fills. With ``transfer="direct"`` it sends the copies of
  its experts. Otherwise it sends each of its experts that have copies once, and whoever holds
  one at most forwards it once; ranks that have both to do forward all but one of the copies that
  such ranks hold of an expert: the one last in the chain, which was placed first. So
  ``transfer_tree`` finds trees in which no rank sends more than ``copies``.

  Args:
    load_GE: ``[G, E]`` int32, assignments of each source rank to each expert, not negative. The
      total must fit int32; a concrete matrix is checked, a traced one is not.
    config: ``replica_slots``, ``objective``, ``target``, ``min_tokens_per_replica``,
      ``domain_size``, ``transfer`` and ``implementation`` are used.
    cost: what copies cost, and the rows of a round; needed by ``objective="time"``, else not
      used. Values from 2^31 count as 2^31 − 1.

  Returns:
    The plan. Slots are filled from the first up, every replica serves at least one assignment,
    an expert is at most once on a rank, and no load leaves its domain.

  Raises:
    TypeError: ``load_GE`` is not int32, or ``config`` no ``BalanceConfig``.
    ValueError: a shape, ``domain_size``, a load or the total is not as described, or the cost is
      missing.
    NotImplementedError: ``implementation="mosaic_gpu"`` for sizes that the kernels do not hold.

  >>> import jax.numpy as jnp
  >>> config = BalanceConfig(replica_slots=1, objective="balance")
  >>> plan = plan_quotas(jnp.array([[6, 2, 0, 0], [2, 2, 1, 1]], jnp.int32), config)
  >>> plan.replica_expert.tolist()
  [[-1], [0]]
  >>> plan.quota.tolist()
  [[3, 5], [4, 0], [0, 1], [0, 1]]
  """
  check_config(config)
  check_load(load_GE)
  return _plan_anywhere(load_GE, config, *set_up(load_GE, config, cost))


def plan_exactly(load_GE: Array, config: BalanceConfig) -> Plan:
  """The plan of ``exact.construct``: no rank is above the mean of its domain, rounded up.

  Args:
    load_GE: as in ``plan_quotas``.
    config: ``replica_slots``, ``domain_size``, ``transfer`` and ``implementation`` count.

  Raises:
    TypeError: as in ``plan_quotas``.
    ValueError: ``replica_slots`` is below ``exact.slots_that_suffice``, or as in ``plan_quotas``.
    NotImplementedError: as in ``plan_quotas``.
  """
  check_config(config)
  check_load(load_GE)
  config = dataclasses.replace(config, objective="balance", target=None, min_tokens_per_replica=1)
  setup, _ = set_up(load_GE, config, None)
  num_ranks, num_experts = load_GE.shape
  size = setup.domain_size
  enough = exact.slots_that_suffice(num_experts // num_ranks * size, size)
  if setup.num_slots < enough:
    raise ValueError(
      f"replica_slots: expected at least {enough}, which suffice for every load, for "
      f'strategy="exact", got {setup.num_slots}'
    )
  return _plan_anywhere(load_GE, config, setup._replace(searches=False), None)


def _plan_anywhere(
  load_GE: Array, config: BalanceConfig, setup: Setup, cost: PlanCost | None
) -> Plan:
  candidates = {
    "mosaic_gpu": lambda: _plan_on_gpu(load_GE, setup, cost),
    "portable": lambda: _plan(load_GE, setup, cost),
  }
  return first_that_can(_implementations(config, setup), candidates)


def home_quota(load_GE: Array) -> Array:
  """``[E, G]`` int32: every assignment runs on its expert's home.

  Raises:
    TypeError: ``load_GE`` is not int32.
    ValueError: a shape, a load or the total is not as in ``plan_quotas``.
  """
  check_load(load_GE)
  num_ranks, num_experts = load_GE.shape
  load_E1 = jnp.sum(load_GE, axis=0, dtype=jnp.int32)[:, None]
  home_E1 = (jnp.arange(num_experts) // (num_experts // num_ranks))[:, None]
  return jnp.where(home_E1 == jnp.arange(num_ranks)[None, :], load_E1, 0)


def check_load(load_GE: Array) -> None:
  """Raises if a load matrix is not as in ``plan_quotas``; a traced one is checked for its shape."""
  check_array("load_GE", load_GE, ("G", "E"), np.int32)
  num_ranks, num_experts = load_GE.shape
  if load_GE.size == 0 or num_experts % num_ranks:
    raise ValueError(
      f"load_GE: expected shape [G, E], E a positive multiple of G, got {list(load_GE.shape)}"
    )
  if isinstance(load_GE, Tracer) or not getattr(load_GE, "is_fully_addressable", True):
    return
  values = np.asarray(load_GE)
  if values.min() < 0:
    raise ValueError(f"load_GE: expected loads of at least 0, got {values.min()}")
  total = values.sum(dtype=np.int64)
  if total > INT32_MAX:
    raise ValueError(f"load_GE: expected a total below 2**31, got {total}")


def set_up(
  load_GE: Array, config: BalanceConfig, cost: PlanCost | None
) -> tuple[Setup, PlanCost | None]:
  num_ranks, num_experts = load_GE.shape
  if config.objective == "time" and cost is None:
    raise ValueError('cost: expected a PlanCost for objective="time", got None')
  setup = Setup(
    domain_size=config.domain_of(num_ranks),
    num_slots=fit.num_slots(config, num_experts, num_ranks),
    min_tokens=config.min_tokens_per_replica,
    transfer=config.transfer,
    by_time=config.objective == "time",
    target=config.target,
  )
  # By balance the cost is dropped, so that it cannot cause another compilation.
  return setup, _as_int32(cost) if setup.by_time else None


def _implementations(config: BalanceConfig, setup: Setup) -> Implementations:
  """Without room for replicas there is nothing for a kernel to do."""
  if setup.num_slots == 0 or setup.domain_size == 1:
    return ("portable",)
  return implementation.resolve(config.implementation, "plan")


def _as_int32(cost: PlanCost | None) -> PlanCost | None:
  if cost is None:
    return None

  def convert(value: int | Array) -> Array:
    return jnp.asarray(min(value, INT32_MAX) if isinstance(value, int) else value, jnp.int32)

  return PlanCost(*map(convert, cost))


@functools.partial(jax.jit, static_argnums=1)
def _plan(load_GE: Array, setup: Setup, cost: PlanCost | None) -> Plan:
  # Under vmap one plan after another. Else JAX selects by the elements' conditions among constants
  # of a branch, which then vary over mesh axes that the branch was not traced for.
  @jax.custom_batching.sequential_vmap
  def plan_one(load_GE: Array, cost: PlanCost | None) -> Plan:
    return _plan_one(load_GE, setup, cost)

  return plan_one(load_GE, cost)


def _plan_one(load_GE: Array, setup: Setup, cost: PlanCost | None) -> Plan:
  num_ranks, num_experts = load_GE.shape
  domains, per_rank = num_ranks // setup.domain_size, num_experts // num_ranks
  load_E = jnp.sum(load_GE, axis=0, dtype=jnp.int32)
  load_NRM = load_E.reshape(domains, setup.domain_size, per_rank)

  def no_copies() -> Plan:
    # Made from the load, these vary over the same mesh axes, as branches inside shard_map must.
    zero_GS = jnp.broadcast_to(load_E[0] * 0, (num_ranks, setup.num_slots))
    none_GS = zero_GS - 1
    return Plan(none_GS, _quota(load_E, num_ranks, none_GS, zero_GS), none_GS)

  def planned(expert_NRS: Array, tokens_NRS: Array) -> Plan:
    slots = join_domains(expert_NRS, per_rank), join_domains(tokens_NRS)
    return plan_slots(load_E, *slots, setup.transfer)

  if setup.num_slots == 0 or setup.domain_size == 1:
    return no_copies()
  if not setup.searches:
    return planned(*exact.construct(load_NRM, setup.num_slots, setup.count_copies)[1:])
  # The loops of a search make a GPU's host wait many times.
  return lax.cond(
    may_gain(load_NRM, setup, cost),
    lambda: planned(*best_placement(load_NRM, setup, cost)),
    no_copies,
  )


def join_domains(value_NRS: Array, per_rank: int = 0) -> Array:
  """``[G, S]`` from domains; experts are counted over all of them if a rank has ``per_rank``."""
  domains, size, num_slots = value_NRS.shape
  first_N = jnp.arange(domains, dtype=jnp.int32) * (size * per_rank)
  value_NRS = jnp.where(value_NRS < 0, -1, value_NRS + first_N[:, None, None])
  return value_NRS.reshape(domains * size, num_slots)


def plan_slots(
  load_E: Array,
  replica_expert_GS: Array,
  tokens_GS: Array,
  transfer: Literal["auto", "direct", "relay"],
) -> Plan:
  """The plan in which replicas serve their tokens and homes what remains.

  Args:
    load_E: ``[E]`` int32, assignments of each expert.
    replica_expert_GS: ``[G, S]`` int32, the expert in each slot, −1 if empty.
    tokens_GS: ``[G, S]`` int32, what the slot serves, 0 if empty; of an expert no more than its
      load.
    transfer: as in ``BalanceConfig``.
  """
  num_ranks, (num_experts,) = replica_expert_GS.shape[0], load_E.shape
  quota_EG = _quota(load_E, num_ranks, replica_expert_GS, tokens_GS)
  parent_GS = transfer_tree(replica_expert_GS, num_experts=num_experts, transfer=transfer)
  return Plan(replica_expert_GS, quota_EG, parent_GS)


@functools.partial(jax.jit, static_argnums=1)
def _plan_on_gpu(load_GE: Array, setup: Setup, cost: PlanCost | None) -> Plan:
  """What ``_plan`` computes, bit for bit, by kernels for Hopper.

  Raises:
    NotImplementedError: a size that the kernels do not hold, or nothing to plan.
  """
  planned = kernels.plan_quota(
    load_GE,
    domain_size=setup.domain_size,
    num_slots=setup.num_slots,
    min_tokens=setup.min_tokens,
    transfer=setup.transfer,
    by_time=setup.by_time,
    target=setup.target,
    cost=None if cost is None else jnp.stack([jnp.asarray(x, jnp.int32) for x in cost]),
    steps=setup.steps,
    searches=setup.searches,
  )
  return Plan(*planned)


def _quota(load_E: Array, num_ranks: int, expert_GS: Array, tokens_GS: Array) -> Array:
  """Replicas serve their tokens, homes what remains."""
  num_experts = load_E.shape[0]
  rank_GS = lax.broadcasted_iota(jnp.int32, expert_GS.shape, 0)
  away_EG = jnp.zeros((num_experts, num_ranks), jnp.int32)
  # A negative index would wrap around; one past the end is dropped.
  expert_GS = jnp.where(expert_GS < 0, num_experts, expert_GS)
  away_EG = away_EG.at[expert_GS, rank_GS].add(tokens_GS, mode="drop")
  home_E = load_E - jnp.sum(away_EG, axis=1, dtype=jnp.int32)
  expert = jnp.arange(num_experts)
  return away_EG.at[expert, expert // (num_experts // num_ranks)].add(home_E)
