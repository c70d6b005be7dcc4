"""The seven steps have names in a profiler's trace, forward and backward."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

import ultraep_jax as uep

STEPS = {"load", "plan", "route", "replicate", "dispatch", "experts", "combine"}


@pytest.fixture(scope="module")
def names() -> list[str]:
  """Names of all operations of a layer's value and gradients, as the compiler gets them."""
  mesh = jax.make_mesh((4,), ("expert",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
  config = uep.BalanceConfig(replica_slots=1, objective="balance", implementation="portable")
  x = jax.ShapeDtypeStruct((64, 16), jnp.float32)
  index = jax.ShapeDtypeStruct((64, 2), jnp.int32)
  gate = jax.ShapeDtypeStruct((64, 2), jnp.float32)
  up, down = (8, 16, 32), (8, 32, 16)
  weights = uep.ExpertWeights(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in (up, up, down)))

  def loss(x, weights, index, gate):
    return jnp.sum(uep.sharded_moe(x, index, gate, weights, config=config, mesh=mesh)[0])

  lowered = jax.jit(jax.grad(loss, (0, 1))).lower(x, weights, index, gate)
  return re.findall(r'loc\("([^"]+)"', lowered.as_text(debug_info=True))


def test_every_step_is_named(names):
  assert {step for name in names for step in re.findall(r"\buep\.(\w+)", name)} == STEPS


def test_backward_moves_and_multiplies_under_the_same_names(names):
  backward = [name for name in names if "transpose" in name]
  said = {step for name in backward for step in re.findall(r"\buep\.(\w+)", name)}
  assert said == {"replicate", "dispatch", "experts", "combine"}
