"""The balanced MoE layer on global arrays and the context mesh."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ultraep_jax import checks, stats
from ultraep_jax.config import BalanceConfig
from ultraep_jax.moe import Activation, copy_bytes, measured_moe
from ultraep_jax.planning import load
from ultraep_jax.types import Array, ExpertWeights, LayerStats


def sharded_moe(
  x: Array,
  expert_index: Array,
  gate: Array,
  weights: ExpertWeights,
  *,
  config: BalanceConfig,
  axis_name: str = "expert",
  token_axes: Sequence[str] | None = None,
  activation: Activation = jax.nn.silu,
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
    weights: ``[E, D, F]``, ``[E, D, F]``, ``[E, F, D]``, sharded over ``axis_name``.
    config: how to balance.
    axis_name: the mesh axis of the experts.
    token_axes: mesh axes that N is sharded over, the experts' axis among them. ``None``:
      ``"data"``, if the mesh has it, then ``axis_name``. The layer is replicated over others.
    activation: of the gate projection.
    mesh: ``None``: the context mesh (``jax.set_mesh``).

  Returns:
    ``y`` like ``x``, on Explicit meshes with its sharding, and statistics with a leading axis
    of token groups (one per position on the token axes other than ``axis_name``).

  Raises:
    ValueError: shapes, sizes or mesh axes do not fit, or a concrete index is out of range.
    TypeError: a dtype is wrong.

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
    mesh=mesh,
  )
  return y, layer_stats(
    measured,
    copy_bytes(x.dtype, weights),
    config.domain_size,
    axis_name=axis_name,
    token_axes=token_axes,
    mesh=mesh,
  )


def measured_sharded_moe(
  x: Array,
  expert_index: Array,
  gate: Array,
  weights: ExpertWeights,
  *,
  config: BalanceConfig,
  axis_name: str = "expert",
  token_axes: Sequence[str] | None = None,
  activation: Activation = jax.nn.silu,
  mesh: jax.sharding.Mesh | None = None,
) -> tuple[Array, stats.Measured]:
  """``sharded_moe``, with what ``layer_stats`` makes its statistics of.

  What is measured has a leading axis of token groups; ``count_X`` one of all ranks instead.
  """
  context = jax.sharding.get_abstract_mesh() if mesh is None else mesh
  axes = resolve_token_axes(context, axis_name, token_axes)
  _check(x, expert_index, gate, weights, config, context, axis_name, axes)
  return _run(
    x,
    expert_index,
    gate,
    weights,
    config=config,
    axis_name=axis_name,
    token_axes=axes,
    activation=activation,
    mesh=mesh,
  )


def layer_stats(
  measured: stats.Measured,
  bytes_of_copy: int,
  domain_size: int | None,
  *,
  axis_name: str = "expert",
  token_axes: Sequence[str] | None = None,
  mesh: jax.sharding.Mesh | None = None,
  scanned: bool = False,
) -> LayerStats:
  """The statistics of a layer, or of several that a scan went over.

  Args:
    measured: from ``measured_sharded_moe``; ``scanned``: stacked, with layers as first axis.
    bytes_of_copy: of one expert.
    domain_size: ranks that copies stay among; ``None``: all.
    axis_name: as for ``measured_sharded_moe``, like all that follows.
    token_axes: likewise.
    mesh: likewise.
    scanned: whether there is an axis of layers.

  Returns:
    Statistics with a leading axis of token groups, after that of layers if there is one.
  """
  context = jax.sharding.get_abstract_mesh() if mesh is None else mesh
  axes = resolve_token_axes(context, axis_name, token_axes)
  return _stats(measured, bytes_of_copy, domain_size, axis_name, axes, mesh, scanned)


@functools.partial(jax.jit, static_argnums=range(1, 7))
def _stats(
  measured: stats.Measured,
  bytes_of_copy: int,
  domain_size: int | None,
  axis_name: str,
  token_axes: tuple[str, ...],
  mesh: jax.sharding.Mesh | None,
  scanned: bool,
) -> LayerStats:
  specs = _measured_specs(token_axes, axis_name)
  if scanned:
    specs = jax.tree.map(lambda spec: PartitionSpec(None, *spec), specs)

  def local(measured: stats.Measured) -> LayerStats:
    def of_one(measured: stats.Measured, counts: stats.Counts) -> LayerStats:
      return stats.layer_stats(measured, counts, bytes_of_copy, domain_size)

    for _ in range(1 + scanned):  # a token group's axis has one entry here
      of_one = jax.vmap(of_one)
    return of_one(measured, stats.sum_counts(measured.count_X, axis_name))

  return jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=specs.load_GE)(measured)


# Compiled as a whole when called eagerly, as in a notebook.
@functools.partial(
  jax.jit, static_argnames=("config", "axis_name", "token_axes", "activation", "mesh")
)
def _run(
  x: Array,
  expert_index: Array,
  gate: Array,
  weights: ExpertWeights,
  *,
  config: BalanceConfig,
  axis_name: str,
  token_axes: tuple[str, ...],
  activation: Activation,
  mesh: jax.sharding.Mesh | None,
) -> tuple[Array, stats.Measured]:
  context = jax.sharding.get_abstract_mesh() if mesh is None else mesh
  by_token, by_expert = PartitionSpec(token_axes), PartitionSpec(axis_name)

  def local(
    x: Array, expert_index: Array, gate: Array, weights: ExpertWeights
  ) -> tuple[Array, stats.Measured]:
    y_TD, measured = measured_moe(
      x.reshape(-1, x.shape[-1]),
      expert_index.reshape(-1, expert_index.shape[-1]),
      gate.reshape(-1, gate.shape[-1]),
      weights,
      config=config,
      axis_name=axis_name,
      activation=activation,
    )
    return y_TD.reshape(x.shape), jax.tree.map(lambda leaf: leaf[None], measured)

  def place[T](tree: T, spec: PartitionSpec) -> T:
    if AxisType.Explicit not in context.axis_types:
      return tree  # shard_map itself moves arrays of Auto axes
    sharding = spec if mesh is None else NamedSharding(mesh, spec)
    return jax.tree.map(lambda leaf: jax.reshard(leaf, sharding), tree)

  y, measured = jax.shard_map(
    local,
    mesh=mesh,
    in_specs=(by_token, by_token, by_token, by_expert),
    out_specs=(by_token, _measured_specs(token_axes, axis_name)),
  )(
    place(x, by_token),
    place(expert_index, by_token),
    place(gate, by_token),
    place(weights, by_expert),
  )
  return place(y, jax.typeof(x).sharding.spec), measured


def _measured_specs(token_axes: tuple[str, ...], axis_name: str) -> Any:
  """A ``stats.Measured`` of specifications."""
  groups = tuple(axis for axis in token_axes if axis != axis_name)
  by_group: Any = PartitionSpec(groups or None)
  by_rank: Any = PartitionSpec(token_axes)
  return stats.Measured(by_group, by_group, by_group, by_group, by_group, count_X=by_rank)


def resolve_token_axes(
  mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
  axis_name: str,
  token_axes: Sequence[str] | None,
) -> tuple[str, ...]:
  """The mesh axes of tokens, ``None`` resolved.

  Raises:
    ValueError: the mesh does not have the axes, or other kinds of axes than all Auto or Explicit.
  """
  if axis_name not in mesh.axis_names:
    raise ValueError(
      f"axis_name: expected an axis of the mesh, {mesh.axis_names}, got {axis_name!r}; set one "
      'with jax.set_mesh(jax.make_mesh((ranks,), ("expert",)))'
    )
  if AxisType.Manual in mesh.axis_types:
    raise ValueError(
      f"mesh: expected no manual axis, got {mesh}; inside shard_map call ultraep_jax.moe"
    )
  if len(set(mesh.axis_types)) > 1:
    raise ValueError(f"mesh: expected all axes Auto or all Explicit, got {mesh}")
  if token_axes is None:
    token_axes = [axis for axis in ("data",) if axis in mesh.axis_names] + [axis_name]
  if axis_name not in token_axes or not set(token_axes) <= set(mesh.axis_names):
    raise ValueError(
      f"token_axes: expected axes of {mesh.axis_names} with {axis_name!r} among them, "
      f"got {tuple(token_axes)}"
    )
  return tuple(token_axes)


def check_divides(
  mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh, token_axes: tuple[str, ...], x: Array
) -> int:
  """The devices along the axes, unless these do not divide the first axis of ``x``.

  Raises:
    ValueError: they do not.
  """
  parts = math.prod(mesh.shape[axis] for axis in token_axes)
  if x.shape[0] % parts:
    raise ValueError(
      f"x: expected a first axis divisible by {parts} (mesh axes {token_axes}), got {x.shape[0]}"
    )
  return parts


def _check(
  x: Array,
  expert_index: Array,
  gate: Array,
  weights: ExpertWeights,
  config: BalanceConfig,
  mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
  axis_name: str,
  token_axes: tuple[str, ...],
) -> None:
  checks.check_config(config)
  if getattr(x, "ndim", 2) < 2:
    raise ValueError(f"x: expected shape [N, ..., D], got {list(x.shape)}")
  checks.check_array("x", x, getattr(x, "shape", ()), jnp.floating)
  checks.check_compute_dtype("x", x)
  checks.check_array("expert_index", expert_index, (*x.shape[:-1], "K"), jnp.integer)
  checks.check_array("gate", gate, expert_index.shape, jnp.floating)
  checks.check_weights(weights, "E", x.shape[-1])
  tokens = math.prod(x.shape[:-1]) // check_divides(mesh, token_axes, x)
  num_experts = weights.wo.shape[0]
  checks.check_sizes(tokens, expert_index.shape[-1], num_experts, mesh.shape[axis_name], config)
  load.check_expert_index(expert_index, num_experts)
