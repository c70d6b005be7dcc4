"""What tests of planners share: configurations, loads, what plans say and promise."""

import jax
import numpy as np

from ultraep_jax.config import BalanceConfig


def make_config(slots, **options):
  defaults = {"replica_slots": slots, "objective": "balance", "transfer": "direct"}
  return BalanceConfig(**{**defaults, **options})


def load_matrix(load_E, ranks):
  """A matrix with these loads per expert, spread over the sources."""
  share = np.asarray(load_E) // ranks
  matrix = np.tile(share, (ranks, 1))
  matrix[0] += np.asarray(load_E) - share * ranks
  return matrix.astype(np.int32)


def skewed_loads(count, experts, total, seed, max_skew=6.0):
  """``[count, experts]``: power laws of many exponents, at shuffled places."""
  rng = np.random.default_rng(seed)
  weights = (np.arange(experts) + 1.0)[None] ** -rng.uniform(0, max_skew, (count, 1))
  weights = rng.permuted(weights, axis=1) * rng.uniform(0.5, 1.5, (count, experts))
  return np.floor(weights / weights.sum(1, keepdims=True) * total).astype(np.int32)


def planned(plan):
  return jax.tree.map(np.asarray, plan)


def busiest(plan):
  return planned(plan).quota.astype(np.int64).sum(-2).max(-1)


def busiest_sender(plan):
  parent = planned(plan).parent
  return int(np.bincount(parent[parent >= 0], minlength=1).max())


def replicas(plan):
  return (planned(plan).replica_expert >= 0).sum((-1, -2))


def check_legal(load_E, plan, config):
  """Everything that a plan promises whatever the objective."""
  replica_expert, quota, parent = planned(plan)
  experts, ranks = quota.shape
  slots, per_rank = config.replica_slots, experts // ranks
  domain = config.domain_of(ranks)
  assert replica_expert.shape == parent.shape == (ranks, slots)
  assert replica_expert.dtype == quota.dtype == parent.dtype == np.int32
  np.testing.assert_array_equal(quota.astype(np.int64).sum(1), load_E)
  assert quota.min() >= 0
  filled = replica_expert >= 0
  assert (replica_expert[~filled] == -1).all() and (replica_expert < experts).all()
  assert (filled[:, 1:] <= filled[:, :-1]).all(), "slots are filled from the first up"
  allowed = np.repeat(np.eye(ranks, dtype=bool), per_rank, axis=0)
  for rank in range(ranks):
    held = replica_expert[rank][filled[rank]]
    assert len(set(held)) == len(held), "one copy of an expert per rank"
    assert (held // per_rank != rank).all(), "no copy at home"
    assert (held // per_rank // domain == rank // domain).all(), "copies stay in the domain"
    assert (quota[held, rank] >= config.min_tokens_per_replica).all()
    allowed[held, rank] = True
  assert (quota[~allowed] == 0).all()
  assert ((parent >= 0) == filled).all()
  for rank, slot in zip(*np.nonzero(filled), strict=True):
    sender, expert = parent[rank, slot], replica_expert[rank, slot]
    assert sender != rank
    assert sender == expert // per_rank or expert in replica_expert[sender]
