"""Tokens to their rows on a rank that has them all: ``dispatch`` without peers.

An exchange by collectives brings a token to a rank once. This reads it there and writes the rows
that it feeds, and no others. Tokens a, b and c, of which b feeds no row here::

  a  2 0 ──► row 0  a
  b  - - ──► row 1  (not written)
  c  3 - ──► row 2  a
             row 3  c
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from pallas_kernels.support import Array
from pallas_kernels.transfer.dispatch import dispatch, dispatch_scaled
from pallas_kernels.transfer.tuning import ExchangeTuning

_ALONE = ()  # the axis of a rank without peers


def place(
  arrays: Sequence[Array],
  row_TK: Array,
  *,
  capacity: int,
  over: Sequence[Array] | None = None,
  tuning: ExchangeTuning | None = None,
) -> list[Array]:
  """Copies every token to its rows, bit for bit.

  Call it inside a ``shard_map`` over all axes of a mesh, of GPUs that need not reach each other.

  Args:
    arrays: ``[T, ...]`` each, such as values and their scales. Rows must be multiples of 16 bytes.
    row_TK: ``[T, K]`` int32, the rows that a token feeds, −1 for none. No two feed the same.
    capacity: C, the rows.
    over: ``[C, ...]`` each, in whose memory other tokens have their rows; ``None``: new rows.
    tuning: workers and tiles.

  Returns:
    A ``[C, ...]`` array for each of ``arrays``. Rows that no token feeds are not written.

  Raises:
    NotImplementedError: a dtype that the kernel does not handle, or rows that are no multiple of 16
      bytes.
    ValueError: shapes that do not fit.
  """
  if not arrays:
    return []
  assignments, options = _assignments(row_TK), _options(capacity, tuning)
  return dispatch(arrays, *assignments, over=over, **options).arrays


def place_scaled(
  value_TD: Array,
  scale_TB: Array,
  row_TK: Array,
  *,
  dtype: Any,
  capacity: int,
  over: Array | None = None,
  tuning: ExchangeTuning | None = None,
) -> Array:
  """Multiplies tokens in FP8 by their scales, and writes the products to their rows.

  Args:
    value_TD: ``[T, D]`` float8_e4m3fn, D a multiple of 16.
    scale_TB: ``[T, B]`` float32, as for ``dispatch_scaled``.
    row_TK: as for ``place``.
    dtype: of the rows: bfloat16, float16 or float32.
    capacity: C, the rows.
    over: as for ``place``.
    tuning: workers and tiles.

  Returns:
    ``[C, D]`` in ``dtype``. Rows that no token feeds are not written.

  Raises:
    NotImplementedError: a dtype or a width that the kernel does not handle.
    ValueError: shapes that do not fit.
  """
  arguments = value_TD, scale_TB, *_assignments(row_TK)
  return dispatch_scaled(*arguments, dtype=dtype, over=over, **_options(capacity, tuning)).arrays[0]


def _assignments(row_TK: Array) -> tuple[Array, Array]:
  """Who computes each, which is this rank, and in which row."""
  return jnp.where(row_TK < 0, -1, 0), row_TK


def _options(capacity: int, tuning: ExchangeTuning | None) -> dict[str, Any]:
  return {"capacity": capacity, "axis_name": _ALONE, "tuning": tuning}
