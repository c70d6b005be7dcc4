"""Tokens through experts and back, in as many rounds as the busiest rank's rows need.

One differentiation rule spans replication, dispatch, experts and combine, so that no replica
becomes a residual.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import pallas_kernels as kernels
from pallas_kernels import Tunings
from ultraep_jax.activations import Activation
from ultraep_jax.compute import experts, widths
from ultraep_jax.config import DispatchDtype
from ultraep_jax.implementation import Implementations
from ultraep_jax.mesh import after
from ultraep_jax.transport import exchange, replicate
from ultraep_jax.types import Array, AxisName, ExpertWeights, Routes

# For `jax.checkpoint_policies.save_only_these_names`: rows spare backward a second dispatch,
# hidden two of the three matmuls and the replicas for them, which have no name: they are made
# again.
ROWS_NAME = "ultraep_rows"
HIDDEN_NAME = "ultraep_hidden"


class Static(NamedTuple):
  """What is fixed at trace time."""

  axis_name: AxisName
  capacity: int  # C of a call that is differentiated, whose rows are kept
  transient_capacity: int  # of one that is not
  domain_size: int
  node_ranks: int
  activation: Activation
  replicating: Implementations
  exchanging: Implementations
  placing: Implementations
  multiplying: Implementations
  dispatch_dtype: DispatchDtype | None
  batch_invariant: bool
  tunings: Tunings
  columns: widths.Columns  # that experts get


class Routing(NamedTuple):
  """The integers that the movers need."""

  rank: Array  # this one along the expert axis
  # Both ``None`` without slots: XLA's GPU compiler crashes over empty residuals (jax 0.11.2).
  replica_expert_GS: Array | None
  parent_GS: Array | None
  home_rows_G: Array  # of each rank, those that its home experts compute
  lists: "kernels.TransferLists | None"  # as ``experts.transfer_lists`` makes them
  routes: Routes
  rounds: Array | None  # None: one, whatever the loads


class _Round(NamedTuple):
  """One round's crossing, and the inputs and projections of its experts."""

  crossing: exchange.Crossing
  rows_CD: Array
  gate_C: Array
  hidden: experts.Hidden | None


class _Grads(NamedTuple):
  """Gradients: of x in its dtype, of gates float32, of weights ``ExpertWeights.grad_dtype``."""

  x_TD: Array
  gate_TK: Array
  home: ExpertWeights


@functools.partial(jax.jit, static_argnums=0)
def experts_on_tokens(
  static: Static, x_TD: Array, gate_TK: Array, weights: ExpertWeights, routing: Routing
) -> Array:
  """``[T, D]``, each token's experts' outputs weighted by its gates.

  A function of its own in the program: layers alike, not in a scan, have one. JAX then lowers
  their kernels once and XLA compiles them once, which takes a minute.

  Where the number of rounds is not known while tracing, the host reads it, and waits. It does so
  behind the first round, so that the launches of that round never wait.
  """
  return _experts_on_tokens(static, x_TD, gate_TK, weights, routing)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _experts_on_tokens(
  static: Static, x_TD: Array, gate_TK: Array, weights: ExpertWeights, routing: Routing
) -> Array:
  static = static._replace(capacity=static.transient_capacity)
  replicas = _replicas(static, x_TD.dtype, weights, routing)
  sent, out = _run_round(static, x_TD, gate_TK, replicas, routing, 0, keep_hidden=False)
  return _more_rounds(static, x_TD, gate_TK, replicas, routing, _combine(sent, out), out.copies)


def _forward(
  static: Static, x_TD: Array, gate_TK: Array, weights: ExpertWeights, routing: Routing
) -> tuple[Array, tuple]:
  replicas = _replicas(static, x_TD.dtype, weights, routing)
  sent, out = _run_round(static, x_TD, gate_TK, replicas, routing, 0, keep_hidden=True)
  y_TD = _more_rounds(static, x_TD, gate_TK, replicas, routing, _combine(sent, out), out.copies)
  routing = named(routing, ROWS_NAME)  # where rows are kept, backward does not plan again
  hidden = named(out.hidden, HIDDEN_NAME)
  first = named(_kept(sent, out), ROWS_NAME)._replace(hidden=hidden)
  return y_TD, (x_TD, gate_TK, weights, routing, first)


def _backward(
  static: Static, residuals: tuple, grad_TD: Array
) -> tuple[Array, Array, ExpertWeights, None]:
  x_TD, gate_TK, weights, routing, first = residuals
  replicas = _replicas(static, x_TD.dtype, weights, routing)

  def round_grads(
    index: Array | int,
    this: _Round,
    replicas: replicate.Replicas,
    into: ExpertWeights | None = None,
  ) -> tuple[_Grads, ExpertWeights]:
    assert this.hidden is not None
    forward = this.gate_C, this.rows_CD, *this.hidden
    grad_CD = this.crossing.dispatch(ordered(static, routing, grad_TD, *forward))
    replicas = _copies_after(static, routing, replicas, grad_CD)
    grads = experts.expert_backward(
      grad_CD,
      this.gate_C,
      this.rows_CD,
      this.hidden,
      replicas.home,
      replicas,
      _round_sizes(static, routing, index),
      static.activation,
      into=into,
      weight_grad_dtype=weights.grad_dtype,
      implementations=static.multiplying,
      tunings=static.tunings,
    )
    rows_grad_CD = ordered(static, routing, grads.rows_CD, *jax.tree.leaves(grads.home))
    back = exchange.combine_values(
      this.crossing, rows_grad_CD, grads.gate_C, grads.home, _count(static, routing)
    )
    return _Grads(*back), grads.copies

  total, copies = round_grads(0, first, replicas)
  replicas = dataclasses.replace(replicas, known=copies)

  def add_round(index: Array, total: _Grads) -> _Grads:
    this = _kept(*_run_round(static, x_TD, gate_TK, replicas, routing, index, keep_hidden=True))
    grads, _ = round_grads(index, this, replicas, total.home)
    return _Grads(total.x_TD + grads.x_TD, total.gate_TK + grads.gate_TK, grads.home)

  if routing.rounds is not None:
    total = lax.fori_loop(jnp.int32(1), routing.rounds, add_round, total)
  home = widths.narrow(total.home, static.columns)
  weight_grads = jax.tree.map(lambda grad, leaf: grad.astype(leaf.dtype), home, weights)
  return total.x_TD, total.gate_TK, weight_grads, None


_experts_on_tokens.defvjp(_forward, _backward)


def assignments_apart(
  static: Static, x_TD: Array, gate_TK: Array, weights: ExpertWeights, routing: Routing
) -> Array:
  """``experts_on_tokens`` with every assignment a token of its own, summed where it came from.

  A token's experts are summed in the order of its choices then, wherever the plan put them.
  """
  num_tokens, top_k = gate_TK.shape
  routes = routing.routes._replace(
    dest_TK=routing.routes.dest_TK.reshape(-1, 1), row_TK=routing.routes.row_TK.reshape(-1, 1)
  )
  y_AD: Any = experts_on_tokens(
    static,
    jnp.repeat(x_TD, top_k, axis=0),
    gate_TK.reshape(-1, 1),
    weights,
    routing._replace(routes=routes),
  )
  y_TKD = y_AD.reshape(num_tokens, top_k, -1).astype(jnp.float32)
  # One addition after another: a reduction's order is the compiler's.
  y_TD = functools.reduce(jnp.add, (y_TKD[:, k] for k in range(top_k)))
  return y_TD.astype(x_TD.dtype)


def _more_rounds(
  static: Static,
  x_TD: Array,
  gate_TK: Array,
  replicas: replicate.Replicas,
  routing: Routing,
  y_TD: Array,
  copies: ExpertWeights,
) -> Array:
  """Adds the rounds after the first to its output."""
  if routing.rounds is None:
    return y_TD
  replicas = dataclasses.replace(replicas, known=copies)

  def add_round(index: Array, y_TD: Array) -> Array:
    sent, out = _run_round(static, x_TD, gate_TK, replicas, routing, index, keep_hidden=False)
    return y_TD + _combine(sent, out)

  return lax.fori_loop(jnp.int32(1), routing.rounds, add_round, y_TD)


def _replicas(
  static: Static, dtype: jnp.dtype, weights: ExpertWeights, routing: Routing
) -> replicate.Replicas:
  """The home weights in the compute dtype and widths of kernels, and the way to their copies."""
  return replicate.Replicas(
    widths.widen(jax.tree.map(lambda leaf: leaf.astype(dtype), weights), static.columns),
    *_placement(routing),
    routing.home_rows_G,
    static.axis_name,
    static.domain_size,
    static.replicating,
    static.tunings,
    routing.rank,
    routing.lists,
  )


def _placement(routing: Routing) -> tuple[Array, Array]:
  """The experts and senders of the slots."""
  if routing.replica_expert_GS is None or routing.parent_GS is None:
    none_GS = jnp.zeros((routing.home_rows_G.shape[0], 0), jnp.int32)
    return none_GS, none_GS
  return routing.replica_expert_GS, routing.parent_GS


def _run_round(
  static: Static,
  x_TD: Array,
  gate_TK: Array,
  replicas: replicate.Replicas,
  routing: Routing,
  index: Array | int,
  keep_hidden: bool,
) -> tuple[exchange.Sent, experts.ExpertOutput]:
  """Dispatches one round's tokens and runs their experts."""
  sent = exchange.send(
    *(x_TD, gate_TK, routing.routes, index, static.capacity, static.axis_name),
    dispatch_dtype=static.dispatch_dtype,
    node_ranks=static.node_ranks,
    implementations=static.exchanging,
    placing=static.placing,
    tunings=static.tunings,
    rank=routing.rank,
    count=_count(static, routing),
  )
  replicas = _copies_after(static, routing, replicas, sent.rows_CD)
  out = experts.expert_forward(
    sent.rows_CD,
    replicas.home,
    replicas,
    _round_sizes(static, routing, index),
    static.activation,
    keep_hidden=keep_hidden,
    batch_invariant=static.batch_invariant,
    implementations=static.multiplying,
    tunings=static.tunings,
  )
  return sent, out


def _kept(sent: exchange.Sent, out: experts.ExpertOutput) -> _Round:
  return _Round(sent.crossing, sent.rows_CD, sent.gate_C, out.hidden)


def ordered(static: Static, routing: Routing, value: Array, *earlier: Array) -> Array:
  """``mesh.after`` for portable exchanges."""
  count = _count(static, routing)
  return value if count is None else after(value, count, *earlier)


def _count(static: Static, routing: Routing) -> Array | None:
  """For ``mesh.after``; ``None`` beside kernels, which need no order of their own."""
  kernels_run = "mosaic_gpu" in (*static.replicating, *static.exchanging, *static.multiplying)
  return None if kernels_run else routing.home_rows_G[0]


def _copies_after(
  static: Static, routing: Routing, replicas: replicate.Replicas, *earlier: Array
) -> replicate.Replicas:
  """The same, ``ordered``: the plan says who passes what, so it is enough that it waits."""
  if routing.replica_expert_GS is None:
    return replicas
  placed_GS = ordered(static, routing, replicas.replica_expert_GS, *earlier)
  return dataclasses.replace(replicas, replica_expert_GS=placed_GS)


def _combine(sent: exchange.Sent, out: experts.ExpertOutput) -> Array:
  return sent.crossing.combine(out.rows_CD, sent.gates)


def _round_sizes(static: Static, routing: Routing, index: Array | int) -> Array:
  """Rows of each slot on this rank that fall into a round."""
  if routing.rounds is None:
    return routing.routes.group_size_P
  end_P = jnp.cumsum(routing.routes.group_size_P, dtype=jnp.int32)
  first = index * static.capacity
  inside_P = jnp.clip(end_P - first, 0, static.capacity)
  return jnp.diff(inside_P, prepend=jnp.zeros_like(inside_P[:1]))


def named[T](tree: T, name: str) -> T:
  return jax.tree.map(functools.partial(checkpoint_name, name=name), tree)
