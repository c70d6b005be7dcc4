"""The layer where an expert has nowhere else to go: on one GPU, or with one rank on the axis."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.mosaic.gpu import core as mosaic_gpu
from layer_problems import (
  BIASES,
  dense,
  layer,
  make_mesh,
  make_problem,
  relative_error,
  value_and_grads,
)
from model_layers import gradients, in_form, model_arguments
from programs import FORWARD, LAYER, kernel_names, kernels

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


def traced(case):
  """Output and gradients: the forward pass of gradients has other kernels, which keep more."""
  config = dataclasses.replace(CONFIG, **CASES[case])
  mesh = make_mesh(1, data=2 if case == "two groups" else 1)
  x, index, gate, weights = model_arguments("glm4.5-106b", mesh)
  if case == "two groups":
    weights = in_form(weights, "apart", BIASES)
  with jax.set_mesh(mesh):
    apply = functools.partial(uep.sharded_moe, config=config)
    return [f.trace(x, index, gate, weights) for f in (jax.jit(apply), gradients(apply))]


@pytest.mark.parametrize(
  ("case", "available"),
  [
    ("default", False),
    ("two groups", False),
    ("two groups", True),
    ("fp8", False),
    ("batch invariant", True),
  ],
  ids=lambda value: {False: "without NVSHMEM", True: "with NVSHMEM"}.get(value, value),
)
def test_lowers_for_one_gpu(case, available, monkeypatch):
  """Nothing in it reaches another GPU, whether NVSHMEM is there or not."""
  monkeypatch.setattr(mosaic_gpu, "is_single_process_multi_device_topology", lambda: False)
  monkeypatch.setattr(mosaic_gpu, "is_nvshmem_available", lambda: available)
  for program, names in zip(traced(case), (FORWARD, LAYER), strict=True):
    assert kernel_names(program.jaxpr) == names  # none that plans
    text = program.lower(lowering_platforms=("cuda",)).as_text()
    assert "custom_call @mosaic_gpu" in text
    assert "nvshmem" not in text


@pytest.fixture(scope="module")
def default():
  return traced("default")


@pytest.mark.filterwarnings('ignore:strategy="ideal" overrides the router:UserWarning')
@pytest.mark.parametrize("case", ["no slots", "none", "ideal", "exact", "eplb+"])
def test_strategies_have_the_kernels_of_the_default(case, default):
  """So they lower as it does."""
  for program, expected in zip(traced(case), default, strict=True):
    got, want = (set(map(str, kernels(each.jaxpr))) for each in (program, expected))
    assert got == want


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
