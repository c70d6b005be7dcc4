"""A model's MoE block without Flax: router, balanced experts and shared experts, in pure functions.

``nnx.py`` and ``linen.py`` hold its parameters.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from ultraep_jax import activations, checks
from ultraep_jax import gating as gating_lib
from ultraep_jax.activations import Activation
from ultraep_jax.block_params import expert_weights
from ultraep_jax.config import BalanceConfig, Implementation, check_type
from ultraep_jax.gating import Gating, GatingConfig
from ultraep_jax.mesh import (
  axis_size,
  check_axis_name,
  checks_vma,
  is_explicit,
  legacy_mesh,
  resolve_token_axes,
)
from ultraep_jax.sharded import measured_sharded_moe
from ultraep_jax.stats import Measured, layer_stats
from ultraep_jax.types import Array, AxisName, LayerStats, Layout

DEFAULT_CONFIG = BalanceConfig()


class Block(NamedTuple):
  """What is fixed of a block; the fields are those of ``nnx.MoE``."""

  gating: GatingConfig
  config: BalanceConfig
  activation: Activation
  dtype: DTypeLike | None
  axis_name: AxisName
  token_axes: AxisName | None
  layout: Layout = Layout.APART
  inner_axis: str | None = None


def block_of(module: Any) -> Block:
  """The block of a Flax module, whose attributes have the names of the fields."""
  fields: dict[str, Any] = {name: getattr(module, name) for name in Block._fields}
  return Block(**fields)._replace(layout=Layout(module.layout))


class MoEAux(NamedTuple):
  """What a MoE module returns beside its output.

  Attributes:
    stats: what the balanced layer did, with a leading axis of token groups.
    load_balance_loss: ``[]`` float32, 1 when the router's load is balanced.
    router_z_loss: ``[]`` float32.
    expert_load_E: ``[E]`` int32, assignments of the whole batch: what ``update_bias`` needs.
    expert_index: ``[..., K]`` int32, the choices of every token, −1 where it is masked: what
      another call takes to make the same.
  """

  stats: LayerStats
  load_balance_loss: Array
  router_z_loss: Array
  expert_load_E: Array
  expert_index: Array


class Routed(NamedTuple):
  """What the router makes of the tokens."""

  expert_index: Array
  gate: Array
  load_balance_loss: Array
  router_z_loss: Array
  expert_load_E: Array


def apply_moe(
  params: dict[str, Array],
  x: Array,
  mask: Array | None,
  bias_E: Array | None,
  block: Block,
  expert_index: Array | None = None,
) -> tuple[Array, MoEAux]:
  """The block as a pure function of its parameters, named as in ``nnx.MoE``."""
  y, routed, measured = measured_block(params, x, mask, bias_E, block, expert_index)
  losses = (routed.load_balance_loss, routed.router_z_loss)
  counted = (routed.expert_load_E, routed.expert_index)
  return y, MoEAux(layer_stats(measured), *losses, *counted)


def measured_block(
  params: dict[str, Array],
  x: Array,
  mask: Array | None,
  bias_E: Array | None,
  block: Block,
  expert_index: Array | None = None,
) -> tuple[Array, Routed, Measured]:
  """``apply_moe``, with what ``layer_stats`` makes its statistics of."""
  gating, config, activation, dtype, axis_name, token_axes, layout, inner_axis = block
  checks.check_config(config)
  check_mesh(axis_name, gating.num_experts)
  checks.check_tokens(x, mask, params["router"].shape[0])
  if expert_index is not None:
    gating_lib.check_choices(expert_index, (*x.shape[:-1], gating.num_experts_per_tok))
  x = x if dtype is None else x.astype(dtype)
  if mask is not None:
    x = jnp.where(mask[..., None], x, jnp.zeros((), x.dtype))
  mesh = jax.sharding.get_abstract_mesh()
  token_axes = resolve_token_axes(mesh, axis_name, token_axes)
  checks.check_divides(x, mesh, token_axes)
  router = _Router(params["router"], params.get("router_bias"), bias_E)
  routed = _route(x, router, mask, expert_index, gating, config.implementation, token_axes)
  y, measured = measured_sharded_moe(
    _times(x, params, "latent_down"),
    routed.expert_index,
    routed.gate,
    expert_weights(params, layout),
    config=config,
    axis_name=axis_name,
    token_axes=token_axes,
    activation=activation,
    inner_axis=inner_axis,
  )
  y = _times(y, params, "latent_up")
  if "shared_wo" in params:
    shared = {name: leaf for name, leaf in params.items() if name.startswith("shared_")}
    y += _shared_experts(shared, x, mask, layout, activation)
  return y, routed, measured


def _times(x: Array, params: dict[str, Array], name: str) -> Array:
  """Times a matrix, if there is one."""
  return jnp.matmul(x, params[name].astype(x.dtype)) if name in params else x


# Compiled as a whole when called eagerly, as in a notebook; in line in a caller's program.
@functools.partial(jax.jit, static_argnums=(3, 4), inline=True)
def _shared_experts(
  params: dict[str, Array], x: Array, mask: Array | None, layout: Layout, activation: Activation
) -> Array:
  """What every token gets, however it is routed."""
  experts = jax.tree.map(
    lambda leaf: leaf.astype(x.dtype), expert_weights(params, layout, "shared_")
  )
  hidden = [jnp.matmul(x, matrix) for matrix in experts.projections]
  if experts.projection_biases:
    hidden = [_plus(h, bias) for h, bias in zip(hidden, experts.projection_biases, strict=True)]
  y = jnp.matmul(activations.inner(hidden, layout, activation), experts.wo)
  y = y if experts.wo_bias is None else _plus(y, experts.wo_bias)
  y = jax.nn.sigmoid(_times(x, params, "shared_gate")) * y if "shared_gate" in params else y
  if mask is None or experts.wo_bias is None:  # zeros in, zeros out
    return y
  return jnp.where(mask[..., None], y, jnp.zeros((), y.dtype))


def _plus(x: Array, bias: Array) -> Array:
  return x + jnp.expand_dims(bias, range(x.ndim - 1))


class _Router(NamedTuple):
  matrix_DE: Array
  logit_bias_E: Array | None
  selection_bias_E: Array | None


# Compiled like the shared experts.
@functools.partial(jax.jit, static_argnums=(4, 5, 6), inline=True)
# Backward makes the float32 tokens and the masks of [T, K, E] again rather than keep them.
@functools.partial(jax.checkpoint, static_argnums=(4, 5, 6))
def _route(
  x: Array,
  router: _Router,
  mask: Array | None,
  expert_index: Array | None,
  gating: GatingConfig,
  implementation: Implementation,
  token_axes: tuple[str, ...],
) -> Routed:
  logits = router_logits(x, router.matrix_DE)
  if router.logit_bias_E is not None:
    logits = _plus(logits, router.logit_bias_E.astype(jnp.float32))
  index, gate, scores = _choose(
    logits,
    router.selection_bias_E,
    mask,
    expert_index,
    gating=gating,
    implementation=implementation,
    token_axes=token_axes,
  )
  return Routed(
    expert_index=index,
    gate=gate,
    load_balance_loss=gating_lib.load_balance_loss(scores, index),
    router_z_loss=gating_lib.router_z_loss(logits, mask),
    expert_load_E=gating_lib.router_load(index, gating.num_experts),
  )


# One function of a program, however many layers alike call it.
@functools.partial(jax.jit, static_argnames=("gating", "implementation", "token_axes"))
def _choose(
  logits: Array,
  bias_E: Array | None,
  mask: Array | None,
  expert_index: Array | None,
  *,
  gating: GatingConfig,
  implementation: Implementation,
  token_axes: tuple[str, ...],
) -> Gating:
  """Every device chooses for its own tokens.

  XLA would bring all of them to each device for a kernel, and sort twice without one.
  """
  by_token = P(token_axes)
  of_tokens = (logits, mask, expert_index)
  if is_explicit():
    of_tokens = jax.tree.map(lambda leaf: jax.reshard(leaf, by_token), of_tokens)

  def local(of_tokens: tuple[Array, Array | None, Array | None], bias_E: Array | None) -> Gating:
    logits, mask, expert_index = of_tokens
    return gating_lib.gate(
      logits, gating, bias_E, mask, expert_index_TK=expert_index, implementation=implementation
    )

  check_vma = checks_vma(jax.sharding.get_abstract_mesh(), token_axes)
  return jax.shard_map(local, in_specs=(by_token, P()), out_specs=by_token, check_vma=check_vma)(
    of_tokens, bias_E
  )


@jax.custom_jvp
def router_logits(x: Array, router_DE: Array) -> Array:
  """``x @ router`` in float32, no operand rounded, so that choices do not depend on a backend.

  bfloat16 tokens meet the router as a sum of three bfloat16 matrices, 24 bits in all, because
  tensor cores have no float32.

  Args:
    x: ``[..., D]``, a float dtype.
    router_DE: ``[D, E]`` float32.

  Returns:
    ``[..., E]`` float32.
  """
  if x.dtype != jnp.bfloat16:
    return _matmul_in_float32(x, router_DE)
  parts, rest_DE = [], router_DE
  for _ in range(3):
    part_DE = jax.lax.reduce_precision(rest_DE, exponent_bits=8, mantissa_bits=7)
    parts.append(part_DE.astype(jnp.bfloat16))
    rest_DE -= part_DE
  sums = jnp.matmul(x, jnp.concatenate(parts, axis=1), preferred_element_type=jnp.float32)
  high, middle, low = jnp.split(sums, 3, axis=-1)
  return high + (middle + low)


@router_logits.defjvp
def _router_logits_jvp(
  primals: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[Array, Array]:
  (x, router_DE), (x_dot, router_dot_DE) = primals, tangents
  through_x = _matmul_in_float32(x_dot, router_DE)
  return router_logits(x, router_DE), through_x + _matmul_in_float32(x, router_dot_DE)


def _matmul_in_float32(x: Array, matrix: Array) -> Array:
  return jnp.matmul(x.astype(jnp.float32), matrix, precision=jax.lax.Precision.HIGHEST)


def check_arguments(
  gating: Any, config: Any, activation: Any, dtype: Any, param_dtype: Any
) -> None:
  """Raises unless these arguments of ``MoE`` are what they should be."""
  check_type("gating", gating, GatingConfig)
  checks.check_config(config)
  checks.check_function(activation)
  if dtype is not None:
    checks.as_compute_dtype("dtype", dtype, ", or None")
  checks.as_compute_dtype("param_dtype", param_dtype)


def check_mesh(axis_name: AxisName, num_experts: int) -> None:
  """Checks that the mesh in context can hold the experts.

  Raises:
    ValueError: it has no axis ``axis_name``, or the axis does not divide the experts.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty and legacy_mesh() is not None:
    raise ValueError("mesh: expected one set by jax.set_mesh, got that of `with mesh:`")
  check_axis_name(mesh, axis_name)
  if num_experts % (num_ranks := axis_size(mesh, axis_name)):
    raise ValueError(
      f"num_experts: expected a multiple of the {num_ranks} ranks of mesh axis "
      f"{axis_name!r}, got {num_experts}"
    )


def check_inner(block: Block, shapes: dict[str, tuple[int, ...]]) -> None:
  """Checks that ``inner_axis``, if there is one, divides the experts of these parameters.

  Raises:
    ValueError: it does not, or is no axis of the mesh in context without tokens.
  """
  if block.inner_axis is None:
    return
  mesh = jax.sharding.get_abstract_mesh()
  structs = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
  token_axes = resolve_token_axes(mesh, block.axis_name, block.token_axes)
  weights = expert_weights(structs, block.layout)
  checks.check_inner_axis(weights, block.activation, mesh, block.inner_axis, token_axes)
