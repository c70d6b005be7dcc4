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
  "two groups in fp8": {"dispatch_dtype": "float8_e4m3fn"},
  "no slots": {"replica_slots": 0},
  "two groups, batch invariant": {"batch_invariant": True},
  **{name: {"strategy": name} for name in ("none", "ideal", "exact", "eplb+")},
}


def traced(case):
  """Output and gradients: the forward pass of gradients has other kernels, which keep more.

  In one program, which lowers the kernels of both once.
  """
  config = dataclasses.replace(CONFIG, **CASES[case])
  two_groups = case.startswith("two groups")
  mesh = make_mesh(1, data=2 if two_groups else 1)
  x, index, gate, weights = model_arguments("glm4.5-106b", mesh)
  if two_groups:
    weights = in_form(weights, "apart", BIASES)
  apply = functools.partial(uep.sharded_moe, config=config)
  functions = jax.jit(apply), gradients(apply)
  with jax.set_mesh(mesh):
    return jax.jit(lambda *args: [f(*args) for f in functions]).trace(x, index, gate, weights)


def parts(program):
  """The program of the output, and that of gradients."""
  output, grads = (eqn.params["jaxpr"] for eqn in program.jaxpr.eqns)
  return output, grads


@pytest.mark.parametrize(
  ("case", "available"),
  [
    ("default", False),
    ("two groups in fp8", True),
    ("two groups, batch invariant", True),
  ],
  ids=lambda value: {False: "without NVSHMEM", True: "with NVSHMEM"}.get(value, value),
)
def test_lowers_for_one_gpu(case, available, monkeypatch):
  """Nothing in it reaches another GPU, whether NVSHMEM is there or not."""
  monkeypatch.setattr(mosaic_gpu, "is_single_process_multi_device_topology", lambda: False)
  monkeypatch.setattr(mosaic_gpu, "is_nvshmem_available", lambda: available)
  program = traced(case)
  assert list(map(kernel_names, parts(program))) == [FORWARD, LAYER]  # none that plans
  text = program.lower(lowering_platforms=("cuda",)).as_text()
  assert "custom_call @mosaic_gpu" in text
  assert "nvshmem" not in text


def kernel_texts(case):
  """Of output and gradients, each kernel's program."""
  distinct = ({id(kernel): kernel for kernel in kernels(part)} for part in parts(traced(case)))
  return [set(map(str, each.values())) for each in distinct]


@pytest.fixture(scope="module")
def default():
  return kernel_texts("default")


@pytest.mark.filterwarnings('ignore:strategy="ideal" overrides the router:UserWarning')
@pytest.mark.parametrize("case", ["no slots", "none", "ideal", "exact", "eplb+"])
def test_strategies_have_the_kernels_of_the_default(case, default):
  """So they lower as it does."""
  assert kernel_texts(case) == default


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
