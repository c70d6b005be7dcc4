"""What a plan's transfer trees mean to the kernels that move experts along them.

A copy of an expert is a filled slot. Slots of all ranks are numbered ``rank * S + slot``: axis N.

Four ranks with a slot each. Expert 0 of rank 0 goes to rank 1, from there to 2, and on to 3::

  expert_N    −1   0   0   0
  parent_N    −1   0   1   2
  feeder_N    −1  −1   1   2      slot 1 is fed by the home
  depth_N      0   0   1   2
"""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import support
from pallas_kernels.sums import sum_lines
from pallas_kernels.support import Array, AxisName


@dataclasses.dataclass(frozen=True)
class Trees:
  """The slots of a plan as links of trees. All is compares and sums.

  Attributes:
    expert_N: the expert in each slot, −1 if empty.
    parent_N: the rank next to the slot on the way to its expert's home, −1 if empty.
    filled_N: whether the slot holds an expert.
    forwards_N: whether another slot depends on it.
    feeder_N: the slot of the parent that it depends on; −1: the home, or empty.
    depth_N: links from the slot to the first slot of its tree.
  """

  expert_N: Array
  parent_N: Array
  filled_N: Array
  forwards_N: Array
  feeder_N: Array
  depth_N: Array

  @classmethod
  def of(cls, replica_expert_GS: Array, parent_GS: Array) -> "Trees":
    num_ranks, num_slots = replica_expert_GS.shape
    expert_N, parent_N = replica_expert_GS.reshape(-1), parent_GS.reshape(-1)
    slot_N = jnp.arange(num_ranks * num_slots, dtype=jnp.int32)
    filled_N = expert_N >= 0
    rank_N = rank_of_slots(num_ranks, num_slots)
    same_NN = (expert_N[:, None] == expert_N[None, :]) & filled_N[:, None]
    fed_NN = same_NN & (parent_N[:, None] == rank_N[None, :])  # by one slot of the parent at most
    feeds_NN = same_NN & (rank_N[:, None] == parent_N[None, :])
    fed_by_NN = jnp.where(fed_NN, slot_N[None, :] + 1, 0)
    feeder_N, feeds_N = sum_lines(fed_by_NN, feeds_NN.astype(jnp.int32))
    feeder_N -= 1
    return cls(expert_N, parent_N, filled_N, feeds_N > 0, feeder_N, _depth(feeder_N, num_ranks))

  def source(self, rank: Array, num_home: int, num_slots: int) -> Array:
    """What each slot depends on at its parent ``rank``: a home expert, or M + one of its slots."""
    home_N = self.expert_N - rank * num_home
    return jnp.where(
      self.feeder_N < 0, home_N, num_home + lax.rem(self.feeder_N, jnp.int32(num_slots))
    )


def rank_of_slots(num_ranks: int, num_slots: int) -> Array:
  """``[N]`` int32, the rank of each slot. A constant: XLA launches a kernel for a division."""
  return jnp.asarray(np.repeat(np.arange(num_ranks, dtype=np.int32), num_slots))


def _depth(feeder_N: Array, num_ranks: int) -> Array:
  """Links from each slot to the first of its tree, by pointer doubling."""
  size = feeder_N.size
  feeder = jnp.append(jnp.where(feeder_N < 0, size, feeder_N), jnp.int32(size))
  links = (feeder < size).astype(jnp.int32)
  for _ in range((num_ranks - 1).bit_length()):
    links, feeder = links + links[feeder], feeder[feeder]
  return links[:size]


def check(
  name: str, homes: Sequence[Array], replica_expert_GS: Array, parent_GS: Array, axis_name: AxisName
) -> None:
  """Checks a plan, and the ``[M, ...]`` arrays of the home experts, called ``name``.

  Raises:
    NotImplementedError: a mesh that kernels cannot cross, or a plan too large for int32.
    TypeError, ValueError: a dtype or a shape that is wrong.
  """
  num_ranks = lax.axis_size(axis_name)
  for plan_name, plan in (("replica_expert_GS", replica_expert_GS), ("parent_GS", parent_GS)):
    if plan.ndim != 2 or plan.shape[0] != num_ranks or plan.shape != replica_expert_GS.shape:
      raise ValueError(f"{plan_name}: expected shape [{num_ranks}, S], got {plan.shape}")
    if plan.dtype != jnp.int32:
      raise TypeError(f"{plan_name}: expected int32, got {plan.dtype}")
  sizes = {home.shape[0] if home.ndim else 0 for home in homes}
  if len(sizes) > 1 or 0 in sizes:
    raise ValueError(f"{name}: expected one leading size M >= 1, got {sorted(sizes)}")
  check_place(num_ranks, replica_expert_GS.shape[1], sum(sizes), axis_name)


def check_place(num_ranks: int, num_slots: int, num_home: int, axis_name: AxisName) -> None:
  """Raises NotImplementedError for a mesh that kernels cannot cross, or a plan too large."""
  support.check_mesh(axis_name)
  if most_turns(num_ranks, num_slots, num_home) < 1:
    shape = num_ranks, num_slots
    raise NotImplementedError(f"replica_expert_GS: too large for int32: {shape}")


def check_list(work: Array, length: int) -> None:
  """Raises ValueError unless a work list is as long as one of the plan and the arrays is."""
  if work.shape != (length,):
    raise ValueError(f"work: expected shape ({length},), got {work.shape}")


def most_turns(num_ranks: int, num_slots: int, num_home: int) -> int:
  """In which copies can be sent; keys of what is to do have place for so many in int32.

  >>> most_turns(8, 14, 16)
  19971
  """
  of_turn = 4 * num_ranks * (num_home + num_slots) * max(num_ranks * num_slots, 1)
  return int(jnp.iinfo(jnp.int32).max) // of_turn - 1
