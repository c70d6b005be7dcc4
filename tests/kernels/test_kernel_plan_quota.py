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

from pallas_kernels.planner.quota import plan_quota
from ultraep_jax.config import BalanceConfig
from ultraep_jax.planning import plan as portable
from ultraep_jax.types import PlanCost

STEPS = (32768, 9000, 500)  # few thresholds: interpretation is slow
COST = PlanCost(50, 3000)

# (ranks, experts, slots, options)
CONFIGS = {
  "relay": (6, 18, 2, {}),
  "direct": (4, 16, 1, {"transfer": "direct", "target": 1.1}),
  "floor": (5, 15, 2, {"min_tokens_per_replica": 40, "objective": "time"}),
  "domains": (8, 24, 2, {"domain_size": 4, "objective": "time", "target": 1.25}),
  "exact": (4, 12, 4, {}),
  "exact by time": (4, 8, 2, {"objective": "time", "transfer": "direct"}),
  "exact by time, relayed": (5, 10, 2, {"objective": "time"}),
}


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


def skewed(experts, seed):
  rng = np.random.default_rng(seed)
  weight_E = rng.permutation((np.arange(experts) + 1.0) ** -rng.uniform(0, 5))
  weight_E *= rng.uniform(0.5, 1.5, experts)
  return np.floor(weight_E / weight_E.sum() * rng.integers(1, 50_000)).astype(np.int32)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_equals_the_portable_planner(name):
  ranks, experts, slots, options = CONFIGS[name]
  fixed, cost = setup(ranks, experts, slots, options)

  @hypothesis.settings(max_examples=6)
  @hypothesis.example(np.zeros(experts, np.int32))
  @hypothesis.example(np.full(experts, 7))
  @hypothesis.example(np.eye(experts, dtype=np.int32)[1] * 40_001)
  @hypothesis.given(
    st.one_of(
      st.builds(functools.partial(skewed, experts), st.integers(0, 2**20)),
      st.lists(st.integers(0, 9), min_size=experts, max_size=experts).map(np.array),
    )
  )
  def check(load_E):
    assert_equal_plans(load_matrix(load_E, ranks), fixed, cost)

  check()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_equals_the_portable_planner_on_more_ranks_than_lanes(seed):
  """Several parts of ranks, deep trees, and leftovers of the cap."""
  fixed, cost = setup(40, 80, 2, {})
  assert_equal_plans(load_matrix(skewed(80, seed), 40), fixed, cost)


@pytest.mark.parametrize("options", [{}, {"objective": "time"}])
def test_equals_the_portable_planner_once(options):
  fixed, cost = setup(4, 8, 2, options, steps=STEPS[:1])
  assert_equal_plans(load_matrix(skewed(8, 1), 4), fixed, cost)


@pytest.mark.slow
def test_equals_the_portable_planner_near_the_limits_of_int32():
  fixed, cost = setup(4, 16, 2, {"objective": "time", "target": 1.01})
  load_E = np.array([2**30, 2**29, 2**28, 2**27] + [2**20 + e for e in range(12)])
  assert_equal_plans(load_matrix(load_E, 4), fixed, cost)


# --- lowering --------------------------------------------------------------------------------


@pytest.mark.parametrize(
  "ranks, experts, slots, options",
  [
    (4, 64, 2, {"objective": "time", "target": 1.01}),
    (4, 64, 16, {}),
    (64, 256, 2, {}),
    (64, 256, 4, {"objective": "time"}),
    (64, 512, 2, {"domain_size": 8}),
    (8, 128, 3, {"min_tokens_per_replica": 128, "transfer": "direct"}),
  ],
)
def test_lowers_for_gpus(ranks, experts, slots, options):
  fixed, cost = setup(ranks, experts, slots, options, portable._STEPS)
  load_GE = jax.ShapeDtypeStruct((ranks, experts), jnp.int32)
  traced = portable._plan_on_gpu.trace(load_GE, fixed, cost)
  text = traced.lower(lowering_platforms=("cuda",)).as_text()
  assert text.count("custom_call @mosaic_gpu") == 2


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("to", ["varying", "invarying"])
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
  assert "uses_xla_collective_metadata = true" not in text


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
    ((64, 512), {"domain_size": 64, "num_slots": 33}, NotImplementedError, "expected at most 32"),
    ((4, 160), {"num_slots": 40}, NotImplementedError, "at most 32 home experts"),
    ((4, 65536), {}, NotImplementedError, "bytes of shared memory"),
    ((4, 18), {}, ValueError, r"load_GE: expected shape \[G, E\]"),
    ((4, 16), {"domain_size": 3}, ValueError, "domain_size: expected a divisor of 4 ranks, got 3"),
    ((4, 16), {"by_time": True}, ValueError, "cost: expected an int32 array"),
    ((4, 16), {"cost": jnp.zeros(3, jnp.int32)}, ValueError, r"cost: expected shape \(2,\)"),
    ((4, 16), {"cost": jnp.zeros(2)}, TypeError, "cost: expected int32, got float32"),
  ],
)
def test_rejects(shape, options, error, message):
  with pytest.raises(error, match=message):
    plan_quota(jnp.zeros(shape, jnp.int32), **{**DEFAULTS, **options})


def test_rejects_other_dtypes():
  with pytest.raises(TypeError, match="load_GE: expected int32, got float32"):
    plan_quota(jnp.zeros((4, 16)), **DEFAULTS)
