"""The work lists of ``replicate``, several of one plan, by one kernel.

The lists are those of ``replicate_work``, bit for bit. XLA would launch about six kernels for each,
one after the other, for a few thousand integers. Here each block makes a list::

  slots of all ranks ──► feeders, depths ──► turns ──► keys ──► places ──► fields

A thread has a slot, or several. What slots tell each other is in shared memory. Places come from
counting what goes before.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import varying
from pallas_kernels.launch import launch
from pallas_kernels.support import Array
from pallas_kernels.transfer import replicate_work
from pallas_kernels.transfer.replicate_work import Fields
from pallas_kernels.warp.branches import one_if, when
from pallas_kernels.warp.scatter import add_at, barrier, fill, max_at, min_at, put_at
from pallas_kernels.warp.warps import (
  INT32_MAX,
  THREADS,
  divide,
  each_piece,
  lookup,
  ones,
  over_all,
  padded,
  store,
  thread_index,
  unrolled,
  warp_max,
  where,
)

_LIST_AXIS = "list"
# Slots of all ranks. Of more, one block would count longer than all SMs take in several kernels.
_MOST_SLOTS = 512


def work_lists(
  replica_expert_GS: Array,
  parent_GS: Array,
  home_rows_G: Array | None,
  rank: Array,
  num_home: int,
  together: Sequence[int | None],
) -> list[Array]:
  """What one rank sends and awaits, of each of several groups of arrays that a plan's copies have.

  Args:
    replica_expert_GS: ``[G, S]`` int32, as ``replicate`` takes it.
    parent_GS: ``[G, S]`` int32, likewise.
    home_rows_G: ``[G]`` int32, likewise; ``None`` if all copies have one turn.
    rank: ``[]`` int32, whose lists they are.
    num_home: M.
    together: for each group, how many experts have a turn together; ``None``: all.

  Returns:
    For each group a vector of int32 as ``Fields`` describes it.
  """
  num_ranks, num_slots = replica_expert_GS.shape
  if home_rows_G is not None:
    replicate_work.check_rows(home_rows_G, num_ranks)
  plan = replica_expert_GS, parent_GS
  if num_ranks * num_slots <= _MOST_SLOTS:
    return _by_kernel(*plan, home_rows_G, rank, num_home, together)
  lists = []
  for each in together:
    rows = None if each is None else home_rows_G
    turn_N = replicate_work.turns_of_slots(replica_expert_GS, rows, num_home, each or 1)
    lists.append(replicate_work.work_list(*plan, turn_N, rank, num_home))
  return lists


class _Sizes(NamedTuple):
  ranks: int  # G
  slots: int  # S
  home: int  # M
  together: tuple[int, ...]  # of each list
  in_turns: bool  # whether there are rows to order them by

  @property
  def items(self) -> int:
    """N, slots of all ranks."""
    return self.ranks * self.slots

  @property
  def experts(self) -> int:
    return self.ranks * self.home

  @property
  def senders(self) -> int:
    """Homes of all experts, then all slots."""
    return self.experts + self.items


class _Shared(NamedTuple):
  """Vectors of int32 in shared memory."""

  expert: Any  # [N]
  parent: Any  # [N]
  place: Any  # [N], when the slot wants its copy
  feeder: Any  # [N], the slot that it depends on, −1: the home
  forwards: Any  # [N], 1 if another slot depends on it
  turn: Any  # [N]
  key: Any  # [N], of leading slots, then of copies
  first: Any  # [E], the place of the first slot that wants an expert
  # Of who sends copies:
  relays: Any  # [E + N], 1 if one of them is forwarded
  begin: Any  # [E + N], the place of the first
  relayed: Any  # [E + N], how many are forwarded
  end: Any  # [E + N], the place after the last
  turn_end: Any  # [N], the place after a turn's last copy
  fields: Any  # the list
  scratch: Any  # [128]

  @staticmethod
  def lengths(sizes: _Sizes) -> "_Shared":
    items, experts, senders = map(padded, (sizes.items, sizes.experts, sizes.senders))
    fields = padded(Fields.length(sizes.slots, sizes.items))
    of_items = dict.fromkeys(
      ("expert", "parent", "place", "feeder", "forwards", "turn", "key", "turn_end"), items
    )
    of_senders = dict.fromkeys(("relays", "begin", "relayed", "end"), senders)
    return _Shared(**of_items, first=experts, **of_senders, fields=fields, scratch=THREADS)


def _by_kernel(
  replica_expert_GS: Array,
  parent_GS: Array,
  home_rows_G: Array | None,
  rank: Array,
  num_home: int,
  together: Sequence[int | None],
) -> list[Array]:
  num_ranks, num_slots = replica_expert_GS.shape
  sizes = _Sizes(
    num_ranks,
    num_slots,
    num_home,
    tuple(
      replicate_work.experts_of_turn(num_ranks, num_slots, num_home, each) for each in together
    ),
    home_rows_G is not None,
  )
  operands = [replica_expert_GS.reshape(-1), parent_GS.reshape(-1), rank.reshape(1)]
  operands = varying.vary_alike(*operands, *([] if home_rows_G is None else [home_rows_G]))
  list_type = jax.typeof(operands[0]).update(shape=(Fields.length(num_slots, sizes.items),))
  return launch(
    functools.partial(_kernel, sizes=sizes),
    operands,
    out_type=[list_type] * len(together),
    grid=(len(together),),
    grid_names=(_LIST_AXIS,),
    scratch_types=[plgpu.SMEM((size,), jnp.int32) for size in _Shared.lengths(sizes)],
    # Only this lowering leaves a warp its own control flow. The kernel reaches no other device.
    compiler_params=plgpu.CompilerParams(
      lowering_semantics=plgpu.LoweringSemantics.Lane, skip_device_barrier=True
    ),
    kernel_name="copy_lists",
  )


class _Item(NamedTuple):
  """A slot of each thread; where there is none, the last one."""

  index: Array
  exists: Array
  filled: Array  # bool
  expert: Array  # 0 if empty
  rank: Array


def _kernel(*refs: Any, sizes: _Sizes) -> None:
  given = 3 + sizes.in_turns
  expert_ref, parent_ref, rank_ref, *rows_ref = refs[:given]
  list_refs, shared = refs[given : given + len(sizes.together)], _Shared(*refs[-15:])
  block = lax.axis_index(_LIST_AXIS)
  parts = (one_if(block == i) * each for i, each in enumerate(sizes.together))
  together, rank = sum(parts, jnp.int32(0)), lookup(rank_ref, thread_index() * 0)

  def each(body: Callable[[_Item], None]) -> None:
    each_piece(sizes.items, lambda place: body(_item(shared, sizes, place)))
    barrier()

  _clear(shared, sizes)
  _read(shared, sizes, expert_ref, parent_ref)
  barrier()
  if sizes.in_turns:
    _place(shared, sizes, rows_ref[0])
  each(functools.partial(_feed, shared, sizes))
  each(functools.partial(_lead, shared, sizes))
  each(functools.partial(_take_turns, shared, sizes, together=together))
  # Above, keys are of slots that lead; below, of this rank's copies.
  each(functools.partial(_order, shared, sizes, rank=rank))
  each(functools.partial(_find_ends, shared, sizes, rank=rank))
  each(functools.partial(_write_fields, shared, sizes, rank=rank))
  for i, list_ref in enumerate(list_refs):
    when(block == i)(functools.partial(_store, shared, sizes, list_ref))


def _clear(shared: _Shared, sizes: _Sizes) -> None:
  lengths, highest = _Shared.lengths(sizes), ("first", "begin")
  for name in ("forwards", "first", "relays", "begin", "relayed", "end", "turn_end", "fields"):
    fill(getattr(shared, name), getattr(lengths, name), INT32_MAX if name in highest else 0)


def _read(shared: _Shared, sizes: _Sizes, expert_ref: Any, parent_ref: Any) -> None:
  def read(place: Array) -> None:
    index = jnp.minimum(place, sizes.items - 1)
    put_at(shared.expert, place, where(place < sizes.items, lookup(expert_ref, index), -1))
    put_at(shared.parent, place, lookup(parent_ref, index))
    put_at(shared.place, place, place * 0)

  each_piece(sizes.items, read)


def _item(shared: _Shared, sizes: _Sizes, place: Array) -> _Item:
  index = jnp.minimum(place, sizes.items - 1)
  expert = lookup(shared.expert, index)
  exists = place < sizes.items
  rank, _ = divide(index, sizes.slots)
  return _Item(index, exists, exists & (expert >= 0), jnp.maximum(expert, 0), rank)


def _place(shared: _Shared, sizes: _Sizes, rows_ref: Any) -> None:
  """Slots of ranks with few rows come first, and of a rank the first ones."""
  ranks = padded(sizes.ranks) // THREADS
  indices = [thread_index() + piece * THREADS for piece in range(ranks)]
  pieces = [lookup(rows_ref, jnp.minimum(index, sizes.ranks - 1)) for index in indices]
  most = over_all(warp_max, pieces, shared.scratch)

  def place(index: Array) -> None:
    index = jnp.minimum(index, sizes.items - 1)
    rank, slot = divide(index, sizes.slots)
    few, _ = divide(lookup(rows_ref, rank), divide(most, 16)[0] + 1)
    put_at(shared.place, index, few * sizes.items + slot * sizes.ranks + rank)

  each_piece(sizes.items, place)
  barrier()


def _feed(shared: _Shared, sizes: _Sizes, item: _Item) -> None:
  """Finds the slot of the parent that has the expert, and the first place of each expert."""
  parent = jnp.maximum(lookup(shared.parent, item.index), 0)

  def look(slot: Array, found: Array) -> Array:
    index = parent * sizes.slots + slot
    return where(lookup(shared.expert, index) == item.expert, index, found)

  feeder = unrolled(sizes.slots, look, item.index * 0 - 1)
  put_at(shared.feeder, item.index, feeder, item.filled)
  put_at(shared.forwards, jnp.maximum(feeder, 0), 1, item.filled & (feeder >= 0))
  min_at(shared.first, item.expert, lookup(shared.place, item.index), item.filled)


def _sender(shared: _Shared, sizes: _Sizes, item: _Item) -> tuple[Array, Array]:
  """Who sends a slot its copy, of homes and slots; and the slot, −1: the home."""
  feeder = lookup(shared.feeder, item.index)
  return where(feeder >= 0, feeder + sizes.experts, item.expert), feeder


def _lead(shared: _Shared, sizes: _Sizes, item: _Item) -> None:
  """One slot of each expert leads it. A sender learns whether a copy of its is forwarded."""
  place = lookup(shared.place, item.index)
  leads = item.filled & (lookup(shared.first, item.expert) == place)
  put_at(shared.key, item.index, where(leads, place, INT32_MAX), item.exists)
  sender, _ = _sender(shared, sizes, item)
  forwards = lookup(shared.forwards, item.index)
  put_at(shared.relays, where(item.filled, sender, 0), 1, item.filled & (forwards > 0))


def _keys_before(shared: _Shared, sizes: _Sizes, key: Array) -> Array:
  def count(index: Array, before: Array) -> Array:
    return before + ones(lookup(shared.key, thread_index() * 0 + index) < key)

  return unrolled(sizes.items, count, key * 0)


def _take_turns(shared: _Shared, sizes: _Sizes, item: _Item, *, together: Array) -> None:
  order = _keys_before(shared, sizes, lookup(shared.first, item.expert))
  put_at(shared.turn, item.index, divide(order, together)[0], item.exists)


def _order(shared: _Shared, sizes: _Sizes, item: _Item, *, rank: Array) -> None:
  """Keys of copies: by turn, by depth, forwarded ones and their sources first."""
  mine, source, sender, feeder = _copy(shared, sizes, item, rank)

  def climb(_: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
    depth, slot = carry
    above = lookup(shared.feeder, jnp.maximum(slot, 0))
    return depth + ones(slot >= 0), where(slot >= 0, above, slot)

  depth, _ = unrolled(sizes.ranks - 1, climb, (item.index * 0, feeder))
  group = (lookup(shared.turn, item.index) * sizes.ranks + depth) * 2
  group = group + 1 - lookup(shared.relays, sender)
  group = group * (sizes.home + sizes.slots) + source
  last = 1 - lookup(shared.forwards, item.index)
  key = (2 * group + last) * sizes.items + item.index
  put_at(shared.key, item.index, where(mine, key, INT32_MAX), item.exists)


def _copy(
  shared: _Shared, sizes: _Sizes, item: _Item, rank: Array
) -> tuple[Array, Array, Array, Array]:
  """Whether this rank fills a slot; its source, of the rank's and of all; and the feeder."""
  sender, feeder = _sender(shared, sizes, item)
  mine = item.filled & (lookup(shared.parent, item.index) == rank)
  sender, feeder = where(mine, sender, 0), where(mine, feeder, -1)
  slot = divide(jnp.maximum(feeder, 0), sizes.slots)[1]
  source = where(feeder >= 0, slot + sizes.home, item.expert - rank * sizes.home)
  return mine, where(mine, source, 0), sender, feeder


def _find_ends(shared: _Shared, sizes: _Sizes, item: _Item, *, rank: Array) -> None:
  mine, _, sender, _ = _copy(shared, sizes, item, rank)
  place = _keys_before(shared, sizes, lookup(shared.key, item.index))
  put_at(shared.place, item.index, place, item.exists)
  min_at(shared.begin, sender, place, mine)
  max_at(shared.end, sender, place + 1, mine)
  add_at(shared.relayed, sender, lookup(shared.forwards, item.index), mine)
  max_at(shared.turn_end, lookup(shared.turn, item.index), place + 1, mine)


def _write_fields(shared: _Shared, sizes: _Sizes, item: _Item, *, rank: Array) -> None:
  mine, source, sender, _ = _copy(shared, sizes, item, rank)
  own = item.filled & (item.rank == rank)
  add_at(shared.fields, item.index * 0 + Fields.COUNT, 1, mine)
  add_at(shared.fields, item.index * 0 + Fields.INVOLVED, 1, mine | own)
  slot = where(own, item.index - rank * sizes.slots, 0)
  put_at(shared.fields, slot + Fields.FILLED, 1, own)
  values = {
    Fields.CHILD: item.index,
    Fields.SOURCE: source,
    Fields.RELAYED_END: lookup(shared.begin, sender) + lookup(shared.relayed, sender),
    Fields.END: lookup(shared.end, sender),
    Fields.TURN_END: lookup(shared.turn_end, lookup(shared.turn, item.index)),
  }
  place = where(mine, lookup(shared.place, item.index), 0)
  for column, value in values.items():
    put_at(shared.fields, Fields.copy(sizes.slots, place, column), value, mine)


def _store(shared: _Shared, sizes: _Sizes, list_ref: Any) -> None:
  length = Fields.length(sizes.slots, sizes.items)

  def write(place: Array) -> None:
    index = jnp.minimum(place, length - 1)
    store(list_ref, index, lookup(shared.fields, index), ones(place < length))

  each_piece(length, write)
