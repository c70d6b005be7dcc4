"""Exact-load expert balancing for expert-parallel Mixture-of-Experts layers."""

from ultraep_jax import linen as linen
from ultraep_jax import nnx as nnx
from ultraep_jax import strategies as strategies
from ultraep_jax import testing as testing
from ultraep_jax import trace as trace
from ultraep_jax.config import BalanceConfig as BalanceConfig
from ultraep_jax.devices.device import Device as Device
from ultraep_jax.doctor import doctor as doctor
from ultraep_jax.gating import GatingConfig as GatingConfig
from ultraep_jax.moe import REMAT_NAMES as REMAT_NAMES
from ultraep_jax.moe import moe as moe
from ultraep_jax.planning.plan import plan_quotas as plan_quotas
from ultraep_jax.planning.route import route_tokens as route_tokens
from ultraep_jax.sharded import sharded_moe as sharded_moe
from ultraep_jax.types import ExpertWeights as ExpertWeights
from ultraep_jax.types import LayerStats as LayerStats
from ultraep_jax.types import Plan as Plan
from ultraep_jax.types import PlanCost as PlanCost
from ultraep_jax.types import Routes as Routes
