"""Traces to test with: statistics as a layer would give them, without compiling a layer."""

import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np

from ultraep_jax import trace
from ultraep_jax.config import BalanceConfig
from ultraep_jax.planning.plan import plan_quotas
from ultraep_jax.planning.relay import egress_per_rank
from ultraep_jax.planning.route import slot_sizes
from ultraep_jax.testing import zipf_loads
from ultraep_jax.types import LayerStats

CONFIG = BalanceConfig(replica_slots=2, objective="balance")
EXPERT_BYTES = 1000


def loads(seed: int, ranks: int = 4, experts: int = 8, ratio: float = 2.0) -> np.ndarray:
  return zipf_loads(seed, experts, ranks, tokens=64, top_k=2, ratio=ratio)


def stats_of(load_GE: np.ndarray, config: BalanceConfig = CONFIG) -> LayerStats:
  """One token group's, without leading axes."""
  plan = plan_quotas(jnp.asarray(load_GE), config)
  ranks, experts = load_GE.shape
  quota_EG = np.asarray(plan.quota)
  copies = int((np.asarray(plan.replica_expert) >= 0).sum())
  leaves: dict[str, Any] = {
    "load_GE": load_GE,
    "expert_load_E": load_GE.sum(axis=0, dtype=np.int32),
    "load_before_G": load_GE.sum(axis=0).reshape(ranks, -1).sum(axis=1, dtype=np.int32),
    "load_planned_G": quota_EG.sum(axis=0, dtype=np.int32),
    "load_after_G": quota_EG.sum(axis=0, dtype=np.int32),
    "load_floor": -(-load_GE.sum(dtype=np.int32) // ranks),
    "replicas": np.int32(copies),
    "max_fanout": np.asarray(egress_per_rank(plan.parent)).max(),
    "replica_bytes": np.float32(copies * EXPERT_BYTES),
    "remote_assignments": (load_GE - np.minimum(load_GE, quota_EG.T)).sum(dtype=np.int32),
    "rounds": np.int32(1),
    "masked": np.int32(3),
    "invalid": np.int32(0),
    "replica_expert_GS": np.asarray(plan.replica_expert),
    "replica_parent_GS": np.asarray(plan.parent),
    "replica_load_GS": np.asarray(slot_sizes(plan))[:, experts // ranks :],
  }
  return LayerStats(**leaves)


def write(
  path: pathlib.Path, *, steps: int = 6, layers: int = 2, name: str | None = None, **sizes: Any
) -> pathlib.Path:
  """A sound trace of a few steps."""
  with trace.Recorder(path, name=name, config=CONFIG) as recorder:
    for step in range(steps):
      stats = {f"layer{i}": stats_of(loads(10 * step + i, **sizes)) for i in range(layers)}
      recorder.record(step, stats, axes=())
      if step == steps // 2:
        recorder.flush()  # two chunks
  return path
