"""Tokens to the rows where they are computed, over NVLink.

Two ranks, one token of rank 0 with three experts: two on rank 1, in its rows 4 and 9, one at home::

  rank 0: token t ──► row 2            (copied)
                 └──► rank 1, row 4    (pushed over NVLink, once)
                      rank 1: row 4 ──► row 9   (copied there, when row 4 has landed)
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import support, varying
from pallas_kernels.launch import launch
from pallas_kernels.support import Array, AxisName
from pallas_kernels.transfer import chunks, peers
from pallas_kernels.transfer import tiles as tiling
from pallas_kernels.transfer.chunks import Deal
from pallas_kernels.transfer.scales import SCALED, num_scales
from pallas_kernels.transfer.tiles import Tiles
from pallas_kernels.transfer.tuning import ExchangeTuning
from pallas_kernels.warp.branches import one_if, when

_SCALES, _VALUES = 0, 1  # the arrays of scaled rows: a token's scales are loaded first
_UNROLLED = 4  # blocks of values that are multiplied together, so that their loads overlap


@functools.partial(jax.jit, static_argnames=("capacity", "axis_name", "tuning"))
def dispatch(
  arrays: Sequence[Array],
  dest_TK: Array,
  row_TK: Array,
  received_GTK: Array,
  *,
  capacity: int,
  axis_name: AxisName,
  over: Sequence[Array] | None = None,
  tuning: ExchangeTuning | None = None,
) -> list[Array]:
  """Carries every token to the rows of its assignments, bit for bit.

  Call it inside a ``shard_map`` over all axes of a mesh whose devices reach each other's memory
  (see ``support.why_unreachable``). A token crosses to a rank once, straight into the row of its
  first assignment there; the receiver copies it to the token's other rows. When the kernel returns
  on a rank, that rank's rows are complete.

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
    over: what is returned, before: rows that no token feeds stay as they are there. ``None``: they
      hold anything, NaN included.
    tuning: workers and tiles; must be the same on all ranks.

  Returns:
    A ``[C, ...]`` array for each of ``arrays``. Rows that no token feeds are not written.

  Raises:
    NotImplementedError: a dtype or a mesh that the kernel does not handle, or rows that are no
      multiple of 16 bytes.
    ValueError: shapes that do not fit.
  """
  arrays = list(arrays)
  _check(arrays, dest_TK, row_TK, received_GTK, capacity, axis_name)
  if not arrays:
    return []
  tables = dest_TK, row_TK, received_GTK
  return _launch(arrays, None, *tables, capacity, axis_name, over, tuning)


@functools.partial(jax.jit, static_argnames=("dtype", "capacity", "axis_name", "tuning"))
def dispatch_scaled(
  value_TD: Array,
  scale_TB: Array,
  dest_TK: Array,
  row_TK: Array,
  received_GTK: Array,
  *,
  dtype: Any,
  capacity: int,
  axis_name: AxisName,
  over: Array | None = None,
  tuning: ExchangeTuning | None = None,
) -> Array:
  """Carries tokens in FP8 and multiplies them by their scales on arrival.

  As ``dispatch``, but what crosses, or stays on its rank, lands beside the rows. The receiver
  multiplies in float32, rounds to ``dtype`` and writes the product to all rows of the token, so
  that rows in ``dtype`` are written once and not read. Multiplying afterwards would read and
  write all of them once more.

  Args:
    value_TD: ``[T, D]`` float8_e4m3fn, D a multiple of 16.
    scale_TB: ``[T, B]`` float32, one for each 128 values; B is ``num_scales(D)``.
    dest_TK: as for ``dispatch``, like the other arguments.
    row_TK: the same.
    received_GTK: the same.
    dtype: of the rows: bfloat16, float16 or float32.
    capacity: C, the rows of a rank.
    axis_name: the expert mesh axis.
    over: as for ``dispatch``.
    tuning: workers and tiles; must be the same on all ranks.

  Returns:
    ``[C, D]`` in ``dtype``. Rows that no token feeds are not written.

  Raises:
    NotImplementedError: a dtype, a width or a mesh that the kernel does not handle.
    ValueError: shapes that do not fit.
  """
  _check([value_TD, scale_TB], dest_TK, row_TK, received_GTK, capacity, axis_name)
  _check_scaled(value_TD, scale_TB, dtype)
  arrays, tables = [scale_TB, value_TD], (dest_TK, row_TK, received_GTK)
  before = None if over is None else [over]
  (rows_CD,) = _launch(arrays, jnp.dtype(dtype), *tables, capacity, axis_name, before, tuning)
  return rows_CD


def _launch(
  arrays: Sequence[Array],
  product: jnp.dtype | None,
  dest_TK: Array,
  row_TK: Array,
  received_GTK: Array,
  capacity: int,
  axis_name: AxisName,
  over: Sequence[Array] | None,
  tuning: ExchangeTuning | None,
) -> list[Array]:
  """The rows of all arrays; or those of scales times values, in the dtype of the product."""
  tuning = (tuning or ExchangeTuning()).placed()
  returned = landing = [((capacity, *array.shape[1:]), array.dtype) for array in arrays]
  if product is not None:
    returned = [((capacity, *arrays[_VALUES].shape[1:]), product)]
  before = list(over or [])
  if before and [(each.shape, each.dtype) for each in before] != returned:
    raise ValueError(
      f"over: expected {_described(returned)}, got "
      f"{_described([(each.shape, each.dtype) for each in before])}"
    )
  if not dest_TK.size:
    return before or [jnp.zeros(*each) for each in returned]
  tiles = tiling.cut("arrays", arrays, tuning)
  if product is not None and tiles[_SCALES].length < arrays[_SCALES].shape[1]:
    raise NotImplementedError(f"scale_TB: expected a row that fits a tile of {tuning}")
  num_tokens, top_k = dest_TK.shape
  deal = Deal.of(num_tokens, top_k, tuning)
  sends_TK = chunks.leads(dest_TK)
  if product is None:  # what this rank computes itself it writes into all rows at once
    sends_TK |= dest_TK == peers.rank(axis_name)
  send = deal.table(jnp.where(sends_TK, dest_TK * capacity + row_TK, -1), -1)
  received = deal.table(received_GTK, -1)
  send, received, *flat = varying.vary_alike(
    send, received, *[array.reshape(array.shape[0], -1) for array in (*arrays, *before)]
  )
  rows, before = flat[: len(arrays)], flat[len(arrays) :]
  # The rows that are returned come first, whether they are new or not.
  outs = [] if before else returned
  outs = outs if product is None else [*outs, *landing]
  filled = launch(
    functools.partial(
      _kernel,
      tiles=tiles,
      scaled=product is not None,
      deal=deal,
      capacity=capacity,
      axis_name=axis_name,
      tuning=tuning,
    ),
    [send, received, *rows],
    out_type=[
      jax.typeof(rows[0]).update(shape=(capacity, math.prod(shape[1:])), dtype=dtype)
      for shape, dtype in outs
    ],
    updated=before,
    reaches_others=peers.are_any(axis_name),
    grid=(tuning.num_blocks,),
    grid_names=(tiling.BLOCK_AXIS,),
    num_threads=tuning.workers,
    thread_name=tiling.WORKER_AXIS,
    scratch_types=[
      plgpu.SMEM((tuning.workers, deal.line), jnp.int32),
      plgpu.Barrier(num_barriers=tuning.workers),
      plgpu.SemaphoreType.REGULAR((tuning.workers, received_GTK.shape[0])),
      *tiling.buffers(tiles, tuning),
      *([] if product is None else [_product_buffer(tiles, product, tuning)]),
    ],
    kernel_name="dispatch" if axis_name else "place",
  )
  filled = filled[len(outs) :] if before else filled[: len(returned)]
  return [each.reshape(shape) for each, (shape, _) in zip(filled, returned, strict=True)]


def _described(arrays: Sequence[tuple[tuple[int, ...], Any]]) -> str:
  return ", ".join(f"{dtype} {shape}" for shape, dtype in arrays)


def _product_buffer(tiles: Sequence[Tiles], dtype: jnp.dtype, tuning: ExchangeTuning) -> Any:
  most_blocks = max(-(-each.length // SCALED) for each in tiles if each.array == _VALUES)
  return plgpu.SMEM((tuning.workers, most_blocks * SCALED), dtype)


def _kernel(
  send_ref: Any,
  received_ref: Any,
  *refs: Any,
  tiles: Sequence[Tiles],
  scaled: bool,
  deal: Deal,
  capacity: int,
  axis_name: AxisName,
  tuning: ExchangeTuning,
) -> None:
  num_arrays = tiles[-1].array + 1
  token_refs, products, rows_refs, scratch = tiling.split(refs, [num_arrays, scaled, num_arrays])
  all_lines, all_loaded, all_sent, *buffer_refs = scratch
  product_buffer: Any = buffer_refs.pop() if scaled else None
  slot = lax.axis_index(tiling.WORKER_AXIS)
  loaded, sent = all_loaded.at[slot], all_sent.at[slot]
  worker, num_ranks = tiling.worker_index(tuning), lax.axis_size(axis_name)
  # Who is told that a chunk has landed: the others, and with products to make this rank too.
  told = range(0 if scaled else 1, num_ranks)

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

  def multiply(part: Any) -> Any:
    """The values of a tile times their scales, which lie in the buffer of the tile before it.

    What lies behind the tile in a block that it does not fill is multiplied, too, but not used.
    """
    scales = tiling.buffer(tiles[_SCALES], tiles, buffer_refs)
    whole = tiling.whole_buffer(tiles[-1], tiles, buffer_refs)
    first_scale = lax.div(jnp.int32(part.start), jnp.int32(SCALED))
    num_blocks = -(-part.size // SCALED)

    @pl.loop(0, num_blocks, unroll=math.gcd(num_blocks, _UNROLLED))
    def _(block: Array) -> None:
      here = pl.ds(block * SCALED, SCALED)
      product = whole[here].astype(jnp.float32) * scales[first_scale + block]
      product_buffer[slot, here] = product.astype(product_buffer.dtype)

    plgpu.commit_smem()
    return product_buffer.at[slot, pl.ds(0, part.size)]

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

          @when(code >= 0)
          def _() -> None:
            rank, row = lax.div(code, jnp.int32(capacity)), lax.rem(code, jnp.int32(capacity))
            target = peers.remote_ref(rows_refs[array], rank, axis_name)
            plgpu.copy_smem_to_gmem(buffer, target.at[row, part])

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

      when(wanted >= 0)(lambda: each_tile(send_tile))

    plgpu.wait_smem_to_gmem(0)  # landed, not only read from the buffer
    for index in told:
      rank = chunks.peer(index, axis_name)
      peers.signal(sent.at[peers.rank(axis_name)], rank, axis_name)

  def spread_chunk(step: Array) -> None:
    """Copies what was sent of a chunk to the other rows of its tokens; products to all."""
    for index in told:
      rank = chunks.peer(index, axis_name)
      pl.semaphore_wait(sent.at[rank])
      load_line(received_ref.at[rank, deal.chunk_index(step, worker)], all_lines)

      @pl.loop(jnp.int32(0), jnp.int32(deal.chunk))
      def _(token: Array) -> None:
        def find(k: Array, found: tuple[Array, Array]) -> tuple[Array, Array]:
          first, count = found
          row = assignment(token, k)
          first = jnp.where((first < 0) & (row >= 0), row, first)
          return first, count + one_if(row >= 0)

        first, count = lax.fori_loop(0, deal.top_k, find, (jnp.int32(-1), jnp.int32(0)))

        def spread_tile(array: int, buffer: Any, part: Any) -> None:
          load(rows_refs[array].at[first, part], buffer)
          if not scaled:
            store(rows_refs[array], buffer, part, skipped=first)
          elif array == _VALUES:
            store(products[0], multiply(part), part, skipped=jnp.int32(-1))

        def store(target: Any, buffer: Any, part: Any, skipped: Array) -> None:
          @pl.loop(jnp.int32(0), jnp.int32(deal.top_k))
          def _(k: Array) -> None:
            row = assignment(token, k)

            @when((row >= 0) & (row != skipped))
            def _() -> None:
              plgpu.copy_smem_to_gmem(buffer, target.at[row, part])

          plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        when(count > (0 if scaled else 1))(lambda: each_tile(spread_tile))

  @pl.loop(jnp.int32(0), jnp.int32(deal.steps))
  def _(step: Array) -> None:
    send_chunk(step)
    when(step > 0)(lambda: spread_chunk(step - 1))

  spread_chunk(jnp.int32(deal.steps - 1))
  plgpu.wait_smem_to_gmem(0)


def _check(
  arrays: Sequence[Array],
  dest_TK: Array,
  row_TK: Array,
  received_GTK: Array,
  capacity: int,
  axis_name: AxisName,
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


def _check_scaled(value_TD: Array, scale_TB: Array, dtype: Any) -> None:
  if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16, jnp.float32):
    raise NotImplementedError(f"dtype: expected bfloat16, float16 or float32, got {dtype}")
  if value_TD.dtype != jnp.float8_e4m3fn:
    raise NotImplementedError(f"value_TD: expected float8_e4m3fn, got {value_TD.dtype}")
  if value_TD.ndim != 2 or value_TD.shape[1] % tiling.ALIGNMENT:
    raise NotImplementedError(
      f"value_TD: expected [T, D], D a multiple of {tiling.ALIGNMENT}, got {value_TD.shape}"
    )
  scales = num_scales(value_TD.shape[1])
  if scale_TB.dtype != jnp.float32 or scale_TB.ndim != 2 or scale_TB.shape[1] != scales:
    raise ValueError(
      f"scale_TB: expected float32 [T, {scales}], one for each {SCALED} values, got "
      f"{scale_TB.dtype} {scale_TB.shape}"
    )
