"""The Linen module against the NNX one, its collections and its shardings."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx as flax_nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from ultraep_jax import linen, nnx
from ultraep_jax.config import BalanceConfig
from ultraep_jax.gating import GatingConfig, update_selection_bias

D, F, E, K = 8, 12, 8, 2
OPTIONS = {
  "embed_dim": D,
  "expert_dim": F,
  "gating": GatingConfig(
    num_experts=E, num_experts_per_tok=K, scoring="sigmoid", use_selection_bias=True
  ),
  "config": BalanceConfig(replica_slots=1),
  "num_shared_experts": 2,
}


def on(*kinds):
  """Runs the test on a mesh of each of these kinds of axes."""
  return pytest.mark.parametrize("mesh", kinds, ids=[k.name for k in kinds], indirect=True)


@pytest.fixture
def mesh(request):
  mesh = jax.make_mesh((2, 4), ("data", "expert"), axis_types=(request.param,) * 2)
  with jax.set_mesh(mesh):
    yield mesh


def make_x(seed=1):
  return jax.random.normal(jax.random.key(seed), (8, 3, D))


def init(layer=None, **kwargs):
  layer = layer or linen.MoE(**OPTIONS)
  return layer, jax.jit(layer.init)(jax.random.key(0), make_x(), **kwargs)


def sum_of_squares(y):
  return jnp.sum(jnp.square(y.astype(jnp.float32)))


@on(AxisType.Auto, AxisType.Explicit)
def test_outputs_and_gradients_equal_nnx(mesh):
  model = nnx.MoE(**OPTIONS, rngs=flax_nnx.Rngs(3))
  model.selection_bias[...] = jnp.linspace(-0.3, 0.3, E)
  graphdef, state = flax_nnx.split(model)
  mask = jnp.asarray(np.arange(24).reshape(8, 3) % 5 != 0)
  layer, variables = init()
  pure = flax_nnx.to_pure_dict(state)
  router_state = {"selection_bias": pure.pop("selection_bias")}
  shapes = jax.tree.map(lambda a: (a.shape, a.dtype), nn.meta.unbox(variables))
  expected_shapes = jax.tree.map(
    lambda a: (a.shape, a.dtype), {"params": pure, "router_state": router_state}
  )
  assert shapes == expected_shapes

  def linen_loss(params, x):
    y, aux = layer.apply({"params": params, "router_state": router_state}, x, mask)
    return sum_of_squares(y) + aux.load_balance_loss + aux.router_z_loss, (y, aux)

  def nnx_loss(params, x):
    model = flax_nnx.merge(graphdef, flax_nnx.State({**params, **router_state}))
    y, aux = model(x, mask)
    return sum_of_squares(y) + aux.load_balance_loss + aux.router_z_loss, (y, aux)

  results = [
    jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(pure, make_x())
    for loss in (linen_loss, nnx_loss)
  ]
  chex.assert_trees_all_close(*results, rtol=1e-5, atol=1e-6)


@on(AxisType.Auto, AxisType.Explicit)
@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
def test_parameters_are_boxed_and_created_sharded(mesh, jitted):
  layer = linen.MoE(**OPTIONS)
  make = jax.jit(layer.init) if jitted else layer.init
  variables = make(jax.random.key(0), make_x())
  assert set(variables) == {"params", "router_state"}
  specs = nn.get_partition_spec(variables)["params"]
  assert {k for k, v in specs.items() if v == P("expert", None, None)} == {"wi_gate", "wi_up", "wo"}
  for name, box in variables["params"].items():
    assert isinstance(box, nn.Partitioned)
    sharding = jax.NamedSharding(mesh, specs[name])
    assert box.value.sharding.is_equivalent_to(sharding, box.value.ndim), name


@on(AxisType.Explicit)
def test_boxed_and_unboxed_variables_give_the_same_output(mesh):
  layer, variables = init()
  apply = jax.jit(layer.apply)
  y, _ = apply(variables, make_x())
  chex.assert_trees_all_close(apply(nn.meta.unbox(variables), make_x())[0], y, atol=1e-6)


@on(AxisType.Explicit)
def test_init_runs_with_out_shardings_of_the_metadata(mesh):
  layer, x = linen.MoE(**OPTIONS), make_x()
  specs = nn.get_partition_spec(jax.eval_shape(layer.init, jax.random.key(0), x))
  shardings = jax.tree.map(lambda spec: jax.NamedSharding(mesh, spec), specs)
  variables = jax.jit(layer.init, out_shardings=shardings)(jax.random.key(0), x)
  expected = nn.meta.unbox(init(layer)[1])
  chex.assert_trees_all_close(nn.meta.unbox(variables), expected, rtol=1e-6)


@on(AxisType.Auto)
def test_the_bias_steps_when_asked_and_mutable(mesh):
  layer, variables = init(update_bias=0.5)
  np.testing.assert_array_equal(variables["router_state"]["selection_bias"], np.zeros(E))
  apply = jax.jit(layer.apply, static_argnames=("mutable", "update_bias"))
  (_, aux), state = apply(variables, make_x(), update_bias=0.5, mutable=("router_state",))
  load = jnp.asarray(np.asarray(aux.expert_load_E))
  expected = update_selection_bias(jnp.zeros(E), load, 0.5)
  assert np.any(np.asarray(expected) != 0)
  np.testing.assert_array_equal(state["router_state"]["selection_bias"], expected)

  _, state = apply({**variables, **state}, make_x(), mutable=("router_state",))
  np.testing.assert_array_equal(state["router_state"]["selection_bias"], expected)


@on(AxisType.Auto)
def test_bfloat16_compute_keeps_float32_gradients(mesh):
  layer, variables = init(linen.MoE(**OPTIONS, dtype=jnp.bfloat16))

  def loss(params):
    y, _ = layer.apply({**variables, "params": params}, make_x())
    assert y.dtype == jnp.bfloat16
    return sum_of_squares(y)

  grads = jax.jit(jax.grad(loss))(variables["params"])
  assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype("float32")}
  assert all(np.any(np.asarray(g) != 0) for g in jax.tree.leaves(grads))


def test_rejected_uses():
  key, x = jax.random.key(0), make_x()
  layer = linen.MoE(**OPTIONS)
  with pytest.raises(ValueError, match=r"mesh: expected .* 'expert' .*jax.set_mesh\(jax.make_mesh"):
    layer.init(key, x)
  plain = GatingConfig(num_experts=E, num_experts_per_tok=K)
  unbiased = linen.MoE(**{**OPTIONS, "gating": plain})
  with jax.set_mesh(jax.make_mesh((4,), ("expert",))):
    with pytest.raises(TypeError, match="x: expected an array, got list"):
      layer.init(key, [[0.0] * D] * 8)
    variables = jax.eval_shape(layer.init, key, x)
    with pytest.raises(ValueError, match="update_bias: expected mutable="):
      jax.eval_shape(lambda v: layer.apply(v, x, update_bias=0.1), variables)
    variables = jax.eval_shape(unbiased.init, key, x)
    assert set(variables) == {"params"}
    with pytest.raises(ValueError, match="update_bias: expected gating"):
      jax.eval_shape(lambda v: unbiased.apply(v, x, update_bias=0.1), variables)
