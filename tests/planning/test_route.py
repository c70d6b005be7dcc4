"""Closed-form routing agrees with a brute-force model on every rank."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import equations

import ultraep_jax as uep
from ultraep_jax import testing
from ultraep_jax.planning import capacity, load, route

CONFIG = uep.BalanceConfig(objective="balance", capacity_factor=1.0)


def random_plan(rng: np.random.Generator, load_GE: np.ndarray, slots: int) -> uep.Plan:
  """Any legal plan: random copies with random quotas, far from balanced."""
  num_ranks, num_experts = load_GE.shape
  home = num_experts // num_ranks
  quota = np.zeros((num_experts, num_ranks), np.int32)
  quota[np.arange(num_experts), np.arange(num_experts) // home] = load_GE.sum(0)
  replica = np.full((num_ranks, slots), -1, np.int32)
  for rank in range(num_ranks):
    foreign = [e for e in range(num_experts) if e // home != rank and quota[e, e // home] > 0]
    rng.shuffle(foreign)
    for slot, expert in enumerate(foreign[: rng.integers(0, slots + 1)]):
      share = rng.integers(1, quota[expert, expert // home] + 1)
      replica[rank, slot] = expert
      quota[expert, rank] += share
      quota[expert, expert // home] -= share
  parent = np.where(replica >= 0, replica // home, -1)
  return uep.Plan(*(jnp.asarray(part, jnp.int32) for part in (replica, quota, parent)))


def random_choices(rng, ranks, tokens, top_k, num_experts, skew):
  scores = skew * rng.normal(size=num_experts) + rng.gumbel(size=(ranks, tokens, num_experts))
  index = np.argsort(-scores, axis=-1)[..., :top_k]
  return np.where(rng.random(index.shape) < 0.1, -1, index).astype(np.int32)


@functools.partial(jax.jit, static_argnames="config")
def route_all(index_GTK, load_GE, plan, config=CONFIG):
  ranks = jnp.arange(index_GTK.shape[0], dtype=jnp.int32)
  per_rank = jax.vmap(lambda index, rank: route.route_tokens(index, load_GE, plan, rank, config))
  return per_rank(index_GTK, ranks)


@jax.jit
def count_and_route(index_GTK, plan):
  num_experts = plan.quota.shape[0]
  load_GE = jax.vmap(lambda index: load.expert_load(index, num_experts))(index_GTK)
  return route_all(index_GTK, load_GE, plan)


def assert_routes(index_GTK: np.ndarray, plan: uep.Plan) -> None:
  num_experts, num_ranks = plan.quota.shape
  quota_EG = np.asarray(plan.quota)
  routes = count_and_route(jnp.asarray(index_GTK), plan)
  dest_GTK, row_GTK, size_GP = testing.brute_force_routes(index_GTK, plan)
  np.testing.assert_array_equal(routes.dest_TK, dest_GTK)
  np.testing.assert_array_equal(routes.row_TK, row_GTK)
  np.testing.assert_array_equal(routes.group_size_P, size_GP)
  for rank in range(num_ranks):
    # rows are a permutation of the used range
    rows = np.sort(row_GTK[dest_GTK == rank])
    np.testing.assert_array_equal(rows, np.arange(quota_EG[:, rank].sum()))
  for expert in range(num_experts):
    # exact on the host side; the source side is exact because every assignment has one row
    hosts = np.bincount(dest_GTK[index_GTK == expert], minlength=num_ranks)
    np.testing.assert_array_equal(hosts, quota_EG[expert])


@given(
  st.integers(0, 10**6),
  # ranks, experts, slots, choices; few shapes, which are compiled once each
  st.sampled_from(
    [(1, 4, 0, 2), (2, 2, 1, 2), (4, 8, 2, 4), (8, 16, 2, 2), (3, 9, 3, 1), (5, 5, 4, 4)]
  ),
)
@settings(max_examples=30)
def test_agrees_with_brute_force_on_random_plans(seed, shape):
  ranks, num_experts, slots, top_k = shape
  rng = np.random.default_rng(seed)
  index_GTK = random_choices(rng, ranks, 11, top_k, num_experts, rng.choice([0, 3]))
  load_GE = np.stack([np.bincount(i[i >= 0], minlength=num_experts) for i in index_GTK])
  assert_routes(index_GTK, random_plan(rng, load_GE, slots))


@pytest.mark.parametrize("kind", ["all-to-one", "all-masked", "one-source"])
def test_degenerate_loads(kind):
  index_GTK = np.full((4, 9, 2), -1, np.int32)
  if kind == "all-to-one":
    index_GTK[:] = [0, 1]
  elif kind == "one-source":
    index_GTK[2] = [5, 3]
  load_GE = np.stack([np.bincount(i[i >= 0], minlength=8) for i in index_GTK])
  plan = uep.plan_quotas(jnp.asarray(load_GE, jnp.int32), CONFIG)
  assert_routes(index_GTK, plan)


def test_local_tokens_stay():
  # Each rank sends everything to expert 0, which has a copy everywhere with an equal quota:
  # nothing has to cross.
  index_GTK = np.zeros((4, 8, 1), np.int32)
  replica = jnp.array([[-1], [0], [0], [0]], jnp.int32)
  quota = jnp.zeros((4, 4), jnp.int32).at[0].set(8)
  plan = uep.Plan(replica, quota, jnp.where(replica >= 0, 0, -1))
  load_GE = jnp.zeros((4, 4), jnp.int32).at[:, 0].set(8)
  routes = route_all(jnp.asarray(index_GTK), load_GE, plan)
  np.testing.assert_array_equal(routes.dest_TK[:, :, 0], np.arange(4)[:, None].repeat(8, 1))


@pytest.mark.parametrize(("factor", "rounds"), [(1.0, 4), (2.0, 2), (3.0, 2), (4.0, 1)])
def test_rounds_cover_the_busiest_rank(factor, rounds):
  config = uep.BalanceConfig(capacity_factor=factor, strategy="none")
  index_GTK = jnp.zeros((4, 8, 1), jnp.int32)
  load_GE = jnp.zeros((4, 4), jnp.int32).at[:, 0].set(8)
  quota = jnp.zeros((4, 4), jnp.int32).at[0, 0].set(32)
  empty = jnp.zeros((4, 0), jnp.int32)
  plan = uep.Plan(empty, quota, empty)
  rows = capacity.row_capacity(8, 1, 4, config)
  assert int(capacity.num_rounds(plan, rows)) == rounds
  assert int(jnp.max(route_all(index_GTK, load_GE, plan, config).row_TK)) // rows == rounds - 1


def test_memory_grows_with_experts_times_ranks_only():
  ranks, num_experts = 64, 256
  shapes = (
    jax.ShapeDtypeStruct((32, 4), jnp.int32),
    jax.ShapeDtypeStruct((ranks, num_experts), jnp.int32),
    uep.Plan(
      jax.ShapeDtypeStruct((ranks, 2), jnp.int32),
      jax.ShapeDtypeStruct((num_experts, ranks), jnp.int32),
      jax.ShapeDtypeStruct((ranks, 2), jnp.int32),
    ),
  )
  jaxpr = jax.make_jaxpr(lambda *args: route.route_tokens(*args, 0, CONFIG))(*shapes)
  sizes = [variable.aval.size for eqn in equations(jaxpr.jaxpr) for variable in eqn.outvars]
  assert max(sizes) <= ranks * num_experts


@pytest.mark.parametrize(
  ("index_shape", "load_shape", "message"),
  [
    ((8, 2), (4, 9), r"load_GE: expected shape \[4, 8\], got \[4, 9\]"),
    ((8,), (4, 8), r"expert_index_TK: expected shape \[T, K\], got \[8\]"),
  ],
)
def test_wrong_shapes_raise(index_shape, load_shape, message):
  empty = jnp.zeros((4, 0), jnp.int32)
  plan = uep.Plan(empty, jnp.zeros((8, 4), jnp.int32), empty)
  with pytest.raises(ValueError, match=message):
    route.route_tokens(
      jnp.zeros(index_shape, jnp.int32), jnp.zeros(load_shape, jnp.int32), plan, 0, CONFIG
    )


def test_what_is_no_route_is_refused():
  empty, load = jnp.zeros((4, 0), jnp.int32), jnp.zeros((4, 8), jnp.int32)
  plan = uep.Plan(empty, jnp.zeros((8, 4), jnp.int32), empty)
  index = jnp.zeros((8, 2), jnp.int32)
  with pytest.raises(ValueError, match=r"rank: expected one in \[0, 4\), got 9"):
    route.route_tokens(index, load, plan, 9, CONFIG)
  with pytest.raises(TypeError, match="expert_index_TK: expected a dtype of kind integer"):
    route.route_tokens(index.astype(jnp.float32), load, plan, 0, CONFIG)
  with pytest.raises(TypeError, match="config: expected a BalanceConfig, got NoneType"):
    route.route_tokens(index, load, plan, 0, None)
