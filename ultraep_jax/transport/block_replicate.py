"""Replication in plain JAX, right on every backend: equal blocks of experts with ``all_to_all``.

In a turn every rank sends each rank of its domain one expert, or what nobody reads. There are as
many turns as a rank has copies of one other rank's experts at most; none for an empty plan. Large
experts cross in pieces, as blocks for all ranks take memory. Transfer trees are ignored: homes send
all copies. The adjoint sends the gradients back in the same turns, so every home adds its copies'
gradients in the same order every time.

Shapes: R ranks of a domain.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from ultraep_jax.mesh import axes_of, mesh_max, to_varying, varying_axes
from ultraep_jax.types import Array, AxisName

_BLOCKS_BYTES = 64 << 20  # that a rank sends at a time; experts are cut so that they are no more


def replicate[T](
  home: T, replica_expert_GS: Array, axis_name: AxisName, domain_size: int | None
) -> T:
  """As ``replicate.replicate``; empty slots are zero."""
  num_slots = replica_expert_GS.shape[1]
  axes = varying_axes(home, replica_expert_GS) | {*axes_of(axis_name)}
  replica = jax.tree.map(
    lambda leaf: to_varying(jnp.zeros((num_slots, *leaf.shape[1:]), leaf.dtype), axes), home
  )
  if not num_slots:
    return replica
  swap = _Swap.of(home, replica_expert_GS, axis_name, domain_size)

  homes = swap.cut(to_varying(home, axes))

  def step(turn: Array, piece: Array, replicas: list[Array]) -> list[Array]:
    expert_R, slot_R = swap.my_experts(turn), swap.my_slots(turn)
    received = [swap.swap(leaf[expert_R, piece]) for leaf in homes]
    return [
      leaf.at[slot_R, piece].set(blocks, mode="drop", unique_indices=True)
      for leaf, blocks in zip(replicas, received, strict=True)
    ]

  return _like(replica, swap.each_step(step, swap.cut(replica)))


def reduce_replicas[T](
  replica: T, home: T, replica_expert_GS: Array, axis_name: AxisName, domain_size: int | None
) -> T:
  """As ``replicate.reduce_replicas``; of a step, the gradients of the next rank come first."""
  if not replica_expert_GS.shape[1]:
    return home
  axes = varying_axes(replica, home, replica_expert_GS) | {*axes_of(axis_name)}
  swap = _Swap.of(home, replica_expert_GS, axis_name, domain_size)

  replicas = swap.cut(to_varying(replica, axes))

  def step(turn: Array, piece: Array, homes: list[Array]) -> list[Array]:
    expert_R, slot_R = swap.my_experts(turn), swap.my_slots(turn)
    received = [swap.swap(leaf[slot_R, piece]) for leaf in replicas]

    def add(distance: Array, homes: list[Array]) -> list[Array]:
      peer = (swap.place + distance) % swap.size
      return [
        leaf.at[expert_R[peer], piece].add(
          blocks[peer].astype(leaf.dtype), mode="drop", unique_indices=True
        )
        for leaf, blocks in zip(homes, received, strict=True)
      ]

    return lax.fori_loop(1, swap.size, add, homes)

  return _like(home, swap.each_step(step, swap.cut(to_varying(home, axes))))


@dataclasses.dataclass(frozen=True)
class _Swap:
  """Who sends what to whom in a domain, in which turn.

  Attributes:
    axis_name: the expert mesh axis.
    size: R.
    num_home: M.
    num_slots: S.
    pieces: that experts are cut into.
    place: of this rank in its domain.
    home_RS: the place of the home of each slot's expert in the domain, −1 where a slot is empty.
    expert_RS: the expert, counted among those of its home.
    turn_RS: how many slots of the rank before this one have the same home.
    turns: that the fullest pair of ranks on the mesh needs.
  """

  axis_name: AxisName
  size: int
  num_home: int
  num_slots: int
  pieces: int
  place: Array
  home_RS: Array
  expert_RS: Array
  turn_RS: Array
  turns: Array

  @classmethod
  def of(
    cls, home: object, replica_expert_GS: Array, axis_name: AxisName, domain_size: int | None
  ) -> "_Swap":
    leaves = jax.tree.leaves(home)
    num_ranks, num_slots = replica_expert_GS.shape
    size, num_home = domain_size or num_ranks, leaves[0].shape[0]
    rank = lax.axis_index(axis_name)
    filled_GS = replica_expert_GS >= 0
    home_GS = jnp.where(filled_GS, replica_expert_GS // num_home % size, -1)
    earlier_SS = jnp.tri(num_slots, k=-1, dtype=jnp.bool_)
    same_GSS = (home_GS[:, :, None] == home_GS[:, None, :]) & earlier_SS[None]
    turn_GS = jnp.sum(same_GSS, axis=2, dtype=jnp.int32)
    domain_GS = (home_GS, replica_expert_GS % num_home, turn_GS)
    first = rank // size * size
    return cls(
      axis_name,
      size,
      num_home,
      num_slots,
      _pieces(leaves, size),
      rank % size,
      *(lax.dynamic_slice_in_dim(array_GS, first, size) for array_GS in domain_GS),
      turns=mesh_max(jnp.max(jnp.where(filled_GS, turn_GS + 1, 0))),
    )

  def my_experts(self, turn: Array) -> Array:
    """``[R]``, this rank's expert that each rank gets in a turn; M, beyond all, if none."""
    mine_RS = (self.home_RS == self.place) & (self.turn_RS == turn)
    return jnp.min(jnp.where(mine_RS, self.expert_RS, self.num_home), axis=1)

  def my_slots(self, turn: Array) -> Array:
    """``[R]``, this rank's slot for a copy from each rank in a turn; S, beyond all, if none."""
    from_RS = self.home_RS[self.place][None, :] == jnp.arange(self.size)[:, None]
    from_RS &= (self.turn_RS[self.place] == turn)[None, :]
    slot_1S = jnp.arange(self.num_slots, dtype=jnp.int32)[None]
    return jnp.min(jnp.where(from_RS, slot_1S, self.num_slots), axis=1)

  def swap(self, blocks_RX: Array) -> Array:
    """Sends a block to each rank of the domain and returns those received."""
    num_ranks = lax.axis_size(self.axis_name)
    groups = None
    if self.size < num_ranks:
      groups = [[*range(i, i + self.size)] for i in range(0, num_ranks, self.size)]
    return lax.all_to_all(blocks_RX, self.axis_name, 0, 0, tiled=True, axis_index_groups=groups)

  def cut(self, tree: object) -> list[Array]:
    """Arrays of experts as ``[N, pieces, X]``."""
    return [leaf.reshape(leaf.shape[0], self.pieces, -1) for leaf in jax.tree.leaves(tree)]

  def each_step[Carry](self, step: Callable[[Array, Array, Carry], Carry], carry: Carry) -> Carry:
    """Runs all pieces of all turns."""

    def all_pieces(turn: Array, carry: Carry) -> Carry:
      return lax.fori_loop(0, self.pieces, functools.partial(step, turn), carry)

    return lax.fori_loop(jnp.int32(0), self.turns, all_pieces, carry)


def _pieces(leaves: list[Array], size: int) -> int:
  """As few as keep blocks small and cut every array evenly; one if none does."""
  lengths = [math.prod(leaf.shape[1:]) for leaf in leaves]
  sizes = [length * leaf.dtype.itemsize for length, leaf in zip(lengths, leaves, strict=True)]
  common, least = math.gcd(*lengths), -(-size * sum(sizes) // _BLOCKS_BYTES)
  return next((n for n in range(least, 8 * least) if n and common % n == 0), 1)


def _like[T](tree: T, pieces: list[Array]) -> T:
  """The adjoint of ``cut``."""
  leaves, structure = jax.tree.flatten(tree)
  shaped = (cut.reshape(leaf.shape) for cut, leaf in zip(pieces, leaves, strict=True))
  return jax.tree.unflatten(structure, list(shaped))
