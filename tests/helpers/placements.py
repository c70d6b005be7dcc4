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
