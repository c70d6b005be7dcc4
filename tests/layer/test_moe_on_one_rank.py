"""The layer where an expert has nowhere else to go: on one GPU, or with one rank on the axis."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.mosaic.gpu import core as mosaic_gpu
from layer_problems import dense, layer, make_mesh, make_problem, relative_error, value_and_grads
from model_layers import gradients, model_arguments
from programs import FORWARD, LAYER, kernel_names

import ultraep_jax as uep

CONFIG = uep.BalanceConfig(replica_slots=2, objective="balance", implementation="mosaic_gpu")
CASES = {
  "default": {},
  "two groups": {},
  "no slots": {"replica_slots": 0},
  "fp8": {"dispatch_dtype": "float8_e4m3fn"},
  "batch invariant": {"batch_invariant": True},
  **{name: {"strategy": name} for name in ("none", "ideal", "exact", "eplb+")},
}


@pytest.mark.filterwarnings('ignore:strategy="ideal" overrides the router:UserWarning')
@pytest.mark.parametrize(
  ("case", "available"),
  [*((case, False) for case in CASES), ("default", True), ("two groups", True)],
  ids=lambda value: {False: "without NVSHMEM", True: "with NVSHMEM"}.get(value, value),
)
def test_lowers_for_one_gpu(case, available, monkeypatch):
  """Nothing in it reaches another GPU, whether NVSHMEM is there or not."""
  monkeypatch.setattr(mosaic_gpu, "is_single_process_multi_device_topology", lambda: False)
  monkeypatch.setattr(mosaic_gpu, "is_nvshmem_available", lambda: available)
  config = dataclasses.replace(CONFIG, **CASES[case])
  mesh = make_mesh(1, data=2 if case == "two groups" else 1)
  with jax.set_mesh(mesh):
    apply = functools.partial(uep.sharded_moe, config=config)
    arguments = model_arguments("glm4.5-106b", mesh)
    for function, kernels in ((jax.jit(apply), FORWARD), (gradients(apply), LAYER)):
      traced = function.trace(*arguments)
      assert kernel_names(traced.jaxpr) == kernels  # none that plans
      text = traced.lower(lowering_platforms=("cuda",)).as_text()
      assert "custom_call @mosaic_gpu" in text
      assert "nvshmem" not in text


@pytest.mark.parametrize("ranks, data, domain_size", [(1, 1, None), (1, 2, None), (4, 1, 1)])
def test_equals_a_layer_that_is_not_balanced(ranks, data, domain_size):
  """Also its statistics, for which no planner was asked."""

  def must_not_plan(*args):
    raise AssertionError("there is nothing to plan")

  problem = make_problem(make_mesh(ranks, data), masked=True)
  config = uep.BalanceConfig(strategy=must_not_plan, domain_size=domain_size)
  got = value_and_grads(layer(problem, config), problem)
  y, stats, grads = got
  assert relative_error((y, grads), dense(problem)) < 1e-5
  none = uep.BalanceConfig(strategy="none", domain_size=domain_size)
  chex.assert_trees_all_equal(got, value_and_grads(layer(problem, none), problem))
  for field in (stats.load_planned_G, stats.load_after_G):
    np.testing.assert_array_equal(field, stats.load_before_G)
  assert int(jnp.max(stats.rounds)) == 1 or ranks > 1
