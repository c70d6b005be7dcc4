"""The projections into an expert and what is between its matrices, in one kernel.

For every tile of rows, with the sums in registers until both are there::

  rows × wi_gate ──► gate ─┐
  rows × wi_up ────► up ───┴─► unit(gate, up) ──► inner
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

from pallas_kernels.matmul.elementwise import elementwise
from pallas_kernels.matmul.layout import MatmulTuning
from pallas_kernels.matmul.rows import Contraction, Result, multiply_rows
from pallas_kernels.support import Array
from pallas_kernels.transfer.tiles import Transfer
from pallas_kernels.warp import pairs

Columns = Literal["apart", "fused", "interleaved", "ungated"]


class Projections(NamedTuple):
  """The matrices into some experts: gate and up, or one.

  Attributes:
    weights: ``[X, K, N]`` bfloat16; fused or interleaved, one ``[X, K, 2N]``.
    biases: as many ``[X, columns]``, or none.
  """

  weights: tuple[Array, ...]
  biases: tuple[Array, ...] = ()


class Gated(NamedTuple):
  """Results of the matmul into experts: activated rows, and projections kept for gradients.

  Attributes:
    inner_CN: ``[C, N]``.
    hidden: ``[C, N]`` or ``[C, 2N]`` for each of ``Projections.weights``; or none.
  """

  inner_CN: Array
  hidden: tuple[Array, ...]


@functools.partial(jax.jit, static_argnames=("unit", "columns", "keep_hidden", "tuning"))
def gated_matmul(
  rows_CK: Array,
  home: Projections,
  replica: Projections,
  group_size_P: Array,
  unit: Callable[..., Array],
  *,
  columns: Columns = "apart",
  keep_hidden: bool,
  tuning: MatmulTuning | None = None,
) -> Gated:
  """``unit(rows gate, rows up)`` for each group of rows by the weights of its slot.

  Projections are computed with their biases in float32 and rounded to bfloat16, as if they were
  stored; the unit of the rounded values is computed in float32 and rounded once.

  Args:
    rows_CK: ``[C, K]`` bfloat16, grouped by slot from row 0 on. Rows at or beyond the sum of
      the group sizes may hold anything, NaN included.
    home: of M experts.
    replica: of S experts, which may be 0.
    group_size_P: ``[M + S]`` int32, rows per slot; the sum is at most C.
    unit: elementwise, of two float32 arrays, or ungated of one.
    columns: where gate and up are. Apart, they are two weights. Fused, they are one, gate in its
      first half; interleaved, gate in its even columns. Ungated, there is but one matrix.
    keep_hidden: whether to return the projections, too, which the backward pass needs.
    tuning: how the kernel is laid out.

  Returns:
    bfloat16. Rows at or beyond the sum of the group sizes are not written: they hold anything.

  Raises:
    NotImplementedError: a unit that the kernel cannot compute, or as ``grouped_matmul``;
      interleaved, N no multiple of 64.
    ValueError: shapes that do not fit together.
  """
  contraction = Contraction(rows_CK, home.weights, replica.weights, _split(columns))
  biases = [jnp.concatenate(each) for each in zip(home.biases, replica.biases, strict=True)]
  return _multiply(contraction, biases, group_size_P, unit, columns, keep_hidden, tuning)[0]


def gated_beside(
  transfer: Transfer,
  rows_CK: Array,
  home: Projections,
  group_size_P: Array,
  unit: Callable[..., Array],
  *,
  columns: Columns = "apart",
  keep_hidden: bool,
  replica_biases: Sequence[Array] = (),
  tuning: MatmulTuning | None = None,
) -> tuple[Gated, Any]:
  """``gated_matmul`` by replica weights that a transfer brings at the same time.

  The rows of home slots come first: they need none of the copies. Those of a replica slot are
  multiplied as soon as its copy is complete. The results are those of ``gated_matmul`` bit for bit.

  No legal plan can deadlock, as the transfer alone cannot: only its blocks wait for other ranks'
  copies to be forwarded. They are the first of the kernel, which every rank runs, also without a
  row, and no more than it has SMs. So they wait for no block that multiplies; and these wait for
  the transfer alone.

  Args:
    transfer: brings the replicas' weights, in this order, not ``flat``; it must not touch the other
      operands. See ``replication``.
    rows_CK: as for ``gated_matmul``.
    home: likewise.
    group_size_P: likewise.
    unit: likewise.
    columns: likewise.
    keep_hidden: likewise.
    replica_biases: of the replicas.
    tuning: of the kernel.

  Returns:
    As ``gated_matmul``, and the result of the transfer.

  Raises:
    NotImplementedError: as ``gated_matmul``.
    ValueError: likewise.
  """
  brought = range(len(home.weights))
  contraction = Contraction(
    rows_CK, home.weights, tuple(transfer.out_type[: len(brought)]), _split(columns)
  )
  if (given := len(replica_biases)) != (expected := len(home.biases)):
    raise ValueError(f"replica_biases: expected {expected}, as of the homes, got {given}")
  biases = [jnp.concatenate(each) for each in zip(home.biases, replica_biases, strict=True)]
  return _multiply(
    *(contraction, biases, group_size_P, unit, columns, keep_hidden, tuning),
    beside=transfer,
    brought=brought,
  )


def check_columns(columns: Columns) -> None:
  """Raises ValueError unless that is a way to lay columns."""
  if columns not in get_args(Columns):
    raise ValueError(f"columns: expected one of {get_args(Columns)}, got {columns!r}")


def _split(columns: Columns) -> int:
  check_columns(columns)
  return 2 if columns == "fused" else 1


def _multiply(
  contraction: Contraction,
  biases: list[Array],
  group_size_P: Array,
  unit: Callable[..., Array],
  columns: Columns,
  keep_hidden: bool,
  tuning: MatmulTuning | None,
  *,
  beside: Transfer | None = None,
  brought: Sequence[int] = (),
) -> tuple[Gated, Any]:
  arguments = 1 if columns == "ungated" else 2
  elementwise(unit, arguments, (64, 64))  # only whether it is
  if (given := len(contraction.home)) != (expected := 2 if columns == "apart" else 1):
    raise ValueError(f"weights: expected {expected} that are {columns}, got {given}")

  def inner(*pieces: Any) -> Any:
    pieces = pairs.apart(*pieces) if columns == "interleaved" else pieces
    values = (piece.astype(jnp.float32) for piece in pieces)
    return elementwise(unit, arguments, pieces[0].shape)(*values).astype(jnp.bfloat16)

  both = columns == "interleaved"
  results = [Result(inner, (0,) if both else tuple(range(arguments)), pairs=both)]
  if keep_hidden:
    fused = columns == "fused"
    width = contraction.home[0].shape[2] // 2
    for weight in range(1 if both else arguments):
      # Fused, both projections are halves of one array.
      out, first = (1, weight * width) if fused else (1 + weight, 0)
      results.append(Result(lambda sums: sums, (weight,), out=out, first=first))
  arrays, transferred = multiply_rows(
    [contraction],
    group_size_P,
    transpose_rhs=False,
    results=results,
    biases=biases,
    tuning=tuning,
    kernel_name="gated_matmul",
    approx_math=True,  # of 11 bits or more: the result has 8
    beside=beside,
    brought=brought,
  )
  inner_CN, *hidden = arrays
  return Gated(inner_CN, tuple(hidden)), transferred
