"""The kernel of matmuls whose rows are grouped: each group by the weights of its slot.

A tile takes its weights from the home or from the replica operand, by its slot: the two are never
joined. Groups of rows begin anywhere; which rows a tile computes is laid out in a table first.
One kernel serves one product, a sum of products (``contractions``: their steps follow each other
into one sum) and two products of the same rows side by side (several weights in a contraction, or
one that holds several). ``Result`` says what becomes of the sums.

Two home slots and one replica slot, which the rows of slot 2 are multiplied by::

  rows    slot      weights
  ┌────┐
  │    │  0    ×    home[0]
  ├────┤
  │    │  1    ×    home[1]
  ├────┤
  │    │  2    ×    replica[0]
  └────┘
  │ NaN│  unused rows are neither read nor written
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.matmul import layout, pipeline
from pallas_kernels.matmul.layout import DEPTH, UNIT, MatmulTuning, Tile
from pallas_kernels.matmul.operands import Contraction, Result, biases_by_tile, check
from pallas_kernels.matmul.pipeline import Ring, Work
from pallas_kernels.matmul.row_tiles import row_tiles, short_comes_last
from pallas_kernels.support import Array
from pallas_kernels.transfer.tiles import Transfer
from pallas_kernels.warp.branches import when

_MOST_ROWS = 256  # of a tile


def multiply_rows(
  contractions: Sequence[Contraction],
  group_size_P: Array,
  *,
  transpose_rhs: bool,
  results: Sequence[Result],
  tuning: MatmulTuning | None,
  kernel_name: str,
  biases: Sequence[Array] = (),
  approx_math: bool = False,
  slots: range | None = None,
  into: Sequence[Array] = (),
  beside: Transfer | None = None,
) -> tuple[list[Array], Any]:
  """Multiplies and sums contractions, tile by tile.

  Args:
    contractions: of the same C, slots, N and number of weights.
    group_size_P: ``[P]`` int32.
    transpose_rhs: the weights are ``[…, N, K]``.
    results: the arrays' parts.
    tuning: of the kernel; ``None``: the default, which makes room for what runs beside it.
    kernel_name: in traces.
    biases: added to the sums in float32, of all these slots, ``[P, N]`` for each array of weights
      (``[P, split * N]``), or none.
    approx_math: whether ``results`` may use the device's approximations of exp, tanh, ….
    slots: whose weights these are, M + S of the P; ``None``: all. Rows of others are not written.
    into: the results of other slots: these are added to them, in their memory.
    beside: a transfer to run beside the matmul.

  Returns:
    The arrays, ``[C, columns]`` bfloat16; rows beyond the sum of the group sizes are not written.
    And the result of the transfer.

  Raises:
    NotImplementedError: shapes or dtypes that the kernel does not know.
    ValueError: shapes that do not fit together.
  """
  slots = range(group_size_P.shape[0]) if slots is None else slots
  capacity, cols, num_home = check(contractions, group_size_P, slots, transpose_rhs, biases)
  weights = contractions[0].weights
  tuning = tuning or layout.make_room(beside is not None)
  if biases and weights > 1 and tuning.schedule == "deferred":
    # Registers do not hold both biases beside the sums of two tiles.
    tuning = dataclasses.replace(tuning, schedule="together")
  unit = 2 * UNIT if any(result.pairs for result in results) else UNIT
  layout.expect_multiple("N", cols, unit)
  tile = layout.choose_tile(_MOST_ROWS, cols, weights, tuning, unit)
  if -(-cols // tile.cols) % tuning.cluster or capacity < tile.rows:
    tuning = dataclasses.replace(tuning, cluster=1)
  tuning = tuning.placed()
  if (short_last := tuning.short_last) is None:
    sizes = (math.prod(home.shape[1:]) for x in contractions for home in x.home)
    slot_bytes = 2 * sum(sizes)
    short_last = short_comes_last(capacity, group_size_P.shape[0], slot_bytes)
  # An operand may not be empty; without replicas the second one is never read.
  operands = [
    (
      x.rows_CK,
      [
        (home, replica if replica.shape[0] else home)
        for home, replica in zip(x.home, x.replica, strict=True)
      ],
    )
    for x in contractions
  ]
  bias_PTN = biases_by_tile(biases, cols, tile) if biases else None
  flat_operands, treedef = jax.tree.flatten((operands, bias_PTN))
  stages = tuning.stages
  stage = (tile.cols, DEPTH) if transpose_rhs else (DEPTH, tile.cols)

  # One memory, two views: TMA may start at any row only without tiling, wgmma wants tiles of 8
  # rows. For one swizzle's width of columns both name the same bytes.
  def view(rows_tiled: bool) -> list[Any]:
    return [
      pipeline.smem(stages, tile.rows, DEPTH, tiled=rows_tiled),
      pipeline.smem(2, tuning.buffers, 64, 64, tiled=not rows_tiled),
      *(pipeline.smem(stages, *stage) for _ in range(weights)),
    ]

  widths: dict[int, int] = {}
  for result in results:
    end = result.first + result.of(cols)
    widths[result.out] = max(widths.get(result.out, 0), end)
  like = jax.typeof(contractions[0].rows_CK)
  out_type = [like.update(shape=(capacity, width)) for _, width in sorted(widths.items())]
  for x, expected in zip(into, out_type, strict=bool(into)):
    layout.expect_shape("into", x, expected.shape)
    layout.expect_bfloat16(into=x)
  return pipeline.launch(
    functools.partial(
      _body,
      treedef=treedef,
      num_home=num_home,
      width=cols,
      split=contractions[0].split,
      transpose_rhs=transpose_rhs,
      results=results,
      tile=tile,
      tuning=tuning,
    ),
    row_tiles(capacity, group_size_P, tile.rows, slots, short_last),
    *flat_operands,
    out_type=out_type,
    shared=[view(False), view(True)],
    loads=1 + weights,
    tile=tile,
    tuning=tuning,
    kernel_name=kernel_name,
    approx_math=approx_math,
    into=into,
    beside=beside,
  )


def _body(
  inputs: Sequence[Any],
  outs: Sequence[Any],
  views: Sequence[Any],
  full: Any,
  free: Any,
  _: Any,
  *,
  treedef: Any,
  num_home: int,
  width: int,
  split: int,
  transpose_rhs: bool,
  results: Sequence[Result],
  tile: Tile,
  tuning: MatmulTuning,
) -> None:
  table, (operands, bias) = inputs[0], treedef.unflatten(inputs[1:])
  (lhs_load, staged, *_), (lhs, staged_store, *rhs) = views
  capacity, num_weights = outs[0].shape[0], len(rhs)
  num_cols = -(-width // tile.cols)
  steps_of = [rows.shape[1] // DEPTH for rows, _ in operands]
  num_steps = sum(steps_of)
  num_rows = table[3, 0]
  strip, me = pipeline.strip_index(tile), pipeline.warpgroup()
  ring = Ring(full, free, tuning.stages)

  def describe(t: Array, rank: Array) -> Work:
    row, col = layout.position(
      t,
      lax.max(num_rows, jnp.int32(1)),
      num_cols // tuning.cluster,
      tuning.band // (tile.cols * tuning.cluster),
    )
    # The last tile may begin inside the one before: both compute the same bits.
    col = lax.min((col * tuning.cluster + rank) * tile.cols, jnp.int32(width - tile.cols))
    return Work(jnp.int32(num_steps), (table[0, row], table[1, row], table[2, row], col))

  def load(work: Work, before: Array, owner: Array) -> None:
    slot, start, stored, col = work.rest
    cols = pl.ds(col, tile.cols)
    half = tile.rows // 2
    whole = stored > half

    def load_steps(
      rows: Any, weights: Sequence[Any], slot: Array, before: Array, count: int
    ) -> None:
      if tuning.cluster > 1:  # its blocks share the rows evenly
        load_rows(tile.rows, rows, weights, slot, before, count)
        return
      when(whole)(lambda: load_rows(tile.rows, rows, weights, slot, before, count))
      when(~whole)(lambda: load_rows(half, rows, weights, slot, before, count))

    def load_rows(
      size: int, rows: Any, weights: Sequence[Any], slot: Array, before: Array, count: int
    ) -> None:
      loaded_rows = min(size, capacity)  # what lies behind these is multiplied, not stored

      def step(k: Array, _: None) -> None:
        stage, loaded = ring.acquire(before + k, owner)
        depth = pl.ds(k * DEPTH, DEPTH)
        source = rows.at[pl.ds(start, loaded_rows), depth]
        target = lhs_load.at[stage, pl.ds(0, loaded_rows)]
        pipeline.load_common_rows(source, target, loaded, tuning)
        for i, target in enumerate(rhs):
          weight, part = weights[i // split], i % split
          columns = pl.ds(part * width + col, tile.cols) if part else cols
          at = (columns, depth) if transpose_rhs else (depth, columns)
          plgpu.copy_gmem_to_smem(weight.at[slot, *at], target.at[stage], loaded)

      lax.fori_loop(0, count, step, None)

    for (rows, weights), count in zip(operands, steps_of, strict=True):
      homes, replicas = zip(*weights, strict=True)
      when(slot < num_home)(functools.partial(load_steps, rows, homes, slot, before, count))
      when(slot >= num_home)(
        functools.partial(load_steps, rows, replicas, slot - num_home, before, count)
      )
      before += count

  def load_bias(slot: Array, col: Array) -> Array:
    t = lax.div(col + (tile.cols - 1), jnp.int32(tile.cols))
    by_column = plgpu.Layout.WGMMA.reduce(0)
    return plgpu.load(bias.at[slot, t], layout=by_column, optimized=False)

  def multiply(work: Work, before: Array, owner: Array, pending: Any) -> Any:
    """The rounded sums of this warpgroup's strip."""
    slot, _, stored, col = work.rest
    stored -= strip * tile.strip
    deferred = tuning.schedule == "deferred"
    # On its way while the rows are multiplied, where registers have room for it.
    bias_N = None if bias is None or deferred else load_bias(slot, col)

    def run(acc: Any) -> Array:
      def wgmma(size: int, stage: Array) -> None:
        lhs_rows = lhs.at[stage, pl.ds(strip * tile.strip, size)]
        for i, target in enumerate(rhs):
          weight = target.at[stage]
          part = acc.at[pl.ds(0, size), pl.ds(i * tile.cols, tile.cols)]
          part = acc if (size, num_weights) == (tile.strip, 1) else part
          plgpu.wgmma(part, lhs_rows, weight.transpose((1, 0)) if transpose_rhs else weight)

      whole = stored > tile.strip - UNIT
      batches = store_batches(pending) if tuning.schedule == "deferred" else []
      early = batches[num_steps:]  # more than there are steps to hide them
      for batch in early:
        batch()
      when(whole)(
        lambda: ring.multiply(
          owner,
          before,
          num_steps,
          functools.partial(wgmma, tile.strip),
          meanwhile=batches[:num_steps],
        )
      )

      @when(~whole)
      def _() -> None:
        for batch in batches[:num_steps]:
          batch()
        for size in range(UNIT, tile.strip, UNIT):
          when((stored > size - UNIT) & (stored <= size))(
            functools.partial(
              ring.multiply, owner, before, num_steps, functools.partial(wgmma, size)
            )
          )
        if tile.strips > 1:  # else a tile of no rows would be no tile
          when(stored <= 0)(lambda: ring.skip(owner, before, num_steps))

      return acc[...]

    shape = tile.strip, num_weights * tile.cols
    sums = pl.run_scoped(run, plgpu.WGMMAAccumulatorRef(shape))
    if bias is not None:
      bias_N = load_bias(slot, col) if bias_N is None else bias_N
      sums += lax.broadcast_in_dim(bias_N.astype(jnp.float32), shape, (1,))
    return sums.astype(jnp.bfloat16)

  def store_batches(pending: Any) -> list[Callable[[], None]]:
    """Stores as many pieces of 64 × 64 at a time as there are buffers."""
    sums, start, stored, col = pending
    corners = list(itertools.product(range(0, tile.strip, 64), range(0, tile.cols, 64)))
    pieces = [(x, r, c) for r, c in corners for x in results if c < x.of(tile.cols)]

    def store(result: Result, r: int, c: int, buffer: int) -> None:
      out, first = outs[result.out], result.first + c
      first += lax.div(col, jnp.int32(2)) if result.pairs else col

      def store_rows(first_row: Array | int, size: int) -> None:
        source = staged_store.at[me, buffer, pl.ds(first_row, size)]
        target = out.at[pl.ds(start + r + first_row, size), pl.ds(first, 64)]
        plgpu.copy_smem_to_gmem(source, target)

      rest = stored - r
      if capacity >= 64:
        when(rest >= 64)(lambda: store_rows(0, 64))

      # A copy has a fixed number of rows, so a part is stored by the bits of its size.
      @when((rest > 0) & (rest < 64))
      def _() -> None:
        for size in (x for x in (32, 16, 8, 4, 2, 1) if x <= capacity):
          done = rest & (64 - 2 * size)
          when((rest & size) != 0)(functools.partial(store_rows, done, size))

    def store_batch(batch: list[tuple[Result, int, int]]) -> None:
      plgpu.wait_smem_to_gmem(0, wait_read_only=True)
      for buffer, (result, r, c) in enumerate(batch):
        starts = [2 * c, 2 * c + 64] if result.pairs else []
        starts = starts or [weight * tile.cols + c for weight in result.weights]
        pieces = (sums[r : r + 64, at : at + 64] for at in starts)
        staged[me, buffer] = result.function(*pieces)
      plgpu.commit_smem()
      for buffer, piece in enumerate(batch):
        store(*piece, buffer)

    starts = range(0, len(pieces), tuning.buffers)
    return [functools.partial(store_batch, pieces[i : i + tuning.buffers]) for i in starts]

  def store_all(pending: Any) -> None:
    for batch in store_batches(pending):
      batch()

  def compute(work: Work, before: Array, owner: Array, pending: Any) -> Any:
    _, start, stored, col = work.rest
    above = strip * tile.strip
    done = multiply(work, before, owner, pending), start + above, stored - above, col
    return done if tuning.schedule == "deferred" else store_all(done)

  def nothing() -> Any:
    shape = (tile.strip, num_weights * tile.cols)
    sums = plgpu.layout_cast(jnp.zeros(shape, jnp.bfloat16), plgpu.Layout.WGMMA)
    return sums, jnp.int32(0), jnp.int32(0), jnp.int32(0)

  num_tiles = num_rows * (num_cols // tuning.cluster)
  run = functools.partial(pipeline.persist, num_tiles, describe, load, compute, ring, tile, tuning)
  if tuning.schedule == "deferred":
    run(pending=nothing, flush=store_all)
  else:
    run()
