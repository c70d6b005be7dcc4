"""A Flax NNX module over ``sharded_moe``: router, balanced experts, shared experts."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType

from ultraep_jax import gating as gating_lib
from ultraep_jax.config import BalanceConfig, _check_int
from ultraep_jax.gating import GatingConfig
from ultraep_jax.sharded import sharded_moe
from ultraep_jax.types import Array, ExpertWeights, LayerStats

Activation = Callable[[Array], Array]
Initializer = jax.nn.initializers.Initializer
DEFAULT_CONFIG = BalanceConfig()
DEFAULT_INIT = jax.nn.initializers.lecun_normal()


class MoEAux(NamedTuple):
  """What a MoE module returns beside its output.

  Attributes:
    stats: what the balanced layer did, with a leading axis of token groups.
    load_balance_loss: ``[]`` float32, 1 when the router's load is balanced.
    router_z_loss: ``[]`` float32.
    expert_load_E: ``[E]`` int32, assignments of the whole batch: what ``update_bias`` needs.
  """

  stats: LayerStats
  load_balance_loss: Array
  router_z_loss: Array
  expert_load_E: Array


class SelectionBias(nnx.Variable):
  """``[E]`` float32 that a router adds when it chooses. Not a ``Param``: optimizers skip it."""


class MoE(nnx.Module):
  """A mixture of gated experts, balanced on the exact load of every call.

  The output equals that of a dense mixture; only where the work happens changes. Parameters:

  ==================================================  =====================  ================
  name                                                shape                  sharding
  ==================================================  =====================  ================
  ``router`` (always float32)                         ``[D, E]``             replicated
  ``wi_gate``, ``wi_up``                              ``[E, D, F]``          E over ``expert``
  ``wo``                                              ``[E, F, D]``          E over ``expert``
  ``shared_wi_gate``, ``shared_wi_up``                ``[D, n * F]``         replicated
  ``shared_wo``                                       ``[n * F, D]``         replicated
  ``selection_bias`` (``SelectionBias``, float32)     ``[E]``                replicated
  ==================================================  =====================  ================

  The shared ones exist with n = ``num_shared_experts`` > 0, the bias with
  ``gating.use_selection_bias``. Replicas that balance the load are no parameters: they appear
  in no state, optimizer or checkpoint.

  Construction and calls need the mesh in context, all axes Auto or all Explicit. Construct
  under ``nnx.jit`` where one device cannot hold all experts.

  >>> import jax, jax.numpy as jnp, optax
  >>> from flax import nnx
  >>> import ultraep_jax as uep
  >>> from ultraep_jax.gating import GatingConfig
  >>>
  >>> gating = GatingConfig(num_experts=8, num_experts_per_tok=2, use_selection_bias=True)
  >>> @nnx.jit
  ... def train_step(model, optimizer, x):
  ...   def loss_fn(model):
  ...     y, aux = model(x)
  ...     return jnp.mean(y**2) + 0.01 * aux.load_balance_loss, aux
  ...   (loss, aux), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
  ...   optimizer.update(model, grads)
  ...   model.update_bias(aux, rate=0.001)
  ...   return loss, aux
  >>>
  >>> with jax.set_mesh(jax.make_mesh((jax.device_count(),), ("expert",))):
  ...   model = uep.nnx.MoE(embed_dim=16, expert_dim=32, gating=gating, rngs=nnx.Rngs(0))
  ...   optimizer = nnx.Optimizer(model, optax.sgd(1e-2, momentum=0.9), wrt=nnx.Param)
  ...   x = jax.random.normal(jax.random.key(1), (8, 4, 16))
  ...   loss, aux = train_step(model, optimizer, x)
  >>> int(aux.expert_load_E.sum()), sorted(aux.stats.scalars())[:2]
  (64, ['imbalance_after', 'imbalance_before'])
  """

  def __init__(
    self,
    *,
    embed_dim: int,
    expert_dim: int,
    gating: GatingConfig,
    config: BalanceConfig = DEFAULT_CONFIG,
    num_shared_experts: int = 0,
    activation: Activation = jax.nn.silu,
    dtype: jnp.dtype | type | None = None,
    param_dtype: jnp.dtype | type = jnp.float32,
    kernel_init: Initializer = DEFAULT_INIT,
    axis_name: str = "expert",
    token_axes: tuple[str, ...] | None = None,
    rngs: nnx.Rngs,
  ):
    """Creates the parameters, already sharded.

    Args:
      embed_dim: D, hidden width.
      expert_dim: F, inner width of one expert.
      gating: the router.
      config: how the layer balances.
      num_shared_experts: n, experts that every token takes: one MLP of inner width n * F.
      activation: of the gate half of an expert.
      dtype: of the computation; ``None``: that of the input. The router computes in float32.
      param_dtype: of all parameters but the router.
      kernel_init: makes one ``[in, out]`` matrix; called per expert with its own key.
      axis_name: mesh axis of the experts.
      token_axes: mesh axes that divide the first axis of the input; ``None``: ``"data"`` where
        the mesh has it, then ``axis_name``.
      rngs: the stream ``params`` is used.

    Raises:
      ValueError: no mesh with ``axis_name`` is in context, it does not divide the experts, or a
        size is out of range.
    """
    shapes = param_shapes(embed_dim, expert_dim, gating.num_experts, num_shared_experts)
    check_mesh(axis_name, gating.num_experts)
    for name, shape in shapes.items():
      value = init_param(name, rngs.params(), shape, kernel_init, param_dtype)
      setattr(self, name, nnx.Param(value, out_sharding=param_axes(shape, axis_name)))
    if gating.use_selection_bias:
      bias_E = jnp.zeros(gating.num_experts, jnp.float32)
      self.selection_bias = SelectionBias(bias_E, out_sharding=(None,))
    self.param_names = tuple(shapes)
    self.gating = gating
    self.config = config
    self.activation = activation
    self.dtype = dtype
    self.axis_name = axis_name
    self.token_axes = token_axes

  def __call__(self, x: Array, mask: Array | None = None) -> tuple[Array, MoEAux]:
    """Applies the layer; changes no state.

    Args:
      x: ``[..., D]``; the mesh axes of the tokens divide its first axis.
      mask: ``[...]`` bool, False for tokens that take no part: their input may be anything,
        their output is 0 and they count in no loss.

    Returns:
      ``y`` ``[..., D]`` in ``dtype``, on Explicit meshes sharded like ``x``, and ``MoEAux``.

    Raises:
      ValueError: a shape or the mesh does not fit.
      TypeError: a dtype is wrong.
    """
    bias = self.selection_bias[...] if self.gating.use_selection_bias else None
    return apply_moe(
      {name: getattr(self, name)[...] for name in self.param_names},
      x,
      mask,
      bias,
      gating=self.gating,
      config=self.config,
      activation=self.activation,
      dtype=self.dtype,
      axis_name=self.axis_name,
      token_axes=self.token_axes,
    )

  def update_bias(self, aux: MoEAux, rate: float | Array) -> None:
    """Moves the selection bias one step of ``rate`` towards balance (once per train step).

    With several microbatches, sum their ``expert_load_E`` first:
    ``aux._replace(expert_load_E=total_E)``.

    Raises:
      ValueError: the gating uses no selection bias.
    """
    if not self.gating.use_selection_bias:
      raise ValueError("update_bias: expected gating.use_selection_bias=True, got False")
    old_E = self.selection_bias[...]
    self.selection_bias[...] = gating_lib.update_selection_bias(old_E, aux.expert_load_E, rate)


def apply_moe(
  params: dict[str, Array],
  x: Array,
  mask: Array | None,
  bias_E: Array | None,
  *,
  gating: GatingConfig,
  config: BalanceConfig,
  activation: Activation,
  dtype: jnp.dtype | type | None,
  axis_name: str,
  token_axes: tuple[str, ...] | None,
) -> tuple[Array, MoEAux]:
  """The module as a pure function of its parameters, named as in ``MoE``."""
  check_mesh(axis_name, gating.num_experts)
  _check_tokens(x, mask, params["router"].shape[0])
  x = x if dtype is None else x.astype(dtype)
  if mask is not None:  # zeros in, zeros out: no term below has an offset
    x = jnp.where(mask[..., None], x, jnp.zeros((), x.dtype))
  # Choices must not depend on how a backend rounds float32 operands.
  logits = jnp.matmul(x.astype(jnp.float32), params["router"], precision=jax.lax.Precision.HIGHEST)
  index, gate, scores = gating_lib.gate(logits, gating, bias_E, mask)
  weights = ExpertWeights(params["wi_gate"], params["wi_up"], params["wo"])
  y, stats = sharded_moe(
    x,
    index,
    gate,
    weights,
    config=config,
    axis_name=axis_name,
    token_axes=token_axes,
    activation=activation,
  )
  y = _place_like(y, x)
  if "shared_wo" in params:
    wi_gate, wi_up, wo = (params["shared_" + n].astype(x.dtype) for n in ExpertWeights._fields)
    y += jnp.matmul(activation(jnp.matmul(x, wi_gate)) * jnp.matmul(x, wi_up), wo)
  return y, MoEAux(
    stats=stats,
    load_balance_loss=gating_lib.load_balance_loss(scores, index),
    router_z_loss=gating_lib.router_z_loss(logits, mask),
    expert_load_E=gating_lib.router_load(index, gating.num_experts),
  )


def param_shapes(
  embed_dim: int, expert_dim: int, num_experts: int, num_shared_experts: int
) -> dict[str, tuple[int, ...]]:
  """Names and shapes of the parameters of ``MoE``."""
  _check_int("embed_dim", embed_dim, minimum=1)
  _check_int("expert_dim", expert_dim, minimum=1)
  _check_int("num_shared_experts", num_shared_experts, minimum=0)
  shapes: dict[str, tuple[int, ...]] = {
    "router": (embed_dim, num_experts),
    "wi_gate": (num_experts, embed_dim, expert_dim),
    "wi_up": (num_experts, embed_dim, expert_dim),
    "wo": (num_experts, expert_dim, embed_dim),
  }
  if num_shared_experts:
    shared_dim = num_shared_experts * expert_dim
    shapes["shared_wi_gate"] = shapes["shared_wi_up"] = (embed_dim, shared_dim)
    shapes["shared_wo"] = (shared_dim, embed_dim)
  return shapes


def init_param(
  name: str,
  key: Array,
  shape: tuple[int, ...],
  kernel_init: Initializer,
  param_dtype: jnp.dtype | type,
) -> Array:
  """One ``[in, out]`` matrix, or one per expert; the router is float32."""
  dtype = jnp.float32 if name == "router" else param_dtype
  if len(shape) == 2:
    return kernel_init(key, shape, dtype)
  return jax.vmap(lambda k: kernel_init(k, shape[1:], dtype))(jax.random.split(key, shape[0]))


def param_axes(shape: tuple[int, ...], axis_name: str) -> tuple[str | None, ...]:
  """Mesh axes of a parameter: experts over ``axis_name``, all else replicated."""
  return (axis_name, None, None) if len(shape) == 3 else (None, None)


def check_mesh(axis_name: str, num_experts: int) -> None:
  """Checks that the mesh in context can hold the experts.

  Raises:
    ValueError: it has no axis ``axis_name``, or the axis does not divide the experts.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if axis_name not in mesh.axis_names:
    raise ValueError(
      f"mesh: expected a mesh with axis {axis_name!r} in context, got axes {mesh.axis_names}; "
      f"on one device: jax.set_mesh(jax.make_mesh((1,), ({axis_name!r},)))"
    )
  if num_experts % mesh.shape[axis_name]:
    raise ValueError(
      f"num_experts: expected a multiple of the {mesh.shape[axis_name]} ranks of mesh axis "
      f"{axis_name!r}, got {num_experts}"
    )


def _place_like(y: Array, x: Array) -> Array:
  """Gives ``y`` the sharding of ``x`` where that is part of its type: on Explicit meshes."""
  if AxisType.Explicit not in jax.sharding.get_abstract_mesh().axis_types:
    return y
  return jax.sharding.reshard(y, jax.typeof(x).sharding.spec)


def _check_tokens(x: Array, mask: Array | None, embed_dim: int) -> None:
  if x.ndim < 2 or x.shape[-1] != embed_dim:
    raise ValueError(f"x: expected shape [..., {embed_dim}] with token axes, got {x.shape}")
  if not jnp.issubdtype(x.dtype, jnp.floating):
    raise TypeError(f"x: expected a float dtype, got {x.dtype}")
  if mask is not None and mask.shape != x.shape[:-1]:
    raise ValueError(f"mask: expected shape {x.shape[:-1]}, got {mask.shape}")
  if mask is not None and mask.dtype != jnp.bool_:
    raise TypeError(f"mask: expected dtype bool, got {mask.dtype}")
