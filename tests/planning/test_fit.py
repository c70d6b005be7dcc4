"""Whether no load can need a second round: the slots that suffice, and what is concluded."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from scalar_planner import most_copies, twin_construction

from ultraep_jax import testing
from ultraep_jax.config import BalanceConfig
from ultraep_jax.planning import plan as planner
from ultraep_jax.planning.capacity import row_capacity
from ultraep_jax.planning.exact import construct, slots_that_suffice
from ultraep_jax.planning.fit import always_fits, num_slots
from ultraep_jax.types import PlanCost

INT32_MAX = 2**31 - 1
TOKENS, TOP_K = 256, 8


def loads_of_all_kinds(num_experts, num_ranks):
  """``[L, G, E]``: random, adversarial and extreme loads, each rank bringing T * K."""
  size = (num_experts, num_ranks, TOKENS, TOP_K)
  rng = np.random.default_rng(num_ranks)
  cases = [testing.balanced_loads(0, *size)]
  cases += [testing.adversarial_loads(s, *size, kind=k)
            for s in range(3) for k in testing.ADVERSARIAL_KINDS]  # fmt: skip
  most = min(num_ranks, num_experts / TOP_K)
  cases += [
    testing.flat_loads(seed, *size, r) for seed, r in enumerate((1.3, 2.0, most)) if r <= most
  ]
  cases += [testing.all_to_one_loads(num_experts, num_ranks, TOKENS * TOP_K, 1, rank=r)
            for r in (0, num_ranks - 1)]  # fmt: skip
  for skew in np.linspace(0, 6, 8):  # a choice that needs not be of distinct experts
    weight_E = rng.permutation((np.arange(num_experts) + 1.0) ** -skew)
    cases.append(rng.multinomial(TOKENS * TOP_K, weight_E / weight_E.sum(), num_ranks))
  # One rank has nothing, and the others' experts are alike: what no fewer slots balance.
  even_E = np.where(np.arange(num_experts) // (num_experts // num_ranks), 1.0, 0)
  if num_ranks > 1:
    share_E = np.floor(TOKENS * TOP_K * even_E / even_E.sum()).astype(int)
    share_E[-1] += TOKENS * TOP_K - share_E.sum()
    cases.append(np.tile(share_E, (num_ranks, 1)))
  return np.stack(cases).astype(np.int32)


SHAPES = [(2, 16), (3, 21), (8, 16)]  # ranks and experts


def busiest(load_LGE, config, copy_rows, capacity, group_rows=0):
  """``[L]``, of plans from few thresholds: to fit is not a matter of luck with one of them."""
  setup, cost = planner.set_up(load_LGE[0], config, PlanCost(copy_rows, capacity, 0, group_rows))
  plan = functools.partial(planner._plan, setup=setup._replace(steps=(32768, 3000)), cost=cost)
  return np.asarray(jax.vmap(plan)(load_LGE).quota).sum(1).max(1)


@pytest.mark.parametrize("ranks, experts", SHAPES)
def test_by_time_every_plan_fits_whatever_copies_cost(ranks, experts):
  load_LGE = loads_of_all_kinds(experts, ranks)
  slots = slots_that_suffice(experts, ranks)
  capacity = TOKENS * TOP_K  # not a row to spare
  config = BalanceConfig(replica_slots=slots, transfer="direct")
  sizes = {"num_experts": experts, "num_ranks": ranks, "assignments": capacity}
  assert always_fits(config, **sizes, capacity=capacity)
  for costs in ((0, 0), (400, 0), (400, 30), (0, 3000), (INT32_MAX, INT32_MAX)):
    ends = busiest(load_LGE, config, costs[0], capacity, costs[1])
    above = np.flatnonzero(ends > capacity)
    assert not above.size, f"copies and groups {costs}: loads {above} end at {ends[above]}"


@pytest.mark.parametrize("target", [None, 1.1])
def test_by_balance_every_plan_fits(target):
  ranks, experts = SHAPES[0]
  slots = slots_that_suffice(experts, ranks)
  config = BalanceConfig(
    replica_slots=slots, objective="balance", target=target, capacity_factor=1.1, transfer="direct"
  )
  capacity = row_capacity(TOKENS, TOP_K, ranks, config)
  sizes = {"num_experts": experts, "num_ranks": ranks, "assignments": TOKENS * TOP_K}
  assert always_fits(config, **sizes, capacity=capacity)
  assert busiest(loads_of_all_kinds(experts, ranks), config, 0, 0).max() <= capacity


def random_loads(count, ranks, home, seed):
  """``[count, R, M]``, many with idle ranks, ties and hardly any load; first the worst."""
  rng, shape = np.random.default_rng(seed), (count, ranks, home)
  most_N11 = rng.choice([2, 5, 1000], (count, 1, 1))
  idle_NR1 = rng.random((count, ranks, 1)) < rng.random((count, 1, 1))
  load_NRM = np.where(idle_NR1, rng.integers(0, 2, shape), rng.integers(0, most_N11, shape))
  load_NRM[0], load_NRM[0, 0] = ranks, 0
  return load_NRM.astype(np.int32)


@pytest.mark.parametrize("domain", [None, 1, 2, 4, 8])
def test_slots_are_those_of_a_domain(domain):
  """The more of its experts the others of a domain must take, the more ranks there are."""
  config = BalanceConfig(domain_size=domain)
  assert num_slots(config, 128, 8) == {1: 0, 2: 8, 4: 12}.get(domain, 14)
  assert num_slots(dataclasses.replace(config, replica_slots=3), 128, 8) == 3


@pytest.mark.parametrize("ranks, home", [(2, 7), (4, 8), (5, 3)])
def test_the_construction_keeps_to_the_slots_that_suffice(ranks, home):
  load_NRM = random_loads(3000, ranks, home, seed=ranks)
  slots = slots_that_suffice(ranks * home, ranks)
  outcome_N, expert_NRS, tokens_NRS = jax.jit(construct, static_argnums=(1, 2))(
    load_NRM, slots, False
  )
  load_NR = load_NRM.sum(2)
  cap_N = -(-load_NR.sum(1) // ranks)
  np.testing.assert_array_equal(outcome_N.busiest, np.minimum(load_NR.max(1), cap_N))
  # Had a slot been missing, its tokens would be, and a rank would end above or a giver below.
  given_NX = np.zeros((len(load_NRM), ranks * home + 1), np.int64)
  domain = np.arange(len(load_NRM))[:, None, None]
  np.add.at(given_NX, (domain, expert_NRS), tokens_NRS)  # empty slots at the end, -1
  ends_NR = (
    load_NR - given_NX[:, :-1].reshape(load_NRM.shape).sum(2) + np.asarray(tokens_NRS).sum(2)
  )
  np.testing.assert_array_equal(ends_NR.max(1), outcome_N.busiest)
  np.testing.assert_array_equal(ends_NR.sum(1), load_NR.sum(1))
  assert expert_NRS[0, 0, -1] >= 0  # no slot to spare


@pytest.mark.parametrize(
  "ranks, home, transfer", [(4, 8, "auto"), (5, 3, "auto"), (5, 3, "direct")]
)
def test_the_construction_among_equals(ranks, home, transfer):
  """Of equal ranks the first gives or receives, of equal experts the first goes first."""
  load_NRM = random_loads(300, ranks, home, seed=ranks)
  slots = slots_that_suffice(ranks * home, ranks)
  outcome_N, *placed = jax.jit(construct, static_argnums=(1, 2))(
    load_NRM, slots, transfer == "direct"
  )
  forwarding = 0
  for index, (load_RM, *placed_RS) in enumerate(
    zip(load_NRM, *map(np.asarray, placed), strict=True)
  ):
    held, order = twin_construction(load_RM.reshape(-1).tolist(), ranks, slots)
    for given, *placed_S in zip(held, *placed_RS, strict=True):
      given = given + [(-1, 0)] * (slots - len(given))
      assert given == list(zip(*(each.tolist() for each in placed_S), strict=True))
    most = most_copies(held, order, home, transfer)
    assert outcome_N.copies[index] == most and outcome_N.replicas[index] == len(order)
    forwarding += most > max(map(len, held))
  assert forwarding > 10  # a rank sends more than any receives


def test_fewer_slots_do_not_suffice():
  """One empty rank beside equal experts."""
  ranks, home = 3, 6
  load_LGE = np.zeros((1, ranks, ranks * home), np.int32)
  load_LGE[0, 0, home:] = 10 * ranks
  slots = slots_that_suffice(ranks * home, ranks) - 1
  (ends,) = busiest(load_LGE, BalanceConfig(replica_slots=slots, objective="balance"), 0, 0)
  assert ends > 10 * (ranks - 1) * home


SIZES = {"num_experts": 64, "num_ranks": 4, "assignments": 1000, "capacity": 1064}


@pytest.mark.parametrize(
  "options, sizes, fits",
  [
    ({}, {}, True),
    ({"replica_slots": 11}, {}, False),
    ({"replica_slots": 11}, {"capacity": 4000}, True),
    ({"replica_slots": 0, "strategy": "none"}, {"capacity": 3999}, False),
    ({"replica_slots": 0, "strategy": "none"}, {"capacity": 4000}, True),
    ({"strategy": "exact", "min_tokens_per_replica": 9}, {}, True),
    ({"strategy": "eplb+"}, {}, False),
    ({"strategy": "ideal"}, {"capacity": 1003}, False),
    ({"strategy": "ideal", "domain_size": 2}, {"capacity": 1004}, True),
    ({"strategy": lambda *args: None}, {}, False),
    ({"min_tokens_per_replica": 2}, {}, False),
    ({"domain_size": 4}, {}, True),
    ({"domain_size": 2}, {}, False),
    ({"domain_size": 2}, {"capacity": 4000}, True),
    ({}, {"capacity": 999}, False),
    ({}, {"capacity": 1000}, True),
    ({"target": 1.5}, {}, True),  # by time what fits goes first
    ({"target": 1.064, "objective": "balance"}, {}, True),
    ({"target": 1.0645, "objective": "balance"}, {}, False),
    ({"target": 1.065, "objective": "balance"}, {}, False),
    ({"replica_slots": 0}, {"num_ranks": 1}, True),
  ],
)
def test_what_is_concluded(options, sizes, fits):
  config = BalanceConfig(**{"replica_slots": 12, **options})
  assert always_fits(config, **{**SIZES, **sizes}) is fits
