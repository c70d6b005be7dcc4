"""LPLB's split: exactly the optimum of the linear programme, rounded up."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import linprog

from ultraep_jax.config import BalanceConfig
from ultraep_jax.strategies import eplb, lplb, placement
from ultraep_jax.testing import assert_legal_plan, zipf_loads


def optimum(load_E, replica_GS):
  """The lowest maximum load of fractional splits, by HiGHS."""
  ranks, per_rank = len(replica_GS), len(load_E) // len(replica_GS)
  copies = [(e, e // per_rank) for e in range(len(load_E))]
  copies += [(int(e), rank) for (rank, _), e in np.ndenumerate(replica_GS) if e >= 0]
  at_most, exactly = np.zeros((ranks, len(copies) + 1)), np.zeros((len(load_E), len(copies) + 1))
  at_most[:, -1] = -1
  for column, (expert, rank) in enumerate(copies):
    at_most[rank, column] = exactly[expert, column] = 1
  cost = np.zeros(len(copies) + 1)
  cost[-1] = 1
  return linprog(cost, at_most, np.zeros(ranks), exactly, load_E).fun


def busiest(load_E, replica_GS, tokens_GS):
  per_rank = len(load_E) // len(replica_GS)
  after = load_E.reshape(-1, per_rank).sum(axis=1) + tokens_GS.sum(axis=1)
  for place, tokens in np.ndenumerate(tokens_GS):
    if tokens:
      after[replica_GS[place] // per_rank] -= tokens
  return after.max()


@pytest.mark.parametrize("ranks, experts, slots", [(4, 8, 1), (8, 32, 2), (12, 24, 3)])
def test_split_is_the_optimum_rounded_up(ranks, experts, slots):
  split = jax.jit(lambda load_E, replica_GS: lplb.split(load_E, replica_GS, domain_size=ranks))
  rng = np.random.default_rng(0)
  better = 0
  for seed in range(20):
    old, new = (zipf_loads(s, experts, ranks, 256, 2, 1.9) for s in (seed, seed + seed % 3))
    replica_GS = placement.place_replicas(
      jnp.asarray(old.sum(axis=0), jnp.float32),
      num_ranks=ranks,
      num_slots=slots,
      domain_size=ranks,
      max_copies=int(rng.integers(2, ranks + 1)),
    )
    load_E = new.sum(axis=0).astype(np.int32)
    tokens_GS = np.asarray(split(jnp.asarray(load_E), replica_GS))
    replica_GS = np.asarray(replica_GS)
    assert tokens_GS.min() >= 0 and (tokens_GS[replica_GS < 0] == 0).all()
    after = busiest(load_E, replica_GS, tokens_GS)
    assert after == np.ceil(optimum(load_E, replica_GS) - 1e-6)
    better += after < load_E.reshape(ranks, -1).sum(axis=1).max()
  assert better > 10


def test_load_moves_through_a_rank_that_is_between():
  """Rank 0 cannot reach rank 2, but rank 1 can give what it takes."""
  load_E = np.asarray([90, 30, 0], np.int32)
  replica_GS = np.asarray([[-1], [0], [1]], np.int32)
  tokens_GS = lplb.split(jnp.asarray(load_E), jnp.asarray(replica_GS), domain_size=3)
  assert tokens_GS.tolist() == [[0], [45], [30]]
  assert busiest(load_E, replica_GS, np.asarray(tokens_GS)) == 45


def test_domains_are_split_apart():
  load_E = jnp.asarray([100, 0, 8, 0], jnp.int32)
  replica_GS = jnp.asarray([[-1], [0], [-1], [2]], jnp.int32)
  assert lplb.split(load_E, replica_GS, domain_size=2).tolist() == [[0], [50], [0], [4]]


def test_no_load_and_no_slots():
  assert lplb.split(jnp.zeros(4, jnp.int32), jnp.full((2, 1), -1), domain_size=2).tolist() == [
    [0],
    [0],
  ]
  empty_GS = jnp.zeros((2, 0), jnp.int32)
  assert lplb.split(jnp.asarray([5, 1, 0, 0]), empty_GS, domain_size=2).shape == (2, 0)


def test_plan_is_legal_and_no_worse_than_equal_shares():
  config = BalanceConfig(replica_slots=2, domain_size=8)
  old, new = (zipf_loads(seed, 32, 16, 512, 4, 2.0) for seed in (0, 1))
  past = jnp.asarray(old.sum(axis=0))
  state = lplb.update(lplb.init(32, 16, config), past, config, period=1)
  counts = np.unique(np.asarray(state.replica_expert), return_counts=True)
  assert counts[1][counts[0] >= 0].max() == 1  # one replica at most of an expert
  plans = [module.planner(state)(jnp.asarray(new), config) for module in (lplb, eplb)]
  for plan in plans:
    assert_legal_plan(plan, new, config)
  loads = [np.asarray(plan.quota).sum(axis=0).reshape(2, 8).max(axis=1) for plan in plans]
  assert (loads[0] <= loads[1]).all()
