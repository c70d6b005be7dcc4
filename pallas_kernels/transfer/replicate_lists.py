"""A block's part in the kernel of work lists: what one rank sends and awaits of copies.

The list is that of ``replicate_work``, bit for bit: its docstrings say why copies are in that
order. Places come from counting what goes before::

  slots ──► turns of experts ──► keys of this rank's copies ──► places ──► fields
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp

from pallas_kernels.support import Array
from pallas_kernels.transfer.replicate_work import Fields
from pallas_kernels.transfer.slots import Item, Sizes, Slots
from pallas_kernels.warp.scatter import add_at, barrier, fill, max_at, min_at, put_at
from pallas_kernels.warp.warps import (
  INT32_MAX,
  THREADS,
  divide,
  lookup,
  ones,
  over_all,
  padded,
  thread_index,
  warp_max,
  where,
)


class Shared(NamedTuple):
  """Vectors of int32 in shared memory."""

  wanted: Any  # [N], when the slot wants its copy
  turn: Any  # [N]
  key: Any  # [N], of slots that lead their experts, then of copies
  place: Any  # [N], of copies
  first: Any  # [E], when the first slot wants an expert
  turn_end: Any  # [N], the place after a turn's last copy
  # Of who sends copies, [E + N]: homes of experts, then slots.
  relays: Any  # 1 if one of the copies is forwarded
  begin: Any  # the place of the first
  relayed: Any  # how many are forwarded
  end: Any  # the place after the last
  scratch: Any  # [128]

  @staticmethod
  def lengths(sizes: Sizes) -> "Shared":
    items, senders = padded(sizes.items), padded(sizes.experts + sizes.items)
    of_items = dict.fromkeys(("wanted", "turn", "key", "place", "turn_end"), items)
    of_senders = dict.fromkeys(("relays", "begin", "relayed", "end"), senders)
    return Shared(**of_items, first=padded(sizes.experts), **of_senders, scratch=THREADS)


def write(
  shared: Shared, slots: Slots, fields_ref: Any, rows_ref: Any | None, together: Array
) -> None:
  """Writes the list to ``fields_ref``, which is 0 before.

  Args:
    shared: anything.
    slots: the plan's.
    fields_ref: the list.
    rows_ref: of each rank, by which experts take turns; ``None``: all have one.
    together: experts that have a turn together.
  """
  sizes = slots.sizes
  items, senders = padded(sizes.items), padded(sizes.experts + sizes.items)
  fill(shared.first, padded(sizes.experts), INT32_MAX)
  fill(shared.turn_end, items, 0)
  fill(shared.wanted, items, 0)
  fill(shared.key, items, INT32_MAX)
  fill(shared.begin, senders, INT32_MAX)
  for ref in (shared.relays, shared.relayed, shared.end):
    fill(ref, senders, 0)
  barrier()
  if rows_ref is not None:
    _want(shared, slots, rows_ref)
  slots.each(functools.partial(_meet, shared, slots))
  slots.each(functools.partial(_lead, shared))
  slots.each(functools.partial(_take_turns, shared, slots, together))
  slots.each(functools.partial(_order, shared, slots))
  slots.each(functools.partial(_find_ends, shared, slots))
  slots.each(functools.partial(_write_fields, shared, slots, fields_ref))


def _want(shared: Shared, slots: Slots, rows_ref: Any) -> None:
  """Slots of ranks with few rows come first, and of a rank the first ones."""
  sizes = slots.sizes
  ranks = [thread_index() + start for start in range(0, padded(sizes.ranks), THREADS)]
  rows = [lookup(rows_ref, jnp.minimum(rank, sizes.ranks - 1)) for rank in ranks]
  sixteenth = divide(over_all(warp_max, rows, shared.scratch), 16)[0] + 1

  def want(item: Item) -> None:
    slot = item.index - item.rank * sizes.slots
    few, _ = divide(lookup(rows_ref, item.rank), sixteenth)
    wanted = few * sizes.items + slot * sizes.ranks + item.rank
    put_at(shared.wanted, item.index, wanted, item.exists)

  slots.each(want)


def _meet(shared: Shared, slots: Slots, item: Item) -> None:
  """Slots tell their experts when they want them, and their senders whether they forward."""
  min_at(shared.first, item.expert, lookup(shared.wanted, item.index), item.filled)
  forwards = lookup(slots.links.forwards, item.index) > 0
  sender = _sender(slots, item, lookup(slots.links.feeder, item.index))
  put_at(shared.relays, sender, 1, item.filled & forwards)


def _sender(slots: Slots, item: Item, feeder: Array) -> Array:
  """Who sends a slot its copy, of homes and slots; without a feeder, the expert's home."""
  return where(feeder >= 0, feeder + slots.sizes.experts, item.expert)


def _lead(shared: Shared, item: Item) -> None:
  """One slot of each expert counts it among those that take turns."""
  wanted = lookup(shared.wanted, item.index)
  leads = item.filled & (lookup(shared.first, item.expert) == wanted)
  put_at(shared.key, item.index, where(leads, wanted, INT32_MAX), item.exists)


def _keys_before(shared: Shared, slots: Slots, key: Array) -> Array:
  def count(index: Array, before: Array) -> Array:
    return before + ones(lookup(shared.key, index) < key)

  return slots.over_all(count, key * 0)


def _take_turns(shared: Shared, slots: Slots, together: Array, item: Item) -> None:
  order = _keys_before(shared, slots, lookup(shared.first, item.expert))
  put_at(shared.turn, item.index, divide(order, together)[0], item.exists)


def _order(shared: Shared, slots: Slots, item: Item) -> None:
  """Keys of copies: by turn, by depth, those of sources with forwarded ones first, and these."""
  copy, sizes, links = slots.copy(item), slots.sizes, slots.links
  group = lookup(shared.turn, item.index) * sizes.ranks + lookup(links.depth, item.index)
  sender = _sender(slots, item, copy.feeder)
  group = group * 2 + 1 - lookup(shared.relays, sender)
  group = 2 * (group * sizes.sources + copy.source)
  key = (group + 1 - lookup(links.forwards, item.index)) * sizes.items + item.index
  put_at(shared.key, item.index, where(copy.mine, key, INT32_MAX), item.exists)


def _find_ends(shared: Shared, slots: Slots, item: Item) -> None:
  copy = slots.copy(item)
  sender = _sender(slots, item, copy.feeder)
  place = _keys_before(shared, slots, lookup(shared.key, item.index))
  put_at(shared.place, item.index, place, item.exists)
  min_at(shared.begin, sender, place, copy.mine)
  max_at(shared.end, sender, place + 1, copy.mine)
  add_at(shared.relayed, sender, lookup(slots.links.forwards, item.index), copy.mine)
  max_at(shared.turn_end, lookup(shared.turn, item.index), place + 1, copy.mine)


def _write_fields(shared: Shared, slots: Slots, fields_ref: Any, item: Item) -> None:
  copy, sizes = slots.copy(item), slots.sizes
  own = item.filled & (item.rank == slots.rank)
  add_at(fields_ref, item.index * 0 + Fields.COUNT, 1, copy.mine)
  add_at(fields_ref, item.index * 0 + Fields.INVOLVED, 1, copy.mine | own)
  put_at(fields_ref, where(own, item.index - slots.rank * sizes.slots, 0) + Fields.FILLED, 1, own)
  sender = _sender(slots, item, copy.feeder)
  values = {
    Fields.CHILD: item.index,
    Fields.SOURCE: copy.source,
    Fields.RELAYED_END: lookup(shared.begin, sender) + lookup(shared.relayed, sender),
    Fields.END: lookup(shared.end, sender),
    Fields.TURN_END: lookup(shared.turn_end, lookup(shared.turn, item.index)),
  }
  place = where(copy.mine, lookup(shared.place, item.index), 0)
  for column, value in values.items():
    put_at(fields_ref, Fields.copy(sizes.slots, place, column), value, copy.mine)
