"""What a block of the routing kernel is, and what its threads share."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels.support import Array
from pallas_kernels.transfer.tuning import check_positive
from pallas_kernels.warp.branches import when
from pallas_kernels.warp.scatter import put_at
from pallas_kernels.warp.warps import LANES, THREADS, ones, thread_index

CLUSTER_AXIS, PEER_AXIS, GROUP_AXIS = "route_cluster", "route_peer", "route_group"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoutingTuning:
  """How the work is laid out; no choice changes a result.

  Attributes:
    groups: warpgroups of a block, at most 8.
    peers: blocks of a cluster, at most 8.
    clusters: how many a rank's assignments are spread over, if there are enough of them.
    most_pieces: assignments of a thread; beyond ``clusters`` times that there are more clusters.
    prefetch: assignments of earlier clusters that a thread loads at a time.
  """

  groups: int = 4
  peers: int = 8
  clusters: int = 12
  most_pieces: int = 4
  prefetch: int = 16

  def __post_init__(self) -> None:
    check_positive(self, "groups", "peers", "clusters", "most_pieces", "prefetch")
    for name in ("groups", "peers"):
      if getattr(self, name) > 8:
        raise ValueError(f"{name}: expected at most 8, got {getattr(self, name)}")


@dataclasses.dataclass(frozen=True)
class Sizes:
  num_ranks: int
  num_experts: int
  num_slots: int
  assignments: int
  tuning: RoutingTuning

  @property
  def num_home(self) -> int:
    return self.num_experts // self.num_ranks

  @property
  def replicas(self) -> int:
    return self.num_ranks * self.num_slots

  @property
  def items(self) -> int:
    """Homes of all experts, then all replica slots, by rank."""
    return self.num_experts + self.replicas

  @property
  def host_words(self) -> int:
    """Words of a bit for each rank."""
    return -(-self.num_ranks // 32)

  @property
  def threads(self) -> int:
    """Of a block."""
    return self.tuning.groups * THREADS

  @property
  def cluster_threads(self) -> int:
    return self.tuning.peers * self.threads

  @property
  def pieces(self) -> int:
    """Assignments of a thread."""
    wanted = -(-self.assignments // (self.tuning.clusters * self.cluster_threads))
    return min(wanted, self.tuning.most_pieces)

  @property
  def rows(self) -> int:
    """Warps of a block, times pieces: each counts its 32 assignments by expert."""
    return self.pieces * self.threads // LANES

  @property
  def clusters(self) -> int:
    return -(-self.assignments // (self.pieces * self.cluster_threads))


class Shared(NamedTuple):
  """Vectors of int32 in shared memory. Those up to ``own_kept`` begin as zeros."""

  warp_count: Any  # [rows, E], how often each warp's piece has each expert, then those before
  hosts: Any  # [host_words, E], a bit for each host
  earlier: Any  # [E + 1], assignments of earlier clusters, this block's part; then masked ones
  load_before: Any  # [E], assignments of earlier ranks, this block's part of them
  kept_before: Any  # [E], those of them that their ranks keep
  own_kept: Any  # [E], assignments that this rank keeps
  own_first: Any  # [E], the row of the first of them
  before: Any  # [E], assignments of this rank to each expert before this block
  start: Any  # [E], where this rank's interval of the expert's line begins
  first: Any  # [E], the expert's first place in the lists
  copies: Any  # [E], hosts beyond the first
  sent: Any  # [2, peers, E], what the cluster's blocks have counted for this one
  size: Any  # [items], the quota
  warp_size: Any  # [items / 32], its sum over each warp's items
  rows_before: Any  # [items], its sum over all items before
  # Lists of hosts, in order of experts and then ranks.
  rest: Any  # [items], the quota less what the host keeps of its own
  end: Any  # [items], the end of the host's interval of the expert's line
  to_row: Any  # [items], what to add to a place in it for the row
  host: Any  # [items]

  @staticmethod
  def lengths(sizes: Sizes) -> "Shared":
    experts, items = sizes.num_experts, sizes.items
    return Shared(
      warp_count=sizes.rows * experts,
      hosts=sizes.host_words * experts,
      earlier=experts + 1,
      load_before=experts,
      kept_before=experts,
      own_kept=experts,
      own_first=experts,
      before=experts,
      start=experts,
      first=experts,
      copies=experts,
      sent=2 * sizes.tuning.peers * experts,
      size=items,
      warp_size=-(-items // LANES),
      rows_before=items,
      rest=items,
      end=items,
      to_row=items,
      host=items,
    )


class Block:
  """A block's place, and its threads'."""

  def __init__(self, sizes: Sizes, shared: Shared, rank: Array):
    self.sizes, self.shared, self.rank = sizes, shared, rank
    self.cluster = lax.axis_index(CLUSTER_AXIS)
    self.peer = lax.axis_index(PEER_AXIS)
    self.group = lax.axis_index(GROUP_AXIS)
    self.thread = self.group * THREADS + thread_index()

  def each(self, size: int) -> Iterator[tuple[Array, Array]]:
    """Indices below ``size``, dealt out to the block's threads, and whether there is one."""
    for start in range(0, size, self.sizes.threads):
      index = self.thread + start
      yield jnp.minimum(index, size - 1), ones(index < size)

  def clear(self) -> None:
    """Zeros where counts and sums begin."""
    lengths = Shared.lengths(self.sizes)
    for name in ("warp_count", "hosts", "earlier", "load_before", "kept_before", "own_kept"):
      for index, exists in self.each(getattr(lengths, name)):
        put_at(getattr(self.shared, name), index, index * 0, exists)

  def for_each(self, size: int, function: Callable[[Array, Array], None]) -> None:
    """Calls it with what ``each`` yields, in the warpgroups that have any; no barrier within."""
    for place, (index, exists) in enumerate(self.each(size)):
      first = self.group * THREADS + place * self.sizes.threads
      when(first < size)(functools.partial(function, index, exists))
