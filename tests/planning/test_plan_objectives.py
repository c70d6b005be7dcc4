"""What plans are made for: the mean, a target, few copies, and the least time; their own speed."""

import math
import time
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plans import (
  busiest,
  busiest_sender,
  check_legal,
  load_matrix,
  make_config,
  planned,
  replicas,
  skewed_loads,
)
from scalar_planner import rank_loads, time_cost

from ultraep_jax import testing
from ultraep_jax.config import BalanceConfig
from ultraep_jax.planning import plan as plan_lib
from ultraep_jax.planning import search
from ultraep_jax.planning.plan import plan_quotas
from ultraep_jax.types import PlanCost

INT32_MAX = 2**31 - 1


class TestExact:
  """With a slot per home expert, every rank of a domain ends at the mean rounded up."""

  @pytest.mark.parametrize(
    "ranks, experts, slots, domain",
    [(4, 8, 2, None), (8, 32, 4, None), (8, 8, 3, None), (6, 18, 3, 3), (16, 32, 2, 8)],
  )
  def test_reaches_the_mean(self, ranks, experts, slots, domain):
    config = make_config(slots, domain_size=domain)
    load_NE = np.concatenate(
      [
        skewed_loads(1200, experts, 100_000, seed=ranks),
        skewed_loads(300, experts, 3 * experts, seed=ranks + 1, max_skew=1.0),
        np.eye(experts, dtype=np.int32) * 99_991,
        np.tril(np.ones((experts, experts), np.int32)) * 1009,
        np.int32(2) ** np.arange(min(experts, 24)).repeat(experts).reshape(-1, experts) % 8191,
        adversarial_loads(ranks, experts),
      ]
    ).astype(np.int32)
    plans = jax.jit(jax.vmap(lambda load_GE: plan_quotas(load_GE, config)))(
      np.concatenate([load_NE[:, None], np.zeros((len(load_NE), ranks - 1, experts), np.int32)], 1)
    )
    size = domain or ranks
    load_NDR = planned(plans).quota.sum(1).reshape(len(load_NE), -1, size)
    cap_ND = -(-load_NDR.sum(-1) // size)
    print(
      f"\n{len(load_NE)} loads, G={ranks} E={experts} S={slots} D={size}: "
      f"above the mean {(load_NDR.max(-1) != cap_ND).sum()}"
    )
    np.testing.assert_array_equal(load_NDR.max(-1), cap_ND)
    for index in range(0, len(load_NE), 25):
      plan = jax.tree.map(lambda leaf, n=index: leaf[n], planned(plans))
      check_legal(load_NE[index], plan, config)

  @pytest.mark.parametrize("options", [{"target": 1.02}, {"objective": "time"}])
  def test_is_a_candidate_elsewhere(self, options):
    config, free = make_config(2, **options), PlanCost(0, INT32_MAX)
    for load_E in skewed_loads(40, 8, 10_000, seed=4):
      rows = busiest(plan_quotas(load_matrix(load_E, 4), config, free))
      assert rows <= math.ceil(Fraction(str(config.target or 1)) * int(load_E.sum()) / 4)


def adversarial_loads(ranks, experts):
  """Every rank a little above or below the mean; all excess in the smallest experts; steps."""
  per_rank = experts // ranks
  rank = np.arange(experts) // per_rank
  place = np.arange(experts) % per_rank
  return np.stack([
    100 + (rank % 2) * 2 - 1 + (place == 0),
    np.where(rank == 0, 1000, 1000 - (rank == ranks - 1)),
    np.where(rank < ranks // 2, 7 + place, 0),
    np.where(rank == ranks - 1, 1 + place * 5000, 3),
    np.where(rank == 0, 500 * ranks, 1),
    1 + rank * rank * (place + 1),
  ])  # fmt: skip


class TestTarget:
  def test_reached_whenever_the_balance_is_below_with_no_more_replicas(self):
    saved = []
    for load_E in skewed_loads(60, 32, 50_000, seed=6, max_skew=2.0):
      load_GE = load_matrix(load_E, 8)
      lowest, aimed = (
        plan_quotas(load_GE, make_config(2, target=target)) for target in (None, 1.05)
      )
      goal = math.ceil(Fraction("1.05") * int(load_E.sum()) / 8)
      if busiest(lowest) <= goal:
        assert busiest(aimed) <= goal
        assert replicas(aimed) <= replicas(lowest)
        saved.append(int(replicas(lowest) - replicas(aimed)))
      else:
        assert busiest(aimed) == busiest(lowest)
    print(f"\ntarget 1.05: {len(saved)} reached, {sum(saved)} replicas saved")
    assert sum(saved) > 0


class TestCopies:
  def test_few_of_the_busiest_rank_on_the_loads_of_the_replication_bench(self):
    """As few as the hot rank's experts allow, which are in a token at most once."""
    config = make_config(2, target=1.01, transfer="auto")
    plan = jax.jit(lambda load_GE: plan_quotas(load_GE, config))
    copies = []
    for ratio in (1.5, 2.0, 2.5, 3.0):
      load_GE = testing.zipf_loads(0, 64, 4, 8192, 8, ratio, shuffle=False)
      result = plan(load_GE)
      assert busiest(result) <= 1.01 * load_GE.sum() / 4 + 1
      received = (planned(result).replica_expert >= 0).sum(-1).max()
      hottest = np.cumsum(-np.sort(-load_GE.sum(0)[:16]))
      excess = load_GE[:, :16].sum() - math.ceil(1.01 * load_GE.sum() / 4)
      least = 1 + int(np.searchsorted(hottest, excess))
      copies.append(max(busiest_sender(result), int(received)))
      assert copies[-1] == least
    assert copies == [1, 2, 3, 5]


class TestNothingToGain:
  """Loads that no copy can gain from are not searched."""

  @pytest.mark.parametrize("options", [{}, {"target": 1.02}, {"objective": "time"}])
  @pytest.mark.parametrize("domain, slots", [(None, 1), (2, 2)])
  def test_a_search_would_find_nothing(self, options, domain, slots, monkeypatch):
    config = make_config(slots, domain_size=domain, **options)
    planner, search_all = plan_lib._plan.__wrapped__, plan_lib.best_placement
    calls, skipped = [], 0

    def counted(*arguments):
      jax.debug.callback(lambda: calls.append(1))
      return search_all(*arguments)

    def fresh(set_up):
      return jax.jit(lambda load_GE, cost: planner(load_GE, set_up, cost))

    rng = np.random.default_rng(0)
    cases = []
    for load_E in rng.integers(0, 4, (30, 8)) * rng.integers(0, 2, (30, 1)) + 20:
      load_GE = load_matrix(load_E, 4)
      cost = PlanCost(*(jnp.int32(rng.integers(0, high)) for high in (8, 100, 60, 20)))
      set_up, cost = plan_lib.set_up(load_GE, config, cost)
      cases.append((load_GE, cost))
    with monkeypatch.context() as patched:
      patched.setattr(plan_lib, "may_gain", lambda *_: jnp.bool_(True))
      always = fresh(set_up)
      searched = [always(*case) for case in cases]
    monkeypatch.setattr(plan_lib, "best_placement", counted)
    plan = fresh(set_up)
    for (load_GE, cost), want in zip(cases, searched, strict=True):
      load_NRM = load_GE.sum(0).reshape(-1, domain or 4, 2).astype(np.int32)
      gain = bool(search.may_gain(jnp.asarray(load_NRM), set_up, cost))
      assert gain or not replicas(want)
      skipped += not gain
      jax.tree.map(np.testing.assert_array_equal, planned(plan(load_GE, cost)), planned(want))
    jax.effects_barrier()
    assert 5 < skipped < 30 and len(calls) == 30 - skipped

  def test_one_row_more_than_a_copy_costs_is_a_gain(self):
    config = make_config(1, objective="time")
    set_up, _ = plan_lib.set_up(load_matrix([0] * 4, 2), config, PlanCost(0, 0))

    def gains(busy, *cost):
      load_NRM = jnp.array([[[busy, 0], [200 - busy, 0]]], jnp.int32)
      return bool(search.may_gain(load_NRM, set_up, PlanCost(*map(jnp.int32, cost))))

    assert not gains(130, 30, 130, 0) and gains(131, 30, 131, 0)
    assert gains(101, 10**6, 100, 0) and not gains(101, 10**6, 101, 0)  # a second round
    assert not gains(150, 30, 150, 120) and gains(151, 30, 151, 120)  # a copy on the links


class TestTime:
  @pytest.mark.parametrize("transfer", ["direct", "auto"])
  def test_costs_no_more_than_nothing_and_copies_less_as_copies_cost_more(self, transfer):
    config = make_config(2, objective="time", transfer=transfer)
    plan = jax.jit(lambda load_GE, cost: plan_quotas(load_GE, config, cost))
    sent = np.zeros(4, int)
    for load_E in skewed_loads(40, 16, 20_000, seed=7, max_skew=1.5):
      load_GE = load_matrix(load_E, 4)
      before = int(rank_loads(load_E, [[]] * 4).max())
      for index, copy_rows in enumerate((0, 100, 1000, 2**31 - 1)):
        cost = PlanCost(copy_rows, INT32_MAX)
        result = plan(load_GE, cost)
        check_legal(load_E, result, config)
        received = (planned(result).replica_expert >= 0).sum(-1).max()
        copies = max(busiest_sender(result), int(received))
        paid = time_cost(int(busiest(result)), copies, cost)
        assert paid <= time_cost(before, 0, cost)
        sent[index] += copies
        if copy_rows == 0:
          assert busiest(result) <= busiest(plan_quotas(load_GE, make_config(2)))
    print(f"\ntime, {transfer}: copies of the busiest at copy_rows 0, 100, 1000, huge: {sent}")
    assert sent[0] > sent[1] > sent[2] > sent[3] == 0

  @pytest.mark.parametrize("copy_rows", [30, INT32_MAX])
  def test_a_round_saved_is_worth_any_copies(self, copy_rows):
    load_GE = load_matrix([60, 60, 40, 40], 2)
    config = make_config(1, objective="time")
    copies = [replicas(plan_quotas(load_GE, config, PlanCost(copy_rows, c))) for c in (119, 120)]
    assert copies == [1, 0]

  @pytest.mark.parametrize("capacity, ends, copies", [(70, 70, 1), (69, 60, 2)])
  def test_the_capacity_is_a_threshold(self, capacity, ends, copies):
    """One copy can make the busiest rank 70, and no other threshold tries that."""
    config = make_config(1, objective="time")
    plan = plan_quotas(load_matrix([100, 40, 40], 3), config, PlanCost(1000, capacity))
    assert (busiest(plan), replicas(plan)) == (ends, copies)

  def test_a_rank_with_many_groups_gets_fewer_rows(self):
    """Equally many rows, but ten groups of 10 beside one of 100."""
    load_GE = load_matrix([*[10] * 10, 100, *[0] * 9], 2)

    def rows_and_groups(group_rows, capacity=INT32_MAX, objective="time"):
      cost, config = PlanCost(0, capacity, 0, group_rows), make_config(10, objective=objective)
      quota = planned(plan_quotas(load_GE, config, cost)).quota
      return quota.sum(0).tolist(), (quota > 0).sum(0).tolist()

    assert rows_and_groups(0) == ([100, 100], [10, 1])
    # 200 and 110 become 160 and 150: two experts move whole, and take their groups along.
    assert rows_and_groups(10) == ([80, 120], [8, 3])
    assert rows_and_groups(10, capacity=119)[0] == [81, 119]  # rows have to fit, not loads
    assert rows_and_groups(10, objective="balance") == ([100, 100], [10, 1])

  @pytest.mark.parametrize("slots", [2, 10])
  def test_few_groups_do_not_hide_rows_that_do_not_fit(self, slots):
    """Rank 0 has more rows than a round, and less than the mean of loads: 1100 of 1100 and 1200."""
    load_GE = load_matrix([1000, *[0] * 9, *[20] * 10], 2)
    config = make_config(slots, objective="time")
    plan = plan_quotas(load_GE, config, PlanCost(50, 900, 0, 100))
    assert busiest(plan) <= 900 and replicas(plan) == 1

  @pytest.mark.parametrize("slots", [1, 3])
  def test_the_capacity_is_a_threshold_of_rows(self, slots):
    """One copy can make the busiest rank 70, and another costs 1000 rows more."""
    config = make_config(slots, objective="time")
    load_GE = load_matrix([100, 0, 0, 0, *[10] * 8], 3)
    plan = plan_quotas(load_GE, config, PlanCost(1000, 70, 0, 1))
    assert (busiest(plan), replicas(plan)) == (70, 1)

  def test_missing_cost(self):
    with pytest.raises(ValueError, match="cost: expected a PlanCost"):
      plan_quotas(load_matrix([1, 2], 2), BalanceConfig(objective="time"))

  def test_huge_python_costs_saturate(self):
    config = make_config(1, objective="time")
    cost = PlanCost(10**12, 10**12)
    assert replicas(plan_quotas(load_matrix([60, 60, 0, 0], 2), config, cost)) == 0


@pytest.mark.slow
def test_speed_at_64_ranks():
  config = make_config(2, objective="time")
  plan = jax.jit(lambda load_GE: plan_quotas(load_GE, config, PlanCost(500, 70_000)))
  load_NGE = [load_matrix(e, 64) for e in skewed_loads(12, 256, 4_194_304, 1, max_skew=1.5)]
  jax.block_until_ready(plan(load_NGE[0]))
  seconds = []
  for load_GE in load_NGE:
    start = time.process_time()  # as others may keep the cores busy
    jax.block_until_ready(plan(load_GE))
    seconds.append(time.process_time() - start)
  print(f"\nE256 G64 S2: median {1e3 * np.median(seconds):.1f} ms")
  assert np.median(seconds) < 0.4
