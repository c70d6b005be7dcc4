"""Tokens to the rows where they are computed, over NVLink.

Two ranks, one token of rank 0 with three experts: two on rank 1, in its rows 4 and 9, one at home::

  rank 0: token t ──► row 2            (copied)
                 └──► rank 1, row 4    (pushed over NVLink, once)
                      rank 1: row 4 ──► row 9   (copied there, when row 4 has landed)

Rank 1 learns of rows 4 and 9 from a line that comes with the token (``told``).
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import support, varying
from pallas_kernels.launch import launch
from pallas_kernels.support import Array, AxisName
from pallas_kernels.transfer import chunks, dispatch_kernel, peers, told
from pallas_kernels.transfer import tiles as tiling
from pallas_kernels.transfer.chunks import Deal
from pallas_kernels.transfer.dispatch_kernel import SCALES, VALUES
from pallas_kernels.transfer.scales import SCALED, num_scales
from pallas_kernels.transfer.tiles import Tiles
from pallas_kernels.transfer.tuning import ExchangeTuning, dispatching


class Dispatched(NamedTuple):
  """What a dispatch brings to a rank.

  Attributes:
    arrays: ``[C, ...]`` each, the rows. Those that no token feeds are not written.
    received_GTK: ``[G, T, K]`` int32, the rows on this rank of the assignments of all ranks, −1 for
      those that other ranks compute.
    value_GTK: ``[G, T, K]`` float32, the numbers of all assignments of all ranks, if any were sent.
  """

  arrays: list[Array]
  received_GTK: Array
  value_GTK: Array | None


@functools.partial(jax.jit, static_argnames=("capacity", "axis_name", "tuning"))
def dispatch(
  arrays: Sequence[Array],
  dest_TK: Array,
  row_TK: Array,
  value_TK: Array | None = None,
  *,
  capacity: int,
  axis_name: AxisName,
  over: Sequence[Array] | None = None,
  rank: Array | None = None,
  tuning: ExchangeTuning | None = None,
) -> Dispatched:
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
    value_TK: ``[T, K]`` float32, such as gates, which all ranks are told beside the rows.
    capacity: C, the rows of a rank.
    axis_name: the expert mesh axis, of size G.
    over: what is returned, before: rows that no token feeds stay as they are there. ``None``: they
      hold anything, NaN included.
    rank: ``[]`` int32, this rank along the axis, if it is known (see ``Gathered``).
    tuning: workers and tiles; must be the same on all ranks.

  Raises:
    NotImplementedError: a dtype or a mesh that the kernel does not handle, or rows that are no
      multiple of 16 bytes.
    ValueError: shapes that do not fit, or no array.
  """
  arrays = list(arrays)
  if not arrays:
    raise ValueError("arrays: expected one or more, got none")
  _check(arrays, dest_TK, row_TK, value_TK, capacity, axis_name)
  tables = dest_TK, row_TK, value_TK
  return _launch(arrays, None, *tables, capacity, axis_name, over, rank, tuning)


@functools.partial(jax.jit, static_argnames=("dtype", "capacity", "axis_name", "tuning"))
def dispatch_scaled(
  value_TD: Array,
  scale_TB: Array,
  dest_TK: Array,
  row_TK: Array,
  value_TK: Array | None = None,
  *,
  dtype: Any,
  capacity: int,
  axis_name: AxisName,
  over: Array | None = None,
  rank: Array | None = None,
  tuning: ExchangeTuning | None = None,
) -> Dispatched:
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
    value_TK: the same.
    dtype: of the rows: bfloat16, float16 or float32.
    capacity: C, the rows of a rank.
    axis_name: the expert mesh axis.
    over: as for ``dispatch``.
    rank: the same.
    tuning: workers and tiles; must be the same on all ranks.

  Returns:
    The rows, ``[C, D]`` in ``dtype``, and what was told.

  Raises:
    NotImplementedError: a dtype, a width or a mesh that the kernel does not handle.
    ValueError: shapes that do not fit.
  """
  _check([value_TD, scale_TB], dest_TK, row_TK, value_TK, capacity, axis_name)
  _check_scaled(value_TD, scale_TB, dtype)
  arrays, tables = [scale_TB, value_TD], (dest_TK, row_TK, value_TK)
  before = None if over is None else [over]
  return _launch(arrays, jnp.dtype(dtype), *tables, capacity, axis_name, before, rank, tuning)


def _launch(
  arrays: Sequence[Array],
  product: jnp.dtype | None,
  dest_TK: Array,
  row_TK: Array,
  value_TK: Array | None,
  capacity: int,
  axis_name: AxisName,
  over: Sequence[Array] | None,
  rank: Array | None,
  tuning: ExchangeTuning | None,
) -> Dispatched:
  """The rows of all arrays; or those of scales times values, in the dtype of the product."""
  scaled = product is not None
  tuning = (tuning or dispatching(dest_TK.shape[0], scaled=scaled)).placed()
  returned = landing = [((capacity, *array.shape[1:]), array.dtype) for array in arrays]
  if product is not None:
    returned = [((capacity, *arrays[VALUES].shape[1:]), product)]
  before = list(over or [])
  if before and [(each.shape, each.dtype) for each in before] != returned:
    raise ValueError(
      f"over: expected {_described(returned)}, got "
      f"{_described([(each.shape, each.dtype) for each in before])}"
    )
  others, num_ranks = peers.are_any(axis_name), lax.axis_size(axis_name)
  if not dest_TK.size:
    nothing_GTK = jnp.zeros((num_ranks, *dest_TK.shape), jnp.int32)
    values_GTK = None if value_TK is None else nothing_GTK.astype(jnp.float32)
    arrays = before or [jnp.zeros(*each) for each in returned]
    return Dispatched(arrays, nothing_GTK, values_GTK)
  tiles = tiling.cut("arrays", arrays, tuning)
  if product is not None and tiles[SCALES].length < arrays[SCALES].shape[1]:
    raise NotImplementedError(f"scale_TB: expected a row that fits a tile of {tuning}")
  rank = peers.rank(axis_name) if rank is None else rank
  num_tokens, top_k = dest_TK.shape
  deal = Deal.of(num_tokens, top_k * (1 + (others and value_TK is not None)), tuning)
  written_TK = chunks.leads(dest_TK)
  if product is None:  # what this rank computes itself it writes into all rows at once
    written_TK |= dest_TK == rank
  told_TK = value_TK if others else None
  line_XL = told.line_table(deal, dest_TK, row_TK, written_TK, told_TK, capacity)
  line_XL, *flat = varying.vary_alike(
    line_XL, *[array.reshape(array.shape[0], -1) for array in (*arrays, *before)]
  )
  rows, before = flat[: len(arrays)], flat[len(arrays) :]
  # The rows that are returned come first, whether they are new or not.
  outs = [] if before else returned
  outs = outs if product is None else [*outs, *landing]
  types = [
    jax.typeof(rows[0]).update(shape=(capacity, math.prod(shape[1:])), dtype=dtype)
    for shape, dtype in outs
  ]
  if others:
    types.append(jax.typeof(line_XL).update(shape=(num_ranks, *line_XL.shape)))
  filled = launch(
    functools.partial(
      dispatch_kernel.body,
      tiles=tiles,
      scaled=scaled,
      deal=deal,
      top_k=top_k,
      capacity=capacity,
      axis_name=axis_name,
      tuning=tuning,
    ),
    [line_XL, *rows],
    out_type=types,
    updated=before,
    reaches_others=others,
    grid=(tuning.num_blocks,),
    grid_names=(tiling.BLOCK_AXIS,),
    num_threads=tuning.workers,
    thread_name=tiling.WORKER_AXIS,
    scratch_types=[
      plgpu.SMEM((tuning.workers, deal.line), jnp.int32),
      plgpu.Barrier(num_barriers=tuning.workers),
      plgpu.SemaphoreType.REGULAR((tuning.workers, num_ranks)),
      *tiling.buffers(tiles, tuning),
      *([] if product is None else [_product_buffer(tiles, product, tuning)]),
    ],
    kernel_name="dispatch" if axis_name else "place",
  )
  if others:
    known = told.read(deal, filled[len(outs)], top_k, capacity, rank)
  else:  # a rank without peers knows what it receives
    received_TK = jnp.where(dest_TK >= 0, row_TK, -1)
    known = received_TK[None], None if value_TK is None else value_TK[None]
  filled = filled[len(types) :] if before else filled[: len(returned)]
  arrays = [each.reshape(shape) for each, (shape, _) in zip(filled, returned, strict=True)]
  return Dispatched(arrays, *known)


def _described(arrays: Sequence[tuple[tuple[int, ...], Any]]) -> str:
  return ", ".join(f"{dtype} {shape}" for shape, dtype in arrays)


def _product_buffer(tiles: Sequence[Tiles], dtype: jnp.dtype, tuning: ExchangeTuning) -> Any:
  most_blocks = max(-(-each.length // SCALED) for each in tiles if each.array == VALUES)
  return plgpu.SMEM((tuning.workers, most_blocks * SCALED), dtype)


def _check(
  arrays: Sequence[Array],
  dest_TK: Array,
  row_TK: Array,
  value_TK: Array | None,
  capacity: int,
  axis_name: AxisName,
) -> None:
  support.check_mesh(axis_name)
  chunks.check_assignments(dest_TK)
  alike = {"row_TK": (row_TK, jnp.int32), "value_TK": (value_TK, jnp.float32)}
  for name, (array, dtype) in alike.items():
    if array is not None and (array.shape != dest_TK.shape or array.dtype != dtype):
      expected = f"{jnp.dtype(dtype)} {dest_TK.shape}"
      raise ValueError(f"{name}: expected {expected}, got {array.dtype} {array.shape}")
  num_ranks = lax.axis_size(axis_name)
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
