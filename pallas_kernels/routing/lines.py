"""The hosts of every expert, for the routing kernel: their intervals of the expert's line.

An item is a slot of a rank: first the homes of all experts, then all replica slots. Each thread has
an item, or a few. Items of an expert are in order of their hosts in a list, in which an assignment
looks for the host that has its place.

An expert's line of 5 assignments, 3 for its home and 2 for the copy on rank 6::

  host      start   interval
  home          0   0, 1, 2
  rank 6        3   3, 4
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels.routing.block import Block
from pallas_kernels.support import Array
from pallas_kernels.warp.lanes import count_bits, earlier_in_warp
from pallas_kernels.warp.scatter import add_at, put_at
from pallas_kernels.warp.warps import (
  LANES,
  any_of_warp,
  clip,
  divide,
  lookup,
  ones,
  store,
  warp_sum,
  where,
)

_WALK = 4  # steps along a list at a time


class Item(NamedTuple):
  """A slot with an expert, in each thread; without one, ``filled`` is 0 and so are the counts."""

  index: Array
  exists: Array  # 0 in threads beyond the last item
  replica: Array  # whether it is no home
  slot: Array  # among all replica slots
  host: Array
  expert: Array
  filled: Array


class Quota(NamedTuple):
  """What an item's host has to do with the expert."""

  size: Array
  kept: Array  # of the host's own assignments
  rest: Array


class Place(NamedTuple):
  """An item's place among the others."""

  position: Array  # in the lists
  start: Array  # of the host's interval of the line
  slot_row: Array  # the slot's first row on the host


def load_items(block: Block, replica_ref: Any) -> list[Item]:
  """The items of each thread."""
  sizes, items = block.sizes, []
  for index, exists in block.each(sizes.items):
    replica = ones(index >= sizes.num_experts)
    slot = jnp.maximum(index - sizes.num_experts, 0)
    expert = where(replica > 0, lookup(replica_ref, slot), index)
    home = divide(jnp.minimum(index, sizes.num_experts - 1), sizes.num_home)[0]
    host = where(replica > 0, divide(slot, sizes.num_slots)[0], home)
    filled = exists * ones(expert >= 0)
    items.append(Item(index, exists, replica, slot, host, jnp.maximum(expert, 0), filled))
  return items


def load_quotas(block: Block, items: list[Item], load_ref: Any, quota_ref: Any) -> list[Quota]:
  sizes, quotas = block.sizes, []
  for item in items:
    size = lookup(quota_ref, item.expert * sizes.num_ranks + item.host) * item.filled
    load = lookup(load_ref, item.host * sizes.num_experts + item.expert)
    kept = jnp.minimum(load, size)
    quotas.append(Quota(size, kept, size - kept))
  return quotas


def share(block: Block, items: list[Item], quotas: list[Quota]) -> None:
  """Tells the other threads what they need of each item."""
  shared = block.shared
  for item, quota in zip(items, quotas, strict=True):
    put_at(shared.size, item.index, quota.size, item.exists)
    put_at(shared.warp_size, divide(item.index, LANES)[0], warp_sum(quota.size), item.exists)
    # No item has the bit of another, so a sum is their union.
    word, bit = divide(item.host, 32)
    add_at(shared.hosts, word * block.sizes.num_experts + item.expert, _bit(bit), item.filled)
    earlier = item.filled * ones(item.host < block.rank)
    add_at(shared.kept_before, item.expert, quota.kept, earlier)
    put_at(shared.own_kept, item.expert, quota.kept, item.filled * ones(item.host == block.rank))


def count_rows(block: Block, items: list[Item], quotas: list[Quota]) -> None:
  """Adds up the quotas of all items before each."""
  shared, lane = block.shared, divide(block.thread, LANES)[1]
  num_warps = -(-block.sizes.items // LANES)
  for item, quota in zip(items, quotas, strict=True):
    warp, earlier = divide(item.index, LANES)[0], lane * 0
    for first in range(0, num_warps, LANES):
      size = lookup(shared.warp_size, jnp.minimum(lane + first, num_warps - 1))
      earlier += where(lane + first < warp, size, 0)
    before = warp_sum(earlier) + earlier_in_warp(quota.size)
    put_at(shared.rows_before, item.index, before, item.exists)


def begin_lists(block: Block) -> None:
  """Finds the first place of each expert in the lists."""
  shared, sizes = block.shared, block.sizes

  def count_hosts(expert: Array) -> Array:
    index = jnp.minimum(expert, sizes.num_experts - 1)
    words = range(0, sizes.host_words * sizes.num_experts, sizes.num_experts)
    return functools.reduce(
      jnp.add, [count_bits(lookup(shared.hosts, index + word)) for word in words]
    ) * ones(expert < sizes.num_experts)

  def begin(expert: Array, exists: Array) -> None:
    count = count_hosts(where(exists > 0, expert, sizes.num_experts))
    warp, lane = divide(expert, LANES)[0], divide(block.thread, LANES)[1]
    of_warps = expert * 0
    for earlier in range((sizes.num_experts - 1) // LANES):
      of_warps += where(earlier < warp, count_hosts(lane + earlier * LANES), 0)
    put_at(shared.first, expert, warp_sum(of_warps) + earlier_in_warp(count), exists)
    put_at(shared.copies, expert, count - 1, exists)

  block.for_each(sizes.num_experts, begin)


def enlist(block: Block, items: list[Item], quotas: list[Quota]) -> list[tuple[Array, Array]]:
  """Puts items into the lists; returns where, and how many of the expert's are before them."""
  shared, sizes, positions = block.shared, block.sizes, []
  for item, quota in zip(items, quotas, strict=True):
    last, bit = divide(item.host, 32)
    before = item.index * 0
    for word in range(sizes.host_words):
      hosts = lookup(shared.hosts, item.expert + word * sizes.num_experts)
      lower = where(last == word, _bit(bit) - 1, where(last > word, -1 + bit * 0, 0))
      before += count_bits(hosts & lower)
    first = lookup(shared.first, item.expert)
    position = jnp.minimum(first + before, sizes.items - 1)
    put_at(shared.rest, position, quota.rest, item.filled)
    put_at(shared.host, position, item.host, item.filled)
    positions.append((position, before * item.filled))
  return positions


def place(block: Block, items: list[Item], positions: list[tuple[Array, Array]]) -> list[Place]:
  """Finds the place of each item among those of its expert and of its host."""
  places = []
  for item, (position, before) in zip(items, positions, strict=True):

    def add_rests(
      sums: tuple[Array, Array], position: Array = position, before: Array = before
    ) -> tuple[Array, Array]:
      back, start = sums
      for _ in range(_WALK):
        back += 1
        rest = lookup(block.shared.rest, jnp.maximum(position - back, 0))
        start += where(back <= before, rest, 0)
      return back, start

    zero = item.index * 0
    _, start = lax.while_loop(
      lambda sums, before=before: any_of_warp(ones(sums[0] < before)), add_rests, (zero, zero)
    )
    places.append(Place(position, start, _slot_row(block, item)))
  return places


def _bit(place: Array) -> Array:
  return jnp.left_shift(place * 0 + 1, place)


def _slot_row(block: Block, item: Item) -> Array:
  """Rows on the host before the item's slot."""
  sizes, before = block.sizes, functools.partial(lookup, block.shared.rows_before)
  first_home = item.host * sizes.num_home
  first_slot = item.host * sizes.num_slots + sizes.num_experts
  here, first = before(item.index), before(first_home)
  of_homes = before(first_home + sizes.num_home) - first
  return here - where(item.replica > 0, before(first_slot) - of_homes, first)


def end_lists(block: Block, items: list[Item], quotas: list[Quota], places: list[Place]) -> None:
  """Completes the lists, once ``sent`` is there."""
  shared, sizes = block.shared, block.sizes
  peers, experts = sizes.tuning.peers, sizes.num_experts
  for item, quota, at in zip(items, quotas, places, strict=True):
    parts = [lookup(shared.sent, item.expert + (peers + p) * experts) for p in range(peers)]
    start = functools.reduce(jnp.add, parts) - lookup(shared.kept_before, item.expert)
    put_at(shared.start, item.expert, start, item.filled * (1 - item.replica))
    earlier = clip(start - at.start, quota.rest) + where(item.host < block.rank, quota.kept, 0)
    first = at.slot_row + earlier
    put_at(shared.end, at.position, at.start + quota.rest, item.filled)
    put_at(shared.to_row, at.position, first - jnp.maximum(start, at.start), item.filled)
    put_at(shared.own_first, item.expert, first, item.filled * ones(item.host == block.rank))


def find_host(block: Block, expert: Array, at: Array) -> tuple[Array, Array]:
  """The first host of an expert whose interval ends after a place: its rank, and the row there."""
  shared, sizes = block.shared, block.sizes
  first, copies = lookup(shared.first, expert), lookup(shared.copies, expert)
  longest = min(sizes.num_ranks, sizes.replicas + 1)
  position = expert * 0
  for bit in reversed(range((longest - 1).bit_length())):
    later = position + (1 << bit)
    end = lookup(shared.end, jnp.minimum(first + later, sizes.items) - 1)
    position = where((later <= copies) & (end <= at), later, position)
  return lookup(shared.host, first + position), lookup(shared.to_row, first + position) + at


def tell_sizes(block: Block, size_ref: Any) -> None:
  """Rows of each slot of this rank."""
  shared, sizes = block.shared, block.sizes
  home, slots = sizes.num_home, sizes.num_slots
  for p, exists in block.each(home + slots):
    replica = sizes.num_experts + block.rank * slots + p - home
    item = where(p < home, block.rank * home + jnp.minimum(p, home - 1), replica)
    store(size_ref, p, lookup(shared.size, item), exists)
