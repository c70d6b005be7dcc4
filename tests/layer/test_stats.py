"""Statistics against what single assignments do."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ultraep_jax as uep
from ultraep_jax import sharded
from ultraep_jax.stats import Agreed, Measured, layer_stats

LAYERS, GROUPS, RANKS, EXPERTS, TOKENS, TOP_K = 2, 2, 4, 8, 16, 2


@pytest.fixture(scope="module")
def index_LGRTK():
  """Choices of several layers and token groups, with loads of their own."""
  seeds = np.arange(LAYERS * GROUPS)
  loads = [
    uep.testing.zipf_loads(seed, EXPERTS, RANKS, tokens=TOKENS, top_k=TOP_K, ratio=2.0)
    for seed in seeds
  ]
  index = [uep.testing.expert_indices(seed, loads[seed], TOP_K) for seed in seeds]
  index = np.stack(index).reshape(LAYERS, GROUPS, RANKS, TOKENS, TOP_K)
  index[0, 0, 0, 0] = [-1, EXPERTS]
  index[1, 0, 2, 3] = [-2, np.iinfo(np.int32).min]
  return index


@pytest.fixture(scope="module", params=[0, 2], ids="slots {}".format)
def measured(request, index_LGRTK):
  """Settings, the statistics that layers return, and those of a scan computed afterwards.

  In a scan, where empty arrays of planners were trouble.
  """
  config = uep.BalanceConfig(objective="balance", capacity_factor=1.25, replica_slots=request.param)
  weights = uep.ExpertWeights(*[jnp.ones((EXPERTS, 4, 4))] * 3)
  index = jnp.asarray(index_LGRTK.reshape(LAYERS, -1, TOP_K))
  x, gate = jnp.ones((*index.shape[:2], 4)), jnp.ones(index.shape)

  def returned(total, layer):
    y, stats = uep.sharded_moe(*layer, weights, config=config)
    return total + jnp.sum(y), stats

  def kept(carry, layer):
    return carry, sharded.measured_sharded_moe(*layer, weights, config=config)[1]

  @jax.jit
  def both(layers):
    total, stats = jax.lax.scan(returned, jnp.float32(0), layers)
    _, measures = jax.lax.scan(kept, 0, layers)
    assert all(leaf.size for leaf in jax.tree.leaves(measures))  # empty: XLA's GPU compiler crashes
    return total, stats, layer_stats(measures)

  with jax.set_mesh(jax.make_mesh((GROUPS, RANKS), ("data", "expert"))):
    _, *stats = jax.tree.map(np.asarray, both((x, index, gate)))
  return config, *stats


def test_what_a_layer_measured(measured, index_LGRTK):
  config, stats, _ = measured
  plan_of = jax.jit(lambda load_GE: uep.plan_quotas(load_GE, config))
  for layer, group in np.ndindex(LAYERS, GROUPS):
    one = jax.tree.map(lambda leaf, here=(layer, group): leaf[here], stats)
    index = index_LGRTK[layer, group]
    masked = (index < 0) | (index >= EXPERTS)
    load_GE = np.stack(
      [np.bincount(i[~m], minlength=EXPERTS) for i, m in zip(index, masked, strict=True)]
    )
    plan = plan_of(jnp.asarray(load_GE, jnp.int32))
    dest_GTK, _, group_size_GP = uep.testing.brute_force_routes(index, plan)

    np.testing.assert_array_equal(one.load_GE, load_GE)
    went = np.bincount(dest_GTK[dest_GTK >= 0], minlength=RANKS)
    np.testing.assert_array_equal(one.load_after_G, went)
    np.testing.assert_array_equal(one.load_planned_G, np.asarray(plan.quota).sum(axis=0))
    np.testing.assert_array_equal(one.replica_expert_GS, plan.replica_expert)
    np.testing.assert_array_equal(one.replica_parent_GS, plan.parent)
    np.testing.assert_array_equal(one.replica_load_GS, group_size_GP[:, EXPERTS // RANKS :])
    assert one.replicas == (one.replica_expert_GS >= 0).sum()
    assert (one.replicas > 0) == (config.replica_slots > 0)
  assert stats.masked.tolist() == [[1, 0], [0, 0]] and stats.invalid.tolist() == [[1, 0], [2, 0]]


def test_statistics_of_a_scan_afterwards(measured):
  """Those of each layer, on a mesh whose token groups have loads of their own."""
  _, want, got = measured
  assert got.load_GE.shape == (LAYERS, GROUPS, RANKS, EXPERTS)
  assert (got.load_GE[:, 0] != got.load_GE[:, 1]).any()
  jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("domain_size", [None, 2])
def test_what_follows_from_what_was_measured(domain_size):
  """One rank, expert and copy at a time; the loads of no domain are a multiple of its size."""
  ranks, experts, slots = 6, 12, 2
  domains = np.arange(ranks).reshape(-1, domain_size or ranks)
  rng = np.random.default_rng(0)
  load_NGE = rng.zipf(1.5, (4, ranks, experts)).clip(max=99).astype(np.int32)
  count_NGX = rng.integers(0, 99, (4, ranks, ranks + 2)).astype(np.int32)
  quota_NEG = rng.integers(0, 99, (4, experts, ranks)).astype(np.int32)
  filled_NGS = rng.random((4, ranks, slots)) < 0.7
  away_NGS = [
    [
      rng.permutation([e for e in range(experts) if e // 2 != rank])[:slots]
      for rank in range(ranks)
    ]
    for _ in range(4)
  ]
  expert_NGS = np.where(filled_NGS, away_NGS, -1).astype(np.int32)
  parent_NGS = np.where(filled_NGS, rng.integers(0, ranks, filled_NGS.shape), -1).astype(np.int32)
  agreed = Agreed(
    load_GE=load_NGE,
    quota_EG=quota_NEG,
    replica_expert_GS=expert_NGS,
    parent_GS=parent_NGS,
    rounds=np.arange(4),
    copy_bytes=1000,
    domain_size=domain_size,
  )
  stats = jax.tree.map(np.asarray, layer_stats(Measured(agreed, count_NGX)))
  rounded = 0
  for n in range(4):
    one = jax.tree.map(lambda leaf, n=n: leaf[n], stats)
    load_E = [sum(int(load_NGE[n, rank, expert]) for rank in range(ranks)) for expert in range(12)]
    before = [load_E[2 * rank] + load_E[2 * rank + 1] for rank in range(ranks)]
    of_domain = [sum(before[rank] for rank in domain) for domain in domains]

    def reachable(busiest, of_domain=of_domain):
      return all(load <= busiest * len(domains[0]) for load in of_domain)

    assert one.load_floor == next(filter(reachable, itertools.count()))
    rounded += max(of_domain) % len(domains[0]) > 0
    np.testing.assert_array_equal(one.load_GE, load_NGE[n])
    assert one.expert_load_E.tolist() == load_E and one.load_before_G.tolist() == before
    assert one.load_planned_G.tolist() == quota_NEG[n].sum(axis=0).tolist()
    sent_GG, (masked, invalid) = count_NGX[n, :, :ranks], count_NGX[n, :, ranks:].sum(axis=0)
    assert one.load_after_G.tolist() == sent_GG.sum(axis=0).tolist()
    assert one.remote_assignments == sent_GG.sum() - np.trace(sent_GG)
    assert (one.masked, one.invalid, one.rounds) == (masked, invalid, n)
    copies = [at for at in np.ndindex(ranks, slots) if expert_NGS[n][at] >= 0]
    assert copies and one.replicas == len(copies) and one.replica_bytes == 1000 * len(copies)
    senders = [int(parent_NGS[n][at]) for at in copies]
    assert one.max_fanout == max(map(senders.count, senders))
    np.testing.assert_array_equal(one.replica_expert_GS, expert_NGS[n])
    np.testing.assert_array_equal(one.replica_parent_GS, parent_NGS[n])
    for rank, slot in np.ndindex(ranks, slots):
      filled = (rank, slot) in copies
      served = quota_NEG[n, expert_NGS[n, rank, slot], rank] if filled else 0
      assert one.replica_load_GS[rank, slot] == served
  assert rounded


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 2)])
def test_statistics_on_explicit_meshes(shape):
  """Also where an axis has one position only, which its arrays' types then leave out."""
  groups, ranks = shape
  kinds = (jax.sharding.AxisType.Explicit,) * 2
  mesh = jax.make_mesh(
    shape, ("data", "expert"), axis_types=kinds, devices=jax.devices()[: groups * ranks]
  )
  config = uep.BalanceConfig(strategy="none", replica_slots=0)
  weights = uep.ExpertWeights(*[jnp.ones((2, 4, 4))] * 3)
  index = jnp.array([[0], [1], [-1], [1]])  # the first expert is on the first rank
  with jax.set_mesh(mesh):
    _, stats = uep.sharded_moe(jnp.ones((4, 4)), index, jnp.ones((4, 1)), weights, config=config)
  assert stats.load_after_G.tolist() == {(1, 1): [[3]], (2, 1): [[2], [1]], (1, 2): [[1, 2]]}[shape]
  assert stats.remote_assignments.tolist() == {(1, 1): [0], (2, 1): [0, 0], (1, 2): [1]}[shape]
  assert stats.masked.sum() == 1
