"""The balanced MoE layer on one rank: load, plan, route, replicate, dispatch, experts, combine."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.tunings import Tunings
from ultraep_jax import (
  exchange,
  experts,
  implementation,
  load,
  replicate,
  route,
  stats,
  strategies,
)
from ultraep_jax.checks import check_layer, check_plan
from ultraep_jax.config import BalanceConfig, DispatchDtype
from ultraep_jax.experts import Activation
from ultraep_jax.mesh import mesh_max, to_varying, varying_axes
from ultraep_jax.types import Array, ExpertWeights, LayerStats, PlanCost, Routes

# For `jax.checkpoint_policies.save_only_these_names`: the plan spares backward a second
# planning, rows a second dispatch, hidden two of the three matmuls and the replicas for them.
# Replicas have no name: they are made again.
PLAN_NAME = "ultraep_plan"
ROWS_NAME = "ultraep_rows"
HIDDEN_NAME = "ultraep_hidden"
REMAT_NAMES = (PLAN_NAME, ROWS_NAME, HIDDEN_NAME)

# Rates measured on H200: bf16 grouped matmul in FLOP/s, one rank's weight push in bytes/s.
_MATMUL_RATE = 737e12
_LINK_RATE = 350e9
# The collectives and launches of one more round, in seconds.
_ROUND_SECONDS = 100e-6


def moe(
  x_TD: Array,
  expert_index_TK: Array,
  gate_TK: Array,
  weights: ExpertWeights,
  *,
  config: BalanceConfig,
  axis_name: str = "expert",
  activation: Activation = jax.nn.silu,
) -> tuple[Array, LayerStats]:
  """Runs a balanced MoE layer inside the caller's ``shard_map``.

  Computes ``sum_k gate[t, k] * expert[index[t, k]](x[t])`` exactly as a dense layer would; the
  plan only changes where. Differentiable in ``x_TD``, ``gate_TK`` and ``weights``.

  All ranks of all manual mesh axes take part, and agree on the number of rounds: do not call
  it under a condition that differs between them.

  Args:
    x_TD: ``[T, D]`` bfloat16, float16 or float32, this rank's tokens; the compute dtype.
    expert_index_TK: ``[T, K]`` integers, chosen experts. −1 is a masked assignment: counted
      nowhere, computed nowhere, contributing zero.
    gate_TK: ``[T, K]`` float32, the weights of the choices.
    weights: this rank's ``M = E // G`` home experts, in the parameter dtype; cast to the
      compute dtype inside, so that float32 parameters get float32 gradients.
    config: how to balance.
    axis_name: the mesh axis that experts are sharded over.
    activation: of the gate projection.

  Returns:
    ``y_TD`` in x's dtype and the statistics of this token group, equal on its ranks.

  Raises:
    ValueError: shapes or sizes do not fit.
    TypeError: a dtype is wrong.
  """
  num_ranks = check_layer(x_TD, expert_index_TK, gate_TK, weights, config, axis_name)
  num_experts = weights.wo.shape[0] * num_ranks
  load.check_expert_index(expert_index_TK, num_experts)
  expert_index_TK = expert_index_TK.astype(jnp.int32)
  rank = lax.axis_index(axis_name)
  strategy = strategies.resolve(config.strategy)
  if strategy.reassign is not None:
    expert_index_TK = strategy.reassign(expert_index_TK, rank, num_experts, num_ranks)

  num_tokens, top_k = expert_index_TK.shape
  capacity = route.row_capacity(num_tokens, top_k, num_ranks, config)
  load_GE = load.gather_loads(load.expert_load(expert_index_TK, num_experts), axis_name)
  plan = strategy.plan(load_GE, config, layer_cost(x_TD.dtype, weights, capacity, config))
  check_plan(plan, num_experts, num_ranks)
  if not plan.replica_expert.shape[1]:
    # An empty array that a planner computed would enter loops, and crash XLA:CPU's compiler.
    none_GS = jnp.zeros((num_ranks, 0), jnp.int32)
    plan = plan._replace(replica_expert=none_GS, parent=none_GS)
  routes = route.route_tokens(expert_index_TK, load_GE, plan, rank, config)
  # A buffer for every assignment of every rank, as on one rank, never needs a second round.
  worst = num_ranks * expert_index_TK.size
  rounds = mesh_max(routes.num_rounds) if capacity < worst else None

  routing = _name(_Routing(plan.replica_expert, plan.parent, routes, rounds), PLAN_NAME)
  implementations = implementation.resolve(config.implementation)
  static = _Static(
    axis_name,
    capacity,
    config.domain_size,
    activation,
    implementations,
    config.dispatch_dtype,
    implementation.resolve_tunings(config.tunings, implementations),
  )
  # Weights vary over the experts' axis only; a cast outside the custom_vjp makes JAX sum
  # their gradients over the axes that tokens vary over as well.
  axes = varying_axes(x_TD, expert_index_TK, gate_TK, weights, routing)
  compute = _assignments_apart if config.batch_invariant else _experts_on_tokens
  y_TD: Any = compute(  # custom_vjp hides the type
    static,
    to_varying(x_TD, axes),
    to_varying(gate_TK.astype(jnp.float32), axes),
    to_varying(weights, axes),
    to_varying(routing, axes),
  )
  measured = stats.layer_stats(
    expert_index_TK,
    load_GE,
    plan,
    routes,
    jnp.int32(1) if rounds is None else rounds,
    weights,
    x_TD.dtype,
    config,
    axis_name,
  )
  return y_TD, measured


def layer_cost(
  dtype: jnp.dtype, weights: ExpertWeights, capacity: int, config: BalanceConfig
) -> PlanCost:
  """The planner's costs for a layer of these shapes, in rows of expert matmul."""
  rows_per_second = _MATMUL_RATE / (2 * weights.expert_size)
  copy_rows = config.copy_rows
  if copy_rows is None:
    copy_bytes = weights.expert_size * dtype.itemsize
    copy_rows = round(copy_bytes / _LINK_RATE * rows_per_second)
  return PlanCost(copy_rows, capacity, min(round(_ROUND_SECONDS * rows_per_second), 1 << 20))


class _Static(NamedTuple):
  """What is fixed at trace time."""

  axis_name: str
  capacity: int
  domain_size: int | None
  activation: Activation
  implementations: implementation.Implementations
  dispatch_dtype: DispatchDtype | None
  tunings: Tunings


class _Routing(NamedTuple):
  """The integers that the movers need."""

  replica_expert_GS: Array
  parent_GS: Array
  routes: Routes
  rounds: Array | None  # None: one, whatever the loads


class _Round(NamedTuple):
  """One round's crossing, and the inputs and projections of its experts."""

  crossing: exchange.Crossing
  rows_CD: Array
  gate_C: Array
  hidden: experts.Hidden | None


class _Grads(NamedTuple):
  """What one round adds to the gradients: float32, but those of x, which are in its dtype."""

  x_TD: Array
  gate_TK: Array
  home: ExpertWeights


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _experts_on_tokens(
  static: _Static, x_TD: Array, gate_TK: Array, weights: ExpertWeights, routing: _Routing
) -> Array:
  """Replicate … combine. One rule spans them all, so that no replica becomes a residual."""
  return _all_rounds(static, x_TD, gate_TK, weights, routing, keep_hidden=False)[0]


def _forward(
  static: _Static, x_TD: Array, gate_TK: Array, weights: ExpertWeights, routing: _Routing
) -> tuple[Array, tuple]:
  y_TD, first = _all_rounds(static, x_TD, gate_TK, weights, routing, keep_hidden=True)
  hidden = _name(first.hidden, HIDDEN_NAME)
  first = _name(first, ROWS_NAME)._replace(hidden=hidden)
  return y_TD, (x_TD, gate_TK, weights, routing, first)


def _all_rounds(
  static: _Static,
  x_TD: Array,
  gate_TK: Array,
  weights: ExpertWeights,
  routing: _Routing,
  keep_hidden: bool,
) -> tuple[Array, _Round]:
  """The output, and what backward needs of the first round."""
  run = functools.partial(_run_round, static, x_TD, gate_TK, routing=routing)

  def combined(out: experts.ExpertOutput, this: _Round) -> Array:
    return this.crossing.combine(out.rows_CD, this.gate_C)

  replicas = _replicas(static, x_TD.dtype, weights, routing)
  out, first = run(replicas, index=0, keep_hidden=keep_hidden)
  y_TD = combined(out, first)
  replicas = dataclasses.replace(replicas, known=out.copies)
  if routing.rounds is not None:

    def add_round(index: Array, y_TD: Array) -> Array:
      return y_TD + combined(*run(replicas, index=index, keep_hidden=False))

    y_TD = lax.fori_loop(jnp.int32(1), routing.rounds, add_round, y_TD)
  return y_TD, first


def _backward(
  static: _Static, residuals: tuple, grad_TD: Array
) -> tuple[Array, Array, ExpertWeights, None]:
  x_TD, gate_TK, weights, routing, first = residuals
  replicas = _replicas(static, x_TD.dtype, weights, routing)

  def round_grads(
    index: Array | int, this: _Round, replicas: replicate.Replicas
  ) -> tuple[_Grads, ExpertWeights]:
    assert this.hidden is not None
    grad_CD = this.crossing.dispatch(grad_TD)
    grads = experts.expert_backward(
      grad_CD,
      this.gate_C,
      this.rows_CD,
      this.hidden,
      replicas.home,
      replicas,
      _round_sizes(static, routing, index),
      static.activation,
      implementations=static.implementations,
      tunings=static.tunings,
    )
    round_total = _Grads(
      this.crossing.combine(grads.rows_CD, None), this.crossing.collect(grads.gate_C), grads.home
    )
    return round_total, grads.copies

  total, copies = round_grads(0, first, replicas)
  replicas = dataclasses.replace(replicas, known=copies)

  def add_round(index: Array, total: _Grads) -> _Grads:
    _, this = _run_round(static, x_TD, gate_TK, replicas, routing, index, keep_hidden=True)
    return jax.tree.map(jnp.add, total, round_grads(index, this, replicas)[0])

  if routing.rounds is not None:
    total = lax.fori_loop(jnp.int32(1), routing.rounds, add_round, total)
  weight_grads = jax.tree.map(lambda grad, leaf: grad.astype(leaf.dtype), total.home, weights)
  return total.x_TD, total.gate_TK, weight_grads, None


_experts_on_tokens.defvjp(_forward, _backward)


def _assignments_apart(
  static: _Static, x_TD: Array, gate_TK: Array, weights: ExpertWeights, routing: _Routing
) -> Array:
  """``_experts_on_tokens`` with every assignment a token of its own, summed where it came from.

  A token's experts are summed in the order of its choices then, wherever the plan put them.
  """
  num_tokens, top_k = gate_TK.shape
  routes = routing.routes._replace(
    dest_TK=routing.routes.dest_TK.reshape(-1, 1), row_TK=routing.routes.row_TK.reshape(-1, 1)
  )
  y_AD: Any = _experts_on_tokens(
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


def _replicas(
  static: _Static, dtype: jnp.dtype, weights: ExpertWeights, routing: _Routing
) -> replicate.Replicas:
  """The home weights in the compute dtype, and the way to their copies."""
  return replicate.Replicas(
    jax.tree.map(lambda leaf: leaf.astype(dtype), weights),
    routing.replica_expert_GS,
    routing.parent_GS,
    static.axis_name,
    static.domain_size,
    static.implementations,
    static.tunings,
  )


def _run_round(
  static: _Static,
  x_TD: Array,
  gate_TK: Array,
  replicas: replicate.Replicas,
  routing: _Routing,
  index: Array | int,
  keep_hidden: bool,
) -> tuple[experts.ExpertOutput, _Round]:
  """Dispatches one round's tokens and runs their experts."""
  crossing = exchange.cross(
    routing.routes,
    index,
    static.capacity,
    static.axis_name,
    width=x_TD.shape[1],
    dtype=x_TD.dtype,
    implementations=static.implementations,
    tunings=static.tunings,
  )
  rows_CD = crossing.dispatch(x_TD, static.dispatch_dtype)
  gate_C = crossing.spread(gate_TK)
  out = experts.expert_forward(
    rows_CD,
    replicas.home,
    replicas,
    _round_sizes(static, routing, index),
    static.activation,
    keep_hidden=keep_hidden,
    implementations=static.implementations,
    tunings=static.tunings,
  )
  return out, _Round(crossing, rows_CD, gate_C, out.hidden)


def _round_sizes(static: _Static, routing: _Routing, index: Array | int) -> Array:
  """Rows of each slot on this rank that fall into a round."""
  end_P = jnp.cumsum(routing.routes.group_size_P, dtype=jnp.int32)
  first = index * static.capacity
  inside_P = jnp.clip(end_P - first, 0, static.capacity)
  return jnp.diff(inside_P, prepend=jnp.zeros_like(inside_P[:1]))


def _name[T](tree: T, name: str) -> T:
  return jax.tree.map(functools.partial(checkpoint_name, name=name), tree)
