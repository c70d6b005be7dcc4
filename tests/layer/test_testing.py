"""The workloads have the sizes and skew they promise; the checks catch each kind of bad plan."""

import functools
import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ultraep_jax import testing
from ultraep_jax.config import BalanceConfig
from ultraep_jax.types import ExpertWeights, Plan

E, G, T, K = 32, 8, 128, 4
SIZES = {"num_experts": E, "num_ranks": G, "tokens": T, "top_k": K}

GENERATORS = {
  "zipf": functools.partial(testing.zipf_loads, ratio=2.0),
  "flat": functools.partial(testing.flat_loads, ratio=2.5),
  "balanced": testing.balanced_loads,
  "all_to_one": lambda seed, **sizes: testing.all_to_one_loads(**sizes),
  "bursty": lambda seed, **sizes: testing.bursty_loads(seed, ratio=2.0, steps=3, **sizes)[-1],
} | {
  kind: functools.partial(testing.adversarial_loads, kind=kind)
  for kind in testing.ADVERSARIAL_KINDS
}


def rank_ratio(load_GE: np.ndarray) -> float:
  load_G = load_GE.sum(axis=0).reshape(load_GE.shape[0], -1).sum(axis=1)
  return load_G.max() / load_G.mean()


@pytest.mark.parametrize("name", GENERATORS)
@hypothesis.settings(max_examples=20)
@hypothesis.given(seed=st.integers(0, 2**31))
def test_every_workload_is_made_of_tokens_with_distinct_experts(name, seed):
  load_GE = GENERATORS[name](seed, **SIZES)
  assert load_GE.shape == (G, E) and load_GE.dtype == np.int32
  np.testing.assert_array_equal(load_GE.sum(axis=1), np.full(G, T * K))
  assert load_GE.min() >= 0 and load_GE.max() <= T
  np.testing.assert_array_equal(load_GE, GENERATORS[name](seed, **SIZES))
  index_GTK = testing.expert_indices(seed, load_GE, K)
  assert index_GTK.shape == (G, T, K) and index_GTK.dtype == np.int32
  ordered = np.sort(index_GTK, axis=-1)
  assert (np.diff(ordered, axis=-1) > 0).all()
  counted = np.stack([np.bincount(rank.reshape(-1), minlength=E) for rank in index_GTK])
  np.testing.assert_array_equal(counted, load_GE)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(
  ("num_experts", "num_ranks", "top_k"), [(256, 64, 8), (128, 8, 8), (16, 4, 1), (64, 64, 6)]
)
@pytest.mark.parametrize("generate", [testing.zipf_loads, testing.flat_loads])
def test_the_ratio_is_exact(generate, num_experts, num_ranks, top_k, shuffle):
  tokens = 1024
  for ratio in (1.0, 1.5, 2.0, 3.0):
    load_GE = generate(3, num_experts, num_ranks, tokens, top_k, ratio, shuffle=shuffle)
    assert abs(rank_ratio(load_GE) - ratio) <= 2 / (tokens * top_k)


def test_shuffling_moves_the_hot_rank_and_the_hot_expert():
  sorted_E = testing.zipf_loads(0, **SIZES, ratio=2.0, shuffle=False).sum(axis=0)
  sorted_GM = sorted_E.reshape(G, -1)
  assert (np.diff(sorted_GM.sum(axis=1)) <= 1).all()
  assert (np.diff(sorted_GM, axis=1) <= 1).all()
  hot = [
    int(testing.zipf_loads(seed, **SIZES, ratio=2.0).sum(axis=0).argmax()) for seed in range(20)
  ]
  assert len({expert // (E // G) for expert in hot}) > 3
  assert len({expert % (E // G) for expert in hot}) > 2


def test_sources_differ_where_the_totals_allow():
  load_GE = testing.zipf_loads(0, **SIZES, ratio=2.0)
  assert np.ptp(load_GE, axis=0).mean() > load_GE.mean() / 4


def test_the_shapes_of_skew():
  flat = testing.flat_loads(0, **SIZES, ratio=2.0, shuffle=False).sum(axis=0)
  assert np.ptp(flat[: E // G]) <= 1 and np.ptp(flat[E // G :]) <= 1
  assert np.ptp(testing.balanced_loads(0, **SIZES).sum(axis=0)) == 0
  one = testing.all_to_one_loads(E, G, T, 1, rank=3)
  assert np.count_nonzero(one) == G and (one[:, 3 * E // G] == T).all()
  bursts = testing.bursty_loads(0, **SIZES, ratio=3.0, steps=40)
  same = [np.array_equal(a, b) for a, b in itertools.pairwise(bursts)]
  assert 5 < sum(same) < 35
  assert max(map(rank_ratio, bursts)) > 2 and min(map(rank_ratio, bursts)) < 1.5
  giant = testing.adversarial_loads(0, **SIZES, kind="giant").sum(axis=0)
  assert giant.max() == G * T > T * K
  medium = np.sort(testing.adversarial_loads(0, **SIZES, kind="medium").sum(axis=0))
  assert np.ptp(medium[: E // 2]) <= 1 and np.ptp(medium[E // 2 :]) <= 1
  assert medium[-1] / medium[0] == pytest.approx(3, abs=0.05)


BAD_CALLS = [
  (lambda: testing.zipf_loads(0, 30, 8, 16, 2, 2.0), "num_experts: expected a multiple of 8"),
  (lambda: testing.zipf_loads(0, 32, 8, 16, 2, 0.5), "ratio: expected a number in"),
  (lambda: testing.zipf_loads(0, 32, 8, 16, 2, 9.0), "ratio: expected a number in"),
  (lambda: testing.flat_loads(0, 32, 8, 16, 2, 9.0), "ratio: expected a number in"),
  (lambda: testing.balanced_loads(0, 8, 4, 0, 2), "tokens: expected at least 1"),
  (lambda: testing.balanced_loads(0, 8, 4, 16, 9), "top_k: expected a number in"),
  (lambda: testing.all_to_one_loads(8, 4, 16, 1, rank=4), "rank: expected a rank in"),
  (lambda: testing.bursty_loads(0, 8, 4, 16, 1, 2.0, steps=0), "steps: expected at least 1"),
  (lambda: testing.adversarial_loads(0, 8, 4, 16, 1, kind="x"), "kind: expected one of"),
  (lambda: testing.expert_indices(0, np.array([[3, 0], [2, 2]]), 2), "load_GE: expected equal"),
  (lambda: testing.expert_indices(0, np.array([[3, 1], [2, 2]]), 2), "load_GE: expected entries"),
]


@pytest.mark.parametrize(("call", "message"), BAD_CALLS)
def test_bad_workloads_are_refused(call, message):
  with pytest.raises(ValueError, match=message):
    call()


def moe_problem(num_experts: int = 5, hidden: int = 6, inner: int = 7, top_k: int = 2):
  rng = np.random.default_rng(0)

  def normal(*shape: int) -> jax.Array:
    return jnp.asarray(rng.normal(size=shape), jnp.float32)

  index_TK = jnp.asarray(np.stack([rng.permutation(num_experts)[:top_k] for _ in range(9)]))
  index_TK = index_TK.astype(jnp.int32).at[2, 0].set(-1).at[3].set(-1)
  shape = (num_experts, hidden, inner)
  weights = ExpertWeights(normal(*shape), normal(*shape), normal(num_experts, inner, hidden))
  return normal(9, hidden), index_TK, normal(9, top_k), weights


def by_hand(x_TD, index_TK, gate_TK, weights: ExpertWeights) -> np.ndarray:
  wi_gate, wi_up, wo = (np.asarray(w, np.float64) for w in jax.tree.leaves(weights))
  y_TD = np.zeros(x_TD.shape)
  for (token, choice), expert in np.ndenumerate(np.asarray(index_TK)):
    if expert >= 0:
      x_D = np.asarray(x_TD[token], np.float64)
      a_F = x_D @ wi_gate[expert]
      inner_F = a_F / (1 + np.exp(-a_F)) * (x_D @ wi_up[expert])
      y_TD[token] += float(gate_TK[token, choice]) * inner_F @ wo[expert]
  return y_TD


def test_dense_moe_equals_a_loop_over_assignments():
  problem = moe_problem()
  y_TD = jax.jit(testing.dense_moe)(*problem)
  assert y_TD.dtype == jnp.float32
  np.testing.assert_allclose(y_TD, by_hand(*problem), rtol=1e-4, atol=1e-4)
  np.testing.assert_array_equal(y_TD[3], np.zeros(6))


def test_dense_moe_takes_bfloat16_and_an_activation():
  x_TD, index_TK, gate_TK, weights = moe_problem()
  low = jax.tree.map(lambda w: w.astype(jnp.bfloat16), (x_TD, gate_TK, weights))
  x, gate, w = jax.tree.map(lambda value: value.astype(jnp.float32), low)
  expected = testing.dense_moe(x, index_TK, gate, w, jax.nn.relu)
  y_TD = testing.dense_moe(low[0], index_TK, low[1], low[2], jax.nn.relu)
  np.testing.assert_array_equal(y_TD, expected)
  assert not np.allclose(y_TD, testing.dense_moe(x, index_TK, gate, w))


@pytest.mark.parametrize(("dtype", "experts"), [(jnp.int8, 256), (jnp.uint8, 512)])
def test_dense_moe_takes_indices_too_narrow_for_its_experts(dtype, experts):
  one = jnp.ones((experts, 1, 1))
  weights = ExpertWeights(one, one, one * jnp.arange(experts, dtype=jnp.float32)[:, None, None])
  index = jnp.array([[3, -1 if dtype == jnp.int8 else 5]], dtype)
  y = testing.dense_moe(jnp.ones((1, 1)), index, jnp.ones((1, 2)), weights, jax.nn.relu)
  assert y.tolist() == [[3.0 if dtype == jnp.int8 else 8.0]]


def test_dense_moe_takes_what_an_explicit_mesh_holds():
  problem = moe_problem(num_experts=3)
  expected = testing.dense_moe(*problem)
  mesh = jax.make_mesh((3,), ("expert",), devices=jax.devices()[:3])
  with jax.set_mesh(mesh):
    by_expert = jax.NamedSharding(mesh, jax.sharding.PartitionSpec("expert"))
    y_TD = testing.dense_moe(*jax.device_put(problem, by_expert))
  np.testing.assert_allclose(y_TD, expected, rtol=1e-6, atol=1e-6)


def test_dense_moe_gradients_equal_finite_differences():
  x_TD, index_TK, gate_TK, weights = moe_problem()
  direction = jax.tree.map(jnp.cos, (x_TD, gate_TK, weights))

  def loss(step: jax.Array) -> jax.Array:
    x, gate, w = jax.tree.map(lambda a, b: a + step * b, (x_TD, gate_TK, weights), direction)
    return jnp.sum(jnp.sin(testing.dense_moe(x, index_TK, gate, w)))

  def exact(step: float) -> float:
    x, gate, w = jax.tree.map(
      lambda a, b: np.asarray(a, np.float64) + step * np.asarray(b, np.float64),
      (x_TD, gate_TK, weights),
      direction,
    )
    return float(np.sin(by_hand(x, index_TK, gate, w)).sum())

  slope = (exact(1e-5) - exact(-1e-5)) / 2e-5
  assert jax.jit(jax.grad(loss))(jnp.float32(0)) == pytest.approx(slope, rel=1e-3)


def test_dense_moe_refuses_mismatched_shapes():
  x_TD, index_TK, gate_TK, weights = moe_problem()
  with pytest.raises(ValueError, match="expert_index_TK, gate_TK: expected equal shapes"):
    testing.dense_moe(x_TD, index_TK[:, :1], gate_TK, weights)


# Four ranks, two home experts and two slots each.
CONFIG = BalanceConfig(replica_slots=2, min_tokens_per_replica=3, domain_size=4)
LOAD_GE = np.array(
  [[5, 1, 2, 0, 0, 1, 1, 0], [4, 2, 0, 1, 1, 1, 0, 1], [6, 0, 1, 0, 1, 0, 1, 1], [9, 1] + [0] * 6],
  np.int32,
)


def legal_plan() -> Plan:
  replica = np.array([[-1, -1], [0, -1], [-1, 0], [0, -1]], np.int32)
  quota = np.zeros((8, 4), np.int32)
  quota[np.arange(8), np.arange(8) // 2] = LOAD_GE.sum(axis=0)
  quota[0] = [9, 5, 4, 6]
  parent = np.array([[-1, -1], [0, -1], [-1, 1], [2, -1]], np.int32)
  return Plan(replica, quota, parent)


def changed(field: str, *changes: tuple[tuple[int, int], int]) -> Plan:
  plan = legal_plan()
  for index, value in changes:
    getattr(plan, field)[index] = value
  return plan


def with_two_copies() -> Plan:
  plan = changed("replica_expert", ((1, 1), 0))
  plan.parent[1, 1] = 0
  return plan


BROKEN = {
  "shape": (legal_plan()._replace(parent=np.zeros((4, 1), np.int32)), "parent: expected shape"),
  "quota shape": (legal_plan()._replace(quota=np.zeros((4, 8), np.int32)), "quota: expected shape"),
  "dtype": (legal_plan()._replace(quota=np.zeros((8, 4), np.int64)), "quota: expected int32"),
  "unknown expert": (changed("replica_expert", ((1, 0), 8)), r"expected in \[-1, 8\), got 8"),
  "below empty": (changed("replica_expert", ((0, 0), -2)), r"expected in \[-1, 8\), got -2"),
  "on its home": (changed("replica_expert", ((0, 0), 1)), "an expert of another rank, got 1"),
  "two copies": (with_two_copies(), "expected one copy of 0 on the rank, got 2"),
  "lost": (changed("quota", ((0, 0), 8)), "expected a sum of 24, its load, got 23"),
  "negative": (changed("quota", ((0, 0), -1), ((0, 1), 15)), "expected no negative entry"),
  "nowhere": (changed("quota", ((1, 0), 3), ((1, 2), 1)), r"expected only on ranks \{0\}"),
  "too few": (changed("quota", ((0, 1), 2), ((0, 0), 12)), "at least 3 on a replica, got 2"),
  "unused": (changed("quota", ((0, 1), 0), ((0, 0), 14)), "at least 3 on a replica, got 0"),
  "parent of empty": (changed("parent", ((0, 0), 0)), "expected -1 for an empty slot, got 0"),
  "no parent": (changed("parent", ((1, 0), -1)), "path over holders of 0 to 0, got rank -1"),
  "unknown parent": (changed("parent", ((1, 0), 4)), "path over holders of 0 to 0, got rank 4"),
  "cycle": (changed("parent", ((1, 0), 3)), "expected a path to the home 0, got a cycle"),
}


def test_a_legal_plan_passes():
  testing.assert_legal_plan(legal_plan(), LOAD_GE, CONFIG)
  as_jax = jax.tree.map(jnp.asarray, legal_plan())
  testing.assert_legal_plan(as_jax, jnp.asarray(LOAD_GE), CONFIG)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_plan_is_caught(name):
  plan, message = BROKEN[name]
  with pytest.raises(AssertionError, match=message):
    testing.assert_legal_plan(plan, LOAD_GE, CONFIG)


def test_a_plan_that_breaks_the_configuration_is_caught():
  two_domains = BalanceConfig(replica_slots=2, domain_size=2)
  with pytest.raises(AssertionError, match="expected an expert of domain 1, got 0 of domain 0"):
    testing.assert_legal_plan(legal_plan(), LOAD_GE, two_domains)
  direct = BalanceConfig(replica_slots=2, transfer="direct")
  with pytest.raises(AssertionError, match="expected the home 0, got 1"):
    testing.assert_legal_plan(legal_plan(), LOAD_GE, direct)


def test_routes_of_a_small_plan_by_hand():
  # Expert 0 lives on rank 0 and has a copy on rank 1; expert 1 lives on rank 1.
  plan = Plan(
    np.array([[-1], [0]], np.int32),
    np.array([[2, 3], [0, 2]], np.int32),
    np.array([[-1], [0]], np.int32),
  )
  index_GTK = np.array([[[0, 1], [0, -1], [0, 9]], [[0, -1], [1, 0], [-1, -1]]], np.int32)
  dest, row, group_size = testing.brute_force_routes(jnp.asarray(index_GTK), plan)
  # Rank 0 keeps its first two; rank 1 keeps both of its own and takes the third of rank 0.
  assert dest.tolist() == [[[0, 1], [0, -1], [1, -1]], [[1, -1], [1, 1], [-1, -1]]]
  assert row.tolist() == [[[0, 0], [1, 0], [2, 0]], [[3, 0], [1, 4], [0, 0]]]
  assert group_size.tolist() == [[2, 0], [2, 3]]
  assert dest.dtype == row.dtype == group_size.dtype == np.int32


@hypothesis.settings(max_examples=20)
@hypothesis.given(st.integers(0, 2**31))
def test_routes_keep_quotas_locality_and_dense_rows(seed):
  load_GE = testing.zipf_loads(seed, 8, 4, 12, 2, 2.0)
  index_GTK = testing.expert_indices(seed, load_GE, 2)
  replica, quota = spread_hottest(load_GE)
  dest, row, group_size = testing.brute_force_routes(index_GTK, Plan(replica, quota, replica))
  sources = np.broadcast_to(np.arange(4)[:, None, None], dest.shape)
  for expert in range(8):
    chosen = index_GTK == expert
    np.testing.assert_array_equal(np.bincount(dest[chosen], minlength=4), quota[expert])
    kept = np.bincount(dest[chosen & (dest == sources)], minlength=4)
    np.testing.assert_array_equal(kept, np.minimum(load_GE[:, expert], quota[expert]))
  for rank in range(4):
    rows = row[dest == rank]
    np.testing.assert_array_equal(np.sort(rows), np.arange(rows.size))
    order = np.argsort(rows)
    experts_P = np.concatenate([[2 * rank, 2 * rank + 1], replica[rank]])
    expected = np.repeat(experts_P[experts_P >= 0], group_size[rank][experts_P >= 0])
    np.testing.assert_array_equal(index_GTK[dest == rank][order], expected)
    within = np.diff(sources[dest == rank][order])
    assert (within[np.diff(expected) == 0] >= 0).all()


def spread_hottest(load_GE: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """A copy of the hottest expert on every other rank, with an equal share of its load."""
  total_E = load_GE.sum(axis=0)
  hot = int(total_E.argmax())
  quota = np.zeros((8, 4), np.int32)
  quota[np.arange(8), np.arange(8) // 2] = total_E
  quota[hot] = total_E[hot] // 4
  quota[hot, hot // 2] += total_E[hot] % 4
  replica = np.full((4, 1), hot, np.int32)
  replica[hot // 2] = -1
  return replica, quota


def test_routes_refuse_quotas_that_are_not_the_loads():
  index_GTK = np.full((4, 1, 1), -1, np.int32)
  index_GTK[0] = 0
  with pytest.raises(ValueError, match="plan: expected quotas of expert 0 to sum to 1, got 24"):
    testing.brute_force_routes(index_GTK, legal_plan())
