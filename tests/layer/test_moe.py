"""The layer equals a dense MoE, forward and every gradient, in every combination of settings."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import covering_array
from jax.sharding import AxisType
from layer_problems import (
  EXPERTS,
  QUICK,
  dense,
  layer,
  make_mesh,
  make_problem,
  output,
  pile_up,
  relative_error,
  repeated,
  value_and_grads,
)

import ultraep_jax as uep
from ultraep_jax.moe import home_rows

CONFIG = uep.BalanceConfig(replica_slots=2, objective="balance", capacity_factor=1.25)

# What a program depends on. Each runs with all loads, with and without masked choices.
FACTORS = {
  "ranks": (1, 2, 4, 8),
  "slots": ("0", "1", "M"),  # other tests have several, but fewer than M
  "top_k": (1, 2, 8),
  "rounds": ("one", "several"),
  "strategy": ("quota", pile_up),
  "data": (1, 2),
  "check_vma": (False, True),
  "mesh": (AxisType.Auto, AxisType.Explicit),
  "transform": ("jit", "scan", "checkpoint"),
}
DATA = list(itertools.product(("balanced", "skewed", "all-to-one"), (False, True)))


def possible(case: dict) -> bool:
  if case["ranks"] * case["data"] > 8:
    return False  # eight virtual devices
  if case["ranks"] == 1:  # always holds its own assignments, and has none to copy from
    return case["rounds"] == "one" and case["slots"] == "1"
  return case["rounds"] == "one" or case["strategy"] == pile_up


CASES, PAIRS = covering_array(FACTORS, possible)


def test_covering_array_is_small_and_complete():
  seen = {frozenset(pair) for case in CASES for pair in itertools.combinations(case.items(), 2)}
  assert {frozenset(pair) for pair in PAIRS} <= seen
  for name, values in FACTORS.items():
    assert {case[name] for case in CASES} == set(values)
  assert len(CASES) < 20


def assert_equals_dense(problem, apply, layers=None):
  """Returns the statistics."""
  y, stats, grads = value_and_grads(apply, problem)
  expected_y, expected_grads = dense(problem, layers)
  assert relative_error(y, expected_y) <= 1e-5
  assert relative_error(grads, expected_grads) <= 1e-5
  return stats


def name(case: dict) -> str:
  return "-".join(getattr(value, "__name__", str(value)) for value in case.values())


@pytest.mark.parametrize("case", CASES, ids=name)
def test_equals_dense(case):
  mesh = make_mesh(case["ranks"], case["data"], case["mesh"])
  several = case["rounds"] == "several"
  home = EXPERTS // case["ranks"]
  config = uep.BalanceConfig(
    replica_slots=home if case["slots"] == "M" else int(case["slots"]),
    objective="balance",
    strategy=case["strategy"],
    capacity_factor=1.0 if several else float(case["ranks"]),
  )
  layers = 2 if case["transform"] == "scan" else None
  apply = None
  for load, masked in DATA:
    problem = make_problem(mesh, top_k=case["top_k"], load=load, masked=masked)
    if apply is None:
      apply = layer(problem, config, check_vma=case["check_vma"])
      apply = repeated(apply, layers) if layers else apply
      apply = jax.checkpoint(apply) if case["transform"] == "checkpoint" else apply
    stats = assert_equals_dense(problem, apply, layers)
    assert (int(jnp.sum(stats.masked)) > 0) == masked
    if not several or load == "all-to-one":  # others may fit into one round
      assert (int(jnp.max(stats.rounds)) > 1) == several


def test_several_rounds_of_several_steps_that_differ_between_groups():
  """One group of tokens is balanced, the other all for one expert; home placement, K = 1."""
  mesh = make_mesh(4, 2)
  problem = make_problem(mesh, top_k=1, tokens=128)
  index = np.arange(128, dtype=np.int32)[:, None] % EXPERTS
  index[64:] = 3
  index = jax.device_put(jnp.asarray(index), problem.expert_index.sharding)
  problem = dataclasses.replace(problem, expert_index=index)
  config = dataclasses.replace(CONFIG, strategy="none", capacity_factor=1.0)
  stats = assert_equals_dense(problem, layer(problem, config))
  assert stats.rounds.tolist() == [4, 4]
  assert stats.load_after_G[0].max() == 16 and stats.load_after_G[1].max() == 64


def test_batch_invariant_equals_dense_in_several_rounds():
  problem = make_problem(make_mesh(4, 2), top_k=4, masked=True)
  config = dataclasses.replace(CONFIG, batch_invariant=True, strategy=pile_up, capacity_factor=1.0)
  stats = assert_equals_dense(problem, layer(problem, config))
  assert int(jnp.max(stats.rounds)) > 1


def test_a_token_may_choose_an_expert_twice():
  problem = make_problem(make_mesh(4))
  index = problem.expert_index.at[:, 1].set(problem.expert_index[:, 0])
  problem = dataclasses.replace(problem, expert_index=index)
  assert_equals_dense(problem, layer(problem, QUICK))


def test_domains_keep_replicas_inside():
  problem = make_problem(make_mesh(8))
  config = dataclasses.replace(CONFIG, domain_size=4, capacity_factor=8.0)
  stats = assert_equals_dense(problem, layer(problem, config))
  after = np.asarray(stats.load_after_G[0])
  before = np.asarray(stats.load_before_G[0])
  assert [after[:4].sum(), after[4:].sum()] == [before[:4].sum(), before[4:].sum()]
  assert int(stats.load_floor[0]) <= after.max() <= before.max()


def test_strategy_none_is_the_layer_without_slots():
  problem = make_problem(make_mesh(4))
  none = dataclasses.replace(QUICK, strategy="none")
  empty = dataclasses.replace(QUICK, strategy="quota", replica_slots=0)
  y, stats = output(layer(problem, none), problem)
  assert relative_error(y, output(layer(problem, empty), problem)[0]) <= 1e-5
  assert int(stats.replicas[0]) == 0
  args = problem.x, problem.expert_index, problem.gate, problem.weights
  with jax.set_mesh(problem.mesh):
    text = str(jax.make_jaxpr(layer(problem, none))(*args))
    balanced = str(jax.make_jaxpr(layer(problem, QUICK))(*args))
  assert "ppermute" not in text and "ppermute" in balanced


@pytest.mark.parametrize("groups", [1, 2])
def test_vmap_over_layers(groups):
  """Their loads differ, and so do their plans; with groups of tokens, in each group."""
  problem = make_problem(make_mesh(4, groups))
  each = problem.x, problem.expert_index, problem.gate
  twice = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf[::-1] // 2]), each)
  config = uep.BalanceConfig(replica_slots=1, objective="time")

  def apply(x, expert_index, gate):
    def loss(x):
      y, _ = uep.sharded_moe(x, expert_index, gate, problem.weights, config=config)
      return jnp.sum(jnp.sin(y)), y

    grad, y = jax.grad(loss, has_aux=True)(x)
    return y, grad

  with jax.set_mesh(problem.mesh):
    found = jax.jit(jax.vmap(apply))(*twice)
    one = jax.jit(apply)
    for i in range(2):
      expected = one(*(leaf[i] for leaf in twice))
      assert relative_error(tuple(leaf[i] for leaf in found), expected) <= 1e-6


def test_home_rows_are_those_that_need_no_copies():
  quota_EG = jnp.array([[5, 1, 0], [0, 2, 7], [3, 9, 0], [0, 4, 0], [1, 0, 6], [0, 8, 2]])
  assert home_rows(quota_EG).tolist() == [5, 13, 8]
