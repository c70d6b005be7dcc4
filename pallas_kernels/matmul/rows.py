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
import math
from collections.abc import Sequence
from typing import Any

import jax

from pallas_kernels.matmul import even_tiles, layout, pipeline, row_kernel
from pallas_kernels.matmul.layout import (
  DEPTH,
  EVEN,
  EVEN_COLS,
  EVEN_SIZES,
  UNIT,
  MatmulTuning,
  Tile,
)
from pallas_kernels.matmul.operands import Contraction, Result, biases_by_tile, check
from pallas_kernels.matmul.row_tiles import row_tiles, short_comes_last
from pallas_kernels.support import Array
from pallas_kernels.transfer.tiles import Transfer

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
  beside: Transfer | None = None,
  brought: Sequence[int] = (),
) -> tuple[list[Array], Any]:
  """Multiplies and sums contractions, tile by tile.

  Args:
    contractions: of the same C, slots, N and number of weights.
    group_size_P: ``[P]`` int32.
    transpose_rhs: the weights are ``[…, N, K]``.
    results: the arrays' parts.
    tuning: of the kernel; ``None``: the default.
    kernel_name: in traces.
    biases: added to the sums in float32, ``[P, N]`` for each array of weights
      (``[P, split * N]``), or none.
    approx_math: whether ``results`` may use the device's approximations of exp, tanh, ….
    beside: a transfer to run beside the matmul.
    brought: which of its results are the replicas, one for each of all contractions' weights, whose
      ``replica`` then only says what they are. Rows of a slot are multiplied when it is complete.

  Returns:
    The arrays, ``[C, columns]`` bfloat16; rows beyond the sum of the group sizes are not written.
    And the result of the transfer.

  Raises:
    NotImplementedError: shapes or dtypes that the kernel does not know.
    ValueError: shapes that do not fit together.
  """
  capacity, cols, num_home = check(contractions, group_size_P, transpose_rhs, biases)
  weights = contractions[0].weights
  tuning, tile = _lay_out(
    tuning or MatmulTuning(),
    results,
    capacity,
    cols,
    weights,
    even=even_tiles.even_tiles_pay(capacity, group_size_P.shape[0]),
    biased=bool(biases),
  )
  if tuning.even:
    turns = even_tiles.turns_of(capacity, group_size_P.shape[0], cols, tile.cols)
    tuning = dataclasses.replace(tuning, band=turns.cols * tile.cols)
    table = even_tiles.even_row_tiles(capacity, group_size_P, num_home, turns.rows)
  else:
    short_last = False if brought else tuning.short_last  # none of home slots waits for a copy
    if short_last is None:
      sizes = (math.prod(home.shape[1:]) for x in contractions for home in x.home)
      short_last = short_comes_last(capacity, group_size_P.shape[0], 2 * sum(sizes))
    table = row_tiles(capacity, group_size_P, tile.rows, num_home, short_last)

  def second(home: Array, replica: Array) -> Array:
    """An operand may not be empty. Without replicas, or where they are brought, it is not read."""
    return home if brought or not replica.shape[0] else replica

  operands = [
    (x.rows_CK, [(home, second(home, r)) for home, r in zip(x.home, x.replica, strict=True)])
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
  return pipeline.launch(
    functools.partial(
      row_kernel.body,
      treedef=treedef,
      num_home=num_home,
      width=cols,
      split=contractions[0].split,
      transpose_rhs=transpose_rhs,
      results=results,
      tile=tile,
      tuning=tuning,
      brought=brought,
    ),
    table,
    *flat_operands,
    out_type=out_type,
    shared=[view(False), view(True)],
    loads=1 + weights,
    tile=tile,
    tuning=tuning,
    kernel_name=kernel_name,
    approx_math=approx_math,
    beside=beside,
    reads_beside=bool(brought),
  )


def _lay_out(
  tuning: MatmulTuning,
  results: Sequence[Result],
  capacity: int,
  cols: int,
  weights: int,
  *,
  even: bool,
  biased: bool,
) -> tuple[MatmulTuning, Tile]:
  """The tuning as it is used, placed, and its tile.

  Args:
    tuning: that was asked for.
    results: the arrays' parts.
    capacity: C.
    cols: N.
    weights: that share a tile's columns.
    even: whether tiles are even, where the tuning does not say it.
    biased: whether there are biases.
  """
  pairs = any(result.pairs for result in results)
  unit = 2 * UNIT if pairs else UNIT
  layout.expect_multiple("N", cols, unit)
  even = even if tuning.even is None else tuning.even
  # Transposed, the sums of neighbouring columns are in different threads.
  if even and not pairs:
    tuning = dataclasses.replace(EVEN, blocks=tuning.blocks).placed()
    return tuning, Tile(EVEN_SIZES[-1], min(EVEN_COLS // weights, cols), tuning.strips)
  if biased and weights > 1 and tuning.schedule == "deferred":
    # Registers do not hold both biases beside the sums of two tiles.
    tuning = dataclasses.replace(tuning, schedule="together")
  tile = layout.choose_tile(_MOST_ROWS, cols, weights, tuning, unit)
  if -(-cols // tile.cols) % tuning.cluster or capacity < tile.rows:
    tuning = dataclasses.replace(tuning, cluster=1)
  return dataclasses.replace(tuning, even=False).placed(), tile
