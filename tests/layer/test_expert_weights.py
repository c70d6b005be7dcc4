"""Weights as a pytree that others save: Orbax, Flax and pickle."""

import pickle

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import ultraep_jax as uep
from ultraep_jax.types import Layout

WEIGHTS = {
  "apart": uep.ExpertWeights(jnp.ones((2, 3, 4)), jnp.ones((2, 3, 4)), jnp.full((2, 4, 3), 2.0)),
  "interleaved": uep.ExpertWeights.fused(
    jnp.arange(48.0).reshape(2, 3, 8), jnp.ones((2, 4, 3)), interleaved=True
  ),
  "ungated": uep.ExpertWeights.ungated(
    jnp.ones((2, 3, 4)), jnp.ones((2, 4, 3)), wo_bias=jnp.ones((2, 3))
  ),
}


def assert_same(found, weights):
  assert found.layout is weights.layout
  assert jax.tree.structure(found) == jax.tree.structure(weights)
  jax.tree.map(np.testing.assert_array_equal, found, weights)


@pytest.mark.parametrize("name", WEIGHTS)
def test_orbax_restores_them_with_a_target_and_without(name, tmp_path):
  tree = {"step": jnp.int32(3), "experts": WEIGHTS[name]}
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / "0", tree)
    checkpointer.wait_until_finished()
    assert_same(checkpointer.restore(tmp_path / "0", tree)["experts"], tree["experts"])
    alone = checkpointer.restore(tmp_path / "0")["experts"]
  assert "layout" not in alone
  assert_same(uep.ExpertWeights(**alone, layout=Layout(name)), tree["experts"])


@pytest.mark.parametrize("name", WEIGHTS)
def test_flax_restores_them(name):
  tree = {"experts": WEIGHTS[name]}
  zeros = jax.tree.map(jnp.zeros_like, tree)
  found = flax.serialization.from_bytes(zeros, flax.serialization.to_bytes(tree))
  assert_same(found["experts"], tree["experts"])


@pytest.mark.parametrize("name", WEIGHTS)
def test_pickle_and_transformations_keep_the_layout(name):
  weights = WEIGHTS[name]
  assert_same(pickle.loads(pickle.dumps(weights)), weights)
  assert_same(jax.jit(lambda weights: weights)(weights), weights)
  assert jax.eval_shape(lambda: weights).layout is weights.layout
  others = weights.replace(wo=2 * weights.wo)
  assert others.layout is weights.layout and float(others.wo[0, 0, 0]) == 2 * weights.wo[0, 0, 0]
