"""Sums of the replica slots' gradients into the home experts' of all ranks, over NVLink.

The tree of ``replicate``'s example, backwards. Each sum has a fixed order::

  rank 2 ──► inbox of rank 1:  own + rank 2 + rank 3 ──► memory of rank 0:  own + rank 1
  rank 3 ──┘

Rank 1 is the only child of the home, so it adds to rank 0's memory by itself (``bulk.add_to``).
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.support import Array, AxisName
from pallas_kernels.transfer import inbox, peers, reduce_kernel, trees
from pallas_kernels.transfer import tiles as tiling
from pallas_kernels.transfer.reduce_kernel import UNIT
from pallas_kernels.transfer.reduce_work import Fields, work_list
from pallas_kernels.transfer.tiles import Transfer
from pallas_kernels.transfer.tuning import TransferTuning


def reduce_replicas(
  replicas: Sequence[Array],
  homes: Sequence[Array],
  replica_expert_GS: Array,
  parent_GS: Array,
  *,
  axis_name: AxisName,
  tuning: TransferTuning | None = None,
  work: Array | None = None,
) -> list[Array]:
  """Adds every replica slot's gradient to its expert's home gradient; adjoint of ``replicate``.

  Call it inside a ``shard_map`` over all axes of a mesh whose devices reach each other's memory
  (see ``support.why_unreachable``), and inside a ``jit``. One kernel reduces all arrays, tile by
  tile, along the transfer trees backwards. A rank adds what its children sent to its own tile and
  pushes the sum into an inbox of the parent; the home adds its children's to its own. The order is
  fixed: the own value, then the children by rank. So the sums are the same bits whatever the
  timing. The only child of a home adds its sum to the home's memory: two summands have no order.
  Then no thread of the home's rank takes part, but for one warpgroup that waits for the last tile.

  The inbox has two tiles for every worker and every slot of another rank:
  ``2 * (G - 1) * S * blocks * workers * tile_bytes`` bytes, whatever the size of an expert. Two
  ranks have none. A sender reuses a place when the parent has acknowledged the tile in it. All
  signals are awaited: when the kernel returns on a rank, its gradients are complete, its inbox is
  not written to any more, and nobody signals to it.

  The homes are updated in place, and only experts with replicas are touched. A rank adds in
  float32, and rounds its sum once to the dtype of the gradients; what it adds to another rank's
  memory loses float32 numbers below 1.2e-38. XLA copies the operand first where
  it cannot give it up: an argument of the outermost ``jit`` that is not donated, or a value that is
  used again. It also copies bfloat16 gradients of an expert that are no multiple of 1024 elements.

  No legal plan can deadlock. All workers go through the tiles in the same order, and in each tile
  through their slots without children, their other slots from the deepest in its tree up, and
  their homes. A worker only ever waits for the same worker of another rank, and for one of two
  things: a child's tile, which comes earlier in this common order, since a child is deeper than
  its parent or has no children; or the acknowledgement of the tile two before, which comes
  earlier too. It announces what it sends and acknowledges what it takes before it goes on. So
  of all waiting workers the one that is first in the order waits for one that does not wait. Who
  adds to a home by itself waits for its own children alone.

  At the end worker 0 of a home's rank waits until all workers of its only child are done. So all
  blocks must be resident at a time: a worker 0 that waits must not keep another block of its rank
  from starting. ``TransferTuning.blocks`` is at most one for each SM.

  Args:
    replicas: ``[S, ...]`` each, all of float32 or all of bfloat16, gradients of this rank's replica
      slots. Those of empty slots are not read. Rows of float32 must be multiples of 16 bytes.
    homes: ``[M, ...]`` of the same dtype, gradients of this rank's home experts, for each of
      ``replicas``.
    replica_expert_GS: as for ``replicate``.
    parent_GS: as for ``replicate``: the rank that a slot's sum is sent to.
    axis_name: the expert mesh axis, of size G.
    tuning: workers and tiles; must be the same on all ranks. ``None``: the default, with an inbox
      of 1 GiB at most (see ``bounded_inbox``).
    work: the list of ``transfer_lists``, if there is one.

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
    tuning=tuning,
    work=work,
  )
  return list(homes) if transfer is None else transfer.launch()


def reduction(
  replicas: Sequence[Array],
  homes: Sequence[Array],
  replica_expert_GS: Array,
  parent_GS: Array,
  *,
  axis_name: AxisName,
  tuning: TransferTuning | None,
  work: Array | None = None,
) -> Transfer | None:
  """A description of ``reduce_replicas`` that ``*_beside`` takes; ``None``: nothing to add.

  Launched alone or beside a matmul, its result is that of ``reduce_replicas``, and so is
  its default tuning. ``work`` is the list of ``transfer_lists`` if there is one.
  """
  replicas, homes = list(replicas), list(homes)
  _check(replicas, homes, replica_expert_GS, parent_GS, axis_name)
  num_ranks, num_slots = replica_expert_GS.shape
  num_others = (num_ranks - 1) * num_slots
  if not homes or not num_others:
    return None
  (dtype,) = {home.dtype for home in homes}
  rows, sums = ([_rows(array) for array in arrays] for arrays in (replicas, homes))
  if tuning is None:
    tuning = inbox.bounded_inbox(TransferTuning().placed(), num_ranks, num_slots)
  tuning, tiles = tuning.placed(), tiling.cut("replicas", rows, tuning)
  if dtype == jnp.bfloat16 and (wrong := [x.length for x in tiles if x.length % UNIT]):
    raise ValueError(
      f"tile_bytes: expected tiles of a multiple of {UNIT} elements of {dtype}, got {wrong[0]}"
    )
  length = max(each.length for each in tiles)
  half = -(-length // (2 * UNIT)) * UNIT
  buffer = plgpu.SMEM((tuning.workers, half), dtype)
  if work is None:
    work = work_list(replica_expert_GS, parent_GS, peers.rank(axis_name), homes[0].shape[0])
  trees.check_list(work, Fields.length(num_ranks, num_slots, homes[0].shape[0]))

  senders = inbox.senders(num_ranks, num_slots)
  places = (tuning.num_workers, inbox.AHEAD, senders, length) if senders else (1, 1, 1, UNIT)

  def finish(results: Sequence[Array]) -> list[Array]:
    _, *sums = results
    sizes = (math.prod(home.shape[1:]) for home in homes)
    wanted = (each[:, :size] for each, size in zip(sums, sizes, strict=True))
    return [each.reshape(home.shape) for each, home in zip(wanted, homes, strict=True)]

  return Transfer(
    operands=[work, *rows],
    updated=sums,
    out_type=[jax.ShapeDtypeStruct(places, dtype)],
    scratch_types=[plgpu.Barrier(num_barriers=tuning.workers)] * 2,
    buffers=[plgpu.SMEM((tuning.workers, work.size), jnp.int32), buffer, buffer],
    body=functools.partial(
      reduce_kernel.body,
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
  more = -rows.shape[1] % UNIT if array.dtype == jnp.bfloat16 else 0
  return jnp.pad(rows, ((0, 0), (0, more))) if more else rows
