"""The gradient of grouped matmuls to their weights: per slot, a contraction over its rows.

Nothing is multiplied while a tile of the result is stored: 128 KB of float32, at about 32 bytes a
cycle of an SM, take as long as four steps. Registers do not hold the sums of two tiles, and
multiplying and loading already take shared memory's whole rate, so that stores which wait there
cost what they save (measured: docs/lab/kernels.md).

Slot s gets the product of its rows alone, ``rows[s].T @ grads[s]``: a slot of 3 rows contracts 3,
and a slot without rows gets zeros, which the loading warpgroup writes beside (``zeros.py``)::

      rows.T               grads
  D [ 0 0 0 | 1 1 ]   ×   [ 0 0 0 | 1 1 ].T F    ──►   slot 0, slot 1
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels.matmul import layout, pipeline, some_rows, zeros
from pallas_kernels.matmul.deal import Claims, InTurn
from pallas_kernels.matmul.layout import (
  DEPTH,
  MULTIPLYING,
  SWIZZLE,
  TILE_ROWS,
  UNIT,
  MatmulTuning,
  Tile,
)
from pallas_kernels.matmul.pipeline import Ring, Work
from pallas_kernels.matmul.zeros import Zeros
from pallas_kernels.sums import ceil_div, sum_lines
from pallas_kernels.support import Array
from pallas_kernels.transfer.tiles import Transfer
from pallas_kernels.warp.branches import for_size, when

_UNEVEN = 4  # times the mean: a group so large makes it worth while to claim tiles
_CLEARED = 32  # rows made zero at a time: four tiles, one for each warp
# A tile takes a while to store: one warpgroup does while the other multiplies. With each layout,
# what a product takes over the first one on an H200, as smaller tiles load more for it
# (docs/lab/kernels.md, Weight gradients in turns).
_IN_TURNS = (
  (MatmulTuning("in_turns", rows=128, cols=192), 1.0),
  (MatmulTuning("in_turns", rows=192, cols=128), 1.035),
  (MatmulTuning("in_turns", rows=128, cols=128, stages=6), 1.05),
)
# Rows and columns stored at a time, as wide as the widest swizzle.
_PIECES = {jnp.dtype(jnp.float32): (UNIT, UNIT // 2), jnp.dtype(jnp.bfloat16): (UNIT, UNIT)}


def turns_for(depth: int, cols: int) -> MatmulTuning:
  """The layout of ``grouped_matmul_wgrad`` by default: of two tiles in turns, which fill it best.

  >>> found = [turns_for(*sizes) for sizes in ((2048, 768), (3072, 1024), (4096, 1408))]
  >>> [(each.rows, each.cols) for each in found]
  [(128, 192), (192, 128), (128, 128)]

  Args:
    depth: K, rows of an expert's gradient.
    cols: N, its columns.
  """

  def cost(each: tuple[MatmulTuning, float]) -> float:
    tuning, of_product = each
    tile = layout.choose_tile(depth, cols, 1, tuning)
    return of_product * math.prod(
      -(-size // part) * part for size, part in ((depth, tile.rows), (cols, tile.cols))
    )

  return min(_IN_TURNS, key=cost)[0]


@functools.partial(jax.jit, static_argnames=("num_home", "dtype", "tuning"))
def grouped_matmul_wgrad(
  rows_CK: Array,
  grad_CN: Array,
  group_size_P: Array,
  num_home: int,
  *,
  filled_S: Array | None = None,
  into_MKN: Array | None = None,
  dtype: DTypeLike = jnp.float32,
  tuning: MatmulTuning | None = None,
) -> tuple[Array, Array]:
  """The gradient of ``grouped_matmul`` to its weights: per slot, ``rows.T @ grad``.

  Args:
    rows_CK: ``[C, K]`` bfloat16. Rows at or beyond the sum of the group sizes may hold anything,
      NaN included, and so may those of ``grad_CN``. What is not finite in a slot's own rows may
      reach the gradients of slots next to it.
    grad_CN: ``[C, N]`` bfloat16.
    group_size_P: ``[M + S]`` int32, rows per slot; the sum is at most C.
    num_home: M, at least 1.
    filled_S: ``[S]`` bool, the replica slots that hold an expert; ``None``: all. The others have
      no rows.
    into_MKN: ``[M, K, N]`` of ``dtype``, what to add the rounded gradients of home slots to, in
      its memory if nothing else needs it. Slots without rows are not touched. ``None``: zeros.
    dtype: of the gradients, float32 or bfloat16, to which the sums are rounded.
    tuning: how the kernel is laid out; ``None``: as ``turns_for`` says.

  Returns:
    ``[M, K, N]`` and ``[S, K, N]`` of ``dtype``. The gradient of a slot without rows is zero, but
    that of a slot which is not filled is not written: it holds anything.

  Raises:
    NotImplementedError: rows of a dtype other than bfloat16, a ``dtype`` other than these two, or K
      or N no multiple of 64.
    ValueError: shapes that do not fit together.
  """
  return wgrad_beside(
    *(None, rows_CK, grad_CN, group_size_P, num_home),
    filled_S=filled_S,
    into_MKN=into_MKN,
    dtype=dtype,
    tuning=tuning,
  )[0]


def wgrad_beside(
  transfer: Transfer | None,
  rows_CK: Array,
  grad_CN: Array,
  group_size_P: Array,
  num_home: int,
  *,
  filled_S: Array | None = None,
  into_MKN: Array | None = None,
  dtype: DTypeLike = jnp.float32,
  tuning: MatmulTuning | None = None,
) -> tuple[tuple[Array, Array], Any]:
  """``grouped_matmul_wgrad`` and the result of a transfer that runs beside it."""
  (capacity, depth), (num_slots,), cols = rows_CK.shape, group_size_P.shape, grad_CN.shape[1]
  layout.expect_shape("grad_CN", grad_CN, (capacity, cols))
  if not 1 <= num_home <= num_slots:
    raise ValueError(f"num_home: expected 1 to {num_slots}, the slots, got {num_home}")
  layout.expect_bfloat16(rows_CK=rows_CK, grad_CN=grad_CN)
  layout.expect_multiple("K", depth, UNIT)
  layout.expect_multiple("N", cols, UNIT)
  tuning = tuning or turns_for(depth, cols)
  if tuning.schedule == "deferred":
    raise ValueError(f"tuning: expected 'together' or 'in_turns', got {tuning.schedule!r}")
  tile = layout.choose_tile(depth, cols, 1, tuning)
  if -(-cols // tile.cols) % tuning.cluster:
    tuning = dataclasses.replace(tuning, cluster=1)
  tuning = zeros.with_room(tile, tuning.placed())
  if more := max(-(-capacity // TILE_ROWS) * TILE_ROWS, DEPTH) - capacity:
    rows_CK, grad_CN = (jnp.pad(x, [(0, more), (0, 0)]) for x in (rows_CK, grad_CN))
  num_replica = num_slots - num_home
  if filled_S is not None:
    layout.expect_shape("filled_S", filled_S, (num_replica,))
  adds = into_MKN is not None
  if (dtype := jnp.dtype(dtype)) not in _PIECES:
    raise NotImplementedError(f"dtype: expected float32 or bfloat16, got {dtype}")
  if adds:
    layout.expect_shape("into_MKN", into_MKN, (num_home, depth, cols))
    if into_MKN.dtype != dtype:
      raise ValueError(f"into_MKN: expected {dtype}, got {into_MKN.dtype}")
  slots = [n for n in (num_home, num_replica) if n]
  # Where all blocks have equally many tiles of each group, none makes up for another.
  differ = math.prod(_tiles_of_slot(depth, cols, tile, tuning)) % tuning.clusters
  grads, transferred = pipeline.launch(
    functools.partial(_body, num_home=num_home, adds=adds, tile=tile, tuning=tuning),
    *(inner_steps(group_size_P, num_home, filled_S, adds), rows_CK, grad_CN),
    out_type=[jax.typeof(rows_CK).update(shape=(n, depth, cols), dtype=dtype) for n in slots],
    shared=[
      [
        pipeline.smem(tuning.stages, tile.strips, DEPTH, tile.strip),
        pipeline.smem(tuning.stages, DEPTH, tile.cols),
        pipeline.smem(MULTIPLYING, tuning.buffers, *_PIECES[dtype], dtype=dtype),
        zeros.memory(dtype),
      ]
    ],
    loads=tile.strips + 1,
    tile=tile,
    tuning=tuning,
    kernel_name="grouped_matmul_wgrad",
    into=(into_MKN,) if adds else (),
    beside=transfer,
    claims=_is_uneven if differ and tuning.cluster == 1 else None,
  )
  replica = grads[1] if num_replica else jnp.zeros((0, depth, cols), dtype)
  return (grads[0], replica), transferred


def inner_steps(
  group_size_P: Array, num_home: int, filled_S: Array | None, adds: bool = False
) -> Array:
  """Which rows are contracted for each slot.

  TMA loads stages that begin at a multiple of 8. So the first and the last one of a group may
  have rows of others, which must add nothing.

  Returns:
    ``[8, P]`` int32, the largest group first: slot, first row of the first stage, rows from there
    to the group, to its end, and to the end of all groups; and in the last lines the number of
    slots with rows, of slots to write, and of steps.
  """
  slot_P = jnp.arange(group_size_P.shape[0], dtype=jnp.int32)
  some_P = jnp.ones(group_size_P.shape, bool)
  home_M = (group_size_P > 0 if adds else some_P)[:num_home]
  filled_P = jnp.concatenate([home_M, some_P[num_home:] if filled_S is None else filled_S])
  size_P = jnp.where(filled_P, group_size_P, -1)
  size_P1, slot_P1 = size_P[:, None], slot_P[:, None]
  earlier_PP = slot_P[None, :] < slot_P1
  larger_PP = (size_P[None, :] > size_P1) | ((size_P[None, :] == size_P1) & earlier_PP)
  start_P, rank_P, used_P = sum_lines(
    jnp.where(earlier_PP, group_size_P[None, :], 0),
    larger_PP.astype(jnp.int32),
    jnp.broadcast_to(group_size_P[None, :], larger_PP.shape),
  )
  before_P = lax.rem(start_P, jnp.int32(TILE_ROWS))
  ranked_PP = rank_P[None, :] == slot_P1
  first_P = start_P - before_P
  end_P = before_P + group_size_P
  lines = slot_P, first_P, before_P, end_P, used_P - first_P
  of_all = size_P > 0, filled_P, jnp.where(size_P > 0, ceil_div(end_P, DEPTH), 0)
  return sum_lines(
    *(jnp.where(ranked_PP, line_P[None, :], 0) for line_P in lines),
    *(jnp.broadcast_to(x_P[None, :].astype(jnp.int32), ranked_PP.shape) for x_P in of_all),
  )


def _tiles_of_slot(height: int, width: int, tile: Tile, tuning: MatmulTuning) -> tuple[int, int]:
  """How many there are down, and across: of those, clusters of blocks compute some together."""
  return -(-height // tile.rows), -(-width // tile.cols) // tuning.cluster


def _is_uneven(inputs: Sequence[Any]) -> Array:
  """Whether the largest group has many times the steps of the mean one.

  Dealt in turn, some blocks have a tile more of it than others. Where tiles are claimed, smaller
  ones make up for that later. Where they are alike, blocks that claim them do not end together.
  """
  table, *_ = inputs
  return ceil_div(table[3, 0], DEPTH) * table[5, 0] > _UNEVEN * table[7, 0]


def _body(
  inputs: Sequence[Any],
  outs: Sequence[Any],
  views: Sequence[Any],
  full: Any,
  free: Any,
  both: Any,
  dealt: InTurn | Claims,
  *,
  num_home: int,
  adds: bool,
  tile: Tile,
  tuning: MatmulTuning,
) -> None:
  (table, rows, grad), (lhs, rhs, staged, piece) = inputs, views[0]
  height, width = outs[0].shape[1:]
  num_rows, num_cols = _tiles_of_slot(height, width, tile, tuning)
  slot_tiles = num_rows * num_cols
  strip, me = pipeline.strip_index(tile), pipeline.warpgroup()
  ring = Ring(full, free, tuning.stages)
  # Rows that a group's last stage may have; blocks of a cluster share the rows evenly.
  fewest = some_rows.ROWS if tuning.cluster == 1 else DEPTH
  ends = tuple(range(fewest, DEPTH + 1, fewest))

  def describe(t: Array, rank: Array) -> Work:
    index, in_slot = (f(t, jnp.int32(slot_tiles)) for f in (lax.div, lax.rem))
    band = tuning.band // (tile.cols * tuning.cluster)
    row, col = layout.position(in_slot, num_rows, num_cols, band)
    # The last tile, or strip, may begin inside the one before: both compute the same bits.
    first_col = (col * tuning.cluster + rank) * tile.cols
    col = lax.min(first_col, jnp.int32(width - tile.cols))
    slot, first_row, begin, end, grouped = (table[line, index] for line in range(5))
    overlap = (first_col - col,) if adds else ()
    return Work(
      ceil_div(end, DEPTH), (slot, first_row, begin, end, grouped, row * tile.rows, col, *overlap)
    )

  # Blocks that run beside a transfer are numbered from its own on.
  cluster = lax.rem(dealt.cluster, jnp.int32(tuning.clusters))
  block = cluster * tuning.cluster + pipeline.cluster_rank()
  with_rows, written = table[5, 0], table[6, 0]
  empty = Zeros(
    *(piece, outs, lambda i: table[0, with_rows + i], written - with_rows),
    *(block, tuning.clusters * tuning.cluster),
  )
  num_empty = empty.count
  when(me == MULTIPLYING)(empty.fill)

  def strip_row(out_row: Array, strip: Array | int) -> Array:
    return lax.min(out_row + strip * tile.strip, jnp.int32(height - tile.strip))

  def load(work: Work, before: Array, owner: Array) -> None:
    _, first_row, _, end, _, out_row, out_col, *_ = work.rest

    def step(k: Array, count: int) -> None:
      """Loads so many rows into a stage."""
      stage, loaded = ring.acquire(before + k, owner)
      depth = pl.ds(pl.multiple_of(first_row + k * DEPTH, TILE_ROWS), count)
      for strip in range(tile.strips):
        source = rows.at[depth, pl.ds(strip_row(out_row, strip), tile.strip)]
        target = lhs.at[stage, strip, pl.ds(0, count)]
        pipeline.load_common_rows(source, target, loaded, tuning)
      source = grad.at[depth, pl.ds(out_col, tile.cols)]
      plgpu.copy_gmem_to_smem(source, rhs.at[stage, pl.ds(0, count)], loaded)
      when(before + k < num_empty)(lambda: empty.write(before + k))

    last = work.steps - 1
    lax.fori_loop(0, last, lambda k, _: step(k, DEPTH), None)
    for_size(end - last * DEPTH, ends, functools.partial(step, last))

  def clear_grad(stage: Array, end: Array) -> None:
    """Makes rows behind all groups zero, which may hold NaN; the warpgroups share the columns."""

    def clear(part: Any, end: Array) -> None:
      wide = plgpu.Layout.SMEM_GMEM_COPY(part.shape, part.dtype, SWIZZLE)  # 16 bytes a thread
      row = plgpu.broadcasted_iota(jnp.int32, part.shape, 0, layout=wide)
      values = plgpu.load(part, layout=wide, optimized=False)
      part[...] = jnp.where(row < end, values, jnp.zeros((), part.dtype))

    # Few at a time, as the sums leave few registers.
    for row, col in itertools.product(range(0, DEPTH, _CLEARED), range(0, tile.cols, UNIT)):
      mine = lax.rem(jnp.int32(col // UNIT), jnp.int32(tile.strips)) == strip
      part = rhs.at[stage, pl.ds(row, _CLEARED), pl.ds(col, UNIT)]
      when(mine & (end < row + _CLEARED))(functools.partial(clear, part, end - row))
    plgpu.commit_smem()
    if tile.strips > 1:
      plgpu.barrier_arrive(both)
      plgpu.barrier_wait(both)

  def compute(work: Work, before: Array, owner: Array, _: Any) -> None:
    slot, _, begin, end, grouped, out_row, out_col, *overlap = work.rest
    strip_start = strip_row(out_row, strip)

    def multiply(acc: Any) -> Array:
      def wgmma(k: Array | int, stage: Array, sums: Array) -> Array:
        first, behind, of_groups = (x - k * DEPTH for x in (begin, end, grouped))
        when(of_groups < DEPTH)(lambda: clear_grad(stage, of_groups))
        return some_rows.add_product(sums, lhs.at[stage, strip], rhs.at[stage], first, behind)

      zero = plgpu.wgmma_accumulator_load(acc, wait_n=None)  # fenced, as products need it
      return ring.multiply(owner, before, work.steps, wgmma, sums=zero)

    product = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((tile.strip, tile.cols)))

    def store(out: Any, slot: Array, adds: bool = False) -> None:
      """A piece at a time in each buffer, which is free once TMA has read what was in it."""
      piece_rows, piece_cols = _PIECES[out.dtype]
      pieces = itertools.product(range(0, tile.strip, piece_rows), range(0, tile.cols, piece_cols))
      for i, (r, c) in enumerate(pieces):
        piece = staged.at[me, i % tuning.buffers]
        plgpu.wait_smem_to_gmem(tuning.buffers - 1, wait_read_only=True)
        part = product[r : r + piece_rows, c : c + piece_cols]
        if adds:  # what a tile or a strip shares with the one before is added once
          mine = (strip_start + r >= out_row + strip * tile.strip) & (c >= overlap[0])
          part = jnp.where(mine, part, jnp.float32(0))
        piece[...] = part.astype(out.dtype)
        plgpu.commit_smem()
        at = pl.ds(strip_start + r, piece_rows), pl.ds(out_col + c, piece_cols)
        target = out.at[slot, *at]
        plgpu.copy_smem_to_gmem(piece, target, reduction_op="add" if adds else None)

    when(slot < num_home)(lambda: store(outs[0], slot, adds))
    if len(outs) > 1:
      when(slot >= num_home)(lambda: store(outs[1], slot - num_home))

  num_tiles = with_rows * slot_tiles
  pipeline.persist(*(num_tiles, describe, load, compute, dealt, ring, tile), loaded=empty.finish)
