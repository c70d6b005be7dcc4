"""Placements and transfer trees, legal ones of all kinds, for tests of kernels that follow them."""

import itertools

import numpy as np
from hypothesis import strategies as st

# Placement and senders, for four ranks with two home experts each.
PLANS = {
  "empty": ([[-1, -1]] * 4, [[-1, -1]] * 4),
  "star": ([[-1, -1], [0, -1], [-1, 0], [0, -1]], [[-1, -1], [0, -1], [-1, 0], [0, -1]]),
  "chain": ([[-1, -1], [-1, 1], [1, -1], [-1, 1]], [[-1, -1], [-1, 0], [1, -1], [-1, 2]]),
  "crossed": ([[2, 4], [6, 0], [0, 2], [2, 0]], [[1, 2], [3, 0], [1, 0], [0, 2]]),
  "opposite": ([[-1, -1], [0, 1], [1, 0], [0, 1]], [[-1, -1], [2, 0], [1, 0], [1, 2]]),
}

# Ranks 1 and 2 wait for each other's second slot if they serve their slots in order.
CROSSING = (
  2,
  np.array([[-1, -1], [0, 1], [1, 0], [0, 1], [0, 1]], np.int32),
  np.array([[-1, -1], [2, 0], [1, 0], [1, 2], [3, 3]], np.int32),
)


@st.composite
def placements(draw):
  """Legal placements with random trees: ``(M, replica_expert_GS, parent_GS)``."""
  ranks, home = draw(st.integers(2, 6)), draw(st.integers(1, 3))
  slots = draw(st.integers(1, 3))
  replica_GS = np.full((ranks, slots), -1, np.int32)
  parent_GS = np.full((ranks, slots), -1, np.int32)
  for rank, slot in itertools.product(range(ranks), range(slots)):
    own = range(rank * home, (rank + 1) * home)
    taken = {*own, *replica_GS[rank].tolist()} - {-1}
    choices = [e for e in range(ranks * home) if e not in taken]
    replica_GS[rank, slot] = draw(st.sampled_from([-1, *choices[:2], *choices]))
  for expert in range(ranks * home):
    members = [expert // home]
    for rank, slot in draw(st.permutations(np.argwhere(replica_GS == expert).tolist())):
      parent_GS[rank, slot] = draw(st.sampled_from([members[-1], *members]))
      members.append(rank)
  return home, replica_GS, parent_GS


def random_plan(rng, ranks, home, slots):
  """A legal placement with random trees and rows of ranks, of any size, without hypothesis."""
  replica_GS, parent_GS = np.full((2, ranks, slots), -1, np.int32)
  for rank in range(ranks):
    others = np.delete(np.arange(ranks * home), np.s_[rank * home : (rank + 1) * home])
    held = rng.permutation(others)[: rng.integers(0, slots + 1)]
    replica_GS[rank, rng.permutation(slots)[: held.size]] = held
  for expert in np.unique(replica_GS[replica_GS >= 0]):
    members = [expert // home]
    for rank, slot in rng.permutation(np.argwhere(replica_GS == expert)):
      parent_GS[rank, slot] = rng.choice(members)
      members.append(rank)
  return replica_GS, parent_GS, rng.integers(0, 40, ranks).astype(np.int32)
