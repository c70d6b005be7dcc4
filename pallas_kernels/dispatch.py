"""Tokens to the rows where they are computed, over NVLink."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import chunks, support, varying
from pallas_kernels import tiles as tiling
from pallas_kernels.chunks import Deal, Tuning
from pallas_kernels.tiles import Tiles

Array = jax.Array


def dispatch(
  arrays: Sequence[Array],
  dest_TK: Array,
  row_TK: Array,
  received_GTK: Array,
  *,
  capacity: int,
  axis_name: str,
  tuning: Tuning | None = None,
) -> list[Array]:
  """Carries every token to the rows of its assignments, bit for bit.

  Call it inside a ``shard_map`` over all axes of a mesh whose devices belong to one process and
  reach each other's memory. A token crosses to a rank once, straight into the row of its first
  assignment there; the receiver copies it to the token's other rows. When the kernel returns on
  a rank, that rank's rows are complete.

  It cannot deadlock: all workers go through their chunks in the same order, and send a chunk
  before they wait for what the others send of the chunk before it. Sending waits for nobody. So
  of all waiting workers the one at the earliest chunk waits for one that does not wait.

  Args:
    arrays: ``[T, ...]`` each, of this rank's tokens, such as values and their scales. Rows must be
      multiples of 16 bytes.
    dest_TK: ``[T, K]`` int32, the rank that computes the assignment, −1 for none.
    row_TK: ``[T, K]`` int32, the assignment's row there, in ``[0, capacity)``. No two assignments
      share a row of a rank.
    received_GTK: ``[G, T, K]`` int32, the rows on this rank of the assignments of all ranks, −1
      for those that other ranks compute.
    capacity: C, the rows of a rank.
    axis_name: the expert mesh axis, of size G.
    tuning: workers and tiles; must be the same on all ranks.

  Returns:
    A ``[C, ...]`` array for each of ``arrays``. Rows that no token feeds are not written: they
    hold anything, NaN included.

  Raises:
    NotImplementedError: a dtype or a mesh that the kernel does not handle.
    ValueError: shapes that do not fit, or rows that are no multiple of 16 bytes.
  """
  tuning = tuning or Tuning()
  arrays = list(arrays)
  _check(arrays, dest_TK, row_TK, received_GTK, capacity, axis_name)
  if not arrays or not dest_TK.size:
    return [jnp.zeros((capacity, *array.shape[1:]), array.dtype) for array in arrays]
  tiles = tiling.cut("arrays", arrays, tuning)
  num_tokens, top_k = dest_TK.shape
  deal = Deal.of(num_tokens, top_k, tuning)
  # What this rank computes itself it writes into all rows at once.
  sends_TK = chunks.leads(dest_TK) | (dest_TK == lax.axis_index(axis_name))
  send = deal.table(jnp.where(sends_TK, dest_TK * capacity + row_TK, -1), -1)
  received = deal.table(received_GTK, -1)
  send, received, *rows = varying.vary_alike(
    send, received, *[array.reshape(array.shape[0], -1) for array in arrays]
  )
  kernel = plgpu.kernel(
    functools.partial(
      _kernel, tiles=tiles, deal=deal, capacity=capacity, axis_name=axis_name, tuning=tuning
    ),
    out_type=[jax.typeof(row).update(shape=(capacity, row.shape[1])) for row in rows],
    grid=(tuning.blocks,),
    grid_names=(tiling.BLOCK_AXIS,),
    num_threads=tuning.workers,
    thread_name=tiling.WORKER_AXIS,
    scratch_types=[
      plgpu.SMEM((tuning.workers, deal.line), jnp.int32),
      plgpu.Barrier(num_barriers=tuning.workers),
      plgpu.SemaphoreType.REGULAR((tuning.workers, received_GTK.shape[0])),
      *tiling.buffers(tiles, tuning),
    ],
    kernel_name="dispatch",
  )
  filled = kernel(send, received, *rows)
  return [
    rows.reshape(capacity, *array.shape[1:]) for rows, array in zip(filled, arrays, strict=True)
  ]


def _kernel(
  send_ref: Any,
  received_ref: Any,
  *refs: Any,
  tiles: Sequence[Tiles],
  deal: Deal,
  capacity: int,
  axis_name: str,
  tuning: Tuning,
) -> None:
  num_arrays = tiles[-1].array + 1
  token_refs, rows_refs = refs[:num_arrays], refs[num_arrays : 2 * num_arrays]
  all_lines, all_loaded, all_sent, *buffer_refs = refs[2 * num_arrays :]
  slot = lax.axis_index(tiling.WORKER_AXIS)
  loaded, sent = all_loaded.at[slot], all_sent.at[slot]
  worker, num_ranks = tiling.worker_index(tuning), lax.axis_size(axis_name)

  def load(source: Any, target: Any) -> None:
    plgpu.copy_gmem_to_smem(source, target, loaded, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)
    plgpu.barrier_wait(loaded)

  def load_line(source: Any, target: Any) -> None:
    plgpu.commit_smem()  # all threads have read the one before
    load(source, target.at[slot])

  def assignment(token: Array, k: Array | int) -> Array:
    return all_lines[slot, token * deal.top_k + k]

  def each_tile(visit: Any) -> None:
    """``visit(array, buffer, part)`` for every tile of a row."""
    for each in tiles:

      @pl.loop(jnp.int32(0), jnp.int32(each.count))
      def _(index: Array, each: Tiles = each) -> None:
        part = pl.ds(each.start + index * each.length, each.length)
        visit(each.array, tiling.buffer(each, tiles, buffer_refs), part)

  def send_chunk(step: Array) -> None:
    chunk = deal.chunk_index(step, worker)
    load_line(send_ref.at[chunk], all_lines)

    @pl.loop(jnp.int32(0), jnp.int32(deal.chunk))
    def _(token: Array) -> None:
      wanted = lax.fori_loop(
        0, deal.top_k, lambda k, best: lax.max(best, assignment(token, k)), jnp.int32(-1)
      )

      def send_tile(array: int, buffer: Any, part: Any) -> None:
        load(token_refs[array].at[chunk * deal.chunk + token, part], buffer)

        @pl.loop(jnp.int32(0), jnp.int32(deal.top_k))
        def _(k: Array) -> None:
          code = assignment(token, k)

          @pl.when(code >= 0)
          def _() -> None:
            rank, row = lax.div(code, jnp.int32(capacity)), lax.rem(code, jnp.int32(capacity))
            device: Any = {axis_name: rank}  # a type that remote_ref takes and does not declare
            target = plgpu.remote_ref(rows_refs[array], device)
            plgpu.copy_smem_to_gmem(buffer, target.at[row, part])

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

      pl.when(wanted >= 0)(lambda: each_tile(send_tile))

    plgpu.wait_smem_to_gmem(0)  # landed, not only read from the buffer
    for index in range(1, num_ranks):
      rank = chunks.peer(index, axis_name)
      pl.semaphore_signal(sent.at[lax.axis_index(axis_name)], device_id={axis_name: rank})

  def spread_chunk(step: Array) -> None:
    """Copies what the other ranks sent of a chunk to the other rows of its tokens."""
    for index in range(1, num_ranks):
      rank = chunks.peer(index, axis_name)
      pl.semaphore_wait(sent.at[rank])
      load_line(received_ref.at[rank, deal.chunk_index(step, worker)], all_lines)

      @pl.loop(jnp.int32(0), jnp.int32(deal.chunk))
      def _(token: Array) -> None:
        def find(k: Array, found: tuple[Array, Array]) -> tuple[Array, Array]:
          first, count = found
          row = assignment(token, k)
          first = jnp.where((first < 0) & (row >= 0), row, first)
          return first, count + (row >= 0).astype(jnp.int32)

        first, count = lax.fori_loop(0, deal.top_k, find, (jnp.int32(-1), jnp.int32(0)))

        def spread_tile(array: int, buffer: Any, part: Any) -> None:
          load(rows_refs[array].at[first, part], buffer)

          @pl.loop(jnp.int32(0), jnp.int32(deal.top_k))
          def _(k: Array) -> None:
            row = assignment(token, k)

            @pl.when((row >= 0) & (row != first))
            def _() -> None:
              plgpu.copy_smem_to_gmem(buffer, rows_refs[array].at[row, part])

          plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        pl.when(count > 1)(lambda: each_tile(spread_tile))

  @pl.loop(jnp.int32(0), jnp.int32(deal.steps))
  def _(step: Array) -> None:
    send_chunk(step)
    pl.when(step > 0)(lambda: spread_chunk(step - 1))

  spread_chunk(jnp.int32(deal.steps - 1))
  plgpu.wait_smem_to_gmem(0)


def _check(
  arrays: Sequence[Array],
  dest_TK: Array,
  row_TK: Array,
  received_GTK: Array,
  capacity: int,
  axis_name: str,
) -> None:
  support.check_mesh(axis_name)
  chunks.check_assignments(dest_TK, received_GTK, axis_name)
  num_ranks, *per_rank = received_GTK.shape
  if row_TK.shape != tuple(per_rank) or row_TK.dtype != jnp.int32:
    raise ValueError(f"row_TK: expected int32 {per_rank}, got {row_TK.dtype} {row_TK.shape}")
  for array in arrays:
    if array.shape[:1] != dest_TK.shape[:1]:
      raise ValueError(
        f"arrays: expected a leading size of {dest_TK.shape[0]} tokens, got {array.shape}"
      )
  if num_ranks * capacity > jnp.iinfo(jnp.int32).max:
    raise NotImplementedError(f"capacity: too large for int32 on {num_ranks} ranks: {capacity}")
