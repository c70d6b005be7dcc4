"""The layer and the modules mapped over the stages of a pipeline, a mesh axis of their own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType
from layer_problems import dense, make_mesh, make_problem, relative_error

import ultraep_jax as uep

CONFIGS = {
  "several rounds": uep.BalanceConfig(objective="balance", capacity_factor=1.0, replica_slots=1),
  "direct copies": uep.BalanceConfig(objective="balance", transfer="direct"),
  "exact": uep.BalanceConfig(strategy="exact"),
  "none": uep.BalanceConfig(strategy="none"),
}
GATING = uep.GatingConfig(num_experts=4, num_experts_per_tok=2)


def in_stages():
  return jax.set_mesh(jax.make_mesh((2, 2), ("stage", "expert"), axis_types=(AxisType.Auto,) * 2))


def stacked(*trees):
  return jax.tree.map(lambda *leaves: np.stack([jax.device_get(leaf) for leaf in leaves]), *trees)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_stages_have_weights_and_plans_of_their_own(config):
  problems = [make_problem(make_mesh(2), tokens=64, experts=8, seed=seed) for seed in range(2)]
  of_stage = [(p.x, p.gate, p.weights, p.expert_index, p.cotangent) for p in problems]
  *inputs, index, cotangent = stacked(*of_stage)

  def one_stage(x, gate, weights, index):
    return uep.sharded_moe(x, index, gate, weights, config=config)[0]

  def outputs(x, gate, weights):
    return jax.vmap(one_stage, spmd_axis_name="stage")(x, gate, weights, index)

  with in_stages():
    y, vjp = jax.vjp(jax.jit(outputs), *inputs)
    grads = vjp(jnp.asarray(cotangent))
  expected = [dense(problem) for problem in problems]
  assert relative_error(y, stacked(*(y for y, _ in expected))) <= 1e-5
  assert relative_error(grads, stacked(*(grads for _, grads in expected))) <= 1e-5


@pytest.mark.parametrize("strategy", ["quota", "none"])
def test_nnx_modules_are_mapped_too(strategy):
  config = uep.BalanceConfig(objective="balance", strategy=strategy)
  x = jax.random.normal(jax.random.key(0), (2, 16, 8))

  @nnx.split_rngs(splits=2)
  @nnx.vmap(spmd_axis_name="stage")
  def make(rngs):
    return uep.nnx.MoE(embed_dim=8, expert_dim=16, gating=GATING, config=config, rngs=rngs)

  def loss(modules, x):
    run = nnx.vmap(lambda module, x: module(x)[0], spmd_axis_name="stage")
    return jnp.sum(run(modules, x) ** 2)

  with in_stages():
    modules = make(nnx.Rngs(0))
    value, grads = nnx.jit(nnx.value_and_grad(loss))(modules, x)
    graph, state = nnx.split(modules)
    alone = 0.0
    for stage in range(2):
      module = nnx.merge(graph, jax.tree.map(lambda leaf, n=stage: leaf[n], state))
      alone += jnp.sum(module(x[stage])[0] ** 2)
  np.testing.assert_allclose(value, alone, rtol=1e-5)
  assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(grads))


@pytest.mark.parametrize("strategy", ["quota", "none"])
def test_linen_modules_are_mapped_too(strategy):
  config = uep.BalanceConfig(objective="balance", strategy=strategy)
  sizes = {"embed_dim": 8, "expert_dim": 16, "gating": GATING, "config": config}
  x = jax.random.normal(jax.random.key(0), (2, 16, 8))
  kinds = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
  kinds |= {"metadata_params": {nn.PARTITION_NAME: "stage"}, "spmd_axis_name": "stage"}
  stages = nn.vmap(uep.linen.MoE, **kinds)(**sizes)
  with in_stages():
    params = nn.meta.unbox(stages.init(jax.random.key(0), x))
    y, _ = jax.jit(stages.apply)(params, x)
    of_second = jax.tree.map(lambda leaf: leaf[1], params)
    alone, _ = uep.linen.MoE(**sizes).apply(of_second, x[1])
  np.testing.assert_allclose(y[1], alone, rtol=1e-4, atol=1e-5)
