"""What a block of the kernel of work lists knows of a plan's slots, as links of trees.

Those are the integers of ``Trees``. Slots of all ranks are numbered ``rank * S + slot``, and dealt
to the block's threads. What slots tell each other is in shared memory. Plans fill the first slots
of ranks, so loops end behind the last one that any rank has filled.

Four ranks with a slot each, as rank 1 of one home expert sees them; expert 0 goes on to rank 2::

  slot     expert   parent   feeder        copy, as rank 1 sees it
  0        −1       −1       −1            none
  1         0        0       −1 (home)     not its own
  2         0        1        1            its own, from its slot: source 1
  3        −1       −1       −1            none
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels.support import Array
from pallas_kernels.warp.scatter import barrier, fill, max_at, put_at
from pallas_kernels.warp.warps import (
  THREADS,
  divide,
  each_piece,
  lookup,
  ones,
  padded,
  thread_index,
  unrolled,
  unrolled_used,
  where,
)


class Sizes(NamedTuple):
  ranks: int  # G
  slots: int  # S
  home: int  # M

  @property
  def items(self) -> int:
    """N, slots of all ranks."""
    return self.ranks * self.slots

  @property
  def experts(self) -> int:
    return self.ranks * self.home

  @property
  def sources(self) -> int:
    """What a rank can send of: home experts, then own slots."""
    return self.home + self.slots


class Links(NamedTuple):
  """Vectors of int32 in shared memory, of all slots."""

  expert: Any  # −1 if empty
  parent: Any
  feeder: Any  # the slot that it depends on, −1: the home, or empty
  forwards: Any  # 1 if another slot depends on it
  depth: Any  # links to the first slot of its tree
  used: Any  # [128], the first element alone: slots of each rank up to the last filled one of any

  @staticmethod
  def lengths(sizes: Sizes) -> "Links":
    items = padded(sizes.items)
    return Links(items, items, items, items, items, used=THREADS)


class Item(NamedTuple):
  """A slot of each thread; where there is none, the last one."""

  index: Array
  exists: Array  # bool
  filled: Array  # bool
  expert: Array  # 0 if empty
  rank: Array


class Copy(NamedTuple):
  """The link to a slot from what feeds it."""

  mine: Array  # bool, whether the slot is filled by this rank
  source: Array  # of this rank's, 0 if it is not
  feeder: Array  # −1: the home


class Slots(NamedTuple):
  """A plan's slots as one rank sees them."""

  links: Links
  sizes: Sizes
  rank: Array

  @property
  def used(self) -> Array:
    """``[]`` int32, slots of each rank up to the last filled one of any."""
    return self.links.used[0]

  def each(self, body: Callable[[Item], None]) -> None:
    """Calls ``body`` for the used slots of all ranks, and waits for all threads."""
    used = self.used
    each_piece(self.sizes.ranks * used, lambda place: body(self._item(place, used)))
    barrier()

  def _item(self, place: Array, used: Array) -> Item:
    last = self.sizes.ranks * used - 1
    rank, slot = divide(jnp.minimum(place, last), used)
    index, exists = rank * self.sizes.slots + slot, place <= last
    expert = lookup(self.links.expert, index)
    return Item(index, exists, exists & (expert >= 0), jnp.maximum(expert, 0), rank)

  def over_rank(self, body: Callable[[Array, Any], Any], init: Any) -> Any:
    """Folds ``body`` over a rank's used slots from 0, and perhaps some empty ones behind."""
    return unrolled_used(self.sizes.slots, self.used, body, init)

  def over_all(self, body: Callable[[Array, Any], Any], init: Any) -> Any:
    """The same over those of all ranks, by their numbers among all slots, ``[128]`` int32."""

    def over(rank: Array, carry: Any) -> Any:
      first = thread_index() * 0 + rank * self.sizes.slots
      return self.over_rank(lambda slot, carry: body(first + slot, carry), carry)

    return lax.fori_loop(0, self.sizes.ranks, over, init)

  def copy(self, item: Item) -> Copy:
    """Its link."""
    mine = item.filled & (lookup(self.links.parent, item.index) == self.rank)
    feeder = where(mine, lookup(self.links.feeder, item.index), -1)
    slot = divide(jnp.maximum(feeder, 0), self.sizes.slots)[1]
    home = item.expert - self.rank * self.sizes.home
    source = where(feeder >= 0, slot + self.sizes.home, home)
    return Copy(mine, where(mine, source, 0), feeder)


def read(slots: Slots, expert_ref: Any, parent_ref: Any) -> None:
  """Fills the links from a legal plan: of others, indices could lie outside."""
  links, sizes = slots.links, slots.sizes

  def read_slot(place: Array) -> None:
    index = jnp.minimum(place, sizes.items - 1)
    expert = where(place < sizes.items, lookup(expert_ref, index), -1)
    put_at(links.expert, place, expert)
    put_at(links.parent, place, lookup(parent_ref, index))
    _, slot = divide(index, sizes.slots)
    max_at(links.used, place * 0, slot + 1, expert >= 0)

  fill(links.forwards, padded(sizes.items), 0)
  fill(links.used, THREADS, 0)
  barrier()
  each_piece(sizes.items, read_slot)
  barrier()
  slots.each(functools.partial(_feed, slots))
  slots.each(functools.partial(_climb, slots))


def _feed(slots: Slots, item: Item) -> None:
  """Finds the slot of the parent that has the expert."""
  links = slots.links
  first = jnp.maximum(lookup(links.parent, item.index), 0) * slots.sizes.slots

  def look(slot: Array, found: Array) -> Array:
    return where(lookup(links.expert, first + slot) == item.expert, first + slot, found)

  feeder = where(item.filled, slots.over_rank(look, item.index * 0 - 1), -1)
  put_at(links.feeder, item.index, feeder, item.exists)
  put_at(links.forwards, jnp.maximum(feeder, 0), 1, feeder >= 0)


def _climb(slots: Slots, item: Item) -> None:
  """Counts links up to the first slot of a tree."""
  feeder = slots.links.feeder

  def climb(_: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
    depth, slot = carry
    above = lookup(feeder, jnp.maximum(slot, 0))
    return depth + ones(slot >= 0), where(slot >= 0, above, slot)

  start = thread_index() * 0, lookup(feeder, item.index)
  depth, _ = unrolled(slots.sizes.ranks - 1, climb, start)
  put_at(slots.links.depth, item.index, depth)
