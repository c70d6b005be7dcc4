"""What a layer did, measured on the way."""

import jax.numpy as jnp
from jax import lax

from ultraep_jax.config import BalanceConfig
from ultraep_jax.load import expert_load
from ultraep_jax.relay import egress_per_rank
from ultraep_jax.route import slot_sizes
from ultraep_jax.types import Array, ExpertWeights, LayerStats, Plan, Routes


def layer_stats(
  expert_index_TK: Array,
  load_GE: Array,
  plan: Plan,
  routes: Routes,
  rounds: Array,
  weights: ExpertWeights,
  dtype: jnp.dtype,
  config: BalanceConfig,
  axis_name: str,
) -> LayerStats:
  """Statistics of one token group, equal on its ranks.

  Args:
    expert_index_TK: this rank's choices, before invalid ones are dropped.
    load_GE: the load matrix.
    plan: the plan.
    routes: this rank's routes.
    rounds: rounds that the whole mesh runs.
    weights: this rank's home experts, for the bytes of a copy.
    dtype: that copies travel in.
    config: gives the domains.
    axis_name: the expert mesh axis.
  """
  num_experts, num_ranks = plan.quota.shape
  expert_load_E = jnp.sum(load_GE, axis=0, dtype=jnp.int32)
  before_G = jnp.sum(expert_load_E.reshape(num_ranks, -1), axis=1, dtype=jnp.int32)
  domain = num_ranks if config.domain_size is None else config.domain_size
  domain_load = jnp.sum(before_G.reshape(-1, domain), axis=1, dtype=jnp.int32)
  replicas = jnp.sum(plan.replica_expert >= 0, dtype=jnp.int32)

  rank = lax.axis_index(axis_name)
  remote = (routes.dest_TK >= 0) & (routes.dest_TK != rank)
  invalid = (expert_index_TK < -1) | (expert_index_TK >= num_experts)
  flags = (remote, expert_index_TK == -1, invalid)
  counts = jnp.stack([jnp.sum(flag, dtype=jnp.int32) for flag in flags])
  sent_G = expert_load(routes.dest_TK, num_ranks)
  counts = lax.psum(jnp.concatenate([counts, sent_G]), axis_name)
  return LayerStats(
    load_GE=load_GE,
    expert_load_E=expert_load_E,
    load_before_G=before_G,
    load_planned_G=jnp.sum(plan.quota, axis=0, dtype=jnp.int32),
    load_after_G=counts[len(flags) :],
    load_floor=-(-jnp.max(domain_load) // domain),
    replicas=replicas,
    max_fanout=jnp.max(egress_per_rank(plan.parent)),
    replica_bytes=replicas.astype(jnp.float32) * (weights.expert_size * dtype.itemsize),
    remote_assignments=counts[0],
    rounds=rounds,
    masked=counts[1],
    invalid=counts[2],
    replica_expert_GS=plan.replica_expert,
    replica_parent_GS=plan.parent,
    replica_load_GS=slot_sizes(plan)[:, num_experts // num_ranks :],
  )
