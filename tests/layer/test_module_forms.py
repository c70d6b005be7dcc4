"""The modules' forms of experts, against what its parameters say."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.core import meta
from jax.sharding import AxisType

import ultraep_jax as uep
from ultraep_jax.gating import GatingConfig, gate
from ultraep_jax.linen import MoE as LinenMoE
from ultraep_jax.nnx import MoE

D, F, L, E, K = 8, 12, 4, 8, 2
GATING = GatingConfig(num_experts=E, num_experts_per_tok=K)
CONFIG = uep.BalanceConfig(replica_slots=2, objective="balance")
SIZES = {"embed_dim": D, "expert_dim": F, "gating": GATING, "config": CONFIG}
FORMS = {
  "biases, interleaved": {
    "layout": "interleaved",
    "use_bias": True,
    "activation": uep.activations.clamped_swiglu(),
  },
  "not gated, latent": {
    "layout": "ungated",
    "latent_dim": L,
    "activation": uep.activations.squared_relu,
  },
  "fused, a gate on shared ones": {
    "layout": "fused",
    "num_shared_experts": 1,
    "use_shared_gate": True,
  },
}


def weights_of(params, layout, prefix=""):
  own = {n: params[prefix + n] for n in ("wi", "wi_bias", "wo", "wo_bias") if prefix + n in params}
  if layout == "ungated":
    return uep.ExpertWeights.ungated(**own)
  return uep.ExpertWeights.fused(**own, interleaved=layout == "interleaved")


@functools.partial(jax.jit, static_argnames=("layout", "activation"))
def dense(params, x, layout, activation=jax.nn.silu):
  """The dense layer with its parameters spread by hand."""
  index, weight, _ = gate(jnp.matmul(x, params["router"], precision="highest"), GATING)
  narrow = x @ params["latent_down"] if "latent_down" in params else x
  y = uep.testing.dense_moe(narrow, index, weight, weights_of(params, layout), activation)
  y = y @ params["latent_up"] if "latent_up" in params else y
  if "shared_wo" in params:
    one = jax.tree.map(lambda leaf: leaf[None], weights_of(params, layout, "shared_"))
    always = jnp.zeros((len(x), 1), jnp.int32), jnp.ones((len(x), 1))
    shared = uep.testing.dense_moe(x, *always, one, activation)
    y += jax.nn.sigmoid(x @ params["shared_gate"]) * shared
  return y


@pytest.mark.parametrize("flax", ["nnx", "linen"])
@pytest.mark.parametrize("form", FORMS)
def test_equals_the_dense_form(form, flax):
  options = FORMS[form]
  x = jax.random.normal(jax.random.key(1), (32, D))
  with jax.set_mesh(jax.make_mesh((4,), ("expert",), devices=jax.devices()[:4])):
    if flax == "nnx":
      model = MoE(rngs=nnx.Rngs(0), **SIZES, **options)
      params = {
        path[-1]: leaf[...] for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))
      }
      params = jax.tree.map(lambda leaf: leaf + 0.1, params)  # biases begin at zero
      for name, value in params.items():
        getattr(model, name)[...] = value
      y = nnx.jit(lambda model, x: model(x)[0])(model, x)
    else:
      model = LinenMoE(**SIZES, **options)
      params = meta.unbox(jax.jit(model.init)(jax.random.key(0), x)["params"])
      params = jax.tree.map(lambda leaf: leaf + 0.1, params)
      y = jax.jit(lambda params, x: model.apply({"params": params}, x)[0])(params, x)
  given = {name: options[name] for name in ("layout", "activation") if name in options}
  want = dense(jax.device_get(params), x, **given)
  assert np.abs(want).max() > 0.01
  np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"gating": None}, "gating: expected a GatingConfig, got NoneType"),
    ({"config": None}, "config: expected a BalanceConfig, got NoneType"),
    ({"activation": "silu"}, "activation: expected a function, got str"),
    ({"dtype": jnp.int32}, "dtype: expected bfloat16, float16 or float32, or None, got int32"),
    ({"dtype": "float33"}, "dtype: expected .* or None, got 'float33'"),
    ({"param_dtype": jnp.int8}, "param_dtype: expected bfloat16, float16 or float32, got int8"),
    ({"param_dtype": "float8_e4m3fn"}, "param_dtype: expected .*, got float8_e4m3fn"),
    ({"param_dtype": None}, "param_dtype: expected .*, got None"),
  ],
)
def test_a_wrong_argument_is_refused_at_construction(options, message):
  with pytest.raises(TypeError, match=message):
    LinenMoE(**SIZES | options)
  with pytest.raises(TypeError, match=message):
    MoE(**SIZES | options, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("name", ["use_bias", "use_shared_gate", "use_router_bias"])
def test_switches_are_bools(name):
  message = f"{name}: expected a bool, got str"
  with jax.set_mesh(jax.make_mesh((1,), ("expert",), devices=jax.devices()[:1])):
    with pytest.raises(TypeError, match=message):
      MoE(**SIZES | {name: "no"}, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=message):
      LinenMoE(**SIZES | {name: "no"}).init(jax.random.key(0), jnp.ones((4, D)))


def tensor_mesh(kind):
  names = ("data", "expert", "tensor")
  return jax.make_mesh((1, 2, 2), names, devices=jax.devices()[:4], axis_types=(kind,) * 3)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("flax", ["nnx", "linen"])
def test_inner_width_over_a_mesh_axis(flax, kind):
  """Parameters are created in parts of E and F; output and gradients are those of whole ones."""
  options = FORMS["biases, interleaved"] | {"num_shared_experts": 1}
  x = jax.random.normal(jax.random.key(1), (32, D))

  def run(inner_axis, mesh):
    with jax.set_mesh(mesh):
      if flax == "nnx":
        model = MoE(rngs=nnx.Rngs(0), inner_axis=inner_axis, **SIZES, **options)
        graph, params = nnx.split(model)

        def apply(params):
          return nnx.merge(graph, params)(x)[0]

        named = {path[-1]: leaf[...] for path, leaf in nnx.to_flat_state(params)}
      else:
        module = LinenMoE(inner_axis=inner_axis, **SIZES, **options)
        params = meta.unbox(jax.jit(module.init)(jax.random.key(0), x)["params"])

        def apply(params):
          return module.apply({"params": params}, x)[0]

        named = params
      specs = {name: leaf.sharding.spec for name, leaf in named.items()}
      params = jax.tree.map(lambda leaf: leaf + 0.1, params)  # biases begin at zero

      @jax.jit
      def both(params):
        return apply(params), jax.grad(lambda params: jnp.sum(apply(params) ** 2))(params)

      return specs, jax.device_get(both(params))

  specs, parts = run("tensor", tensor_mesh(kind))
  _, whole = run(None, jax.make_mesh((2,), ("expert",), devices=jax.devices()[:2]))
  P = jax.sharding.PartitionSpec
  assert specs["wi"] == P("expert", None, "tensor") and specs["wo"][:2] == ("expert", "tensor")
  assert specs["wi_bias"] == P("expert", "tensor")
  for part, all_of_it in zip(jax.tree.leaves(parts), jax.tree.leaves(whole), strict=True):
    np.testing.assert_allclose(part, all_of_it, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
  ("axis", "options", "message"),
  [
    ("model", {}, r"inner_axis: expected a mesh axis of \('tensor',\)"),
    ("expert", {}, r"inner_axis: expected a mesh axis of \('tensor',\)"),
    ("tensor", {"expert_dim": 5}, "expected F divisible by 2 .mesh axis 'tensor'., got 5"),
    ("tensor", {"layout": "fused"}, "expected one whose columns can be divided"),
  ],
)
def test_an_inner_axis_that_divides_no_experts_is_refused(axis, options, message):
  with jax.set_mesh(tensor_mesh(AxisType.Auto)):
    with pytest.raises(ValueError, match=message):
      MoE(**SIZES | options, inner_axis=axis, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=message):
      LinenMoE(**SIZES | options, inner_axis=axis).init(jax.random.key(0), jnp.ones((4, D)))


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
@pytest.mark.parametrize("flax", ["nnx", "linen"])
def test_any_kind_of_keys_makes_the_same_parameters_on_any_kind_of_mesh(flax, impl):
  def made(kind):
    with jax.set_mesh(jax.make_mesh((2,), ("expert",), (kind,), devices=jax.devices()[:2])):
      key = jax.random.key(0, impl=impl)
      if flax == "nnx":
        return jax.device_get(nnx.state(MoE(rngs=nnx.Rngs(params=key), **SIZES), nnx.Param))
      return jax.device_get(meta.unbox(LinenMoE(**SIZES).init(key, jnp.ones((4, D)))))

  explicit, auto = (made(kind) for kind in (AxisType.Explicit, AxisType.Auto))
  jax.tree.map(np.testing.assert_array_equal, explicit, auto)


@pytest.mark.parametrize("rngs", [None, 0, "key"])
def test_nnx_wants_its_rngs(rngs):
  with pytest.raises(TypeError, match="rngs: expected a Rngs, got"):
    MoE(**SIZES, rngs=jax.random.key(0) if rngs == "key" else rngs)
