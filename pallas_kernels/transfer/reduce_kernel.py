"""The kernel of ``reduce_replicas``: what one block adds and sends, tile by tile.

A worker of rank 1 of the example there, for each of its tiles::

  waits for the tiles of ranks 2 and 3 ──► adds them to its own ──► adds the sum to rank 0's memory
                                      └─► lets both send into the same places again
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.support import Array, AxisName
from pallas_kernels.transfer import peers
from pallas_kernels.transfer import tiles as tiling
from pallas_kernels.transfer.bulk import add_to
from pallas_kernels.transfer.inbox import AHEAD
from pallas_kernels.transfer.reduce_work import Fields, num_nodes_of
from pallas_kernels.transfer.tiles import Tiles
from pallas_kernels.transfer.tuning import GRADIENT_UNIT, TransferTuning
from pallas_kernels.warp.branches import one_if, when

UNIT = GRADIENT_UNIT  # elements that a warpgroup adds at a time, eight a thread
_LAYOUT = plgpu.Layout.WG_STRIDED((UNIT,), vec_size=8)
_AT_ONCE = 4  # units whose loads are under way together


def body(
  operand_refs: Sequence[Any],
  result_refs: Sequence[Any],
  scratch_refs: Sequence[Any],
  buffer_refs: Sequence[Any],
  semaphores: Any,
  *,
  tiles: Sequence[Tiles],
  num_home: int,
  num_slots: int,
  axis_name: AxisName,
  tuning: TransferTuning,
) -> None:
  """What a block does; see ``reduce_replicas``."""
  work_ref, *refs = operand_refs
  replica_refs, sum_refs = refs[: len(refs) // 2], refs[len(refs) // 2 :]
  (inbox_ref,) = result_refs
  own_loaded, sent_loaded, work_buffer, own_buffer, sent_buffer = (
    ref.at[lax.axis_index(tiling.WORKER_AXIS)] for ref in (*scratch_refs, *buffer_refs)
  )
  num_workers, worker = tuning.num_workers, tiling.worker_index(tuning)
  num_ranks = lax.axis_size(axis_name)
  num_nodes = num_nodes_of(num_ranks, num_slots, num_home)
  rank = peers.rank(axis_name)
  num_tiles = tiling.count(tiles, worker, num_workers)
  # Arrivals of tiles of other ranks' slots, then acknowledgements of those of own slots.
  signals, num_others = semaphores.at[worker], (num_ranks - 1) * num_slots

  def load(source: Any, target: Any, loaded: Any) -> None:
    plgpu.copy_gmem_to_smem(source, target, loaded, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)

  load(work_ref, work_buffer, own_loaded)
  plgpu.barrier_wait(own_loaded)

  def node(index: Array, column: int) -> Array:
    return work_buffer[Fields.node(num_nodes, index, column)]

  def place(child: Array, parent: Array) -> Array:
    """Where a slot's tiles lie in the inbox of its parent, which has none for its own slots."""
    return child - num_slots * one_if(child >= parent * num_slots)

  def halves(length: int) -> list[tuple[Any, Any, Any]]:
    """Which elements of a tile they are, and the buffer of each with its barrier."""
    buffers, size = ((own_buffer, own_loaded), (sent_buffer, sent_loaded)), own_buffer.shape[0]
    starts = range(0, length, size)
    parts = [pl.ds(first, min(length - first, size)) for first in starts]
    return [
      (part, buffer.at[pl.ds(0, part.size)], loaded)
      for part, (buffer, loaded) in zip(parts, buffers, strict=False)
    ]

  def child_at(index: Array) -> Array:
    return work_buffer[Fields.child(num_nodes, index)]

  def each_child(begin: Array, end: Array, visit: Callable[[Array], None]) -> None:
    pl.loop(begin, end)(lambda index: visit(child_at(index)))

  def sent(child: Array, step: Array) -> Any:
    """The tile that a child sent."""
    return inbox_ref.at[worker, lax.rem(step, AHEAD), place(child, rank)]

  def arrive(child: Array) -> None:
    pl.semaphore_wait(signals.at[place(child, rank)])

  def acknowledge(child: Array) -> None:
    sender = lax.div(child, num_slots)
    peers.signal(signals.at[num_others + lax.rem(child, num_slots)], sender, axis_name)

  def inbox_of(parent: Array, slot: Array, there: Array, step: Array) -> Any:
    """Where the tile of an own slot is sent to, once there is room."""
    when(step >= AHEAD)(lambda: pl.semaphore_wait(signals.at[num_others + slot]))
    inbox = peers.remote_ref(inbox_ref, parent, axis_name)
    return inbox.at[worker, lax.rem(step, AHEAD), there]

  def announce(parent: Array, there: Array) -> None:
    plgpu.wait_smem_to_gmem(0)  # landed, not only read from the buffer
    peers.signal(signals.at[there], parent, axis_name)

  def copy_to(target: Any, buffer: Any, part: Any) -> None:
    plgpu.copy_smem_to_gmem(buffer, target.at[part])

  def start_to_add(home: Any, buffer: Any, part: Any) -> None:
    add_to(buffer, home.at[part])
    plgpu.commit_smem_to_gmem_group()

  def add_to_home(own: Any, home: Any, length: int) -> None:
    """A tile, of which each half is added while the other one is loaded."""
    parts = halves(length)
    for part, buffer, loaded in parts:
      plgpu.wait_smem_to_gmem(len(parts) - 1, wait_read_only=True)
      load(own.at[part], buffer, loaded)
      plgpu.barrier_wait(loaded)
      start_to_add(home, buffer, part)

  def send(own: Any, target: Callable[[], Any], length: int) -> None:
    """Both halves of a tile at a time."""
    parts = halves(length)
    for part, buffer, loaded in parts:
      load(own.at[part], buffer, loaded)
    inbox = target()
    for part, buffer, loaded in parts:
      plgpu.barrier_wait(loaded)
      plgpu.copy_smem_to_gmem(buffer, inbox.at[part])

  def add(
    own: Any, begin: Array, end: Array, step: Array, length: int, store: Callable[[Any, Any], None]
  ) -> None:
    """Adds the tiles of children to the own one, half by half, in shared memory."""
    for part, _, _ in halves(length):
      here = pl.ds(0, part.size)
      plgpu.wait_smem_to_gmem(0, wait_read_only=True)
      load(own.at[part], own_buffer.at[here], own_loaded)

      @pl.loop(begin, end)
      def _(index: Array, part: Any = part, here: Any = here) -> None:
        load(sent(child_at(index), step).at[part], sent_buffer.at[here], sent_loaded)
        when(index == begin)(lambda: plgpu.barrier_wait(own_loaded))
        plgpu.barrier_wait(sent_loaded)
        for start in range(0, part.size, UNIT):  # what lies behind the tile is added, but not used
          unit = pl.ds(start, UNIT)
          own_buffer[unit] = own_buffer[unit] + sent_buffer[unit]
        plgpu.commit_smem()  # before the buffers are loaded to and stored from

      store(own_buffer.at[here], part)

  def units(ref: Any, start: Array | int, count: int) -> list[Array]:
    """So many that follow each other, in registers."""
    parts = [ref.at[pl.ds(start + i * UNIT, UNIT)] for i in range(count)]
    return [plgpu.load(part, layout=_LAYOUT, optimized=False) for part in parts]

  def add_rounded(own: Any, begin: Array, end: Array, step: Array, part: Any, target: Any) -> None:
    """The same in registers, where sums are of float32, for a part of a tile."""

    def add_units(first: Array | int, count: int) -> None:
      def of_child(index: Array) -> list[Array]:
        return units(sent(child_at(index), step), part.start + first, count)

      def plus(sums: list[Array], more: list[Array]) -> list[Array]:
        both = zip(sums, more, strict=True)
        return [a.astype(jnp.float32) + b.astype(jnp.float32) for a, b in both]

      # The loads of the own units and of the first child's are under way together.
      sums = plus(units(own, part.start + first, count), of_child(begin))
      sums = lax.fori_loop(begin + 1, end, lambda i, sums: plus(sums, of_child(i)), sums)
      for i, unit in enumerate(sums):
        target[pl.ds(first + i * UNIT, UNIT)] = unit.astype(target.dtype)

    whole, rest = divmod(part.size // UNIT, _AT_ONCE)
    pl.loop(0, whole)(lambda i: add_units(i * (_AT_ONCE * UNIT), _AT_ONCE))
    if rest:
      add_units(whole * _AT_ONCE * UNIT, rest)

  def reduce(index: Array, begin: Array, each: Tiles, offset: Array, step: Array) -> Array:
    """Handles a tile of a node; children from ``begin`` on. Returns where those of the next are."""
    source, parent, end, target = (node(index, column) for column in Fields.COLUMNS)
    slot, tile = source - num_home, pl.ds(offset, each.length)
    home = peers.remote_ref(sum_refs[each.array], parent, axis_name).at[target, tile]
    if num_ranks == 2:  # all add by themselves, and nobody has children
      own = replica_refs[each.array].at[slot, tile]
      when(slot >= 0)(lambda: add_to_home(own, home, each.length))
      return end
    by_itself, rounds, of_children = target >= 0, each.dtype != jnp.float32, (begin, end, step)
    takes = (slot >= 0) | ~by_itself  # what its children send
    when(takes)(lambda: each_child(begin, end, arrive))

    @when((slot < 0) & takes)
    def _() -> None:
      own = sum_refs[each.array].at[source, tile]
      if rounds:
        add_rounded(own, *of_children, pl.ds(0, each.length), own)
        plgpu.commit_smem()  # all threads are done
      else:
        add(own, *of_children, each.length, functools.partial(copy_to, own))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    @when(slot >= 0)
    def _() -> None:
      own, there = replica_refs[each.array].at[slot, tile], place(rank * num_slots + slot, parent)
      inbox = functools.partial(inbox_of, parent, slot, there, step)

      def add_and(start: Callable[[Any, Any, Any], None], target: Callable[[], Any]) -> None:
        """Starts to move the sums of each half to a target, which may have to be waited for."""
        if not rounds:
          add(own, *of_children, each.length, functools.partial(start, target()))
          return
        for part, buffer, _ in halves(each.length):
          add_rounded(own, *of_children, part, buffer)
        plgpu.commit_smem()
        there = target()
        for part, buffer, _ in halves(each.length):
          start(there, buffer, part)

      forwards = begin < end
      when(by_itself & ~forwards)(lambda: add_to_home(own, home, each.length))

      @when(by_itself & forwards)
      def _() -> None:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        add_and(start_to_add, lambda: home)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

      @when(~by_itself)
      def _() -> None:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        when(forwards)(lambda: add_and(copy_to, inbox))
        when(~forwards)(lambda: send(own, inbox, each.length))
        announce(parent, there)

    when(takes & (step + AHEAD < num_tiles))(lambda: each_child(begin, end, acknowledge))
    return end

  step = jnp.int32(0)
  for each in tiles:

    def reduce_all(offset: Array, _: Array, step: Array, each: Tiles = each) -> Array:
      reduce_next = functools.partial(reduce, each=each, offset=offset, step=step)
      lax.fori_loop(0, work_buffer[Fields.COUNT], reduce_next, jnp.int32(0))
      return step + 1

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of tiles that may have other halves
    step = each.each(worker, num_workers, reduce_all, step)

  plgpu.wait_smem_to_gmem(0)  # landed
  ends = semaphores.at[0]  # each worker's, of those that add to homes by themselves

  def tell(index: Array, begin: Array) -> Array:
    """Tells of the end of what a slot has added, or waits for that."""
    source, parent, end, target = (node(index, column) for column in Fields.COLUMNS)
    there = place(rank * num_slots + source - num_home, parent)
    tells, waits = (target >= 0) & (source >= num_home), (target >= 0) & (source < num_home)
    when(tells)(lambda: peers.signal(ends.at[there], parent, axis_name))

    @when(waits & (worker == 0))
    def _() -> None:
      pl.semaphore_wait(ends.at[place(child_at(begin), rank)], num_workers)

    return end

  lax.fori_loop(0, work_buffer[Fields.COUNT], tell, jnp.int32(0))
