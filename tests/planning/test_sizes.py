"""What a layer settles from its sizes alone: slots within memory, whether it plans, one round."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ultraep_jax.config import BalanceConfig
from ultraep_jax.devices.device import Device
from ultraep_jax.planning import cost
from ultraep_jax.planning.plan import home_quota, plan_quotas
from ultraep_jax.planning.sizes import settle
from ultraep_jax.types import ExpertWeights

H200 = Device.load("h200")
BF16, F32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
WIDTH, INNER = 64, 32


def experts(num, dtype):
  def shape(*sizes):
    return jax.ShapeDtypeStruct((num, *sizes), dtype)  # parameters, cast in the layer

  return ExpertWeights(shape(WIDTH, INNER), shape(WIDTH, INNER), shape(INNER, WIDTH))


def settled(config, *, tokens=16, top_k=2, ranks=4, home=8, dtype=BF16, weights=F32):
  sizes = {"tokens": tokens, "top_k": top_k, "num_ranks": ranks}
  return settle(config, **sizes, dtype=dtype, weights=experts(home, weights))


# --- slots -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, weights", [(BF16, BF16), (BF16, F32), (F32, F32)])
@pytest.mark.parametrize("fit", [0, 1, 3, 5, 6, 40])
def test_copies_and_their_gradients_take_an_eighth_of_the_memory(fit, dtype, weights):
  """One byte less than for the next slot; one slot there always is, and no more than suffice."""
  slot = 3 * WIDTH * INNER * (dtype.itemsize + weights.itemsize)  # the copy, and its gradient
  device = H200.replace("test", memory_bytes=8 * (slot * (fit + 1) - 1))
  config = BalanceConfig(device=device)
  sizes = settled(config, dtype=dtype, weights=weights)
  assert sizes.one_round  # so few rows fit anyway
  assert sizes.config.replica_slots == min(max(fit, 1), 6)  # the others have to take up to 6


@pytest.mark.parametrize("fit", [1, 5, 6])
def test_slots_that_do_not_suffice_may_need_several_rounds(fit):
  large = {"tokens": 1 << 20, "weights": BF16}
  slot = 3 * WIDTH * INNER * (2 + 2)
  device = H200.replace("test", memory_bytes=8 * (slot * (fit + 1) - 1))
  sizes = settled(BalanceConfig(device=device, implementation="mosaic_gpu"), **large)
  assert sizes.config.replica_slots == fit and sizes.one_round == (fit == 6)


def test_without_a_kernel_to_plan_a_round_that_may_come_is_no_reason_to():
  """Qwen3-30B-A3B on two ranks plans from 12,100 tokens on, on A100 from 10,000."""
  into, out = (jax.ShapeDtypeStruct((64, *shape), BF16) for shape in ((2048, 768), (768, 2048)))

  def plans(implementation, device, tokens, ranks=2):
    config = BalanceConfig(device=Device.load(device), implementation=implementation)
    of_layer = {"top_k": 8, "num_ranks": ranks, "dtype": BF16}
    sizes = settle(config, tokens=tokens, weights=ExpertWeights(into, into, out), **of_layer)
    assert sizes.one_round == sizes.plans
    return sizes.plans

  assert plans("mosaic_gpu", "h100", 2048, ranks=8) and not plans("portable", "h100", 2048, ranks=8)
  for device, tokens in (("h100", 12_100), ("a100", 10_000)):
    assert not plans("portable", device, tokens) and plans("portable", device, tokens + 200)


@pytest.mark.parametrize(
  ("shape", "tokens", "forward", "training"),
  [
    ((2048, 768, 128, 8), 1024, False, False),  # Qwen3-30B-A3B
    ((2048, 768, 128, 8), 2048, False, True),
    ((2048, 768, 128, 8), 4096, True, True),
    ((2880, 2880, 128, 4), 512, False, False),  # gpt-oss-120b
    ((2880, 2880, 128, 4), 1024, False, True),
    ((2048, 1024, 16, 2), 8192, False, True),
  ],
)
def test_where_gradients_are_taken_fewer_tokens_are_worth_a_plan(shape, tokens, forward, training):
  width, inner, num_experts, top_k = shape
  into, out = (
    jax.ShapeDtypeStruct((num_experts // 2, *each), BF16)
    for each in ((width, inner), (inner, width))
  )
  of_layer = {"tokens": tokens, "top_k": top_k, "num_ranks": 2, "dtype": BF16}

  def plans(training, **options):
    config = BalanceConfig(**{"device": H200, "implementation": "mosaic_gpu", **options})
    weights = ExpertWeights(into, into, out)
    return settle(config, **of_layer, weights=weights, training=training).plans

  assert (plans(False), plans(True)) == (forward, training)
  dearer = H200.replace("test", balance_training_seconds=1.0)
  assert not plans(True, device=dearer) and plans(False, device=dearer) == forward
  # Nothing else than this planner decides by pass.
  for options in ({"implementation": "portable"}, {"copy_rows": 100}, {"objective": "balance"}):
    assert plans(False, **options) == plans(True, **options)


def test_slots_that_are_asked_for_are_there():
  small = H200.replace("test", memory_bytes=1.0)
  for strategy in ("exact", "eplb+", lambda *_: None):
    config = BalanceConfig(device=small, strategy=strategy, objective="balance")
    assert settled(config).config.replica_slots == 6
  assert settled(BalanceConfig(device=small, replica_slots=5)).config.replica_slots == 5
  assert settled(BalanceConfig()).config.replica_slots == 6  # of a CPU nothing is known


# --- plans and rounds ------------------------------------------------------------------------


def test_only_the_planner_that_weighs_costs_leaves_a_layer_alone():
  """Nothing of these few tokens is worth a copy on H200; other planners were asked for."""
  for strategy in ("quota", "exact", "eplb+", lambda *_: None):
    config = BalanceConfig(device=H200, strategy=strategy)
    assert settled(config).plans == (strategy != "quota")
    assert not settled(dataclasses.replace(config, domain_size=1)).plans
    assert not settled(config, ranks=1).plans
  assert settled(BalanceConfig(device=H200, objective="balance")).plans
  assert settled(BalanceConfig()).plans


def loads(ranks, home, assignments, rng):
  """``[L, G, E]``: what choices can bring that need not be of distinct experts."""
  experts = ranks * home
  cases = [np.eye(experts)[expert] for expert in {0, home, experts - 1}]
  cases += [np.eye(experts)[:home].mean(axis=0), np.full(experts, 1 / experts)]
  cases += [rng.dirichlet(np.full(experts, 0.1)) for _ in range(6)]
  drawn = [rng.multinomial(assignments, chance, ranks) for chance in cases]
  return np.stack(drawn).astype(np.int32)


@pytest.mark.parametrize(
  ("options", "promised"),
  [
    ({}, True),
    ({"device": H200, "capacity_factor": 2.0}, False),  # too few tokens to be worth a plan
    ({"device": H200, "capacity_factor": 2.0, "objective": "balance"}, True),
    ({"replica_slots": 0}, False),
    ({"domain_size": 2}, False),
    ({"domain_size": 1}, False),
    ({"strategy": "none"}, False),
    ({"objective": "balance", "target": 1.2}, True),
    ({"objective": "balance", "target": 1.4}, False),
    ({"min_tokens_per_replica": 3}, False),
    ({"capacity_factor": "auto", "strategy": "none"}, True),
  ],
  ids=lambda value: "-".join(value) if isinstance(value, dict) else str(value),
)
def test_one_round_is_promised_where_every_load_fits(options, promised):
  """Also if a token names one expert twice, of which no plan is made where nothing can gain."""
  ranks, home, tokens, top_k = 4, 1, 15, 2
  config = BalanceConfig(**{"capacity_factor": 1.25, "implementation": "portable", **options})
  found = settled(config, tokens=tokens, top_k=top_k, ranks=ranks, home=home)
  plans = found.plans and config.strategy == "quota"

  @jax.jit
  def busiest(load_GE):
    quota = (
      plan_quotas(load_GE, found.config, found.cost.plan).quota if plans else home_quota(load_GE)
    )
    return jnp.max(jnp.sum(quota, axis=0))

  load_LGE = loads(ranks, home, tokens * top_k, np.random.default_rng(0))
  most = max(int(busiest(load_GE)) for load_GE in load_LGE)
  assert found.one_round == promised
  # For copies that serve too few these loads are not the worst.
  assert "min_tokens_per_replica" in options or (most <= found.capacity) == promised


@pytest.mark.parametrize(
  ("options", "more_room"),
  [
    ({}, True),
    ({"capacity_factor": 1.25}, False),
    ({"device": None}, False),  # copies weigh nothing
    ({"objective": "balance"}, False),
    ({"strategy": "none"}, False),
    ({"replica_slots": 1}, False),  # rounds are counted for one size
    ({"implementation": "portable"}, False),  # plain JAX passes over all of it
  ],
)
def test_copies_that_cost_have_more_room_where_no_rows_are_kept(options, more_room):
  config = BalanceConfig(**{"device": H200, "implementation": "mosaic_gpu", **options})
  found = settled(config, tokens=1 << 22)  # 1 GiB of a rank's tokens
  assert found.capacity == 1.25 * 2**23
  assert found.transient_capacity == (2 if more_room else 1.25) * 2**23
  training = found.cost.training or found.cost.plan
  assert training.capacity_rows == found.capacity
  assert found.cost.plan.capacity_rows == found.transient_capacity


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("tokens", [16, 64, 256, 1024])
@pytest.mark.parametrize("gradients", [False, True])
def test_no_load_needs_copies_to_fit_that_cost_more_than_not_balancing(ranks, tokens, gradients):
  """Tokens go to one rank, equally many to each of its experts: such loads need most copies."""
  home, top_k = 32, 8
  into, out = (jax.ShapeDtypeStruct((home, *shape), BF16) for shape in ((4096, 1536), (1536, 4096)))
  config = BalanceConfig(device=H200, implementation="mosaic_gpu")
  sizes = {"tokens": tokens, "top_k": top_k, "num_ranks": ranks, "dtype": BF16}
  found = settle(config, **sizes, weights=ExpertWeights(into, into, out))
  weighed = (found.cost.training if gradients else None) or found.cost.plan
  here = dataclasses.replace(found.config, implementation="portable")
  plan_here = jax.jit(lambda load_GE: plan_quotas(load_GE, here, weighed))
  for share in (0.3, 0.5, 0.7, 0.9, 1.0):
    load_GE = np.zeros((ranks, ranks, home), np.int32)
    load_GE[:, 0] = round(share * tokens * top_k / home)
    load_GE[:, 1:] = round((1 - share) * tokens * top_k / home / (ranks - 1))
    plan = plan_here(load_GE.reshape(ranks, -1))
    quota_EG, parents = np.asarray(plan.quota), np.asarray(plan.parent)
    assert quota_EG.sum(axis=0).max() <= int(weighed.capacity_rows)
    group = int(weighed.group_rows)
    busiest, before = (
      int((rows + group * (rows > 0)).sum(axis=0).max())
      for rows in (quota_EG, load_GE.sum(axis=0).T)
    )
    sends_G = np.bincount(parents[parents >= 0], minlength=ranks)
    copies = max(*sends_G, *np.sum(parents >= 0, axis=1))
    rows = max(busiest, copies * int(weighed.link_rows)) + copies * int(weighed.copy_rows)
    assert rows <= 1.05 * before


@pytest.mark.parametrize(
  ("options", "more_room"),
  [
    ({}, True),
    ({"domain_size": 1}, False),  # no copy is made
    ({"replica_slots": 0}, False),
    ({"copy_rows": 10**6}, False),  # nothing is known of links
    ({"alone": True}, False),  # as over several nodes
    ({"implementation": "portable"}, False),
    ({"objective": "balance"}, False),
    ({"capacity_factor": 2.0}, False),
  ],
)
def test_small_batches_have_more_room_where_copies_travel_beside_matmuls(
  options, more_room, monkeypatch
):
  tokens, top_k, home, ranks = 600, 8, 32, 16  # all of their tokens take more than 512 MiB
  options = dict(options)
  if options.pop("alone", False):
    monkeypatch.setattr(cost, "by_kernel", lambda operation, config: operation != "replicate")
  into, out = (jax.ShapeDtypeStruct((home, *shape), BF16) for shape in ((4096, 1536), (1536, 4096)))
  config = BalanceConfig(**{"device": H200, "implementation": "mosaic_gpu", **options})
  sizes = {"tokens": tokens, "top_k": top_k, "num_ranks": ranks, "dtype": BF16}
  found = settle(config, **sizes, weights=ExpertWeights(into, into, out))
  assert found.transient_capacity == found.capacity
  assert (found.capacity > 3 * tokens * top_k) == more_room
  assert more_room or found.capacity == 2 * tokens * top_k


@pytest.mark.parametrize(
  ("options", "tokens", "ranks", "has_all", "plans"),
  [
    ({}, 512, 4, True, False),  # a likely load gains nothing, and the worst not much
    ({}, 512, 8, False, True),  # the worst does
    ({}, 128, 8, True, False),
    ({}, 64, 16, True, False),  # nearly all are held in any case
    ({}, 128, 16, False, True),  # they would be many times a rank's own
    ({}, 1024, 4, False, True),
    ({"replica_slots": 1}, 1024, 4, True, True),  # a plan may not fit: no loop over rounds
    ({"replica_slots": 1}, 4096, 4, False, True),  # 1 GiB
    ({"domain_size": 1}, 1024, 4, True, False),  # no copy is made
    ({"domain_size": 2}, 512, 4, True, False),
    ({"domain_size": 2}, 2048, 4, True, True),  # another domain may have more than the mean
    ({"replica_slots": 0}, 1024, 4, True, False),
    ({"copy_rows": 10**6}, 1024, 4, True, False),
    ({"capacity_factor": 2.0}, 512, 4, False, True),
    ({"objective": "balance"}, 512, 4, False, True),
    ({"implementation": "portable"}, 512, 4, False, False),  # plain JAX passes over all rows
  ],
)
def test_small_batches_have_room_for_all_where_that_spares_a_plan_or_a_loop(
  options, tokens, ranks, has_all, plans
):
  top_k, home = 8, 32
  into, out = (jax.ShapeDtypeStruct((home, *shape), BF16) for shape in ((4096, 1536), (1536, 4096)))
  config = BalanceConfig(**{"device": H200, "implementation": "mosaic_gpu", **options})
  sizes = {"tokens": tokens, "top_k": top_k, "num_ranks": ranks, "dtype": BF16}
  found = settle(config, **sizes, weights=ExpertWeights(into, into, out))
  assert (found.capacity == ranks * tokens * top_k) == has_all
  assert found.plans == plans
  assert found.one_round or not has_all
