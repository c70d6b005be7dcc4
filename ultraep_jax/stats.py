"""What a layer did: what it keeps on the way, and the statistics that follow from it.

Statistics are some thirty small kernels on a GPU. A model that scans over layers keeps what its
layers measured and makes the statistics of all of them afterwards, at once.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ultraep_jax.planning.load import expert_load
from ultraep_jax.planning.relay import egress_per_rank
from ultraep_jax.planning.route import slot_rows
from ultraep_jax.types import Array, LayerStats, Plan, Routes

_FEW_KINDS = 10  # eight ranks; counters are faster where there are many


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["load_GE", "quota_EG", "replica_expert_GS", "parent_GS", "rounds"],
  meta_fields=["copy_bytes", "domain_size"],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Agreed:
  """What all ranks of a token group know alike.

  Attributes:
    load_GE: ``[G, E]`` int32, the load matrix.
    quota_EG: of the plan.
    replica_expert_GS: of the plan; ``None`` without slots, as empty arrays that come out of loops
      crash XLA's compilers.
    parent_GS: likewise.
    rounds: ``[]`` int32, rounds that the whole mesh runs.
    copy_bytes: of one copy of an expert.
    domain_size: ranks that copies stay among; ``None``: all.
  """

  load_GE: Array
  quota_EG: Array
  replica_expert_GS: Array | None
  parent_GS: Array | None
  rounds: Array
  copy_bytes: int
  domain_size: int | None

  @property
  def plan(self) -> Plan:
    if self.replica_expert_GS is None or self.parent_GS is None:
      none_GS = self.load_GE[..., :0]
      return Plan(none_GS, self.quota_EG, none_GS)
    return Plan(self.replica_expert_GS, self.quota_EG, self.parent_GS)


class Measured(NamedTuple):
  """What a layer keeps for its statistics. Axes of token groups and of layers may come first.

  Attributes:
    agreed: what all ranks know alike.
    count_GX: ``[G, G + 2]`` int32, how many assignments each rank sent to each, and how many of
      its own were masked and invalid. Within a layer, of this rank alone: ``[1, G + 2]``.
  """

  agreed: Agreed
  count_GX: Array


def measure(
  expert_index_TK: Array,
  load_GE: Array,
  plan: Plan,
  routes: Routes,
  rounds: Array,
  *,
  copy_bytes: int,
  domain_size: int | None,
) -> Measured:
  """What is to be kept of a layer, on one rank.

  Args:
    expert_index_TK: this rank's choices, before invalid ones are dropped.
    load_GE: the load matrix.
    plan: the plan.
    routes: this rank's routes.
    rounds: rounds that the whole mesh runs.
    copy_bytes: as in ``Agreed``.
    domain_size: likewise.
  """
  num_experts, num_ranks = plan.quota.shape
  invalid = (expert_index_TK < -1) | (expert_index_TK >= num_experts)
  kind_TK = jnp.where(expert_index_TK == -1, num_ranks, jnp.where(invalid, num_ranks + 1, -1))
  # Counted in one pass; a valid assignment that went nowhere would be missing.
  kind_TK = jnp.where(routes.dest_TK >= 0, routes.dest_TK, kind_TK)
  slots = plan.replica_expert.shape[1]
  agreed = Agreed(
    load_GE=load_GE,
    # Without this barrier XLA runs the planner's kernel twice inside a scan that keeps the quotas.
    quota_EG=lax.optimization_barrier(plan.quota),
    replica_expert_GS=plan.replica_expert if slots else None,
    parent_GS=plan.parent if slots else None,
    rounds=rounds,
    copy_bytes=copy_bytes,
    domain_size=domain_size,
  )
  return Measured(agreed, _count(kind_TK, num_ranks + 2)[None])


def _count(kind_TK: Array, num_kinds: int) -> Array:
  """``[num_kinds]`` int32, how many there are of each; others are counted nowhere."""
  if num_kinds > _FEW_KINDS:
    return expert_load(kind_TK, num_kinds)
  # A reduction that fuses with what makes the kinds. Additions to counters would not.
  is_kind_AX = kind_TK.reshape(-1)[:, None] == jnp.arange(num_kinds, dtype=jnp.int32)[None, :]
  return jnp.sum(is_kind_AX, axis=0, dtype=jnp.int32)


@jax.jit  # compiled as a whole when called eagerly, as in a notebook
def layer_stats(measured: Measured) -> LayerStats:
  """The statistics of what layers measured, which may have leading axes.

  Outside a ``shard_map`` the ranks' counts may be on their devices: they are added up once.
  """
  agreed, plan = measured.agreed, measured.agreed.plan
  num_ranks = plan.quota.shape[-1]
  expert_load_E = jnp.sum(agreed.load_GE, axis=-2, dtype=jnp.int32)
  home_load_GM = expert_load_E.reshape(*expert_load_E.shape[:-1], num_ranks, -1)
  before_G = jnp.sum(home_load_GM, axis=-1, dtype=jnp.int32)
  domain = num_ranks if agreed.domain_size is None else agreed.domain_size
  load_NR = before_G.reshape(*before_G.shape[:-1], -1, domain)
  busiest_domain = jnp.max(jnp.sum(load_NR, axis=-1, dtype=jnp.int32), axis=-1)
  replicas = jnp.sum(plan.replica_expert >= 0, axis=(-2, -1), dtype=jnp.int32)
  after_G, masked, invalid, remote = _add_up(measured.count_GX)
  return LayerStats(
    load_GE=agreed.load_GE,
    expert_load_E=expert_load_E,
    load_before_G=before_G,
    load_planned_G=jnp.sum(plan.quota, axis=-2, dtype=jnp.int32),
    load_after_G=after_G,
    load_floor=-(-busiest_domain // domain),
    replicas=replicas,
    max_fanout=jnp.max(egress_per_rank(plan.parent), axis=-1),
    replica_bytes=replicas.astype(jnp.float32) * agreed.copy_bytes,
    remote_assignments=remote,
    rounds=agreed.rounds,
    masked=masked,
    invalid=invalid,
    replica_expert_GS=plan.replica_expert,
    replica_parent_GS=plan.parent,
    replica_load_GS=slot_rows(plan.quota, plan.replica_expert),
  )


def _add_up(count_GX: Array) -> tuple[Array, Array, Array, Array]:
  """Over the ranks: assignments that went to each; masked, invalid and remote ones."""
  sent_GG = count_GX[..., :-2]
  own_GG = jnp.expand_dims(jnp.eye(sent_GG.shape[-1], dtype=jnp.bool_), range(sent_GG.ndim - 2))
  # Two sums, in one collective where ranks hold their own counts. Explicit meshes of one rank do
  # not let them be concatenated before.
  remote = jnp.sum(sent_GG, axis=(-2, -1), dtype=jnp.int32, where=~own_GG)
  sum_X = jnp.sum(count_GX, axis=-2, dtype=jnp.int32)
  return sum_X[..., :-2], sum_X[..., -2], sum_X[..., -1], remote
