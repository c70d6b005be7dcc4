"""What a layer did: measured on the way, and what follows from it.

Statistics are some thirty small kernels on a GPU. A model that scans over layers keeps what its
layers measured and makes the statistics of all of them afterwards, at once.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from ultraep_jax.planning.load import expert_load
from ultraep_jax.planning.relay import egress_per_rank
from ultraep_jax.planning.route import slot_sizes
from ultraep_jax.types import Array, LayerStats, Plan, Routes

_FEW_KINDS = 10  # eight ranks; counters are faster where there are many


class Measured(NamedTuple):
  """What one rank keeps of a layer for its statistics.

  All but ``count_X`` is the same on the ranks of a token group.

  Attributes:
    load_GE: ``[G, E]`` int32, the load matrix.
    quota_EG: of the plan.
    replica_expert_GS: of the plan; ``None`` without slots, as empty arrays that come out of loops
      crash XLA's compilers.
    parent_GS: likewise.
    rounds: ``[]`` int32, rounds that the whole mesh runs.
    count_X: ``[G + 2]`` int32, this rank's assignments that it sent to each rank, and its masked
      and invalid ones.
  """

  load_GE: Array
  quota_EG: Array
  replica_expert_GS: Array | None
  parent_GS: Array | None
  rounds: Array
  count_X: Array

  @property
  def plan(self) -> Plan:
    if self.replica_expert_GS is None or self.parent_GS is None:
      none_GS = jnp.zeros((self.load_GE.shape[0], 0), jnp.int32)
      return Plan(none_GS, self.quota_EG, none_GS)
    return Plan(self.replica_expert_GS, self.quota_EG, self.parent_GS)


class Counts(NamedTuple):
  """Assignments of all ranks of a token group, named as in ``LayerStats``."""

  load_after_G: Array
  remote_assignments: Array
  masked: Array
  invalid: Array


def measure(
  expert_index_TK: Array, load_GE: Array, plan: Plan, routes: Routes, rounds: Array
) -> Measured:
  """What is to be kept of a layer.

  Args:
    expert_index_TK: this rank's choices, before invalid ones are dropped.
    load_GE: the load matrix.
    plan: the plan.
    routes: this rank's routes.
    rounds: rounds that the whole mesh runs.
  """
  num_experts, num_ranks = plan.quota.shape
  invalid = (expert_index_TK < -1) | (expert_index_TK >= num_experts)
  kind_TK = jnp.where(expert_index_TK == -1, num_ranks, jnp.where(invalid, num_ranks + 1, -1))
  # Counted in one pass; a valid assignment that went nowhere would be missing.
  kind_TK = jnp.where(routes.dest_TK >= 0, routes.dest_TK, kind_TK)
  slots = plan.replica_expert.shape[1]
  return Measured(
    load_GE=load_GE,
    # Where a kernel makes it, XLA runs that twice, once into what a scan keeps, without a barrier.
    quota_EG=lax.optimization_barrier(plan.quota),
    replica_expert_GS=plan.replica_expert if slots else None,
    parent_GS=plan.parent if slots else None,
    rounds=rounds,
    count_X=_count(kind_TK, num_ranks + 2),
  )


def _count(kind_TK: Array, num_kinds: int) -> Array:
  """``[num_kinds]`` int32, how many there are of each; others are counted nowhere."""
  if num_kinds > _FEW_KINDS:
    return expert_load(kind_TK, num_kinds)
  # A reduction that fuses with what makes the kinds. Additions to counters would not.
  is_kind_AX = kind_TK.reshape(-1)[:, None] == jnp.arange(num_kinds, dtype=jnp.int32)[None, :]
  return jnp.sum(is_kind_AX, axis=0, dtype=jnp.int32)


def sum_counts(count_X: Array, axis_name: str) -> Counts:
  """Of all ranks, from ``Measured.count_X`` of this one with any leading axes."""
  sent_G = count_X[..., :-2]
  remote = jnp.sum(sent_G, axis=-1, dtype=jnp.int32) - sent_G[..., lax.axis_index(axis_name)]
  counts = jnp.concatenate([count_X, remote[..., None]], axis=-1)
  counts = lax.psum(counts, axis_name)
  masked, invalid, remote = (counts[..., i] for i in (-3, -2, -1))
  return Counts(counts[..., :-3], remote, masked, invalid)


def layer_stats(
  measured: Measured, counts: Counts, copy_bytes: int, domain_size: int | None
) -> LayerStats:
  """Statistics of one token group.

  Args:
    measured: by any of its ranks.
    counts: of all of them.
    copy_bytes: of one copy.
    domain_size: ranks that copies stay among; ``None``: all.
  """
  load_GE, plan = measured.load_GE, measured.plan
  num_experts, num_ranks = plan.quota.shape
  expert_load_E = jnp.sum(load_GE, axis=0, dtype=jnp.int32)
  before_G = jnp.sum(expert_load_E.reshape(num_ranks, -1), axis=1, dtype=jnp.int32)
  domain = num_ranks if domain_size is None else domain_size
  domain_load = jnp.sum(before_G.reshape(-1, domain), axis=1, dtype=jnp.int32)
  replicas = jnp.sum(plan.replica_expert >= 0, dtype=jnp.int32)
  return LayerStats(
    load_GE=load_GE,
    expert_load_E=expert_load_E,
    load_before_G=before_G,
    load_planned_G=jnp.sum(plan.quota, axis=0, dtype=jnp.int32),
    load_floor=-(-jnp.max(domain_load) // domain),
    replicas=replicas,
    max_fanout=jnp.max(egress_per_rank(plan.parent)),
    replica_bytes=replicas.astype(jnp.float32) * copy_bytes,
    rounds=measured.rounds,
    replica_expert_GS=plan.replica_expert,
    replica_parent_GS=plan.parent,
    replica_load_GS=slot_sizes(plan)[:, num_experts // num_ranks :],
    **counts._asdict(),
  )
