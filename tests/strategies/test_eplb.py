"""EPLB: the published algorithm against a plain one, replicas in slots, and the history."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ultraep_jax import strategies
from ultraep_jax.config import BalanceConfig
from ultraep_jax.strategies import eplb, placement
from ultraep_jax.testing import assert_legal_plan, zipf_loads

CONFIG = BalanceConfig(replica_slots=2)


def plain_rebalance(load_E, ranks, slots, groups=1, nodes=1):
  """Groups to nodes, copies to the heaviest share, copies to ranks, one by one in Python."""

  def pack(weights, packs):
    size, load, items = len(weights) // packs, [0.0] * packs, [[] for _ in range(packs)]
    for item in np.argsort(-weights, kind="stable"):
      lightest = min((p for p in range(packs) if len(items[p]) < size), key=lambda p: load[p])
      items[lightest].append(int(item))
      load[lightest] = np.float32(load[lightest] + weights[item])
    return items

  load_E = np.asarray(load_E, np.float32)
  by_group = np.arange(len(load_E)).reshape(groups, -1)
  result = []
  for node in pack(load_E.reshape(groups, -1).sum(axis=1), nodes):
    experts = by_group[sorted(node)].reshape(-1)
    count = np.ones(len(experts), np.int32)
    for _ in range(ranks // nodes * slots - len(experts)):
      count[np.argmax(load_E[experts] / count.astype(np.float32))] += 1
    copies = np.repeat(np.arange(len(experts)), count)
    weights = load_E[experts][copies] / count[copies].astype(np.float32)
    result += [
      [int(experts[copies[i]]) for i in sorted(rank)] for rank in pack(weights, ranks // nodes)
    ]
  return result


@pytest.mark.parametrize(
  "experts, ranks, slots, groups, nodes",
  [(8, 4, 3, 1, 1), (8, 4, 3, 4, 2), (12, 6, 3, 6, 3), (16, 4, 4, 1, 1), (8, 4, 4, 3, 2)],
)
def test_rebalance_is_the_plain_algorithm(experts, ranks, slots, groups, nodes):
  rng = np.random.default_rng(0)
  for _ in range(5):
    load_E = rng.permutation(experts) ** 2 * 7.0 + 1
    got = eplb.rebalance(
      jnp.asarray(load_E, jnp.float32),
      num_ranks=ranks,
      num_slots=slots,
      num_groups=groups,
      num_nodes=nodes,
    )
    if groups % nodes:
      groups = nodes = 1
    expected = plain_rebalance(load_E, ranks, slots, groups, nodes)
    assert [sorted(row) for row in got.tolist()] == [sorted(row) for row in expected]


def test_groups_stay_on_one_node():
  load_E = jnp.asarray(np.random.default_rng(1).random(32), jnp.float32)
  slots_GP = eplb.rebalance(load_E, num_ranks=8, num_slots=6, num_groups=4, num_nodes=2)
  node_of_group = {}
  for rank, row in enumerate(slots_GP.tolist()):
    for expert in row:
      assert node_of_group.setdefault(expert // 8, rank // 4) == rank // 4
  assert set(slots_GP.reshape(-1).tolist()) == set(range(32))
  assert sorted(node_of_group.values()) == [0, 0, 1, 1]


def test_rebalance_refuses_what_does_not_fit():
  with pytest.raises(ValueError, match="a slot for each expert, got"):
    eplb.rebalance(jnp.ones(8), num_ranks=2, num_slots=3)


@functools.cache
def even_plan(config):
  return jax.jit(lambda load_GE: strategies.resolve("eplb+").plan(load_GE, config, None))


@hypothesis.given(
  st.integers(0, 2**32 - 1), st.sampled_from([(1, 8), (2, 4), (2, 8), (5, 4), (5, 8)])
)
@hypothesis.settings(max_examples=30)
def test_placement_is_legal_and_even(seed, size):
  slots, domain = size
  rng = np.random.default_rng(seed)
  load_GE = rng.integers(0, 50, (8, 24)).astype(np.int32) * rng.integers(0, 2, (1, 24))
  load_GE = load_GE.astype(np.int32)
  config = BalanceConfig(replica_slots=slots, domain_size=domain)
  plan = even_plan(config)(load_GE)
  assert_legal_plan(plan, load_GE, config)
  for quota_G in np.asarray(plan.quota):
    used = quota_G[quota_G > 0]
    assert used.size == 0 or used.max() - used.min() <= 1


def test_max_copies_is_kept():
  load_E = jnp.asarray([100.0] + [1.0] * 7)
  kwargs = {"num_ranks": 4, "num_slots": 2, "domain_size": 4}
  free = placement.place_replicas(load_E, **kwargs)
  assert int((free == 0).sum()) == 3
  limited = placement.place_replicas(load_E, **kwargs, max_copies=2)
  assert int((limited == 0).sum()) == 1
  assert (placement.place_replicas(load_E, **kwargs, max_copies=1) == -1).all()


class TestHistory:
  def test_places_after_every_period(self):
    state = eplb.init(8, 4, CONFIG)
    seen = [np.eye(8, dtype=np.int32)[i] * 100 + 1 for i in (0, 0, 5, 5)]
    placements = []
    for load_E in seen:
      state = eplb.update(state, jnp.asarray(load_E), CONFIG, period=2, decay=0.1)
      placements.append(np.asarray(state.replica_expert))
    assert (placements[0] == -1).all()
    assert (placements[1] == 0).any() and (placements[1] == placements[2]).all()
    assert (placements[3] == 5).sum() > (placements[1] == 5).sum()
    assert int(state.age) == 4

  def test_leading_axes_are_summed(self):
    load = jnp.asarray(np.arange(16).reshape(2, 8), jnp.int32)
    state = eplb.update(eplb.init(8, 4, CONFIG), load, CONFIG)
    assert state.load_E.tolist() == np.arange(16).reshape(2, 8).sum(axis=0).tolist()

  def test_plans_by_the_past_alone(self):
    """A perfect history balances; one of other experts does not."""
    config = BalanceConfig(replica_slots=4, domain_size=8)
    now = zipf_loads(0, 32, 8, 512, 4, 2.0)
    after = {}
    for seed in (0, 9):
      past = jnp.asarray(zipf_loads(seed, 32, 8, 512, 4, 2.0).sum(axis=0))
      state = eplb.update(eplb.init(32, 8, config), past, config, period=1)
      plan = eplb.planner(state)(jnp.asarray(now), config)
      assert_legal_plan(plan, now, config)
      load_G = np.asarray(plan.quota).sum(axis=0)
      after[seed] = load_G.max() / load_G.mean()
    assert after[0] < 1.15 < after[9]

  def test_replicas_of_larger_domains_are_left_out(self):
    load_GE = np.zeros((4, 8), np.int32)
    load_GE[:, :2] = 16
    load = jnp.asarray(load_GE)
    state = eplb.update(eplb.init(8, 4, CONFIG), load, CONFIG, period=1)
    config = BalanceConfig(replica_slots=2, domain_size=2)
    for module in (eplb, strategies.lplb):
      assert (module.planner(state)(load, CONFIG).replica_expert[2:] >= 0).any()
      plan = module.planner(state)(load, config)
      assert_legal_plan(plan, load_GE, config)
      assert (plan.replica_expert[1] >= 0).any()

  def test_wrong_arguments(self):
    state = eplb.init(8, 4, CONFIG)
    with pytest.raises(ValueError, match="num_experts: expected a multiple of 4"):
      eplb.init(9, 4, CONFIG)
    with pytest.raises(ValueError, match=r"expert_load_E: expected \[\.\.\., 8\], got \(7,\)"):
      eplb.update(state, jnp.ones(7), CONFIG)
    with pytest.raises(ValueError, match="period: expected at least 1"):
      eplb.update(state, jnp.ones(8), CONFIG, period=0)
    with pytest.raises(ValueError, match="decay: expected"):
      eplb.update(state, jnp.ones(8), CONFIG, decay=0.0)
    with pytest.raises(ValueError, match="state: expected a history of shapes"):
      eplb.planner(state)(jnp.zeros((2, 8), jnp.int32), CONFIG)
    with pytest.raises(ValueError, match="state: expected 1 slots, got 2"):
      eplb.update(state, jnp.ones(8), BalanceConfig(replica_slots=1))


class TestExact:
  @pytest.mark.parametrize("domain", [8, 4])
  def test_mean_of_the_domain_rounded_up(self, domain):
    load_GE = zipf_loads(3, 16, 8, 100, 2, 2.5)
    config = BalanceConfig(replica_slots=2, domain_size=domain)
    plan = strategies.resolve("exact").plan(jnp.asarray(load_GE), config, None)
    assert_legal_plan(plan, load_GE, config)
    after = np.asarray(plan.quota).sum(axis=0).reshape(-1, domain)
    assert (after.max(axis=1) == -(-after.sum(axis=1) // domain)).all()

  def test_needs_as_many_slots_as_experts(self):
    with pytest.raises(ValueError, match="replica_slots: expected at least 3, which suffice"):
      strategies.resolve("exact").plan(jnp.zeros((2, 12), jnp.int32), CONFIG, None)
