"""A layer that plans where gradients are taken and not elsewhere, or the other way round."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from layer_problems import (
  dense,
  make_mesh,
  make_problem,
  new_layer,
  output,
  planning_in_one_pass,
  relative_error,
  repeated,
  value_and_grads,
)
from programs import equations

import ultraep_jax as uep

CONFIG = uep.BalanceConfig(replica_slots=2, capacity_factor=4.0)


@pytest.fixture(params=["training", "forward"])
def planning(request):
  """Which pass plans."""
  with planning_in_one_pass(training=request.param == "training"):
    yield request.param


def fresh(problem, config=CONFIG, check_vma=True):
  """A layer whose trace no other test has."""
  return new_layer.__wrapped__(problem.mesh, config, check_vma)


@pytest.mark.parametrize(
  ("data", "kind", "options"),
  [
    (1, AxisType.Auto, {}),
    (2, AxisType.Explicit, {"masked": True, "biases": ("into", "out")}),
    (1, AxisType.Explicit, {"layout": "interleaved"}),
  ],
)
def test_output_and_every_gradient_are_the_dense_ones(planning, data, kind, options):
  problem = make_problem(make_mesh(4, data, kind), **options)
  apply = fresh(problem)
  y, stats = output(apply, problem)
  trained_y, trained, grads = value_and_grads(apply, problem)
  expected_y, expected = dense(problem)
  for each in (y, trained_y):
    assert relative_error(each, expected_y) <= 1e-5
  assert relative_error(grads, expected) <= 1e-5
  forward, training = (int(jnp.sum(each.replicas)) for each in (stats, trained))
  assert (training > 0, forward > 0) == (planning == "training", planning == "forward")
  # Of both passes they have one form.
  assert jax.tree.map(jnp.shape, stats) == jax.tree.map(jnp.shape, trained)


def test_without_vma_and_where_the_arguments_of_a_call_are_not_all_differentiated(planning):
  problem = make_problem(make_mesh(4))
  apply = fresh(problem, check_vma=False)
  _, (x_grad, gate_grad, weight_grads) = dense(problem)
  expected = {"x": x_grad, "gate": gate_grad, "weights": weight_grads}

  def loss(argument, name):
    given = {"x": problem.x, "gate": problem.gate, "weights": problem.weights} | {name: argument}
    y, stats = apply(given["x"], problem.expert_index, given["gate"], given["weights"])
    return jnp.sum(y * problem.cotangent), jnp.sum(stats.replicas)

  with jax.set_mesh(problem.mesh):
    for name in expected:
      grads = jax.jit(jax.grad(loss, has_aux=True), static_argnums=1)
      grad, replicas = grads(getattr(problem, name), name)
      assert relative_error(grad, expected[name]) <= 1e-5
      assert (int(replicas) > 0) == (planning == "training")


@pytest.mark.parametrize("policy", ["nothing", "names"])
def test_recomputed_in_a_scan(planning, policy):
  """Backward computes the layer again as it was with gradients."""
  kept = {
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "names": jax.checkpoint_policies.save_only_these_names(*uep.REMAT_NAMES),
  }[policy]
  problem = make_problem(make_mesh(4))
  apply = repeated(jax.checkpoint(fresh(problem), policy=kept), 3)
  y, stats, grads = value_and_grads(apply, problem)
  expected_y, expected = dense(problem, layers=3)
  assert relative_error(y, expected_y) <= 1e-5
  assert relative_error(grads, expected) <= 1e-5
  assert bool((stats.replicas > 0).all()) == (planning == "training")


def test_statistics_have_one_type_where_token_groups_plan_for_themselves(planning):
  """A jitted layer is traced forward before gradients are; JAX compares what both return."""
  problem = make_problem(make_mesh(2, 2))
  _, stats, grads = value_and_grads(jax.jit(fresh(problem)), problem)
  assert relative_error(grads, dense(problem)[1]) <= 1e-5
  assert bool((stats.replicas > 0).all()) == (planning == "training")


@pytest.mark.parametrize(
  ("config", "options"),
  [
    (CONFIG, {}),
    # More choices than home experts: it fits without a plan, but only a plan tells while tracing.
    (uep.BalanceConfig(capacity_factor=2.0), {"experts": 4}),
  ],
)
def test_layers_are_mapped(planning, config, options):
  """The statistics of both passes are mapped alike, which JAX does not look after."""
  problems = [make_problem(make_mesh(4), seed=seed, **options) for seed in range(2)]
  arguments = [(p.x, p.expert_index, p.gate, p.weights, p.cotangent) for p in problems]
  x, index, gate, weights, cotangent = jax.tree.map(lambda *leaves: jnp.stack(leaves), *arguments)
  apply = jax.vmap(jax.jit(fresh(problems[0], config)))

  def loss(x, gate, weights):
    y, stats = apply(x, index, gate, weights)
    return jnp.sum(y * cotangent), stats

  with jax.set_mesh(problems[0].mesh):
    got, stats = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(x, gate, weights)
  expected = [dense(problem)[1] for problem in problems]
  assert relative_error(got, jax.tree.map(lambda *leaves: np.stack(leaves), *expected)) <= 1e-5
  assert bool((stats.replicas > 0).all()) == (planning == "training")
  assert stats.rounds.tolist() == [[1], [1]]


def test_nothing_is_planned_where_nothing_is_copied(planning):
  """The pass that does not plan has the loops of a layer without balancing, and no search."""
  problem = make_problem(make_mesh(4))

  def loops(config, gradients):
    apply = fresh(problem, config)

    def loss(x):
      y = apply(x, problem.expert_index, problem.gate, problem.weights)[0]
      return jnp.sum(y * problem.cotangent)

    with jax.set_mesh(problem.mesh):
      jaxpr = jax.make_jaxpr(jax.grad(loss) if gradients else loss)(problem.x)
    return sum(equation.primitive.name == "while" for equation in equations(jaxpr))

  none = dataclasses.replace(CONFIG, strategy="none")
  for gradients in (False, True):
    plans = gradients == (planning == "training")
    assert (loops(CONFIG, gradients) > loops(none, gradients)) == plans
