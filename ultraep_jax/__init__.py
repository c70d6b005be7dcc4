"""Exact-load expert balancing for expert-parallel Mixture-of-Experts layers."""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from ultraep_jax import activations, strategies, testing, trace
from ultraep_jax.activations import GatedUnit
from ultraep_jax.config import BalanceConfig
from ultraep_jax.devices.device import Device
from ultraep_jax.doctor import doctor
from ultraep_jax.gating import GatingConfig
from ultraep_jax.moe import REMAT_NAMES, moe
from ultraep_jax.planning.plan import plan_quotas
from ultraep_jax.planning.route import route_tokens
from ultraep_jax.sharded import sharded_moe
from ultraep_jax.types import ExpertWeights, LayerStats, Layout, Plan, PlanCost, Routes

if TYPE_CHECKING:
  from ultraep_jax import linen, nnx

__version__ = "0.1.0"

__all__ = [
  "REMAT_NAMES",
  "BalanceConfig",
  "Device",
  "ExpertWeights",
  "GatedUnit",
  "GatingConfig",
  "LayerStats",
  "Layout",
  "Plan",
  "PlanCost",
  "Routes",
  "activations",
  "doctor",
  "linen",
  "moe",
  "nnx",
  "plan_quotas",
  "route_tokens",
  "sharded_moe",
  "strategies",
  "testing",
  "trace",
]


def __getattr__(name: str) -> ModuleType:
  """The modules for Flax, which takes longer to import than all else here."""
  if name in ("linen", "nnx"):
    return importlib.import_module(f"{__name__}.{name}")
  raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
  return __all__
