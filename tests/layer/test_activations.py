"""Activations that mix columns, which no mesh axis can divide. ``test_forms.py`` has the rest."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from layer_problems import QUICK, make_mesh, make_problem

import ultraep_jax as uep
from ultraep_jax import activations
from ultraep_jax.types import Layout

WIDTH = 6


def backwards(gate, up):
  return gate * up[:, ::-1]


@pytest.mark.parametrize("width", [WIDTH, 4096])
@pytest.mark.parametrize(
  ("layout", "activation", "mixes"),
  [
    ("ungated", jax.nn.softmax, True),
    ("apart", jax.nn.softmax, True),
    ("ungated", jax.nn.standardize, True),
    ("ungated", functools.partial(jnp.cumsum, axis=-1), True),
    ("interleaved", uep.GatedUnit(backwards), True),
    ("apart", jax.nn.silu, False),
    ("fused", activations.clamped_swiglu(), False),
    ("ungated", jax.nn.elu, False),
    ("apart", functools.partial(jax.nn.gelu, approximate=False), False),
    ("ungated", jnp.log, False),
    ("apart", lambda x: jnp.where(x > 0, x, jnp.full_like(x, 2) * x), False),
    ("ungated", lambda x: jnp.roll(x, 1, axis=-1), True),
    ("ungated", lambda x: x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True)), True),
  ],
)
def test_which_mix_columns(layout, activation, mixes, width):
  assert activations.mixes_columns(activation, Layout(layout), width) == mixes


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_an_inner_axis_wants_columns_apart(kind):
  mesh = jax.make_mesh((1, 2), ("expert", "tensor"), axis_types=(kind,) * 2)
  problem = make_problem(make_mesh(1), layout="ungated")
  args = jax.device_get((problem.x, problem.expert_index, problem.gate, problem.weights))

  def sharded(activation, *args):
    options = {"config": QUICK, "activation": activation, "inner_axis": "tensor"}
    return uep.sharded_moe(*args, **options)[0]

  def local(activation, *args):  # all of F is taken for a part
    options = {"config": QUICK, "activation": activation, "inner_axis": "tensor"}
    layer = jax.shard_map(lambda *args: uep.moe(*args, **options)[0], in_specs=P(), out_specs=P())
    return layer(*args)

  message = "activation: expected an elementwise function .inner_axis divides its columns."
  with jax.set_mesh(mesh):
    for call in (sharded, local):
      for wrapped in (call, jax.jit(call, static_argnums=0)):
        with pytest.raises(ValueError, match=message):
          wrapped(jax.nn.softmax, *args)
    y = jax.eval_shape(functools.partial(sharded, jax.nn.elu), *args)
  assert y.shape == problem.x.shape
