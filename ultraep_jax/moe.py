"""The balanced MoE layer on one rank: load, plan, route, replicate, dispatch, experts, combine."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ultraep_jax import differentiated, implementation, nodes, stats, strategies
from ultraep_jax.activations import Activation
from ultraep_jax.checks import arguments_of, check_columns_apart, check_layer, check_plan
from ultraep_jax.compute import experts, rounds, widths
from ultraep_jax.config import BalanceConfig
from ultraep_jax.mesh import axes_of, check_axis_name, mesh_max, to_varying, varying_axes
from ultraep_jax.planning import capacity, load, route, sizes
from ultraep_jax.planning.cost import copy_bytes
from ultraep_jax.types import Array, AxisName, ExpertWeights, LayerStats, Plan, PlanCost

# For `jax.checkpoint_policies.save_only_these_names`: the plan spares backward a second planning.
PLAN_NAME = "ultraep_plan"
REMAT_NAMES = (PLAN_NAME, rounds.ROWS_NAME, rounds.HIDDEN_NAME)


def moe(
  x_TD: Array,
  expert_index_TK: Array,
  gate_TK: Array,
  weights: ExpertWeights,
  *,
  config: BalanceConfig,
  axis_name: AxisName = "expert",
  activation: Activation = jax.nn.silu,
  inner_axis: str | None = None,
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
    axis_name: the mesh axis that experts are sharded over, or a tuple of several, as in a
      ``PartitionSpec``.
    activation: what is between the matrices, elementwise: a function of the gate projection
      (``act(gate) * up``), or of the one projection of experts that are not gated; or a
      ``GatedUnit`` of both projections. It must not close over traced arrays.
    inner_axis: a mesh axis along which ranks have the same tokens and parts of F, of ``wo`` its
      rows and of biases all but ``wo_bias``. Its results are added up. An activation that mixes
      columns, such as a softmax, is refused.

  Returns:
    ``y_TD`` in x's dtype and the statistics of this token group, equal on its ranks.

  Raises:
    ValueError: shapes or sizes do not fit, or the ranks of a node are not side by side.
    TypeError: a dtype is wrong.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if not set(axes_of(axis_name)) <= set(mesh.manual_axes):
    raise ValueError(
      f"axis_name: expected a manual axis of the enclosing shard_map, {mesh.manual_axes}, "
      f"got {axis_name!r}; make it manual there, or call ultraep_jax.sharded_moe outside"
    )
  check_axis_name(mesh, axis_name)
  if inner_axis is not None and inner_axis not in mesh.manual_axes:
    raise ValueError(
      f"inner_axis: expected a manual axis of the enclosing shard_map, {mesh.manual_axes}, "
      f"got {inner_axis!r}"
    )
  with arguments_of("ultraep_jax.moe"):
    check_layer(
      x_TD, expert_index_TK, gate_TK, weights, activation, config, mesh, axis_name, token_axes=None
    )
    if inner_axis is not None:
      width, parts = weights.wo.shape[1], mesh.shape[inner_axis]
      check_columns_apart(activation, weights.layout, width, parts)
  y_TD, measured = measured_moe(
    x_TD,
    expert_index_TK,
    gate_TK,
    weights,
    config=config,
    axis_name=axis_name,
    activation=activation,
    inner_axis=inner_axis,
  )
  count_GX = lax.all_gather(measured.count_GX, axis_name, tiled=True, to="invarying")
  return y_TD, stats.layer_stats(measured._replace(count_GX=count_GX))


def measured_moe(
  x_TD: Array,
  expert_index_TK: Array,
  gate_TK: Array,
  weights: ExpertWeights,
  *,
  config: BalanceConfig,
  axis_name: AxisName,
  activation: Activation,
  inner_axis: str | None,
) -> tuple[Array, stats.Measured]:
  """``moe`` of checked arguments, with what its statistics are made of instead of these."""
  if inner_axis is not None and weights.wo_bias is not None:  # it counts once
    first = lax.axis_index(inner_axis) == 0
    wo_bias = jnp.where(first, weights.wo_bias, jnp.zeros_like(weights.wo_bias))
    weights = weights.replace(wo_bias=wo_bias)
  num_ranks = lax.axis_size(axis_name)
  num_experts = weights.wo.shape[0] * num_ranks
  expert_index_TK = expert_index_TK.astype(jnp.int32)
  strategy = strategies.resolve(config.strategy)
  if strategy.reassign is not None:
    rank = lax.axis_index(axis_name)
    expert_index_TK = strategy.reassign(expert_index_TK, rank, num_experts, num_ranks)

  mesh, given = jax.sharding.get_abstract_mesh(), config
  config = nodes.settle(config, mesh, axis_name)
  num_tokens, top_k = expert_index_TK.shape
  columns = widths.missing_columns(weights, x_TD.dtype, config, activation, num_tokens * top_k)
  wide = jax.eval_shape(functools.partial(widths.widen, columns=columns), weights)
  forward, training = (
    sizes.settle(
      config,
      tokens=num_tokens,
      top_k=top_k,
      num_ranks=num_ranks,
      dtype=x_TD.dtype,
      weights=wide,
      training=gradients,
    )
    for gradients in (False, True)
  )
  run = functools.partial(
    _settled_moe,
    given=given,
    columns=columns,
    wide=wide,
    axis_name=axis_name,
    activation=activation,
    inner_axis=inner_axis,
  )
  operands = x_TD, expert_index_TK, gate_TK, weights
  if forward.plans == training.plans:
    # One program for both passes. It knows the costs and the buffer of either.
    return run(forward, *operands, counts_rounds=not forward.one_round)
  counts_rounds = not (forward.one_round and training.one_round)
  runs = (
    functools.partial(run, settled, counts_rounds=counts_rounds) for settled in (forward, training)
  )
  return differentiated.choose(*runs)(*operands)


def _settled_moe(
  settled: sizes.Sizes,
  x_TD: Array,
  expert_index_TK: Array,
  gate_TK: Array,
  weights: ExpertWeights,
  *,
  given: BalanceConfig,
  columns: widths.Columns,
  wide: ExpertWeights,
  axis_name: AxisName,
  activation: Activation,
  inner_axis: str | None,
  counts_rounds: bool,
) -> tuple[Array, stats.Measured]:
  """``measured_moe`` by a program whose sizes are settled.

  Args:
    settled: the sizes, and the configuration with them.
    x_TD: and what follows, as in ``moe``.
    given: the caller's configuration.
    columns: that experts get.
    wide: the shapes of the weights with these.
    axis_name: and what follows, as in ``moe``.
    counts_rounds: whether statistics count them. Those of both passes do, or of neither: vmap maps
      a count, and no constant.
  """
  config = settled.config
  mesh, num_ranks = jax.sharding.get_abstract_mesh(), lax.axis_size(axis_name)
  num_experts = weights.wo.shape[0] * num_ranks
  replicating, exchanging, placing, multiplying = (
    implementation.resolve(config.implementation, operation, config.node_size)
    for operation in ("replicate", "exchange", "place", "matmul")
  )
  with jax.named_scope("uep.load"):
    load_E = load.expert_load(expert_index_TK, num_experts)
    load_GE, rank = load.gather_loads(load_E, axis_name, exchanging)
    load_GE = nodes.confirm(load_GE, given, mesh, axis_name)
  with jax.named_scope("uep.plan"):
    weighed = settled.cost.weighed(x_TD, gate_TK, weights)
    plan = _plan(load_GE, settled, weighed)
  routes = route.route_tokens(expert_index_TK, load_GE, plan, rank, config)
  num_rounds = None
  if counts_rounds:
    # Of the plan, which is the same along the axis, so that ranks need not ask each other.
    num_rounds = mesh_max(capacity.num_rounds(plan, settled.capacity), same_along=axis_name)

  copies, rows_G = bool(plan.replica_expert.shape[1]), home_rows(plan.quota)
  lists = None
  if copies:
    sent = plan.replica_expert, plan.parent, rows_G, axis_name, rank
    lists = experts.transfer_lists(wide, x_TD.dtype, *sent, replicating)
  routing = rounds.Routing(
    rank=rank,
    replica_expert_GS=plan.replica_expert if copies else None,
    parent_GS=plan.parent if copies else None,
    home_rows_G=rows_G,
    lists=lists,
    routes=routes,
    rounds=None if settled.one_round else num_rounds,
  )
  routing = rounds.named(routing, PLAN_NAME)
  static = rounds.Static(
    axis_name,
    settled.capacity,
    settled.transient_capacity,
    config.domain_of(num_ranks),
    nodes.ranks(given, mesh, axis_name),
    activation,
    replicating,
    exchanging,
    placing,
    multiplying,
    config.dispatch_dtype,
    config.batch_invariant,
    implementation.resolve_tunings(config.device, (*exchanging, *placing, *multiplying)),
    columns,
  )
  # Weights vary over the experts' axis only; a cast outside the custom_vjp makes JAX sum
  # their gradients over the axes that tokens vary over as well.
  axes = varying_axes(x_TD, expert_index_TK, gate_TK, weights, routing)
  compute = rounds.assignments_apart if config.batch_invariant else rounds.experts_on_tokens
  y_TD: Any = compute(  # custom_vjp hides the type
    static,
    to_varying(widths.widen_tokens(x_TD, columns), axes),
    to_varying(gate_TK.astype(jnp.float32), axes),
    to_varying(weights, axes),
    to_varying(routing, axes),
  )
  y_TD = widths.narrow_tokens(y_TD, columns)
  y_TD = y_TD if inner_axis is None else lax.psum(y_TD, inner_axis)
  rounds_run = jnp.int32(1) if num_rounds is None else num_rounds
  measured = stats.measure(
    expert_index_TK,
    load_GE,
    _with_all_slots(plan, load_GE, settled),
    routes,
    rounds_run,
    copy_bytes=copy_bytes(x_TD.dtype, wide),
    domain_size=config.domain_of(num_ranks),
  )
  # Whoever adds the counts up has a collective for it. Where weights are divided over axes of the
  # caller's, y differs along these and counts do not: what followed y could not be typed so.
  if varying_axes(y_TD) <= varying_axes(measured.count_GX):
    count_GX = rounds.ordered(static, routing, measured.count_GX, y_TD)
    measured = measured._replace(count_GX=count_GX)
  return y_TD, measured


def _plan(load_GE: Array, settled: sizes.Sizes, cost: PlanCost) -> Plan:
  """The strategy's plan, checked; that of ``"none"`` where the sizes say that none can gain."""
  strategy = strategies.resolve(settled.config.strategy) if settled.plans else strategies.none
  plan = strategy.plan(load_GE, settled.config, cost)
  num_ranks, num_experts = load_GE.shape
  check_plan(plan, num_experts, num_ranks)
  if plan.replica_expert.shape[1]:
    return plan
  # An empty array that a planner computed would enter loops, and crash XLA:CPU's compiler.
  none_GS = jnp.zeros((num_ranks, 0), jnp.int32)
  return plan._replace(replica_expert=none_GS, parent=none_GS)


def _with_all_slots(plan: Plan, load_GE: Array, settled: sizes.Sizes) -> Plan:
  """The plan with the slots of the configuration, for statistics, whatever the number of tokens.

  Empty ones follow from the loads, as those of a plan do: both functions of a custom_vjp must
  return arrays that vary over the same axes, and that vmap maps alike.
  """
  config = settled.config
  if settled.plans or strategies.resolve(config.strategy).plan is strategies.none.plan:
    return plan
  empty_GS = jnp.full((load_GE.shape[0], config.replica_slots), -1, jnp.int32)
  empty_GS = empty_GS + 0 * load_GE[:, :1]
  return plan._replace(replica_expert=empty_GS, parent=empty_GS)


def home_rows(quota_EG: Array) -> Array:
  """``[G]``, what of each rank's quotas is of its home experts."""
  num_experts, num_ranks = quota_EG.shape
  quota_GMG = quota_EG.reshape(num_ranks, num_experts // num_ranks, num_ranks)
  own_MG = jnp.diagonal(quota_GMG, axis1=0, axis2=2)
  return jnp.sum(own_MG, axis=0, dtype=jnp.int32)
