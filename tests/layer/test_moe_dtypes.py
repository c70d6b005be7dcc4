"""The layer in other dtypes: tokens, parameters, gates, choices, and inside activations."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from layer_problems import (
  BIASES,
  QUICK,
  dense,
  layer,
  make_mesh,
  make_problem,
  output,
  relative_error,
  value_and_grads,
)


@pytest.mark.parametrize("capacity_factor", [1.0, 4.0])
def test_bfloat16_is_as_close_as_its_rounding(capacity_factor):
  exact = make_problem(make_mesh(4), top_k=4)
  low = dataclasses.replace(
    exact, x=exact.x.astype(jnp.bfloat16), cotangent=exact.cotangent.astype(jnp.bfloat16)
  )
  config = dataclasses.replace(QUICK, capacity_factor=capacity_factor)
  y, _, (x_grad, gate_grad, weight_grads) = value_and_grads(layer(low, config), low)
  rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), low)
  rounded = dataclasses.replace(rounded, expert_index=low.expert_index)
  expected_y, expected = dense(rounded)
  assert y.dtype == x_grad.dtype == jnp.bfloat16
  assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves((gate_grad, weight_grads)))
  # One bf16 rounding is 2^-9 relative; a path through the layer has about five.
  assert relative_error(y, expected_y) < 1e-2
  assert relative_error((x_grad, gate_grad, weight_grads), expected) < 1e-2


def test_bfloat16_parameters_get_bfloat16_gradients_if_an_activation_computes_in_float32():
  problem = make_problem(make_mesh(2), dtype=jnp.bfloat16)

  def silu(h):
    return jax.nn.silu(h.astype(jnp.float32))

  apply = layer(problem, QUICK, activation=silu)
  y, _, (x_grad, _, weight_grads) = value_and_grads(apply, problem)
  assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves((y, x_grad, weight_grads)))


@pytest.mark.parametrize("slots, form", [(0, {}), (2, {"layout": "fused", "biases": BIASES})])
def test_gradients_of_bfloat16_parameters_in_several_rounds(slots, form):
  """Kept in bfloat16 between rounds. Were a round's part lost, the error would be above a tenth."""
  low = make_problem(make_mesh(4), load="skewed", dtype=jnp.bfloat16, **form)
  config = dataclasses.replace(QUICK, capacity_factor=1.0, replica_slots=slots, strategy="quota")
  if slots:  # which plans leave above the buffer
    config = dataclasses.replace(config, min_tokens_per_replica=8)
  _, stats, (x_grad, gate_grad, weight_grads) = value_and_grads(layer(low, config), low)
  assert int(jnp.max(stats.rounds)) > 1
  rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), low)
  rounded = dataclasses.replace(rounded, expert_index=low.expert_index)
  _, expected = dense(rounded)
  assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(weight_grads))
  assert relative_error((x_grad, gate_grad, weight_grads), expected) < 1e-2


@pytest.mark.parametrize("differentiate", [True, False])
def test_an_activation_with_a_traced_parameter_is_refused(differentiate):
  problem = make_problem(make_mesh(2))

  def loss(beta, x):
    apply = layer(problem, QUICK, activation=lambda h: h * jax.nn.sigmoid(beta * h))
    return jnp.sum(apply(x, problem.expert_index, problem.gate, problem.weights)[0])

  run = jax.grad(loss) if differentiate else loss
  with jax.set_mesh(problem.mesh), pytest.raises(ValueError, match=r"activation: .* closes over a"):
    jax.jit(run)(1.5, problem.x)


def test_low_precision_gates_get_gradients_of_their_dtype():
  problem = make_problem(make_mesh(2))
  low = dataclasses.replace(problem, gate=problem.gate.astype(jnp.bfloat16))
  _, _, (_, gate_grad, _) = value_and_grads(layer(low, QUICK), low)
  exact = dataclasses.replace(problem, gate=low.gate.astype(jnp.float32))
  _, (_, expected, _) = dense(exact)
  assert gate_grad.dtype == jnp.bfloat16
  assert relative_error(gate_grad, expected) < 5e-3


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.int8, jnp.int16, jnp.uint32])
def test_every_integer_dtype_of_indices(dtype):
  problem = make_problem(make_mesh(2), experts=128)  # no int8
  problem = dataclasses.replace(problem, expert_index=problem.expert_index % 100)
  apply = layer(problem, QUICK)

  def changed(first, dtype=jnp.int32):
    index = problem.expert_index if first is None else problem.expert_index.at[0, 0].set(first)
    return dataclasses.replace(problem, expert_index=index.astype(dtype))

  y, stats = output(apply, changed(None, dtype))
  assert (y == output(apply, changed(None))[0]).all()
  assert int(stats.invalid[0]) == 0
  if dtype != jnp.int8:
    y, stats = output(apply, changed(200, dtype))
    assert (y == output(apply, changed(-1))[0]).all()
    assert int(stats.invalid[0]) == 1
