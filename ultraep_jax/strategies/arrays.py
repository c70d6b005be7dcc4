"""The arrays that a planner holds, apart from a configuration, which is static.

A planner that holds arrays is a ``jax.tree_util.Partial``, by itself or in a ``Strategy``. As
arguments of a program its arrays may be traced, and lie on a mesh of Explicit axes::

  config(Partial(planner, history))  ──►  config(Held), [history's arrays]  ──►  config(Partial(…))
"""

import dataclasses
from typing import Any, NoReturn

import jax
import numpy as np
from jax.core import Tracer
from jax.tree_util import Partial

from ultraep_jax.config import BalanceConfig, Strategy
from ultraep_jax.types import Array

_ARRAY = object()


@dataclasses.dataclass(frozen=True)
class _Held:
  """Stands for a planner whose arrays are elsewhere."""

  tree: Any
  leaves: tuple[Any, ...]  # ``_ARRAY`` in the place of each array

  def __call__(self, *_: Any) -> NoReturn:
    raise AssertionError("expected the planner with its arrays")


def apart(config: BalanceConfig) -> tuple[BalanceConfig, list[Any]]:
  """The configuration without the arrays of its planner, and these.

  One that holds none stays as it is, and so does one with other parts that have no hash.
  """
  planner = _planner(config)
  if not isinstance(planner, Partial):
    return config, []
  leaves, tree = jax.tree.flatten(planner)
  found = [_anywhere(leaf) for leaf in leaves if isinstance(leaf, jax.Array)]
  held = _Held(tree, tuple(_ARRAY if isinstance(leaf, jax.Array) else leaf for leaf in leaves))
  try:
    hash(held)
  except TypeError:
    return config, []
  return (_with_planner(config, held), found) if found else (config, [])


def together(config: BalanceConfig, arrays: list[Array]) -> BalanceConfig:
  """The configuration with its planner's arrays."""
  held = _planner(config)
  if not isinstance(held, _Held):
    return config
  left = iter(arrays)
  leaves = [next(left) if leaf is _ARRAY else leaf for leaf in held.leaves]
  return _with_planner(config, held.tree.unflatten(leaves))


def _planner(config: BalanceConfig) -> Any:
  return config.strategy.plan if isinstance(config.strategy, Strategy) else config.strategy


def _with_planner(config: BalanceConfig, planner: Any) -> BalanceConfig:
  if isinstance(config.strategy, Strategy):
    planner = config.strategy._replace(plan=planner)
  return dataclasses.replace(config, strategy=planner)


def _anywhere(leaf: Array) -> Any:
  """On no device, so that a history of one device goes with a layer of others."""
  return leaf if isinstance(leaf, Tracer) or not leaf.is_fully_addressable else np.asarray(leaf)
