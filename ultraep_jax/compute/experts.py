"""Grouped matmul over home and replica weights, and the gated expert built on it.

Rows are grouped by slot: first the M home slots, then the S replica slots. The weights stay in
two operands, the parameters and the replica buffer, because joining them would copy every home
weight. Rows at or beyond the used count may hold anything, NaN included.
"""

import functools
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

import pallas_kernels as kernels
from pallas_kernels import UNTUNED, Tunings
from ultraep_jax.compute import tile_matmul
from ultraep_jax.implementation import Implementations, first_that_can
from ultraep_jax.types import Activation, Array, ExpertWeights


def grouped_matmul(
  rows_CK: Array,
  home_MKN: Array,
  replica_SKN: Array,
  group_size_P: Array,
  *,
  transpose_rhs: bool = False,
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
  candidates = {
    "mosaic_gpu": lambda: kernels.grouped_matmul(
      *arguments[:4], transpose_rhs=transpose_rhs, tuning=tuning
    ),
    "portable": lambda: tile_matmul.matmul(*arguments),
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
  return _wgrad_beside(None, *arguments, implementations, tunings)[0]


class Hidden(NamedTuple):
  """What backward needs of the experts' forward: the two projections of the rows."""

  gate_CF: Array
  up_CF: Array


class Replication(Protocol):
  """Copies of weights and the way home of their gradients; see ``replicate.Replicas``."""

  def filled_S(self) -> Array: ...
  def copies(self) -> Any: ...
  def copying(self) -> "kernels.Transfer | None": ...
  def reduce(self, replica_grads: Any, home_grads: Any) -> Any: ...
  def reducing(self, replica_grads: Any, home_grads: Any) -> "kernels.Transfer | None": ...


class ExpertOutput(NamedTuple):
  """What experts make of rows, and the copies of weights that they needed."""

  rows_CD: Array
  hidden: Hidden | None
  copies: ExpertWeights


@jax.named_scope("uep.experts")
def expert_forward(
  rows_CD: Array,
  home: ExpertWeights,
  replicas: Replication,
  group_size_P: Array,
  activation: Activation,
  *,
  keep_hidden: bool = True,
  implementations: Implementations = ("portable",),
  tunings: Tunings = UNTUNED,
) -> ExpertOutput:
  """``wo(activation(rows wi_gate) * (rows wi_up))`` for each row by its slot's expert.

  Where kernels can, copies of weights arrive while the rows of home slots, which need none of
  them, are multiplied.

  Args:
    rows_CD: ``[C, D]``, grouped by slot from row 0 on.
    home: weights of the home slots.
    replicas: weights of the replica slots.
    group_size_P: rows per slot.
    activation: of the gate projection, elementwise.
    keep_hidden: return the projections too, which a kernel can otherwise leave unwritten.
    implementations: of the matmuls, to try in order.
    tunings: how kernels are laid out.
  """
  arguments = rows_CD, home, replicas, group_size_P, activation
  candidates = {
    "mosaic_gpu": lambda: _gated_kernel(*arguments, keep_hidden, tunings),
    "portable": lambda: _gated(*arguments, implementations, tunings),
  }
  # An activation or a shape that the fused kernel lacks may still suit the plain matmul's.
  inner_CF, hidden, copies = first_that_can((*implementations, "portable"), candidates)
  out_CD = grouped_matmul(
    inner_CF,
    home.wo,
    copies.wo,
    group_size_P,
    implementations=implementations,
    tunings=tunings,
  )
  return ExpertOutput(out_CD, hidden if keep_hidden else None, copies)


def _gated_kernel(
  rows_CD: Array,
  home: ExpertWeights,
  replicas: Replication,
  group_size_P: Array,
  activation: Activation,
  keep_hidden: bool,
  tunings: Tunings,
) -> tuple[Array, Hidden | None, ExpertWeights]:
  arguments = group_size_P, activation
  homes = home.wi_gate, home.wi_up
  operation, widths = "gated" if keep_hidden else "gated only", homes[0].shape[1:]
  tuning = tunings.find(operation, *widths)
  if (copying := replicas.copying()) is None:
    copies = ExpertWeights(*replicas.copies())
    gated = kernels.gated_matmul(
      rows_CD,
      *homes,
      copies.wi_gate,
      copies.wi_up,
      *arguments,
      keep_hidden=keep_hidden,
      tuning=tuning,
    )
  else:
    gated, copies = kernels.gated_beside(
      copying,
      lambda copies: (copies.wi_gate, copies.wi_up),
      rows_CD,
      *homes,
      *arguments,
      keep_hidden=keep_hidden,
      tuning=tunings.find(f"{operation} beside", *widths),
      replica_tuning=tuning,
    )
  inner_CF, gate_CF, up_CF = gated
  hidden = None if gate_CF is None or up_CF is None else Hidden(gate_CF, up_CF)
  return inner_CF, hidden, copies


def _gated(
  rows_CD: Array,
  home: ExpertWeights,
  replicas: Replication,
  group_size_P: Array,
  activation: Activation,
  implementations: Implementations,
  tunings: Tunings,
) -> tuple[Array, Hidden, ExpertWeights]:
  matmul = functools.partial(
    grouped_matmul,
    rows_CD,
    group_size_P=group_size_P,
    implementations=implementations,
    tunings=tunings,
  )
  copies = ExpertWeights(*replicas.copies())
  hidden = Hidden(matmul(home.wi_gate, copies.wi_gate), matmul(home.wi_up, copies.wi_up))
  return _inner(hidden, activation), hidden, copies


class ExpertGrads(NamedTuple):
  """Gradients of the gate-weighted experts, and the copies of weights that they needed."""

  rows_CD: Array
  gate_C: Array
  home: ExpertWeights  # with those of all replicas added
  copies: ExpertWeights


@jax.named_scope("uep.experts")
def expert_backward(
  grad_CD: Array,
  gate_C: Array,
  rows_CD: Array,
  hidden: Hidden,
  home: ExpertWeights,
  replicas: Replication,
  group_size_P: Array,
  activation: Activation,
  *,
  implementations: Implementations = ("portable",),
  tunings: Tunings = UNTUNED,
) -> ExpertGrads:
  """The adjoint of ``gate * expert_forward(rows)``.

  Where kernels can, copies of weights arrive while a matmul that needs none of them runs, and
  the gradients of copies go home beside the last matmul.

  Args:
    grad_CD: ``[C, D]``, per row the gradient of its token's output, not yet weighted.
    gate_C: ``[C]`` float32, the weight of each row.
    rows_CD: the rows of the forward pass.
    hidden: the projections of the forward pass.
    home: weights of the home slots.
    replicas: weights of the replica slots, and where their gradients go.
    group_size_P: rows per slot.
    activation: of the forward pass.
    implementations: of the matmuls, to try in order.
    tunings: how kernels are laid out.
  """
  wgrad = functools.partial(
    _wgrad_beside,
    group_size_P=group_size_P,
    num_home=home.wo.shape[0],
    filled_S=replicas.filled_S(),
    implementations=implementations,
    tunings=tunings,
  )
  inner_CF, inner_vjp = jax.vjp(lambda hidden: _inner(hidden, activation), hidden)
  copying = replicas.copying()
  # The gate scales inner rather than grad, whose rows are longer.
  (wo_home, wo_replica), copies = wgrad(copying, _scaled(inner_CF, gate_C), grad_CD)
  replica = ExpertWeights(*(replicas.copies() if copying is None else copies))

  # The gate's gradient <expert(row), grad> equals <inner, grad wo^T>: no third matmul again.
  ungated_CF = grouped_matmul(
    grad_CD,
    home.wo,
    replica.wo,
    group_size_P,
    transpose_rhs=True,
    implementations=implementations,
    tunings=tunings,
  )
  gate_grad_C = jnp.sum(inner_CF.astype(jnp.float32) * ungated_CF.astype(jnp.float32), axis=1)
  (hidden_grad,) = inner_vjp(_scaled(ungated_CF, gate_C))

  (gate_home, gate_replica), _ = wgrad(None, rows_CD, hidden_grad.gate_CF)
  (up_home, up_replica), _ = wgrad(None, rows_CD, hidden_grad.up_CF)
  home_grads = ExpertWeights(gate_home, up_home, wo_home)
  replica_grads = ExpertWeights(gate_replica, up_replica, wo_replica)
  reducing = replicas.reducing(replica_grads, home_grads)
  rows_grad_CD, sums = _rows_grad(
    reducing, hidden_grad, home, replica, group_size_P, implementations, tunings
  )
  if reducing is None:
    sums = replicas.reduce(replica_grads, home_grads)
  return ExpertGrads(rows_grad_CD, gate_grad_C, ExpertWeights(*sums), replica)


def _wgrad_beside(
  transfer: "kernels.Transfer | None",
  rows_CK: Array,
  grad_CN: Array,
  group_size_P: Array,
  num_home: int,
  filled_S: Array | None,
  implementations: Implementations,
  tunings: Tunings,
) -> tuple[tuple[Array, Array], Any]:
  """Gradients to weights, anything for slots that are not filled, and the result of a transfer."""
  arguments = rows_CK, grad_CN, group_size_P, num_home
  operation = "wgrad" if transfer is None else "wgrad beside"
  tuning = tunings.find(operation, rows_CK.shape[1], grad_CN.shape[1])

  def by_kernel() -> tuple[tuple[Array, Array], Any]:
    options: Any = {"filled_S": filled_S, "tuning": tuning}
    if transfer is None:
      return kernels.grouped_matmul_wgrad(*arguments, **options), None
    return kernels.wgrad_beside(transfer, *arguments, **options)

  candidates = {
    "mosaic_gpu": by_kernel,
    "portable": lambda: (tile_matmul.wgrad(*arguments), transfer and transfer.launch()),
  }
  return first_that_can(implementations, candidates)


def _rows_grad(
  transfer: "kernels.Transfer | None",
  hidden_grad: Hidden,
  home: ExpertWeights,
  replica: ExpertWeights,
  group_size_P: Array,
  implementations: Implementations,
  tunings: Tunings,
) -> tuple[Array, Any]:
  """The gradient to the rows, through both projections, and the result of a transfer."""
  homes, replicas = (home.wi_gate, home.wi_up), (replica.wi_gate, replica.wi_up)
  width, inner = home.wi_gate.shape[1:]
  tuning = tunings.find("sum" if transfer is None else "sum beside", 2 * inner, width)

  def one_by_one() -> Array:
    return tile_matmul.matmul(
      hidden_grad.gate_CF, home.wi_gate, replica.wi_gate, group_size_P, True
    ) + tile_matmul.matmul(hidden_grad.up_CF, home.wi_up, replica.wi_up, group_size_P, True)

  candidates = {
    "mosaic_gpu": lambda: kernels.sum_beside(
      transfer, hidden_grad, homes, replicas, group_size_P, transpose_rhs=True, tuning=tuning
    ),
    "portable": lambda: (one_by_one(), transfer and transfer.launch()),
  }
  return first_that_can(implementations, candidates)


def _scaled(rows_CX: Array, gate_C: Array) -> Array:
  return (rows_CX.astype(jnp.float32) * gate_C[:, None]).astype(rows_CX.dtype)


def _inner(hidden: Hidden, activation: Activation) -> Array:
  # An activation may compute in float32.
  return activation(hidden.gate_CF).astype(hidden.up_CF.dtype) * hidden.up_CF
