"""What a matmul of grouped rows multiplies, and what becomes of the sums."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.matmul import layout
from pallas_kernels.matmul.layout import UNIT, Tile
from pallas_kernels.support import Array


@dataclasses.dataclass(frozen=True)
class Contraction:
  """Rows and what multiplies them.

  Attributes:
    rows_CK: ``[C, K]``.
    home: ``[M, K, N]`` each, or ``[M, N, K]``.
    replica: ``[S, K, N]`` each, or ``[S, N, K]``; S may be 0.
    split: weights that each array holds side by side, of N columns each: ``[M, K, split * N]``.
  """

  rows_CK: Array
  home: tuple[Array, ...]
  replica: tuple[Array, ...]
  split: int = 1

  @property
  def weights(self) -> int:
    """That multiply the rows."""
    return len(self.home) * self.split


@dataclasses.dataclass(frozen=True)
class Result:
  """What becomes of the rounded sums, 64 columns at a time.

  Attributes:
    function: from pieces of 64 rows and columns to such a piece; bfloat16.
    weights: whose sums the pieces are, at the columns of the result.
    pairs: of one weight, the pieces are two neighbours: the result has half of the columns.
    out: of the arrays, the one that it is in.
    first: its first column there.
  """

  function: Callable[..., Any]
  weights: tuple[int, ...]
  pairs: bool = False
  out: int = 0
  first: int = 0

  def of(self, cols: int) -> int:
    """How many columns it has of so many sums, or the first one of those that begin there."""
    return cols // 2 if self.pairs else cols


def biases_by_tile(biases: Sequence[Array], cols: int, tile: Tile) -> Array:
  """``[P, tiles, columns]``, what a tile adds to the columns of its sums, of all weights."""
  bias_PN = jnp.concatenate(biases, axis=1)
  start_T = np.minimum(np.arange(0, cols, tile.cols), cols - tile.cols)
  start_TW = start_T[:, None] + np.arange(0, bias_PN.shape[1], cols)[None, :]
  index_TN = (start_TW[:, :, None] + np.arange(tile.cols)).reshape(len(start_T), -1)
  return bias_PN[:, index_TN]


def check(
  contractions: Sequence[Contraction],
  group_size_P: Array,
  transpose_rhs: bool,
  biases: Sequence[Array],
) -> tuple[int, int, int]:
  """C, N and M of contractions that fit together."""
  first = contractions[0]
  capacity, num_home = first.rows_CK.shape[0], first.home[0].shape[0]
  num_replica = first.replica[0].shape[0]
  cols = first.home[0].shape[1 if transpose_rhs else 2] // first.split
  for x in contractions:
    depth, side_by_side = x.rows_CK.shape[1], cols * x.split
    weights = (side_by_side, depth) if transpose_rhs else (depth, side_by_side)
    layout.expect_shape("rows_CK", x.rows_CK, (capacity, depth))
    layout.expect_bfloat16(rows_CK=x.rows_CK)
    for home, replica in zip(x.home, x.replica, strict=True):
      layout.expect_shape("home_MKN", home, (num_home, *weights))
      layout.expect_shape("replica_SKN", replica, (num_replica, *weights))
      layout.expect_bfloat16(home_MKN=home, replica_SKN=replica)
    layout.expect_multiple("K", depth, UNIT)
  count = num_home + num_replica
  layout.expect_shape("group_size_P", group_size_P, (count,))
  for i, bias in enumerate(biases):
    layout.expect_shape(f"biases[{i}]", bias, (count, first.split * cols))
    layout.expect_bfloat16(bias=bias)
  return capacity, cols, num_home
