"""The kernel of ``dispatch``: what one block sends and spreads, chunk by chunk.

A worker on either rank of the example there, in its second step::

  sends chunk 1: its line, its tokens, then a signal
  waits for the signal of chunk 0, reads its line ──► copies row 4 to row 9
"""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.support import Array, AxisName
from pallas_kernels.transfer import chunks, peers, told
from pallas_kernels.transfer import tiles as tiling
from pallas_kernels.transfer.chunks import Deal
from pallas_kernels.transfer.scales import SCALED
from pallas_kernels.transfer.tiles import Tiles
from pallas_kernels.transfer.tuning import ExchangeTuning
from pallas_kernels.warp.branches import one_if, when

SCALES, VALUES = 0, 1  # the arrays of scaled rows: a token's scales are loaded first
_UNROLLED = 4  # blocks of values that are multiplied together, so that their loads overlap


def body(
  line_ref: Any,
  *refs: Any,
  tiles: Sequence[Tiles],
  scaled: bool,
  deal: Deal,
  top_k: int,
  capacity: int,
  axis_name: AxisName,
  tuning: ExchangeTuning,
) -> None:
  """What a block does; see ``dispatch``."""
  num_arrays, others = tiles[-1].array + 1, peers.are_any(axis_name)
  token_refs, products, rows_refs, told_refs, scratch = tiling.split(
    refs, [num_arrays, scaled, num_arrays, others]
  )
  all_lines, all_loaded, all_sent, *buffer_refs = scratch
  product_buffer: Any = buffer_refs.pop() if scaled else None
  slot = lax.axis_index(tiling.WORKER_AXIS)
  loaded, sent = all_loaded.at[slot], all_sent.at[slot]
  worker, num_ranks = tiling.worker_index(tuning), lax.axis_size(axis_name)
  # Whose rows are spread on arrival: the others', and with products to make this rank's too.
  spread = range(0 if scaled else 1, num_ranks)

  def load(source: Any, target: Any) -> None:
    plgpu.copy_gmem_to_smem(source, target, loaded, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)
    plgpu.barrier_wait(loaded)

  def load_line(source: Any, target: Any) -> None:
    plgpu.commit_smem()  # all threads have read the one before
    load(source, target.at[slot])

  def code_of(token: Array, k: Array | int) -> Array:
    return all_lines[slot, token * deal.columns + k]

  def row_of(token: Array, k: Array | int) -> Array:
    return told.row_here(code_of(token, k), capacity, peers.rank(axis_name))

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
    scales = tiling.buffer(tiles[SCALES], tiles, buffer_refs)
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
    load_line(line_ref.at[chunk], all_lines)
    if others:
      for index in range(num_ranks):
        told_ref = peers.remote_ref(told_refs[0], chunks.peer(index, axis_name), axis_name)
        plgpu.copy_smem_to_gmem(all_lines.at[slot], told_ref.at[peers.rank(axis_name), chunk])

    @pl.loop(jnp.int32(0), jnp.int32(deal.chunk))
    def _(token: Array) -> None:
      wanted = lax.fori_loop(
        0, top_k, lambda k, best: lax.max(best, code_of(token, k)), jnp.int32(-1)
      )

      def send_tile(array: int, buffer: Any, part: Any) -> None:
        load(token_refs[array].at[chunk * deal.chunk + token, part], buffer)

        @pl.loop(jnp.int32(0), jnp.int32(top_k))
        def _(k: Array) -> None:
          code = code_of(token, k)

          @when(code >= 0)
          def _() -> None:
            rank, row = lax.div(code, jnp.int32(capacity)), lax.rem(code, jnp.int32(capacity))
            target = peers.remote_ref(rows_refs[array], rank, axis_name)
            plgpu.copy_smem_to_gmem(buffer, target.at[row, part])

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

      when(wanted >= 0)(lambda: each_tile(send_tile))

    plgpu.wait_smem_to_gmem(0)  # landed, not only read from the buffer
    for index in spread:
      rank = chunks.peer(index, axis_name)
      peers.signal(sent.at[peers.rank(axis_name)], rank, axis_name)

  def spread_chunk(step: Array) -> None:
    """Copies what was sent of a chunk to the other rows of its tokens; products to all."""
    for index in spread:
      rank = chunks.peer(index, axis_name)
      pl.semaphore_wait(sent.at[rank])
      lines_ref = told_refs[0].at[rank] if others else line_ref
      load_line(lines_ref.at[deal.chunk_index(step, worker)], all_lines)

      @pl.loop(jnp.int32(0), jnp.int32(deal.chunk))
      def _(token: Array) -> None:
        def find(k: Array, found: tuple[Array, Array]) -> tuple[Array, Array]:
          first, count = found
          row = row_of(token, k)
          first = jnp.where((first < 0) & (row >= 0), row, first)
          return first, count + one_if(row >= 0)

        first, count = lax.fori_loop(0, top_k, find, (jnp.int32(-1), jnp.int32(0)))

        def spread_tile(array: int, buffer: Any, part: Any) -> None:
          load(rows_refs[array].at[first, part], buffer)
          if not scaled:
            store(rows_refs[array], buffer, part, skipped=first)
          elif array == VALUES:
            store(products[0], multiply(part), part, skipped=jnp.int32(-1))

        def store(target: Any, buffer: Any, part: Any, skipped: Array) -> None:
          @pl.loop(jnp.int32(0), jnp.int32(top_k))
          def _(k: Array) -> None:
            row = row_of(token, k)

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
