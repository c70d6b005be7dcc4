"""Copies of experts' arrays to the replica slots of all ranks, over NVLink.

An expert of rank 0 for ranks 1, 2 and 3, where the plan has rank 1 relay it::

  tile 0   rank 0 ──► rank 1 ──► rank 2
                            └──► rank 3
  tile 1             rank 0 ──► rank 1 ──► …   while tile 0 leaves rank 1

Rank 0 sends the expert once instead of three times.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import varying
from pallas_kernels.launch import ALIGNMENT, shared_bytes
from pallas_kernels.support import Array, AxisName
from pallas_kernels.transfer import peers, trees
from pallas_kernels.transfer import tiles as tiling
from pallas_kernels.transfer.replicate_work import (
  Fields,
  experts_together,
  turns_of_slots,
  work_list,
)
from pallas_kernels.transfer.tiles import Tiles, Transfer
from pallas_kernels.transfer.tuning import SHARED_ALIGNMENT, SHARED_BYTES, TransferTuning
from pallas_kernels.warp.branches import when

_BUFFERS = 2  # of a worker, if there is room: one is loaded while the other one is read
# A run has at most so many tiles. Whoever forwards them waits once for all of them, about as long
# as it takes to send one. Each worker has so many runs of an expert's arrays or more, if need be of
# one tile: with fewer, some workers would have much more to send than others.
_MOST_RUN, _LEAST_RUNS = 4, 10
_ARRIVALS = 2  # lines of semaphores before those of workers


def bounded_tiles(tuning: TransferTuning, num_ranks: int, num_slots: int) -> TransferTuning:
  """Tiles of down to half the size, where else a worker has no room for two.

  Each worker has its list of copies in shared memory, which grows with the slots of all ranks.

  >>> tuning = TransferTuning(blocks=12, workers=3, tile_bytes=32 * 1024)
  >>> sizes = (2, 64), (2, 256), (8, 64), (32, 62), (44, 62)
  >>> [bounded_tiles(tuning, *each).tile_bytes for each in sizes]
  [32768, 32384, 32768, 18176, 16384]
  """
  length = Fields.length(num_slots, num_ranks * num_slots)
  lists = shared_bytes([plgpu.SMEM((tuning.workers, length), jnp.int32)])
  room = (SHARED_BYTES - lists) // ALIGNMENT * ALIGNMENT // (_BUFFERS * tuning.workers)
  least = -(-tuning.tile_bytes // (2 * SHARED_ALIGNMENT)) * SHARED_ALIGNMENT
  tile = max(room // SHARED_ALIGNMENT * SHARED_ALIGNMENT, least)
  return dataclasses.replace(tuning, tile_bytes=min(tile, tuning.tile_bytes))


def replicate(
  arrays: Sequence[Array],
  replica_expert_GS: Array,
  parent_GS: Array,
  *,
  axis_name: AxisName,
  tuning: TransferTuning | None = None,
  home_rows_G: Array | None = None,
  work: Array | None = None,
) -> list[Array]:
  """Fills every rank's replica slots with copies of their experts' arrays, bit for bit.

  Call it inside a ``shard_map`` over all axes of a mesh whose devices reach each other's memory
  (see ``support.why_unreachable``). One kernel moves all arrays. The ranks that send push tiles
  into the slots of the receivers; a rank that forwards an expert sends each run of a few tiles on
  as soon as it has landed in its own slot. A tile is read once per rank, however many copies it
  feeds. When the kernel returns on a rank, that rank's slots are complete.

  No legal plan can deadlock. All workers go through the turns, through the runs of a turn in the
  same order, and through the experts they send of each run in the order of the depth of their
  slot in its tree (home: 0). An expert has the same turn on all ranks. A worker only ever waits
  for a run to land in a slot of depth d, sent by the same worker of another rank, whose place in
  this common order is the same turn and run, and depth d − 1. It has done all that comes before
  in the order, and what it has sent is announced before it waits. So of all waiting workers the
  one that is first in the order waits for one that does not wait. For the watcher of a rank, who
  waits for all of its slots, no worker waits.

  To announce what has landed takes a while. So a worker sends the first tile of its next run
  before it announces the last one, if it need not wait for that tile.

  Args:
    arrays: ``[M, ...]`` each, this rank's home experts. Rows must be multiples of 16 bytes.
    replica_expert_GS: ``[G, S]`` int32, the expert in each slot, −1 if empty; the same on all
      ranks. An expert is at most once on a rank and never on its home ``e // M``.
    parent_GS: ``[G, S]`` int32, the rank that sends the slot its copy, −1 if empty. It is the
      home or has a slot with the expert; the senders of an expert form a tree.
    axis_name: the expert mesh axis, of size G.
    tuning: workers and tiles; must be the same on all ranks.
    home_rows_G: ``[G]`` int32, the same on all ranks, rows that each rank has to compute before
      it needs copies. Experts for ranks with few go first, and of a rank those of its first slots,
      in turns: all in one, they would all arrive at the end. ``None``: one turn.
    work: the list of ``transfer_lists``, if there is one; ``home_rows_G`` then tells nothing.

  Returns:
    An ``[S, ...]`` array for each of ``arrays``. Empty slots are not written: they hold anything,
    NaN included.

  Raises:
    NotImplementedError: a dtype or a mesh that the kernel does not handle, or rows that are no
      multiple of 16 bytes.
    ValueError: shapes that do not fit.
  """
  transfer = replication(
    arrays,
    replica_expert_GS,
    parent_GS,
    axis_name=axis_name,
    tuning=tuning or TransferTuning(),
    home_rows_G=home_rows_G,
    work=work,
  )
  if transfer is None:
    num_slots = replica_expert_GS.shape[1]
    return [jnp.zeros((num_slots, *array.shape[1:]), array.dtype) for array in arrays]
  return transfer.launch()


def replication(
  arrays: Sequence[Array],
  replica_expert_GS: Array,
  parent_GS: Array,
  *,
  axis_name: AxisName,
  tuning: TransferTuning,
  home_rows_G: Array | None = None,
  flat: bool = True,
  work: Array | None = None,
) -> Transfer | None:
  """A description of ``replicate`` that ``*_beside`` takes; ``None`` if there is nothing to send.

  Launched alone or beside a matmul, its result is that of ``replicate``. Not ``flat``, the
  results in the kernel have the shapes of the arrays, so that a matmul beside can read a slot as
  soon as its semaphore counts all workers. ``work`` is the list of ``transfer_lists`` if there is
  one; ``home_rows_G`` then tells nothing.
  """
  arrays = list(arrays)
  trees.check("arrays", arrays, replica_expert_GS, parent_GS, axis_name)
  num_slots = replica_expert_GS.shape[1]
  if not arrays or not num_slots:
    return None
  num_home = arrays[0].shape[0]
  tuning = bounded_tiles(tuning.placed(), lax.axis_size(axis_name), num_slots)
  tiles = tiling.cut("arrays", arrays, tuning, flat=flat)
  of_worker = sum(each.count for each in tiles) // tuning.num_workers
  run = min(max(of_worker // _LEAST_RUNS, 1), _MOST_RUN)
  if lax.axis_size(axis_name) > 2 and run > 1:  # of two ranks none forwards
    tiles = tiling.cut("arrays", arrays, tuning, flat=flat, run=run)
  if work is None:
    size = sum(math.prod(array.shape[1:]) * array.dtype.itemsize for array in arrays)
    turn_N = turns_of_slots(replica_expert_GS, home_rows_G, num_home, experts_together(size))
    work = work_list(replica_expert_GS, parent_GS, turn_N, peers.rank(axis_name), num_home)
  trees.check_list(work, Fields.length(num_slots, replica_expert_GS.size))
  rows = [array.reshape(num_home, -1) for array in arrays] if flat else arrays
  work, *rows = varying.vary_alike(work, *rows)
  lists = plgpu.SMEM((tuning.workers, work.size), jnp.int32)
  for num_buffers in range(_BUFFERS, 0, -1):
    buffers = [lists, *tiling.buffers(tiles, tuning, num_buffers)]
    if shared_bytes(buffers) <= SHARED_BYTES:
      break

  def finish(copies: Sequence[Array]) -> list[Array]:
    return [
      copy.reshape(num_slots, *array.shape[1:]) for copy, array in zip(copies, arrays, strict=True)
    ]

  return Transfer(
    operands=[work, *rows],
    updated=[],
    out_type=[jax.typeof(row).update(shape=(num_slots, *row.shape[1:])) for row in rows],
    scratch_types=[plgpu.Barrier(num_barriers=tuning.workers)],
    buffers=buffers,
    body=functools.partial(
      _kernel,
      tiles=tiles,
      num_buffers=num_buffers,
      num_home=num_home,
      num_slots=num_slots,
      axis_name=axis_name,
      tuning=tuning,
    ),
    finish=finish,
    tuning=tuning,
    name="replicate",
    semaphores=(_ARRIVALS + tuning.num_workers, num_slots),
    work=Fields.INVOLVED,
    watched=True,
  )


type Range = tuple[Array, Array]  # of copies in the work list


class _Sends(NamedTuple):
  """Where a worker is: copies of the next source begin there, and so many sends came before.

  Copies in ``landing`` have got the tiles before, and those that forward them do not know yet.
  """

  begin: Array
  before: Array
  landing: Range


def _kernel(
  operand_refs: Sequence[Any],
  replica_refs: Sequence[Any],
  scratch_refs: Sequence[Any],
  buffer_refs: Sequence[Any],
  semaphores: Any,
  *,
  tiles: Sequence[Tiles],
  num_buffers: int,
  num_home: int,
  num_slots: int,
  axis_name: AxisName,
  tuning: TransferTuning,
) -> None:
  work_ref, *home_refs = operand_refs
  (all_loaded,), (all_works, *buffer_refs) = scratch_refs, buffer_refs
  worker, arrivals = lax.axis_index(tiling.WORKER_AXIS), tiling.Arrivals(semaphores, tuning)
  loaded = all_loaded.at[worker]
  # Counts runs of tiles that are to be forwarded.
  landed = semaphores.at[_ARRIVALS + tiling.worker_index(tuning)]

  def load(source: Any, target: Any) -> None:
    plgpu.copy_gmem_to_smem(source, target, loaded, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)

  load(work_ref, all_works.at[worker])
  plgpu.barrier_wait(loaded)
  count = all_works[worker, Fields.COUNT]

  def copy_field(index: Array, column: int) -> Array:
    return all_works[worker, Fields.copy(num_slots, index, column)]

  def child(index: Array) -> tuple[Array, Array]:
    slot = copy_field(index, Fields.CHILD)
    return lax.div(slot, num_slots), lax.rem(slot, num_slots)

  def announce(semaphore: Callable[[Array], Any], index: Array) -> None:
    rank, slot = child(index)
    peers.signal(semaphore(slot), rank, axis_name)

  def pass_on(landing: Range, sending: int) -> None:
    """Tells those that forward tiles that they landed; up to so many later ones may not have."""
    begin, end = landing

    @when(end > begin)
    def _() -> None:
      plgpu.wait_smem_to_gmem(sending)  # landed, not only read from the buffer
      pl.loop(begin, end)(functools.partial(announce, lambda slot: landed.at[slot]))

  def send(at: _Sends, each: Tiles, offset: Array, count: Array) -> _Sends:
    """Sends tiles of one source, and tells of those before."""
    home_ref, replica_ref = home_refs[each.array], replica_refs[each.array]
    fields = (Fields.SOURCE, Fields.RELAYED_END, Fields.END)
    source, relayed_end, end = (copy_field(at.begin, field) for field in fields)
    first, last = at.landing

    @when(source >= num_home)
    def _() -> None:
      pass_on(at.landing, 0)  # whoever waits has announced all that it sent
      pl.semaphore_wait(landed.at[source - num_home])

    @pl.loop(jnp.int32(0), count)
    def _(index: Array) -> None:
      place = worker * num_buffers + lax.rem(at.before + index, jnp.int32(num_buffers))
      buffer = tiling.buffer(each, tiles, buffer_refs, place)
      part = pl.ds(offset + index * each.length, each.length)
      plgpu.wait_smem_to_gmem(num_buffers - 1, wait_read_only=True)
      when(source < num_home)(lambda: load(home_ref.at[source, part], buffer))
      when(source >= num_home)(lambda: load(replica_ref.at[source - num_home, part], buffer))
      plgpu.barrier_wait(loaded)

      @pl.loop(at.begin, end)
      def _(copy: Array) -> None:
        rank, slot = child(copy)
        target = peers.remote_ref(replica_ref, rank, axis_name)
        plgpu.copy_smem_to_gmem(buffer, target.at[slot, part], commit_group=False)

      plgpu.commit_smem_to_gmem_group()
      waiting = (source < num_home) & (index == 0)
      pass_on((first, lax.select(waiting, last, first)), 1)

    return _Sends(end, at.before + count, (at.begin, relayed_end))

  def send_turn(begin: Array) -> Array:
    """Sends all tiles of a turn, whose copies begin here. Returns where the next turn's do."""
    turn_end = copy_field(begin, Fields.TURN_END)
    at = _Sends(begin, jnp.int32(0), (begin, begin))
    for each in tiles:

      def send_all(offset: Array, count: Array, at: _Sends, each: Tiles = each) -> _Sends:
        send_next = functools.partial(send, each=each, offset=offset, count=count)
        return lax.while_loop(lambda at: at.begin < turn_end, send_next, at._replace(begin=begin))

      at = each.each(tiling.worker_index(tuning), tuning.num_workers, send_all, at)

    pass_on(at.landing, 0)
    plgpu.wait_smem_to_gmem(0)
    pl.loop(begin, turn_end)(functools.partial(announce, arrivals.of_worker))
    return turn_end

  watches = lax.axis_index(tiling.BLOCK_AXIS) == tuning.num_blocks

  @when(~watches)
  def _() -> None:
    lax.while_loop(lambda begin: begin < count, send_turn, jnp.int32(0))

  @when(watches & (worker == 0))
  def _() -> None:
    @pl.loop(jnp.int32(0), jnp.int32(num_slots))
    def _(slot: Array) -> None:
      @when(all_works[worker, Fields.FILLED + slot] > 0)
      def _() -> None:
        arrivals.watch(slot)
