"""Statistics against what single assignments do."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ultraep_jax as uep
from ultraep_jax import sharded
<<<<<<< HEAD
from ultraep_jax.stats import layer_stats
=======
from ultraep_jax.stats import Counts, Measured, layer_stats
>>>>>>> serving

pytestmark = pytest.mark.usefixtures("unoptimized")

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

<<<<<<< HEAD
  def kept(carry, layer):
=======
  with jax.set_mesh(mesh):
    x = jnp.ones((2, index.shape[0] * index.shape[1], 4))
    _, stats = jax.jit(lambda x: jax.lax.scan(step, jnp.float32(0), x))(x)
  stats = jax.tree.map(lambda leaf: np.asarray(leaf[1, 0]), stats)  # second step, only group
  plan = uep.plan_quotas(jnp.asarray(load_GE, jnp.int32), config)
  dest_GTK, _, group_size_GP = uep.testing.brute_force_routes(jnp.asarray(index), plan)

  np.testing.assert_array_equal(stats.load_GE, load_GE)
  measured = np.bincount(dest_GTK[dest_GTK >= 0], minlength=RANKS)
  np.testing.assert_array_equal(stats.load_after_G, measured)
  np.testing.assert_array_equal(stats.load_planned_G, np.asarray(plan.quota).sum(axis=0))
  np.testing.assert_array_equal(stats.replica_expert_GS, plan.replica_expert)
  np.testing.assert_array_equal(stats.replica_parent_GS, plan.parent)
  np.testing.assert_array_equal(stats.replica_load_GS, group_size_GP[:, EXPERTS // RANKS :])
  assert stats.load_floor == 32 and load_GE.sum() == 127  # by 4 ranks
  assert stats.masked == 1 and stats.replicas == (stats.replica_expert_GS >= 0).sum()
  assert (stats.replicas > 0) == (slots > 0)


@pytest.mark.parametrize("domain_size", [None, 2])
def test_what_follows_from_loads_and_plan(domain_size):
  """Against what the fields mean, one rank, expert and copy at a time."""
  ranks, experts, slots = 6, 12, 2
  config = uep.BalanceConfig(replica_slots=slots, objective="balance", domain_size=domain_size)
  domains = np.arange(ranks).reshape(-1, domain_size or ranks)
  statistics = jax.jit(lambda *counted: layer_stats(*counted, 1000, domain_size))
  for seed in range(4):
    load_GE = np.random.default_rng(seed).zipf(1.5, (ranks, experts)).clip(max=99).astype(np.int32)
    plan = uep.plan_quotas(jnp.asarray(load_GE), config)
    counts = Counts(np.arange(3, 3 + ranks), *np.arange(5, 8))
    measured = Measured(
      load_GE, plan.quota, plan.replica_expert, plan.parent, np.int32(9), np.zeros(0)
    )
    stats = jax.tree.map(np.asarray, statistics(measured, counts))
    quota_EG, expert_GS = np.asarray(plan.quota), np.asarray(plan.replica_expert)
    load_E = [sum(int(load_GE[rank, expert]) for rank in range(ranks)) for expert in range(experts)]
    before = [load_E[2 * rank] + load_E[2 * rank + 1] for rank in range(ranks)]

    def reachable(busiest, before=before):
      return all(sum(before[rank] for rank in ranks) <= busiest * len(ranks) for ranks in domains)

    assert stats.load_floor == next(filter(reachable, itertools.count()))
    np.testing.assert_array_equal(stats.load_GE, load_GE)
    assert stats.expert_load_E.tolist() == load_E
    assert stats.load_before_G.tolist() == before
    assert stats.load_planned_G.tolist() == quota_EG.sum(axis=0).tolist()
    assert stats.load_after_G.tolist() == list(range(3, 3 + ranks))
    assert (stats.remote_assignments, stats.masked, stats.invalid, stats.rounds) == (5, 6, 7, 9)
    copies = [(rank, slot) for rank in range(ranks) for slot in range(slots)]
    copies = [at for at in copies if expert_GS[at] >= 0]
    assert copies and stats.replicas == len(copies) and stats.replica_bytes == 1000 * len(copies)
    senders = [int(plan.parent[at]) for at in copies]
    assert stats.max_fanout == max(map(senders.count, senders), default=0)
    np.testing.assert_array_equal(stats.replica_expert_GS, expert_GS)
    np.testing.assert_array_equal(stats.replica_parent_GS, plan.parent)
    for rank, slot in np.ndindex(expert_GS.shape):
      filled = (rank, slot) in copies
      served = quota_EG[expert_GS[rank, slot], rank] if filled else 0
      assert stats.replica_load_GS[rank, slot] == served


@pytest.mark.parametrize("slots", [0, 2])
def test_statistics_of_a_scan_afterwards(slots):
  """Those of each layer, on a mesh whose token groups have loads of their own."""
  config = uep.BalanceConfig(objective="balance", capacity_factor=1.25, replica_slots=slots)
  weights = uep.ExpertWeights(*[jnp.ones((EXPERTS, 4, 4))] * 3)
  mesh = jax.make_mesh((2, RANKS), ("data", "expert"))
  keys = jax.random.split(jax.random.key(0), 3)
  shape = (len(keys), 2 * RANKS * 8, TOP_K)
  popular = jax.random.randint(keys[0], shape, 0, EXPERTS) ** 2 // EXPERTS
  index = popular.at[0, 0].set(jnp.array([-1, EXPERTS]))
  x, gate = jnp.ones((*shape[:2], 4)), jnp.ones(shape)

  def one(carry, layer):
    return carry, uep.sharded_moe(*layer, weights, config=config)[1]

  def measured(carry, layer):
>>>>>>> serving
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
  assert stats.masked.tolist() == stats.invalid.tolist() == [[1, 0], [0, 0]]


def test_statistics_of_a_scan_afterwards(measured):
  """Those of each layer, on a mesh whose token groups have loads of their own."""
  _, want, got = measured
  assert got.load_GE.shape == (LAYERS, GROUPS, RANKS, EXPERTS)
  assert (got.load_GE[:, 0] != got.load_GE[:, 1]).any()
  jax.tree.map(np.testing.assert_array_equal, got, want)


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
