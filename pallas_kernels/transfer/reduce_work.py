"""What one rank adds and sends of the replicas' gradients: a vector of integers.

A node is what a rank has of an expert that others have too. In ``replicate``'s example, where
copies went from rank 0 to 1, and from there to 2 and 3::

  rank 0  home             children: the slot of rank 1
  rank 1  slot, to rank 0  children: those of ranks 2 and 3
  rank 2  slot, to rank 1  none

The home has one child. So rank 1 adds its sum to the home's memory by itself, and rank 0 waits.

Here XLA makes the list. Where slots are not too many, ``lists`` makes all of a layer's in a kernel.
"""

from typing import Any

import jax.numpy as jnp

from pallas_kernels.sums import sum_lines
from pallas_kernels.support import Array
from pallas_kernels.transfer.trees import Trees


class Fields:
  """Where the parts of the work list lie: a count, columns of nodes, children.

  A node is what this rank has of an expert that others have too: an own slot, or a home expert
  with replicas. They are in the order of the work. Its children are filled slots of other ranks.
  """

  COUNT = 0
  # Home expert or M + slot; rank, of a slot; of its children; and of the only child of a home, the
  # home expert that it adds to by itself, and of that home 0. Of all others −1.
  COLUMNS = SOURCE, PARENT, END, TARGET = range(4)

  @classmethod
  def node(cls, num_nodes: int, index: Any, column: int) -> Any:
    return 1 + column * num_nodes + index

  @classmethod
  def child(cls, num_nodes: int, index: Any) -> Any:
    return 1 + len(cls.COLUMNS) * num_nodes + index

  @classmethod
  def length(cls, num_ranks: int, num_slots: int, num_home: int) -> int:
    """Of the list."""
    num_nodes = num_nodes_of(num_ranks, num_slots, num_home)
    return -(-cls.child(num_nodes, num_ranks * num_slots) // 32) * 32


def num_nodes_of(num_ranks: int, num_slots: int, num_home: int) -> int:
  """The most nodes that a rank can have."""
  return num_slots + min(num_home, (num_ranks - 1) * num_slots)


def work_list(replica_expert_GS: Array, parent_GS: Array, rank: Array, num_home: int) -> Array:
  """What one rank adds and sends, a vector of int32 as ``Fields`` describes it.

  Axis N is all slots of all ranks, axis Q what this rank can have of an expert: home experts
  (below M) and own slots (M + slot).
  """
  num_ranks, num_slots = replica_expert_GS.shape
  size, num_sources = num_ranks * num_slots, num_home + num_slots
  tree = Trees.of(replica_expert_GS, parent_GS)
  mine_N = tree.filled_N & (tree.parent_N == rank)
  slot_N, source_Q = (jnp.arange(n, dtype=jnp.int32) for n in (size, num_sources))
  source_N = jnp.where(mine_N, tree.source(rank, num_home, num_slots), -1)
  children_Q = jnp.sum(source_Q[:, None] == source_N[None, :], axis=1, dtype=jnp.int32)
  earlier_NN = (source_N[None, :] == source_N[:, None]) & (slot_N[None, :] < slot_N[:, None])
  earlier_N = jnp.sum(earlier_NN, axis=1, dtype=jnp.int32)  # of the same source
  of_home_N = tree.filled_N & (tree.feeder_N < 0)
  like_NN = tree.expert_N[:, None] == tree.expert_N[None, :]
  like_N = jnp.sum(like_NN & of_home_N[None, :], axis=1, dtype=jnp.int32)
  target_N = tree.expert_N - tree.parent_N * num_home
  target_N = jnp.where(of_home_N & (like_N == 1), target_N, -1)

  def own(slots_N: Array, of_homes: Array | int | bool) -> Array:
    """Per source: a value for all homes, this rank's part of ``slots_N`` for its slots."""
    homes_M = jnp.broadcast_to(jnp.asarray(of_homes, slots_N.dtype), num_home)
    return jnp.concatenate([homes_M, slots_N.reshape(num_ranks, num_slots)[rank]])

  used_Q = own(tree.filled_N, False) | (children_Q > 0)
  # Slots without children, then by falling depth, homes (one less than the first slots) last.
  turn_Q = jnp.where(children_Q > 0, num_ranks - own(tree.depth_N, -1), 0)
  key_Q = jnp.where(used_Q, turn_Q, num_ranks + 2) * num_sources + source_Q
  before_QQ = key_Q[None, :] < key_Q[:, None]
  fed_before_QQ = jnp.where(before_QQ, children_Q[None, :], 0)
  place_Q, begin_Q = sum_lines(before_QQ.astype(jnp.int32), fed_before_QQ)

  num_nodes = num_nodes_of(num_ranks, num_slots, num_home)
  length = Fields.length(num_ranks, num_slots, num_home)
  field_L1 = jnp.arange(length, dtype=jnp.int32)[:, None]
  field_LQ = jnp.where(field_L1 == Fields.COUNT, used_Q.astype(jnp.int32)[None, :], 0)
  target_Q = own(target_N, jnp.where(children_Q[:num_home] == 1, 0, -1))
  parent_Q, end_Q = own(tree.parent_N, -1), begin_Q + children_Q
  columns = source_Q, parent_Q, end_Q, target_Q  # as of ``Fields``
  for column, value_Q in enumerate(columns):
    here_Q = jnp.where(used_Q, Fields.node(num_nodes, place_Q, column), -1)
    field_LQ = jnp.where(field_L1 == here_Q[None, :], value_Q[None, :], field_LQ)
  child_N = begin_Q[jnp.maximum(source_N, 0)] + earlier_N + Fields.child(num_nodes, 0)
  field_LN = jnp.where((field_L1 == child_N[None, :]) & mine_N[None, :], slot_N[None, :], 0)
  return jnp.sum(jnp.concatenate([field_LQ, field_LN], axis=1), axis=1, dtype=jnp.int32)
