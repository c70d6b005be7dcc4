"""Experts of every form on grouped rows: forward, and all of its gradients."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

import pallas_kernels as kernels
from pallas_kernels import UNTUNED, Tunings
from ultraep_jax import activations
from ultraep_jax.activations import Activation
from ultraep_jax.compute.grouped import (
  Bias,
  grouped_matmul,
  rows_grad_beside,
  slot_sums,
  wgrad_beside,
)
from ultraep_jax.implementation import Implementations, first_that_can
from ultraep_jax.transport.replicate import Replicas
from ultraep_jax.types import Array, ExpertWeights

# What backward needs of the experts' forward: the rows times ``ExpertWeights.projections``, biases
# added, ``[C, F]`` or ``[C, 2F]`` each.
Hidden = tuple[Array, ...]


class ExpertOutput(NamedTuple):
  """What experts make of rows, and the copies of weights that they needed."""

  rows_CD: Array
  hidden: Hidden | None
  copies: ExpertWeights


@jax.named_scope("uep.experts")
def expert_forward(
  rows_CD: Array,
  home: ExpertWeights,
  replicas: Replicas,
  group_size_P: Array,
  activation: Activation,
  *,
  keep_hidden: bool = True,
  implementations: Implementations = ("portable",),
  tunings: Tunings = UNTUNED,
) -> ExpertOutput:
  """``wo(unit(rows wi_gate, rows wi_up))`` for each row by its slot's expert, biases added.

  Where kernels can, copies of weights arrive while the rows of home slots, which need none of
  them, are multiplied.

  Args:
    rows_CD: ``[C, D]``, grouped by slot from row 0 on.
    home: weights of the home slots.
    replicas: weights of the replica slots.
    group_size_P: rows per slot.
    activation: what is between the matrices.
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
    bias=_bias(home.wo_bias, copies.wo_bias),
    implementations=implementations,
    tunings=tunings,
  )
  return ExpertOutput(out_CD, hidden if keep_hidden else None, copies)


def _gated_kernel(
  rows_CD: Array,
  home: ExpertWeights,
  replicas: Replicas,
  group_size_P: Array,
  activation: Activation,
  keep_hidden: bool,
  tunings: Tunings,
) -> tuple[Array, Hidden | None, ExpertWeights]:
  widths = home.wo.shape[2], home.wo.shape[1]
  operation = "gated" if keep_hidden else "gated only"
  tuning = tunings.find(operation, *widths)
  arguments = group_size_P, activations.unit(activation, home.layout)
  options: Any = {"columns": str(home.layout), "keep_hidden": keep_hidden, "tuning": tuning}
  if (copying := replicas.copying()) is None:
    copies = replicas.copies()
    operands = rows_CD, _projections(home), _projections(copies)
    gated = kernels.gated_matmul(*operands, *arguments, **options)
  else:
    options["tuning"] = tunings.find(f"{operation} beside", *widths)
    options["replica_tuning"] = tuning
    numbered = _of_leaves(home, list(range(len(jax.tree.leaves(home)))))
    options["brought"] = numbered.projections, numbered.projection_biases
    operands = rows_CD, _projections(home)
    gated, leaves = kernels.gated_beside(copying, *operands, *arguments, **options)
    copies = _of_leaves(home, leaves)
  return gated.inner_CN, gated.hidden if keep_hidden else None, copies


def _projections(weights: ExpertWeights) -> "kernels.Projections":
  return kernels.Projections(weights.projections, weights.projection_biases)


def _gated(
  rows_CD: Array,
  home: ExpertWeights,
  replicas: Replicas,
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
  copies = replicas.copies()
  weights = zip(home.projections, copies.projections, strict=True)
  biases = zip(home.projection_biases, copies.projection_biases, strict=True)
  hidden = tuple(matmul(*pair, bias=bias) for pair, bias in itertools.zip_longest(weights, biases))
  return activations.inner(hidden, home.layout, activation), hidden, copies


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
  replicas: Replicas,
  group_size_P: Array,
  activation: Activation,
  *,
  into: ExpertWeights | None = None,
  weight_grad_dtype: DTypeLike = jnp.float32,
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
    into: gradients of the home weights, to which these are added, in place where XLA can. The
      copies must be known.
    weight_grad_dtype: of the gradients of the home weights' matrices. Those of copies are float32,
      and each sum is rounded once before they are added and once after.
    implementations: of the matmuls, to try in order.
    tunings: how kernels are laid out.
  """
  options: Any = {"implementations": implementations, "tunings": tunings}
  groups: Any = {
    "group_size_P": group_size_P,
    "num_home": home.wo.shape[0],
    "filled_S": replicas.filled_S(),
  }
  wgrad = functools.partial(wgrad_beside, **groups, **options, home_dtype=weight_grad_dtype)
  sums = functools.partial(slot_sums, **groups, **options)
  inner_CF, inner_vjp = jax.vjp(
    lambda hidden: activations.inner(hidden, home.layout, activation), hidden
  )
  copying = replicas.copying()
  # The gate scales inner rather than grad, whose rows are longer.
  wo_grads, leaves = wgrad(copying, _scaled(inner_CF, gate_C), grad_CD, into_MKN=into and into.wo)
  copies = replicas.copies() if copying is None else _of_leaves(home, leaves)

  # The gate's gradient <expert(row), grad> equals <inner, grad wo^T>: no third matmul again.
  ungated_CF = grouped_matmul(
    grad_CD, home.wo, copies.wo, group_size_P, transpose_rhs=True, **options
  )
  gate_grad_C = jnp.sum(inner_CF.astype(jnp.float32) * ungated_CF.astype(jnp.float32), axis=1)
  bias_grads = None
  if (bias := _bias(home.wo_bias, copies.wo_bias)) is not None:
    gate_grad_C += _times_bias(grad_CD, bias, group_size_P)
    bias_grads = sums(gate_C, grad_CD, into_MN=into and into.wo_bias)
  (hidden_grad,) = inner_vjp(_scaled(ungated_CF, gate_C))

  no_sums = [None] * len(hidden_grad)
  into_grads = [
    wgrad(None, rows_CD, grad, into_MKN=of)[0]
    for grad, of in zip(hidden_grad, into.projections if into else no_sums, strict=True)
  ]
  into_bias_grads = []
  if home.projection_biases:
    ones_C = jnp.ones_like(gate_C)
    into_bias_grads = [
      sums(ones_C, grad, into_MN=of)
      for grad, of in zip(hidden_grad, into.projection_biases if into else no_sums, strict=True)
    ]
  home_grads, replica_grads = (
    home.with_values(
      [grads[of] for grads in into_grads],
      wo_grads[of],
      [grads[of] for grads in into_bias_grads],
      bias_grads and bias_grads[of],
    )
    for of in (0, 1)
  )
  reducing = replicas.reducing(replica_grads, home_grads)
  rows_grad_CD, leaves = rows_grad_beside(
    reducing, hidden_grad, home.projections, copies.projections, group_size_P, **options
  )
  if reducing is None:
    total = replicas.reduce(replica_grads, home_grads)
  else:
    total = _of_leaves(home_grads, leaves)
  return ExpertGrads(rows_grad_CD, gate_grad_C, total, copies)


def _of_leaves(like: ExpertWeights, leaves: Sequence[Any]) -> ExpertWeights:
  """What a transfer brought."""
  return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _bias(home_MN: Array | None, replica_SN: Array | None) -> Bias:
  return None if home_MN is None or replica_SN is None else (home_MN, replica_SN)


def _times_bias(grad_CD: Array, bias: tuple[Array, Array], group_size_P: Array) -> Array:
  """``[C]``, what the bias of each row's slot adds to the gradient of its gate."""
  end_P = jnp.cumsum(group_size_P, dtype=jnp.int32)
  row_C1 = jnp.arange(grad_CD.shape[0], dtype=jnp.int32)[:, None]
  slot_C = jnp.sum(end_P[None, :] <= row_C1, axis=1, dtype=jnp.int32)  # of no slot: the last
  bias_CD = jnp.concatenate(bias)[jnp.minimum(slot_C, end_P.shape[0] - 1)]
  return jnp.sum(grad_CD.astype(jnp.float32) * bias_CD.astype(jnp.float32), axis=1)


def _scaled(rows_CX: Array, gate_C: Array) -> Array:
  return (rows_CX.astype(jnp.float32) * gate_C[:, None]).astype(rows_CX.dtype)
