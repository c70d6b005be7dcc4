"""Rows back to their tokens, summed, over NVLink: the adjoint of dispatch.

The token of ``dispatch``, on its way back, with gates a, b and c::

  rank 1:  b * row 4 + c * row 9 ──► one sum, pushed to rank 0
  rank 0:  a * row 2 + what came from rank 1 ──► token t

A rank sends what others need before it adds its own rows, which takes memory and no links.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import support, varying
from pallas_kernels.launch import launch
from pallas_kernels.support import Array, AxisName
from pallas_kernels.transfer import chunks, combine_kernel, peers
from pallas_kernels.transfer import tiles as tiling
from pallas_kernels.transfer.chunks import Deal
from pallas_kernels.transfer.combine_kernel import LANES, MOST_PER_THREAD
from pallas_kernels.transfer.tuning import ExchangeTuning, combining


@functools.partial(jax.jit, static_argnames=("axis_name", "tuning"))
def combine(
  rows_CD: Array,
  gate_GTK: Array | None,
  dest_TK: Array,
  received_GTK: Array,
  *,
  axis_name: AxisName,
  rank: Array | None = None,
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
    rank: ``[]`` int32, this rank along the axis, if it is known (see ``Gathered``).
    tuning: workers, and the bytes of the part of a row that is sent at a time; must be the same
      on all ranks.

  Returns:
    ``[T, D]`` in the dtype of the rows; zero for a token without assignments.

  Raises:
    NotImplementedError: a dtype or a mesh that the kernel does not handle, or D no multiple of 16.
    ValueError: shapes that do not fit.
  """
  _check(rows_CD, gate_GTK, dest_TK, received_GTK, axis_name)
  return _launch(rows_CD, gate_GTK, None, dest_TK, received_GTK, axis_name, rank, tuning)[0]


@functools.partial(jax.jit, static_argnames=("axis_name", "tuning"))
def combine_values(
  rows_CD: Array,
  value_C: Array,
  dest_TK: Array,
  received_GTK: Array,
  *,
  axis_name: AxisName,
  rank: Array | None = None,
  tuning: ExchangeTuning | None = None,
) -> tuple[Array, Array]:
  """``combine`` without gates, and a number of every row back at its assignment.

  The numbers of a few tokens travel in a line beside the sums, as in ``dispatch``.

  Args:
    rows_CD: as for ``combine``, like the other arguments.
    value_C: ``[C]`` float32, such as the gradients of gates.
    dest_TK: the same.
    received_GTK: the same.
    axis_name: the same.
    rank: the same.
    tuning: the same.

  Returns:
    The sums ``[T, D]``; ``[T, K]`` float32, zero for an assignment that nobody computes.

  Raises:
    NotImplementedError: as ``combine`` does.
    ValueError: the same.
  """
  _check(rows_CD, None, dest_TK, received_GTK, axis_name)
  if value_C.shape != rows_CD.shape[:1] or value_C.dtype != jnp.float32:
    expected = f"float32 {rows_CD.shape[:1]}"
    raise ValueError(f"value_C: expected {expected}, got {value_C.dtype} {value_C.shape}")
  arguments = rows_CD, None, value_C, dest_TK, received_GTK
  y_TD, value_TK = _launch(*arguments, axis_name, rank, tuning)
  assert value_TK is not None  # values were sent
  return y_TD, value_TK


def _launch(
  rows_CD: Array,
  gate_GTK: Array | None,
  value_C: Array | None,
  dest_TK: Array,
  received_GTK: Array,
  axis_name: AxisName,
  rank: Array | None,
  tuning: ExchangeTuning | None,
) -> tuple[Array, Array | None]:
  """The sums, and the numbers of assignments, if any are sent."""
  (num_tokens, top_k), width = dest_TK.shape, rows_CD.shape[1]
  num_ranks, others = received_GTK.shape[0], peers.are_any(axis_name)
  tuning = (tuning or combining(num_tokens, num_ranks)).placed()
  if not dest_TK.size:
    nothing = None if value_C is None else jnp.zeros(dest_TK.shape, jnp.float32)
    return jnp.zeros((num_tokens, width), rows_CD.dtype), nothing
  if width < LANES:
    rows_CD = jnp.pad(rows_CD, [(0, 0), (0, LANES - width)])
    arguments = rows_CD, gate_GTK, value_C, dest_TK, received_GTK
    y_TD, value_TK = _launch(*arguments, axis_name, rank, tuning)
    return y_TD[:, :width], value_TK
  rank = peers.rank(axis_name) if rank is None else rank
  value_GTK = None if value_C is None else _at_assignments(value_C, received_GTK)
  deal = Deal.of(num_tokens, top_k, tuning)
  tables = [deal.table(received_GTK, -1)]
  if gate_GTK is not None:
    tables.append(deal.table(gate_GTK, 0.0))
  if value_GTK is not None and others:
    tables.append(deal.table(value_GTK, 0.0))
  if others:
    sends_TK = chunks.leads(dest_TK) & (dest_TK != rank)
    place_TK = jnp.where(sends_TK, combine_kernel.place_of(dest_TK, rank, axis_name), -1)
    tables.append(deal.table(place_TK, -1))
  rows_CD, *tables = varying.vary_alike(rows_CD, *tables)
  like = jax.typeof(rows_CD)
  most = min(LANES * MOST_PER_THREAD, _buffer_length(rows_CD, tuning))
  parts = chunks.pieces(width, most)
  types = [like.update(shape=(num_tokens, width))]
  if others:  # what the other ranks send
    types.append(like.update(shape=(num_ranks - 1, num_tokens, width)))
  if others and value_GTK is not None:
    types.append(like.update(shape=(num_ranks - 1, deal.chunks, deal.line), dtype=jnp.float32))
  y_TD, *brought = launch(
    functools.partial(
      combine_kernel.body,
      parts=parts,
      deal=deal,
      weighted=gate_GTK is not None,
      telling=value_GTK is not None,
      axis_name=axis_name,
    ),
    [rows_CD, *tables],
    out_type=types,
    reaches_others=others,
    grid=(tuning.num_blocks,),
    grid_names=(tiling.BLOCK_AXIS,),
    num_threads=tuning.workers,
    thread_name=tiling.WORKER_AXIS,
    scratch_types=[
      plgpu.SMEM((tuning.workers, deal.line), jnp.int32),
      plgpu.SMEM((tuning.workers, deal.line), jnp.float32),
      plgpu.SMEM((tuning.workers, deal.line), jnp.int32),
      plgpu.SMEM((tuning.workers, max(LANES, *(length for _, length in parts))), rows_CD.dtype),
      plgpu.Barrier(num_barriers=tuning.workers),
      plgpu.SemaphoreType.REGULAR((tuning.workers, num_ranks)),
    ],
    kernel_name="combine",
  )
  if value_GTK is None:
    return y_TD, None
  own_TK = value_GTK[rank]
  if not others:
    return y_TD, own_TK
  # One rank has the number of an assignment, all others have zero.
  return y_TD, own_TK + deal.values(brought[1]).sum(0)


def _at_assignments(value_C: Array, received_GTK: Array) -> Array:
  """``[G, T, K]``, the numbers of the rows here; zero for assignments of other ranks' rows."""
  value_GTK = value_C[jnp.maximum(received_GTK, 0)]
  return jnp.where(received_GTK >= 0, value_GTK, 0)


def _buffer_length(rows_CD: Array, tuning: ExchangeTuning) -> int:
  """Values that fit into a worker's buffer, a multiple of the threads that fill it."""
  length = tuning.tile_bytes // rows_CD.dtype.itemsize // LANES * LANES
  if not length:
    raise ValueError(
      f"tile_bytes: expected at least {LANES * rows_CD.dtype.itemsize} for {rows_CD.dtype}, "
      f"got {tuning.tile_bytes}"
    )
  return length


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
