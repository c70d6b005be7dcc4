"""Wrong arguments raise at trace time and say what was expected and what came."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import PartitionSpec as P

import ultraep_jax as uep
from ultraep_jax.checks import check_expert_index

G, E, N, D, F, K = 4, 8, 16, 4, 6, 2
CONFIG = uep.BalanceConfig(objective="balance", replica_slots=1)


def arguments():
  weights = uep.ExpertWeights(jnp.ones((E, D, F)), jnp.ones((E, D, F)), jnp.ones((E, F, D)))
  index = jnp.arange(N * K, dtype=jnp.int32).reshape(N, K) % E
  return {
    "x": jnp.ones((N, D)),
    "expert_index": index,
    "gate": jnp.ones((N, K)),
    "weights": weights,
    "config": CONFIG,
  }


def mesh(ranks=G, name="expert"):
  return jax.make_mesh(
    (ranks,), (name,), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:ranks]
  )


def weights_with(**leaves):
  return arguments()["weights"].replace(**leaves)


# What to change in a good call, the error, and the words it must say.
WRONG = {
  "x of rank 1": ({"x": jnp.ones(N)}, ValueError, r"x: expected shape \[N, ..., D\], got \[16\]"),
  "integer x": ({"x": jnp.ones((N, D), int)}, TypeError, "x: expected a dtype of kind floating"),
  "float8 x": (
    {"x": jnp.ones((N, D), jnp.float8_e4m3fn)},
    TypeError,
    "x: expected bfloat16, float16 or float32, got float8_e4m3fn",
  ),
  "x as a list": ({"x": [[1.0] * D] * N}, TypeError, "x: expected an array, got list"),
  "empty experts": (
    {"weights": uep.ExpertWeights(jnp.ones((E, D, 0)), jnp.ones((E, D, 0)), jnp.ones((E, 0, D)))},
    ValueError,
    r"weights.wo: expected no empty axis, got \[8, 0, 4\]",
  ),
  "a planner without an answer": (
    {"config": dataclasses.replace(CONFIG, strategy=lambda *_: None)},
    TypeError,
    "strategy: expected its planner to return a Plan, got NoneType",
  ),
  "a planner with other shapes": (
    {
      "config": dataclasses.replace(
        CONFIG, strategy=lambda *_: uep.Plan(*[jnp.zeros((G, 1), jnp.int32)] * 3)
      )
    },
    ValueError,
    r"plan.quota: expected shape \[8, 4\], got \[4, 1\]",
  ),
  "no array": ({"gate": [[1.0]]}, TypeError, "gate: expected an array, got list"),
  "float index": (
    {"expert_index": jnp.ones((N, K))},
    TypeError,
    "expert_index: expected a dtype of kind integer, got float32",
  ),
  "index of other tokens": (
    {"expert_index": jnp.zeros((N + 4, K), jnp.int32)},
    ValueError,
    r"expert_index: expected shape \[16, K\], got \[20, 2\]",
  ),
  "gate of other K": (
    {"gate": jnp.ones((N, K + 1))},
    ValueError,
    r"gate: expected shape \[16, 2\], got \[16, 3\]",
  ),
  "index outside": (
    {"expert_index": jnp.full((N, K), E, jnp.int32)},
    ValueError,
    r"expert_index: expected values in \[-1, 8\), got 8",
  ),
  "weights as a plain tuple": (
    {"weights": (jnp.ones((E, D, F)),) * 3},
    TypeError,
    "weights: expected ExpertWeights, got tuple",
  ),
  "weights of another width": (
    {"weights": weights_with(wi_gate=jnp.ones((E, D + 1, F)))},
    ValueError,
    r"weights.wi_gate: expected shape \[8, 4, 6\], got \[8, 5, 6\]",
  ),
  "up unlike gate": (
    {"weights": weights_with(wi_up=jnp.ones((E, D, F + 1)))},
    ValueError,
    r"weights.wi_up: expected shape \[8, 4, 6\], got \[8, 4, 7\]",
  ),
  "wo not transposed": (
    {"weights": weights_with(wo=jnp.ones((E, D, F)))},
    ValueError,
    r"weights.wo: expected shape \[E, F, 4\], got \[8, 4, 6\]",
  ),
  "mixed weight dtypes": (
    {"weights": weights_with(wo=jnp.ones((E, F, D), jnp.bfloat16))},
    TypeError,
    "weights: expected one dtype, got",
  ),
  "float8 weights without scales": (
    {"weights": jax.tree.map(lambda leaf: leaf.astype("float8_e4m3fn"), arguments()["weights"])},
    TypeError,
    "weights: expected bfloat16, float16 or float32, got float8_e4m3fn",
  ),
  "E not divisible by G": (
    {"weights": jax.tree.map(lambda leaf: leaf[:7], arguments()["weights"])},
    ValueError,
    "num_experts: expected a multiple of the 4 ranks, got 7",
  ),
  "K above E": (
    {"expert_index": jnp.zeros((N, E + 1), jnp.int32), "gate": jnp.ones((N, E + 1))},
    ValueError,
    r"top_k: expected 1 to 8 \(the experts\), got 9",
  ),
  "tokens not divisible": (
    {
      "x": jnp.ones((N + 1, D)),
      "expert_index": jnp.zeros((N + 1, K), jnp.int32),
      "gate": jnp.ones((N + 1, K)),
    },
    ValueError,
    r"x: expected a first axis divisible by 4 \(mesh axes \('expert',\)\), got 17",
  ),
  "an activation by name": (
    {"activation": "silu"},
    TypeError,
    "activation: expected a function, got str",
  ),
  "an activation that halves": (
    {"activation": lambda h: h[:, ::2]},
    ValueError,
    r"activation's result: expected shape \[8, 6\], got \[8, 3\]",
  ),
  "no tokens": (
    {
      "x": jnp.ones((0, D)),
      "expert_index": jnp.zeros((0, K), jnp.int32),
      "gate": jnp.ones((0, K)),
    },
    ValueError,
    "tokens per rank: expected at least 1, got 0",
  ),
  "missing axis": (
    {"axis_name": "experts"},
    ValueError,
    r"axis_name: expected an axis of the mesh, \('expert',\), got 'experts'",
  ),
  "token axes without the experts'": (
    {"token_axes": ()},
    ValueError,
    "token_axes: expected distinct axes of",
  ),
  "token axes twice": (
    {"token_axes": ("expert", "expert")},
    ValueError,
    r"token_axes: expected distinct axes of \('expert',\).*, got \('expert', 'expert'\)",
  ),
  "one token axis of another name": (
    {"token_axes": "data"},
    ValueError,
    r"token_axes: expected distinct axes of .* with 'expert' among them, got \('data',\)",
  ),
  "a number for token axes": (
    {"token_axes": 3},
    TypeError,
    "token_axes: expected a str or a tuple of them, got 3",
  ),
  "a list of axes": (
    {"axis_name": ["data", "expert"]},
    TypeError,
    r"axis_name: expected a str or a tuple of them, got \['data', 'expert'\]",
  ),
  "no axis": (
    {"axis_name": None},
    TypeError,
    "axis_name: expected a str or a tuple of them, got None",
  ),
  "a number for a mesh": ({"mesh": 3}, TypeError, "mesh: expected a Mesh, got int"),
  "an inner axis where all have tokens": (
    {"inner_axis": "expert"},
    ValueError,
    r"inner_axis: expected None, as tokens are on every mesh axis of \('expert',\), got 'expert'",
  ),
  "domains that do not divide": (
    {"config": dataclasses.replace(CONFIG, domain_size=3)},
    ValueError,
    "domain_size: expected a divisor of 4 ranks, got 3",
  ),
  "config as a dict": (
    {"config": {"replica_slots": 2}},
    TypeError,
    "config: expected a BalanceConfig, got dict",
  ),
}


@pytest.mark.parametrize("name", WRONG)
def test_sharded_moe_rejects(name):
  changes, error, message = WRONG[name]
  call = arguments() | changes
  with jax.set_mesh(mesh()), pytest.raises(error, match=message):
    uep.sharded_moe(**call)


@pytest.mark.parametrize("token_axes", [None, "expert", ["expert"]])
def test_the_unchanged_call_is_right(token_axes):
  with jax.set_mesh(mesh()):
    y, _ = uep.sharded_moe(**arguments(), token_axes=token_axes)
  assert y.shape == (N, D)


class Unhashable:
  """A planner that no program can be kept for."""

  __hash__ = None  # pyright: ignore[reportAssignmentType]

  def __call__(self, *_):
    raise AssertionError("expected no call")


CONFIGS = {
  "negative slots": (
    {"replica_slots": -1},
    ValueError,
    "replica_slots: expected at least 0, got -1",
  ),
  "slots as a float": (
    {"replica_slots": 2.0},
    TypeError,
    "replica_slots: expected an int, got float",
  ),
  "slots as a bool": (
    {"replica_slots": True},
    TypeError,
    "replica_slots: expected an int, got bool",
  ),
  "capacity below one": (
    {"capacity_factor": 0.99},
    ValueError,
    "capacity_factor: expected a finite number of at least 1, got 0.99",
  ),
  "capacity nan": (
    {"capacity_factor": float("nan")},
    ValueError,
    "capacity_factor: expected a finite",
  ),
  "target below one": (
    {"target": 0.5},
    ValueError,
    "target: expected a finite number of at least 1",
  ),
  "target as text": ({"target": "1.01"}, TypeError, "target: expected a float, got str"),
  "no tokens a replica": (
    {"min_tokens_per_replica": 0},
    ValueError,
    "min_tokens_per_replica: expected at least 1, got 0",
  ),
  "domain of zero": ({"domain_size": 0}, ValueError, "domain_size: expected at least 1, got 0"),
  "a number for a bool": (
    {"batch_invariant": 1},
    TypeError,
    "batch_invariant: expected a bool, got int",
  ),
  "a NumPy bool for an int": (
    {"copy_rows": np.bool_(True)},
    TypeError,
    "copy_rows: expected an int, got bool",
  ),
  "a NumPy float for an int": (
    {"copy_rows": np.float32(2)},
    TypeError,
    "copy_rows: expected an int, got float",
  ),
  "negative cost": ({"copy_rows": -1}, ValueError, "copy_rows: expected at least 0, got -1"),
  "unknown objective": ({"objective": "speed"}, ValueError, "objective: expected one of"),
  "unknown strategy": ({"strategy": "best"}, ValueError, "strategy: expected one of"),
  "strategy of no kind": (
    {"strategy": 3},
    TypeError,
    "strategy: expected a name, a planner function",
  ),
  "strategy without a hash": (
    {"strategy": Unhashable()},
    TypeError,
    "strategy: expected a planner with a hash, got Unhashable without",
  ),
  "unknown transfer": ({"transfer": "pigeon"}, ValueError, "transfer: expected one of"),
  "unknown implementation": (
    {"implementation": "triton"},
    ValueError,
    "implementation: expected one of",
  ),
  "unknown dispatch dtype": (
    {"dispatch_dtype": "float8_e5m2"},
    ValueError,
    "dispatch_dtype: expected one of",
  ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_config_rejects(name):
  changes, error, message = CONFIGS[name]
  with pytest.raises(error, match=message):
    uep.BalanceConfig(**changes)


def test_config_takes_numbers_of_numpy():
  config = uep.BalanceConfig(
    replica_slots=np.int64(2),  # pyright: ignore[reportArgumentType]
    capacity_factor=np.float32(1.5),  # pyright: ignore[reportArgumentType]
  )
  same = uep.BalanceConfig(replica_slots=2, capacity_factor=1.5)
  assert config == same and hash(config) == hash(same)
  assert (type(config.replica_slots), type(config.capacity_factor)) == (int, float)


@pytest.mark.parametrize("jitted", [False, True])
def test_an_activation_on_explicit_axes_closes_over_no_array_of_theirs(jitted):
  explicit = jax.make_mesh((G,), ("expert",), devices=jax.devices()[:G])
  outside = jnp.float32(1.7)
  with jax.set_mesh(explicit):
    inside = jnp.float32(1.7)

  def activation(alpha):
    return (jax.jit if jitted else lambda function: function)(lambda x: x * alpha)

  with jax.set_mesh(explicit):
    assert uep.sharded_moe(**arguments() | {"activation": activation(outside)})[0].size
    with pytest.raises(ValueError, match=r"closes over a jax.Array float32\[\]"):
      uep.sharded_moe(**arguments() | {"activation": activation(inside)})


def test_kernels_asked_for_by_name_say_what_they_cannot_do():
  call = arguments() | {"config": dataclasses.replace(CONFIG, implementation="mosaic_gpu")}
  message = "D: expected a positive multiple of 16, got 4"
  with jax.set_mesh(mesh()), pytest.raises(NotImplementedError, match=message):
    uep.sharded_moe(**call)


def test_moe_outside_a_shard_map():
  with pytest.raises(
    ValueError, match="axis_name: expected a manual axis of the enclosing shard_map"
  ):
    call = arguments()
    uep.moe(call["x"], call["expert_index"], call["gate"], call["weights"], config=call["config"])


def test_more_assignments_than_int32_counts():
  shape = jax.ShapeDtypeStruct
  call = {
    "x": shape((1 << 29, D), jnp.float32),
    "expert_index": shape((1 << 29, E), jnp.int32),
    "gate": shape((1 << 29, E), jnp.float32),
    "weights": arguments()["weights"],
  }
  with (
    jax.set_mesh(mesh()),
    pytest.raises(ValueError, match=r"expected ranks \* tokens \* top_k below 2\*\*31"),
  ):
    jax.eval_shape(lambda call: uep.sharded_moe(**call, config=CONFIG), call)


def test_a_symbolic_number_of_tokens():
  (tokens,) = export.symbolic_shape("b", constraints=["b>=1", "b<=64"])
  call = arguments()
  sizes = {
    name: jax.ShapeDtypeStruct((G * tokens, *call.pop(name).shape[1:]), dtype)
    for name, dtype in {"x": "float32", "expert_index": "int32", "gate": "float32"}.items()
  }
  with (
    jax.set_mesh(mesh()),
    pytest.raises(ValueError, match="tokens per rank: expected a number, got b"),
  ):
    jax.eval_shape(lambda sizes: uep.sharded_moe(**sizes, **call), sizes)


def test_x64_mode():
  with (
    jax.enable_x64(True),
    jax.set_mesh(mesh()),
    pytest.raises(ValueError, match="jax_enable_x64: expected False"),
  ):
    uep.sharded_moe(**arguments())


def test_mixed_mesh():
  kinds = (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit)
  mixed = jax.make_mesh((2, 4), ("data", "expert"), axis_types=kinds)
  with jax.set_mesh(mixed), pytest.raises(ValueError, match="all axes Auto or all Explicit"):
    uep.sharded_moe(**arguments())


def test_no_mesh():
  with pytest.raises(ValueError, match=r"in context \(jax.set_mesh\)"):
    uep.sharded_moe(**arguments())


def test_inside_another_manual_mesh():
  def inner(x):
    call = arguments() | {"x": x}
    return uep.sharded_moe(**call)[0]

  with (
    jax.set_mesh(mesh()),
    pytest.raises(ValueError, match="expected no manual axis"),
  ):
    jax.shard_map(inner, in_specs=P("expert"), out_specs=P("expert"))(jnp.ones((N * G, D)))


@pytest.mark.parametrize("value", [-2, 4, 1000])
def test_concrete_index_outside_raises(value):
  with pytest.raises(ValueError, match=rf"expected values in \[-1, 4\), got {value} \(1 outside\)"):
    check_expert_index(jnp.array([[0, -1], [value, 3]], jnp.int32), 4)


def test_traced_index_passes():
  jax.jit(lambda index: check_expert_index(index, 4))(jnp.array([[9]]))
