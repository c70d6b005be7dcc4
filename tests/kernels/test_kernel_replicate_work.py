"""What each rank sends and awaits of a plan's copies."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from placements import CROSSING, placements

from pallas_kernels.transfer import trees
from pallas_kernels.transfer.replicate_work import Fields, turns_of_slots, work_list


def decoded(work, slots):
  """Filled slots, and in turns the sources in order: the source, forwarded and final copies."""
  turns, index = [], 0
  while index < work[Fields.COUNT]:
    sources, turn_end = [], work[Fields.copy(slots, index, Fields.TURN_END)]
    while index < turn_end:
      base = Fields.copy(slots, index, 0)
      _, source, relayed_end, end, same = work[base : base + Fields.COLUMNS].tolist()
      assert same == turn_end
      copies = [work[Fields.copy(slots, i, Fields.CHILD)].tolist() for i in range(index, end)]
      sources.append((source, copies[: relayed_end - index], copies[relayed_end - index :]))
      index = end
    turns.append(sources)
  filled = np.flatnonzero(work[Fields.FILLED :][:slots]).tolist()
  assert work[Fields.INVOLVED] == work[Fields.COUNT] + len(filled)
  return filled, turns


@settings(max_examples=60)
@example(CROSSING, [0] * 6, (1, None))
@example(CROSSING, [5, 4, 3, 2, 1, 0], (1, None))
@example(CROSSING, [5, 4, 3, 2, 1, 0], (1, 2))
@example(CROSSING, [5, 4, 3, 2, 1, 0], (3, None))
@given(
  placements(),
  st.lists(st.integers(0, 40), min_size=6, max_size=6),
  st.sampled_from([(1, None), (1, 1), (1, 2), (2, None)]),
)
def test_work_lists_fill_every_slot_once_and_never_wait_for_ever(placement, rows, turns):
  """Runs the lists of all ranks for two runs of tiles, one worker a rank, as far as they get."""
  (home, replica_GS, parent_GS), (together, most_turns) = placement, turns
  ranks, slots = replica_GS.shape
  home_rows_G = jnp.array(rows[:ranks], jnp.int32)
  with few_turns(most_turns):
    make = jax.jit(work_list, static_argnums=4)
    turn_N = turns_of_slots(jnp.array(replica_GS), home_rows_G, home, together)
    lists = [
      decoded(np.asarray(make(replica_GS, parent_GS, turn_N, jnp.int32(rank), home)), slots)
      for rank in range(ranks)
    ]
  assert most_turns is None or all(len(turns) <= most_turns for _, turns in lists)
  filled = [divmod(slot, slots) for slot in np.flatnonzero(replica_GS >= 0)]
  assert [(rank, slot) for rank in range(ranks) for slot in lists[rank][0]] == filled
  landed = np.zeros((ranks, slots), int)  # runs of tiles that are to be forwarded
  complete = np.zeros((ranks, slots), int)
  held = np.full((ranks, slots, 2), -1)

  def announce(copies):
    for child in copies:
      landed.flat[child] += 1
    copies.clear()

  def run(rank):
    for sources in lists[rank][1]:
      landing = []
      for part in range(2):
        for source, relayed, final in sources:
          expert = rank * home + source
          if source >= home:
            announce(landing)
            while not landed[rank, source - home]:
              yield "waits"
            landed[rank, source - home] -= 1
            expert = held[rank, source - home, part]
          for child in relayed + final:
            assert held[divmod(child, slots)][part] == -1 and parent_GS.flat[child] == rank
            held[divmod(child, slots)][part] = expert
          announce(landing)  # of those before, while this run is sent
          landing = list(relayed)
      announce(landing)
      for _, relayed, final in sources:
        for child in relayed + final:
          # Whoever waits for it reads the whole slot.
          assert (held[divmod(child, slots)] == replica_GS.flat[child]).all()
          complete.flat[child] += 1

  def watch(rank):
    for slot in lists[rank][0]:
      while not complete[rank, slot]:
        yield "waits"

  running = [*map(run, range(ranks)), *map(watch, range(ranks))]
  for _ in range(2 * ranks * slots + 1):
    running = [steps for steps in running if next(steps, None)]
  assert not running
  assert not landed.any()
  np.testing.assert_array_equal(complete, replica_GS >= 0)
  np.testing.assert_array_equal(held, np.stack([replica_GS, replica_GS], axis=-1))


@contextlib.contextmanager
def few_turns(most):
  """As of a plan so large that int32 has no room for more."""
  with pytest.MonkeyPatch.context() as patch:
    if most:
      patch.setattr(trees, "most_turns", lambda *_: most)
    yield


def test_experts_of_ranks_with_few_rows_go_first():
  """Of ranks with about as many, those of first slots do; each in a turn of its own."""
  replica_GS = jnp.array([[2, -1], [0, 4], [1, 0], [5, 3]], jnp.int32)
  turn_N = turns_of_slots(replica_GS, jnp.array([4000, 900, 100, 110], jnp.int32), 2)
  # Expert 0 is wanted by ranks 1 and 2, of which 2 has the fewest rows; that is its second slot.
  turns = dict(zip(replica_GS.reshape(-1).tolist(), turn_N.tolist(), strict=True))
  assert sorted(set(turns) - {-1}, key=turns.__getitem__) == [1, 5, 0, 3, 4, 2]
  assert [turns[expert] for expert in (1, 5, 0, 3, 4, 2)] == list(range(6))
  assert turn_N[2] == turn_N[5]  # both copies of expert 0
  assert not turns_of_slots(replica_GS, None, 2).any()


def test_small_experts_and_those_of_large_plans_share_turns():
  replica_GS = jnp.array([[2, -1], [0, 4], [1, 0], [5, 3]], jnp.int32)
  rows = jnp.array([4000, 900, 100, 110], jnp.int32)
  alone = np.asarray(turns_of_slots(replica_GS, rows, 2))
  filled = np.asarray(replica_GS).reshape(-1) >= 0
  for together in (1, 2, 3, 6):
    shared = np.asarray(turns_of_slots(replica_GS, rows, 2, together))
    np.testing.assert_array_equal(shared[filled], alone[filled] // together)
  for most in (1, 2, 4, 5):
    with few_turns(most):
      shared = np.asarray(turns_of_slots(replica_GS, rows, 2))
    assert shared.max() < most
    by_turn = shared[filled][np.argsort(alone[filled], kind="stable")]
    assert (np.diff(by_turn) >= 0).all()  # in the same order


@pytest.mark.parametrize("rows", [0, 1, 15, 16, 17, 10**6, np.iinfo(np.int32).max])
def test_turns_and_their_keys_fit_int32(rows):
  """As many ranks as many slots, the last of which fills the last slot of all."""
  ranks, slots, home = 64, 32, 4
  expert_GS = np.arange(ranks * slots).reshape(ranks, slots) % (ranks * home)
  turn_N = turns_of_slots(jnp.asarray(expert_GS, jnp.int32), jnp.full(ranks, rows, jnp.int32), home)
  most = trees.most_turns(ranks, slots, home)
  assert 0 <= int(turn_N.min()) <= int(turn_N.max()) < most
  # The last key of a work list, as ``work_list`` builds it.
  sources = home + slots
  group = (2 * ((most - 1) * ranks + ranks - 1) + 1) * sources + sources - 1
  assert (2 * group + 1) * ranks * slots + ranks * slots - 1 < np.iinfo(np.int32).max
