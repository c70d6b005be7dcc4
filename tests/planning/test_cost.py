"""What the planner weighs: seconds on described devices as rows, and where plans can gain."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layer_problems import make_mesh

import ultraep_jax as uep
from ultraep_jax.devices.device import Device
from ultraep_jax.planning import cost as costs
from ultraep_jax.planning.cost import LayerCost, cost_on, layer_cost
from ultraep_jax.planning.plan import plan_quotas
from ultraep_jax.types import PlanCost
from ultraep_jax.workloads import all_to_one_loads, expert_indices

H200, BF16, F32 = Device.load("h200"), jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
TIME = uep.BalanceConfig()


def experts(width, inner, num=1, fused=False, dtype=BF16):
  shapes = (width, 2 * inner if fused else inner), (inner, width)
  into, out = (jax.ShapeDtypeStruct((num, *shape), dtype) for shape in shapes)
  return uep.ExpertWeights.fused(into, out) if fused else uep.ExpertWeights(into, into, out)


# --- what things cost ------------------------------------------------------------------------


def test_a_copy_is_what_is_exposed_of_it():
  """Qwen3-235B's: 37.7 MB travel 116 µs, which are about 2440 rows."""
  cost = cost_on(H200, BF16, experts(4096, 1536), 1000)
  size = 3 * 4096 * 1536
  row = 2 * size / H200.matmul_rate(4096, 1536)
  sent = H200["copy_exposed_forward"] * 2 * size / H200["copy_rate"]
  assert cost.plan.copy_rows == round(sent / row)
  assert cost.plan.link_rows == round((2 * size / H200["copy_rate"] + 8e-6) / row)
  assert 2400 < cost.plan.link_rows < 2500 and cost.plan.copy_rows < 600
  # A group, of a copy or at home: half a tile and reading the weights, of which 0.7 are exposed.
  slot = 64 * row + 0.5 * 2 * size / H200["memory_rate"]
  assert cost.plan.group_rows == round(0.7 * slot / row) == 103
  assert cost.must_spare == cost.plan.copy_rows + 103 + 3 * cost.fixed_rows
  assert cost.plan.capacity_rows == 1000
  assert cost.fixed_rows == round(33e-6 / row)
  assert cost.read_rows == round(2 * size / H200["memory_rate"] / row)


def test_narrow_experts_take_longer_a_row():
  rows = [cost_on(H200, BF16, experts(*shape), 1) for shape in ((2048, 768), (4096, 1536))]
  assert rows[0].plan.copy_rows < 0.8 * rows[1].plan.copy_rows  # while copies are as fast
  assert rows[0].fixed_rows > 2.9 * rows[1].fixed_rows


def test_copies_alone_cost_all_of_their_time():
  alone = costs.copy_seconds(H200, 35_000_000, beside=False)
  assert alone == pytest.approx(1e-4)
  half = H200.replace("test", copy_exposed_forward=0.5)
  assert costs.copy_seconds(half, 35_000_000) == pytest.approx(0.5e-4)
  # In float32 experts are multiplied in plain JAX, and no kernel hides their copies.
  kernels, portable = (cost_on(half, F32, experts(4096, 1536), 1, moving=m) for m in (True, False))
  size, row = 12 * 4096 * 1536, costs.row_seconds(H200.portable, 4096, 1536)
  slot = 512 + 3 * H200.portable["tile_seconds"] / row
  assert kernels.plan.copy_rows == round(size / H200["copy_rate"] / row + slot)
  assert kernels.plan.link_rows == kernels.plan.group_rows == 0
  assert portable.plan.copy_rows == round(size / H200.portable["copy_rate"] / row + slot)


@pytest.mark.parametrize("direction, work", [("forward", 1), ("backward", 2)])
def test_a_slot_is_half_a_tile_and_its_weights(direction, work):
  """Backward multiplies twice as much, reads the weights and writes their gradients."""
  device = H200.replace("test", matmul_tile=64.0, weights_exposed=0.25)
  for matrices in (2, 3):
    size = matrices * 2048 * 1024
    row = work * 2 * size / device.matmul_rate(2048, 1024, backward=work == 2)
    reading = 0.25 * work * 2 * size / device["memory_rate"]
    shape = 2048, 1024, direction, matrices
    assert costs.row_seconds(device, *shape) == pytest.approx(row)
    assert costs.reading_seconds(device, *shape) == pytest.approx(reading)
    assert costs.slot_seconds(device, *shape) == pytest.approx(32 * row + reading)


def test_the_config_decides():
  args = BF16, experts(4096, 1536), 1000
  assert layer_cost(*args, TIME) == LayerCost(PlanCost(0, 1000), 0)  # a CPU: nothing is known
  described = dataclasses.replace(TIME, device=H200)
  without = {"moving": False, "multiplying": False, "planning": False}
  assert layer_cost(*args, described) == cost_on(H200, *args, **without)
  on_kernels = dataclasses.replace(described, implementation="mosaic_gpu")
  assert layer_cost(*args, on_kernels) == cost_on(H200, *args)
  given = dataclasses.replace(on_kernels, copy_rows=7)
  assert layer_cost(*args, given).plan == PlanCost(7, 1000)  # and nothing else
  assert layer_cost(*args, dataclasses.replace(TIME, copy_rows=7)).plan.copy_rows == 7


def test_no_kernels_are_assumed_where_they_cannot_run():
  without = {"moving": False, "multiplying": False, "planning": False}
  for domain in (2, 8):
    args = Device.load("a100"), BF16, experts(4096, 1536), 1000
    assert cost_on(*args, domain=domain) == cost_on(*args, **without, domain=domain)


def test_a_plan_without_a_kernel_costs_its_search_and_more_among_more_ranks():
  args = H200, BF16, experts(4096, 1536), 1000
  row = costs.row_seconds(H200, 4096, 1536)
  cost = cost_on(*args, planning=False)
  assert cost.fixed_rows == round(H200.portable["balance_seconds"] / row)
  assert cost.fixed_rows > 5 * cost_on(*args).fixed_rows
  among = cost_on(*args, planning=False, domain=10)
  more = round(8 * H200.portable["plan_seconds_per_rank"] / row)
  assert abs(among.fixed_rows - cost.fixed_rows - more) <= 1
  assert not among.by_kernel and cost_on(*args).by_kernel


def test_rows_stay_small_integers():
  cost = cost_on(H200, BF16, experts(8, 8), 2**30)
  values = *cost.plan, *cost.training, cost.fixed_rows
  assert all(type(value) is int and 0 <= value <= 2**30 for value in values)


@pytest.mark.parametrize("slow", ["copy_rate", "reduce_rate", None])
@pytest.mark.parametrize(
  "fused, dtype", [(True, "bfloat16"), (False, "bfloat16"), (False, "float32")]
)
@pytest.mark.parametrize("beside", [True, False])
def test_training_sends_copies_twice_and_gradients_home(beside, fused, dtype, slow):
  """Whichever of them takes longest beside its matmuls. Gradients are in the weights' dtype."""
  exposed = {"copy_exposed_forward": 0.25, "copy_exposed_backward": 0.5, "reduce_exposed": 0.75}
  slower = {slow: H200[slow] / 4} if slow else {}
  device, size = H200.replace("test", **exposed, **slower), 3 * 4096 * 1536
  weights = experts(4096, 1536, fused=fused, dtype=dtype)
  got = cost_on(device, BF16, weights, 1000, moving=beside, multiplying=True)
  links = device if beside else device.portable
  shapes = [(4096, 1536, direction, 3) for direction in ("forward", "backward")]
  row = sum(costs.row_seconds(device, *shape) for shape in shapes)
  sent, home = 2 * size / links["copy_rate"], size / links["reduce_rate"]
  home *= 2 if dtype == "bfloat16" else 4
  delay = 0.25 * sent + 0.5 * sent + 0.75 * home if beside else 2 * sent + home
  slots = sum(costs.slot_seconds(device, *shape) for shape in shapes)
  # Of backward's six matmuls copies of gate and of up have one each, or one if fused; gradients
  # have three.
  matmul = costs.row_seconds(device, *shapes[1]) / 6
  # Of copies 1.73 times as much may travel as that lasts, of gradients 1.15 times.
  together = 2 if fused else 1
  limits = [(2 * sent + home) / row, together * (sent / 3 + 10.6e-6) / matmul / 1.73]
  limits += [(home + 1.5e-5) / matmul / 3 / 1.15, got.plan.link_rows]  # and as many as forward
  link_rows = round(max(limits)) if beside else 0
  assert got.training == PlanCost(round(delay / row), 1000, link_rows, round(0.7 * slots / row))


def test_a_cost_knows_whether_gradients_are_taken():
  cost = LayerCost(PlanCost(1, 2, 3), 0, PlanCost(10, 20, 30))

  def layer(x, w):
    return jnp.sum(x * w) + sum(cost.weighed(x, w))

  x, w = jnp.zeros(2), jnp.zeros(2)
  assert layer(x, w) == jax.jit(layer)(x, w) == 6
  for of in (0, 1):  # by any of them
    for function in (layer, jax.jit(layer), jax.checkpoint(layer)):
      value, grad = jax.value_and_grad(function, argnums=of)(x, w)
      assert value == 60 and not grad.any()
  in_scan = jax.value_and_grad(
    lambda x: jax.lax.scan(lambda c, _: (c, layer(x, w)), 0, None, 2)[1][1]
  )
  assert in_scan(x)[0] == 60
  assert cost._replace(training=None).weighed(x, w) == cost.plan


# --- whether a plan can gain -------------------------------------------------------------------


def sizes(tokens, top_k, num_experts, num_ranks):
  return {
    "tokens": tokens,
    "top_k": top_k,
    "num_experts": num_experts,
    "num_ranks": num_ranks,
  }


@pytest.mark.parametrize(
  ("shape", "domain", "rows"),
  [
    ((10, 2, 16, 4), None, 12),  # 0.3 twice over the mean of 20
    ((10, 2, 16, 4), 2, 6),
    ((10, 2, 16, 4), 1, 0),
    ((10, 8, 16, 8), None, 72),  # 0.3 three times over 80
    ((10, 8, 8, 8), None, 0),  # a rank has 1 of the 8 experts of a token: 80 rows at most
    ((3, 1, 2, 2), None, 1),
    ((10, 2, 16, 1), None, 0),
    ((0, 2, 16, 4), None, 0),
  ],
)
def test_what_a_plan_gains_for_a_likely_load(shape, domain, rows):
  config = dataclasses.replace(TIME, domain_size=domain)

  def gains(copy_rows, fixed_rows=0):
    cost = LayerCost(PlanCost(copy_rows, 10**6), fixed_rows)
    return cost.can_gain(config, **sizes(*shape))

  assert not gains(rows) and not gains(0, rows) and not gains(10**6)
  if rows:
    assert gains(rows - 1) and not gains(rows - 1, 1)
    for fixed_rows in range(rows):  # thrice, as every load pays it
      assert gains(0, fixed_rows) == (3 * fixed_rows < rows)
  assert LayerCost(PlanCost(10**6, 10**6), 0).can_gain(
    dataclasses.replace(config, objective="balance"), **sizes(*shape)
  )


def test_where_a_plan_takes_little_a_likely_load_has_to_gain_less():
  """Likely are 12 rows over the mean of 20. Twice 5 are fewer, three times are not."""

  def gains(fixed_rows, read_rows, by_kernel=True):
    cost = LayerCost(PlanCost(0, 10**6), fixed_rows, None, by_kernel, read_rows)
    return cost.can_gain(TIME, **sizes(10, 2, 16, 4))

  # An eighteenth of the mean and of reading four experts' weights.
  assert gains(5, 18) and not gains(5, 17)
  assert not gains(6, 10**6) and gains(3, 0)
  # Where a search takes the time, it is twice in any case.
  assert not gains(6, 10**6, by_kernel=False) and gains(5, 0, by_kernel=False)


def test_a_round_that_is_spared_is_a_gain():
  """80 rows at most: the planner takes what fits one round, whatever copies cost."""
  dear = [LayerCost(PlanCost(10**6, capacity), 10**6) for capacity in (79, 80)]
  assert [cost.can_gain(TIME, **sizes(10, 2, 16, 4)) for cost in dear] == [True, False]
  alone = dataclasses.replace(TIME, domain_size=1)
  assert not dear[0].can_gain(alone, **sizes(10, 2, 16, 4))


@pytest.mark.parametrize(
  ("most", "domain", "link_rows", "rows"),
  [
    (160, 8, 0, 140),  # shared by all
    (160, 2, 0, 80),  # by two
    (161, 2, 0, 80),
    (160, 8, 60, 100),  # a copy is as long on its way as 60 rows
    (160, 1, 0, 0),
  ],
)
def test_a_rare_load_has_to_gain_six_times_what_a_likely_one_has_to(most, domain, link_rows, rows):
  for fixed_rows in range(40):
    cost = LayerCost(PlanCost(2, 160, link_rows), fixed_rows)
    assert cost.can_gain_much(most, domain) == (rows > 6 * (2 + 3 * fixed_rows))


def test_a_plan_without_a_kernel_has_to_gain_twice_what_it_costs():
  """A second round that may come is none: loads that need none would all pay for a search."""
  # Likely are 12 rows more than the mean of 20.
  for copy_rows, fixed_rows, gains in ((5, 0, True), (6, 0, False), (3, 2, True), (3, 3, False)):
    cost = LayerCost(PlanCost(copy_rows, 20), fixed_rows, by_kernel=False)
    assert cost.can_gain(TIME, **sizes(10, 2, 16, 4)) == gains


@pytest.mark.parametrize("seed", range(3))
def test_no_likely_load_gains_where_none_can(seed):
  """The planner, asked all the same, copies nothing; with copies one row cheaper it may."""
  tokens, top_k, num_experts, num_ranks = 20, 1, 2, 2
  config = dataclasses.replace(TIME, replica_slots=1, implementation="portable")
  # The busiest rank has 26 of 40 rows, and may send 6 of them to the other.
  other = np.random.default_rng(seed).integers(0, 15)  # of rank 0's rows for the other expert
  load_GE = np.array([[20 - other, other], [6 + other, 14 - other]], np.int32)
  assert load_GE.sum(0).tolist() == [26, 14]
  for copy_rows, copies in ((6, False), (5, True)):
    cost = LayerCost(PlanCost(copy_rows, 40), 0)
    assert cost.can_gain(TIME, **sizes(tokens, top_k, num_experts, num_ranks)) == copies
    plan = plan_quotas(jnp.asarray(load_GE), config, cost.plan)
    assert bool((plan.replica_expert >= 0).any()) == copies


# --- in a layer ------------------------------------------------------------------------------


def run_layer(config, tokens):
  """A jaxpr, and the statistics, of a layer all of whose tokens choose rank 0's experts."""
  ranks, width, inner, num = 4, 16, 32, 8
  weights = uep.ExpertWeights(*(
    jnp.ones((num, *shape)) for shape in ((width, inner), (width, inner), (inner, width))
  ))  # fmt: skip
  load_GE = all_to_one_loads(num, ranks, tokens, 2)
  index = jnp.asarray(expert_indices(0, load_GE, 2).reshape(-1, 2))
  arguments = jnp.ones((ranks * tokens, width)), index, jnp.ones((ranks * tokens, 2)), weights
  with jax.set_mesh(make_mesh(ranks)):

    def layer(*args):
      return uep.sharded_moe(*args, config=config)[1]

    return str(jax.make_jaxpr(layer)(*arguments)), jax.jit(layer)(*arguments)


def test_a_layer_that_cannot_gain_plans_nothing():
  """On H200 a copy of even the smallest expert costs more than these few tokens."""
  few = uep.BalanceConfig(device=H200, capacity_factor=4.0)
  text, stats = run_layer(few, tokens=8)
  balanced, other = run_layer(dataclasses.replace(few, objective="balance"), tokens=8)
  assert not re.search(r"name=_plan\s", text) and re.search(r"name=_plan\s", balanced)
  assert int(stats.replicas[0]) == 0 < int(other.replicas[0])
  np.testing.assert_array_equal(stats.load_after_G[0], [64, 0, 0, 0])
  assert jax.tree.map(jnp.shape, stats) == jax.tree.map(jnp.shape, other)


def test_without_a_description_a_layer_balances():
  """As on CPUs: what nothing is known of weighs nothing."""
  _, stats = run_layer(uep.BalanceConfig(), tokens=8)
  np.testing.assert_array_equal(stats.load_after_G[0], [16, 16, 16, 16])
