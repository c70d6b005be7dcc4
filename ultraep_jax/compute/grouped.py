"""Matmuls of grouped rows by home and replica weights, and what their gradients need.

Rows are grouped by slot: first the M home slots, then the S replica slots. The weights stay in
two operands, the parameters and the replica buffer, because joining them would copy every home
weight. Rows at or beyond the used count may hold anything, NaN included.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

import pallas_kernels as kernels
from pallas_kernels import UNTUNED, Tunings
from ultraep_jax.compute import first_tiles, tile_matmul
from ultraep_jax.implementation import Implementations, first_that_can
from ultraep_jax.types import Array

Bias = tuple[Array, Array] | None  # of the home and of the replica slots


def grouped_matmul(
  rows_CK: Array,
  home_MKN: Array,
  replica_SKN: Array,
  group_size_P: Array,
  *,
  transpose_rhs: bool = False,
  bias: Bias = None,
  batch_invariant: bool = False,
  implementations: Implementations = ("portable",),
  tunings: Tunings = UNTUNED,
) -> Array:
  """Multiplies each group of rows by the weights of its slot.

  Args:
    rows_CK: ``[C, K]``, grouped by slot from row 0 on.
    home_MKN: ``[M, K, N]`` (``[M, N, K]`` with ``transpose_rhs``).
    replica_SKN: ``[S, K, N]``, likewise; S may be 0.
    group_size_P: ``[M + S]`` int32, rows per slot; the sum is at most C.
    transpose_rhs: multiply by the transposed weights (the gradient to the rows).
    bias: ``[M, N]`` and ``[S, N]``, added before the sums are rounded.
    batch_invariant: a row's bits do not depend on what other rows there are.
    implementations: what to try, in order.
    tunings: how kernels are laid out.

  Returns:
    ``[C, N]`` in the rows' dtype, accumulated in float32; unused rows may hold anything.

  Raises:
    NotImplementedError: none of the implementations can.
  """
  arguments = rows_CK, home_MKN, replica_SKN, group_size_P, transpose_rhs
  columns = home_MKN.shape[1 if transpose_rhs else 2]
  tuning = tunings.find("dgrad" if transpose_rhs else "forward", rows_CK.shape[1], columns)

  def portable() -> Array:
    num_home, *matrix = home_MKN.shape
    matrix_bytes = math.prod(matrix) * home_MKN.dtype.itemsize
    pays = first_tiles.pays(rows_CK.shape[0], num_home, matrix_bytes)
    together = pays and not batch_invariant and _by_host()
    return tile_matmul.matmul(*arguments, bias, together=together)

  candidates = {
    "mosaic_gpu": lambda: kernels.grouped_matmul(
      *arguments[:4], transpose_rhs=transpose_rhs, bias=bias, tuning=tuning
    ),
    "portable": portable,
  }
  return first_that_can(implementations, candidates)


def grouped_matmul_wgrad(
  rows_CK: Array,
  grad_CN: Array,
  group_size_P: Array,
  num_home: int,
  *,
  implementations: Implementations = ("portable",),
  tunings: Tunings = UNTUNED,
) -> tuple[Array, Array]:
  """The gradient of ``grouped_matmul`` to its weights: per slot, ``rows.T @ grad``.

  Args:
    rows_CK: ``[C, K]``.
    grad_CN: ``[C, N]``.
    group_size_P: ``[M + S]`` int32.
    num_home: M.
    implementations: what to try, in order.
    tunings: how kernels are laid out.

  Returns:
    ``[M, K, N]`` and ``[S, K, N]``, float32; an empty slot's gradient is zero.

  Raises:
    NotImplementedError: none of the implementations can.
  """
  arguments = rows_CK, grad_CN, group_size_P, num_home, None
  return wgrad_beside(None, *arguments, implementations, tunings)[0]


def wgrad_beside(
  transfer: "kernels.Transfer | None",
  rows_CK: Array,
  grad_CN: Array,
  group_size_P: Array,
  num_home: int,
  filled_S: Array | None,
  implementations: Implementations,
  tunings: Tunings,
  into_MKN: Array | None = None,
  dtype: DTypeLike = jnp.float32,
) -> tuple[tuple[Array, Array], Any]:
  """Gradients to weights, anything for slots that are not filled, and the result of a transfer.

  They are rounded to ``dtype``. Those of home slots are added to ``into_MKN``, if there is one, of
  the same dtype: rounded ones by the kernel, exact ones in plain JAX. No transfer is beside that.
  """
  arguments = rows_CK, grad_CN, group_size_P, num_home
  operation = "wgrad" if transfer is None else "wgrad beside"
  tuning = tunings.find(operation, rows_CK.shape[1], grad_CN.shape[1])

  def by_kernel() -> tuple[tuple[Array, Array], Any]:
    options: Any = {"filled_S": filled_S, "into_MKN": into_MKN, "tuning": tuning}
    options["dtype"] = dtype
    if transfer is None:
      return kernels.grouped_matmul_wgrad(*arguments, **options), None
    return kernels.wgrad_beside(transfer, *arguments, **options)

  def portable() -> tuple[tuple[Array, Array], Any]:
    home_MKN, replica_SKN = tile_matmul.wgrad(*arguments, into_MKN, together=_by_host())
    grads = _rounded(home_MKN, dtype), _rounded(replica_SKN, dtype)
    return grads, transfer and transfer.launch()

  candidates = {"mosaic_gpu": by_kernel, "portable": portable}
  return first_that_can(implementations, candidates)


def rows_grad_beside(
  transfer: "kernels.Transfer | None",
  grads_CN: Sequence[Array],
  homes_MKN: Sequence[Array],
  replicas_SKN: Sequence[Array],
  group_size_P: Array,
  implementations: Implementations,
  tunings: Tunings,
) -> tuple[Array, Any]:
  """The gradient to rows that all of some weights share, and the result of a transfer."""
  width, inner = homes_MKN[0].shape[1:]
  name = "sum" if transfer is None else "sum beside"
  tuning = tunings.find(name, inner * len(homes_MKN), width)

  def one_by_one() -> Array:
    options: Any = {"implementations": implementations, "tunings": tunings}
    products = (
      grouped_matmul(*operands, group_size_P, transpose_rhs=True, **options)
      for operands in zip(grads_CN, homes_MKN, replicas_SKN, strict=True)
    )
    return functools.reduce(jnp.add, products)

  candidates = {
    "mosaic_gpu": lambda: kernels.sum_beside(
      transfer,
      grads_CN,
      homes_MKN,
      replicas_SKN,
      group_size_P,
      transpose_rhs=True,
      tuning=tuning,
    ),
    "portable": lambda: (one_by_one(), transfer and transfer.launch()),
  }
  # One by one, a kernel may still suit that cannot add them up.
  return first_that_can((*implementations, "portable"), candidates)


def rows_grad_by_copies(
  transfer: "kernels.Transfer",
  grad_CN: Array,
  home_MKN: Array,
  group_size_P: Array,
  implementations: Implementations,
  tunings: Tunings,
) -> tuple[Array, Array]:
  """The gradient to rows by weights whose copies a transfer brings at the same time, and these."""
  width, inner = home_MKN.shape[1:]
  tuning = tunings.find("dgrad beside", inner, width)

  def by_kernel() -> tuple[Array, Array]:
    arguments = transfer, grad_CN, home_MKN, group_size_P
    rows_CK, (copies_SKN,) = kernels.matmul_beside(*arguments, transpose_rhs=True, tuning=tuning)
    return rows_CK, copies_SKN

  def portable() -> tuple[Array, Array]:
    (copies_SKN,) = transfer.launch()
    operands = grad_CN, home_MKN, copies_SKN, group_size_P
    options: Any = {"implementations": implementations, "tunings": tunings}
    return grouped_matmul(*operands, transpose_rhs=True, **options), copies_SKN

  candidates = {"mosaic_gpu": by_kernel, "portable": portable}
  return first_that_can((*implementations, "portable"), candidates)


def slot_sums(
  scale_C: Array,
  rows_CN: Array,
  group_size_P: Array,
  num_home: int,
  *,
  filled_S: Array | None = None,
  into_MN: Array | None = None,
  dtype: DTypeLike = jnp.float32,
  implementations: Implementations = ("portable",),
  tunings: Tunings = UNTUNED,
) -> tuple[Array, Array]:
  """The gradient of ``scale * (rows + bias)`` to its bias: per slot, the sum of ``scale * grad``.

  Args:
    scale_C: ``[C]``, rounded to the rows' dtype.
    rows_CN: ``[C, N]``.
    group_size_P: ``[M + S]`` int32.
    num_home: M.
    filled_S: as in ``wgrad_beside``.
    into_MN: ``[M, N]`` of ``dtype``, what to add the sums of home slots to; ``None``: zeros.
    dtype: of the gradients, to which the sums are rounded.
    implementations: what to try, in order.
    tunings: how kernels are laid out.

  Returns:
    ``[M, N]`` and ``[S, N]`` of ``dtype``.
  """
  # A matmul of one column; the kernel's columns come by 64.
  columns = kernels.UNIT if "mosaic_gpu" in implementations else 1
  scale_CK = jnp.broadcast_to(scale_C[:, None], (scale_C.shape[0], columns)).astype(rows_CN.dtype)
  arguments = scale_CK, rows_CN, group_size_P, num_home, filled_S, implementations, tunings
  home_MKN, replica_SKN = wgrad_beside(None, *arguments, dtype=dtype)[0]
  home_MN = home_MKN[:, 0] if into_MN is None else into_MN + home_MKN[:, 0]
  return home_MN, replica_SKN[:, 0]


def _by_host() -> bool:
  """Whether a host launches every turn of a loop: then fewer turns are faster."""
  return kernels.device().platform == "gpu"


def _rounded(array: Array, dtype: DTypeLike) -> Array:
  """In a dtype. XLA leaves out a cast there and back, as of what copies add to."""
  if dtype != jnp.float32:
    kept = jnp.finfo(dtype)
    array = lax.reduce_precision(array, kept.nexp, kept.nmant)
  return array.astype(dtype)
