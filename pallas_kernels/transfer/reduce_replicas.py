"""Sums of the replica slots' gradients into the home experts' of all ranks, over NVLink.

The tree of ``replicate``'s example, backwards. Each sum has a fixed order::

  rank 2 ──► inbox of rank 1:  own + rank 2 + rank 3 ──► inbox of rank 0:  own + rank 1
  rank 3 ──┘
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.support import Array, AxisName
from pallas_kernels.transfer import peers, trees
from pallas_kernels.transfer import tiles as tiling
from pallas_kernels.transfer.reduce_work import Fields, num_nodes_of, work_list
from pallas_kernels.transfer.tiles import Tiles, Transfer
from pallas_kernels.transfer.tuning import GRADIENT_UNIT, TransferTuning
from pallas_kernels.warp.branches import one_if, when

_INBOX = 2  # tiles that a sender may be ahead of its parent
_UNIT = GRADIENT_UNIT  # elements that a warpgroup adds at a time, eight a thread
_LAYOUT = plgpu.Layout.WG_STRIDED((_UNIT,), vec_size=8)
_AT_ONCE = 4  # units whose loads are under way together


def reduce_replicas(
  replicas: Sequence[Array],
  homes: Sequence[Array],
  replica_expert_GS: Array,
  parent_GS: Array,
  *,
  axis_name: AxisName,
  tuning: TransferTuning | None = None,
) -> list[Array]:
  """Adds every replica slot's gradient to its expert's home gradient; adjoint of ``replicate``.

  Call it inside a ``shard_map`` over all axes of a mesh whose devices reach each other's memory
  (see ``support.why_unsupported``), and inside a ``jit``. One kernel reduces all arrays, tile by
  tile, along the transfer trees backwards. A rank adds what its children sent to its own tile and
  pushes the sum into an inbox of the parent; the home adds its children's to its own. The order is
  fixed: the own value, then the children by rank. So the sums are the same bits whatever the
  timing.

  The inbox has two tiles for every worker and every slot of another rank:
  ``2 * (G - 1) * S * blocks * workers * tile_bytes`` bytes, whatever the size of an expert. A
  sender reuses a place when the parent has acknowledged the tile in it. All signals are awaited:
  when the kernel returns on a rank, its gradients are complete, its inbox is not written to any
  more, and nobody signals to it.

  The homes are updated in place, and only experts with replicas are touched. A rank adds in
  float32, and rounds its sum once to the dtype of the gradients. XLA copies the operand first where
  it cannot give it up: an argument of the outermost ``jit`` that is not donated, or a value that is
  used again. It also copies bfloat16 gradients of an expert that are no multiple of 1024 elements.

  No legal plan can deadlock. All workers go through the tiles in the same order, and in each tile
  through their slots without children, their other slots from the deepest in its tree up, and
  their homes. A worker only ever waits for the same worker of another rank, and for one of two
  things: a child's tile, which comes earlier in this common order, since a child is deeper than
  its parent or has no children; or the acknowledgement of the tile two before, which comes
  earlier too. It announces what it sends and acknowledges what it takes before it goes on. So
  of all waiting workers the one that is first in the order waits for one that does not wait.

  Args:
    replicas: ``[S, ...]`` each, all of float32 or all of bfloat16, gradients of this rank's replica
      slots. Those of empty slots are not read. Rows of float32 must be multiples of 16 bytes.
    homes: ``[M, ...]`` of the same dtype, gradients of this rank's home experts, for each of
      ``replicas``.
    replica_expert_GS: as for ``replicate``.
    parent_GS: as for ``replicate``: the rank that a slot's sum is sent to.
    axis_name: the expert mesh axis, of size G.
    tuning: workers and tiles; must be the same on all ranks.

  Returns:
    The homes with the gradients of all replicas added.

  Raises:
    NotImplementedError: dtypes or a mesh that the kernel does not handle, rows that are no
      multiple of 16 bytes, or too little shared memory.
    ValueError: shapes that do not fit, or a tuning that does not fit them or the device.
  """
  transfer = reduction(
    replicas,
    homes,
    replica_expert_GS,
    parent_GS,
    axis_name=axis_name,
    tuning=tuning or TransferTuning(),
  )
  return list(homes) if transfer is None else transfer.launch()


def reduction(
  replicas: Sequence[Array],
  homes: Sequence[Array],
  replica_expert_GS: Array,
  parent_GS: Array,
  *,
  axis_name: AxisName,
  tuning: TransferTuning,
  quarters: Sequence[tuple[int, int]] | None = None,
  work: Array | None = None,
) -> Transfer | None:
  """``reduce_replicas`` to launch alone or beside a matmul; ``None`` if there is nothing to add.

  Its result is that of ``reduce_replicas``; with ``quarters`` for some of each array alone, as
  ``tiles.quarters`` takes them, so that one transfer can do what another has left. ``work`` is the
  list of ``transfer_lists`` if there is one.
  """
  replicas, homes = list(replicas), list(homes)
  _check(replicas, homes, replica_expert_GS, parent_GS, axis_name)
  num_ranks, num_slots = replica_expert_GS.shape
  num_others = (num_ranks - 1) * num_slots
  if not homes or not num_others:
    return None
  (dtype,) = {home.dtype for home in homes}
  rows, sums = ([_rows(array) for array in arrays] for arrays in (replicas, homes))
  tuning, tiles = tuning.placed(), tiling.cut("replicas", rows, tuning)
  if dtype == jnp.bfloat16 and (wrong := [x.length for x in tiles if x.length % _UNIT]):
    raise ValueError(
      f"tile_bytes: expected tiles of a multiple of {_UNIT} elements of {dtype}, got {wrong[0]}"
    )
  tiles = tiles if quarters is None else tiling.quarters(tiles, quarters)
  if not tiles:
    return None
  length = max(each.length for each in tiles)
  half = -(-length // (2 * _UNIT)) * _UNIT
  buffer = plgpu.SMEM((tuning.workers, half), dtype)
  if work is None:
    work = work_list(replica_expert_GS, parent_GS, peers.rank(axis_name), homes[0].shape[0])
  trees.check_list(work, Fields.length(num_ranks, num_slots, homes[0].shape[0]))

  def finish(results: Sequence[Array]) -> list[Array]:
    _, *sums = results
    sizes = (math.prod(home.shape[1:]) for home in homes)
    wanted = (each[:, :size] for each, size in zip(sums, sizes, strict=True))
    return [each.reshape(home.shape) for each, home in zip(wanted, homes, strict=True)]

  return Transfer(
    operands=[work, *rows],
    updated=sums,
    out_type=[jax.ShapeDtypeStruct((tuning.num_workers, _INBOX, num_others, length), dtype)],
    scratch_types=[plgpu.Barrier(num_barriers=tuning.workers)] * 2,
    buffers=[plgpu.SMEM((tuning.workers, work.size), jnp.int32), buffer, buffer],
    body=functools.partial(
      _kernel,
      tiles=tiles,
      num_home=homes[0].shape[0],
      num_slots=num_slots,
      axis_name=axis_name,
      tuning=tuning,
    ),
    finish=finish,
    tuning=tuning,
    name="reduce_replicas",
    semaphores=(tuning.num_workers, num_others + num_slots),
    work=Fields.COUNT,
  )


def _kernel(
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
  work_ref, *refs = operand_refs
  replica_refs, sum_refs = refs[: len(refs) // 2], refs[len(refs) // 2 :]
  (inbox_ref,) = result_refs
  own_loaded, sent_loaded, work_buffer, own_buffer, sent_buffer = (
    ref.at[lax.axis_index(tiling.WORKER_AXIS)] for ref in (*scratch_refs, *buffer_refs)
  )
  num_workers, worker = tuning.num_workers, tiling.worker_index(tuning)
  num_nodes = num_nodes_of(lax.axis_size(axis_name), num_slots, num_home)
  rank = peers.rank(axis_name)
  num_tiles = tiling.count(tiles, worker, num_workers)
  # Arrivals of tiles of other ranks' slots, then acknowledgements of those of own slots.
  signals, num_others = semaphores.at[worker], (lax.axis_size(axis_name) - 1) * num_slots

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
    return inbox_ref.at[worker, lax.rem(step, _INBOX), place(child, rank)]

  def arrive(child: Array) -> None:
    pl.semaphore_wait(signals.at[place(child, rank)])

  def acknowledge(child: Array) -> None:
    sender = lax.div(child, num_slots)
    peers.signal(signals.at[num_others + lax.rem(child, num_slots)], sender, axis_name)

  def inbox_of(parent: Array, slot: Array, there: Array, step: Array) -> Any:
    """Where the tile of an own slot is sent to, once there is room."""
    when(step >= _INBOX)(lambda: pl.semaphore_wait(signals.at[num_others + slot]))
    inbox = peers.remote_ref(inbox_ref, parent, axis_name)
    return inbox.at[worker, lax.rem(step, _INBOX), there]

  def announce(parent: Array, there: Array) -> None:
    plgpu.wait_smem_to_gmem(0)  # landed, not only read from the buffer
    peers.signal(signals.at[there], parent, axis_name)

  def send(own: Any, target: Callable[[], Any], length: int) -> None:
    """Both halves of a tile at a time."""
    parts = halves(length)
    for part, buffer, loaded in parts:
      load(own.at[part], buffer, loaded)
    inbox = target()
    for part, buffer, loaded in parts:
      plgpu.barrier_wait(loaded)
      plgpu.copy_smem_to_gmem(buffer, inbox.at[part])

  def add(own: Any, begin: Array, end: Array, step: Array, length: int, target: Any) -> None:
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
        for start in range(0, part.size, _UNIT):  # what lies behind the tile is added, but not used
          unit = pl.ds(start, _UNIT)
          own_buffer[unit] = own_buffer[unit] + sent_buffer[unit]
        plgpu.commit_smem()  # before the buffers are loaded to and stored from

      plgpu.copy_smem_to_gmem(own_buffer.at[here], target.at[part])

  def units(ref: Any, start: Array | int, count: int) -> list[Array]:
    """So many that follow each other, in registers."""
    parts = [ref.at[pl.ds(start + i * _UNIT, _UNIT)] for i in range(count)]
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
        target[pl.ds(first + i * _UNIT, _UNIT)] = unit.astype(target.dtype)

    whole, rest = divmod(part.size // _UNIT, _AT_ONCE)
    pl.loop(0, whole)(lambda i: add_units(i * (_AT_ONCE * _UNIT), _AT_ONCE))
    if rest:
      add_units(whole * _AT_ONCE * _UNIT, rest)

  def reduce(index: Array, begin: Array, each: Tiles, offset: Array, step: Array) -> Array:
    """Handles a tile of a node; children from ``begin`` on. Returns where those of the next are."""
    source, parent, end = (node(index, f) for f in (Fields.SOURCE, Fields.PARENT, Fields.END))
    slot, rounds = source - num_home, each.dtype != jnp.float32
    tile = pl.ds(offset, each.length)
    of_children = begin, end, step
    each_child(begin, end, arrive)

    @when(slot < 0)
    def _() -> None:
      own = sum_refs[each.array].at[source, tile]
      if rounds:
        add_rounded(own, *of_children, pl.ds(0, each.length), own)
        plgpu.commit_smem()  # all threads are done
      else:
        add(own, *of_children, each.length, own)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    @when(slot >= 0)
    def _() -> None:
      own, there = replica_refs[each.array].at[slot, tile], place(rank * num_slots + slot, parent)
      inbox = functools.partial(inbox_of, parent, slot, there, step)

      def add_and_send() -> None:
        if not rounds:
          add(own, *of_children, each.length, inbox())
          return
        for part, buffer, _ in halves(each.length):
          add_rounded(own, *of_children, part, buffer)
        plgpu.commit_smem()
        target = inbox()
        for part, buffer, _ in halves(each.length):
          plgpu.copy_smem_to_gmem(buffer, target.at[part])

      when(begin < end)(add_and_send)
      when(begin == end)(lambda: send(own, inbox, each.length))
      announce(parent, there)

    when(step + _INBOX < num_tiles)(lambda: each_child(begin, end, acknowledge))
    return end

  step = jnp.int32(0)
  for each in tiles:

    def reduce_all(offset: Array, _: Array, step: Array, each: Tiles = each) -> Array:
      reduce_next = functools.partial(reduce, each=each, offset=offset, step=step)
      lax.fori_loop(0, work_buffer[Fields.COUNT], reduce_next, jnp.int32(0))
      return step + 1

    step = each.each(worker, num_workers, reduce_all, step)

  plgpu.wait_smem_to_gmem(0)


def _check(
  replicas: Sequence[Array],
  homes: Sequence[Array],
  replica_expert_GS: Array,
  parent_GS: Array,
  axis_name: AxisName,
) -> None:
  trees.check("homes", homes, replica_expert_GS, parent_GS, axis_name)
  found = sorted({str(array.dtype) for array in (*replicas, *homes)})
  if found not in ([], ["bfloat16"], ["float32"]):
    raise NotImplementedError(
      f"replicas and homes: expected all of float32 or all of bfloat16, got {found}"
    )
  expected = [(replica_expert_GS.shape[1], *home.shape[1:]) for home in homes]
  if (shapes := [replica.shape for replica in replicas]) != expected:
    raise ValueError(f"replicas: expected shapes {expected}, got {shapes}")


def _rows(array: Array) -> Array:
  """Its rows as vectors: of bfloat16, whole units, as registers move them; TMA moves float32."""
  rows = array.reshape(array.shape[0], -1)
  more = -rows.shape[1] % _UNIT if array.dtype == jnp.bfloat16 else 0
  return jnp.pad(rows, ((0, 0), (0, more))) if more else rows
