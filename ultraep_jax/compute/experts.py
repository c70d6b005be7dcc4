"""Experts of every form on grouped rows: forward, and all of its gradients."""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

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
  rows_grad_by_copies,
  slot_sums,
  wgrad_beside,
)
from ultraep_jax.compute.homeward import Homeward
from ultraep_jax.compute.tiles import slot_of_rows
from ultraep_jax.implementation import Implementations, first_that_can
from ultraep_jax.transport.replicate import Replicas
from ultraep_jax.types import Array, AxisName, ExpertWeights, Layout

# What backward needs of the experts' forward: the rows times ``ExpertWeights.projections``, biases
# added, ``[C, F]`` or ``[C, 2F]`` each.
Hidden = tuple[Array, ...]

# Lists of copies: matmuls wait for the first two; the last is of projections that none waits for.
_PROJECTIONS, _WO, _LATER = range(3)


@jax.named_scope("uep.replicate")
def transfer_lists(
  home: ExpertWeights,
  dtype: DTypeLike,
  replica_expert_GS: Array,
  parent_GS: Array,
  home_rows_G: Array,
  axis_name: AxisName,
  rank: Array,
  implementations: Implementations,
) -> "kernels.TransferLists | None":
  """What kernels send and await, forward and backward, of one plan; ``None``: none can.

  Args:
    home: weights of the home slots.
    dtype: that they travel in.
    replica_expert_GS: ``[G, S]`` int32, as for ``Replicas``.
    parent_GS: likewise.
    home_rows_G: likewise.
    axis_name: the expert mesh axis.
    rank: this rank along it.
    implementations: what to try, in order.
  """

  def bytes_of(arrays: Sequence[Array]) -> int:
    return sum(math.prod(each.shape[1:]) for each in arrays) * jnp.dtype(dtype).itemsize

  def by_kernel() -> "kernels.TransferLists | None":
    sizes: list[int | None] = [None] * 3
    sizes[_PROJECTIONS], sizes[_WO] = bytes_of(home.projections), bytes_of([home.wo])
    return kernels.transfer_lists(
      replica_expert_GS,
      parent_GS,
      home_rows_G,
      axis_name=axis_name,
      num_home=home.wo.shape[0],
      expert_bytes=sizes,
      rank=rank,
    )

  candidates = {"mosaic_gpu": by_kernel, "portable": lambda: None}
  return first_that_can((*implementations, "portable"), candidates)


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
  batch_invariant: bool = False,
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
    batch_invariant: as in ``grouped_matmul``.
    implementations: of the matmuls, to try in order.
    tunings: how kernels are laid out.
  """
  arguments = rows_CD, home, replicas, group_size_P, activation
  # An activation or a shape that the fused kernel lacks may still suit the plain matmul's.
  candidates = {
    "mosaic_gpu": lambda: _by_kernels(*arguments, keep_hidden, tunings),
    "portable": lambda: _one_by_one(*arguments, batch_invariant, implementations, tunings),
  }
  out_CD, hidden, copies = first_that_can((*implementations, "portable"), candidates)
  return ExpertOutput(out_CD, hidden if keep_hidden else None, copies)


def _by_kernels(
  rows_CD: Array,
  home: ExpertWeights,
  replicas: Replicas,
  group_size_P: Array,
  activation: Activation,
  keep_hidden: bool,
  tunings: Tunings,
) -> tuple[Array, Hidden | None, ExpertWeights]:
  """Of both matmuls each brings the copies that it needs, if they are not there."""
  inner, width = home.wo.shape[1:]
  operation = "gated" if keep_hidden else "gated only"
  arguments = group_size_P, activations.unit(activation, home.layout)
  options: Any = {"columns": str(home.layout), "keep_hidden": keep_hidden}
  copying = [
    replicas.copying(home.projections, _PROJECTIONS, flat=False),
    replicas.copying([home.wo], _WO, flat=False),
  ]
  if copying[0] is None or copying[1] is None:
    options["tuning"] = tunings.find(operation, width, inner)
    copies = replicas.copies()
    gated = kernels.gated_matmul(
      rows_CD, _projections(home), _projections(copies), *arguments, **options
    )
    out_CD = kernels.grouped_matmul(
      gated.inner_CN,
      home.wo,
      copies.wo,
      group_size_P,
      bias=_bias(home.wo_bias, copies.wo_bias),
      tuning=tunings.find("forward", inner, width),
    )
    return out_CD, gated.hidden, copies
  projection_biases, wo_bias = home.projection_biases, home.wo_bias
  if jax.tree.leaves((projection_biases, wo_bias)):  # small, and needed from the first tile on
    projection_biases, wo_bias = replicas.copies_of((projection_biases, wo_bias))
  gated, projections = kernels.gated_beside(
    copying[0],
    rows_CD,
    _projections(home),
    *arguments,
    replica_biases=projection_biases,
    tuning=tunings.find(f"{operation} beside", width, inner),
    **options,
  )
  out_CD, (wo,) = kernels.matmul_beside(
    copying[1],
    gated.inner_CN,
    home.wo,
    group_size_P,
    bias=_bias(home.wo_bias, wo_bias),
    tuning=tunings.find("forward beside", inner, width),
  )
  return out_CD, gated.hidden, home.with_values(projections, wo, projection_biases, wo_bias)


def _projections(weights: ExpertWeights) -> "kernels.Projections":
  return kernels.Projections(weights.projections, weights.projection_biases)


def _one_by_one(
  rows_CD: Array,
  home: ExpertWeights,
  replicas: Replicas,
  group_size_P: Array,
  activation: Activation,
  batch_invariant: bool,
  implementations: Implementations,
  tunings: Tunings,
) -> tuple[Array, Hidden, ExpertWeights]:
  matmul = functools.partial(
    grouped_matmul,
    group_size_P=group_size_P,
    batch_invariant=batch_invariant,
    implementations=implementations,
    tunings=tunings,
  )
  copies = replicas.copies()
  weights = zip(home.projections, copies.projections, strict=True)
  biases = zip(home.projection_biases, copies.projection_biases, strict=True)
  hidden = tuple(
    matmul(rows_CD, *pair, bias=bias) for pair, bias in itertools.zip_longest(weights, biases)
  )
  inner_CF = activations.inner(hidden, home.layout, activation)
  out_CD = matmul(inner_CF, home.wo, copies.wo, bias=_bias(home.wo_bias, copies.wo_bias))
  return out_CD, hidden, copies


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

  Where kernels can, each of five matmuls or so has a transfer beside it::

    gradient to inner     copies of wo, which its rows wait for
    gradient of wo        copies of gate
    gradient of gate      copies of up
    gradient of up        gradients home, of wo
    gradient to the rows  gradients home, of gate and up

  Of projections in one array all copies travel beside the gradient of ``wo``.

  Args:
    grad_CD: ``[C, D]``, per row the gradient of its token's output, not yet weighted.
    gate_C: ``[C]`` float32, the weight of each row.
    rows_CD: the rows of the forward pass.
    hidden: the projections of the forward pass.
    home: weights of the home slots.
    replicas: weights of the replica slots, and where their gradients go.
    group_size_P: rows per slot.
    activation: of the forward pass.
    into: gradients of the home weights, of ``weight_grad_dtype``, to which these are added, in
      place where XLA can. The copies must be known.
    weight_grad_dtype: of the gradients of weights, those of copies on their way home too. Each is
      rounded to it once before a rank adds them in float32, and once after; and so are sums with
      ``into``.
    implementations: of the matmuls, to try in order.
    tunings: how kernels are laid out.
  """
  options: Any = {"implementations": implementations, "tunings": tunings}
  groups: Any = {
    "group_size_P": group_size_P,
    "num_home": home.wo.shape[0],
    "filled_S": replicas.filled_S(),
    "dtype": weight_grad_dtype,
  }
  wgrad = functools.partial(wgrad_beside, **groups, **options)
  sums = functools.partial(slot_sums, **groups, **options)
  copying_wo = replicas.copying([home.wo], _WO, flat=False)
  first, *later = home.projections
  copying = replicas.copying([first, *_biases(home)], _LATER)
  copying_later = [replicas.copying([each], _LATER) for each in later]
  copies = None
  if copying_wo is None or copying is None:
    copies, copying, copying_later = replicas.copies(), None, []
    wo = copies.wo
    ungated_CF = grouped_matmul(grad_CD, home.wo, wo, group_size_P, transpose_rhs=True, **options)
  else:
    ungated_CF, wo = rows_grad_by_copies(copying_wo, grad_CD, home.wo, group_size_P, **options)

  between = hidden, ungated_CF, gate_C, group_size_P, home.layout, activation
  inner_CF, hidden_grad, gate_grad_C = _between(*between, implementations)
  wo_grads, brought = wgrad(copying, inner_CF, grad_CD, into_MKN=into and into.wo)
  projections, biases = (brought[:1], brought[1:]) if copies is None else ([], _biases(copies))

  bias_grads = []
  if home.wo_bias is not None:
    gate_grad_C += _times_bias(grad_CD, _biases(home)[-1], biases[-1], group_size_P)
    bias_grads = [sums(gate_C, grad_CD, into_MN=into and into.wo_bias)]

  homeward = Homeward(replicas, (wo_grads,))
  no_sums = [None] * len(hidden_grad)
  for grad, of in zip(hidden_grad, into.projections if into else no_sums, strict=True):
    if copying_later:
      made, arrived = wgrad(copying_later.pop(0), rows_CD, grad, into_MKN=of)
      projections, arrived = [*projections, *arrived], None
    else:  # beside what adds to gradients that are there already, nothing travels
      transfer = homeward.next() if into is None else None
      made, arrived = wgrad(transfer, rows_CD, grad, into_MKN=of)
    homeward = homeward.then(made, arrived)
  if copies is None:
    copies = _with_biases(home, projections, wo, biases)
  if home.projection_biases:
    ones_C = jnp.ones_like(gate_C)
    into_biases = into.projection_biases if into else no_sums
    pairs = zip(hidden_grad, into_biases, strict=True)
    bias_grads = [*(sums(ones_C, grad, into_MN=of) for grad, of in pairs), *bias_grads]

  transfer = homeward.last(bias_grads)
  rows_grad_CD, arrived = rows_grad_beside(
    transfer, hidden_grad, home.projections, copies.projections, group_size_P, **options
  )
  wo, *others = homeward.totals(bias_grads, arrived)
  count = len(hidden_grad)
  grads = _with_biases(home, others[:count], wo, others[count:])
  return ExpertGrads(rows_grad_CD, gate_grad_C, grads, copies)


def _between(
  hidden: Hidden,
  ungated_CF: Array,
  gate_C: Array,
  group_size_P: Array,
  layout: Layout,
  activation: Activation,
  implementations: Implementations,
) -> tuple[Array, Hidden, Array]:
  """The gated inner rows, and the gradients of ``hidden`` and of the gates.

  The gate scales inner rather than the gradient of the output, whose rows are longer. Its own
  gradient <expert(row), grad> equals <inner, grad wo^T>, which is ``ungated_CF``: no third matmul
  again.
  """

  def by_kernel() -> tuple[Array, Hidden, Array]:
    unit = activations.unit(activation, layout)
    arguments = hidden, ungated_CF, gate_C, group_size_P, unit
    grads = kernels.gated_grads(*arguments, columns=cast("Any", str(layout)))
    return grads.inner_CN, grads.hidden_grad, grads.gate_grad_C

  def in_jax() -> tuple[Array, Hidden, Array]:
    inner_CF, inner_vjp = jax.vjp(
      lambda hidden: activations.inner(hidden, layout, activation), hidden
    )
    gate_grad_C = jnp.sum(inner_CF.astype(jnp.float32) * ungated_CF.astype(jnp.float32), axis=1)
    (hidden_grad,) = inner_vjp(_scaled(ungated_CF, gate_C))
    return _scaled(inner_CF, gate_C), hidden_grad, gate_grad_C

  candidates = {"mosaic_gpu": by_kernel, "portable": in_jax}
  return first_that_can((*implementations, "portable"), candidates)


def _biases(weights: ExpertWeights) -> list[Array]:
  """All that there are."""
  return [*weights.projection_biases, *([] if weights.wo_bias is None else [weights.wo_bias])]


def _with_biases(
  like: ExpertWeights, projections: Sequence[Array], wo: Array, biases: Sequence[Array]
) -> ExpertWeights:
  """Others of the same layout, with biases as ``_biases`` has them."""
  of_projections = biases[: len(like.projection_biases)]
  wo_bias = None if like.wo_bias is None else biases[-1]
  return like.with_values(projections, wo, of_projections, wo_bias)


def _bias(home_MN: Array | None, replica_SN: Array | None) -> Bias:
  return None if home_MN is None or replica_SN is None else (home_MN, replica_SN)


def _times_bias(grad_CD: Array, home_MD: Array, copies_SD: Array, group_size_P: Array) -> Array:
  """``[C]``, what the bias of each row's slot adds to the gradient of its gate."""
  slot_C = slot_of_rows(group_size_P, grad_CD.shape[0])  # of no slot: the last
  bias_PD = jnp.concatenate([home_MD, copies_SD])
  bias_CD = bias_PD[jnp.minimum(slot_C, bias_PD.shape[0] - 1)]
  return jnp.sum(grad_CD.astype(jnp.float32) * bias_CD.astype(jnp.float32), axis=1)


def _scaled(rows_CX: Array, gate_C: Array) -> Array:
  return (rows_CX.astype(jnp.float32) * gate_C[:, None]).astype(rows_CX.dtype)
