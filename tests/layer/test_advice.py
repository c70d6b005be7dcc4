"""Advice names the cause that keeps a load uneven, and a remedy that is one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ultraep_jax import advice, strategies, testing
from ultraep_jax.config import BalanceConfig
from ultraep_jax.planning.plan import plan_quotas
from ultraep_jax.sharded import sharded_moe
from ultraep_jax.types import ExpertWeights, LayerStats, Plan, PlanCost

RANKS, EXPERTS = 8, 32
FLAT = testing.flat_loads(0, EXPERTS, RANKS, tokens=512, top_k=4, ratio=4.0)


def advise(load_GE, cost: PlanCost | None = None, rounds: int = 1, **fields) -> list[str]:
  """Of what a layer with this configuration would do."""
  config = BalanceConfig(**{"objective": "balance", **fields})
  plan = plan_quotas(jnp.asarray(load_GE), config, cost)
  after_G = np.asarray(plan.quota).sum(axis=0)
  return advice.of_load(load_GE, after_G, config, slots=fields["replica_slots"], rounds=rounds)


def test_an_even_load_needs_nothing():
  assert advise(FLAT, replica_slots=4) == ["even: the busiest rank has 1.00 times the mean"]
  assert advise(np.zeros((4, 8), np.int32), replica_slots=1)[0].startswith("even")
  assert advise(np.ones((1, 8), np.int32), replica_slots=0)[0].startswith("even")


@pytest.mark.parametrize("slots", [2, 3])
def test_few_assignments_are_as_even_as_they_can_be(slots):
  """26 on 4 ranks: one has 7 at least. More slots would not help."""
  load_GE = np.zeros((4, 4), np.int32)
  load_GE[0] = 5, 6, 7, 8
  (line,) = advise(load_GE, replica_slots=slots)
  assert line == "even: the busiest rank has 1.08 times the mean, as assignments are few"


@pytest.mark.parametrize("slots", [0, 1])
def test_slots_that_are_too_few_are_named_with_a_number_that_suffices(slots):
  load_GE = np.zeros((RANKS, EXPERTS), np.int32)
  load_GE[:, : EXPERTS // 2] = 100  # half of the ranks have many equally warm experts
  (line,) = advise(load_GE, replica_slots=slots)
  name, _, rest = line.partition(": ")
  before, _, more = rest.removesuffix("; set replica_slots").partition(f" with {slots}, ")
  reached, _, enough = more.partition(" with ")
  assert name == "slots" and float(before) > float(reached)
  assert advise(load_GE, replica_slots=int(enough))[0].startswith("even")


def test_domains_are_named_with_what_they_allow():
  load_GE = np.zeros((RANKS, EXPERTS), np.int32)
  load_GE[:, : EXPERTS // 2], load_GE[:, EXPERTS // 2 :] = 30, 10
  (line,) = advise(load_GE, replica_slots=EXPERTS // RANKS, domain_size=RANKS // 2)
  assert line.startswith("domains: ") and "allows 1.50 at best" in line


def test_settings_that_stop_a_plan_are_named():
  (line,) = advise(FLAT, replica_slots=4, target=1.5)
  assert line.startswith("target: 1.") and "target=1.5 stops plans there" in line
  cost = PlanCost(copy_rows=10**6, capacity_rows=10**6)
  (line,) = advise(FLAT, cost, replica_slots=4, objective="time")
  assert line.startswith("objective: 4.00 was reached and 1.00 is possible")
  (line,) = advise(FLAT, replica_slots=4, min_tokens_per_replica=10**6)
  assert line.startswith("min_tokens_per_replica: ")


def test_rounds_are_named_with_a_buffer_that_spares_them():
  line, *others = advise(FLAT, replica_slots=4, rounds=3)
  assert line.startswith("buffer: 3 rounds were run") and line.endswith("capacity_factor=1.00")
  assert not others


def at_home(load_GE, config, cost=None) -> Plan:
  """A planner of a user's that makes no copies."""
  return strategies.none.plan(load_GE, config, cost)


@pytest.mark.parametrize("strategy", ["none", at_home])
@pytest.mark.parametrize(
  ("fields", "slots"),
  [
    ({"replica_slots": 4}, 4),
    ({"replica_slots": "auto", "objective": "time"}, EXPERTS // RANKS),
    ({"replica_slots": 4, "min_tokens_per_replica": 100, "target": 5.0}, 4),
  ],
)
def test_another_strategy_is_the_cause_of_what_quota_would_not_do(strategy, fields, slots):
  """Whatever else is set, which it may ignore, and however many rounds it brought about."""
  config = BalanceConfig(strategy=strategy, **fields)
  home_G = FLAT.sum(axis=0).reshape(RANKS, -1).sum(axis=1)
  line, *others = advice.of_load(FLAT, home_G, config, slots=0, rounds=2)
  assert line == f"strategy: 4.00 was reached and 1.00 is possible with {slots} slots by quota"
  assert [other.partition(":")[0] for other in others] == ["buffer"]


def test_remedies_that_need_quota_say_so():
  load_GE = np.zeros((RANKS, EXPERTS), np.int32)
  load_GE[:, : EXPERTS // 2], load_GE[:, EXPERTS // 2 :] = 30, 10
  home_G = load_GE.sum(axis=0).reshape(RANKS, -1).sum(axis=1)
  config = BalanceConfig(strategy="none", domain_size=RANKS // 2)
  (line,) = advice.of_load(load_GE, home_G, config, slots=0)
  assert line.endswith('a larger domain_size would help, with strategy="quota"')
  config = BalanceConfig(strategy="none", replica_slots=0)
  (line,) = advice.of_load(load_GE, home_G, config, slots=0)
  assert line.startswith("slots: 1.50 with 0, 1.0")
  assert line.endswith('; set replica_slots, with strategy="quota"')


def test_a_planner_that_does_better_than_quota_is_not_blamed():
  load_GE = np.zeros((RANKS, EXPERTS), np.int32)
  load_GE[:, : EXPERTS // 2] = 100
  after_G = np.full(RANKS, load_GE.sum() // RANKS)
  after_G[0], after_G[1] = after_G[0] * 1.1, after_G[1] * 0.9
  config = BalanceConfig(strategy=at_home, replica_slots=1)
  assert advice.planned_imbalance(load_GE, config, 1) > 1.1
  (line,) = advice.of_load(load_GE, after_G, config, slots=1)
  assert line.startswith("slots: 1.10 with 1, ")


def layer_stats(load_GGE: np.ndarray) -> LayerStats:
  """Of groups that did not balance."""
  groups, ranks, _ = load_GGE.shape
  before = load_GGE.sum(axis=1).reshape(groups, ranks, -1).sum(axis=2)
  empty, none = np.full((groups, ranks, 1), -1), np.zeros(groups, np.int32)
  return LayerStats(
    load_GE=load_GGE,
    expert_load_E=load_GGE.sum(axis=1),
    load_before_G=before,
    load_planned_G=before,
    load_after_G=before,
    load_floor=none,
    replicas=none,
    max_fanout=none,
    replica_bytes=none,
    remote_assignments=none,
    rounds=none + 1,
    masked=none,
    invalid=none + 2,
    replica_expert_GS=empty,
    replica_parent_GS=empty,
    replica_load_GS=empty * 0,
  )


def test_statistics_advise_on_their_least_even_group():
  even = testing.balanced_loads(0, EXPERTS, RANKS, 512, 4)
  lines = layer_stats(np.stack([even, FLAT])).advice(BalanceConfig(objective="balance"))
  assert lines[0] == "router: 4 assignments name no expert and were left out"
  assert lines[1].startswith("plan: 4.00 was reached")
  assert layer_stats(even[None]).advice()[1].startswith("even")


def test_warning_of_several_rounds_and_of_slots_in_use():
  after_NG = np.array([[4, 4, 4, 4], [10, 2, 2, 2]])
  full, empty = np.zeros((2, 4, 1), np.int32), np.full((2, 4, 1), -1)
  one = np.ones(2, np.int32)
  assert advice.limits(after_NG, empty, one) == ""
  assert advice.limits(after_NG[:1], full[:1], one[:1]) == ""
  assert advice.limits(after_NG, full, one).startswith("1 of 2 layers stayed uneven")
  above, below = full.copy(), full.copy()
  above[1, 0], below[1, 3] = -1, -1  # an empty slot of the busiest rank, or of one that could help
  assert advice.limits(after_NG, above, one).startswith("1 of 2 layers stayed uneven")
  assert advice.limits(after_NG, below, one) == ""
  assert "2 of 2 layers ran more than one round" in advice.limits(after_NG, empty, one + 1)


def test_what_was_recorded_is_a_configuration():
  values = {"target": 1.05, "domain_size": None, "replica_slots": 4, "strategy": "none"}
  config = advice.recorded_config(values)
  assert config == BalanceConfig(target=1.05, replica_slots=4, strategy="none")
  assert advice.recorded_config({}) == BalanceConfig()


def test_of_a_planner_the_name_was_recorded():
  config = advice.recorded_config({"strategy": "at_home", "replica_slots": 4})
  home_G = FLAT.sum(axis=0).reshape(RANKS, -1).sum(axis=1)
  (line,) = advice.of_load(FLAT, home_G, config, slots=0)
  assert line.startswith("strategy: 4.00 was reached and 1.00 is possible with 4 slots")
  with pytest.raises(NotImplementedError, match="got only the name that was recorded"):
    strategies.resolve(config.strategy).plan(jnp.asarray(FLAT), config, None)


# --- as text and in notebooks ----------------------------------------------------------------


def test_a_plan_is_a_line_with_what_it_reaches():
  plan = plan_quotas(jnp.asarray(FLAT), BalanceConfig(replica_slots=1, objective="balance"))
  copies = int((np.asarray(plan.replica_expert) >= 0).sum())
  assert repr(plan).startswith(f"Plan({RANKS} ranks, {EXPERTS} experts, 1 slot: {copies} copies")
  html = plan._repr_html_()
  assert html.count("<tr>") == RANKS + 1 and repr(plan) in html
  expert = int(np.asarray(plan.replica_expert).max())
  assert f"{expert} (" in html


def test_statistics_are_a_line_and_bars():
  stats = layer_stats(FLAT[None])
  text = "busiest / mean rank 4.00 before, 4.00 after; 0 copies, 1 round"
  assert repr(stats) == f"LayerStats(8 ranks, 32 experts: {text})"
  assert repr(layer_stats(np.stack([FLAT, FLAT]))).startswith("LayerStats(2 times 8 ranks")
  html = stats._repr_html_()
  assert html.count("<tr>") == RANKS + 1
  assert f"<td>{int(stats.load_before_G.max())}</td>" in html


def test_one_is_not_many():
  one = jnp.ones((1, 1), jnp.int32)
  assert repr(Plan(one * 0, one, one * 0)).startswith("Plan(1 rank, 1 expert, 1 slot: 1 copy,")
  text = repr(layer_stats(np.ones((1, 1, 1), np.int32)))
  assert text.startswith("LayerStats(1 rank, 1 expert: ") and text.endswith("0 copies, 1 round)")


def test_while_tracing_there_are_shapes_alone():
  seen = []

  def look(load_GE):
    plan = plan_quotas(load_GE, BalanceConfig(replica_slots=1, objective="balance"))
    seen.extend((repr(plan), plan._repr_html_()))
    return plan

  shapes = jax.eval_shape(look, jax.ShapeDtypeStruct((RANKS, EXPERTS), jnp.int32))
  expected = "Plan(replica_expert=int32[8, 1], quota=int32[32, 8], parent=int32[8, 1])"
  assert seen == [expected, expected] and repr(shapes) == expected
  assert (
    repr(jax.tree.map(lambda _: None, shapes))
    == "Plan(replica_expert=None, quota=None, parent=None)"
  )


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_domains_that_a_mesh_settled_are_found_by_what_loads_were_allowed(size):
  load_NGE = np.stack([testing.flat_loads(seed, EXPERTS, RANKS, 512, 4, 4.0) for seed in range(2)])
  home_NG = load_NGE.sum(axis=1).reshape(2, RANKS, -1).sum(axis=2)
  floor_N = -(-home_NG.reshape(2, -1, size).sum(axis=2).max(axis=1) // size)
  empty_NGS = np.full((2, RANKS, 1), -1)

  def found(config, floor_N):
    return advice.with_domains(config, load_NGE, floor_N, empty_NGS)

  assert found(BalanceConfig(), floor_N).domain_of(RANKS) == size
  assert found(BalanceConfig(domain_size=2), floor_N).domain_size == 2
  assert found(BalanceConfig(), floor_N + 1) == BalanceConfig()


def test_domains_are_no_larger_than_loads_and_copies_tell():
  """Halves that are alike allow as much as the whole; a copy between them tells it is one."""
  load_NGE, floor_N = np.full((1, RANKS, EXPERTS), 3), np.array([96])
  expert_NGS = np.full((1, RANKS, 1), -1)
  expert_NGS[0, 0] = EXPERTS // RANKS  # of rank 1
  config = advice.with_domains(BalanceConfig(), load_NGE, floor_N, expert_NGS)
  assert config.domain_size == 2
  expert_NGS[0, 1] = EXPERTS - 1  # of the last rank
  config = advice.with_domains(BalanceConfig(), load_NGE, floor_N, expert_NGS)
  assert config.domain_size == RANKS


@pytest.mark.parametrize("fields", [{"node_size": 2}, {"domain_size": 2}])
def test_a_layer_on_nodes_is_told_of_its_domains(fields):
  load_GE = testing.flat_loads(0, num_experts=32, num_ranks=8, tokens=64, top_k=2, ratio=3.0)
  index = jnp.asarray(testing.expert_indices(0, load_GE, top_k=2).reshape(-1, 2))
  weights = ExpertWeights(*[jnp.ones((32, 8, 8))] * 3)
  config = BalanceConfig(replica_slots=4, objective="balance", **fields)
  with jax.set_mesh(jax.make_mesh((8,), ("expert",))):
    x = jnp.ones((len(index), 8))
    _, stats = sharded_moe(x, index, jnp.ones(index.shape), weights, config=config)
  (line,) = stats.advice(config)
  assert line.startswith("domains: copies stay inside them")


def test_a_plan_that_the_configuration_does_not_explain():
  home_G = FLAT.sum(axis=0).reshape(RANKS, -1).sum(axis=1)
  (line,) = advice.of_load(FLAT, home_G, BalanceConfig(objective="balance"), slots=4)
  assert (
    line
    == "plan: 4.00 was reached and 1.00 is possible with 4 slots; is this the layer's "
    + ("configuration?")
  )
