"""Workloads, legality checks and plain references, for tests of this library and of its users.

The references are slow and plain on purpose: they share no code with what they check.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from ultraep_jax.activations import Activation, GatedUnit
from ultraep_jax.config import BalanceConfig
from ultraep_jax.mesh import is_explicit
from ultraep_jax.types import Array, ExpertWeights, Plan
from ultraep_jax.workloads import ADVERSARIAL_KINDS as ADVERSARIAL_KINDS
from ultraep_jax.workloads import adversarial_loads as adversarial_loads
from ultraep_jax.workloads import all_to_one_loads as all_to_one_loads
from ultraep_jax.workloads import balanced_loads as balanced_loads
from ultraep_jax.workloads import bursty_loads as bursty_loads
from ultraep_jax.workloads import expert_indices as expert_indices
from ultraep_jax.workloads import flat_loads as flat_loads
from ultraep_jax.workloads import zipf_loads as zipf_loads


def dense_moe(
  x_TD: Array,
  expert_index_TK: Array,
  gate_TK: Array,
  weights: ExpertWeights,
  activation: Activation = jax.nn.silu,
) -> Array:
  """The mixture of experts without any distribution: every expert runs on every token.

  All arithmetic is float32 at the highest matmul precision. Differentiable in ``x_TD``,
  ``gate_TK`` and ``weights``; memory for activations is that of one expert.

  Args:
    x_TD: ``[T, D]`` floating point.
    expert_index_TK: ``[T, K]`` integers; an index outside ``[0, E)`` contributes zero.
    gate_TK: ``[T, K]`` floating point.
    weights: of all experts, leading axis E, in any form.
    activation: as for ``moe``.

  Returns:
    ``[T, D]`` float32; on Explicit meshes whole on every device.

  Raises:
    ValueError: ``expert_index_TK`` or ``gate_TK`` has the wrong shape.

  >>> weights = ExpertWeights(jnp.ones((2, 3, 4)), jnp.ones((2, 3, 4)), jnp.ones((2, 4, 3)))
  >>> x_TD, gate_TK = jnp.ones((1, 3)), jnp.ones((1, 2))
  >>> dense_moe(x_TD, jnp.array([[1, -1]]), gate_TK, weights, jax.nn.relu).tolist()
  [[36.0, 36.0, 36.0]]
  """
  if expert_index_TK.shape != gate_TK.shape or expert_index_TK.shape[0] != x_TD.shape[0]:
    raise ValueError(
      f"expert_index_TK, gate_TK: expected equal shapes [{x_TD.shape[0]}, K], "
      f"got {expert_index_TK.shape} and {gate_TK.shape}"
    )
  if is_explicit():  # a scan takes whole experts
    whole = functools.partial(jax.reshard, out_shardings=PartitionSpec())
    arguments = x_TD, expert_index_TK, gate_TK, weights
    x_TD, expert_index_TK, gate_TK, weights = jax.tree.map(whole, arguments)
  x_TD, gate_TK = x_TD.astype(jnp.float32), gate_TK.astype(jnp.float32)
  expert_index_TK = expert_index_TK.astype(jnp.int32)  # narrow ones would wrap around
  num_experts = weights.wo.shape[0]

  def affine(a_TX: Array, matrix: Array | None, bias: Array | None) -> Array:
    assert matrix is not None
    product = jnp.dot(a_TX, matrix.astype(jnp.float32), precision=lax.Precision.HIGHEST)
    return product if bias is None else product + bias.astype(jnp.float32)[None, :]

  def between(expert: ExpertWeights) -> Array:
    if expert.layout == "apart":
      gate_TF = affine(x_TD, expert.wi_gate, expert.wi_gate_bias)
      up_TF = affine(x_TD, expert.wi_up, expert.wi_up_bias)
    else:
      into = affine(x_TD, expert.wi, expert.wi_bias)
      if expert.layout == "ungated":
        assert not isinstance(activation, GatedUnit), "expected a function of one argument"
        return activation(into)
      half = into.shape[1] // 2
      fused = expert.layout == "fused"
      gate_TF = into[:, :half] if fused else into[:, ::2]
      up_TF = into[:, half:] if fused else into[:, 1::2]
    if isinstance(activation, GatedUnit):
      return activation(gate_TF, up_TF)
    return activation(gate_TF) * up_TF

  @jax.checkpoint
  def add_expert(y_TD: Array, indexed: tuple[Array, ExpertWeights]) -> tuple[Array, None]:
    index, expert = indexed
    gate_T = jnp.sum(jnp.where(expert_index_TK == index, gate_TK, 0.0), axis=1)
    return y_TD + gate_T[:, None] * affine(between(expert), expert.wo, expert.wo_bias), None

  experts = jnp.arange(num_experts, dtype=jnp.int32)
  return lax.scan(add_expert, jnp.zeros_like(x_TD), (experts, weights))[0]


def assert_legal_plan(plan: Plan, load_GE: Array, config: BalanceConfig) -> None:
  """Checks everything that a plan promises, in numpy.

  Args:
    plan: the plan of all G ranks.
    load_GE: ``[G, E]``, the loads it was made for.
    config: ``replica_slots``, ``min_tokens_per_replica``, ``domain_size`` and ``transfer`` count.

  Raises:
    AssertionError: what was expected and what the plan has, at the first offence.
  """
  load = np.asarray(load_GE)
  num_ranks, num_experts = load.shape
  slots = plan.replica_expert.shape[1]
  slots_shape = (num_ranks, slots if config.replica_slots == "auto" else config.replica_slots)
  shapes = (slots_shape, (num_experts, num_ranks), slots_shape)
  for name, value, shape in zip(Plan._fields, plan, shapes, strict=True):
    _expect(value.shape == shape, f"{name}: expected shape {shape}, got {value.shape}")
    _expect(value.dtype == np.int32, f"{name}: expected int32, got {value.dtype}")
  replica, quota, parent = (np.asarray(value) for value in plan)
  _assert_placement(replica, num_experts, config.domain_of(num_ranks))
  _assert_quota(quota, replica, load, config.min_tokens_per_replica)
  _assert_trees(parent, replica, num_experts, direct=config.transfer == "direct")


def _expect(condition: bool | np.bool_, message: str) -> None:
  if not condition:
    raise AssertionError(message)


def _assert_placement(replica: np.ndarray, num_experts: int, domain_size: int) -> None:
  num_home = num_experts // replica.shape[0]
  for (rank, slot), expert in np.ndenumerate(replica):
    where = f"replica_expert[{rank}, {slot}]"
    _expect(-1 <= expert < num_experts, f"{where}: expected in [-1, {num_experts}), got {expert}")
    if expert < 0:
      continue
    home = expert // num_home
    _expect(home != rank, f"{where}: expected an expert of another rank, got {expert} at its home")
    copies = int((replica[rank] == expert).sum())
    _expect(copies == 1, f"{where}: expected one copy of {expert} on the rank, got {copies}")
    _expect(
      home // domain_size == rank // domain_size,
      f"{where}: expected an expert of domain {rank // domain_size}, got {expert} "
      f"of domain {home // domain_size}",
    )


def _assert_quota(
  quota: np.ndarray, replica: np.ndarray, load: np.ndarray, min_tokens: int
) -> None:
  num_home = quota.shape[0] // quota.shape[1]
  _expect((quota >= 0).all(), f"quota: expected no negative entry, got {quota.min()}")
  for expert, (quota_G, total) in enumerate(zip(quota, load.sum(axis=0), strict=True)):
    _expect(
      quota_G.sum() == total,
      f"quota[{expert}]: expected a sum of {total}, its load, got {quota_G.sum()}",
    )
    holders = {int(rank) for rank in np.nonzero((replica == expert).any(axis=1))[0]}
    users = {int(rank) for rank in np.nonzero(quota_G)[0]}
    hosts = holders | {expert // num_home}
    _expect(users <= hosts, f"quota[{expert}]: expected only on ranks {hosts}, got {users}")
    for rank in sorted(holders):
      _expect(
        quota_G[rank] >= max(min_tokens, 1),
        f"quota[{expert}, {rank}]: expected at least {max(min_tokens, 1)} on a replica, "
        f"got {quota_G[rank]}",
      )


def _assert_trees(
  parent: np.ndarray, replica: np.ndarray, num_experts: int, *, direct: bool
) -> None:
  num_ranks = replica.shape[0]
  for (rank, slot), expert in np.ndenumerate(replica):
    where = f"parent[{rank}, {slot}]"
    at = int(parent[rank, slot])
    if expert < 0:
      _expect(at == -1, f"{where}: expected -1 for an empty slot, got {at}")
      continue
    home = int(expert) // (num_experts // num_ranks)
    _expect(not direct or at == home, f"{where}: expected the home {home}, got {at}")
    for _ in range(num_ranks):
      if at == home:
        break
      holds = 0 <= at < num_ranks and expert in replica[at]
      _expect(holds, f"{where}: expected a path over holders of {expert} to {home}, got rank {at}")
      at = int(parent[at, list(replica[at]).index(expert)])
    _expect(at == home, f"{where}: expected a path to the home {home}, got a cycle")


def brute_force_routes(
  expert_index_GTK: Array, plan: Plan
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Where every assignment of every rank runs, one assignment at a time.

  For each expert, a host first keeps what it sent itself, as far as its quota goes; those are
  the source's first assignments to the expert. The other assignments, by source and then in the
  source's order, go to the hosts' remaining quotas, by rank. On each rank, rows are ordered by
  slot, then source, then the source's order.

  Args:
    expert_index_GTK: ``[G, T, K]`` integers; an index outside ``[0, E)`` is masked.
    plan: whose quotas add up to the loads of ``expert_index_GTK``.

  Returns:
    ``dest_GTK`` (−1 if masked), ``row_GTK`` (0 if masked) and ``group_size_GP``, all int32.

  Raises:
    ValueError: the quotas do not add up to the loads.
  """
  index = np.asarray(expert_index_GTK)
  num_ranks = index.shape[0]
  replica, quota = np.asarray(plan.replica_expert), np.asarray(plan.quota)
  num_experts = quota.shape[0]
  num_home = num_experts // num_ranks
  flat = index.reshape(num_ranks, -1)
  dest = np.full(flat.shape, -1, np.int32)
  row = np.zeros(flat.shape, np.int32)
  group_size = np.zeros((num_ranks, num_home + replica.shape[1]), np.int32)

  for expert in range(num_experts):
    remaining = [int(count) for count in quota[expert]]
    others = []
    for source in range(num_ranks):
      for position in np.nonzero(flat[source] == expert)[0]:
        if remaining[source] > 0:
          dest[source, position] = source
          remaining[source] -= 1
        else:
          others.append((source, position))
    if sum(remaining) != len(others):
      got, load = int(quota[expert].sum()), int((flat == expert).sum())
      raise ValueError(f"plan: expected quotas of expert {expert} to sum to {load}, got {got}")
    hosts = [host for host in range(num_ranks) for _ in range(remaining[host])]
    for (source, position), host in zip(others, hosts, strict=True):
      dest[source, position] = host

  for host in range(num_ranks):
    slots = [*range(host * num_home, (host + 1) * num_home), *replica[host]]
    rows = 0
    for slot, expert in enumerate(slots):
      if expert < 0:
        continue
      for source in range(num_ranks):
        for position in np.nonzero((flat[source] == expert) & (dest[source] == host))[0]:
          row[source, position] = rows
          rows += 1
          group_size[host, slot] += 1
  return dest.reshape(index.shape), row.reshape(index.shape), group_size
