"""What a block of the kernel of work lists knows of a plan's slots, as links of trees.

Those are the integers of ``Trees``. Slots of all ranks are numbered ``rank * S + slot``, and dealt
to the block's threads. What slots tell each other is in shared memory.

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

from pallas_kernels.support import Array
from pallas_kernels.warp.scatter import barrier, fill, put_at
from pallas_kernels.warp.warps import (
  divide,
  each_piece,
  lookup,
  ones,
  padded,
  thread_index,
  unrolled,
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

  @staticmethod
  def lengths(sizes: Sizes) -> "Links":
    return Links(*[padded(sizes.items)] * 5)


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

  def each(self, body: Callable[[Item], None]) -> None:
    """Calls ``body`` for all slots, and waits for all threads."""
    each_piece(self.sizes.items, lambda place: body(self._item(place)))
    barrier()

  def _item(self, place: Array) -> Item:
    index = jnp.minimum(place, self.sizes.items - 1)
    expert, exists = lookup(self.links.expert, index), place < self.sizes.items
    rank, _ = divide(index, self.sizes.slots)
    return Item(index, exists, exists & (expert >= 0), jnp.maximum(expert, 0), rank)

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
    put_at(links.expert, place, where(place < sizes.items, lookup(expert_ref, index), -1))
    put_at(links.parent, place, lookup(parent_ref, index))

  each_piece(sizes.items, read_slot)
  fill(links.forwards, padded(sizes.items), 0)
  barrier()
  slots.each(functools.partial(_feed, slots))
  slots.each(functools.partial(_climb, slots))


def _feed(slots: Slots, item: Item) -> None:
  """Finds the slot of the parent that has the expert."""
  links, size = slots.links, slots.sizes.slots
  first = jnp.maximum(lookup(links.parent, item.index), 0) * size

  def look(slot: Array, found: Array) -> Array:
    return where(lookup(links.expert, first + slot) == item.expert, first + slot, found)

  feeder = where(item.filled, unrolled(size, look, item.index * 0 - 1), -1)
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
