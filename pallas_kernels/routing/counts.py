"""What comes before each assignment, for the routing kernel: its ordinal among its expert's.

That is a sum of four: those of earlier clusters, which each cluster counts again, a share in each
of its blocks; of earlier blocks of the cluster; of earlier warps of the block; of earlier lanes.

Clusters of two blocks, blocks of two warps, warps of two lanes; the last ``a`` has ordinal 10::

  cluster 0   (a b  a a)  (b a  a a)     6 in the earlier cluster
  cluster 1   (a b  b a)                 2 in the earlier block
                          (b a  a a)     1 in the earlier warp, 1 in the earlier lane
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels.routing.block import Block
from pallas_kernels.support import Array
from pallas_kernels.warp.clusters import put_at_peer
from pallas_kernels.warp.lanes import equal_in_warp
from pallas_kernels.warp.scatter import add_at, put_at
from pallas_kernels.warp.warps import LANES, divide, lookup, ones, where


def own_assignments(block: Block) -> list[Array]:
  """The assignments of each thread."""
  sizes = block.sizes
  first = (block.cluster * sizes.tuning.peers + block.peer) * sizes.pieces * sizes.threads
  return [block.thread + (first + piece * sizes.threads) for piece in range(sizes.pieces)]


def load_expert(block: Block, index_ref: Any, at: Array) -> Array:
  """The expert of an assignment, E if there is none."""
  sizes = block.sizes
  expert = lookup(index_ref, jnp.minimum(at, sizes.assignments - 1))
  valid = (expert >= 0) & (expert < sizes.num_experts) & (at < sizes.assignments)
  return where(valid, expert, sizes.num_experts)


def load_earlier(block: Block, index_ref: Any, step: Array | int) -> list[Array]:
  """Experts of the next ``prefetch`` assignments of earlier clusters, E beyond the last."""
  sizes, experts = block.sizes, []
  for offset in range(sizes.tuning.prefetch):
    piece = step * sizes.tuning.prefetch + offset
    at = block.thread + (piece * sizes.tuning.peers + block.peer) * sizes.threads
    counts = block.thread * 0 + piece < _earlier_pieces(block)
    experts.append(where(counts, load_expert(block, index_ref, at), sizes.num_experts))
  return experts


def count_earlier(block: Block, index_ref: Any, experts: list[Array]) -> None:
  """Counts assignments of earlier clusters; ``experts`` are those loaded already."""

  def count(experts: list[Array]) -> None:
    for expert in experts:
      add_at(block.shared.earlier, expert, 1)

  count(experts)
  prefetch = block.sizes.tuning.prefetch
  steps = lax.div(_earlier_pieces(block) + prefetch - 1, jnp.int32(prefetch))
  lax.fori_loop(1, steps, lambda i, _: count(load_earlier(block, index_ref, i)), None)


def _earlier_pieces(block: Block) -> Array:
  """Assignments of earlier clusters that each thread of the cluster counts."""
  return block.cluster * block.sizes.pieces


def load_before(block: Block, load_ref: Any) -> list[tuple[Array, Array]]:
  """Experts and their loads on ranks before this one, a share of them for each thread."""
  sizes, loads = block.sizes, []
  pairs = sizes.num_ranks * sizes.num_experts
  for start in range(0, pairs, sizes.cluster_threads):
    pair = block.thread + (block.peer * sizes.threads + start)
    load = lookup(load_ref, jnp.minimum(pair, pairs - 1))
    before = pair < block.rank * sizes.num_experts
    loads.append((divide(pair, sizes.num_experts)[1], where(before, load, 0)))
  return loads


def add_before(block: Block, loads: list[tuple[Array, Array]]) -> None:
  """Adds them up by expert."""
  for expert, load in loads:
    add_at(block.shared.load_before, expert, load, ones(load > 0))


def count_warps(block: Block, experts: list[Array]) -> list[Array]:
  """Counts the experts of each warp and piece; returns how many equal ones earlier lanes have."""
  sizes, insides = block.sizes, []
  for piece, expert in enumerate(experts):
    inside, count = equal_in_warp(expert)
    counted = ones((inside == 0) & (expert < sizes.num_experts))
    index = _warp_row(block, piece) + jnp.minimum(expert, sizes.num_experts - 1)
    put_at(block.shared.warp_count, index, count, counted)
    insides.append(inside)
  return insides


def _warp_row(block: Block, piece: int) -> Array:
  """Where the counts of a thread's warp begin."""
  sizes = block.sizes
  warp = divide(block.thread, LANES)[0] + piece * (sizes.threads // LANES)
  return warp * sizes.num_experts


def send(block: Block) -> None:
  """Counts of warps become those before them; tells the cluster what comes before its blocks."""
  shared, sizes = block.shared, block.sizes
  peers, experts = sizes.tuning.peers, sizes.num_experts

  def send_expert(expert: Array, exists: Array) -> None:
    places = [expert + row * experts for row in range(sizes.rows)]
    counts = [lookup(shared.warp_count, place) for place in places]
    total = expert * 0
    for place, count in zip(places, counts, strict=True):
      put_at(shared.warp_count, place, total, exists)
      total += count
    earlier, load = lookup(shared.earlier, expert), lookup(shared.load_before, expert)
    index = expert + block.peer * experts
    for peer in range(peers):
      before = earlier + total * ones(block.peer < peer)
      put_at_peer(shared.sent, peer, index, before, exists)
      put_at_peer(shared.sent, peer, index + peers * experts, load, exists)

  block.for_each(experts, send_expert)


def add_sent(block: Block) -> None:
  """Adds up what the blocks of the cluster have sent of this rank's assignments."""
  shared, sizes = block.shared, block.sizes

  def add_up(expert: Array, exists: Array) -> None:
    starts = range(0, sizes.tuning.peers * sizes.num_experts, sizes.num_experts)
    parts = [lookup(shared.sent, expert + start) for start in starts]
    put_at(shared.before, expert, functools.reduce(jnp.add, parts), exists)

  block.for_each(sizes.num_experts, add_up)


def ordinal(block: Block, piece: int, expert: Array, inside: Array) -> Array:
  """How many assignments of this rank to the same expert come before an assignment."""
  shared = block.shared
  in_block = lookup(shared.warp_count, _warp_row(block, piece) + expert) + inside
  return lookup(shared.before, expert) + in_block
