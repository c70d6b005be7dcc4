"""The seven steps have names in a profiler's trace, forward and backward."""

import collections
import re

import jax
import jax.extend
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

import ultraep_jax as uep

STEPS = {"load", "plan", "route", "replicate", "dispatch", "experts", "combine"}
BACKWARD = {"replicate", "dispatch", "experts", "combine"}


def operations(jaxpr, outer: str = "") -> collections.Counter[str]:
  """How many operations each step has; those of inner programs are named after theirs."""
  counts: collections.Counter[str] = collections.Counter()
  for eqn in jaxpr.eqns:
    path = f"{outer}/{eqn.source_info.name_stack}"
    steps = re.findall(r"\buep\.(\w+)", path)
    counts[steps[-1] if steps else ""] += 1
    for inner in jax.extend.core.jaxprs_in_params(eqn.params):
      counts += operations(inner, path)
  return counts


@pytest.fixture(scope="module")
def counts() -> tuple[collections.Counter[str], collections.Counter[str]]:
  """Of a layer's value, and of its value and gradients."""
  mesh = jax.make_mesh((4,), ("expert",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
  config = uep.BalanceConfig(replica_slots=1, objective="balance", implementation="portable")
  x = jax.ShapeDtypeStruct((64, 16), jnp.float32)
  index = jax.ShapeDtypeStruct((64, 2), jnp.int32)
  gate = jax.ShapeDtypeStruct((64, 2), jnp.float32)
  up, down = (8, 16, 32), (8, 32, 16)
  weights = uep.ExpertWeights(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in (up, up, down)))

  def loss(x, weights, index, gate):
    return jnp.sum(uep.sharded_moe(x, index, gate, weights, config=config, mesh=mesh)[0])

  arguments = x, weights, index, gate
  programs = jax.make_jaxpr(loss)(*arguments), jax.make_jaxpr(jax.grad(loss, (0, 1)))(*arguments)
  return operations(programs[0].jaxpr), operations(programs[1].jaxpr)


def test_every_step_is_named(counts):
  value, _ = counts
  assert set(value) >= STEPS
  assert value[""] < sum(value.values()) / 4  # tables, statistics and calls


def test_backward_moves_and_multiplies_under_the_same_names(counts):
  value, gradients = counts
  for step in BACKWARD:
    assert gradients[step] > value[step], step
  for step in STEPS - BACKWARD:
    assert gradients[step] <= value[step], step  # nobody plans again
