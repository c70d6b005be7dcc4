"""The kernel that makes the work lists of transfers, against XLA's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from mosaic_interpret import interpreted
from placements import CROSSING, random_plan
from programs import kernels
from thread_races import watched

from pallas_kernels.transfer import lists, trees
from pallas_kernels.transfer.lists import Wanted, by_xla, lists_of_rank, transfer_lists


def lists_by(make, home, together):
  """A function of a rank, a plan and rows."""
  return jax.jit(lambda *plan: make(*plan, Wanted(home, together)))


def assert_same(got, expected):
  jax.tree.map(np.testing.assert_array_equal, got, expected)
  assert jax.tree.structure(got) == jax.tree.structure(expected)


def arrays(*plan):
  return [jnp.asarray(each, jnp.int32) for each in plan]


@pytest.mark.parametrize(
  ("ranks", "home", "slots", "together", "most_turns"),
  [
    (4, 2, 3, (1, 2, None), None),
    (6, 3, 4, (2, None), 5),
    (3, 60, 50, (1, 3, None), None),  # more slots than threads
    (5, 40, 3, (), None),  # more sources than threads
    (40, 1, 3, (1,), None),  # more ranks than lanes
    (140, 4, 2, (1,), None),  # more ranks than threads
  ],
)
def test_the_kernel_makes_the_same_lists(ranks, home, slots, together, most_turns, monkeypatch):
  if most_turns:  # as of a plan so large that int32 has no room for more
    monkeypatch.setattr(trees, "most_turns", lambda *_: most_turns)
  rng = np.random.default_rng(ranks)
  plain = lists_by(by_xla, home, together)
  with interpreted():
    kernel = lists_by(lists_of_rank, home, together)
    for _ in range(4):
      *plan, rows = random_plan(rng, ranks, home, slots)
      rows[-1] = 100  # the most are those of the last rank
      plan = arrays(*plan, rows)
      for rank in rng.permutation(ranks)[:4]:
        assert_same(kernel(jnp.int32(rank), *plan), plain(jnp.int32(rank), *plan))


def chains(ranks, home, slots):
  """The first expert of each of the first ranks goes from rank to rank, each in a slot.

  So later slots are less deep. They come first nevertheless, where they have a turn together.
  """
  replica_GS, parent_GS = np.full((2, ranks, slots), -1)
  for slot in range(slots):
    replica_GS[slot + 1 :, slot] = slot * home
    parent_GS[slot + 1 :, slot] = np.arange(slot, ranks - 1)
  return replica_GS, parent_GS


@pytest.mark.parametrize("rows", [[0] * 8, [7] * 8, [2**31 - 1] * 8, [0, 2**31 - 1] * 4])
@pytest.mark.parametrize(("slots", "filled"), [(1, True), (3, True), (3, False)])
def test_deep_trees_empty_plans_and_equal_rows(rows, slots, filled):
  ranks, home, together = 8, 2, (2, None)
  replica_GS, parent_GS = chains(ranks, home, slots)
  if not filled:
    replica_GS[:], parent_GS[:] = -1, -1
  plan = arrays(replica_GS, parent_GS, rows)
  plain = lists_by(by_xla, home, together)
  with interpreted():
    kernel = lists_by(lists_of_rank, home, together)
    for rank in (0, 1, 6, 7):
      assert_same(kernel(jnp.int32(rank), *plan), plain(jnp.int32(rank), *plan))


@pytest.mark.parametrize(("ranks", "home", "slots"), [(4, 2, 3), (3, 60, 50)])
@pytest.mark.parametrize("together", [(2, None), ()])
def test_threads_wait_for_each_other(ranks, home, slots, together):
  plan = arrays(*random_plan(np.random.default_rng(3), ranks, home, slots))
  with interpreted(), watched():
    # A function of its own, so that it is traced here; once, as a run is no barrier for the next.
    make = lists_by(lists._lists_by_kernel.__wrapped__, home, together)
    jax.block_until_ready(make(jnp.int32(1), *plan))


def test_without_rows_all_copies_have_one_turn():
  home, replica_GS, parent_GS = CROSSING
  plan = jnp.int32(1), *arrays(replica_GS, parent_GS)
  rows = jnp.arange(replica_GS.shape[0], dtype=jnp.int32)
  with interpreted():
    got = lists_by(lists_of_rank, home, (None,))(*plan, None)
    assert_same(lists_by(lists_of_rank, home, (None,))(*plan, rows), got)
  assert_same(got, lists_by(by_xla, home, (None,))(*plan, None))


@pytest.mark.parametrize(
  ("slots", "home", "names"),
  [(128, 8, ["transfer_lists"]), (129, 8, []), (2, 1024, ["transfer_lists"]), (2, 1025, [])],
)
def test_xla_makes_lists_of_very_many_slots_or_experts(slots, home, names):
  """Of four ranks."""
  plan = jnp.full((2, 4, slots), -1, jnp.int32)
  traced = lists_by(lists_of_rank, home, (1, 2, None)).trace(
    jnp.int32(0), *plan, jnp.zeros(4, jnp.int32)
  )
  assert [each.params["name"] for each in kernels(traced.jaxpr.jaxpr)] == names
  text = traced.lower(lowering_platforms=("cuda",)).as_text()
  assert text.count("custom_call @mosaic_gpu") == len(names)


@pytest.mark.parametrize(
  ("rows", "error", "message"),
  [
    (jnp.zeros(3, jnp.int32), ValueError, r"home_rows_G: expected shape \(4,\), got \(3,\)"),
    (jnp.zeros(4), TypeError, "home_rows_G: expected int32, got float32"),
  ],
)
def test_rejects_other_rows(rows, error, message):
  empty_GS = jnp.full((4, 2), -1, jnp.int32)
  with pytest.raises(error, match=message):
    lists_of_rank(jnp.int32(0), empty_GS, empty_GS, rows, Wanted(8, (1,)))


def test_refuses_plans_too_large_for_int32():
  mesh = jax.make_mesh((1,), ("expert",), (jax.sharding.AxisType.Auto,))

  def make(*plan):
    axis = {"axis_name": "expert", "num_home": 8, "expert_bytes": [None]}
    return transfer_lists(*plan, **axis).reducing

  run = jax.shard_map(make, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
  plan_GS = jax.ShapeDtypeStruct((256, 62), jnp.int32)
  with pytest.raises(NotImplementedError, match=r"too large for int32: \(256, 62\)"):
    jax.jit(run).trace(plan_GS, plan_GS)
