"""Balancers behind one signature.

A planner is a function ``(load_GE, config, cost) -> Plan`` of jax.numpy operations. A strategy
names one and may also change the router's choice, which only measurements do.

Strategies that need nothing but the batch have a name for ``BalanceConfig.strategy``. Those that
use the history of loads, ``eplb`` and ``lplb``, are modules with pure functions ``init`` and
``update`` for a state that the caller keeps, and ``planner(state)``.
"""

from ultraep_jax.config import Planner as Planner
from ultraep_jax.config import Strategy as Strategy
from ultraep_jax.config import check_choice, strategy_name
from ultraep_jax.strategies import eplb as eplb
from ultraep_jax.strategies import eplb_plus, exact, ideal, quota
from ultraep_jax.strategies import lplb as lplb
from ultraep_jax.strategies import none as none

_STRATEGIES = (
  Strategy("quota", quota.plan),
  Strategy("none", none.plan),
  Strategy("ideal", none.plan, ideal.reassign),
  Strategy("exact", exact.plan),
  Strategy("eplb+", eplb_plus.plan),
)
_BY_NAME = {strategy.name: strategy for strategy in _STRATEGIES}


def resolve(strategy: str | Strategy | Planner) -> Strategy:
  """The strategy of that name, or made from a planner.

  Raises:
    TypeError: neither a name, a planner function nor a ``Strategy``.
    ValueError: an unknown name.
  """
  if isinstance(strategy, Strategy):
    return strategy
  if isinstance(strategy, str):
    check_choice("strategy", strategy, tuple(_BY_NAME))
    return _BY_NAME[strategy]
  if callable(strategy):
    return Strategy(strategy_name(strategy), strategy)
  raise TypeError(
    f"strategy: expected a name, a planner function or a Strategy, got {type(strategy).__name__}"
  )
