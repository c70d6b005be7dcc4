"""What a block of the matmul of grouped rows does: it loads tiles, multiplies and stores them.

A tile has rows of one slot and columns of its weights. wgmma multiplies a left operand of 64 rows
by a right one of any multiple of 8 columns::

  tiles of fixed size    left: 64 rows a warpgroup      right: the weights' columns
  even tiles             left: columns of the weights   right: 32 to 192 rows; sums are transposed
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.matmul import even_tiles, layout, pipeline
from pallas_kernels.matmul.deal import Claims, InTurn, Scalars
from pallas_kernels.matmul.layout import DEPTH, EVEN_SIZES, UNIT, MatmulTuning, Tile
from pallas_kernels.matmul.operands import Result
from pallas_kernels.matmul.pipeline import Ring, Work
from pallas_kernels.support import Array
from pallas_kernels.transfer.tiles import Arrivals
from pallas_kernels.warp.branches import for_size, when


def body(
  inputs: Sequence[Any],
  outs: Sequence[Any],
  views: Sequence[Any],
  full: Any,
  free: Any,
  _: Any,
  dealt: InTurn | Claims,
  arriving: Sequence[Any] = (),
  arrivals: Arrivals | None = None,
  *,
  treedef: Any,
  num_home: int,
  width: int,
  split: int,
  transpose_rhs: bool,
  results: Sequence[Result],
  tile: Tile,
  tuning: MatmulTuning,
  brought: Sequence[int] = (),
) -> None:
  """For ``pipeline.launch``; see ``rows.multiply_rows``."""
  table, (operands, bias) = inputs[0], treedef.unflatten(inputs[1:])
  if brought:  # by the transfer, in place of the replicas that stand for them
    replicas = iter(arriving[i] for i in brought)
    operands = [
      (rows, [(home, next(replicas)) for home, _ in weights]) for rows, weights in operands
    ]
  (lhs_load, staged, *_), (lhs, staged_store, *rhs) = views
  capacity, num_weights = outs[0].shape[0], len(rhs)
  num_cols = -(-width // tile.cols)
  steps_of = [rows.shape[1] // DEPTH for rows, _ in operands]
  num_steps = sum(steps_of)
  num_rows = table[3, 0]
  strip, me = pipeline.strip_index(tile), pipeline.warpgroup()
  ring = Ring(full, free, tuning.stages)

  def describe(t: Array, rank: Array) -> Work:
    if tuning.even:
      return Work(jnp.int32(num_steps), tuple(even_tiles.entry(table, t, num_cols)))
    num_groups, band = num_cols // tuning.cluster, tuning.band // (tile.cols * tuning.cluster)
    if brought:
      row, col = layout.home_first(t, num_rows, table[4, 0], num_groups, band, tuning.clusters)
    else:
      row, col = layout.position(t, num_rows, num_groups, band)
    # The last tile may begin inside the one before: both compute the same bits.
    col = lax.min((col * tuning.cluster + rank) * tile.cols, jnp.int32(width - tile.cols))
    return Work(jnp.int32(num_steps), (table[0, row], table[1, row], table[2, row], col))

  def place(work: Work) -> Scalars:
    """Slot, first row, rows to store and first column."""
    if not tuning.even:
      return work.rest
    entry = even_tiles.Entry(*work.rest)
    slot, start, stored, col = even_tiles.even_tile(entry, num_cols, tuning.band // tile.cols)
    return slot, start, stored, lax.min(col * tile.cols, jnp.int32(width - tile.cols))

  def load(work: Work, before: Array, owner: Array) -> None:
    slot, start, stored, col = place(work)
    cols = pl.ds(col, tile.cols)
    sizes = (tile.rows // 2, tile.rows) if tuning.cluster == 1 else (tile.rows,)
    sizes = EVEN_SIZES if tuning.even else sizes  # blocks of a cluster share the rows evenly

    def load_steps(
      rows: Any, weights: Sequence[Any], slot: Array, before: Array, count: int
    ) -> None:
      for_size(stored, sizes, lambda size: load_rows(size, rows, weights, slot, before, count))

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

    if arrivals is not None:
      when(slot >= num_home)(functools.partial(lambda wait: wait(slot - num_home), arrivals.wait))
    for (rows, weights), count in zip(operands, steps_of, strict=True):
      homes, replicas = zip(*weights, strict=True)
      when(slot < num_home)(functools.partial(load_steps, rows, homes, slot, before, count))
      when(slot >= num_home)(
        functools.partial(load_steps, rows, replicas, slot - num_home, before, count)
      )
      before += count

  def load_bias(slot: Array, col: Array) -> Array:
    t = lax.div(col + (tile.cols - 1), jnp.int32(tile.cols))
    by_column = plgpu.Layout.WGMMA.reduce(1 if tuning.even else 0)
    return plgpu.load(bias.at[slot, t], layout=by_column, optimized=False)

  def multiply(work: Work, before: Array, owner: Array, pending: Any) -> Any:
    """The rounded sums of this warpgroup's strip."""
    slot, _, stored, col = work.rest
    stored -= strip * tile.strip
    deferred = tuning.schedule == "deferred"
    # On its way while the rows are multiplied, where registers have room for it.
    bias_N = None if bias is None or deferred else load_bias(slot, col)

    def run(acc: Any) -> Array:
      def wgmma(size: int, k: Array | int, stage: Array, sums: None) -> None:
        del k, sums
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

  def multiply_even(slot: Array, stored: Array, col: Array, before: Array, owner: Array) -> Array:
    """The rounded sums of a tile, transposed: those of its own rows are the first columns."""
    bias_N = None if bias is None else load_bias(slot, col)

    def run(acc: Any) -> Array:
      def wgmma(size: int, k: Array | int, stage: Array, sums: None) -> None:
        del k, sums
        rows = lhs.at[stage, pl.ds(0, size)].transpose((1, 0))
        for i, target in enumerate(rhs):
          weight = target.at[stage]
          part = acc.at[pl.ds(i * tile.cols, tile.cols), pl.ds(0, size)]
          part = acc if (size, num_weights) == (tile.rows, 1) else part
          plgpu.wgmma(part, weight if transpose_rhs else weight.transpose((1, 0)), rows)

      for_size(
        stored,
        EVEN_SIZES,
        lambda size: ring.multiply(owner, before, num_steps, functools.partial(wgmma, size)),
      )
      return acc[...]

    shape = num_weights * tile.cols, tile.rows
    sums = pl.run_scoped(run, plgpu.WGMMAAccumulatorRef(shape))
    if bias_N is not None:
      sums += lax.broadcast_in_dim(bias_N.astype(jnp.float32), shape, (0,))
    return plgpu.layout_cast(sums.astype(jnp.bfloat16), plgpu.Layout.WGMMA_TRANSPOSED)

  def store_batches(pending: Any) -> list[Callable[[], None]]:
    """Stores as many pieces of 64 × 64 at a time as there are buffers."""
    sums, start, stored, col = pending
    corners = list(itertools.product(range(0, tile.strip, 64), range(0, tile.cols, 64)))
    pieces = [(x, r, c) for r, c in corners for x in results if c < x.of(tile.cols)]

    def stage(result: Result, r: int, c: int, buffer: int) -> None:
      starts = [2 * c, 2 * c + 64] if result.pairs else []
      starts = starts or [weight * tile.cols + c for weight in result.weights]
      pieces = (
        sums[at : at + 64, r : r + 64] if tuning.even else sums[r : r + 64, at : at + 64]
        for at in starts
      )
      target = staged.at[me, buffer]
      target = target.transpose((1, 0)) if tuning.even else target
      target[...] = result.function(*pieces)

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
      for buffer, piece in enumerate(batch):
        stage(*piece, buffer)
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

  def compute_even(work: Work, before: Array, owner: Array, _: Any) -> None:
    slot, start, stored, col = place(work)
    store_all((multiply_even(slot, stored, col, before, owner), start, stored, col))

  def nothing() -> Any:
    shape = (tile.strip, num_weights * tile.cols)
    sums = plgpu.layout_cast(jnp.zeros(shape, jnp.bfloat16), plgpu.Layout.WGMMA)
    return sums, jnp.int32(0), jnp.int32(0), jnp.int32(0)

  num_tiles = num_rows * (num_cols // tuning.cluster)
  claims = isinstance(dealt, Claims)
  registers = pipeline.MORE_TO_LOAD if claims else pipeline.FEW_TO_LOAD
  persist = functools.partial(pipeline.persist, num_tiles, describe, load, registers=registers)
  if tuning.even:
    persist(compute_even, dealt, ring, tile)
  elif tuning.schedule == "deferred":
    persist(compute, dealt, ring, tile, pending=nothing, flush=store_all)
  else:
    persist(compute, dealt, ring, tile)
