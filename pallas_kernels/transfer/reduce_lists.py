"""A block's part in the kernel of work lists: what one rank adds and sends of gradients.

The list is that of ``reduce_work``, bit for bit: its docstrings say why nodes are in that order.
Places come from counting what goes before::

  slots ──► children of this rank's sources ──► keys of its nodes ──► places ──► fields
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels.support import Array
from pallas_kernels.transfer.reduce_work import Fields, num_nodes_of
from pallas_kernels.transfer.slots import Item, Sizes, Slots
from pallas_kernels.warp.scatter import add_at, barrier, fill, put_at
from pallas_kernels.warp.warps import (
  INT32_MAX,
  each_piece,
  lookup,
  ones,
  padded,
  thread_index,
  unrolled_used,
  where,
)


class Shared(NamedTuple):
  """Vectors of int32 in shared memory."""

  source: Any  # [N], of this rank's that feeds the slot; −1: none
  # Of this rank's sources, [Q]: home experts, then own slots.
  children: Any  # how many slots it feeds
  key: Any
  begin: Any  # the place of the first child

  @staticmethod
  def lengths(sizes: Sizes) -> "Shared":
    return Shared(padded(sizes.items), *[padded(sizes.sources)] * 3)


def write(shared: Shared, slots: Slots, fields_ref: Any) -> None:
  """Writes the list to ``fields_ref``, which is 0 before."""
  sizes = slots.sizes
  fill(shared.source, padded(sizes.items), -1)
  fill(shared.children, padded(sizes.sources), 0)
  fill(shared.key, padded(sizes.sources), INT32_MAX)
  barrier()
  slots.each(functools.partial(_count_children, shared, slots))
  sources = _sources(slots)
  each_piece(sources, functools.partial(_order, shared, slots))
  barrier()
  each_piece(sources, functools.partial(_write_node, shared, slots, fields_ref, sources))
  barrier()
  slots.each(functools.partial(_write_child, shared, slots, fields_ref))


def _count_children(shared: Shared, slots: Slots, item: Item) -> None:
  copy = slots.copy(item)
  put_at(shared.source, item.index, where(copy.mine, copy.source, -1), item.exists)
  add_at(shared.children, copy.source, 1, copy.mine)


class _Source(NamedTuple):
  """A source of each thread; where there is none, the last one."""

  index: Array
  used: Array  # bool
  slot: Array  # of all, if it is a slot
  is_home: Array  # bool
  children: Array


def _sources(slots: Slots) -> Array:
  """``[]`` int32, of this rank up to its last used slot; 0 of a plan without copies."""
  used = slots.used
  return lax.select(used > 0, slots.sizes.home + used, jnp.int32(0))


def _source(shared: Shared, slots: Slots, place: Array) -> _Source:
  sizes = slots.sizes
  index = jnp.minimum(place, sizes.sources - 1)
  slot = slots.rank * sizes.slots + jnp.maximum(index - sizes.home, 0)
  is_home, children = index < sizes.home, lookup(shared.children, index)
  filled = ~is_home & (lookup(slots.links.expert, slot) >= 0)
  used = (place < sizes.sources) & (filled | (children > 0))
  return _Source(index, used, slot, is_home, children)


def _order(shared: Shared, slots: Slots, place: Array) -> None:
  """Keys: slots without children, then by falling depth, homes last."""
  sizes, it = slots.sizes, _source(shared, slots, place)
  depth = where(it.is_home, it.index * 0 - 1, lookup(slots.links.depth, it.slot))
  turn = where(it.children > 0, sizes.ranks - depth, 0)
  turn = where(it.used, turn, sizes.ranks + 2)
  put_at(shared.key, it.index, turn * sizes.sources + it.index, place < sizes.sources)


def _write_node(
  shared: Shared, slots: Slots, fields_ref: Any, sources: Array, place: Array
) -> None:
  sizes, it = slots.sizes, _source(shared, slots, place)
  own = lookup(shared.key, it.index)

  def count(other: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
    other = thread_index() * 0 + other
    before = lookup(shared.key, other) < own
    node, child = carry
    return node + ones(before), child + where(before, lookup(shared.children, other), 0)

  node, begin = unrolled_used(sizes.sources, sources, count, (own * 0, own * 0))
  put_at(shared.begin, it.index, begin, place < sizes.sources)
  parent = where(it.is_home, it.index * 0 - 1, lookup(slots.links.parent, it.slot))
  values = {
    Fields.SOURCE: it.index,
    Fields.PARENT: parent,
    Fields.END: begin + it.children,
    Fields.TARGET: _target(slots, it),
  }
  add_at(fields_ref, it.index * 0 + Fields.COUNT, 1, it.used)
  num_nodes = num_nodes_of(sizes.ranks, sizes.slots, sizes.home)
  for column, value in values.items():
    put_at(fields_ref, Fields.node(num_nodes, where(it.used, node, 0), column), value, it.used)


def _target(slots: Slots, it: _Source) -> Array:
  """The home expert that a slot adds to by itself; 0 of a home that one slot adds to; else −1."""
  links = slots.links
  expert, parent = (lookup(link, it.slot) for link in (links.expert, links.parent))

  def of_home(index: Array) -> Array:
    return lookup(links.feeder, index) < 0

  def count(other: Array, found: Array) -> Array:
    return found + ones(of_home(other) & (lookup(links.expert, other) == expert))

  alike = slots.over_all(count, it.slot * 0)
  of_slot = where(of_home(it.slot) & (alike == 1), expert - parent * slots.sizes.home, -1)
  return where(it.is_home, where(it.children == 1, it.children - 1, -1), of_slot)


def _write_child(shared: Shared, slots: Slots, fields_ref: Any, item: Item) -> None:
  sizes = slots.sizes
  source = lookup(shared.source, item.index)

  def count(other: Array, earlier: Array) -> Array:
    return earlier + ones((lookup(shared.source, other) == source) & (other < item.index))

  place = slots.over_all(count, source * 0) + lookup(shared.begin, jnp.maximum(source, 0))
  mine = item.filled & (source >= 0)
  num_nodes = num_nodes_of(sizes.ranks, sizes.slots, sizes.home)
  field = Fields.child(num_nodes, where(mine, place, 0))
  put_at(fields_ref, field, item.index, mine)
