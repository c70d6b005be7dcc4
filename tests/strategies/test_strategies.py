"""The balancers behind one signature."""

import warnings
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ultraep_jax import strategies
from ultraep_jax.config import BalanceConfig, StrategyName
from ultraep_jax.planning.plan import plan_quotas
from ultraep_jax.types import Plan

CONFIG = BalanceConfig(replica_slots=2, objective="balance")
LOAD_GE = np.array([[9, 1, 0, 2], [5, 5, 0, 0]], np.int32)


def own_planner(load_GE, config, cost):
  del config, cost
  return strategies.resolve("none").plan(load_GE, CONFIG, None)


class TestResolve:
  def test_names(self):
    for name in get_args(StrategyName):
      assert strategies.resolve(name).name == name
    assert strategies.resolve("quota").reassign is None

  def test_planner_and_strategy(self):
    made = strategies.resolve(own_planner)
    assert made == strategies.Strategy("own_planner", own_planner, None)
    assert strategies.resolve(made) is made
    assert BalanceConfig(strategy=made).strategy is made

  def test_unknown(self):
    with pytest.raises(ValueError, match=r"strategy: expected one of .*got 'eplb'"):
      strategies.resolve("eplb")
    with pytest.raises(TypeError, match=r"strategy: expected .*got int"):
      strategies.resolve(3)


def test_quota_is_the_planner():
  assert strategies.resolve("quota").plan is plan_quotas


def test_none_leaves_all_at_home():
  plan = jax.jit(lambda load_GE: strategies.resolve("none").plan(load_GE, CONFIG, None))(LOAD_GE)
  assert isinstance(plan, Plan)
  assert plan.replica_expert.shape == plan.parent.shape == (2, 0)
  assert plan.quota.tolist() == [[14, 0], [6, 0], [0, 0], [0, 2]]
  assert {leaf.dtype for leaf in plan} == {jnp.int32.dtype}


def test_none_checks_the_load():
  with pytest.raises(ValueError, match="multiple of G"):
    strategies.resolve("none").plan(np.zeros((2, 3), np.int32), CONFIG, None)


def reassigned(index_NTK, experts):
  """All ranks' choices after ``ideal``, and the load of each rank."""
  ranks = len(index_NTK)
  reassign = strategies.resolve("ideal").reassign
  assert reassign is not None
  with pytest.warns(UserWarning, match="wrong on purpose"):
    result = np.stack([
      reassign(jnp.asarray(index_TK), jnp.int32(rank), experts, ranks)
      for rank, index_TK in enumerate(index_NTK)
    ])  # fmt: skip
  valid = result[(result >= 0) & (result < experts)]
  return result, np.bincount(valid // (experts // ranks), minlength=ranks)


class TestIdeal:
  @pytest.mark.parametrize(
    "ranks, experts, tokens, top_k", [(4, 8, 16, 3), (4, 16, 5, 16), (3, 6, 7, 1), (1, 4, 9, 2)]
  )
  def test_equal_loads_and_distinct_experts(self, ranks, experts, tokens, top_k):
    index_NTK = np.zeros((ranks, tokens, top_k), np.int32)
    result, load_G = reassigned(index_NTK, experts)
    assert load_G.max() - load_G.min() <= 1
    assert load_G.sum() == index_NTK.size
    ordered = np.sort(result, axis=-1)
    assert (ordered[..., 1:] != ordered[..., :-1]).all()
    assert result.min() >= 0 and result.max() < experts

  def test_masked_and_invalid_stay(self):
    rng = np.random.default_rng(0)
    index_NTK = rng.integers(-3, 11, (4, 50, 3)).astype(np.int32)
    result, load_G = reassigned(index_NTK, 8)
    outside = (index_NTK < 0) | (index_NTK >= 8)
    np.testing.assert_array_equal(result[outside], index_NTK[outside])
    assert ((result >= 0) & (result < 8))[~outside].all()
    assert load_G.max() - load_G.min() <= 4
    for token in result.reshape(-1, 3):
      chosen = token[(token >= 0) & (token < 8)]
      assert len(set(chosen)) == len(chosen)

  def test_warns_at_trace_time_only(self):
    reassign = strategies.resolve("ideal").reassign
    assert reassign is not None
    jitted = jax.jit(lambda index_TK: reassign(index_TK, 0, 4, 2))
    with pytest.warns(UserWarning, match="measuring"):
      jitted(jnp.zeros((3, 2), jnp.int32))
    with warnings.catch_warnings():
      warnings.simplefilter("error")
      jitted(jnp.ones((3, 2), jnp.int32))

  def test_more_choices_than_experts(self):
    reassign = strategies.resolve("ideal").reassign
    assert reassign is not None
    with pytest.raises(ValueError, match="K of at most E=2, got 3"):
      reassign(jnp.zeros((1, 3), jnp.int32), 0, 2, 2)
