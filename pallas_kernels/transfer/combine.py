"""Rows back to their tokens, summed, over NVLink: the adjoint of dispatch.

The token of ``dispatch``, on its way back, with gates a, b and c::

  rank 1:  b * row 4 + c * row 9 ──► one sum, pushed to rank 0
  rank 0:  a * row 2 + what came from rank 1 ──► token t

A rank sends what others need before it adds its own rows, which takes memory and no links.
"""

import functools
from collections.abc import Callable, Sequence
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
from pallas_kernels.transfer.tuning import ExchangeTuning, combining
from pallas_kernels.warp.branches import cond, when

_LANES = 128  # threads that add a row together
_LOADED = 8  # bytes that a thread loads at a time
_MOST_PER_THREAD = 32  # values of a row that a thread adds at a time, in registers


@functools.partial(jax.jit, static_argnames=("axis_name", "tuning"))
def combine(
  rows_CD: Array,
  gate_GTK: Array | None,
  dest_TK: Array,
  received_GTK: Array,
  *,
  axis_name: AxisName,
  tuning: ExchangeTuning | None = None,
) -> Array:
  """Sums every token's rows, weighted by their gates.

  The rank that computed the rows sums those of a token in float32, in the order of its
  assignments, and sends the sum once, rounded to the dtype of the rows. The token's rank begins
  with the sum of its own rows, which is not rounded. It adds what came in the order of the first
  assignments of other ranks. So the result does not depend on timing.

  Call it inside a ``shard_map`` over all axes of a mesh whose devices reach each other's memory
  (see ``support.why_unreachable``). It cannot deadlock, for the reason that ``dispatch`` cannot.

  Args:
    rows_CD: ``[C, D]`` bfloat16, float16 or float32. Rows that feed no token are not read.
    gate_GTK: ``[G, T, K]`` float32, the weights of the assignments that ``received_GTK`` has rows
      of; others are not read. ``None``: all are 1.
    dest_TK: ``[T, K]`` int32, the rank that computes this rank's assignment, −1 for none.
    received_GTK: ``[G, T, K]`` int32, the rows on this rank of the assignments of all ranks, −1
      for those that other ranks compute.
    axis_name: the expert mesh axis, of size G.
    tuning: workers, and the bytes of the part of a row that is sent at a time; must be the same
      on all ranks.

  Returns:
    ``[T, D]`` in the dtype of the rows; zero for a token without assignments.

  Raises:
    NotImplementedError: a dtype or a mesh that the kernel does not handle, or D no multiple of 16.
    ValueError: shapes that do not fit.
  """
  _check(rows_CD, gate_GTK, dest_TK, received_GTK, axis_name)
  (num_tokens, top_k), width = dest_TK.shape, rows_CD.shape[1]
  tuning = (tuning or combining(num_tokens, received_GTK.shape[0])).placed()
  if not dest_TK.size:
    return jnp.zeros((num_tokens, width), rows_CD.dtype)
  if width < _LANES:
    rows_CD = jnp.pad(rows_CD, [(0, 0), (0, _LANES - width)])
    arguments = rows_CD, gate_GTK, dest_TK, received_GTK
    return combine(*arguments, axis_name=axis_name, tuning=tuning)[:, :width]
  deal = Deal.of(num_tokens, top_k, tuning)
  num_ranks = received_GTK.shape[0]
  tables = [deal.table(received_GTK, -1)]
  if gate_GTK is not None:
    tables.append(deal.table(gate_GTK, 0.0))
  sums = []  # of the other ranks
  if peers.are_any(axis_name):
    rank = peers.rank(axis_name)
    sends_TK = chunks.leads(dest_TK) & (dest_TK != rank)
    place_TK = jnp.where(sends_TK, _place(dest_TK, rank, axis_name), -1)
    tables.append(deal.table(place_TK, -1))
    sums = [jax.typeof(rows_CD).update(shape=(num_ranks - 1, num_tokens, width))]
  rows_CD, *tables = varying.vary_alike(rows_CD, *tables)
  most = min(_LANES * _MOST_PER_THREAD, _buffer_length(rows_CD, tuning))
  parts = chunks.pieces(width, most)
  y_TD, *_ = launch(
    functools.partial(
      _kernel, parts=parts, deal=deal, weighted=gate_GTK is not None, axis_name=axis_name
    ),
    [rows_CD, *tables],
    out_type=[
      jax.typeof(rows_CD).update(shape=(num_tokens, width)),
      *sums,
    ],
    reaches_others=peers.are_any(axis_name),
    grid=(tuning.num_blocks,),
    grid_names=(tiling.BLOCK_AXIS,),
    num_threads=tuning.workers,
    thread_name=tiling.WORKER_AXIS,
    scratch_types=[
      plgpu.SMEM((tuning.workers, deal.line), jnp.int32),
      plgpu.SMEM((tuning.workers, deal.line), jnp.float32),
      plgpu.SMEM((tuning.workers, deal.line), jnp.int32),
      plgpu.SMEM((tuning.workers, max(_LANES, *(length for _, length in parts))), rows_CD.dtype),
      plgpu.Barrier(num_barriers=tuning.workers),
      plgpu.SemaphoreType.REGULAR((tuning.workers, num_ranks)),
    ],
    kernel_name="combine",
  )
  return y_TD


def _place(source: Array, home: Array, axis_name: AxisName) -> Array:
  """Where the sums of a rank lie among those of the others that a home is sent."""
  num_ranks = lax.axis_size(axis_name)
  return lax.rem(source - home - 1 + num_ranks, jnp.int32(num_ranks))


def _buffer_length(rows_CD: Array, tuning: ExchangeTuning) -> int:
  """Values that fit into a worker's buffer, a multiple of the threads that fill it."""
  length = tuning.tile_bytes // rows_CD.dtype.itemsize // _LANES * _LANES
  if not length:
    raise ValueError(
      f"tile_bytes: expected at least {_LANES * rows_CD.dtype.itemsize} for {rows_CD.dtype}, "
      f"got {tuning.tile_bytes}"
    )
  return length


def _kernel(
  rows_ref: Any,
  received_ref: Any,
  *refs: Any,
  parts: list[tuple[int, int]],
  deal: Deal,
  weighted: bool,
  axis_name: AxisName,
) -> None:
  others = peers.are_any(axis_name)
  gate_refs, source_refs, (y_ref,), sums_refs, scratch = tiling.split(
    refs, [weighted, others, 1, others]
  )
  all_lines, all_gates, all_sources, all_buffers, all_loaded, all_sent = scratch
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
      load_line(gate_refs[0].at[source, chunk], all_gates)

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
      return row_D * entry_of(all_gates, token, k) if weighted else row_D

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
      here = _place(rank, to, axis_name)
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
  unit = _LANES * (_LOADED // dtype.itemsize)
  while unit > max(length, _LANES):
    unit //= 2
  whole = length // unit * unit
  while unit // 2 >= max(length - whole, _LANES):
    unit //= 2
  pieces = [(start, whole), (start + length - unit, unit)]
  return [pieces[0]] if whole == length else pieces[whole == 0 :]


def check_sizes(width: int, dtype: Any) -> None:
  """Raises NotImplementedError unless the kernel handles rows of ``width`` values of a dtype."""
  if dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
    raise NotImplementedError(f"rows_CD: expected bfloat16, float16 or float32, got {dtype}")
  if width == 0 or width % tiling.ALIGNMENT:  # also of bytes, for tokens in FP8
    raise NotImplementedError(f"D: expected a positive multiple of {tiling.ALIGNMENT}, got {width}")


def _check(
  rows_CD: Array, gate_GTK: Array | None, dest_TK: Array, received_GTK: Array, axis_name: AxisName
) -> None:
  support.check_mesh(axis_name)
  chunks.check_assignments(dest_TK)
  expected = (lax.axis_size(axis_name), *dest_TK.shape)
  if received_GTK.shape != expected or received_GTK.dtype != jnp.int32:
    raise ValueError(
      f"received_GTK: expected int32 {expected}, got {received_GTK.dtype} {received_GTK.shape}"
    )
  if rows_CD.ndim != 2:
    raise ValueError(f"rows_CD: expected [C, D], got {rows_CD.shape}")
  check_sizes(rows_CD.shape[1], rows_CD.dtype)
  if gate_GTK is not None and (
    gate_GTK.shape != received_GTK.shape or gate_GTK.dtype != jnp.float32
  ):
    raise ValueError(
      f"gate_GTK: expected float32 {received_GTK.shape}, got {gate_GTK.dtype} {gate_GTK.shape}"
    )
