"""Tokens that are on a rank to the rows that they feed there, and the rows' sums.

Shapes: A tokens, each with K assignments; ``row_AK`` has their rows, −1 where there is none.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

import pallas_kernels as kernels
from pallas_kernels import UNTUNED, Tunings
from ultraep_jax.implementation import Implementations, first_that_can
from ultraep_jax.transport import wire
from ultraep_jax.types import Array


class Placing(NamedTuple):
  """How tokens get to their rows.

  Attributes:
    implementations: what to try, in order.
    tunings: how kernels are laid out.
  """

  implementations: Implementations = ("portable",)
  tunings: Tunings = UNTUNED

  def place(self, packed: Sequence[Array], row_AK: Array, capacity: int, dtype: jnp.dtype) -> Array:
    """``[C, D]`` in ``dtype``: every row has its token; those that no token feeds have anything.

    Args:
      packed: what ``wire.pack`` made of the tokens.
      row_AK: the rows.
      capacity: C.
      dtype: of the tokens.
    """

    def gather() -> Array:
      zero_CD = jnp.zeros((capacity, packed[0].shape[1]), dtype)
      return place_over(zero_CD, packed, row_AK)

    return first_that_can(
      self.implementations,
      {
        "mosaic_gpu": lambda: self.by_kernel(packed, row_AK, capacity, dtype),
        "portable": gather,
      },
    )

  def by_kernel(
    self,
    packed: Sequence[Array],
    row_AK: Array,
    capacity: int,
    dtype: jnp.dtype,
    over_CD: Array | None = None,
  ) -> Array:
    """As ``place``; rows that no token feeds are those of ``over_CD``, in its memory."""
    size, scaled = packed[0].shape[1] * packed[0].dtype.itemsize, len(packed) > 1
    tuning = self.tunings.find("dispatch scaled" if scaled else "dispatch", size)
    options: Any = {"capacity": capacity, "tuning": tuning}
    if not scaled:
      over = None if over_CD is None else [over_CD]
      return kernels.place(packed, row_AK, over=over, **options)[0]
    value_AD, scale_AB = packed
    return kernels.place_scaled(value_AD, scale_AB, row_AK, dtype=dtype, over=over_CD, **options)


PORTABLY = Placing()


def place_over(rows_CD: Array, packed: Sequence[Array], row_AK: Array) -> Array:
  """Rows with those of further tokens."""
  token_AD = wire.unpack(packed, rows_CD.dtype)
  # Gathering by row writes each row once; the inverse map is a scatter of integers only.
  source_C = feeding(row_AK, rows_CD.shape[0])
  fed_CD = token_AD[source_C // row_AK.shape[1]]
  return jnp.where((source_C >= 0)[:, None], fed_CD, rows_CD)


def feeding(row_AK: Array, capacity: int) -> Array:
  """The flat index into ``[A, K]`` that feeds each row, −1 for none."""
  index_AK = jnp.arange(row_AK.size, dtype=jnp.int32).reshape(row_AK.shape)
  source_C = jnp.full(capacity, -1, jnp.int32)
  return source_C.at[jnp.where(row_AK < 0, capacity, row_AK)].set(index_AK, mode="drop")


def sums(rows_CD: Array, gate_C: Array | None, row_AK: Array) -> Array:
  """``[A, D]`` in the dtype of the rows: of each token's rows, in the order of its assignments.

  Added up in float32. Rows that feed no token are ignored, NaN included.
  """
  sum_AD = jnp.zeros((row_AK.shape[0], rows_CD.shape[1]), jnp.float32)
  for row_A in row_AK.T:
    row_AD = rows_CD[row_A].astype(jnp.float32)
    weighted_AD = row_AD if gate_C is None else gate_C[row_A][:, None] * row_AD
    sum_AD += jnp.where((row_A >= 0)[:, None], weighted_AD, 0)
  return sum_AD.astype(rows_CD.dtype)
