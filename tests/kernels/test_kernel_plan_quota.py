"""The planner kernels: interpreted against the portable planner, and lowering for GPUs."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from mosaic_interpret import interpreted
from programs import count_reaching
from thread_races import watched

from pallas_kernels.planner import tables
from pallas_kernels.planner.quota import plan_quota
from ultraep_jax.config import BalanceConfig
from ultraep_jax.planning import plan as portable
from ultraep_jax.planning import search
from ultraep_jax.types import PlanCost
from ultraep_jax.workloads import zipf_loads

STEPS = (9000, 500)  # few thresholds: interpretation is slow
COST = PlanCost(50, 3000, 700, 30)

# (ranks, experts, slots, options)
CONFIGS = {
  "relay": (6, 18, 2, {}),
  "direct": (4, 16, 1, {"transfer": "direct", "target": 1.1}),
  "domains": (
    8,
    24,
    2,
    {"domain_size": 4, "objective": "time", "target": 1.25, "min_tokens_per_replica": 40},
  ),
  "exact": (4, 12, 4, {}),
  "exact by time": (4, 8, 2, {"objective": "time", "transfer": "direct"}),
  "many slots": (2, 80, 70, {"min_tokens_per_replica": 2, "target": 1.3}),
  "many slots by time": (3, 60, 45, {"objective": "time"}),
}
# Close to the limits of int32, in one domain.
LARGEST = [2**30, 2**29, 2**28, 2**27, *(2**20 + e for e in range(4))]


def setup(ranks, experts, slots, options, steps=STEPS):
  """The arguments of both planners after the load."""
  options = {"objective": "balance", "transfer": "auto", **options}
  config = BalanceConfig(replica_slots=slots, **options)
  fixed, cost = portable.set_up(jnp.zeros((ranks, experts), jnp.int32), config, COST)
  return fixed._replace(steps=steps), cost


def load_matrix(load_E, ranks):
  """A matrix with these loads per expert, spread over the sources."""
  load_E = np.asarray(load_E)
  matrix = np.tile(load_E // ranks, (ranks, 1))
  matrix[0] += load_E - load_E // ranks * ranks
  return jnp.asarray(matrix, jnp.int32)


def assert_equal_plans(load_GE, fixed, cost):
  with interpreted():
    got = jax.block_until_ready(portable._plan_on_gpu(load_GE, fixed, cost))
  want = portable._plan(load_GE, fixed, cost)
  for name, left, right in zip(want._fields, got, want, strict=True):
    np.testing.assert_array_equal(left, right, err_msg=name)
  return want


def skewed(experts, seed):
  rng = np.random.default_rng(seed)
  weight_E = rng.permutation((np.arange(experts) + 1.0) ** -rng.uniform(0, 5))
  weight_E *= rng.uniform(0.5, 1.5, experts)
  return np.floor(weight_E / weight_E.sum() * rng.integers(1, 50_000)).astype(np.int32)


@pytest.mark.parametrize(
  "name",
  [name if name == "direct" else pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS],
)
def test_equals_the_portable_planner(name):
  ranks, experts, slots, options = CONFIGS[name]
  fixed, cost = setup(ranks, experts, slots, options)

  @hypothesis.settings(max_examples=3)
  @hypothesis.example(np.zeros(experts, np.int32))
  @hypothesis.example(np.full(experts, 7))
  @hypothesis.example(np.eye(experts, dtype=np.int32)[1] * 40_001)
  @hypothesis.example(np.pad(LARGEST, (0, experts - len(LARGEST))))
  @hypothesis.given(
    st.one_of(
      st.builds(functools.partial(skewed, experts), st.integers(0, 2**20)),
      st.lists(st.integers(0, 9), min_size=experts, max_size=experts).map(np.array),
    )
  )
  def check(load_E):
    assert_equal_plans(load_matrix(load_E, ranks), fixed, cost)

  check()


@pytest.mark.parametrize("group_rows", [100, 2**31 - 1])  # the latter is lowered to fit int32
def test_counts_groups_in_loads_and_rows_in_rounds(group_rows):
  fixed, _ = setup(2, 12, 2, {"objective": "time"}, steps=(9000,))
  load_GE = load_matrix([1000, *[0] * 5, *[40] * 5, 0], 2)
  plan = assert_equal_plans(load_GE, fixed, PlanCost(*map(jnp.int32, (50, 900, 0, group_rows))))
  assert plan.quota.sum(0).max() <= 900


@pytest.mark.parametrize("slots", [1, 2])  # 2 suffice: one block constructs
@pytest.mark.parametrize("busy, copies", [(110, 0), (150, 0), (151, 1)])
def test_nothing_is_searched_where_no_copy_can_gain(slots, busy, copies, monkeypatch):
  """A copy costs 50 rows beyond the mean of 100."""
  fixed, _ = setup(2, 4, slots, {"objective": "time"})
  sorts, sort = [], tables.sort

  def counted(*arguments):
    jax.debug.callback(lambda: sorts.append(1))
    sort(*arguments)

  monkeypatch.setattr(tables, "sort", counted)
  jax.clear_caches()
  load_GE = load_matrix([busy - 40, 40, 200 - busy, 0], 2)
  plan = assert_equal_plans(load_GE, fixed, PlanCost(*map(jnp.int32, (50, 1000, 0))))
  assert int((plan.replica_expert >= 0).sum()) == copies
  jax.effects_barrier()
  assert bool(sorts) == bool(copies)
  jax.clear_caches()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_equals_the_portable_planner_on_more_ranks_than_lanes(seed):
  """Several parts of ranks, deep trees, and leftovers of the cap."""
  fixed, cost = setup(40, 80, 2, {})
  assert_equal_plans(load_matrix(skewed(80, seed), 40), fixed, cost)


@pytest.mark.slow
@pytest.mark.parametrize("ranks, experts, slots", [(33, 33, 1), (3, 21, 65), (8, 264, 8)])
def test_equals_the_portable_planner_of_other_sizes(ranks, experts, slots):
  """Odd sizes, more slots than experts, and pieces of 128 experts that end within a rank."""
  fixed, cost = setup(ranks, experts, slots, {"transfer": "direct"}, steps=STEPS[:1])
  ties_E = np.random.default_rng(0).integers(0, 4, experts)
  ties_E[experts // ranks :: 3] = 0
  for load_E in (skewed(experts, 3), ties_E):
    assert_equal_plans(load_matrix(load_E, ranks), fixed, cost)


@pytest.mark.slow
def test_equals_the_portable_planner_where_ranks_use_some_slots():
  """An idle rank takes many small experts; used slots, and all, are several pieces of 128."""
  ranks, home, slots = 9, 24, 40
  fixed, cost = setup(ranks, ranks * home, slots, {}, steps=STEPS[:1])
  load_E = np.arange(ranks * home) % 3 + 10
  load_E[:home] = 0
  plan = assert_equal_plans(load_matrix(load_E, ranks), fixed, cost)
  used = int((plan.replica_expert >= 0).sum(axis=1).max())
  assert 128 < used * ranks <= (slots - 1) * ranks


@pytest.mark.slow
def test_equals_the_portable_planner_on_two_racks():
  """As many ranks as the kernels are for, with the experts of the largest models."""
  fixed, cost = setup(128, 896, 2, {"objective": "time"}, steps=STEPS[:1])
  load_GE = jnp.asarray(zipf_loads(0, 896, 128, 512, 16, 2.0))
  plan = assert_equal_plans(load_GE, fixed, cost)
  assert int((plan.replica_expert >= 0).sum()) > 64


@pytest.mark.slow
def test_ties_go_to_the_first():
  """Equal ranks, equal experts, and equal candidates."""
  fixed, cost = setup(*CONFIGS["relay"])
  for load_E in (
    [40, 40, 40, 0, 0, 0, 40, 40, 40, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    [0, 7, 7, 0, 0, 0, 7, 0, 7, 7, 7, 0, 1, 0, 0, 0, 1, 0],
  ):
    plan = assert_equal_plans(load_matrix(load_E, 6), fixed, cost)
    assert (plan.replica_expert >= 0).any()


@pytest.mark.slow
def test_fits_a_round_exactly():
  """One copy can make the busiest rank the capacity; below, two copies reach the mean."""
  fixed, _ = setup(*CONFIGS["exact by time"])
  load_GE = load_matrix([100, 0, 40, 0, 40, 0, 60, 0], 4)
  for capacity, ends in ((70, 70), (69, 60)):
    cost = PlanCost(jnp.int32(1000), jnp.int32(capacity))
    plan = assert_equal_plans(load_GE, fixed, cost)
    assert plan.quota.sum(0).max() == ends


# Ranks, experts and slots: as many ranks as lanes and more, and experts as threads and more.
CONSTRUCTED = [
  (4, 520, 98),
  pytest.param(40, 80, 2, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("ranks, experts, slots", CONSTRUCTED)
def test_constructs_as_the_portable_planner(ranks, experts, slots):
  fixed, _ = setup(ranks, experts, slots, {"transfer": "direct"})
  # Two ranks alike give, and the others take; of the experts many are alike.
  ties_M = np.random.default_rng(0).integers(0, 4, experts // ranks)
  ties_E = np.outer(np.isin(np.arange(ranks), (1, 3)), ties_M).reshape(-1)
  for load_E in (skewed(experts, 3), ties_E):
    assert_equal_plans(load_matrix(load_E, ranks), fixed._replace(searches=False), None)


@pytest.mark.slow
@pytest.mark.parametrize("searches", [True, False])
def test_threads_wait_for_each_other(searches):
  fixed, cost = setup(5, 15, 3, {"objective": "time"}, steps=STEPS[:1])
  fixed = fixed._replace(searches=searches)
  with interpreted(), watched():
    # A function of its own, so that it is traced here.
    plan = jax.jit(lambda load_GE: portable._plan_on_gpu.__wrapped__(load_GE, fixed, cost))
    for seed in range(2):
      jax.block_until_ready(plan(load_matrix(skewed(15, seed), 5)))


# --- lowering --------------------------------------------------------------------------------


@functools.cache
def lowered(ranks, experts, slots, objective, **options):
  options = {"objective": objective, **options}
  fixed, cost = setup(ranks, experts, slots, options, search.STEPS)
  load_GE = jax.ShapeDtypeStruct((ranks, experts), jnp.int32)
  traced = portable._plan_on_gpu.trace(load_GE, fixed, cost)
  return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
  "sizes, options",
  [
    ((2, 512, 256, "time"), {}),
    ((64, 512, 2, "balance"), {"domain_size": 8}),
    ((8, 128, 3, "balance"), {"min_tokens_per_replica": 128, "transfer": "direct"}),
    ((72, 576, 2, "time"), {"target": 1.01}),
    ((128, 896, 2, "time"), {}),
  ],
)
def test_lowers_for_gpus(sizes, options):
  assert lowered(*sizes, **options).count("custom_call @mosaic_gpu") == 2


def test_the_program_does_not_grow_with_experts_and_slots():
  assert len(lowered(2, 512, 256, "time")) < 2 * len(lowered(2, 64, 32, "time"))


@pytest.mark.parametrize(
  "to, check_vma", [("varying", True), ("varying", False), ("invarying", True)]
)
def test_lowers_inside_shard_map_and_keeps_the_type(to, check_vma):
  mesh = jax.make_mesh((4,), ("expert",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
  fixed, _ = setup(4, 16, 2, {"objective": "time"})

  def plan(row_1E, *cost):
    load_GE = jax.lax.all_gather(row_1E[0], "expert", to=to)
    planned = portable._plan_on_gpu(load_GE, fixed, PlanCost(*cost))
    if check_vma:
      types = {frozenset(jax.typeof(leaf).manual_axis_type.varying) for leaf in planned}
      assert types == {frozenset(jax.typeof(load_GE).manual_axis_type.varying)}
    return planned if to == "invarying" else jax.tree.map(lambda leaf: leaf[None], planned)

  scalar = jax.ShapeDtypeStruct((), jnp.int32)
  sharded = jax.shard_map(
    plan,
    mesh=mesh,
    in_specs=(P("expert"), P(), P()),
    out_specs=P() if to == "invarying" else P("expert"),
    check_vma=check_vma,
  )
  traced = jax.jit(sharded).trace(jax.ShapeDtypeStruct((4, 16), jnp.int32), *[scalar] * 2)
  text = traced.lower(lowering_platforms=("cuda",)).as_text()
  # Every rank plans for itself.
  assert not count_reaching(text)


# --- errors ----------------------------------------------------------------------------------

DEFAULTS = {
  "domain_size": 4,
  "num_slots": 2,
  "min_tokens": 1,
  "transfer": "auto",
  "by_time": False,
  "target": None,
  "cost": None,
  "steps": STEPS,
}


@pytest.mark.parametrize(
  "shape, options, error, message",
  [
    ((4, 16), {"num_slots": 0}, NotImplementedError, "replica slots and ranks to share, got 0"),
    ((4, 16), {"domain_size": 1}, NotImplementedError, "got 2 and 1"),
    (
      (64, 64),
      {"domain_size": 64, "num_slots": 256},
      NotImplementedError,
      "bytes of shared memory",
    ),
    ((4, 65536), {}, NotImplementedError, "bytes of shared memory"),
    ((4, 16), {"searches": False}, ValueError, "expected slots that suffice"),
    ((4, 16), {"num_slots": 3, "searches": False, "min_tokens": 2}, ValueError, "got 3 and 2"),
    ((4, 18), {}, ValueError, r"load_GE: expected shape \[G, E\]"),
    ((4, 16), {"domain_size": 3}, ValueError, "domain_size: expected a divisor of 4 ranks, got 3"),
    ((4, 16), {"by_time": True}, ValueError, "cost: expected an int32 array"),
    ((4, 16), {"cost": jnp.zeros(2, jnp.int32)}, ValueError, r"cost: expected shape \(4,\)"),
    ((4, 16), {"cost": jnp.zeros(4)}, TypeError, "cost: expected int32, got float32"),
  ],
)
def test_rejects(shape, options, error, message):
  with pytest.raises(error, match=message):
    plan_quota(jnp.zeros(shape, jnp.int32), **{**DEFAULTS, **options})


def test_rejects_other_dtypes():
  with pytest.raises(TypeError, match="load_GE: expected int32, got float32"):
    plan_quota(jnp.zeros((4, 16)), **DEFAULTS)
