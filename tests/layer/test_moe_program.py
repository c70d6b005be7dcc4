"""What the layer's program keeps, computes again, and in which order it exchanges."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from layer_problems import (
  EXPERTS,
  INNER,
  WIDTH,
  layer,
  make_mesh,
  make_problem,
  new_layer,
  pile_up,
)
from programs import COLLECTIVES, equations, unordered_exchanges, unordered_loops

import ultraep_jax as uep
from ultraep_jax.planning import sizes
from ultraep_jax.planning.cost import LayerCost
from ultraep_jax.strategies import eplb, lplb

pytestmark = pytest.mark.usefixtures("optimized")

CONFIG = uep.BalanceConfig(replica_slots=2, objective="balance", capacity_factor=1.25)
SEVERAL_ROUNDS = uep.BalanceConfig(replica_slots=1, capacity_factor=1.0, strategy=pile_up)


def kept_for_backward(problem, config):
  def residuals(x, weights):
    _, vjp = jax.vjp(
      lambda x, weights: layer(problem, config)(x, problem.expert_index, problem.gate, weights)[0],
      x,
      weights,
    )
    return jax.tree.leaves(vjp)

  with jax.set_mesh(problem.mesh):
    return jax.eval_shape(residuals, problem.x, problem.weights)


@pytest.mark.parametrize("changes", [{"replica_slots": 0}, {"strategy": "none"}])
def test_nothing_that_is_kept_is_empty(changes):
  """XLA's GPU compiler crashes over empty residuals of a ``shard_map``."""
  kept = kept_for_backward(make_problem(make_mesh(4)), dataclasses.replace(CONFIG, **changes))
  assert kept and all(leaf.size for leaf in kept), kept


def test_no_residual_holds_replica_weights():
  kept = kept_for_backward(make_problem(make_mesh(4)), dataclasses.replace(CONFIG, replica_slots=3))
  matrices = {(WIDTH, INNER), (INNER, WIDTH)}
  held = [leaf.shape for leaf in kept if leaf.shape[-2:] in matrices and leaf.ndim == 3]
  assert held, "the parameters are residuals"
  assert all(shape[0] == EXPERTS for shape in held), held  # the parameters and nothing else


def count(text: str, primitive: str) -> int:
  return len(re.findall(rf"= {primitive}\w*\[", text))


def test_saved_names_spare_backward_the_second_dispatch():
  problem = make_problem(make_mesh(4))
  config = dataclasses.replace(CONFIG, capacity_factor=4.0)

  def exchanges(policy):
    apply = jax.checkpoint(layer(problem, config), policy=policy)

    def loss(x, gate, weights):
      return jnp.sum(apply(x, problem.expert_index, gate, weights)[0])

    with jax.set_mesh(problem.mesh):
      jaxpr = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(
        problem.x, problem.gate, problem.weights
      )
    text = str(jaxpr)
    return [count(text, name) for name in ("all_to_all", "all_gather", "ppermute", "dot_general")]

  policies = jax.checkpoint_policies
  nothing = exchanges(policies.nothing_saveable)
  named = exchanges(policies.save_only_these_names(*uep.REMAT_NAMES))
  everything = exchanges(policies.everything_saveable)
  assert named == everything
  assert all(many > few for many, few in zip(nothing, named, strict=True)), (nothing, named)


def test_copies_travel_once_however_many_rounds():
  """Once more in the backward pass, where the gradients of each round go home."""
  problem = make_problem(make_mesh(4))

  def sent(config, gradient):
    def loss(x, gate, weights):
      return jnp.sum(layer(problem, config)(x, problem.expert_index, gate, weights)[0])

    program = jax.grad(loss, argnums=(0, 1, 2)) if gradient else loss
    with jax.set_mesh(problem.mesh):
      jaxpr = jax.make_jaxpr(program)(problem.x, problem.gate, problem.weights).jaxpr
    return sum(eqn.primitive.name == "ppermute" for eqn in equations(jaxpr))

  one_round = dataclasses.replace(SEVERAL_ROUNDS, capacity_factor=4.0)
  weights = len(jax.tree.leaves(problem.weights))
  assert sent(one_round, False) == sent(SEVERAL_ROUNDS, False) == weights
  assert sent(one_round, True) == 3 * weights and sent(SEVERAL_ROUNDS, True) == 4 * weights


def test_exchanges_wait_for_loops_of_others():
  """XLA:CPU would run them side by side, in another order on each rank."""
  problem = make_problem(make_mesh(4))
  run = layer(problem, SEVERAL_ROUNDS)

  @jax.checkpoint
  def outputs(*args):
    return run(*args)[0]

  def loss(x, gate, weights):
    return jnp.sum(outputs(x, problem.expert_index, gate, weights) * problem.cotangent)

  args = problem.x, problem.gate, problem.weights
  with jax.set_mesh(problem.mesh):
    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*args).compile()
  text = compiled.as_text()
  for opcode in ("all-to-all", "collective-permute"):
    assert text.count(f" {opcode}(") > 8
    assert not list(unordered_loops(text, opcode))


def test_layers_alike_are_lowered_once():
  """Else each layer that is not in a scan has kernels of its own to compile, for a minute."""
  problem = make_problem(make_mesh(2))
  run = layer(problem, CONFIG)

  def program_size(layers):
    def loss(x, gate, weights):
      for _ in range(layers):
        x = x + run(x, problem.expert_index, gate, weights)[0]
      return jnp.sum(x)

    args = problem.x, problem.gate, problem.weights
    with jax.set_mesh(problem.mesh):
      return len(jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*args).as_text())

  # What a layer adds: its plan, routes and statistics. The last one's gradients come from a sum.
  two, six = program_size(2), program_size(6)
  assert six < 2 * two


def by_history(module, ranks, config):
  state = module.init(EXPERTS, ranks, config)
  return module.planner(module.update(state, jnp.arange(EXPERTS, dtype=jnp.int32), config))


POLICIES = {
  "everything": jax.checkpoint_policies.everything_saveable,
  "names": jax.checkpoint_policies.save_only_these_names(*uep.REMAT_NAMES),
}


@pytest.mark.parametrize(
  "strategy, rounds, policy",
  [
    (pile_up, "several", "everything"),
    (pile_up, "several", "names"),
    (pile_up, "one", "everything"),
    ("quota", "one", "names"),
    ("exact", "one", "everything"),
    ("eplb+", "one", "everything"),
    (eplb, "several", "names"),
    (lplb, "one", "names"),
    ("ideal", "several", "names"),
    ("none", "one", "everything"),
  ],
  ids=lambda value: getattr(value, "__name__", value),
)
@pytest.mark.filterwarnings("ignore:.*overrides the router")
def test_exchanges_of_several_layers_wait_for_each_other(strategy, rounds, policy):
  """Where routers choose by what comes out of the layer before, as they do in models."""
  problem = make_problem(make_mesh(4))
  config = dataclasses.replace(
    CONFIG,
    replica_slots=3,
    capacity_factor=1.0 if rounds == "several" else 4.0,
  )
  if strategy in (eplb, lplb):
    strategy = by_history(strategy, problem.mesh.size, config)
  config = dataclasses.replace(config, strategy=strategy)
  run = layer(problem, config)

  def outputs(x, gate, weights):
    index = (problem.expert_index + jnp.where(x[:, :1] > 0, 1, 0)) % EXPERTS
    return run(x, index, gate * jax.nn.sigmoid(x[:, 1:2]), weights)[0]

  def loss(x, gate, weights):
    for _ in range(2):
      x = jax.checkpoint(outputs, policy=POLICIES[policy])(x, gate, weights)
    return jnp.sum(x * problem.cotangent)

  with jax.set_mesh(problem.mesh):
    gradients = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))
    jaxpr = gradients(problem.x, problem.gate, problem.weights).jaxpr
  copies = strategy not in ("ideal", "none")
  for name, least in {"all_to_all": 16, "ppermute": 16 if copies else 0}.items():
    assert sum(eqn.primitive.name == name for eqn in equations(jaxpr)) >= least
  unordered = unordered_exchanges(jaxpr, *COLLECTIVES)
  assert not [(a.primitive, b.primitive) for a, b in unordered]


def test_further_rounds_add_to_the_gradients_of_the_first():
  """No round has gradients of all home weights of its own, which are float32 and large."""
  mesh, experts, width, inner = make_mesh(2), 16, 64, 128
  matrix = jax.ShapeDtypeStruct((experts, width, inner), jnp.float32)
  weights = uep.ExpertWeights(matrix, matrix, jax.ShapeDtypeStruct((experts, inner, width), "f4"))
  x = jax.ShapeDtypeStruct((64, width), jnp.float32)
  index, gate = (jax.ShapeDtypeStruct((64, 2), dtype) for dtype in ("i4", "f4"))

  def memory(config):
    def loss(x, gate, weights, index):
      return jnp.sum(uep.sharded_moe(x, index, gate, weights, config=config, mesh=mesh)[0])

    grads = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    return grads.lower(x, gate, weights, index).compile().memory_analysis().temp_size_in_bytes

  one_round = dataclasses.replace(SEVERAL_ROUNDS, capacity_factor=2.0)
  a_set = 3 * experts // 2 * width * inner * 4
  assert memory(SEVERAL_ROUNDS) - memory(one_round) < a_set / 2


def test_gradients_make_copies_dearer(monkeypatch):
  """What copies cost in training is weighed where gradients are taken, and nowhere else."""
  dear = LayerCost(uep.PlanCost(0, 10**6), 0, uep.PlanCost(10**6, 10**6))
  monkeypatch.setattr(sizes, "layer_cost", lambda *_: dear)
  problem = make_problem(make_mesh(4))
  config = uep.BalanceConfig(replica_slots=2, capacity_factor=4.0)
  apply = new_layer.__wrapped__(problem.mesh, config, True)  # no other test's

  def copies(x):
    y, stats = apply(x, problem.expert_index, problem.gate, problem.weights)
    return jnp.sum(y), jnp.sum(stats.replicas)

  with jax.set_mesh(problem.mesh):
    assert int(jax.jit(copies)(problem.x)[1]) > 0
    assert int(jax.jit(jax.grad(copies, has_aux=True))(problem.x)[1]) == 0
