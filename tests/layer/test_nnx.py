"""The NNX module against a dense computation, and its behaviour as a Flax citizen."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from ultraep_jax.config import BalanceConfig
from ultraep_jax.gating import (
  GatingConfig,
  gate,
  load_balance_loss,
  router_z_loss,
  update_selection_bias,
)
from ultraep_jax.nnx import MoE, SelectionBias

D, F, E, K, N_SHARED = 8, 12, 8, 2, 2
GATING = GatingConfig(
  num_experts=E, num_experts_per_tok=K, scoring="sigmoid", use_selection_bias=True
)
CONFIG = BalanceConfig(replica_slots=1, min_tokens_per_replica=1)
EXPERT = P("expert", None, None)
SHAPES = {
  "router": (D, E),
  "wi_gate": (E, D, F),
  "wi_up": (E, D, F),
  "wo": (E, F, D),
  "shared_wi_gate": (D, N_SHARED * F),
  "shared_wi_up": (D, N_SHARED * F),
  "shared_wo": (N_SHARED * F, D),
}


def make_mesh(axis_type, shape=(2, 4), names=("data", "expert")):
  return jax.make_mesh(shape, names, axis_types=(axis_type,) * len(names))


both_kinds = pytest.mark.parametrize(
  "mesh", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"], indirect=True
)


@pytest.fixture
def mesh(request):
  mesh = make_mesh(getattr(request, "param", AxisType.Auto))
  with jax.set_mesh(mesh):
    yield mesh


def make_model(rngs=None, **kwargs):
  options = {"gating": GATING, "config": CONFIG, "num_shared_experts": N_SHARED}
  return MoE(embed_dim=D, expert_dim=F, rngs=rngs or nnx.Rngs(0), **{**options, **kwargs})


def make_x(seed=1, shape=(8, 3, D), dtype=jnp.float32):
  return jax.random.normal(jax.random.key(seed), shape, dtype)


def dense_moe(params, x, bias, mask):
  """Every expert on every token, weighted by the gate: output and the two losses."""
  x = jnp.where(mask[..., None], x, 0.0)
  logits = jnp.matmul(x, params["router"], precision="highest")
  index, gates, scores = gate(logits, GATING, bias, mask)
  weight = jnp.sum(jax.nn.one_hot(index, E) * gates[..., None], axis=-2)
  hidden = jax.nn.silu(jnp.einsum("...d,edf->...ef", x, params["wi_gate"]))
  hidden *= jnp.einsum("...d,edf->...ef", x, params["wi_up"])
  y = jnp.einsum("...ef,efd,...e->...d", hidden, params["wo"], weight)
  shared = jax.nn.silu(x @ params["shared_wi_gate"]) * (x @ params["shared_wi_up"])
  return (
    y + shared @ params["shared_wo"],
    load_balance_loss(scores, index),
    router_z_loss(logits, mask),
  )


def host(tree):
  return jax.tree.map(np.asarray, tree)


def params_of(model):
  return host(nnx.to_pure_dict(nnx.state(model, nnx.Param)))


def on_host(fn, *args):
  """Runs ``fn`` on replicated copies, so that no sharding is involved."""
  return host(jax.jit(fn)(*host(args)))


def sum_of_squares(y):
  return jnp.sum(jnp.square(y.astype(jnp.float32)))


def scalar_loss(y, load_balance, router_z):
  return sum_of_squares(y) + 3.0 * load_balance + 0.5 * router_z


@nnx.jit
def loss_and_grads(model, x, mask):
  """Output, aux and the gradients of parameters and x; compiled once for several tests."""

  def loss(model, x):
    y, aux = model(x, mask)
    return scalar_loss(y, aux.load_balance_loss, aux.router_z_loss), (y, aux)

  wrt = (nnx.DiffState(0, nnx.Param), 1)
  grads, (y, aux) = nnx.grad(loss, argnums=wrt, has_aux=True)(model, x)
  return y, aux, grads


@nnx.jit
def forward(model, x):
  return model(x)


@nnx.jit
def replayed(model, x, mask, expert_index):
  def loss(model, x):
    y, aux = model(x, mask, expert_index=expert_index)
    return scalar_loss(y, aux.load_balance_loss, aux.router_z_loss), (y, aux)

  wrt = (nnx.DiffState(0, nnx.Param), 1)
  grads, (y, aux) = nnx.grad(loss, argnums=wrt, has_aux=True)(model, x)
  return y, aux, grads


@pytest.mark.parametrize("mesh", [AxisType.Explicit], indirect=True)
def test_choices_are_made_again_bit_for_bit(mesh):
  """Of the same weights everything; of others the choices, with gates of their own."""
  model, mask = make_model(use_router_bias=True), jnp.arange(24).reshape(8, 3) % 5 != 1
  model.router_bias[...] = jnp.linspace(-1.0, 1.0, E)
  first = loss_and_grads(model, make_x(), mask)
  chosen = first[1].expert_index
  assert chosen.shape == (8, 3, K) and chosen.dtype == jnp.int32
  assert ((chosen == -1).all(axis=-1) == ~mask).all()
  again = replayed(model, make_x(), mask, chosen)
  chex.assert_trees_all_equal(host(again), host(first))
  assert np.abs(host(nnx.to_pure_dict(first[2][0])["router_bias"])).min() > 0

  model.router[...] = -model.router[...]
  own, moved = forward(model, make_x())[1], replayed(model, make_x(), mask, chosen)
  assert (np.asarray(own.expert_index)[mask] != np.asarray(chosen)[mask]).any()
  np.testing.assert_array_equal(moved[1].expert_index, chosen)
  np.testing.assert_array_equal(moved[1].expert_load_E, first[1].expert_load_E)
  assert (np.asarray(moved[0]) != np.asarray(first[0])).any()
  with pytest.raises(
    ValueError, match=r"expert_index: expected shape \[8, 3, 2\], got \[8, 3, 1\]"
  ):
    model(make_x(), expert_index=chosen[..., :1])
  with pytest.raises(TypeError, match="expert_index: expected a dtype of kind int32, got uint32"):
    model(make_x(), expert_index=chosen.astype(jnp.uint32))


@both_kinds
@pytest.mark.parametrize("masked", [False, True])
def test_output_losses_and_gradients_equal_a_dense_layer(mesh, masked):
  model, bias = make_model(), np.linspace(-0.3, 0.3, E, dtype=np.float32)
  model.selection_bias[...] = jnp.asarray(bias)
  mask = np.arange(24).reshape(8, 3) % 4 != 1 if masked else np.ones((8, 3), bool)
  x = np.where(mask[..., None], make_x(), np.nan)
  y, aux, (grads, grad_x) = loss_and_grads(model, jnp.asarray(x), jnp.asarray(mask))

  params = params_of(model)
  expected_y, load_balance, router_z = on_host(dense_moe, params, x, bias, mask)
  np.testing.assert_allclose(y, expected_y, atol=1e-5)
  np.testing.assert_allclose(aux.load_balance_loss, load_balance, rtol=1e-5)
  np.testing.assert_allclose(aux.router_z_loss, router_z, rtol=1e-5)
  expected, expected_x = on_host(
    jax.grad(lambda *args: scalar_loss(*dense_moe(*args)), argnums=(0, 1)), params, x, bias, mask
  )
  grads = host(nnx.to_pure_dict(grads))
  chex.assert_trees_all_close(grads, expected, rtol=2e-4, atol=2e-5)
  np.testing.assert_allclose(grad_x, expected_x, rtol=2e-4, atol=2e-5)
  assert np.all(np.asarray(y)[~mask] == 0)
  assert np.all(np.asarray(grad_x)[~mask] == 0)
  assert int(aux.expert_load_E.sum()) == K * mask.sum()
  np.testing.assert_array_equal(aux.expert_load_E, np.sum(aux.stats.expert_load_E, axis=0))
  assert int(aux.stats.masked.sum()) == K * (~mask).sum()


@both_kinds
@pytest.mark.parametrize("jitted", [False, True])
def test_parameters_are_created_sharded_with_metadata(mesh, jitted):
  model = nnx.jit(make_model)() if jitted else make_model()
  state = dict(nnx.state(model, nnx.Param))
  assert {name: leaf[...].shape for name, leaf in state.items()} == SHAPES
  for name, leaf in state.items():
    spec = EXPERT if len(SHAPES[name]) == 3 else P(None, None)
    assert P(*leaf.get_metadata("out_sharding")) == spec
    expected = jax.NamedSharding(mesh, spec)
    assert leaf[...].sharding.is_equivalent_to(expected, leaf[...].ndim)
    assert leaf[...].dtype == jnp.float32
  specs = nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(model)))
  assert specs["wo"] == EXPERT


@both_kinds
def test_no_device_makes_what_others_hold(mesh):
  def make():
    return nnx.state(MoE(embed_dim=256, expert_dim=384, gating=GATING, rngs=nnx.Rngs(0)))

  memory = jax.jit(make).lower().compile().memory_analysis()
  one_matrix = 4 * E * 256 * 384
  assert memory.output_size_in_bytes < one_matrix
  assert memory.temp_size_in_bytes < 2 * one_matrix


def test_kernel_init_sees_one_expert_at_a_time(mesh):
  wi_gate = np.asarray(make_model(param_dtype=jnp.bfloat16).wi_gate[...])
  assert wi_gate.dtype == jnp.bfloat16
  # lecun_normal of [D, F]: variance 1 / D. Over [E, D, F] it would be 1 / (E * D).
  assert 0.8 < wi_gate.astype(np.float32).std() * D**0.5 < 1.2
  assert len(np.unique(wi_gate[:, 0, 0])) == E


@both_kinds
def test_a_train_step_updates_parameters_and_bias_but_not_the_bias_by_gradient(mesh):
  model = make_model()
  optimizer = nnx.Optimizer(model, optax.sgd(1e-2, momentum=0.9), wrt=nnx.Param)
  x = make_x(shape=(16, 3, D))

  @nnx.jit
  def train_step(model, optimizer, x, rate):
    def loss_fn(model):
      y, aux = model(x)
      return jnp.mean(jnp.square(y - x)) + 0.01 * aux.load_balance_loss, aux

    (loss, aux), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
    optimizer.update(model, grads)
    model.update_bias(aux, rate)
    return loss, aux

  before = params_of(model)
  first, aux = train_step(model, optimizer, x, 0.0)
  np.testing.assert_array_equal(model.selection_bias[...], 0.0)
  _, aux = train_step(model, optimizer, x, 0.125)
  expected = update_selection_bias(jnp.zeros(E), jnp.asarray(np.asarray(aux.expert_load_E)), 0.125)
  np.testing.assert_array_equal(model.selection_bias[...], expected)
  assert np.any(np.asarray(expected) != 0)
  for _ in range(5):
    last, _ = train_step(model, optimizer, x, 0.0)
  assert last < first
  for name, value in params_of(model).items():
    assert np.any(value != before[name]), name
  moments = [leaf for leaf in jax.tree.leaves(optimizer.opt_state) if leaf.ndim == 3]
  assert len(moments) == 3
  assert all(leaf.sharding.spec[0] == "expert" for leaf in moments)


def test_state_holds_the_parameters_and_no_replica(mesh):
  model, x = make_model(), make_x()
  graphdef, params, rest = nnx.split(model, nnx.Param, ...)
  assert {k: v.shape for k, v in nnx.to_pure_dict(params).items()} == SHAPES
  assert {k: v.shape for k, v in nnx.to_pure_dict(rest).items()} == {"selection_bias": (E,)}
  assert isinstance(rest["selection_bias"], SelectionBias)

  @jax.jit
  def apply(params, rest, x):
    model = nnx.merge(graphdef, params, rest)
    y, _ = model(x)
    return y, nnx.split(model, nnx.Param, ...)[1:]

  y, state = apply(params, rest, x)
  chex.assert_trees_all_equal(host(state), host((params, rest)))
  chex.assert_trees_all_close(y, forward(model, x)[0], atol=1e-6)


def test_bfloat16_compute_keeps_float32_gradients(mesh):
  model, x = make_model(dtype=jnp.bfloat16), make_x()

  def loss(model):
    y, _ = model(x)
    assert y.dtype == jnp.bfloat16
    return sum_of_squares(y)

  grads = nnx.to_pure_dict(nnx.jit(nnx.grad(loss))(model))
  assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype("float32")}

  def exact(params):
    rounded = x.astype(jnp.bfloat16).astype(jnp.float32)
    return sum_of_squares(dense_moe(params, rounded, jnp.zeros(E), jnp.ones((8, 3), bool))[0])

  expected = on_host(jax.grad(exact), params_of(model))
  for name, grad in host(grads).items():
    error = np.linalg.norm(grad - expected[name]) / np.linalg.norm(expected[name])
    assert error < 0.03, name


def test_a_model_without_shared_experts_or_bias(mesh):
  gating = GatingConfig(num_experts=E, num_experts_per_tok=K)
  model = make_model(gating=gating, num_shared_experts=0)
  assert set(nnx.to_pure_dict(nnx.state(model))) == {"router", "wi_gate", "wi_up", "wo"}
  _, aux = forward(model, make_x())
  with pytest.raises(ValueError, match=r"update_bias: expected gating\.use_selection_bias=True"):
    model.update_bias(aux, 0.1)


@pytest.mark.parametrize(
  ("axis_type", "size"), [(AxisType.Auto, 1), (AxisType.Explicit, 4)], ids=["one", "four"]
)
def test_a_mesh_of_experts_alone(axis_type, size):
  with jax.set_mesh(make_mesh(axis_type, (size,), ("expert",))):
    model, x, mask = make_model(), make_x(), np.ones((8, 3), bool)
    y, _ = forward(model, x)
    expected, *_ = on_host(dense_moe, params_of(model), x, np.zeros(E, np.float32), mask)
    chex.assert_trees_all_close(y, expected, atol=1e-5)


@both_kinds
def test_an_eager_call_compiles_few_programs_and_a_second_none(mesh):
  """Router, layer, shared experts, their sum, statistics."""
  model, x, compiled = make_model(), make_x(), []

  def listen(event, duration_secs, **_):
    if "backend_compile" in event:
      compiled.append(event)

  jax.block_until_ready((nnx.state(model), x))
  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    jax.block_until_ready(model(x))
    assert len(compiled) <= 5
    compiled.clear()
    jax.block_until_ready(model(x))
    assert not compiled
    jax.jit(lambda x: x + 1)(x)
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)
  assert compiled


@both_kinds
@pytest.mark.parametrize("spec", [P(), P("data"), P(("data", "expert"))])
def test_inputs_may_arrive_in_any_sharding(mesh, spec):
  model, x = make_model(), jax.device_put(make_x(), spec)
  y, _ = nnx.eval_shape(lambda model, x: model(x), model, x)
  assert y.shape == x.shape
  if AxisType.Explicit in mesh.axis_types:
    assert y.sharding.spec == jax.typeof(x).sharding.spec


@pytest.mark.filterwarnings("ignore:.*context manager has been deprecated:DeprecationWarning")
def test_a_mesh_is_required_with_the_axis():
  with pytest.raises(ValueError, match=r"mesh: expected .* 'expert' .*jax.set_mesh\(jax.make_mesh"):
    make_model()
  with make_mesh(AxisType.Auto), pytest.raises(ValueError, match="got that of `with mesh:`"):
    make_model()
  no_axis = jax.set_mesh(make_mesh(AxisType.Auto, (8,), ("model",)))
  with no_axis, pytest.raises(ValueError, match=r"axis of the mesh, \('model',\), got 'expert'"):
    make_model()
  with jax.set_mesh(make_mesh(AxisType.Auto)):
    model = make_model()
  with pytest.raises(ValueError, match=r"mesh: expected a mesh with axis 'expert'"):
    model(make_x())


@pytest.mark.parametrize(
  ("kwargs", "error", "message"),
  [
    ({"embed_dim": 0}, ValueError, "embed_dim: expected at least 1, got 0"),
    ({"expert_dim": 2.0}, TypeError, "expert_dim: expected an int, got float"),
    ({"num_shared_experts": -1}, ValueError, "num_shared_experts: expected at least 0, got -1"),
    (
      {"gating": GatingConfig(num_experts=6, num_experts_per_tok=2)},
      ValueError,
      "num_experts: expected a multiple of the 4 ranks of mesh axis 'expert', got 6",
    ),
    ({"axis_name": None}, TypeError, "axis_name: expected a str or a tuple of them, got None"),
  ],
)
def test_construction_rejects(kwargs, error, message):
  with jax.set_mesh(make_mesh(AxisType.Auto)), pytest.raises(error, match=message):
    MoE(**{"embed_dim": D, "expert_dim": F, "gating": GATING, "rngs": nnx.Rngs(0), **kwargs})


@pytest.mark.parametrize(
  ("x", "mask", "error", "message"),
  [
    (jnp.zeros((8, D + 1)), None, ValueError, r"x: expected shape \[..., 8\]"),
    (jnp.zeros(D), None, ValueError, r"x: expected shape \[..., 8\] with token axes"),
    (jnp.zeros((8, D), jnp.int32), None, TypeError, "x: expected a dtype of kind floating"),
    ([[0.0] * D] * 8, None, TypeError, "x: expected an array, got list"),
    (jnp.zeros((9, D)), None, ValueError, "x: expected a first axis divisible by 8"),
    (jnp.zeros((8, D)), jnp.ones(7, jnp.bool_), ValueError, r"mask: expected shape \[8\]"),
    (jnp.zeros((8, D)), jnp.ones(8), TypeError, "mask: expected a dtype of kind bool, got float32"),
  ],
)
def test_call_rejects(mesh, x, mask, error, message):
  model = make_model()
  with pytest.raises(error, match=message):
    model(x, mask)


@pytest.mark.parametrize("mesh", [AxisType.Explicit], ids=["explicit"], indirect=True)
def test_stacked_layers_scan(mesh):
  keys = jax.random.split(jax.random.key(0), 2)

  @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: None})
  def stack(key):
    return make_model(nnx.Rngs(key), num_shared_experts=0)

  graphdef, params, rest = nnx.split(stack(keys), nnx.Param, ...)

  def run(params, x):
    def body(x, layer):
      y, aux = nnx.merge(graphdef, *layer)(x)
      return x + y, aux.expert_load_E

    y, loads = jax.lax.scan(jax.checkpoint(body), x, (params, rest))
    return sum_of_squares(y), (y, loads)

  x = make_x()
  grads, (y, loads) = jax.jit(jax.grad(run, has_aux=True))(params, x)
  assert loads.shape == (2, E)
  for key in keys:
    x += forward(make_model(nnx.Rngs(key), num_shared_experts=0), x)[0]
  chex.assert_trees_all_close(y, x, atol=1e-5)
  for grad in jax.tree.leaves(grads):
    assert np.all(np.any(np.asarray(grad) != 0, axis=(-2, -1)).reshape(2, -1).any(1))
