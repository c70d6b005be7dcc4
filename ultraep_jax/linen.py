"""A Flax Linen module over ``sharded_moe``, equal to ``ultraep_jax.nnx.MoE``."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from ultraep_jax.activations import Activation
from ultraep_jax.block import (
  DEFAULT_CONFIG,
  MoEAux,
  apply_moe,
  block_of,
  check_arguments,
  check_inner,
  check_mesh,
)
from ultraep_jax.block_params import (
  DEFAULT_INIT,
  Initializer,
  init_param,
  param_axes,
  param_shapes,
)
from ultraep_jax.config import BalanceConfig
from ultraep_jax.gating import GatingConfig, update_selection_bias
from ultraep_jax.mesh import shard
from ultraep_jax.types import Array, AxisName


class MoE(nn.Module):
  """A mixture of experts, gated or not, balanced on the exact load of every call.

  Attributes are the arguments of ``ultraep_jax.nnx.MoE``, which describes them, and parameters
  have the names and shapes of its own, boxed in ``nn.Partitioned``.
  The selection bias lives in the collection ``"router_state"``. ``init`` and ``apply`` need the
  mesh in context, all axes Auto or all Explicit; parameters are created already sharded.

  >>> import jax, jax.numpy as jnp
  >>> import ultraep_jax as uep
  >>>
  >>> gating = uep.GatingConfig(num_experts=8, num_experts_per_tok=2, use_selection_bias=True)
  >>> layer = uep.linen.MoE(embed_dim=16, expert_dim=32, gating=gating)
  >>> with jax.set_mesh(jax.make_mesh((jax.device_count(),), ("expert",))):
  ...   x = jax.random.normal(jax.random.key(1), (8, 4, 16))
  ...   variables = jax.jit(layer.init)(jax.random.key(0), x)
  ...   apply = jax.jit(layer.apply, static_argnames=("mutable", "update_bias"))
  ...   (y, aux), state = apply(variables, x, update_bias=0.001, mutable=("router_state",))
  >>> y.shape, int(aux.expert_load_E.sum()), state["router_state"]["selection_bias"].shape
  ((8, 4, 16), 64, (8,))
  """

  embed_dim: int
  expert_dim: int
  gating: GatingConfig
  config: BalanceConfig = DEFAULT_CONFIG
  num_shared_experts: int = 0
  activation: Activation = jax.nn.silu
  dtype: DTypeLike | None = None
  param_dtype: DTypeLike = jnp.float32
  kernel_init: Initializer = DEFAULT_INIT
  axis_name: AxisName = "expert"
  token_axes: AxisName | None = None
  layout: str = "apart"
  use_bias: bool = False
  use_shared_gate: bool = False
  use_router_bias: bool = False
  latent_dim: int | None = None
  inner_axis: str | None = None

  def __post_init__(self) -> None:
    check_arguments(self.gating, self.config, self.activation, self.dtype, self.param_dtype)
    super().__post_init__()

  @nn.compact
  def __call__(
    self,
    x: Array,
    mask: Array | None = None,
    *,
    expert_index: Array | None = None,
    update_bias: float | Array | None = None,
  ) -> tuple[Array, MoEAux]:
    """Applies the layer.

    Args:
      x: ``[..., D]``; the mesh axes of the tokens divide its first axis.
      mask: ``[...]`` bool, False for tokens that take no part: their input may be anything,
        their output is 0 and they count in no loss.
      expert_index: ``[..., K]`` int32, the choices, if they are made already; see ``nnx.MoE``.
      update_bias: the rate of one step of the selection bias towards balance, stored in
        ``"router_state"``; ``None``: no step. ``init`` takes no step.

    Returns:
      ``y`` ``[..., D]`` in ``dtype``, on Explicit meshes sharded like ``x``, and ``MoEAux``.

    Raises:
      ValueError: a shape or the mesh does not fit, or ``update_bias`` is given without a
        selection bias or with an immutable ``"router_state"``.
      TypeError: a dtype is wrong.
    """
    check_mesh(self.axis_name, self.gating.num_experts)
    shapes = param_shapes(
      self.embed_dim,
      self.expert_dim,
      self.gating.num_experts,
      self.num_shared_experts,
      layout=self.layout,
      use_bias=self.use_bias,
      use_shared_gate=self.use_shared_gate,
      use_router_bias=self.use_router_bias,
      latent_dim=self.latent_dim,
    )
    block = block_of(self)
    check_inner(block, shapes)
    params = {name: self._param(name, shape) for name, shape in shapes.items()}
    bias = None
    if self.gating.use_selection_bias:
      bias = self.variable("router_state", "selection_bias", self._init_bias)
    bias_E = None if bias is None else bias.value
    y, aux = apply_moe(params, x, mask, bias_E, block, expert_index)
    if update_bias is not None:
      self._step_bias(bias, aux, update_bias)
    return y, aux

  def _init_bias(self) -> Array:
    return shard(jnp.zeros(self.gating.num_experts, jnp.float32), P(None))

  def _param(self, name: str, shape: tuple[int, ...]) -> Array:
    where = self.axis_name, self.inner_axis
    axes: Any = param_axes(name, shape, *where)  # a type that Flax takes and does not declare

    def init(key: Array) -> Array:
      value = init_param(name, key, shape, self.kernel_init, self.param_dtype, *where)
      return shard(value, P(*axes))

    # Flax's own unboxing asserts shardings that init is about to give, on Explicit meshes.
    boxed = self.param(name, nn.with_partitioning(init, axes), unbox=False)
    return boxed.value if isinstance(boxed, nn.Partitioned) else boxed

  def _step_bias(self, bias: nn.Variable | None, aux: MoEAux, rate: float | Array) -> None:
    if bias is None:
      raise ValueError("update_bias: expected gating.use_selection_bias=True, got False")
    if not self.is_mutable_collection("router_state"):
      raise ValueError("update_bias: expected mutable=['router_state'], got it immutable")
    if not self.is_initializing():
      bias.value = update_selection_bias(bias.value, aux.expert_load_E, rate)
