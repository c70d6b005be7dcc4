"""The gradient of grouped matmuls to their weights: per slot, a contraction over its rows.

If the multiplying warpgroups take turns, a stage belongs to one of them, which can blank out the
rows of other groups in it. Else those rows are gathered before.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import matmul_layout as layout
from pallas_kernels import matmul_pipeline as pipeline
from pallas_kernels.branches import when
from pallas_kernels.matmul_layout import DEPTH, Array, Tile, Tuning
from pallas_kernels.matmul_pipeline import Ring, Work
from pallas_kernels.tiles import Transfer

_BORDER = 2 * DEPTH  # room for the rows of a group outside its aligned part: at most 7 + 63


@functools.partial(jax.jit, static_argnames=("num_home", "tuning"))
def grouped_matmul_wgrad(
  rows_CK: Array,
  grad_CN: Array,
  group_size_P: Array,
  num_home: int,
  *,
  tuning: Tuning | None = None,
) -> tuple[Array, Array]:
  """The gradient of ``grouped_matmul`` to its weights: per slot, ``rows.T @ grad``.

  Args:
    rows_CK: ``[C, K]`` bfloat16. Rows at or beyond the sum of the group sizes may hold anything,
      NaN included, and so may those of ``grad_CN``.
    grad_CN: ``[C, N]`` bfloat16.
    group_size_P: ``[M + S]`` int32, rows per slot; the sum is at most C.
    num_home: M, at least 1.
    tuning: how the kernel is laid out.

  Returns:
    ``[M, K, N]`` and ``[S, K, N]``, float32; an empty slot's gradient is zero.

  Raises:
    NotImplementedError: a dtype other than bfloat16, K or N no multiple of 128, C no multiple
      of 8, or below 256.
    ValueError: shapes that do not fit together.
  """
  return wgrad_beside(None, rows_CK, grad_CN, group_size_P, num_home, tuning=tuning)[0]


def wgrad_beside(
  transfer: Transfer | None,
  rows_CK: Array,
  grad_CN: Array,
  group_size_P: Array,
  num_home: int,
  *,
  tuning: Tuning | None = None,
) -> tuple[tuple[Array, Array], Any]:
  """``grouped_matmul_wgrad`` and the result of a transfer that runs beside it."""
  (capacity, depth), (num_slots,), cols = rows_CK.shape, group_size_P.shape, grad_CN.shape[1]
  layout.expect_shape("grad_CN", grad_CN, (capacity, cols))
  if not 1 <= num_home <= num_slots:
    raise ValueError(f"num_home: expected 1 to {num_slots}, the slots, got {num_home}")
  layout.expect_bfloat16(rows_CK=rows_CK, grad_CN=grad_CN)
  layout.expect_multiple("K", depth, 128)
  layout.expect_multiple("N", cols, 128)
  layout.expect_multiple("C", capacity, 8)
  layout.expect_capacity(capacity)
  tuning = tuning or layout.make_room(transfer is not None)
  if tuning.schedule == "deferred":
    raise ValueError('tuning: expected "together" or "in_turns", got "deferred"')
  tile = layout.choose_tile(depth, cols, 1, tuning)
  if (cols // tile.cols) % tuning.cluster:
    tuning = dataclasses.replace(tuning, cluster=1)
  num_replica = num_slots - num_home
  out_type = functools.partial(jax.typeof(rows_CK).update, dtype=jnp.dtype(jnp.float32))
  operands: tuple[Array, ...]
  if tile.strips == 1:
    operands = covering_steps(group_size_P), rows_CK, grad_CN
  else:
    table, border_row_PB, mine_PB = inner_steps(capacity, group_size_P)

    def border(x_CX: Array) -> Array:
      x_PBX = jnp.where(mine_PB[..., None], x_CX[border_row_PB], jnp.zeros((), x_CX.dtype))
      return x_PBX.reshape(-1, x_CX.shape[1])

    operands = table, rows_CK, grad_CN, border(rows_CK), border(grad_CN)
  grads, transferred = pipeline.launch(
    functools.partial(_body, num_home=num_home, tile=tile, tuning=tuning),
    *operands,
    out_type=[out_type(shape=(n, depth, cols)) for n in (num_home, num_replica) if n],
    shared=[
      [
        pipeline.smem(tuning.stages, tile.strips, DEPTH, tile.strip),
        pipeline.smem(tuning.stages, DEPTH, tile.cols),
      ]
    ],
    loads=tile.strips + 1,
    tile=tile,
    tuning=tuning,
    kernel_name="grouped_matmul_wgrad",
    beside=transfer,
  )
  replica = grads[1] if num_replica else jnp.zeros((0, depth, cols), jnp.float32)
  return (grads[0], replica), transferred


def covering_steps(group_size_P: Array) -> Array:
  """The stages that hold each group's rows, from the last row before it that TMA can address.

  Returns:
    ``[4, P]`` int32, the largest group first, since what a block does last should be short:
    slot, first row (a multiple of 8), the group's first row after that, and the one behind its
    last.
  """
  start_P = layout.sum_before(group_size_P)
  head_P = start_P % 8
  lines_3P = jnp.stack([start_P - head_P, head_P, head_P + group_size_P])
  return _largest_first(group_size_P, lines_3P)


def inner_steps(capacity: int, group_size_P: Array) -> tuple[Array, Array, Array]:
  """The stages of each group's rows, without those of other groups.

  The rows between the first that TMA can address (a multiple of 8) and the last whole stage
  after it are loaded in place. The few before and after are gathered into ``_BORDER`` rows per
  slot, filled up with zeros.

  Returns:
    ``[4, P]`` int32, the largest group first: slot, first aligned row, stages of border rows,
    stages in all; ``[P, _BORDER]`` int32, the row of each border row; and whether it is one.
  """
  start_P = layout.sum_before(group_size_P)
  head_P = jnp.minimum(-start_P % 8, group_size_P)
  aligned_P = (group_size_P - head_P) // DEPTH
  border_P = group_size_P - aligned_P * DEPTH
  border_steps_P = -(-border_P // DEPTH)
  lines_3P = jnp.stack([start_P + head_P, border_steps_P, border_steps_P + aligned_P])
  i_1B = jnp.arange(_BORDER, dtype=jnp.int32)[None, :]
  in_head_PB = i_1B < head_P[:, None]
  row_PB = start_P[:, None] + i_1B + jnp.where(in_head_PB, 0, aligned_P[:, None] * DEPTH)
  table_4P = _largest_first(group_size_P, lines_3P)
  return table_4P, jnp.minimum(row_PB, capacity - 1), i_1B < border_P[:, None]


def _largest_first(group_size_P: Array, lines_XP: Array) -> Array:
  """The slots by size, and these lines in that order, ``[1 + X, P]``."""
  slot_P = jnp.arange(group_size_P.shape[0], dtype=jnp.int32)
  larger_PP = group_size_P[:, None] > group_size_P[None, :]
  equal_PP = group_size_P[:, None] == group_size_P[None, :]
  earlier_PP = slot_P[:, None] < slot_P[None, :]
  rank_P = jnp.sum(larger_PP | (equal_PP & earlier_PP), axis=0, dtype=jnp.int32)
  lines_XP = jnp.concatenate([slot_P[None], lines_XP])
  ranked_PP = rank_P[None, :] == slot_P[:, None]
  return jnp.sum(jnp.where(ranked_PP[None], lines_XP[:, None, :], 0), axis=2, dtype=jnp.int32)


def _body(
  inputs: Sequence[Any],
  outs: Sequence[Any],
  views: Sequence[Any],
  full: Any,
  free: Any,
  *,
  num_home: int,
  tile: Tile,
  tuning: Tuning,
) -> None:
  in_turns = tile.strips == 1
  (table, *operands), ((lhs, rhs),) = inputs, views
  num_rows = outs[0].shape[1] // tile.rows
  num_cols = outs[0].shape[2] // tile.cols // tuning.cluster
  slot_tiles = num_rows * num_cols
  strip = pipeline.strip_index(tile)
  ring = Ring(full, free, tuning.stages)

  def describe(t: Array, rank: Array) -> Work:
    index, in_slot = (f(t, jnp.int32(slot_tiles)) for f in (lax.div, lax.rem))
    band = tuning.band // (tile.cols * tuning.cluster)
    row, col = layout.position(in_slot, num_rows, num_cols, band)
    corner = row * tile.rows, (col * tuning.cluster + rank) * tile.cols
    slot, *lines = (table[line, index] for line in range(4))
    if in_turns:
      first_row, begin, end = lines
      steps = lax.select(end > begin, lax.div(end + DEPTH - 1, jnp.int32(DEPTH)), jnp.int32(0))
      return Work(steps, (slot, first_row, begin, end, *corner))
    first_row, border_steps, steps = lines
    return Work(steps, (slot, first_row, border_steps, border_steps, *corner))

  def load(work: Work, before: Array, owner: Array) -> None:
    slot, aligned, border_steps, _, out_row, out_col = work.rest

    def load_steps(rows: Any, grad: Any, first_row: Array, before: Array, count: Array) -> None:
      def step(k: Array, _: None) -> None:
        stage, loaded = ring.acquire(before + k, owner)
        depth = pl.ds(pl.multiple_of(first_row + k * DEPTH, 8), DEPTH)
        for strip in range(tile.strips):
          source = rows.at[depth, pl.ds(out_row + strip * tile.strip, tile.strip)]
          pipeline.load_common_rows(source, lhs.at[stage, strip], loaded, tuning)
        source = grad.at[depth, pl.ds(out_col, tile.cols)]
        plgpu.copy_gmem_to_smem(source, rhs.at[stage], loaded)

      lax.fori_loop(0, count, step, None)

    if in_turns:
      rows, grad = operands
      load_steps(rows, grad, aligned, before, work.steps)
    else:
      rows, grad, border_rows, border_grad = operands
      load_steps(border_rows, border_grad, slot * _BORDER, before, border_steps)
      load_steps(rows, grad, aligned, before + border_steps, work.steps - border_steps)

  def compute(work: Work, before: Array, owner: Array, _: Any) -> None:
    slot, _, begin, end, out_row, out_col = work.rest

    def blank(k: Array, stage: Array) -> None:
      """Zeroes the rows of other groups, which may be NaN, in both operands."""
      first, behind = begin - k * DEPTH, end - k * DEPTH

      @when((first > 0) | (behind < DEPTH))
      def _() -> None:
        for operand in (lhs.at[stage, 0], rhs.at[stage]):
          row = plgpu.broadcasted_iota(jnp.int32, operand.shape, 0, layout=plgpu.Layout.WGMMA)
          mine = (row >= first) & (row < behind)
          operand[...] = jnp.where(mine, operand[...], jnp.zeros((), operand.dtype))
        plgpu.commit_smem()

    def multiply(acc: Any) -> Array:
      def wgmma(stage: Array) -> None:
        plgpu.wgmma(acc, lhs.at[stage, strip].transpose((1, 0)), rhs.at[stage])

      prepare = blank if in_turns else None
      ring.multiply(owner, before, work.steps, wgmma, prepare=prepare)
      return acc[...]

    product = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((tile.strip, tile.cols)))

    def store(out: Any, slot: Array) -> None:
      # A quad of threads holds 32 consecutive bytes: straight to memory is as good as by TMA,
      # and there is nothing to wait for.
      rows = pl.ds(out_row + strip * tile.strip, tile.strip)
      out[slot, rows, pl.ds(out_col, tile.cols)] = product

    when(slot < num_home)(lambda: store(outs[0], slot))
    when(slot >= num_home)(lambda: store(outs[-1], slot - num_home))

  num_tiles = table.shape[1] * slot_tiles
  pipeline.persist(num_tiles, describe, load, compute, ring, tile, tuning)
