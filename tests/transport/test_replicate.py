"""Replication copies bit for bit; its adjoint sums home in a fixed order."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ultraep_jax.transport import replicate, turn_replicate

RANKS, HOME = 8, 2

PLACEMENTS = {
  "empty": [[-1, -1]] * 8,
  "neighbours": [[15, -1], [0, -1], [3, -1], [5, 4], [-1, -1], [9, 8], [-1, -1], [-1, -1]],
  "one hot": [[-1, -1]] + [[1, -1]] * 7,
  "full": [[(2 * g + 5) % 16, (2 * g + 10) % 16] for g in range(8)],
  "domains": [[2, 4], [1, 6], [0, 7], [5, 3], [10, 12], [9, 14], [8, 15], [13, 11]],
}


def mesh():
  return jax.make_mesh((RANKS,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))


def shard(function, num_in):
  return jax.jit(
    jax.shard_map(
      function, mesh=mesh(), in_specs=(P("expert"),) * num_in + (P(),), out_specs=P("expert")
    )
  )


def experts_tree(rng):
  """FP8 values with scales, integers, a vector per expert: anything with a leading axis."""
  return {
    "values": jnp.asarray(rng.normal(size=(16, 3, 5)), jnp.float8_e4m3fn),
    "scales": jnp.asarray(rng.normal(size=(16, 3)), jnp.float32),
    "bias": jnp.asarray(rng.normal(size=(16,)), jnp.bfloat16),
    "ids": jnp.asarray(rng.integers(-(2**31), 2**31, size=(16, 2)), jnp.int32),
    "zeros": jnp.asarray(rng.choice([0.0, -0.0, np.nan, np.inf], size=(16, 2)), jnp.float32),
  }


def replicate_here(home, placement, domain_size=None):
  """Every copy comes from its home; the portable form does not ask."""
  parent = jnp.where(placement < 0, -1, placement // HOME)
  return replicate.replicate(home, placement, parent, axis_name="expert", domain_size=domain_size)


def reduce_here(replica, home, placement):
  parent = jnp.where(placement < 0, -1, placement // HOME)
  return replicate.reduce_replicas(replica, home, placement, parent, axis_name="expert")


def as_bits(leaf):
  return np.asarray(leaf).view(f"u{leaf.dtype.itemsize}")


@pytest.mark.parametrize("name", PLACEMENTS)
@pytest.mark.parametrize("domain", [None, 4])
def test_replicate_copies_bit_for_bit(name, domain):
  if domain and name not in ("empty", "domains"):
    domain = 8  # these placements cross domains of four
  placement = jnp.array(PLACEMENTS[name], jnp.int32)
  tree = experts_tree(np.random.default_rng(0))
  copy = functools.partial(replicate_here, domain_size=domain)
  got = shard(copy, 1)(tree, placement)
  expert_R = np.asarray(placement).reshape(-1)
  for key, leaf in tree.items():
    filled = expert_R >= 0  # empty slots hold anything
    np.testing.assert_array_equal(as_bits(got[key])[filled], as_bits(leaf)[expert_R[filled]])


@pytest.mark.parametrize("name", PLACEMENTS)
def test_reduce_adds_every_replica_once(name):
  placement = jnp.array(PLACEMENTS[name], jnp.int32)
  rng = np.random.default_rng(1)
  replica = [jnp.asarray(rng.integers(-9, 9, size=(16, 4)), jnp.float32) for _ in range(2)]
  home = [jnp.asarray(rng.integers(-9, 9, size=(16, 4)), jnp.float32) for _ in range(2)]
  got = shard(reduce_here, 2)(replica, home, placement)
  for sent, kept, result in zip(replica, home, got, strict=True):
    expected = np.array(kept)
    for row, expert in enumerate(np.asarray(placement).reshape(-1)):
      if expert >= 0:
        expected[expert] += sent[row]  # small integers: any order gives the same sum
    np.testing.assert_array_equal(result, expected)


def test_reduce_is_the_adjoint_of_replicate():
  placement = jnp.array(PLACEMENTS["full"], jnp.int32)
  rng = np.random.default_rng(2)
  home = jnp.asarray(rng.integers(-9, 9, size=(16, 4)), jnp.float32)
  replica = jnp.asarray(rng.integers(-9, 9, size=(16, 4)), jnp.float32)
  copied = shard(replicate_here, 1)(home, placement)
  reduced = shard(reduce_here, 2)(replica, jnp.zeros_like(home), placement)
  assert float(jnp.vdot(copied, replica)) == float(jnp.vdot(home, reduced))


def test_order_of_the_sum_is_fixed():
  """The next rank first: an order in which these terms do not cancel to zero."""
  placement = jnp.array([[-1]] + [[0]] * 7, jnp.int32)
  terms = jnp.array([0.0, 1e8, 1.0, -1e8, 1.0, 1.0, 1.0, 1.0], jnp.float32)[:, None]
  got = shard(reduce_here, 2)(terms, jnp.zeros((16, 1), jnp.float32), placement)
  expected = np.float32(0)
  for term in np.asarray(terms[1:, 0]):
    expected += term
  assert float(got[0, 0]) == float(expected) != float(np.sum(np.asarray(terms), dtype=np.float64))


def test_no_slots_no_communication():
  placement = jnp.zeros((RANKS, 0), jnp.int32)
  home = jnp.ones((16, 4))
  copy = shard(replicate_here, 1)
  assert copy(home, placement).shape == (0, 4)
  assert "ppermute" not in str(jax.make_jaxpr(copy)(home, placement))


def test_slots_that_hold_a_copy_are_the_ranks_own():
  placement = jnp.array(PLACEMENTS["neighbours"], jnp.int32)

  def filled(home, placement):
    nothing = jnp.zeros(RANKS, jnp.int32)
    replicas = replicate.Replicas(
      *(home, placement, placement // HOME, nothing, "expert", None, ("portable",)),
      tunings=replicate.UNTUNED,
      rank=jax.lax.axis_index("expert"),
    )
    return replicas.filled_S()

  got = shard(filled, 1)(jnp.zeros((RANKS * HOME, 3)), placement)
  np.testing.assert_array_equal(got, (placement >= 0).reshape(-1))


@pytest.mark.parametrize(("name", "count"), [("empty", 0), ("one hot", 7), ("neighbours", 2)])
def test_steps_that_no_rank_needs_are_left_out(name, count):
  """A distance is a step; two copies of one home on a rank take two turns."""

  def steps(x, placement):
    del x
    return turn_replicate._Steps.of(placement, HOME, "expert", None).count[None]

  got = shard(steps, 1)(jnp.zeros(RANKS), jnp.array(PLACEMENTS[name], jnp.int32))
  assert np.asarray(got).tolist() == [count] * RANKS


@pytest.mark.parametrize("count", range(6))
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_pairs_of_ranks_take_any_number_of_steps(count, dtype):
  """A few are written out, more are a loop. The last pair, in which one rank copies, has fewer."""
  home, slots = 5, 5
  rng = np.random.default_rng(count)
  placement_GS = np.full((RANKS, slots), -1)
  for rank in range(RANKS):
    most = count if rank < 6 else (rank - 6) * count // 2
    place_S = rng.permutation(slots)[:most]
    placement_GS[rank, place_S] = (rank ^ 1) * home + rng.permutation(home)[:most]
  weights, grads = (
    jnp.asarray(rng.integers(-9, 9, size=(RANKS * n, 4)), dtype) for n in (home, slots)
  )

  def copy(weights, placement):
    return turn_replicate.replicate(weights, placement, "expert", 2)

  def add(grads, weights, placement):
    return turn_replicate.reduce_replicas(grads, weights, placement, "expert", 2)

  placement, expert_R = jnp.array(placement_GS, jnp.int32), placement_GS.reshape(-1)
  filled = expert_R >= 0
  copies = np.asarray(shard(copy, 1)(weights, placement), np.float32)
  values, terms = (np.asarray(array, np.float32) for array in (weights, grads))
  np.testing.assert_array_equal(copies[filled], values[expert_R[filled]])
  sums = values.copy()
  np.add.at(sums, expert_R[filled], terms[filled])
  np.testing.assert_array_equal(
    np.asarray(shard(add, 2)(grads, weights, placement), np.float32), sums
  )


@pytest.mark.parametrize(("domain", "terms"), [(8, 7), (4, 3), (2, 1)])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_sums_of_bfloat16_are_rounded_once(domain, terms, dtype, monkeypatch):
  """Terms of half a unit each, all of which rounding one by one would lose; or wider ones."""
  monkeypatch.setattr(turn_replicate, "_unwritten", of_nans)
  small = 2.0**-8 if terms > 1 else 2.0**-8 + 2.0**-16  # a bfloat16 has the former alone
  if terms == 1 and dtype == jnp.bfloat16:
    small = 2.0**-7
  expected = np.float32(1 + terms * small).astype(jnp.bfloat16)
  placement = jnp.array(
    [[-1 if g % domain == 0 else g // domain * domain * HOME] for g in range(8)]
  )

  def add(grads, homes, placement):
    return turn_replicate.reduce_replicas(grads, homes, placement, "expert", domain)

  home = jnp.ones((16, 1), jnp.bfloat16)
  got = shard(add, 2)(jnp.full((RANKS, 1), small, dtype), home, placement.astype(jnp.int32))
  first_R = np.asarray(got).reshape(8 // domain, -1)
  assert got.dtype == jnp.bfloat16 and (first_R[:, 0] == expected).all() and expected > 1
  np.testing.assert_array_equal(first_R[:, 1:], 1)


def test_an_expert_without_a_copy_in_a_step_may_have_one_in_the_next(monkeypatch):
  """What rounding left of it is not read before it is written."""
  monkeypatch.setattr(turn_replicate, "_unwritten", of_nans)
  # In the step of distance 1 only rank 3 copies; expert 0 has its first copy in the step after.
  placement = jnp.array([[-1], [-1], [0], [4]], jnp.int32)

  def add(grads, homes, placement):
    return turn_replicate.reduce_replicas(grads, homes, placement, "expert", None)

  four = jax.make_mesh((4,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
  specs = P("expert"), P("expert"), P()
  run = jax.jit(jax.shard_map(add, mesh=four, in_specs=specs, out_specs=P("expert")))
  got = run(jnp.full((4, 1), 2.0, jnp.bfloat16), jnp.ones((8, 1), jnp.bfloat16), placement)
  assert np.asarray(got, np.float32).reshape(-1).tolist() == [3, 1, 1, 1, 3, 1, 1, 1]


def of_nans(shape, dtype, axes):
  """Memory that was not written."""
  return turn_replicate.to_varying(jnp.full(shape, jnp.nan, dtype), axes)
