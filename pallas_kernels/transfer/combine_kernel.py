"""The kernel of ``combine``: what one block sends and adds, chunk by chunk.

A worker of rank 0 or 1 in the example there, in its second step::

  sends chunk 1: the sums of the other's tokens, then a signal
  waits for the signal of chunk 0 ──► its own rows of chunk 0 + what came
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.support import Array, AxisName
from pallas_kernels.transfer import chunks, peers
from pallas_kernels.transfer import tiles as tiling
from pallas_kernels.transfer.chunks import Deal
from pallas_kernels.warp.branches import cond, when

LANES = 128  # threads that add a row together
MOST_PER_THREAD = 32  # values of a row that a thread adds at a time, in registers
_LOADED = 8  # bytes that a thread loads at a time


def body(
  rows_ref: Any,
  received_ref: Any,
  *refs: Any,
  parts: list[tuple[int, int]],
  deal: Deal,
  weighted: bool,
  telling: bool,
  axis_name: AxisName,
) -> None:
  """What a block does; see ``combine`` and ``combine_values``: weighted, or telling numbers."""
  others = peers.are_any(axis_name)
  telling = telling and others
  gate_refs, value_refs, source_refs, (y_ref,), sums_refs, told_refs, scratch = tiling.split(
    refs, [weighted, telling, others, 1, others, telling]
  )
  all_lines, all_numbers, all_sources, all_buffers, all_loaded, all_sent = scratch
  slot = lax.axis_index(tiling.WORKER_AXIS)
  loaded, sent = all_loaded.at[slot], all_sent.at[slot]
  worker = lax.axis_index(tiling.BLOCK_AXIS) * all_lines.shape[0] + slot
  rank, num_ranks = peers.rank(axis_name), lax.axis_size(axis_name)

  def load_line(source: Any, target: Any) -> None:
    plgpu.copy_gmem_to_smem(
      source, target.at[slot], loaded, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS
    )
    plgpu.barrier_wait(loaded)

  def load_lines(source: Array, chunk: Array) -> None:
    """The rows here of a rank's assignments, and their gates."""
    plgpu.commit_smem()  # all threads have read those before
    load_line(received_ref.at[source, chunk], all_lines)
    if weighted:
      load_line(gate_refs[0].at[source, chunk], all_numbers)

  def entry_of(lines: Any, token: Array, k: Array) -> Array:
    return lines[slot, token * deal.columns + k]

  def added(
    lines: Any,
    token: Array,
    pieces: Sequence[Any],
    sums: list[Array],
    term: Callable[[Array, Array, Any], Array],
  ) -> list[Array]:
    """The sums of pieces of a row, with ``term(k, entry, piece)`` of a token's entries added."""

    def add(k: Array, sums: list[Array]) -> list[Array]:
      entry = entry_of(lines, token, k)
      return cond(
        entry >= 0,
        lambda: [x + term(k, entry, piece) for x, piece in zip(sums, pieces, strict=True)],
        lambda: sums,
      )

    return lax.fori_loop(0, deal.columns, add, sums)

  def rows_added(token: Array, pieces: Sequence[Any]) -> list[Array]:
    """The sums of pieces of a token's rows here."""

    def weigh(k: Array, row: Array, piece: Any) -> Array:
      row_D = rows_ref[row, piece].astype(jnp.float32)
      return row_D * entry_of(all_numbers, token, k) if weighted else row_D

    zeros = [jnp.zeros(piece.size, jnp.float32) for piece in pieces]
    return added(all_lines, token, pieces, zeros, weigh)

  def pieces_of(start: int, length: int) -> list[Any]:
    return [pl.ds(*piece) for piece in _cover(start, length, rows_ref.dtype)]

  def has_any(token: Array) -> Array:
    most = lax.fori_loop(
      0,
      deal.columns,
      lambda k, best: lax.max(best, entry_of(all_lines, token, k)),
      jnp.int32(-1),
    )
    return most >= 0

  def send_chunk(step: Array) -> None:
    """Sends every other rank the sums of its tokens of a chunk."""
    chunk = deal.chunk_index(step, worker)
    for index in range(1, num_ranks):
      to = chunks.peer(index, axis_name)
      load_lines(to, chunk)
      here = place_of(rank, to, axis_name)
      if telling:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the line before it
        load_line(value_refs[0].at[to, chunk], all_numbers)
        told_ref = peers.remote_ref(told_refs[0], to, axis_name)
        plgpu.copy_smem_to_gmem(all_numbers.at[slot], told_ref.at[here, chunk])
      target = peers.remote_ref(sums_refs[0], to, axis_name).at[here]

      def send_token(token: Array, target: Any = target) -> None:
        for start, length in parts:
          pieces = pieces_of(start, length)
          sums = rows_added(token, pieces)
          plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the part before it
          first = min(start, *(piece.start for piece in pieces))
          for piece, sum_D in zip(pieces, sums, strict=True):
            all_buffers[slot, pl.ds(piece.start - first, piece.size)] = sum_D.astype(rows_ref.dtype)
          plgpu.commit_smem()
          staged = all_buffers.at[slot, pl.ds(start - first, length)]
          place = target.at[chunk * deal.chunk + token, pl.ds(start, length)]
          plgpu.copy_smem_to_gmem(staged, place)

      @pl.loop(jnp.int32(0), jnp.int32(deal.chunk))
      def _(token: Array, send_token: Callable[..., None] = send_token) -> None:
        when(has_any(token))(lambda: send_token(token))

    plgpu.wait_smem_to_gmem(0)  # landed, not only read from the buffer
    for index in range(1, num_ranks):
      peers.signal(sent.at[rank], chunks.peer(index, axis_name), axis_name)

  def add_chunk(step: Array) -> None:
    """Adds this rank's rows of a chunk, and what the others sent."""
    chunk = deal.chunk_index(step, worker)
    load_lines(rank, chunk)
    if others:
      load_line(source_refs[0].at[chunk], all_sources)
    for index in range(1, num_ranks):
      pl.semaphore_wait(sent.at[chunks.peer(index, axis_name)])

    @pl.loop(jnp.int32(0), jnp.int32(deal.chunk))
    def _(token: Array) -> None:
      place = chunk * deal.chunk + token

      @when(place < deal.tokens)
      def _() -> None:
        for start, length in parts:

          def read(k: Array, sender: Array, piece: Any) -> Array:
            return sums_refs[0][sender, place, piece].astype(jnp.float32)

          pieces = pieces_of(start, length)
          sums = rows_added(token, pieces)
          if others:
            sums = added(all_sources, token, pieces, sums, read)
          for piece, sum_D in zip(pieces, sums, strict=True):
            y_ref[place, piece] = sum_D.astype(y_ref.dtype)

  @pl.loop(jnp.int32(0), jnp.int32(deal.steps))
  def _(step: Array) -> None:
    if not others:
      return add_chunk(step)
    send_chunk(step)
    when(step > 0)(lambda: add_chunk(step - 1))
    return None

  if others:
    add_chunk(jnp.int32(deal.steps - 1))


def _cover(start: int, length: int, dtype: jnp.dtype) -> list[tuple[int, int]]:
  """Start and length of pieces that all threads share evenly, and that make up a part of a row.

  The last one begins inside the first, or before the part, if it must.

  >>> _cover(0, 4096, jnp.dtype("bfloat16")), _cover(0, 2880, jnp.dtype("bfloat16"))
  ([(0, 4096)], [(0, 2560), (2368, 512)])
  """
  unit = LANES * (_LOADED // dtype.itemsize)
  while unit > max(length, LANES):
    unit //= 2
  whole = length // unit * unit
  while unit // 2 >= max(length - whole, LANES):
    unit //= 2
  pieces = [(start, whole), (start + length - unit, unit)]
  return [pieces[0]] if whole == length else pieces[whole == 0 :]


def place_of(source: Array, home: Array, axis_name: AxisName) -> Array:
  """Where the sums of a rank lie among those of the others that a home is sent."""
  num_ranks = lax.axis_size(axis_name)
  return lax.rem(source - home - 1 + num_ranks, jnp.int32(num_ranks))
