"""What one rank sends and awaits of a plan's copies: a vector of integers.

Rank 0 has experts 0 and 1. Expert 0 goes to ranks 1 and 2, and rank 1 sends it on to 3::

  rank 0   sends expert 0 to rank 1, which forwards it, and to rank 2
  rank 1   sends its slot to rank 3                  waits for its slot
  rank 2   sends nothing                             waits for its slot
  rank 3   sends nothing                             waits for its slot

Here XLA makes the list. Where slots are not too many, ``lists`` makes all of a layer's in a kernel.
"""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.sums import sum_lines
from pallas_kernels.support import Array
from pallas_kernels.transfer import trees
from pallas_kernels.transfer.trees import Trees


class Fields:
  """Where the parts of the work list lie: two counts, a flag per own slot, five columns a copy.

  A copy is one slot that this rank fills. Copies of one turn are neighbours. In a turn, copies of
  one source are, those that are forwarded first. Sources are home experts (below M) and own slots
  (M + slot), by rising depth, those with copies that are forwarded first.
  """

  COUNT = 0
  INVOLVED = 1  # copies that this rank sends or gets
  FILLED = 2  # own slots: they are waited for at the end
  COLUMNS = 5
  CHILD, SOURCE = 0, 1  # the filled slot (rank * S + slot); its source
  RELAYED_END, END, TURN_END = 2, 3, 4  # of the source's copies that are forwarded, of all; turn's

  @classmethod
  def copy(cls, num_slots: int, index: Any, column: int) -> Any:
    return cls.FILLED + num_slots + cls.COLUMNS * index + column

  @classmethod
  def length(cls, num_slots: int, size: int) -> int:
    """Of the list, where all ranks have ``size`` slots."""
    return -(-cls.copy(num_slots, size, 0) // 32) * 32


# Of experts that have a turn together: at a turn's end the links are idle for about 3 µs.
_TURN_BYTES = 16 * 2**20


def experts_together(expert_bytes: int) -> int:
  """How many experts of that size have a turn together."""
  return max(_TURN_BYTES // expert_bytes, 1)


def turns_of_slots(
  replica_expert_GS: Array, home_rows_G: Array | None, num_home: int, together: int | None = 1
) -> Array:
  """``[N]``, when each slot's expert is sent: by the least rows of the ranks that get it.

  So many experts have a turn ``together``, or more if int32 has no room for so many turns; all
  have one without rows, or with ``None``.
  """
  num_ranks, num_slots = replica_expert_GS.shape
  size = num_ranks * num_slots
  if home_rows_G is None or together is None:
    return jnp.zeros(size, jnp.int32)
  check_rows(home_rows_G, num_ranks)
  # Rows in sixteenths: ranks of about as many rows take turns.
  most_rows = functools.reduce(jnp.maximum, (home_rows_G[i] for i in range(num_ranks)))
  few_G = home_rows_G // (most_rows // 16 + 1)
  place_N = jnp.tile(jnp.arange(num_slots, dtype=jnp.int32), num_ranks) * num_ranks
  place_N += jnp.repeat(few_G * size + jnp.arange(num_ranks, dtype=jnp.int32), num_slots)
  expert_N = replica_expert_GS.reshape(-1)
  same_NN = expert_N[:, None] == expert_N[None, :]
  first_N = jnp.min(jnp.where(same_NN, place_N[None, :], jnp.iinfo(jnp.int32).max), axis=1)
  leads_N = (first_N == place_N) & (expert_N >= 0)
  before_NN = leads_N[None, :] & (place_N[None, :] < first_N[:, None])
  order_N = jnp.sum(before_NN, axis=1, dtype=jnp.int32)
  return order_N // experts_of_turn(num_ranks, num_slots, num_home, together)


def experts_of_turn(num_ranks: int, num_slots: int, num_home: int, together: int | None) -> int:
  """So many ``together``, or all; or more, if int32 has no room for so many turns."""
  size = num_ranks * num_slots
  if together is None:
    return size
  return max(together, -(-size // trees.most_turns(num_ranks, num_slots, num_home)))


def check_rows(home_rows_G: Array, num_ranks: int) -> None:
  """Raises ValueError or TypeError unless that is a number of rows for each rank."""
  if home_rows_G.shape != (num_ranks,):
    raise ValueError(f"home_rows_G: expected shape ({num_ranks},), got {home_rows_G.shape}")
  if home_rows_G.dtype != jnp.int32:
    raise TypeError(f"home_rows_G: expected int32, got {home_rows_G.dtype}")


def work_list(
  replica_expert_GS: Array, parent_GS: Array, turn_N: Array, rank: Array, num_home: int
) -> Array:
  """What one rank sends and awaits, a vector of int32 as ``Fields`` describes it.

  Axis N is all slots of all ranks. All is compares and sums: nothing is sorted.
  """
  num_ranks, num_slots = replica_expert_GS.shape
  size, num_sources = num_ranks * num_slots, num_home + num_slots
  tree = Trees.of(replica_expert_GS, parent_GS)
  expert_N, parent_N, forwards_N = tree.expert_N, tree.parent_N, tree.forwards_N
  slot_N = jnp.arange(size, dtype=jnp.int32)
  source_N = tree.source(rank, num_home, num_slots)
  siblings_NN = (expert_N[:, None] == expert_N[None, :]) & (parent_N[:, None] == parent_N[None, :])
  relayed_N = jnp.any(siblings_NN & forwards_N[None, :], axis=1)
  # Keys are of turns, in these of groups, which have a source, and in these of two halves.
  group_N = 2 * (turn_N * num_ranks + tree.depth_N) + (~relayed_N).astype(jnp.int32)
  group_N = group_N * num_sources + source_N
  key_N = (2 * group_N + (~forwards_N).astype(jnp.int32)) * size + slot_N
  mine_N = tree.filled_N & (parent_N == rank)
  key_N = jnp.where(mine_N, key_N, jnp.iinfo(jnp.int32).max)
  limits = (
    key_N,
    (2 * group_N + 1) * size,
    (group_N + 1) * 2 * size,
    (turn_N + 1) * (2 * num_ranks * num_sources * 2 * size),
  )
  below_NN = (key_N[None, :] < limit_N[:, None] for limit_N in limits)
  place_N, *ends = sum_lines(*(each_NN.astype(jnp.int32) for each_NN in below_NN))

  length = Fields.length(num_slots, size)
  field_L1 = jnp.arange(length, dtype=jnp.int32)[:, None]
  is_own_N = tree.filled_N & (trees.rank_of_slots(num_ranks, num_slots) == rank)
  own_N = jnp.where(is_own_N, Fields.FILLED + slot_N - rank * num_slots, -1)
  count_LN = (field_L1 == Fields.COUNT) & mine_N[None, :]
  count_LN |= (field_L1 == Fields.INVOLVED) & (mine_N | is_own_N)[None, :]
  work_LN = (count_LN | (field_L1 == own_N[None, :])).astype(jnp.int32)
  # Fields of copies, by division.
  field_of_copy_L = np.arange(length, dtype=np.int32) - Fields.copy(num_slots, 0, 0)
  copy_L1, column_L1 = (jnp.asarray(x)[:, None] for x in divmod(field_of_copy_L, Fields.COLUMNS))
  value_LN = jnp.broadcast_to(slot_N[None, :], work_LN.shape)
  for column, value_N in enumerate((source_N, *ends), 1):
    value_LN = jnp.where(column_L1 == column, value_N[None, :], value_LN)
  place_N = jnp.where(mine_N, place_N, length)  # no copy's
  work_LN = jnp.where(copy_L1 == place_N[None, :], value_LN, work_LN)
  return jnp.sum(work_LN, axis=1, dtype=jnp.int32)
