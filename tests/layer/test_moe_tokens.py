"""Tokens of the layer that are masked, invalid or not numbers, and what others feel of them."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layer_problems import (
  QUICK,
  layer,
  make_mesh,
  make_problem,
  new_layer,
  output,
  value_and_grads,
)

import ultraep_jax as uep
from ultraep_jax.transport.block_exchange import BlockCrossing

pytestmark = pytest.mark.usefixtures("optimized")

CONFIG = uep.BalanceConfig(replica_slots=2, objective="balance", capacity_factor=1.25)
EXACT = dataclasses.replace(QUICK, strategy="exact")  # the plan depends on the loads


def test_rows_that_no_token_feeds_may_hold_nan(monkeypatch):
  problem = make_problem(make_mesh(4), masked=True)
  expected = value_and_grads(layer(problem, QUICK), problem)
  plain, spread = BlockCrossing.dispatch, BlockCrossing.spread

  def poisoned(crossing, x_TD, dtype=None):
    fed_C = spread(crossing, jnp.ones(crossing.dest_TK.shape)) > 0
    return jnp.where(fed_C[:, None], plain(crossing, x_TD, dtype), jnp.nan)

  def poisoned_gate(crossing, value_TK):
    fed_C = spread(crossing, jnp.ones(crossing.dest_TK.shape)) > 0
    return jnp.where(fed_C, spread(crossing, value_TK), jnp.nan)

  monkeypatch.setattr(BlockCrossing, "dispatch", poisoned)
  monkeypatch.setattr(BlockCrossing, "spread", poisoned_gate)
  traced_anew = new_layer.__wrapped__(problem.mesh, QUICK, check_vma=True)
  got = value_and_grads(traced_anew, problem)
  chex.assert_trees_all_close(got, expected, rtol=1e-5, atol=1e-6)


def test_nan_in_a_masked_token_stays_there():
  problem = make_problem(make_mesh(4))
  index = problem.expert_index.at[5].set(-1)
  clean = dataclasses.replace(problem, expert_index=index)
  dirty = dataclasses.replace(clean, x=problem.x.at[5].set(jnp.nan))
  chex.assert_trees_all_equal(
    value_and_grads(layer(dirty, QUICK), dirty), value_and_grads(layer(clean, QUICK), clean)
  )


def test_same_bits_every_run():
  problem = make_problem(make_mesh(4))
  apply = layer(problem, QUICK)
  first = value_and_grads(apply, problem)
  jax.clear_caches()
  chex.assert_trees_all_equal(value_and_grads(apply, problem), first)


def test_invalid_index_is_masked_and_counted_under_jit():
  problem = make_problem(make_mesh(4))
  wrong = problem.expert_index.at[0, 0].set(99).at[3, 1].set(-7)
  right = problem.expert_index.at[0, 0].set(-1).at[3, 1].set(-1)
  y, stats = output(layer(problem, QUICK), dataclasses.replace(problem, expert_index=wrong))
  expected, _ = output(layer(problem, QUICK), dataclasses.replace(problem, expert_index=right))
  chex.assert_trees_all_equal(y, expected)
  assert int(stats.invalid[0]) == 2 and int(stats.masked[0]) == 0


def test_changing_loads_do_not_recompile():
  mesh = make_mesh(4)
  problems = [
    make_problem(mesh, load=load, seed=seed)
    for seed, load in enumerate(("skewed", "balanced", "all-to-one", "skewed"))
  ]
  apply = layer(problems[0], CONFIG)
  run = jax.jit(chex.assert_max_traces(lambda *args: apply(*args), n=1))
  with jax.set_mesh(mesh):
    for problem in problems:
      run(problem.x, problem.expert_index, problem.gate, problem.weights)
  assert run._cache_size() == 1


def test_batch_invariant_tokens_do_not_feel_the_rest_of_the_batch():
  """The second half of each rank's tokens changes its choices, and with them the plan."""
  problem = make_problem(make_mesh(4), top_k=4, experts=8, tokens=128, width=64)
  kept = np.arange(problem.x.shape[0]) % 32 < 16
  others = np.broadcast_to(np.arange(4, 8, dtype=np.int32), problem.expert_index.shape)
  changed = jnp.where(kept[:, None], problem.expert_index, others)
  changed = jax.device_put(changed, problem.expert_index.sharding)
  for invariant in (True, False):
    apply = layer(problem, dataclasses.replace(EXACT, batch_invariant=invariant))
    outputs = []
    for index in (problem.expert_index, changed):
      y, stats = output(apply, dataclasses.replace(problem, expert_index=index))
      outputs.append((y[kept], stats.replica_expert_GS))
    (y, plan), (other_y, other_plan) = jax.device_get(outputs)
    assert (plan != other_plan).any()
    assert (y == other_y).all() == invariant
