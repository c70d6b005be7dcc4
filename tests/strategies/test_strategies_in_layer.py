"""Every strategy inside the layer: a dense layer's result by the plan that it makes alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import Partial

import ultraep_jax as uep
from ultraep_jax import strategies
from ultraep_jax.strategies import eplb, lplb
from ultraep_jax.testing import dense_moe, expert_indices, zipf_loads

RANKS, HOME, TOKENS, TOP_K, WIDTH, INNER = 4, 2, 16, 2, 8, 12
EXPERTS = RANKS * HOME
CONFIG = uep.BalanceConfig(replica_slots=HOME, objective="balance")
MODULES = {"eplb": eplb, "lplb": lplb}


def inputs(seed=0):
  """Arrays of one layer whose history is that of another seed."""
  rng = np.random.default_rng(seed)
  load_GE = zipf_loads(seed, EXPERTS, RANKS, TOKENS, TOP_K, 1.9)
  index = jnp.asarray(expert_indices(seed, load_GE, TOP_K).reshape(-1, TOP_K))

  def normal(*shape):
    return jnp.asarray(0.3 * rng.normal(size=shape), jnp.float32)

  weights = uep.ExpertWeights(
    normal(EXPERTS, WIDTH, INNER), normal(EXPERTS, WIDTH, INNER), normal(EXPERTS, INNER, WIDTH)
  )
  x, gate = normal(RANKS * TOKENS, WIDTH), jnp.abs(normal(RANKS * TOKENS, TOP_K))
  return load_GE, (x, index, gate, weights)


@jax.jit
def history(load_GE):
  state = eplb.init(EXPERTS, RANKS, CONFIG)
  return eplb.update(state, load_GE.sum(axis=0, dtype=jnp.int32), CONFIG, period=1)


@jax.jit
def dense(x, gate, weights, index):
  """Gradients, and the output."""

  def loss(x, gate, weights):
    y = dense_moe(x, index, gate, weights)
    return jnp.sum(jnp.sin(y)), y

  return jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(x, gate, weights)


def close(got, expected):
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b)


@pytest.mark.parametrize(
  "name, kind",
  [
    ("exact", AxisType.Auto),
    ("eplb+", AxisType.Auto),
    ("eplb", AxisType.Explicit),
    ("lplb", AxisType.Auto),
  ],
)
def test_equals_dense_and_runs_the_plan(name, kind):
  load_GE, (x, index, gate, weights) = inputs()
  past_GE = zipf_loads(7, EXPERTS, RANKS, TOKENS, TOP_K, 1.9)
  state = history(past_GE)

  def strategy(state):
    return MODULES[name].planner(state) if name in MODULES else name

  @jax.jit
  def run(state, x, gate, weights):
    config = dataclasses.replace(CONFIG, strategy=strategy(state))

    def loss(x, gate, weights):
      y, stats = uep.sharded_moe(x, index, gate, weights, config=config)
      return jnp.sum(jnp.sin(y)), (y, stats)

    return jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(x, gate, weights)

  mesh = jax.make_mesh((RANKS,), ("expert",), axis_types=(kind,), devices=jax.devices()[:RANKS])
  with jax.set_mesh(mesh):
    sharding = NamedSharding(mesh, P("expert"))
    grads, (y, stats) = run(state, *jax.device_put((x, gate, weights), sharding))

  close((grads, y), dense(x, gate, weights, index))

  @jax.jit
  def plan_of(state, load_GE):
    return strategies.resolve(strategy(state)).plan(load_GE, CONFIG, None)

  plan = plan_of(state, jnp.asarray(load_GE))
  np.testing.assert_array_equal(stats.load_after_G[0], plan.quota.sum(axis=0))
  assert int(stats.replicas[0]) == int((plan.replica_expert >= 0).sum()) > 0


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_training_loop_updates_the_history_without_compiling_again(kind):
  _, (x, index, gate, weights) = inputs()
  traces = []

  @jax.jit
  def step(state, x):
    traces.append(1)
    config = dataclasses.replace(CONFIG, strategy=eplb.planner(state))
    y, stats = uep.sharded_moe(x, index, gate, weights, config=config)
    return eplb.update(state, stats.expert_load_E, CONFIG, period=2), y, stats

  state, replicas = eplb.init(EXPERTS, RANKS, CONFIG), []
  mesh = jax.make_mesh((RANKS,), ("expert",), devices=jax.devices()[:RANKS], axis_types=(kind,))
  state, x = jax.device_put((state, x), NamedSharding(mesh, P()))
  with jax.set_mesh(mesh):
    for _ in range(4):
      state, _, stats = step(state, x)
      replicas.append(int(stats.replicas[0]))
  assert len(traces) == 1
  assert replicas[:2] == [0, 0] and min(replicas[2:]) > 0
  assert int(state.age) == 4


@pytest.mark.parametrize("name", MODULES)
def test_a_planner_leaks_no_tracer_and_runs_eagerly(name):
  """Its arrays are no part of what is static."""
  load_GE, (x, index, gate, weights) = inputs()
  mesh = jax.make_mesh((RANKS,), ("expert",), devices=jax.devices()[:RANKS])
  with jax.set_mesh(mesh), jax.check_tracer_leaks():
    state = history(load_GE)

    def run(state, x):
      config = dataclasses.replace(CONFIG, strategy=MODULES[name].planner(state))
      return uep.sharded_moe(x, index, gate, weights, config=config)[0]

    close(jax.jit(run)(state, x), run(state, x))


def test_inside_the_users_shard_map():
  load_GE, (x, index, gate, weights) = inputs()
  state = history(load_GE)
  mesh = jax.make_mesh(
    (RANKS,), ("expert",), axis_types=(AxisType.Auto,), devices=jax.devices()[:RANKS]
  )

  @jax.jit
  @jax.shard_map(
    mesh=mesh, in_specs=(P(), *[P("expert")] * 4), out_specs=(P("expert"), P()), check_vma=True
  )
  def run(state, x, index, gate, weights):
    config = dataclasses.replace(CONFIG, strategy=eplb.planner(state))
    return uep.moe(x, index, gate, weights, config=config)

  y, stats = run(state, x, index, gate, weights)
  close(y, dense(x, gate, weights, index)[1])
  assert int(stats.replicas) > 0


def at_home(*held):
  """No copies, by a planner that looks at what it holds."""
  *parts, load_GE, config, cost = held
  del cost
  for part in parts:
    assert not isinstance(part, int) or len(range(part)) == 3
    assert not isinstance(part, np.ndarray) or part.sum() == 3
  return strategies.none.plan(load_GE, config, None)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
  "held", [(), ("text",), (3,), (len,), (np.array([1, 2]),), ("array", 3)], ids=repr
)
def test_what_a_partial_planner_may_hold(held, kind):
  """Text, sizes and functions stay as they are; arrays may lie on any device."""
  load_GE, (x, index, gate, weights) = inputs()
  del load_GE
  mesh = jax.make_mesh((RANKS,), ("expert",), axis_types=(kind,), devices=jax.devices()[:RANKS])
  array = jax.device_put(jnp.arange(3), jax.devices()[0])
  planner = Partial(
    at_home, *(array if isinstance(part, str) and part == "array" else part for part in held)
  )
  for strategy in (planner, uep.strategies.Strategy("mine", planner)):
    config = dataclasses.replace(CONFIG, strategy=strategy)
    with jax.set_mesh(mesh):
      y, stats = uep.sharded_moe(x, index, gate, weights, config=config)
    close(y, dense(x, gate, weights, index)[1])
    assert int(stats.replicas[0]) == 0
  assert strategies.resolve(planner).name == "at_home"
