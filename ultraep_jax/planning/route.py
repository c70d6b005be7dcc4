"""Where every assignment runs, in closed form from the load matrix and the plan.

Per expert, put all assignments on a line ordered by source rank. Each host first keeps what
it sent itself, as far as its quota goes (locality). Of the rest, every source owns an
interval and every host owns an interval; an assignment runs on the host whose interval
contains it. Both sums are exact by construction, and every rank can compute the destination
row of its own assignments without asking anyone.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer

import pallas_kernels as kernels
from ultraep_jax import implementation
from ultraep_jax.checks import check_array, check_config
from ultraep_jax.config import BalanceConfig
from ultraep_jax.implementation import first_that_can
from ultraep_jax.planning.load import drop_invalid, position_in_group
from ultraep_jax.types import Array, Plan, Routes


def slot_experts(plan: Plan) -> Array:
  """The expert in each slot of each rank, ``[G, P]`` int32, −1 in empty slots."""
  num_experts, num_ranks = plan.quota.shape
  home_GM = jnp.arange(num_experts, dtype=jnp.int32).reshape(num_ranks, -1)
  return jnp.concatenate([home_GM, plan.replica_expert], axis=1)


def slot_sizes(plan: Plan) -> Array:
  """Rows of each slot of each rank, ``[G, P]`` int32."""
  return slot_rows(plan.quota, slot_experts(plan))


def slot_rows(quota_EG: Array, expert_GP: Array) -> Array:
  """Rows that ranks compute of the experts in their slots, ``[..., G, P]`` int32; −1 is empty."""
  quota_GE = jnp.swapaxes(quota_EG, -1, -2)
  row_GP = jnp.take_along_axis(quota_GE, jnp.maximum(expert_GP, 0), axis=-1)
  return jnp.where(expert_GP >= 0, row_GP, 0)


@jax.named_scope("uep.route")
def route_tokens(
  expert_index_TK: Array, load_GE: Array, plan: Plan, rank: Array | int, config: BalanceConfig
) -> Routes:
  """Routes one rank's assignments (UltraEP's reroute, with exact sums on both sides).

  Args:
    expert_index_TK: ``[T, K]`` int32, this rank's choices; out of range is masked.
    load_GE: ``[G, E]`` int32, the load matrix of all ranks.
    plan: the plan for that matrix.
    rank: this rank.
    config: gives the implementation.

  Returns:
    The routes of this rank; memory is O(E·G + T·K).

  Raises:
    ValueError: shapes do not fit together, or there is no such rank.
    TypeError: a dtype is wrong.
  """
  check_config(config)
  num_experts, num_ranks = plan.quota.shape
  check_array("load_GE", load_GE, (num_ranks, num_experts), jnp.int32)
  check_array("expert_index_TK", expert_index_TK, ("T", "K"), jnp.integer)
  if not isinstance(rank, Tracer) and not 0 <= int(rank) < num_ranks:
    raise ValueError(f"rank: expected one in [0, {num_ranks}), got {rank}")
  arguments = (expert_index_TK, load_GE, plan, rank)
  candidates = {
    "mosaic_gpu": lambda: _route_on_gpu(*arguments),
    "portable": lambda: _route(*arguments),
  }
  return first_that_can(implementation.resolve(config.implementation, "route"), candidates)


def _route(expert_index_TK: Array, load_GE: Array, plan: Plan, rank: Array | int) -> Routes:
  num_experts = plan.quota.shape[0]
  rank = jnp.asarray(rank, jnp.int32)
  lines = _expert_lines(load_GE, plan, rank)

  expert_A = drop_invalid(expert_index_TK, num_experts).reshape(-1)
  valid_A = expert_A >= 0
  ordinal_A, _ = position_in_group(jnp.where(valid_A, expert_A, num_experts), num_experts)
  expert_A = jnp.where(valid_A, expert_A, 0)

  kept_A = ordinal_A < lines.kept_E[expert_A]
  place_A = lines.source_start_E[expert_A] + ordinal_A - lines.kept_E[expert_A]
  host_A = jnp.where(kept_A, rank, _find_host(lines.host_end_EG, expert_A, place_A))
  # Within a host's rows of this expert, this rank's begin at row_start; its interval of the
  # line enters the host's at the later of the two starts.
  offset_A = place_A - jnp.maximum(
    lines.source_start_E[expert_A], lines.host_start_EG[expert_A, host_A]
  )
  row_A = lines.row_start_EG[expert_A, host_A] + jnp.where(kept_A, ordinal_A, offset_A)

  return Routes(
    dest_TK=jnp.where(valid_A, host_A, -1).reshape(expert_index_TK.shape),
    row_TK=jnp.where(valid_A, row_A, 0).reshape(expert_index_TK.shape),
    group_size_P=slot_sizes(plan)[rank],
  )


def _route_on_gpu(
  expert_index_TK: Array,
  load_GE: Array,
  plan: Plan,
  rank: Array | int,
  tuning: "kernels.RoutingTuning | None" = None,
) -> Routes:
  """What ``_route`` computes, bit for bit, by a kernel for Hopper.

  Raises:
    NotImplementedError: nothing to route, or more experts than the kernel holds.
  """
  num_experts, num_ranks = plan.quota.shape
  replica_GS = plan.replica_expert
  num_slots = num_experts // num_ranks + replica_GS.shape[1]
  if not replica_GS.shape[1]:  # the kernel wants a slot, if an empty one
    replica_GS = jnp.full((num_ranks, 1), -1, jnp.int32)
  dest_TK, row_TK, size_P = kernels.route_rows(
    expert_index_TK.astype(jnp.int32),
    load_GE,
    replica_GS,
    plan.quota,
    jnp.asarray(rank, jnp.int32),
    tuning=tuning,
  )
  return Routes(dest_TK, row_TK, size_P[:num_slots])


class _Lines(NamedTuple):
  """Every expert's line as one rank sees it."""

  kept_E: Array  # assignments this rank keeps for itself
  source_start_E: Array  # where this rank's interval of the rest begins
  host_start_EG: Array
  host_end_EG: Array
  row_start_EG: Array  # this rank's first row of the expert on each host


def _expert_lines(load_GE: Array, plan: Plan, rank: Array) -> _Lines:
  load_EG = load_GE.T
  kept_EG = jnp.minimum(load_EG, plan.quota)
  source_end_EG = jnp.cumsum(load_EG - kept_EG, axis=1, dtype=jnp.int32)
  source_start_E = (source_end_EG - (load_EG - kept_EG))[:, rank]
  host_end_EG = jnp.cumsum(plan.quota - kept_EG, axis=1, dtype=jnp.int32)
  host_start_EG = host_end_EG - (plan.quota - kept_EG)

  # Rows of the expert on each host that come from sources before this one.
  before_EG = jnp.clip(source_start_E[:, None], host_start_EG, host_end_EG) - host_start_EG
  host_G = jnp.arange(plan.quota.shape[1], dtype=jnp.int32)
  before_EG += jnp.where(host_G[None] < rank, kept_EG, 0)
  return _Lines(
    kept_E=kept_EG[:, rank],
    source_start_E=source_start_E,
    host_start_EG=host_start_EG,
    host_end_EG=host_end_EG,
    row_start_EG=_slot_row_start(plan) + before_EG,
  )


def _slot_row_start(plan: Plan) -> Array:
  """First row of each expert's slot on each rank, ``[E, G]`` (0 where it has none)."""
  num_experts, num_ranks = plan.quota.shape
  expert_GP = slot_experts(plan)
  size_GP = slot_sizes(plan)
  start_GP = jnp.cumsum(size_GP, axis=1, dtype=jnp.int32) - size_GP
  expert_GP = jnp.where(expert_GP < 0, num_experts, expert_GP)
  rank_G1 = jnp.arange(num_ranks, dtype=jnp.int32)[:, None]
  start_EG = jnp.zeros((num_experts, num_ranks), jnp.int32)
  return start_EG.at[expert_GP, rank_G1].set(start_GP, mode="drop")


def _find_host(host_end_EG: Array, expert_A: Array, place_A: Array) -> Array:
  """The first host whose interval ends after the place: a branchless binary search."""
  num_ranks = host_end_EG.shape[1]
  host_A = jnp.zeros_like(place_A)
  for bit in reversed(range((num_ranks - 1).bit_length())):
    next_A = host_A + (1 << bit)
    passed_A = host_end_EG[expert_A, jnp.minimum(next_A, num_ranks) - 1] <= place_A
    host_A = jnp.where(passed_A, next_A, host_A)
  return jnp.minimum(host_A, num_ranks - 1)
