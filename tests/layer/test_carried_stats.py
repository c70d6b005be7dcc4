"""Statistics as one vector, and the mesh of ``with mesh:``."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from layer_problems import QUICK, make_mesh, make_problem

import ultraep_jax as uep


def run(problem, **options):
  arguments = problem.x, problem.expert_index, problem.gate, problem.weights
  return uep.sharded_moe(*arguments, config=QUICK, **options)


def test_a_scan_carries_statistics_as_one_vector():
  problem = make_problem(make_mesh(4))
  ranks, experts = 4, problem.weights.wo.shape[0]

  @jax.jit
  def layers(problem):
    _, stats = run(problem, mesh=problem.mesh)

    def layer(flat, _):
      _, stats = run(problem, mesh=problem.mesh)
      return stats.flat(), flat

    last, before = jax.lax.scan(layer, jnp.zeros_like(stats.flat()), length=2)
    return stats, last, before

  stats, last, before = layers(problem)
  assert last.dtype == jnp.int32 and last.ndim == 2 and not np.any(before[0])
  got = uep.LayerStats.unflatten(last, ranks, experts)
  for name, want, value in zip(stats._fields, stats, got, strict=True):
    assert value.dtype == want.dtype, name
    np.testing.assert_array_equal(value, want, err_msg=name)
  assert float(stats.scalars()["replicas"]) > 0  # not all zero


def test_weights_divided_over_an_axis_of_the_callers_leave_statistics_alike_along_it():
  """In a ``shard_map`` of one's own that checks types: y is a term of a sum there."""
  problem = make_problem(make_mesh(4))
  arguments = problem.x, problem.expert_index, problem.gate, problem.weights
  x, *rest = jax.tree.map(np.asarray, arguments)  # for the devices of both meshes
  axis_types = (jax.sharding.AxisType.Auto,) * 2
  mesh = jax.make_mesh((4, 2), ("expert", "tensor"), axis_types)

  def layer(*arguments):
    y, stats = uep.moe(*arguments, config=QUICK)
    return jax.lax.psum(y, "tensor"), jax.tree.map(lambda leaf: leaf[None], stats)

  into, out = P("expert", None, "tensor"), P("expert", "tensor")
  weights = uep.ExpertWeights(into, into, out)
  specs = P("expert"), P("expert"), P("expert"), weights
  run_here = jax.shard_map(layer, mesh=mesh, in_specs=specs, out_specs=(P("expert"), P()))

  def loss(layer, x):
    y, stats = layer(x, *rest)
    return jnp.sum(y**2), stats

  whole = functools.partial(uep.sharded_moe, config=QUICK, mesh=problem.mesh)
  grads, stats = jax.jit(jax.grad(functools.partial(loss, run_here), has_aux=True))(x)
  want, same = jax.jit(jax.grad(functools.partial(loss, whole), has_aux=True))(x)
  np.testing.assert_allclose(grads, want, rtol=2e-5, atol=2e-5 * np.abs(want).max())
  np.testing.assert_array_equal(stats.load_after_G, same.load_after_G)


def test_a_vector_of_another_layer():
  flat = jnp.zeros(4 * (8 + 3) + 8 + 8 + 12 * 2, jnp.int32)
  assert uep.LayerStats.unflatten(flat, 4, 8).replica_expert_GS.shape == (4, 2)
  with pytest.raises(ValueError, match=r"flat: expected .* for 4 ranks and 8 experts, got 85"):
    uep.LayerStats.unflatten(jnp.zeros(85, jnp.int32), 4, 8)


def test_the_mesh_of_with():
  problem = make_problem(make_mesh(4))
  want, _ = jax.jit(lambda problem: run(problem, mesh=problem.mesh))(problem)
  with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # jax 0.12 deprecates it
    with problem.mesh:
      got, _ = jax.jit(run)(problem)
  np.testing.assert_array_equal(got, want)
