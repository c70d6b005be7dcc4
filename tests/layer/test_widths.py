"""Widths that are no multiple of 64, which columns of zeros make up to one."""

import functools

import fake_devices
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layer_problems import (
  BIASES,
  dense,
  make_mesh,
  make_problem,
  new_layer,
  relative_error,
  value_and_grads,
)
from programs import EXCHANGE, LAYER, PLANNING, kernel_names

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


@pytest.mark.parametrize(
  ("form", "config", "columns"),
  [
    *((form, ONE_ROUND, (5, 3)) for form in FORMS),
    *((form, ROUNDS, (5, 3)) for form in FORMS),
    ("apart", ONE_ROUND, (0, 3)),
    ("fused", ONE_ROUND, (5, 0)),
    ("apart", uep.BalanceConfig(objective="balance", batch_invariant=True), (5, 3)),
  ],
)
def test_columns_of_zeros_change_no_result(form, config, columns, monkeypatch):
  problem = make_problem(make_mesh(2), tokens=64, experts=8, **FORMS[form])
  monkeypatch.setattr(widths, "missing_columns", lambda *_: widths.Columns(*columns))
  apply = new_layer.__wrapped__(problem.mesh, config, True)  # no program that was traced before
  y, stats, grads = value_and_grads(apply, problem)
  expected_y, expected = dense(problem)
  assert relative_error(y, expected_y) <= 1e-5
  assert relative_error(grads, expected) <= 1e-5
  matrices, (_, inner, width) = problem.weights.num_matrices, problem.weights.wo.shape
  inner, width = inner + columns[0], width + columns[1]
  biases = {"into": (matrices - 1) * inner, "out": width}
  expert = matrices * inner * width + sum(map(biases.get, FORMS[form].get("biases", ())))
  assert stats.replicas.sum() > 0
  assert int(stats.replica_bytes.sum()) == 4 * expert * int(stats.replicas.sum())


def shapes(inner, width=128, experts=8, dtype=jnp.bfloat16, tokens=512):
  def array(*shape, dtype=dtype):
    return jax.ShapeDtypeStruct(shape, dtype)

  into = array(experts, width, inner)
  weights = uep.ExpertWeights(into, into, array(experts, inner, width))
  choices = array(tokens, 2, dtype=jnp.int32), array(tokens, 2, dtype=jnp.float32)
  return array(tokens, width), *choices, weights


@pytest.mark.parametrize(("width", "inner"), [(128, 144), (136, 128), (136, 144)])
def test_kernels_multiply_widths_that_are_no_multiple_of_64(width, inner):
  mesh = make_mesh(2)

  def loss(x, index, gate, weights):
    y, _ = uep.sharded_moe(x, index, gate, weights, config=uep.BalanceConfig(objective="balance"))
    return y.astype(jnp.float32).sum()

  grads = jax.grad(loss, argnums=(0, 2, 3))
  with jax.set_mesh(mesh), fake_devices.gpus():
    jaxpr = jax.jit(grads).trace(*shapes(inner, width)).jaxpr
    assert kernel_names(jaxpr) == LAYER | EXCHANGE | PLANNING
    found = jax.eval_shape(grads, *shapes(inner, width))
  assert found[0].shape == (512, width)
  assert found[2].wi_up.shape == (8, width, inner) and found[2].wo.shape == (8, inner, width)


@pytest.mark.parametrize(
  ("inner", "expected", "changes"),
  [
    (144, (48, 0), {}),
    (1440, (32, 0), {}),
    (128, (0, 0), {}),
    (144, (48, 56), {"width": 136}),
    (128, (0, 56), {"width": 136}),
    (48, (16, 16), {"width": 48}),
    (48, (0, 0), {"width": 40}),  # to multiply more than twice as much
    (144, (0, 0), {"rows": 500}),
    (144, (48, 0), {"rows": 500, "config": uep.BalanceConfig(batch_invariant=True)}),
    (144, (0, 0), {"dtype": jnp.float32}),
    (144, (0, 0), {"config": uep.BalanceConfig(implementation="portable")}),
    (144, (0, 0), {"activation": jnp.log}),
    (144, (0, 0), {"activation": jnp.sqrt}),
    (144, (0, 0), {"activation": jax.nn.softmax}),  # of other columns too
    (144, (0, 0), {"activation": functools.partial(jnp.cumsum, axis=-1)}),
    (144, (0, 0), {"activation": lambda x: x * np.ones((1, 144), x.dtype)}),  # a constant a column
    (144, (0, 0), {"activation": jnp.log, "width": 136}),
    (128, (0, 56), {"activation": jnp.log, "width": 136}),
    (144, (48, 0), {"activation": jax.nn.relu}),
    (144, (48, 0), {"activation": uep.activations.clamped_swiglu()}),
    (144, (0, 0), {"gpu": "10.0"}),
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
  wide = widths.widen(problem.weights, columns := widths.Columns(3, 2))
  _, inner, width = problem.weights.wo.shape
  assert wide.wo.shape[1:] == (inner + 3, width + 2)
  again = widths.narrow(wide, columns)
  assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), again, problem.weights))
