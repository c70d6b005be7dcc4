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


@dataclasses.dataclass(frozen=True)
class _Held:
  """Stands for a planner whose arrays are elsewhere."""

  tree: Any
  others: tuple[Any, ...]  # the leaves that are no arrays, where they were; ``None`` for arrays
  arrays: tuple[bool, ...]  # which of the leaves are

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
  arrays = tuple(isinstance(leaf, jax.Array) for leaf in leaves)
  others = tuple(None if is_array else leaf for leaf, is_array in zip(leaves, arrays, strict=True))
  held = _Held(tree, others, arrays)
  try:
    hash(held)
  except TypeError:
    return config, []
  found = [_anywhere(leaf) for leaf, is_array in zip(leaves, arrays, strict=True) if is_array]
  return (_with_planner(config, held), found) if found else (config, [])


def together(config: BalanceConfig, arrays: list[Array]) -> BalanceConfig:
  """The configuration with its planner's arrays."""
  held = _planner(config)
  if not isinstance(held, _Held):
    return config
  left = iter(arrays)
  leaves = [
    next(left) if is_array else other
    for other, is_array in zip(held.others, held.arrays, strict=True)
  ]
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
