"""The balanced MoE layer on global arrays and the context mesh."""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ultraep_jax import checks, load
from ultraep_jax.config import BalanceConfig
from ultraep_jax.moe import Activation, moe
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
  context = jax.sharding.get_abstract_mesh() if mesh is None else mesh
  axes = _token_axes(context, axis_name, token_axes)
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
) -> tuple[Array, LayerStats]:
  context = jax.sharding.get_abstract_mesh() if mesh is None else mesh
  groups = tuple(axis for axis in token_axes if axis != axis_name)
  by_token, by_expert = PartitionSpec(token_axes), PartitionSpec(axis_name)

  def local(
    x: Array, expert_index: Array, gate: Array, weights: ExpertWeights
  ) -> tuple[Array, LayerStats]:
    y_TD, stats = moe(
      x.reshape(-1, x.shape[-1]),
      expert_index.reshape(-1, expert_index.shape[-1]),
      gate.reshape(-1, gate.shape[-1]),
      weights,
      config=config,
      axis_name=axis_name,
      activation=activation,
    )
    return y_TD.reshape(x.shape), jax.tree.map(lambda leaf: leaf[None], stats)

  def place[T](tree: T, spec: PartitionSpec) -> T:
    if AxisType.Explicit not in context.axis_types:
      return tree  # shard_map itself moves arrays of Auto axes
    sharding = spec if mesh is None else NamedSharding(mesh, spec)
    return jax.tree.map(lambda leaf: jax.reshard(leaf, sharding), tree)

  y, stats = jax.shard_map(
    local,
    mesh=mesh,
    in_specs=(by_token, by_token, by_token, by_expert),
    out_specs=(by_token, PartitionSpec(groups or None)),
  )(
    place(x, by_token),
    place(expert_index, by_token),
    place(gate, by_token),
    place(weights, by_expert),
  )
  return place(y, jax.typeof(x).sharding.spec), stats


def _token_axes(
  mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
  axis_name: str,
  token_axes: Sequence[str] | None,
) -> tuple[str, ...]:
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
  parts = math.prod(mesh.shape[axis] for axis in token_axes)
  if x.shape[0] % parts:
    raise ValueError(
      f"x: expected a first axis divisible by {parts} (mesh axes {token_axes}), got {x.shape[0]}"
    )
  tokens = math.prod(x.shape[:-1]) // parts
  num_experts = weights.wo.shape[0]
  checks.check_sizes(tokens, expert_index.shape[-1], num_experts, mesh.shape[axis_name], config)
  load.check_expert_index(expert_index, num_experts)
