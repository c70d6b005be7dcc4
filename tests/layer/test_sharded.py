"""The layer on global arrays: mesh kinds, extra axes, leading shapes, statistics by group."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from layer_problems import (
  QUICK,
  dense,
  make_mesh,
  make_problem,
  on_mesh,
  relative_error,
  value_and_grads,
)

import ultraep_jax as uep

CONFIG = uep.BalanceConfig(replica_slots=1, objective="balance", capacity_factor=1.25)


def check(problem, **kwargs):
  def apply(x, expert_index, gate, weights):
    return uep.sharded_moe(x, expert_index, gate, weights, config=QUICK, **kwargs)

  y, stats, grads = value_and_grads(apply, problem)
  expected_y, expected = dense(problem)
  assert relative_error(y, expected_y) <= 1e-5
  assert relative_error(grads, expected) <= 1e-5
  return y, stats


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_data_axis_makes_token_groups(kind):
  problem = make_problem(make_mesh(4, 2, kind))
  y, stats = check(problem)
  assert y.sharding.is_equivalent_to(NamedSharding(problem.mesh, P(("data", "expert"))), y.ndim)
  assert stats.load_after_G.shape == (2, 4)
  halves = np.asarray(problem.expert_index).reshape(2, -1)
  expected = [np.bincount(half, minlength=16) for half in halves]
  np.testing.assert_array_equal(stats.expert_load_E, expected)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_arrays_with_another_sharding_are_moved(kind):
  problem = make_problem(make_mesh(4, 1, kind))
  everywhere = NamedSharding(problem.mesh, P())
  check(jax.device_put(problem, everywhere))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_replicated_over_another_axis(kind):
  """A tensor axis beside the experts': the layer runs on each of its positions alike."""
  mesh = jax.make_mesh((2, 4), ("tensor", "expert"), axis_types=(kind, kind))
  problem = on_mesh(make_problem(make_mesh(4)), mesh, P("expert"))
  _, stats = check(problem)
  assert stats.load_after_G.shape == (1, 4)


def test_tokens_over_an_axis_of_another_name():
  mesh = jax.make_mesh((2, 4), ("replica", "expert"), axis_types=(AxisType.Auto,) * 2)
  problem = make_problem(mesh)
  _, stats = check(problem, token_axes=("replica", "expert"))
  assert stats.load_after_G.shape == (2, 4)


def test_inside_a_shard_map_over_another_axis():
  """A pipeline's manual axis: `moe` in one shard_map over all axes, weights differ by stage."""
  mesh = jax.make_mesh((2, 4), ("stage", "expert"), axis_types=(AxisType.Auto,) * 2)
  stages = [make_problem(make_mesh(4), seed=seed) for seed in range(2)]
  stacked = jax.tree.map(
    lambda *leaves: jnp.stack([jnp.asarray(jax.device_get(leaf)) for leaf in leaves]),
    *[(p.x, p.expert_index, p.gate, p.weights) for p in stages],
  )

  def local(x, expert_index, gate, weights):
    args = jax.tree.map(lambda leaf: leaf[0], (x, expert_index, gate, weights))
    return uep.moe(*args, config=QUICK)[0][None]

  spec = P("stage", "expert")
  y = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(spec,) * 4, out_specs=spec))(*stacked)
  for stage, problem in enumerate(stages):
    assert relative_error(y[stage], dense(problem)[0]) <= 1e-5


def test_leading_axes_are_kept():
  problem = make_problem(make_mesh(4))

  def fold(leaf):
    return jnp.asarray(jax.device_get(leaf)).reshape(16, 6, leaf.shape[-1])

  with jax.set_mesh(problem.mesh):
    y, _ = jax.jit(functools.partial(uep.sharded_moe, config=QUICK))(
      fold(problem.x), fold(problem.expert_index), fold(problem.gate), problem.weights
    )
  expected, _ = dense(problem)
  assert y.shape == (16, 6, problem.x.shape[-1])
  assert relative_error(y.reshape(expected.shape), expected) <= 1e-5


def test_scalars_are_flat_float32_and_true():
  problem = make_problem(make_mesh(4, 2), masked=True)
  with jax.set_mesh(problem.mesh):
    _, stats = jax.jit(lambda *args: uep.sharded_moe(*args, config=CONFIG))(
      problem.x, problem.expert_index, problem.gate, problem.weights
    )
  scalars = jax.jit(lambda stats: stats.scalars("moe/"))(stats)
  assert all(value.shape == () and value.dtype == jnp.float32 for value in scalars.values())
  index = np.asarray(problem.expert_index).reshape(2, -1)
  before = 0.0
  for group in index:
    load = np.bincount(group[group >= 0] // 4, minlength=4)
    before = max(before, load.max() / load.mean())
  assert scalars["moe/imbalance_before"] == pytest.approx(before, rel=1e-6)
  after = np.asarray(stats.load_after_G)
  assert scalars["moe/imbalance_after"] == pytest.approx((after.max(1) / after.mean(1)).max())
  assert float(scalars["moe/masked_assignments"]) == float((index == -1).sum())
  assert 1 <= scalars["moe/imbalance_floor"] <= scalars["moe/imbalance_after"] + 1e-6
  assert scalars["moe/replica_megabytes"] == pytest.approx(
    float(scalars["moe/replicas"]) * 3 * 8 * 12 * 4 / 1e6
  )
