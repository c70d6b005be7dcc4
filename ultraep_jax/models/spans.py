"""Where the requests of packed rows lie."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from ultraep_jax.packed import PackedBatch
from ultraep_jax.types import Array


class Spans(NamedTuple):
  """The requests of all rows one behind the other, without the gaps of rows that have few.

  That is the order of cuDNN, made once rather than in each layer.

  Attributes:
    size_BR: ``[B, R]`` int32, tokens of each request; 0 where there are no more requests.
    start_BS: ``[B, R + 1]`` int32, where each starts, counted from the start of the row that its
      entry is in, which is the request's own or one before it; there the end of the last row
      where there are no more requests. Never negative.
  """

  size_BR: Array
  start_BS: Array


def spans_of(batch: PackedBatch) -> Spans:
  """Reads them off the place of each request's last token.

  R is that of the batch, but at least 2.
  """
  rows, length = batch.token_BT.shape
  # Two columns at least: cuDNN takes one for rows that are not packed. One more start, and no size.
  columns = max(batch.last_BR.shape[1], 2)
  widen = ((0, 0), (0, columns + 1 - batch.last_BR.shape[1]))
  last_BS = jnp.pad(batch.last_BR, widen, constant_values=-1)
  present_BS, last_BS = last_BS >= 0, jnp.maximum(last_BS, 0)
  before_BS = jnp.take_along_axis(batch.position_BT, last_BS, axis=1)
  row_B1 = lax.broadcasted_iota(jnp.int32, (rows, 1), 0) * length
  size_BS = jnp.where(present_BS, before_BS + 1, 0)
  start_BS = jnp.where(present_BS, row_B1 + last_BS - before_BS, rows * length)
  order = jnp.argsort(~present_BS, axis=None, stable=True)
  size_BR = size_BS.ravel()[order][: rows * columns].reshape(rows, columns)
  return Spans(size_BR, start_BS.ravel()[order].reshape(start_BS.shape) - row_B1)
