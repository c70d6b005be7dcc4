"""Inner widths that are no multiple of 64, which columns of zeros make up to one."""

import functools

import fake_devices
import jax
import jax.numpy as jnp
import pytest
from layer_problems import (
  BIASES,
  dense,
  layer,
  make_mesh,
  make_problem,
  relative_error,
  value_and_grads,
)
from programs import LAYER, kernel_names

import ultraep_jax as uep
from ultraep_jax.compute import widths
from ultraep_jax.types import Layout

ONE_ROUND = uep.BalanceConfig(objective="balance")
ROUNDS = uep.BalanceConfig(objective="balance", replica_slots=1, capacity_factor=1.0)
FORMS = {
  "apart": {"layout": "apart", "biases": BIASES},
  "fused": {"layout": "fused", "biases": ("out",)},
  "interleaved": {"layout": "interleaved", "biases": BIASES},
  "ungated": {"layout": "ungated"},
}


@pytest.mark.parametrize("config", [ONE_ROUND, ROUNDS], ids=["one round", "rounds"])
@pytest.mark.parametrize("form", FORMS)
def test_columns_of_zeros_change_no_result(form, config, monkeypatch):
  problem = make_problem(make_mesh(2), tokens=64, experts=8, **FORMS[form])
  monkeypatch.setattr(widths, "missing_columns", lambda *_: 5)
  y, stats, grads = value_and_grads(layer(problem, config), problem)
  expected_y, expected = dense(problem)
  assert relative_error(y, expected_y) <= 1e-5
  assert relative_error(grads, expected) <= 1e-5
  expert = problem.weights.expert_size + 5 * problem.weights.num_matrices * problem.x.shape[1]
  biases = 5 * (problem.weights.num_matrices - 1) if form in ("apart", "interleaved") else 0
  assert stats.replicas.sum() > 0
  per_copy = int(stats.replica_bytes.sum()) / int(stats.replicas.sum())
  assert per_copy == 4 * (expert + biases)


def shapes(inner, width=128, experts=8, dtype=jnp.bfloat16, tokens=512):
  def array(*shape, dtype=dtype):
    return jax.ShapeDtypeStruct(shape, dtype)

  into = array(experts, width, inner)
  weights = uep.ExpertWeights(into, into, array(experts, inner, width))
  choices = array(tokens, 2, dtype=jnp.int32), array(tokens, 2, dtype=jnp.float32)
  return array(tokens, width), *choices, weights


def test_kernels_multiply_widths_that_are_no_multiple_of_64():
  mesh = make_mesh(2)

  def loss(x, index, gate, weights):
    y, _ = uep.sharded_moe(x, index, gate, weights, config=uep.BalanceConfig(objective="balance"))
    return y.astype(jnp.float32).sum()

  grads = jax.grad(loss, argnums=(0, 2, 3))
  with jax.set_mesh(mesh), fake_devices.gpus():
    jaxpr = jax.jit(grads).trace(*shapes(inner=144)).jaxpr
    assert kernel_names(jaxpr) == LAYER | {"plan_probes", "plan_quotas", "transfer_lists"}
    found = jax.eval_shape(grads, *shapes(inner=144))
  assert found[2].wi_up.shape == (8, 128, 144) and found[2].wo.shape == (8, 144, 128)


@pytest.mark.parametrize(
  ("inner", "expected", "changes"),
  [
    (144, 48, {}),
    (1440, 32, {}),
    (128, 0, {}),
    (144, 0, {"width": 136}),  # no kernel multiplies it
    (144, 0, {"rows": 500}),
    (144, 48, {"rows": 500, "config": uep.BalanceConfig(batch_invariant=True)}),
    (144, 0, {"dtype": jnp.float32}),
    (144, 0, {"config": uep.BalanceConfig(implementation="portable")}),
    (144, 0, {"activation": jnp.log}),
    (144, 0, {"activation": jnp.sqrt}),
    (144, 0, {"activation": jax.nn.softmax}),  # of other columns too
    (144, 0, {"activation": functools.partial(jnp.cumsum, axis=-1)}),
    (144, 48, {"activation": jax.nn.relu}),
    (144, 48, {"activation": uep.activations.clamped_swiglu()}),
    (144, 0, {"gpu": "10.0"}),
  ],
)
def test_which_layers_get_columns(inner, expected, changes):
  given = {"width": 128, "rows": 1024, "dtype": jnp.bfloat16, "activation": jax.nn.silu}
  given |= {"config": uep.BalanceConfig(), "gpu": "9.0"} | changes
  *_, weights = shapes(inner, width=given["width"])
  with fake_devices.gpus(given["gpu"]):
    found = widths.missing_columns(
      weights, jnp.dtype(given["dtype"]), given["config"], given["activation"], given["rows"]
    )
  assert found == expected


@pytest.mark.parametrize("layout", Layout)
def test_what_is_added_is_taken_away(layout):
  problem = make_problem(make_mesh(1), tokens=8, experts=2, layout=str(layout))
  wide = widths.widen(problem.weights, 3)
  assert wide.wo.shape[1] == problem.weights.wo.shape[1] + 3
  again = widths.narrow(wide, 3)
  assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), again, problem.weights))
