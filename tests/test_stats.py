"""Statistics against what single assignments do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ultraep_jax as uep

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
