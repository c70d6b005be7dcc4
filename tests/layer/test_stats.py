"""Statistics against what single assignments do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ultraep_jax as uep
from ultraep_jax import sharded

RANKS, EXPERTS, TOP_K = 4, 8, 2


@pytest.mark.parametrize("slots", [0, 2])
def test_what_a_layer_measured(slots):
  load_GE = uep.testing.zipf_loads(1, EXPERTS, RANKS, tokens=16, top_k=TOP_K, ratio=2.0)
  index = uep.testing.expert_indices(1, load_GE, TOP_K)
  index[0, 0, 0] = -1
  load_GE = np.stack([np.bincount(rows[rows >= 0], minlength=EXPERTS) for rows in index])
  config = uep.BalanceConfig(replica_slots=slots, objective="balance")
  weights = uep.ExpertWeights(*[jnp.ones((EXPERTS, 4, 4))] * 3)
  mesh = jax.make_mesh((RANKS,), ("expert",), devices=jax.devices()[:RANKS])

  def step(carry, x):
    """In a scan, where empty arrays of planners were trouble."""
    flat = jnp.asarray(index.reshape(-1, TOP_K))
    y, stats = uep.sharded_moe(x, flat, jnp.ones(flat.shape), weights, config=config)
    return carry + jnp.sum(y), stats

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
  assert stats.masked == 1 and stats.replicas == (stats.replica_expert_GS >= 0).sum()
  assert (stats.replicas > 0) == (slots > 0)


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
    return carry, sharded.measured_sharded_moe(*layer, weights, config=config)[1]

  @jax.jit
  def both(layers):
    _, want = jax.lax.scan(one, 0, layers)
    _, kept = jax.lax.scan(measured, 0, layers)
    assert all(leaf.size for leaf in jax.tree.leaves(kept))  # empty ones crash XLA's GPU compiler
    size = weights.expert_size * x.dtype.itemsize
    return want, sharded.layer_stats(kept, size, config.domain_size, scanned=True)

  with jax.set_mesh(mesh):
    want, got = jax.tree.map(np.asarray, both((x, index, gate)))
  assert got.load_GE.shape == (len(keys), 2, RANKS, EXPERTS)
  assert (got.load_GE[:, 0] != got.load_GE[:, 1]).any()
  assert got.masked.sum() == 1 and got.invalid.sum() == 1
  jax.tree.map(np.testing.assert_array_equal, got, want)
