"""The room for a rank's rows, with gradients and without."""

import jax
import jax.numpy as jnp
from layer_problems import dense, make_mesh, make_problem, new_layer, relative_error

import ultraep_jax as uep
from ultraep_jax.planning import capacity, sizes
from ultraep_jax.planning.cost import LayerCost


def test_rows_that_are_kept_have_the_smaller_buffer(monkeypatch):
  """A plan that fits the larger buffer alone is made only where no gradients are taken at all."""
  for name, limit in {"_ALL_BYTES": 0, "_KEPT_BYTES": 0, "_TRANSIENT_BYTES": 1 << 30}.items():
    monkeypatch.setattr(capacity, name, limit)

  def dear(dtype, weights, rows, *_):
    return LayerCost(uep.PlanCost(10**6, rows), 0)

  monkeypatch.setattr(sizes, "layer_cost", dear)
  monkeypatch.setattr(sizes, "multiplied_by_kernel", lambda *_: True)  # as for bfloat16 on GPUs
  problem = make_problem(make_mesh(4))
  expected, expected_grads = dense(problem)
  apply = new_layer.__wrapped__(problem.mesh, uep.BalanceConfig(), True)  # no other test's

  def loss(x, gate, weights):
    y, stats = apply(x, problem.expert_index, gate, weights)
    return jnp.sum(y * problem.cotangent), (y, stats)

  def in_scan(*operands):
    each = jax.lax.scan(lambda total, _: (total, loss(*operands)), 0.0, length=1)[1]
    return jax.tree.map(lambda leaf: leaf[0], each)

  operands = problem.x, problem.gate, problem.weights
  mean = problem.expert_index.size / 4
  with jax.set_mesh(problem.mesh):
    _, (y, stats) = jax.jit(loss)(*operands)
    assert relative_error(y, expected) < 1e-5
    assert 1.25 * mean < int(jnp.max(stats.load_after_G)) <= 2 * mean
    for operand, function in enumerate((loss, jax.checkpoint(loss), in_scan)):
      gradient = jax.jit(jax.grad(function, operand, has_aux=True))
      grad, (y, stats) = gradient(*operands)
      assert relative_error((y, grad), (expected, expected_grads[operand])) < 1e-5
      assert int(jnp.max(stats.load_after_G)) <= 1.25 * mean
