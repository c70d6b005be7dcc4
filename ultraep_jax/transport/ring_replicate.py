"""Replication in plain JAX, right on every backend: buffers passed round a ring.

The buffer for a rank starts at the farthest home that owes it a copy; every home it passes puts
its experts in; it arrives complete. It needs the memory of one rank's replicas, moves any dtype,
and makes as many hops as the plan's longest transfer needs, none for an empty plan. A hop moves
all S slots, filled or not, so the ring suits domains of up to about a node; it ignores the plan's
transfer trees. The adjoint walks the same ring backwards, so every home adds its replicas'
gradients in the same order every time.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from ultraep_jax.mesh import axes_of, mesh_max, to_varying, varying_axes
from ultraep_jax.types import Array, AxisName


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
  num_home = jax.tree.leaves(home)[0].shape[0]
  ring = _Ring.of(replica_expert_GS, num_home, axis_name, domain_size)

  def hop(i: Array, replica: T) -> T:
    expert_S = replica_expert_GS[ring.downstream(ring.hops - i)]
    mine_S = ring.is_home(expert_S)

    def put_and_pass(home_leaf: Array, leaf: Array) -> Array:
      mine = mine_S.reshape(-1, *[1] * (leaf.ndim - 1))
      return ring.shift(jnp.where(mine, home_leaf[expert_S % num_home], leaf), 1)

    return jax.tree.map(put_and_pass, home, replica)

  return lax.fori_loop(jnp.int32(0), ring.hops, hop, replica)


def reduce_replicas[T](
  replica: T, home: T, replica_expert_GS: Array, axis_name: AxisName, domain_size: int | None
) -> T:
  """As ``replicate.reduce_replicas``; the gradients of the next rank of the ring come first."""
  if not replica_expert_GS.shape[1]:
    return home
  num_home = jax.tree.leaves(home)[0].shape[0]
  ring = _Ring.of(replica_expert_GS, num_home, axis_name, domain_size)
  axes = varying_axes(replica, home, replica_expert_GS) | {*axes_of(axis_name)}

  def hop(i: Array, carry: tuple[T, T]) -> tuple[T, T]:
    replica, home = carry
    replica = jax.tree.map(lambda leaf: ring.shift(leaf, -1), replica)
    expert_S = replica_expert_GS[ring.downstream(i + 1)]
    target_S = jnp.where(ring.is_home(expert_S), expert_S % num_home, num_home)

    def add(home_leaf: Array, leaf: Array) -> Array:
      return home_leaf.at[target_S].add(leaf.astype(home_leaf.dtype), mode="drop")

    return replica, jax.tree.map(add, home, replica)

  # A sum is rounded when it is complete.
  sums = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), home)
  carry = to_varying((replica, sums), axes)
  sums = lax.fori_loop(jnp.int32(0), ring.hops, hop, carry)[1]
  return jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), sums, home)


@dataclasses.dataclass(frozen=True)
class _Ring:
  """The ranks of this rank's domain in a ring, and how far the plan's copies travel on it."""

  axis_name: AxisName
  size: int
  num_home: int
  rank: Array
  hops: Array  # the longest transfer of any plan on the mesh: every rank makes as many hops

  @classmethod
  def of(
    cls, replica_expert_GS: Array, num_home: int, axis_name: AxisName, domain_size: int | None
  ) -> "_Ring":
    num_ranks = replica_expert_GS.shape[0]
    size = num_ranks if domain_size is None else domain_size
    holder_G1 = jnp.arange(num_ranks, dtype=jnp.int32)[:, None]
    distance_GS = (holder_G1 - replica_expert_GS // num_home) % size
    longest = jnp.max(jnp.where(replica_expert_GS >= 0, distance_GS, 0))
    return cls(axis_name, size, num_home, lax.axis_index(axis_name), mesh_max(longest))

  def downstream(self, distance: Array) -> Array:
    """The rank of this domain that many hops further on."""
    base = self.rank // self.size * self.size
    return base + (self.rank - base + distance) % self.size

  def is_home(self, expert_S: Array) -> Array:
    return (expert_S >= 0) & (expert_S // self.num_home == self.rank)

  def shift(self, leaf: Array, step: int) -> Array:
    num_ranks = lax.axis_size(self.axis_name)
    pairs = []
    for rank in range(num_ranks):
      base = rank // self.size * self.size
      pairs.append((rank, base + (rank - base + step) % self.size))
    return lax.ppermute(leaf, self.axis_name, pairs)
