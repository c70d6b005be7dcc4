"""Balancers behind one signature.

A planner is a function ``(load_GE, config, cost) -> Plan`` of jax.numpy operations. A strategy
names one and may also change the router's choice, which only measurements do.

Strategies that need nothing but the batch have a name for ``BalanceConfig.strategy``. Those that
use the history of loads, ``eplb`` and ``lplb``, are modules with pure functions ``init`` and
``update`` for a state that the caller keeps, and ``planner(state)``.
"""

from collections.abc import Callable
from typing import NamedTuple

from ultraep_jax.config import BalanceConfig
from ultraep_jax.strategies import eplb as eplb
from ultraep_jax.strategies import eplb_plus, exact, ideal, quota
from ultraep_jax.strategies import lplb as lplb
from ultraep_jax.strategies import none as none
from ultraep_jax.types import Array, Plan, PlanCost

Planner = Callable[[Array, BalanceConfig, PlanCost | None], Plan]
Reassign = Callable[[Array, Array | int, int, int], Array]


class Strategy(NamedTuple):
  """How a layer is balanced.

  Attributes:
    name: for messages.
    plan: makes a ``Plan`` from the load matrix; the same on every rank, which otherwise wait for
      each other for ever.
    reassign: ``(expert_index_TK, rank, num_experts, num_ranks) -> expert_index_TK``, replaces
      the router's choice before loads are counted. ``None``: the choice stands.
  """

  name: str
  plan: Planner
  reassign: Reassign | None = None


_STRATEGIES = {
  "quota": Strategy("quota", quota.plan),
  "none": Strategy("none", none.plan),
  "ideal": Strategy("ideal", none.plan, ideal.reassign),
  "exact": Strategy("exact", exact.plan),
  "eplb+": Strategy("eplb+", eplb_plus.plan),
}


def resolve(strategy: str | Strategy | Planner) -> Strategy:
  """The strategy of that name, or made from a planner.

  Raises:
    TypeError: neither a name, a planner function nor a ``Strategy``.
    ValueError: an unknown name.
  """
  if isinstance(strategy, Strategy):
    return strategy
  if isinstance(strategy, str):
    if strategy not in _STRATEGIES:
      raise ValueError(f"strategy: expected one of {tuple(_STRATEGIES)}, got {strategy!r}")
    return _STRATEGIES[strategy]
  if callable(strategy):
    return Strategy(getattr(strategy, "__name__", "custom"), strategy)
  raise TypeError(
    f"strategy: expected a name, a planner function or a Strategy, got {type(strategy).__name__}"
  )
