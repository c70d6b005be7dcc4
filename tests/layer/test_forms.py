"""Experts of every form equal a dense MoE of the same form, forward and every gradient."""

import dataclasses
import functools
import itertools
import pickle
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import covering_array
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from layer_problems import (
  BIASES,
  EXPERTS,
  INNER,
  QUICK,
  dense,
  layer,
  make_mesh,
  make_problem,
  on_mesh,
  output,
  pile_up,
  relative_error,
  repeated,
  value_and_grads,
)

import ultraep_jax as uep
from ultraep_jax import activations
from ultraep_jax.checks import check_activation, check_weights
from ultraep_jax.types import Layout


class Unhashable:
  def __eq__(self, other):
    return True

  def __call__(self, x):
    return x


# What clamps in small layers, whose projections are about 1.
CLAMPED = activations.clamped_swiglu(limit=0.7)
# Each form with all of these; their other combinations are those of test_moe.
RUNS = {  # ranks, rounds, transform and mesh
  "without vma": (4, "one", "jit", "without vma"),
  "one rank": (1, "one", "checkpoint", "auto"),
  "explicit": (4, "several", "scan", "explicit"),
}
FACTORS = {  # in an order that needs few cases
  "layout": ("ungated", "fused", "apart", "interleaved"),
  "biases": (("out",), ("into",), ()),  # with both, each layout below
  "activation": (activations.squared_relu, CLAMPED, jax.nn.silu),
  "run": tuple(RUNS),
}


def possible(case: dict) -> bool:
  return case["layout"] != "ungated" or case["activation"] is not CLAMPED


CASES, _ = covering_array(FACTORS, possible)


def assert_equals_dense(problem, apply, layers=None, activation=jax.nn.silu):
  """Returns the statistics."""
  y, stats, grads = value_and_grads(apply, problem)
  expected_y, expected_grads = dense(problem, layers, activation)
  assert relative_error(y, expected_y) <= 1e-5
  assert relative_error(grads, expected_grads) <= 1e-5
  return stats


def name(case: dict) -> str:
  def of(value):
    return "clamped" if value is CLAMPED else getattr(value, "__name__", str(value))

  return "-".join(
    "+".join(value) or "none" if isinstance(value, tuple) else of(value) for value in case.values()
  )


@pytest.mark.parametrize("case", CASES, ids=name)
def test_equals_dense(case):
  ranks, rounds, transform, kind = RUNS[case["run"]]
  several = rounds == "several"
  problem = make_problem(
    make_mesh(ranks, kind=AxisType.Explicit if kind == "explicit" else AxisType.Auto),
    layout=case["layout"],
    biases=case["biases"],
    load="all-to-one" if several else "skewed",
    masked=True,
  )
  config = uep.BalanceConfig(
    replica_slots=1,
    objective="balance",
    strategy=pile_up,
    capacity_factor=1.0 if several else 8.0,
  )
  layers = 2 if transform == "scan" else None
  vma = kind != "without vma"
  apply = layer(problem, config, check_vma=vma, activation=case["activation"])
  apply = repeated(apply, layers) if layers else apply
  apply = jax.checkpoint(apply) if transform == "checkpoint" else apply
  stats = assert_equals_dense(problem, apply, layers, case["activation"])
  assert (int(jnp.max(stats.rounds)) > 1) == several


@pytest.mark.parametrize("layout", Layout)
def test_one_token_a_rank(layout):
  mesh = make_mesh(8)
  problem = make_problem(mesh, tokens=8, layout=str(layout), biases=BIASES)
  assert_equals_dense(problem, layer(problem, QUICK))


@pytest.mark.parametrize(
  ("kind", "layout"),
  [
    (AxisType.Auto, "apart"),
    (AxisType.Explicit, "interleaved"),
    (AxisType.Auto, "ungated"),
    (AxisType.Explicit, "apart"),
  ],
)
def test_inner_width_over_a_mesh_axis(kind, layout):
  mesh = jax.make_mesh((2, 2, 2), ("data", "expert", "tensor"), axis_types=(kind,) * 3)
  problem = make_problem(make_mesh(4), layout=layout, biases=BIASES)
  problem = on_mesh(problem, mesh, P(("data", "expert")))
  into, bias = P("expert", None, "tensor"), P("expert", "tensor")
  specs = problem.weights.with_values(
    [into] * len(problem.weights.projections),
    P("expert", "tensor"),
    [bias] * len(problem.weights.projection_biases),
    P("expert"),
  )
  shardings = jax.tree.map(functools.partial(jax.NamedSharding, mesh), specs)
  problem = dataclasses.replace(problem, weights=jax.device_put(problem.weights, shardings))
  activation = activations.squared_relu if layout == "ungated" else CLAMPED

  def apply(*args):
    options = {"config": QUICK, "activation": activation, "inner_axis": "tensor"}
    return uep.sharded_moe(*args, **options)

  stats = assert_equals_dense(problem, apply, activation=activation)
  assert stats.load_after_G.shape == (2, 2)
  args = problem.x, problem.expert_index, problem.gate, problem.weights
  with jax.set_mesh(mesh):
    text = jax.jit(apply).lower(*args).compile().as_text()
  # Nothing as large as a rank's experts with all of F: parts are never brought together.
  cols = 2 * INNER if layout == "interleaved" else INNER
  assert f"f32[{EXPERTS // 2},8,{cols // 2}]" in text
  assert f"f32[{EXPERTS // 2},8,{cols}]" not in text


@pytest.mark.parametrize(
  ("names", "kind"),
  [(("context", "expert"), AxisType.Auto), (("data", "model"), AxisType.Explicit)],
)
def test_experts_over_two_axes(names, kind):
  mesh = jax.make_mesh((2, 4), names, axis_types=(kind,) * 2)
  problem = make_problem(make_mesh(8), layout="interleaved", biases=BIASES)
  by_both = jax.NamedSharding(mesh, P(names))
  problem = jax.device_put(dataclasses.replace(jax.device_get(problem), mesh=mesh), by_both)

  def apply(*args):
    return uep.sharded_moe(*args, config=QUICK, axis_name=names)

  stats = assert_equals_dense(problem, apply)
  assert stats.load_after_G.shape == (1, 8)
  assert int(stats.replicas[0]) > 0


# --- activations -----------------------------------------------------------------------------


def reference_values():
  rng = np.random.default_rng(0)
  return (4 * rng.normal(size=(2, 1000))).astype(np.float32)


@pytest.mark.parametrize(
  ("unit", "expected"),
  [
    (activations.swiglu, lambda g, u: g / (1 + np.exp(-g)) * u),
    (
      activations.clamped_swiglu(),
      lambda g, u: (
        np.minimum(g, 7) / (1 + np.exp(-1.702 * np.minimum(g, 7))) * (np.clip(u, -7, 7) + 1)
      ),
    ),
    (
      activations.clipped_swiglu(2.0),
      lambda g, u: np.minimum(g, 2) / (1 + np.exp(-np.minimum(g, 2))) * np.clip(u, -2, 2),
    ),
    (
      activations.geglu,
      lambda g, u: 0.5 * g * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3))) * u,
    ),
  ],
)
def test_ready_made_units(unit, expected):
  gate, up = reference_values()
  expected = expected(gate.astype(np.float64), up.astype(np.float64))
  np.testing.assert_allclose(unit(gate, up), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", [Layout.APART, Layout.FUSED, Layout.INTERLEAVED])
def test_units_compute_in_float32_and_round_once(layout):
  pair = jnp.asarray(reference_values(), jnp.bfloat16)
  hidden = {
    Layout.APART: tuple(pair),
    Layout.FUSED: (pair.reshape(-1),),
    Layout.INTERLEAVED: (pair.T.reshape(-1),),
  }[layout]
  want = CLAMPED(*pair.astype(jnp.float32)).astype(jnp.bfloat16)
  got = activations.inner(hidden, layout, CLAMPED)
  assert got.dtype == jnp.bfloat16
  np.testing.assert_array_equal(got.astype(jnp.float32), want.astype(jnp.float32))


def test_squared_relu():
  x = reference_values()[0]
  np.testing.assert_allclose(activations.squared_relu(x), np.maximum(x, 0) ** 2, rtol=1e-6)


def test_units_of_equal_settings_are_equal():
  """Else programs would be compiled again."""
  for make in (activations.clamped_swiglu, activations.clipped_swiglu):
    assert make(limit=3.0) == make(limit=3.0) and hash(make()) == hash(make())
    assert make(limit=3.0) != make(limit=4.0)
  assert activations.clamped_swiglu(1.702, 7.0) == activations.clamped_swiglu()  # by place or not
  assert activations.clamped_swiglu(limit=3.0) != activations.clipped_swiglu(3.0)
  one, other = (activations.unit(jax.nn.silu, Layout.APART) for _ in range(2))
  assert one == other and hash(one) == hash(other)
  assert uep.GatedUnit(jnp.multiply) == uep.GatedUnit(jnp.multiply)


@pytest.mark.parametrize("make", [activations.clamped_swiglu, activations.clipped_swiglu])
def test_units_that_were_pickled_compile_nothing_anew(make):
  unit = make(limit=3.0)
  other = pickle.loads(pickle.dumps(unit))
  assert other == unit and other is not unit and hash(other) == hash(unit)
  run = jax.jit(lambda unit, gate, up: unit(gate, up), static_argnums=0)
  gate, up = reference_values()
  np.testing.assert_array_equal(run(unit, gate, up), run(other, gate, up))
  assert run._cache_size() == 1


class Scaled:
  """A callable object, as modules are."""

  def __call__(self, x):
    return 2 * x


ONE = {
  "jitted": jnp.tanh,
  "of jax.nn": jax.nn.gelu,
  "custom derivative": jax.nn.relu,
  "with a default": jax.nn.leaky_relu,
  "partial": functools.partial(jax.nn.gelu, approximate=False),
  "lambda": lambda x: x,
  "an object": Scaled(),
  "of any arguments": lambda *args: args[0],
}
BOTH = {
  "ufunc": jnp.multiply,
  "lambda": lambda gate, up: gate * up,
  "partial": functools.partial(lambda scale, gate, up: scale * gate * up, 2.0),
  "ready made": CLAMPED.function,
}


@pytest.mark.parametrize(
  ("kind", "key"),
  [*itertools.product(["one"], ONE), *itertools.product(["both"], BOTH)],
)
def test_functions_that_are_taken(kind, key):
  activation = ONE[key] if kind == "one" else uep.GatedUnit(BOTH[key])
  check_activation(activation, Layout.APART, (8, 4), jnp.float32)


@pytest.mark.parametrize(
  ("activation", "layout", "error", "match"),
  [
    (
      lambda gate, up: gate * up,
      "apart",
      TypeError,
      r"activation: expected a function of one argument, got <lambda>\(gate, up\); "
      r"ultraep_jax.GatedUnit\(function\) makes one of \(gate, up\)",
    ),
    (
      uep.GatedUnit(jax.nn.silu),
      "fused",
      TypeError,
      r"activation: expected a GatedUnit of a function of \(gate, up\), got silu\(x:",
    ),
    (uep.GatedUnit(jax.nn.gelu), "fused", TypeError, "activation: expected a GatedUnit of a fun"),
    (uep.GatedUnit(None), "apart", TypeError, "activation: expected a function, got NoneType"),
    (
      CLAMPED,
      "ungated",
      TypeError,
      r"activation: expected a function of one argument \(ungated\), got a GatedUnit",
    ),
    (lambda: 1, "apart", TypeError, "activation: expected a function of one argument"),
    (Unhashable(), "apart", TypeError, "expected a function with a hash, got Unhashable without"),
    (
      uep.GatedUnit(lambda gate, up: gate[:, ::2]),
      "apart",
      ValueError,
      r"activation's result: expected shape \[8, 4\], got \[8, 2\]",
    ),
  ],
)
def test_functions_that_are_refused(activation, layout, error, match):
  with pytest.raises(error, match=match):
    check_activation(activation, Layout(layout), (8, 4), jnp.float32)


# --- weights ---------------------------------------------------------------------------------


class Quantised(NamedTuple):
  """Values and scales that claim the shape and dtype of what they stand for, as libraries' do."""

  values: jax.Array
  scales: jax.Array

  shape = property(lambda self: self.values.shape)
  dtype = property(lambda self: self.scales.dtype)


QUANTISED = Quantised(jnp.ones((EXPERTS, 8, INNER), jnp.int8), jnp.ones((EXPERTS, 1, 1)))


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize(
  ("change", "error", "match"),
  [
    ({"wo": None}, TypeError, "weights.wo: expected an array, got NoneType"),
    (
      {"wo_bias": jnp.ones((EXPERTS, INNER))},
      ValueError,
      r"weights.wo_bias: expected shape \[16, 8\], got \[16, 12\]",
    ),
    (
      {"wo_bias": jnp.ones((EXPERTS, 8), jnp.bfloat16)},
      TypeError,
      r"weights: expected one dtype, got \['bfloat16', 'float32'\]",
    ),
  ],
)
def test_weights_that_are_refused_in_every_layout(layout, change, error, match):
  refused(layout, change, error, match)


def refused(layout, change, error, match):
  problem = make_problem(make_mesh(1), layout=str(layout), biases=BIASES)
  problem = dataclasses.replace(problem, weights=problem.weights.replace(**change))
  with pytest.raises(error, match=match) as raised:
    output(layer(problem, QUICK), problem)
  assert "(an argument of ultraep_jax.moe)" in raised.value.__notes__


@pytest.mark.parametrize(
  ("layout", "change", "error", "match"),
  [
    (
      "apart",
      {"wi_up_bias": None},
      ValueError,
      "weights.wi_up_bias: expected an array, as wi_gate_bias is given, got None",
    ),
    (
      "apart",
      {"wi_gate_bias": None},
      ValueError,
      "weights.wi_gate_bias: expected an array, as wi_up_bias is given, got None",
    ),
    (
      "apart",
      {"wi": jnp.ones((EXPERTS, 8, INNER))},
      ValueError,
      "weights.wi: expected None in layout apart, got a value",
    ),
    (
      "fused",
      {"wi_gate_bias": jnp.ones((EXPERTS, INNER))},
      ValueError,
      "weights.wi_gate_bias: expected None in layout fused, got a value",
    ),
    (
      "fused",
      {"wi": jnp.ones((EXPERTS, 8, INNER))},
      ValueError,
      r"weights.wi: expected shape \[16, 8, 24\], got \[16, 8, 12\]",
    ),
    (
      "interleaved",
      {"wi_bias": jnp.ones((EXPERTS, INNER))},
      ValueError,
      r"weights.wi_bias: expected shape \[16, 24\], got \[16, 12\]",
    ),
    (
      "ungated",
      {"wi": jnp.ones((EXPERTS, 8, 2 * INNER))},
      ValueError,
      r"weights.wi: expected shape \[16, 8, 12\], got \[16, 8, 24\]",
    ),
    (
      "ungated",
      {"wi": QUANTISED},
      TypeError,
      r"weights.wi: expected an array, got Quantised of 2 arrays \(quantised weights",
    ),
    (
      "apart",
      {"wo": nnx.Param(jnp.ones((EXPERTS, INNER, 8)))},
      TypeError,
      r"weights.wo: expected an array, got Param: pass wo\[...\]",
    ),
    (
      "apart",
      {"wi_up": jnp.ones((EXPERTS, 8, INNER), jnp.int8)},
      TypeError,
      "weights.wi_up: expected a dtype of kind floating, got int8",
    ),
  ],
)
def test_weights_that_are_refused(layout, change, error, match):
  refused(layout, change, error, match)


def test_a_layout_is_no_string():
  weights = make_problem(make_mesh(1)).weights.replace(layout="apart")
  with pytest.raises(TypeError, match=r"weights.layout: expected a Layout, got str"):
    check_weights(weights, "E")


@pytest.mark.parametrize(
  ("layout", "axis", "match"),
  [
    ("fused", "tensor", "weights.layout: expected one whose columns can be divided"),
    ("apart", "data", r"inner_axis: expected a mesh axis of \('tensor',\), those without tokens"),
    ("apart", "model", r"inner_axis: expected a mesh axis of \('tensor',\)"),
  ],
)
def test_inner_axes_that_are_refused(layout, axis, match):
  mesh = jax.make_mesh((1, 1, 5), ("data", "expert", "tensor"), devices=jax.devices()[:5])
  problem = make_problem(make_mesh(1), layout=layout)
  args = jax.device_get((problem.x, problem.expert_index, problem.gate, problem.weights))
  with jax.set_mesh(mesh), pytest.raises(ValueError, match=match) as raised:
    uep.sharded_moe(*args, config=QUICK, inner_axis=axis)
  assert "(an argument of ultraep_jax.sharded_moe)" in raised.value.__notes__


def test_inner_width_must_be_divisible():
  mesh = jax.make_mesh((1, 5), ("expert", "tensor"), devices=jax.devices()[:5])
  problem = make_problem(make_mesh(1))
  args = jax.device_get((problem.x, problem.expert_index, problem.gate, problem.weights))
  match = r"weights.wo: expected F divisible by 5 \(mesh axis 'tensor'\), got 12"
  with jax.set_mesh(mesh), pytest.raises(ValueError, match=match):
    uep.sharded_moe(*args, config=QUICK, inner_axis="tensor")
