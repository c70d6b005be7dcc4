"""The planner against its scalar twin, and its promises whatever the objective."""

import hypothesis
import hypothesis.strategies as st
import jax
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
from scalar_planner import placement, rank_loads, twin_plan

from ultraep_jax.planning.plan import plan_quotas
from ultraep_jax.types import PlanCost

INT32_MAX = 2**31 - 1

# Few configurations, so that each compiles once: (ranks, experts, slots, options).
CONFIGS = [
  (4, 16, 1, {"transfer": "auto"}),
  (4, 16, 2, {}),
  (4, 8, 2, {}),
  (6, 12, 1, {"min_tokens_per_replica": 7}),
  (6, 12, 2, {"min_tokens_per_replica": 40, "target": 1.25}),
  (6, 12, 2, {"target": 1.05, "domain_size": 3}),
  (8, 8, 1, {"domain_size": 4}),
  (8, 24, 2, {"domain_size": 2}),
  (1, 4, 2, {}),
  (4, 8, 0, {}),
  (5, 15, 2, {"objective": "time", "transfer": "auto"}),
  (6, 12, 2, {"objective": "time", "domain_size": 3, "target": 1.1, "transfer": "auto"}),
]


@st.composite
def problems(draw):
  ranks, experts, slots, options = draw(st.sampled_from(CONFIGS))
  size = draw(st.sampled_from([4, 300, 50_000]))
  loads = draw(
    st.one_of(
      st.lists(st.integers(0, size), min_size=experts, max_size=experts),
      st.builds(
        lambda hot, load: [load if e in hot else 0 for e in range(experts)],
        st.sets(st.integers(0, experts - 1), max_size=3),
        st.integers(0, size * experts),
      ),
      st.builds(
        lambda seed: skewed_loads(1, experts, size * experts, seed)[0].tolist(),
        st.integers(0, 2**20),
      ),
    )
  )
  cost = PlanCost(
    draw(st.sampled_from([0, 1, 50, 5000, INT32_MAX])),
    draw(st.integers(1, size * experts)),
    draw(st.sampled_from([0, 1, 200, 30_000, INT32_MAX])),
    draw(st.sampled_from([0, 1, 90, 5000, INT32_MAX])),
  )
  return ranks, make_config(slots, **options), loads, cost


class TestPromises:
  @hypothesis.settings(max_examples=40)
  @hypothesis.given(problems())
  def test_legal_and_equal_to_the_scalar_twin(self, problem):
    ranks, config, loads, cost = problem
    load_GE = load_matrix(loads, ranks)
    plan = plan_quotas(load_GE, config, cost)
    check_legal(loads, plan, config)
    domain = config.domain_of(ranks)
    most = 0
    for index, part in enumerate(np.split(np.array(loads), ranks // domain)):
      held, copies = twin_plan(part.tolist(), domain, config, cost)
      assert placement(plan, domain, index) == held
      most = max(most, copies)
    # The copies that a plan is charged for bound what its trees make the busiest rank send.
    assert busiest_sender(plan) <= most

  @hypothesis.settings(max_examples=30)
  @hypothesis.given(problems(), st.integers(0, 2**20))
  def test_only_loads_per_expert_matter_and_repeat(self, problem, seed):
    ranks, config, loads, cost = problem
    load_GE = load_matrix(loads, ranks)
    moved_GE = np.random.default_rng(seed).permuted(load_GE, axis=0)
    for left, right in zip(
      plan_quotas(load_GE, config, cost), plan_quotas(moved_GE, config, cost), strict=True
    ):
      np.testing.assert_array_equal(left, right)

  @pytest.mark.parametrize("options", [{}, {"objective": "time", "transfer": "auto"}])
  def test_jit_equals_eager(self, options):
    config, cost = make_config(2, **options), PlanCost(60, 900)
    jitted = jax.jit(lambda load_GE: plan_quotas(load_GE, config, cost))
    for load_E in skewed_loads(20, 16, 4000, seed=2):
      load_GE = load_matrix(load_E, 4)
      for left, right in zip(jitted(load_GE), plan_quotas(load_GE, config, cost), strict=True):
        np.testing.assert_array_equal(left, right)

  @pytest.mark.parametrize(
    "options", [{}, {"objective": "time", "domain_size": 2, "transfer": "auto"}]
  )
  def test_vmap_equals_loop(self, options):
    config, cost = make_config(2, **options), PlanCost(60, 900)
    load_NE = skewed_loads(20, 16, 4000, seed=3)
    load_NGE = np.stack([load_matrix(load_E, 4) for load_E in load_NE])
    together = planned(jax.vmap(lambda load_GE: plan_quotas(load_GE, config, cost))(load_NGE))
    for index, load_GE in enumerate(load_NGE):
      for many, one in zip(together, plan_quotas(load_GE, config, cost), strict=True):
        np.testing.assert_array_equal(many[index], one)

  def test_one_trace_for_all_loads_and_costs(self):
    traces = []

    @jax.jit
    def plan(load_GE, cost):
      traces.append(load_GE.shape)
      return plan_quotas(load_GE, make_config(2, objective="time"), cost)

    for index, load_E in enumerate(skewed_loads(10, 16, 5000, seed=5)):
      plan(load_matrix(load_E, 4), PlanCost(index, 1000 + index))
    assert traces == [(4, 16)]

  def test_a_domain_plans_as_if_alone(self):
    config = make_config(2, domain_size=4)
    load_E = skewed_loads(1, 48, 90_000, seed=8, max_skew=2.0)[0]
    plan = planned(plan_quotas(load_matrix(load_E, 12), config))
    for index, part in enumerate(np.split(load_E, 3)):
      alone = planned(plan_quotas(load_matrix(part, 4), make_config(2)))
      ranks, experts = slice(4 * index, 4 * index + 4), slice(16 * index, 16 * index + 16)
      np.testing.assert_array_equal(plan.quota[experts, ranks], alone.quota)

  def test_inside_shard_map(self):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("expert",))
    load_E = skewed_loads(1, 16, 9000, seed=1)[0]
    load_GE = load_matrix(load_E, 4)
    spec = jax.P("expert")
    config = make_config(4, transfer="auto")  # probes and the construction

    def quota(row_1E, to):
      gathered_GE = jax.lax.all_gather(row_1E[0], "expert", to=to)
      return plan_quotas(gathered_GE, config).quota

    varying = jax.shard_map(
      lambda row_1E: quota(row_1E, "varying")[None], mesh=mesh, in_specs=spec, out_specs=spec
    )
    invarying = jax.shard_map(
      lambda row_1E: quota(row_1E, "invarying"), mesh=mesh, in_specs=spec, out_specs=jax.P()
    )
    want = planned(plan_quotas(load_GE, config)).quota
    np.testing.assert_array_equal(jax.jit(invarying)(load_GE), want)
    for got in np.asarray(jax.jit(varying)(load_GE)):
      np.testing.assert_array_equal(got, want)

  @pytest.mark.parametrize("ranks, slots", [(4, 2), (1, 2), (4, 0), (4, 4)])
  def test_zero_and_balanced_loads_need_nothing(self, ranks, slots):
    for value in (0, 5):
      plan = plan_quotas(load_matrix([value] * 16, ranks), make_config(slots))
      check_legal([value] * 16, plan, make_config(slots))
      assert replicas(plan) == 0

  def test_home_may_keep_nothing(self):
    plan = planned(plan_quotas(load_matrix([6, 6, 0, 0], 2), make_config(2)))
    assert busiest(plan) == 6
    assert plan.quota[0].tolist() == [0, 6]


class TestLimits:
  @pytest.mark.parametrize("slots, options", [
    (1, {}), (2, {"target": 1.01}), (4, {}), (2, {"objective": "time"}),
    (2, {"min_tokens_per_replica": 2**40}), (1, {"target": 1e30}),
  ])  # fmt: skip
  def test_totals_near_int32(self, slots, options):
    config = make_config(slots, **options)
    cost = PlanCost(INT32_MAX, 1) if slots == 2 else None
    even = [INT32_MAX // 16] * 16
    for load_E in (
      [INT32_MAX, *[0] * 15],
      [0] * 15 + [INT32_MAX],
      even,
      [e // 2 if i > 7 else e + e // 2 for i, e in enumerate(even)],
      skewed_loads(1, 16, INT32_MAX - 16, seed=2)[0].tolist(),
    ):
      plan = plan_quotas(load_matrix(load_E, 4), config, cost)
      check_legal(load_E, plan, config)
      assert busiest(plan) <= rank_loads(load_E, [[]] * 4).max()
      if slots == 4:
        assert busiest(plan) == -(-sum(load_E) // 4)

  def test_overflow_is_found_where_loads_are_known(self):
    load_GE = np.full((2, 2), 2**29, np.int32)
    with pytest.raises(ValueError, match=r"total below 2\*\*31, got 2147483648"):
      plan_quotas(load_GE, make_config(1))
    load_GE[0, 0] -= 1
    check_legal(load_GE.sum(0), plan_quotas(load_GE, make_config(1)), make_config(1))

  def test_negative_load(self):
    with pytest.raises(ValueError, match="at least 0, got -1"):
      plan_quotas(np.array([[3, -1]], np.int32), make_config(1))

  @pytest.mark.parametrize(
    "load, options, error, message",
    [
      (np.zeros((4, 6), np.int32), {}, ValueError, "multiple of G"),
      (np.zeros((4, 0), np.int32), {}, ValueError, "multiple of G"),
      (np.zeros(8, np.int32), {}, ValueError, r"load_GE: expected shape \[G, E\]"),
      (np.zeros((4, 8), np.float32), {}, TypeError, "load_GE: expected .* int32, got float32"),
      (np.zeros((4, 8), np.int64), {}, TypeError, "load_GE: expected .* int32, got int64"),
      (np.zeros((4, 8), np.int32), {"domain_size": 3}, ValueError, "domain_size: expected"),
      (np.zeros((4, 8), np.int32), {"domain_size": 8}, ValueError, "domain_size: expected"),
    ],
  )
  def test_bad_input(self, load, options, error, message):
    with pytest.raises(error, match=message):
      plan_quotas(load, make_config(1, **options))
