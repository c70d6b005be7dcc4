"""The layer equals a dense MoE, forward and every gradient, in every combination of settings."""

import dataclasses
import functools
import itertools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from programs import unordered_loops

import ultraep_jax as uep
from ultraep_jax.bench.covering import covering_array
from ultraep_jax.moe import home_rows
from ultraep_jax.planning.relay import transfer_tree
from ultraep_jax.testing import dense_moe
from ultraep_jax.transport.block_exchange import BlockCrossing

TOKENS, WIDTH, INNER, LAYERS = 12, 8, 12, 2

FACTORS = {
  "ranks": (1, 2, 4, 8),
  "slots": ("0", "1", "2", "M"),
  "top_k": (1, 2, 8),
  "load": ("balanced", "skewed", "all-to-one"),
  "rounds": ("one", "several"),
  "masked": (False, True),
  "data": (1, 2),
  "check_vma": (False, True),
  "mesh": (AxisType.Auto, AxisType.Explicit),
  "transform": ("jit", "scan", "checkpoint"),
}


def possible(case: dict) -> bool:
  if case["ranks"] * case["data"] > 8:
    return False  # eight virtual devices
  if case["rounds"] == "several":
    if case["ranks"] == 1:
      return False  # one rank always holds its own assignments
    if case["load"] == "balanced" and (case["slots"] == "0" or case["masked"]):
      return False  # no rank is above the mean without a replica
  return True


CASES, PAIRS = covering_array(FACTORS, possible)


@dataclasses.dataclass(frozen=True)
class Problem:
  """One layer's inputs on global arrays, with the mesh to run it on."""

  mesh: jax.sharding.Mesh
  x: jax.Array
  expert_index: jax.Array
  gate: jax.Array
  weights: uep.ExpertWeights
  cotangent: jax.Array


def make_mesh(ranks: int, data: int = 1, kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
  shape, names = ((data, ranks), ("data", "expert")) if data > 1 else ((ranks,), ("expert",))
  return jax.make_mesh(
    shape, names, axis_types=(kind,) * len(names), devices=jax.devices()[: data * ranks]
  )


def tokens_spec(mesh: jax.sharding.Mesh) -> P:
  return P(mesh.axis_names)


def make_problem(
  mesh: jax.sharding.Mesh,
  *,
  home_experts: int = 2,
  top_k: int = 2,
  load: str = "skewed",
  masked: bool = False,
  tokens: int = TOKENS,
  width: int = WIDTH,
  seed: int = 0,
  dtype: jnp.dtype = jnp.float32,
) -> Problem:
  rng = np.random.default_rng(seed)
  total = tokens * mesh.size
  num_experts = home_experts * mesh.shape["expert"]
  if load == "balanced":
    index = (np.arange(total)[:, None] * top_k + np.arange(top_k)) % num_experts
  elif load == "all-to-one":
    index = np.broadcast_to(np.arange(top_k), (total, top_k))
  else:
    scores = 2.0 * rng.normal(size=num_experts) + rng.gumbel(size=(total, num_experts))
    index = np.argsort(-scores, axis=1)[:, :top_k]
  index = np.where(masked & (rng.random((total, top_k)) < 0.2), -1, index).astype(np.int32)

  def normal(*shape: int, scale: float = 1.0) -> jax.Array:
    return jnp.asarray(scale * rng.normal(size=shape), dtype)

  weights = uep.ExpertWeights(
    normal(num_experts, width, INNER, scale=width**-0.5),
    normal(num_experts, width, INNER, scale=width**-0.5),
    normal(num_experts, INNER, width, scale=INNER**-0.5),
  )
  by_token, by_expert = NamedSharding(mesh, tokens_spec(mesh)), NamedSharding(mesh, P("expert"))
  gate = jnp.asarray(rng.random((total, top_k)), jnp.float32)
  return Problem(
    mesh=mesh,
    x=jax.device_put(normal(total, width), by_token),
    expert_index=jax.device_put(jnp.asarray(index), by_token),
    gate=jax.device_put(gate, by_token),
    weights=jax.device_put(weights, by_expert),
    cotangent=jax.device_put(normal(total, width), by_token),
  )


def pile_up(load_GE: jax.Array, config: uep.BalanceConfig, cost: object) -> uep.Plan:
  """A legal plan that fills rank 0's slots and gives it all of those experts' load."""
  num_ranks, num_experts = load_GE.shape
  home = num_experts // num_ranks
  load_E = jnp.sum(load_GE, axis=0, dtype=jnp.int32)
  slots = min(config.replica_slots, num_experts - home)
  replica = np.full((num_ranks, config.replica_slots), -1, np.int32)
  replica[0, :slots] = home + np.arange(slots)
  host = np.arange(num_experts) // home
  host[home : home + slots] = 0
  quota = jnp.where(host[:, None] == np.arange(num_ranks), load_E[:, None], 0)
  served = jnp.pad(load_E, (0, 1))[replica] > 0  # -1 finds the padding
  replica_expert = jnp.where(served, replica, -1)
  parent = transfer_tree(replica_expert, num_experts=num_experts, transfer="direct")
  return uep.Plan(replica_expert, quota, parent)


def layer(
  problem: Problem, config: uep.BalanceConfig, *, check_vma: bool = True, **kwargs
) -> object:
  """The layer on global arrays, in a shard_map of the test's own."""
  by_token = tokens_spec(problem.mesh)

  @functools.partial(
    jax.shard_map,
    mesh=problem.mesh,
    in_specs=(by_token, by_token, by_token, P("expert")),
    out_specs=(by_token, P(problem.mesh.axis_names[:-1] or None)),
    check_vma=check_vma,
  )
  def run(x, expert_index, gate, weights):
    y, stats = uep.moe(x, expert_index, gate, weights, config=config, **kwargs)
    return y, jax.tree.map(lambda leaf: leaf[None], stats)

  return run


def relative_error(got: object, expected: object) -> float:
  got, expected = jax.device_get((got, expected))
  errors = []
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    scale = np.linalg.norm(b)
    errors.append(np.linalg.norm(a - b) / scale if scale else np.linalg.norm(a))
  return float(np.max(errors))  # NaN, which no bound accepts, if any is


def value_and_grads(apply, problem: Problem):
  """Output, statistics and the gradients to x, gate and the weights."""

  def loss(x, gate, weights):
    y, stats = apply(x, problem.expert_index, gate, weights)
    return jnp.sum(y.astype(jnp.float32) * problem.cotangent.astype(jnp.float32)), (y, stats)

  args = problem.x, problem.gate, problem.weights
  with jax.set_mesh(problem.mesh):
    grad = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))
    (_, (y, stats)), grads = grad(*args)
  return y, stats, grads


def dense(problem: Problem):
  """The dense reference on one device."""
  local = jax.device_get(problem)
  y, _, grads = value_and_grads(
    lambda *args: (dense_moe(*args), None),
    dataclasses.replace(
      jax.tree.map(jnp.asarray, local),
      mesh=jax.make_mesh((1,), ("expert",), devices=jax.devices()[:1]),
    ),
  )
  return y, grads


jax.tree_util.register_dataclass(
  Problem,
  data_fields=["x", "expert_index", "gate", "weights", "cotangent"],
  meta_fields=["mesh"],
)


def stacked(apply, transform: str):
  """Applies a layer once, or a scan over two layers, or under ``jax.checkpoint``."""
  if transform == "checkpoint":
    return jax.checkpoint(apply)
  if transform == "jit":
    return apply

  def scanned(x, expert_index, gate, weights):
    def body(x, scale):
      y, stats = apply(x, expert_index, gate, jax.tree.map(lambda leaf: leaf * scale, weights))
      return x + y, stats

    return jax.lax.scan(body, x, jnp.arange(1.0, LAYERS + 1))

  return scanned


def test_covering_array_is_small_and_complete():
  seen = {frozenset(pair) for case in CASES for pair in itertools.combinations(case.items(), 2)}
  assert {frozenset(pair) for pair in PAIRS} <= seen
  for name, values in FACTORS.items():
    assert {case[name] for case in CASES} == set(values)
  assert len(CASES) < 40


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(v) for v in case.values()))
def test_equals_dense(case):
  mesh = make_mesh(case["ranks"], case["data"], case["mesh"])
  home = max(2, -(-case["top_k"] // case["ranks"]))
  problem = make_problem(
    mesh, home_experts=home, top_k=case["top_k"], load=case["load"], masked=case["masked"]
  )
  several = case["rounds"] == "several"
  config = uep.BalanceConfig(
    replica_slots=home if case["slots"] == "M" else int(case["slots"]),
    objective="balance",
    strategy=pile_up if several else "quota",
    capacity_factor=1.0 if several else float(case["ranks"]),
  )
  apply = layer(problem, config, check_vma=case["check_vma"])
  y, stats, grads = value_and_grads(stacked(apply, case["transform"]), problem)
  local = jax.tree.map(jnp.asarray, jax.device_get(problem))
  single = dataclasses.replace(local, mesh=make_mesh(1))
  expected_y, _, expected_grads = value_and_grads(
    stacked(lambda *args: (dense_moe(*args), None), case["transform"]), single
  )
  assert relative_error(y, expected_y) <= 1e-5
  assert relative_error(grads, expected_grads) <= 1e-5
  rounds = int(jnp.max(stats.rounds))
  assert rounds > 1 if several else rounds == 1
  if case["masked"]:
    assert int(jnp.sum(stats.masked)) > 0


CONFIG = uep.BalanceConfig(replica_slots=2, objective="balance")


@pytest.mark.parametrize("capacity_factor", [1.0, 4.0])
def test_bfloat16_is_as_close_as_its_rounding(capacity_factor):
  mesh = make_mesh(4)
  exact = make_problem(mesh, home_experts=4, top_k=4, tokens=32)
  low = dataclasses.replace(
    exact, x=exact.x.astype(jnp.bfloat16), cotangent=exact.cotangent.astype(jnp.bfloat16)
  )
  config = dataclasses.replace(CONFIG, capacity_factor=capacity_factor)
  y, _, (x_grad, gate_grad, weight_grads) = value_and_grads(layer(low, config), low)
  rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), low)
  expected_y, expected = dense(rounded)
  assert y.dtype == x_grad.dtype == jnp.bfloat16
  assert all(leaf.dtype == jnp.float32 for leaf in (gate_grad, *weight_grads))
  # One bf16 rounding is 2^-9 relative; a path through the layer has about five.
  assert relative_error(y, expected_y) < 1e-2
  assert relative_error((x_grad, gate_grad, weight_grads), expected) < 1e-2


def test_bfloat16_parameters_get_bfloat16_gradients():
  problem = make_problem(make_mesh(2), dtype=jnp.bfloat16)
  _, _, (_, _, weight_grads) = value_and_grads(layer(problem, CONFIG), problem)
  assert all(leaf.dtype == jnp.bfloat16 for leaf in weight_grads)


def test_an_activation_may_compute_in_float32():
  problem = make_problem(make_mesh(2), dtype=jnp.bfloat16)

  def silu(h):
    return jax.nn.silu(h.astype(jnp.float32))

  apply = layer(problem, CONFIG, activation=silu)
  y, _, (x_grad, _, _) = value_and_grads(apply, problem)
  assert y.dtype == x_grad.dtype == jnp.bfloat16


@pytest.mark.parametrize("differentiate", [True, False])
def test_an_activation_with_a_traced_parameter_is_refused(differentiate):
  problem = make_problem(make_mesh(2))

  def loss(beta, x):
    apply = layer(problem, CONFIG, activation=lambda h: h * jax.nn.sigmoid(beta * h))
    return jnp.sum(apply(x, problem.expert_index, problem.gate, problem.weights)[0])

  run = jax.grad(loss) if differentiate else loss
  with jax.set_mesh(problem.mesh), pytest.raises(ValueError, match=r"activation: .* closes over a"):
    jax.jit(run)(1.5, problem.x)


def test_rows_that_no_token_feeds_may_hold_nan(monkeypatch):
  problem = make_problem(make_mesh(4), masked=True)
  config = dataclasses.replace(CONFIG, capacity_factor=2.0)
  expected = value_and_grads(layer(problem, config), problem)
  plain, spread = BlockCrossing.dispatch, BlockCrossing.spread

  def poisoned(crossing, x_TD, dtype=None):
    fed_C = spread(crossing, jnp.ones(crossing.dest_TK.shape)) > 0
    return jnp.where(fed_C[:, None], plain(crossing, x_TD, dtype), jnp.nan)

  def poisoned_gate(crossing, value_TK):
    fed_C = spread(crossing, jnp.ones(crossing.dest_TK.shape)) > 0
    return jnp.where(fed_C, spread(crossing, value_TK), jnp.nan)

  monkeypatch.setattr(BlockCrossing, "dispatch", poisoned)
  monkeypatch.setattr(BlockCrossing, "spread", poisoned_gate)
  got = value_and_grads(layer(problem, config), problem)
  chex.assert_trees_all_close(got, expected, rtol=1e-5, atol=1e-6)


def test_nan_in_a_masked_token_stays_there():
  problem = make_problem(make_mesh(4))
  index = problem.expert_index.at[5].set(-1)
  clean = dataclasses.replace(problem, expert_index=index)
  dirty = dataclasses.replace(clean, x=problem.x.at[5].set(jnp.nan))
  chex.assert_trees_all_equal(
    value_and_grads(layer(dirty, CONFIG), dirty), value_and_grads(layer(clean, CONFIG), clean)
  )


def test_same_bits_every_run():
  problem = make_problem(make_mesh(8), top_k=4, load="skewed")
  apply = layer(problem, CONFIG)
  first = value_and_grads(apply, problem)
  jax.clear_caches()
  chex.assert_trees_all_equal(value_and_grads(apply, problem), first)


def primitives(closed_jaxpr: object) -> str:
  return str(closed_jaxpr)


def test_strategy_none_is_the_layer_without_slots():
  problem = make_problem(make_mesh(4))
  none = dataclasses.replace(CONFIG, strategy="none")
  empty = dataclasses.replace(CONFIG, replica_slots=0)
  got = value_and_grads(layer(problem, none), problem)
  expected = value_and_grads(layer(problem, empty), problem)
  chex.assert_trees_all_close(got, expected, rtol=1e-5, atol=1e-6)
  assert int(got[1].replicas[0]) == 0
  args = problem.x, problem.expert_index, problem.gate, problem.weights
  with jax.set_mesh(problem.mesh):
    text = primitives(jax.make_jaxpr(layer(problem, none))(*args))
    balanced = primitives(jax.make_jaxpr(layer(problem, CONFIG))(*args))
  assert "ppermute" not in text and "ppermute" in balanced


def test_no_residual_holds_replica_weights():
  slots = 3
  problem = make_problem(make_mesh(4))
  config = dataclasses.replace(CONFIG, replica_slots=slots)
  with jax.set_mesh(problem.mesh):
    _, vjp = jax.vjp(
      lambda x, weights: layer(problem, config)(x, problem.expert_index, problem.gate, weights)[0],
      problem.x,
      problem.weights,
    )
  shapes = [leaf.shape for leaf in jax.tree.leaves(vjp)]
  matrices = {(WIDTH, INNER), (INNER, WIDTH)}
  held = [shape for shape in shapes if shape[-2:] in matrices and len(shape) == 3]
  assert held, "the parameters are residuals"
  assert all(shape[0] == 8 for shape in held), held  # E: the parameters and nothing else


def test_changing_loads_do_not_recompile():
  mesh = make_mesh(4)
  problems = [
    make_problem(mesh, load=load, seed=seed)
    for seed, load in enumerate(("skewed", "balanced", "all-to-one", "skewed"))
  ]
  apply = layer(problems[0], CONFIG)

  @jax.jit
  @chex.assert_max_traces(n=1)
  def loss(x, expert_index, gate, weights):
    return jnp.sum(apply(x, expert_index, gate, weights)[0])

  with jax.set_mesh(mesh):
    for problem in problems:
      loss(problem.x, problem.expert_index, problem.gate, problem.weights)
  assert loss._cache_size() == 1


def count(text: str, primitive: str) -> int:
  return len(re.findall(rf"= {primitive}\w*\[", text))


def test_saved_names_spare_backward_the_second_dispatch():
  problem = make_problem(make_mesh(4))
  config = dataclasses.replace(CONFIG, capacity_factor=4.0)

  def exchanges(policy):
    apply = jax.checkpoint(layer(problem, config), policy=policy)

    def loss(x, gate, weights):
      return jnp.sum(apply(x, problem.expert_index, gate, weights)[0])

    with jax.set_mesh(problem.mesh):
      jaxpr = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(
        problem.x, problem.gate, problem.weights
      )
    text = str(jaxpr)
    return [count(text, name) for name in ("all_to_all", "all_gather", "ppermute", "dot_general")]

  policies = jax.checkpoint_policies
  nothing = exchanges(policies.nothing_saveable)
  named = exchanges(policies.save_only_these_names(*uep.REMAT_NAMES))
  everything = exchanges(policies.everything_saveable)
  assert named == everything
  assert all(many > few for many, few in zip(nothing, named, strict=True)), (nothing, named)


def test_invalid_index_is_masked_and_counted_under_jit():
  problem = make_problem(make_mesh(2))
  wrong = problem.expert_index.at[0, 0].set(99).at[3, 1].set(-7)
  right = problem.expert_index.at[0, 0].set(-1).at[3, 1].set(-1)
  apply = jax.jit(layer(problem, CONFIG))
  with jax.set_mesh(problem.mesh):
    y, stats = apply(problem.x, wrong, problem.gate, problem.weights)
    expected, _ = apply(problem.x, right, problem.gate, problem.weights)
  chex.assert_trees_all_equal(y, expected)
  assert int(stats.invalid[0]) == 2 and int(stats.masked[0]) == 0


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.int8, jnp.int16, jnp.uint32])
def test_every_integer_dtype_of_indices(dtype):
  problem = make_problem(make_mesh(2), home_experts=64)  # 128 experts: no int8
  problem = dataclasses.replace(problem, expert_index=problem.expert_index % 100)
  apply = jax.jit(layer(problem, CONFIG))
  invalid = problem.expert_index.at[0, 0].set(127 if dtype == jnp.int8 else 200)
  masked = problem.expert_index.at[0, 0].set(-1)
  with jax.set_mesh(problem.mesh):
    y, stats = apply(problem.x, problem.expert_index.astype(dtype), problem.gate, problem.weights)
    expected, _ = apply(problem.x, problem.expert_index, problem.gate, problem.weights)
    chex.assert_trees_all_equal(y, expected)
    assert int(stats.invalid[0]) == 0
    if dtype != jnp.int8:
      y, stats = apply(problem.x, invalid.astype(dtype), problem.gate, problem.weights)
      expected, _ = apply(problem.x, masked, problem.gate, problem.weights)
      chex.assert_trees_all_equal(y, expected)
      assert int(stats.invalid[0]) == 1


def test_several_rounds_of_several_steps_that_differ_between_groups():
  """One group of tokens is balanced, the other all for one expert; home placement, K = 1."""
  mesh = make_mesh(4, 2)
  problem = make_problem(mesh, top_k=1, tokens=16)
  index = np.arange(16 * 8, dtype=np.int32)[:, None] % 8
  index[16 * 4 :] = 3
  index = jax.device_put(jnp.asarray(index), problem.expert_index.sharding)
  problem = dataclasses.replace(problem, expert_index=index)
  config = dataclasses.replace(CONFIG, strategy="none", capacity_factor=1.0)
  y, stats, grads = value_and_grads(layer(problem, config), problem)
  expected_y, expected_grads = dense(problem)
  assert relative_error(y, expected_y) <= 1e-5
  assert relative_error(grads, expected_grads) <= 1e-5
  assert stats.rounds.tolist() == [4, 4]
  assert stats.load_after_G[0].max() == 16 and stats.load_after_G[1].max() == 64


def test_batch_invariant_equals_dense_in_several_rounds():
  problem = make_problem(make_mesh(4, 2), top_k=4, masked=True)
  config = dataclasses.replace(CONFIG, batch_invariant=True, strategy=pile_up, capacity_factor=1.0)
  y, stats, grads = value_and_grads(layer(problem, config), problem)
  expected_y, expected_grads = dense(problem)
  assert relative_error(y, expected_y) <= 1e-5
  assert relative_error(grads, expected_grads) <= 1e-5
  assert int(jnp.max(stats.rounds)) > 1


def test_batch_invariant_tokens_do_not_feel_the_rest_of_the_batch():
  """The second half of each rank's tokens changes its choices, and with them the plan."""
  problem = make_problem(make_mesh(4), home_experts=4, top_k=8, tokens=32, width=64)
  kept = np.arange(problem.x.shape[0]) % 32 < 16
  others = np.broadcast_to(np.arange(8, 16, dtype=np.int32), problem.expert_index.shape)
  changed = jnp.where(kept[:, None], problem.expert_index, others)
  with jax.set_mesh(problem.mesh):
    for invariant in (True, False):
      config = dataclasses.replace(CONFIG, batch_invariant=invariant)
      apply = jax.jit(layer(problem, config))
      outputs = []
      for index in (problem.expert_index, changed):
        index = jax.device_put(index, problem.expert_index.sharding)
        y, stats = apply(problem.x, index, problem.gate, problem.weights)
        outputs.append((y[kept], stats.replica_expert_GS))
      (y, plan), (other_y, other_plan) = jax.device_get(outputs)
      assert (plan != other_plan).any()
      assert (y == other_y).all() == invariant


def test_low_precision_gates_get_gradients_of_their_dtype():
  problem = make_problem(make_mesh(2))
  low = dataclasses.replace(problem, gate=problem.gate.astype(jnp.bfloat16))
  _, _, (_, gate_grad, _) = value_and_grads(layer(low, CONFIG), low)
  exact = dataclasses.replace(problem, gate=low.gate.astype(jnp.float32))
  _, (_, expected, _) = dense(exact)
  assert gate_grad.dtype == jnp.bfloat16
  assert relative_error(gate_grad, expected) < 5e-3


def test_vmap_over_layers():
  problem = make_problem(make_mesh(4))
  twice = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf[::-1]]), (problem.x, problem.gate))

  def apply(x, gate):
    return uep.sharded_moe(x, problem.expert_index, gate, problem.weights, config=CONFIG)[0]

  with jax.set_mesh(problem.mesh):
    y = jax.jit(jax.vmap(apply))(*twice)
    for i in range(2):
      expected = jax.jit(apply)(twice[0][i], twice[1][i])
      assert relative_error(y[i], expected) <= 1e-6


def test_a_token_may_choose_an_expert_twice():
  problem = make_problem(make_mesh(4))
  index = problem.expert_index.at[:, 1].set(problem.expert_index[:, 0])
  problem = dataclasses.replace(problem, expert_index=index)
  y, _, grads = value_and_grads(layer(problem, CONFIG), problem)
  expected_y, expected_grads = dense(problem)
  assert relative_error(y, expected_y) <= 1e-5
  assert relative_error(grads, expected_grads) <= 1e-5


def test_domains_keep_replicas_inside():
  problem = make_problem(make_mesh(8), home_experts=2)
  config = dataclasses.replace(CONFIG, domain_size=4)
  y, stats, grads = value_and_grads(layer(problem, config), problem)
  expected_y, expected_grads = dense(problem)
  assert relative_error(y, expected_y) <= 1e-5
  assert relative_error(grads, expected_grads) <= 1e-5
  after = np.asarray(stats.load_after_G[0])
  before = np.asarray(stats.load_before_G[0])
  assert [after[:4].sum(), after[4:].sum()] == [before[:4].sum(), before[4:].sum()]
  assert int(stats.load_floor[0]) <= after.max() <= before.max()


def test_exchanges_wait_for_loops_of_others():
  """XLA:CPU would run them side by side, in another order on each rank."""
  problem = make_problem(make_mesh(4), tokens=32)
  run = layer(problem, uep.BalanceConfig(replica_slots=1, capacity_factor=1.0, strategy=pile_up))

  @jax.checkpoint
  def outputs(*args):
    return run(*args)[0]

  def loss(x, gate, weights):
    return jnp.sum(outputs(x, problem.expert_index, gate, weights) * problem.cotangent)

  args = problem.x, problem.gate, problem.weights
  with jax.set_mesh(problem.mesh):
    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*args).compile()
  text = compiled.as_text()
  for opcode in ("all-to-all", "collective-permute"):
    assert text.count(f" {opcode}(") > 8
    assert not list(unordered_loops(text, opcode))


def test_home_rows_are_those_that_need_no_copies():
  quota_EG = jnp.array([[5, 1, 0], [0, 2, 7], [3, 9, 0], [0, 4, 0], [1, 0, 6], [0, 8, 2]])
  assert home_rows(quota_EG).tolist() == [5, 13, 8]
