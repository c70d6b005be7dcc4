"""Matmuls of grouped rows with home and replica weights: forward, and the gradient to the rows.

Groups of 2, 0 and 1 rows, of two home slots and one replica slot::

  rows 0, 1 × home[0]      none × home[1]      row 2 × replica[0]      row 3: not written
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import support
from pallas_kernels.matmul import blackwell
from pallas_kernels.matmul.layout import MatmulTuning
from pallas_kernels.matmul.rows import Contraction, Result, multiply_rows
from pallas_kernels.support import Array
from pallas_kernels.transfer.tiles import Transfer

_SUMS = Result(lambda sums: sums, (0,))


@functools.partial(jax.jit, static_argnames=("transpose_rhs", "tuning"))
def grouped_matmul(
  rows_CK: Array,
  home_MKN: Array,
  replica_SKN: Array,
  group_size_P: Array,
  *,
  transpose_rhs: bool = False,
  bias: tuple[Array, Array] | None = None,
  tuning: MatmulTuning | None = None,
) -> Array:
  """Multiplies each group of rows by the weights of its slot.

  Args:
    rows_CK: ``[C, K]`` bfloat16, grouped by slot from row 0 on. Rows at or beyond the sum of
      the group sizes may hold anything, NaN included.
    home_MKN: ``[M, K, N]`` bfloat16 (``[M, N, K]`` with ``transpose_rhs``).
    replica_SKN: ``[S, K, N]`` bfloat16, likewise; S may be 0.
    group_size_P: ``[M + S]`` int32, rows per slot; the sum is at most C.
    transpose_rhs: multiply by the transposed weights (the gradient to the rows).
    bias: ``[M, N]`` and ``[S, N]`` bfloat16, added before the sums are rounded.
    tuning: how the kernel is laid out.

  Returns:
    ``[C, N]`` bfloat16, accumulated in float32. Rows at or beyond the sum of the group sizes
    are not written: they hold anything.

  Raises:
    NotImplementedError: a dtype other than bfloat16, or K or N no multiple of 64; on Blackwell
      GPUs as ``blackwell.grouped_matmul``.
    ValueError: shapes that do not fit together.
  """
  if support.generation(support.device()) == support.BLACKWELL:
    operands = rows_CK, home_MKN, replica_SKN, group_size_P
    return blackwell.grouped_matmul(*operands, transpose_rhs=transpose_rhs, bias=bias)
  operands = [rows_CK], [home_MKN], [replica_SKN], group_size_P
  return _sum(*operands, transpose_rhs, tuning, None, bias=bias)[0]


def grouped_matmul_sum(
  rows_CK: Sequence[Array],
  home_MKN: Sequence[Array],
  replica_SKN: Sequence[Array],
  group_size_P: Array,
  *,
  transpose_rhs: bool = False,
  tuning: MatmulTuning | None = None,
) -> Array:
  """The sum of ``grouped_matmul`` over several rows with their weights, rounded once.

  With ``transpose_rhs`` it is the gradient to rows that several projections share.

  Args:
    rows_CK: ``[C, K]`` bfloat16 each; K may differ.
    home_MKN: as many, each as in ``grouped_matmul``.
    replica_SKN: likewise.
    group_size_P: ``[M + S]`` int32, rows per slot; the sum is at most C.
    transpose_rhs: multiply by the transposed weights.
    tuning: how the kernel is laid out.

  Returns:
    ``[C, N]`` bfloat16, accumulated in float32; unused rows are not written.

  Raises:
    NotImplementedError: as in ``grouped_matmul``.
    ValueError: shapes that do not fit together, or not as many rows as weights.
  """
  return sum_beside(
    None, rows_CK, home_MKN, replica_SKN, group_size_P, transpose_rhs=transpose_rhs, tuning=tuning
  )[0]


def sum_beside(
  transfer: Transfer | None,
  rows_CK: Sequence[Array],
  home_MKN: Sequence[Array],
  replica_SKN: Sequence[Array],
  group_size_P: Array,
  *,
  transpose_rhs: bool = False,
  tuning: MatmulTuning | None = None,
) -> tuple[Array, Any]:
  """``grouped_matmul_sum`` and the result of a transfer that runs beside it."""
  return _sum(rows_CK, home_MKN, replica_SKN, group_size_P, transpose_rhs, tuning, transfer)


def matmul_beside(
  transfer: Transfer,
  rows_CK: Array,
  home_MKN: Array,
  group_size_P: Array,
  *,
  bias: tuple[Array, Array] | None = None,
  transpose_rhs: bool = False,
  tuning: MatmulTuning | None = None,
) -> tuple[Array, Any]:
  """``grouped_matmul`` by replicas that a transfer brings at the same time, and its result.

  As in ``gated_beside``, the rows of a replica slot are multiplied when its copy is complete.
  """
  replicas = (transfer.out_type[0],)
  return _sum(
    *([rows_CK], [home_MKN], replicas, group_size_P, transpose_rhs, tuning, transfer),
    bias=bias,
    brought=(0,),
  )


def _sum(
  rows_CK: Sequence[Array],
  home_MKN: Sequence[Array],
  replica_SKN: Sequence[Any],
  group_size_P: Array,
  transpose_rhs: bool,
  tuning: MatmulTuning | None,
  beside: Transfer | None,
  bias: tuple[Array, Array] | None = None,
  brought: Sequence[int] = (),
) -> tuple[Array, Any]:
  if not len(rows_CK) == len(home_MKN) == len(replica_SKN) > 0:
    raise ValueError(
      "rows_CK, home_MKN, replica_SKN: expected as many of each, at least 1, got "
      f"{len(rows_CK)}, {len(home_MKN)} and {len(replica_SKN)}"
    )
  (out_CN,), transferred = multiply_rows(
    [
      Contraction(rows, (home,), (replica,))
      for rows, home, replica in zip(rows_CK, home_MKN, replica_SKN, strict=True)
    ],
    group_size_P,
    transpose_rhs=transpose_rhs,
    results=[_SUMS],
    biases=[] if bias is None else [jnp.concatenate(bias)],
    tuning=tuning,
    kernel_name="grouped_matmul",
    beside=beside,
    brought=brought,
  )
  return out_CN, transferred
