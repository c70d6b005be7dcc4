"""The layer on GPU kernels: interpreted against the dense layer, and lowered for GPUs."""

import collections
import dataclasses
import functools
import itertools
import types

import fake_devices
import jax
import jax.extend
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
from model_layers import gradients, in_form, model_arguments
from mosaic_interpret import interpreted
from programs import (
  EXCHANGE,
  FORWARD,
  LAYER,
  PLANNING,
  PORTABLE_COPIES,
  collectives,
  equations,
  kernel_names,
  kernels,
)
from wire_rounding import on_rounded_tokens

import pallas_kernels
import ultraep_jax as uep
from pallas_kernels.transfer import combine, dispatch
from pallas_kernels.transfer.tuning import ExchangeTuning, TransferTuning
from ultraep_jax import activations, implementation

CONFIG = uep.BalanceConfig(
  replica_slots=1, objective="balance", implementation="mosaic_gpu", capacity_factor=1.25
)


def cannot(reason):
  def fail(*args, **kwargs):
    raise NotImplementedError(reason)

  return fail


@pytest.fixture
def small_kernels(monkeypatch):
  """Kernels with one worker, as interpretation is slow; float32 matmuls stay portable."""
  monkeypatch.setattr(implementation, "resolve", lambda *_: ("mosaic_gpu", "portable"))
  for tuning in (TransferTuning, ExchangeTuning):
    defaults = dataclasses.replace(tuning(), blocks=1, workers=1, tile_bytes=1024)
    monkeypatch.setattr(tuning.__init__, "__defaults__", dataclasses.astuple(defaults))
  monkeypatch.setattr(combine, "combining", lambda *_: ExchangeTuning())
  monkeypatch.setattr(dispatch, "dispatching", lambda *_, **__: ExchangeTuning())
  # Planner and routing have tests of their own, and are the slowest to interpret.
  for kernel in ("plan_quota", "route_rows"):
    monkeypatch.setattr(pallas_kernels, kernel, cannot("interpreted elsewhere"))


APART, OUT = {"layout": "apart"}, {"layout": "fused", "biases": ("out",)}
GPT_OSS, UNGATED = {"layout": "interleaved", "biases": BIASES}, {"layout": "ungated"}


@pytest.mark.slow
@pytest.mark.parametrize(
  "ranks, data, form, changes",
  [
    (4, 1, UNGATED, {"transfer": "relay", "replica_slots": 2}),
    (2, 2, APART, {"dispatch_dtype": "float8_e4m3fn"}),
    (4, 1, OUT, {"capacity_factor": 1.0, "replica_slots": 0}),  # several rounds
    (4, 1, GPT_OSS, {"domain_size": 2}),
  ],
  ids=["relay", "two axes in fp8", "rounds", "domains"],
)
def test_equals_dense(ranks, data, form, changes, small_kernels):
  mesh = make_mesh(ranks, data)
  problem = make_problem(
    mesh, tokens=8 * mesh.size, experts=2 * ranks, width=176, load="skewed", masked=True, **form
  )
  config = dataclasses.replace(CONFIG, **changes)
  activation = activations.clamped_swiglu(limit=0.7) if form is GPT_OSS else jax.nn.silu
  apply = layer(problem, config, activation=activation)
  with interpreted():
    y, stats, grads = jax.block_until_ready(value_and_grads(apply, problem))
  tokens = on_rounded_tokens(problem) if config.dispatch_dtype else problem
  expected = dense(tokens, activation=activation)
  assert relative_error((y, grads), expected) < 1e-5
  if config.replica_slots:
    assert int(jnp.sum(stats.replicas)) > 0
  else:
    assert int(jnp.max(stats.rounds)) > 1


@pytest.fixture(scope="module")
def two_layers():
  """Gradients of two layers without biases, of several rounds, on four GPUs: the traced program."""
  mesh = make_mesh(4)

  def apply(x, index, gate, weights):
    y, _ = uep.sharded_moe(x, index, gate, weights, config=CONFIG)
    return uep.sharded_moe(y, index, gate, weights, config=CONFIG)

  with jax.set_mesh(mesh):
    return gradients(apply).trace(*model_arguments("deepseek-v3", mesh))


def test_several_rounds_of_several_layers_hold_kernels_only(two_layers):
  """On four GPUs, forward and backward."""
  assert kernel_names(two_layers.jaxpr) == LAYER | EXCHANGE | PLANNING
  assert not collectives(two_layers.jaxpr)


def test_kernels_tell_the_rank(two_layers):
  """XLA would set it in memory, which takes longer than most kernels between others."""
  outside = {eqn.primitive.name for eqn in equations(two_layers.jaxpr, in_kernels=False)}
  assert "mpmd_map" in outside and "axis_index" not in outside


# Buffers for all rows of all four ranks: one round, whatever the loads.
ONE_ROUND = dataclasses.replace(CONFIG, capacity_factor=4.0)


@pytest.mark.parametrize(
  "name, data, form, changes",
  [
    ("deepseek-v3", 2, {"layout": "fused", "biases": BIASES}, {"capacity_factor": 1.25}),
    ("gpt-oss-120b", 1, GPT_OSS, {"dispatch_dtype": "float8_e4m3fn"}),
    ("one token", 2, {"layout": "ungated", "biases": BIASES}, {}),
  ],
  ids=["several rounds of fused", "interleaved in fp8", "ungated, one token"],
)
def test_lowers_for_gpus(name, data, form, changes):
  """The kernels of projections that are apart have lowerings of their own, as do their copies."""
  config = dataclasses.replace(ONE_ROUND, **changes)
  ungated = form["layout"] == "ungated"
  activation = activations.squared_relu if ungated else jax.nn.silu
  activation = activations.clamped_swiglu() if form is GPT_OSS else activation
  mesh = make_mesh(4, data)
  x, index, gate, weights = model_arguments(name, mesh)
  with jax.set_mesh(mesh):
    apply = functools.partial(uep.sharded_moe, config=config, activation=activation)
    traced = gradients(apply).trace(x, index, gate, in_form(weights, **form))
  outside = {eqn.primitive.name for eqn in equations(traced.jaxpr, in_kernels=False)}
  assert "axis_index" not in outside
  text = traced.lower(lowering_platforms=("cuda",)).as_text()
  names = [kernel.params["name"] for kernel in kernels(traced.jaxpr)]
  # Forward needs copies of biases before its first tile; all others ride.
  assert set(names) == LAYER | EXCHANGE | PLANNING | {"replicate"}
  assert names.count("replicate") == 1
  assert "all_to_all" not in text and "collective_permute" not in text
  assert ("f8E4M3FN" in text) == (config.dispatch_dtype is not None)


def test_kernels_convert_no_booleans(two_layers):
  """Each conversion starts a process as the kernel is lowered: see ``pallas_kernels.branches``."""
  inside = [
    eqn
    for kernel in {id(call): call for call in kernels(two_layers.jaxpr)}.values()
    if kernel.params["name"] != "gated_grads"  # whose pipeline, of Pallas, converts one
    for body in jax.extend.core.jaxprs_in_params(kernel.params)
    for eqn in equations(body)
  ]
  assert any(eqn.primitive.name == "cond" for eqn in inside)
  converted = [
    eqn
    for eqn in inside
    if eqn.primitive.name == "convert_element_type" and eqn.invars[0].aval.dtype == bool
  ]
  assert not converted


def test_equal_kernels_are_compiled_once(two_layers):
  """In all rounds and layers."""
  calls = kernels(two_layers.jaxpr)
  count = collections.Counter(map(id, calls))
  distinct = {id(call): call for call in calls}.values()
  names = [kernel.params["name"] for kernel in distinct]
  assert len(calls) > 50
  ridden = [x for x in distinct if x.params["name"] in RIDDEN and reaches_others(x)]
  assert {x.params["name"] for x in ridden} == RIDDEN  # those that a transfer rides in, too
  assert min(count.values()) > 1
  assert names.count("route_rows") == 1
  assert names.count("dispatch") == names.count("combine") == 2  # with gates, and without
  assert len(distinct) <= len(calls) // 2


@pytest.fixture(scope="module")
def remade():
  """Gradients of a layer whose forward pass runs again, and the rows that its copies know of."""
  seen, replication = [], pallas_kernels.replication

  def recorded(arrays, replica_expert_GS, *args, **kwargs):
    if replica_expert_GS.shape[1]:
      seen.append((kwargs["home_rows_G"], kwargs["flat"]))
    return replication(arrays, replica_expert_GS, *args, **kwargs)

  mesh = make_mesh(4)
  # Slots that no other test has, so that nothing is traced already.
  config = dataclasses.replace(ONE_ROUND, replica_slots=5)
  apply = jax.checkpoint(functools.partial(uep.sharded_moe, config=config))
  with jax.set_mesh(mesh), pytest.MonkeyPatch.context() as patch:
    patch.setattr(pallas_kernels, "replication", recorded)
    jaxpr = gradients(apply).trace(*model_arguments("qwen3-235b", mesh)).jaxpr
  return jaxpr, seen


def test_copies_are_sent_by_the_rows_of_their_ranks(remade):
  """Where a matmul waits for them; what order they go in shows in no result."""
  _, seen = remade
  rows = [rows for rows, flat in seen if not flat]
  assert len(rows) >= 3  # also backward
  assert {(each.shape, each.dtype) for each in rows} == {((4,), jnp.dtype(jnp.int32))}
  assert [rows for rows, flat in seen if flat] == [None] * 2  # beside gradients of wo and gate


def test_copies_have_no_kernel_of_their_own(remade):
  """They ride in the matmuls', and so do gradients; ``jax.checkpoint`` runs one of them again."""
  jaxpr, _ = remade
  assert kernel_names(jaxpr) == LAYER | EXCHANGE | PLANNING
  matmuls = [kernel for kernel in kernels(jaxpr) if kernel.params["name"] in RIDDEN]
  assert all(map(reaches_others, matmuls))
  names = [kernel.params["name"].removeprefix("grouped_matmul_") for kernel in matmuls]
  forward, again = ["gated_matmul", "grouped_matmul"], ["gated_matmul"]
  backward = ["grouped_matmul", "wgrad", "wgrad", "wgrad", "grouped_matmul"]
  assert names == forward + again + backward


def test_kernels_of_one_process_share_slices(two_layers):
  """In place, which spares a copy."""
  bare = shared_outside_barriers(two_layers.jaxpr.jaxpr)
  assert {name for name, _ in bare} == EXCHANGE | RIDDEN


RETYPED = {"untyped", "pvary", "pcast"}
RIDDEN = {"gated_matmul", "grouped_matmul", "grouped_matmul_wgrad"}


def shared_outside_barriers(jaxpr):
  """Names of kernels that reach other GPUs, and arrays that they share without a barrier."""
  made = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
  used = collections.defaultdict(list)
  for eqn in jaxpr.eqns:
    for var in eqn.invars:
      if isinstance(var, jax.extend.core.Var):
        used[var].append(eqn)

  def maker(var):
    """What an array is of, whatever its type was changed to since."""
    if var not in made:
      return "argument"
    name = made[var].primitive.name
    return maker(made[var].invars[0]) if name in RETYPED else name

  def users(var):
    for eqn in used[var]:
      name = eqn.primitive.name
      yield from users(eqn.outvars[0]) if name in RETYPED else [name]

  for eqn in jaxpr.eqns:
    inner = list(jax.extend.core.jaxprs_in_params(eqn.params))
    # The call of a kernel is wrapped once, and twice more if it updates arrays.
    calls = [call for body in inner for call in body.eqns if call.primitive.name == "mpmd_map"]
    if eqn.primitive.name == "custom_vmap_call":
      calls = [call for body in inner for call in kernels(body)]
    if not calls:
      yield from itertools.chain(*map(shared_outside_barriers, inner))
    elif reaches_others(calls[0]):
      before = [maker(var) for var in eqn.invars]
      after = [name for var in eqn.outvars for name in users(var)]
      # Zeros are results that are not written yet.
      apart = {"optimization_barrier", "broadcast_in_dim"}
      yield from ((calls[0].params["name"], name) for name in before + after if name not in apart)


def reaches_others(kernel):
  params = kernel.params["compiler_params"]
  return kernel.params["name"] in EXCHANGE or (
    kernel.params["name"] in RIDDEN and not params.skip_device_barrier
  )


def test_a_width_that_kernels_cannot_carry_in_fp8_is_carried_portably(caplog):
  problem = make_problem(make_mesh(4), tokens=48, experts=8, width=136)
  config = dataclasses.replace(CONFIG, implementation="auto", dispatch_dtype="float8_e4m3fn")
  args = problem.x, problem.expert_index, problem.gate, problem.weights
  with caplog.at_level("DEBUG", logger="ultraep_jax"), jax.set_mesh(problem.mesh):
    text = str(traced_for_gpus(layer(problem, config), *args))
  assert "f8_e4m3fn[32,136]{V:expert} = all_to_all" in text
  assert "D: expected a positive multiple of 16, got 136" in caplog.text


def traced_for_gpus(function, *args):
  """Its program as on H200s."""
  with fake_devices.gpus():
    return jax.jit(function).trace(*args).jaxpr


def test_two_nodes_of_two_gpus_run_all_that_stays_on_a_gpu_by_kernels():
  mesh = make_mesh(4)
  config = dataclasses.replace(ONE_ROUND, implementation="auto", node_size=2)
  with jax.set_mesh(mesh):
    apply = functools.partial(uep.sharded_moe, config=config)
    arguments = model_arguments("qwen3-235b", mesh)
    jaxpr = traced_for_gpus(gradients(apply), *arguments)
    assert kernel_names(jaxpr) == (LAYER - EXCHANGE) | PORTABLE_COPIES | {"place"}
    assert "all_to_all" in str(jaxpr) and "ppermute" in str(jaxpr)
    one_node = dataclasses.replace(config, node_size=4)
    apply = functools.partial(uep.sharded_moe, config=one_node)
    assert kernel_names(traced_for_gpus(apply, *arguments)) == FORWARD | EXCHANGE | PLANNING


@pytest.mark.parametrize("node_size", [1, 2])
def test_vmap_lowers_for_gpus(node_size):
  """Kernels that write over arrays too, in gradients and where collectives carry tokens."""
  mesh = make_mesh(2)
  config = dataclasses.replace(
    ONE_ROUND, implementation="auto", node_size=node_size, domain_size=None
  )
  x, index, gate, weights = model_arguments("one token", mesh)
  twice = jax.ShapeDtypeStruct((2, *x.shape), x.dtype)
  with jax.set_mesh(mesh), fake_devices.gpus():
    gradient = gradients(functools.partial(uep.sharded_moe, config=config))
    mapped = jax.jit(jax.vmap(gradient, (0, None, None, None)))
    traced = mapped.trace(twice, index, gate, weights)
    assert "custom_call @mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()
  exchange = {"place"} if node_size == 1 else EXCHANGE
  planning = PORTABLE_COPIES if node_size == 1 else PLANNING
  assert kernel_names(traced.jaxpr) == (LAYER - EXCHANGE) | planning | exchange


@pytest.mark.parametrize(("width", "inner", "dtype"), [(50, 50, jnp.bfloat16), (3, 5, jnp.float32)])
def test_experts_that_kernels_cannot_move_are_moved_portably(width, inner, dtype):
  mesh = make_mesh(4)
  by_expert = functools.partial(jax.ShapeDtypeStruct, dtype=dtype)
  weights = uep.ExpertWeights(
    by_expert((8, width, inner)), by_expert((8, width, inner)), by_expert((8, inner, width))
  )
  config = dataclasses.replace(CONFIG, implementation="auto")

  def loss(x, index, gate, weights):
    y, _ = uep.sharded_moe(x, index, gate, weights, config=config)
    return jnp.sum(y.astype(jnp.float32))

  index = jax.ShapeDtypeStruct((64, 2), jnp.int32)
  gate = jax.ShapeDtypeStruct((64, 2), jnp.float32)
  with jax.set_mesh(mesh):
    jaxpr = traced_for_gpus(
      jax.grad(loss, argnums=(0, 3)), by_expert((64, width)), index, gate, weights
    )
  assert "replicate" not in kernel_names(jaxpr)


def test_a_mesh_that_kernels_cannot_take_is_served_portably():
  """Axes that the caller's ``shard_map`` leaves to the compiler."""
  problem = make_problem(make_mesh(2, 2), width=128)
  config = dataclasses.replace(CONFIG, implementation="auto")
  by_expert = jax.sharding.PartitionSpec("expert")

  def local(x, index, gate, weights):
    return uep.moe(x, index, gate, weights, config=config)[0]

  run = jax.shard_map(
    local,
    mesh=problem.mesh,
    in_specs=by_expert,
    out_specs=by_expert,
    axis_names={"expert"},
  )
  jaxpr = traced_for_gpus(run, problem.x, problem.expert_index, problem.gate, problem.weights)
  assert kernel_names(jaxpr).isdisjoint(EXCHANGE | {"replicate"})


# --- what is traced for other machines: last, as nothing that was traced serves them ----------


@pytest.fixture
def traced_anew():
  jax.clear_caches()
  yield
  jax.clear_caches()


def test_kernels_among_processes_take_no_slices(traced_anew, monkeypatch):
  """Arrays that a kernel shares with other GPUs go through a barrier: see ``launch``."""
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  mesh = make_mesh(4)
  with jax.set_mesh(mesh):
    apply = functools.partial(uep.sharded_moe, config=CONFIG)
    jaxpr = gradients(apply).trace(*model_arguments("qwen3-235b", mesh)).jaxpr
  assert kernel_names(jaxpr) == LAYER | EXCHANGE | PLANNING
  assert not list(shared_outside_barriers(jaxpr))


BLACKWELL = {"gated_grads", "route_rows", "replicate", "reduce_replicas"} | EXCHANGE | PLANNING


def test_blackwell_gpus_multiply_by_the_kernel_of_jax(traced_anew, monkeypatch):
  monkeypatch.setattr(jax, "local_devices", lambda: [types.SimpleNamespace(core_count=148)])
  mesh = make_mesh(4)
  config = dataclasses.replace(ONE_ROUND, implementation="auto")
  with jax.set_mesh(mesh), fake_devices.gpus("10.0"):
    apply = functools.partial(uep.sharded_moe, config=config)
    traced = gradients(apply).trace(*model_arguments("qwen3-235b", mesh))
    names = kernel_names(traced.jaxpr) - {None}  # JAX's kernel has nameless parts
    assert {name for name in names if not name.startswith("ragged_dot_kernel")} == BLACKWELL
    assert len(names) == len(BLACKWELL) + 1
    # Slots that no other test has, so that nothing is traced already.
    config = dataclasses.replace(CONFIG, replica_slots=7)
    apply = functools.partial(uep.sharded_moe, config=config)
    with pytest.raises(NotImplementedError, match="wgrad: the kernels need Hopper GPUs"):
      gradients(apply).trace(*model_arguments("qwen3-235b", mesh))
