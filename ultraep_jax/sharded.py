"""The balanced MoE layer on global arrays and the context mesh."""

import functools
from collections.abc import Sequence
from typing import Any, cast

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ultraep_jax import nodes
from ultraep_jax.activations import Activation
from ultraep_jax.checks import arguments_of, check_inner_axis, check_layer
from ultraep_jax.config import BalanceConfig
from ultraep_jax.mesh import axes_of, checks_vma, legacy_mesh, resolve_token_axes
from ultraep_jax.moe import measured_moe
from ultraep_jax.stats import Measured, layer_stats
from ultraep_jax.strategies import arrays
from ultraep_jax.types import Array, AxisName, ExpertWeights, LayerStats


def sharded_moe(
  x: Array,
  expert_index: Array,
  gate: Array,
  weights: ExpertWeights,
  *,
  config: BalanceConfig,
  axis_name: AxisName = "expert",
  token_axes: Sequence[str] | None = None,
  activation: Activation = jax.nn.silu,
  inner_axis: str | None = None,
  mesh: jax.sharding.Mesh | None = None,
) -> tuple[Array, LayerStats]:
  """Runs a balanced MoE layer on global arrays, like a dense layer of the same experts.

  Wraps ``moe`` in a ``shard_map`` over every axis of the mesh, all Auto or all Explicit.
  Arrays on the mesh with another sharding are resharded. A call outside ``jit`` is compiled as
  a whole, once per configuration and ``activation`` object, and waits to check the indices.

  Args:
    x: ``[N, ..., D]`` bfloat16, float16 or float32, the compute dtype; N is sharded over
      ``token_axes``.
    expert_index: ``[N, ..., K]`` integers in ``[−1, E)``, −1 for a masked assignment. Under
      ``jit`` values outside are masked and counted in the statistics.
    gate: ``[N, ..., K]``, the weights of the choices.
    weights: of all E experts, in any form, sharded over ``axis_name``.
    config: how to balance.
    axis_name: the mesh axis of the experts, or a tuple of several.
    token_axes: mesh axes, or the one, that N is sharded over, the experts' axis among them.
      ``None``: ``"data"``, if the mesh has it, then ``axis_name``. The layer is replicated over
      others.
    activation: as for ``moe``.
    inner_axis: a mesh axis, none of the tokens', that weights' F is sharded over as well: each of
      its positions computes all tokens with its part of F, and results are added up. An activation
      that mixes columns, such as a softmax, is refused.
    mesh: ``None``: the context mesh (``jax.set_mesh``, or else ``with mesh:``).

  Returns:
    ``y`` like ``x``, on Explicit meshes with its sharding, and statistics with a leading axis
    of token groups (one per position on the token axes other than ``axis_name``).

  Raises:
    ValueError: shapes, sizes or mesh axes do not fit, or a concrete index is out of range.
    TypeError: a type or a dtype is wrong.

  >>> import jax, jax.numpy as jnp
  >>> weights = ExpertWeights(jnp.ones((2, 4, 8)), jnp.ones((2, 4, 8)), jnp.ones((2, 8, 4)))
  >>> with jax.set_mesh(jax.make_mesh((1,), ("expert",))):
  ...   y, stats = sharded_moe(
  ...     jnp.ones((3, 4)), jnp.array([[0], [1], [1]]), jnp.ones((3, 1)), weights,
  ...     config=BalanceConfig(replica_slots=0),
  ...   )
  >>> y.shape, stats.expert_load_E.tolist()
  ((3, 4), [[1, 2]])
  """
  y, measured = measured_sharded_moe(
    x,
    expert_index,
    gate,
    weights,
    config=config,
    axis_name=axis_name,
    token_axes=token_axes,
    activation=activation,
    inner_axis=inner_axis,
    mesh=mesh,
  )
  return y, layer_stats(measured)


def measured_sharded_moe(
  x: Array,
  expert_index: Array,
  gate: Array,
  weights: ExpertWeights,
  *,
  config: BalanceConfig,
  axis_name: AxisName = "expert",
  token_axes: Sequence[str] | None = None,
  activation: Activation = jax.nn.silu,
  inner_axis: str | None = None,
  mesh: jax.sharding.Mesh | None = None,
) -> tuple[Array, Measured]:
  """``sharded_moe``, with what ``layer_stats`` makes its statistics of.

  It has a leading axis of token groups.
  """
  mesh = legacy_mesh() if mesh is None else mesh
  context = jax.sharding.get_abstract_mesh() if mesh is None else mesh
  axes = resolve_token_axes(context, axis_name, token_axes)
  with arguments_of("ultraep_jax.sharded_moe"):
    check_layer(x, expert_index, gate, weights, activation, config, context, axis_name, axes)
    if inner_axis is not None:
      check_inner_axis(weights, activation, context, inner_axis, axes)
  if mesh is not None:  # its devices are known
    config = nodes.settle(config, mesh, axis_name)
  config, held = arrays.apart(config)
  return _run(
    x,
    expert_index,
    gate,
    weights,
    held,
    config=config,
    axis_name=axis_name,
    token_axes=axes,
    activation=activation,
    inner_axis=inner_axis,
    mesh=mesh,
  )


# Compiled as a whole when called eagerly, as in a notebook.
@functools.partial(
  jax.jit,
  static_argnames=("config", "axis_name", "token_axes", "activation", "inner_axis", "mesh"),
)
def _run(
  x: Array,
  expert_index: Array,
  gate: Array,
  weights: ExpertWeights,
  held: list[Array],
  *,
  config: BalanceConfig,
  axis_name: AxisName,
  token_axes: tuple[str, ...],
  activation: Activation,
  inner_axis: str | None,
  mesh: jax.sharding.Mesh | None,
) -> tuple[Array, Measured]:
  context = jax.sharding.get_abstract_mesh() if mesh is None else mesh
  by_token, by_expert = PartitionSpec(token_axes), _weight_specs(weights, axis_name, inner_axis)
  groups = tuple(axis for axis in token_axes if axis not in axes_of(axis_name)) or None
  by_group, by_rank = PartitionSpec(groups), PartitionSpec(groups, axis_name)

  def local(
    x: Array, expert_index: Array, gate: Array, weights: ExpertWeights, held: list[Array]
  ) -> tuple[Array, Measured]:
    y_TD, measured = measured_moe(
      x.reshape(-1, x.shape[-1]),
      expert_index.reshape(-1, expert_index.shape[-1]),
      gate.reshape(-1, gate.shape[-1]),
      weights,
      config=arrays.together(config, held),
      axis_name=axis_name,
      activation=activation,
      inner_axis=inner_axis,
    )
    return y_TD.reshape(x.shape), jax.tree.map(lambda leaf: leaf[None], measured)

  def place[T](tree: T, specs: Any) -> T:
    if AxisType.Explicit not in context.axis_types:
      return tree  # shard_map itself moves arrays of Auto axes
    shardings = specs
    if mesh is not None:
      shardings = jax.tree.map(functools.partial(NamedSharding, mesh), specs)
    return jax.tree.map(jax.reshard, tree, shardings)

  y, measured = jax.shard_map(
    local,
    mesh=mesh,
    in_specs=(by_token, by_token, by_token, by_expert, PartitionSpec()),
    out_specs=(by_token, Measured(by_group, by_rank)),  # pyright: ignore[reportArgumentType]
    check_vma=checks_vma(context, (*token_axes, inner_axis)),
  )(
    place(x, by_token),
    place(expert_index, by_token),
    place(gate, by_token),
    place(weights, by_expert),
    place(held, [PartitionSpec()] * len(held)),
  )
  return place(y, jax.typeof(x).sharding.spec), measured


def _weight_specs(
  weights: ExpertWeights, axis_name: AxisName, inner_axis: str | None
) -> ExpertWeights:
  """Where the leaves of the weights are on the mesh."""
  into, bias = PartitionSpec(axis_name, None, inner_axis), PartitionSpec(axis_name, inner_axis)
  return weights.with_values(
    cast("Any", [into] * len(weights.projections)),
    cast("Any", PartitionSpec(axis_name, inner_axis)),
    cast("Any", [bias] * len(weights.projection_biases)),
    cast("Any", None if weights.wo_bias is None else PartitionSpec(axis_name)),
  )
