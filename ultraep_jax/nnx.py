"""A Flax NNX module over ``sharded_moe``: router, balanced experts, shared experts."""

import jax
import jax.numpy as jnp
from flax import nnx
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
from ultraep_jax.config import BalanceConfig, check_type
from ultraep_jax.gating import GatingConfig, update_selection_bias
from ultraep_jax.types import Array, AxisName


class SelectionBias(nnx.Variable):
  """``[E]`` float32 that a router adds when it chooses. Not a ``Param``: optimizers skip it."""


class MoE(nnx.Module):
  """A mixture of experts, gated or not, balanced on the exact load of every call.

  The output equals that of a dense mixture; only where the work happens changes. Parameters:

  | name                                            | shape          | sharding             |
  |-------------------------------------------------|----------------|----------------------|
  | ``router`` (always float32)                     | ``[D, E]``     | replicated           |
  | ``router_bias`` (always float32)                | ``[E]``        | replicated           |
  | ``wi_gate``, ``wi_up``                          | ``[E, D, F]``  | E over ``axis_name`` |
  | ``wo``                                          | ``[E, F, D]``  | E over ``axis_name`` |
  | ``shared_wi_gate``, ``shared_wi_up``            | ``[D, n * F]`` | replicated           |
  | ``shared_wo``                                   | ``[n * F, D]`` | replicated           |
  | ``shared_gate``                                 | ``[D, 1]``     | replicated           |
  | ``latent_down``                                 | ``[D, L]``     | replicated           |
  | ``latent_up``                                   | ``[L, D]``     | replicated           |
  | ``selection_bias`` (``SelectionBias``, float32) | ``[E]``        | replicated           |

  The shared ones exist with n = ``num_shared_experts`` > 0, ``shared_gate`` with
  ``use_shared_gate``, ``router_bias`` with ``use_router_bias``, the latent ones with L =
  ``latent_dim``, which is then the width of experts, and the selection bias with
  ``gating.use_selection_bias``. In another ``layout`` than ``"apart"``,
  ``wi`` of as many columns as ``types.Layout`` says stands for ``wi_gate`` and ``wi_up``, and
  likewise in shared experts. With ``use_bias`` each matrix of an expert has a bias of its columns,
  such as ``wo_bias``. With ``inner_axis`` F of the routed experts is divided over that mesh axis as
  well. Replicas that balance the load are no parameters: they appear
  in no state, optimizer or checkpoint.

  Construction and calls need the mesh in context, all axes Auto or all Explicit. Construct
  under ``nnx.jit`` where one device cannot hold all experts.

  >>> import jax, jax.numpy as jnp, optax
  >>> from flax import nnx
  >>> import ultraep_jax as uep
  >>>
  >>> gating = uep.GatingConfig(num_experts=8, num_experts_per_tok=2, use_selection_bias=True)
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
    dtype: DTypeLike | None = None,
    param_dtype: DTypeLike = jnp.float32,
    kernel_init: Initializer = DEFAULT_INIT,
    axis_name: AxisName = "expert",
    token_axes: AxisName | None = None,
    layout: str = "apart",
    use_bias: bool = False,
    use_shared_gate: bool = False,
    use_router_bias: bool = False,
    latent_dim: int | None = None,
    inner_axis: str | None = None,
    rngs: nnx.Rngs,
  ):
    """Creates the parameters, already sharded.

    Args:
      embed_dim: D, hidden width.
      expert_dim: F, inner width of one expert.
      gating: the router.
      config: how the layer balances.
      num_shared_experts: n, experts that every token takes: one MLP of inner width n * F.
      activation: what is between the matrices of an expert; see ``moe``.
      dtype: of the computation: bfloat16, float16 or float32; ``None``: that of the input. The
        router computes in float32.
      param_dtype: of all parameters but the router: one of the same.
      kernel_init: makes one ``[in, out]`` matrix; called per expert with its own key.
      axis_name: mesh axis of the experts, or a tuple of several.
      token_axes: mesh axes, or the one, that divide the first axis of the input; ``None``:
        ``"data"`` where the mesh has it, then ``axis_name``.
      layout: ``"apart"``, ``"fused"``, ``"interleaved"`` or ``"ungated"``; see ``types.Layout``.
      use_bias: whether experts, shared ones too, have biases.
      use_shared_gate: whether a token's shared experts count ``sigmoid(x shared_gate)`` times.
      use_router_bias: whether the router's logits have a bias, unlike ``selection_bias`` a
        parameter.
      latent_dim: L, the width that tokens cross to their experts in: ``latent_down`` brings them
        there and ``latent_up`` back. ``None``: D, without either.
      inner_axis: a mesh axis, none of the tokens', that F of the routed experts is divided over, as
        in tensor parallelism; see ``sharded_moe``.
      rngs: the stream ``params`` is used.

    Raises:
      ValueError: no mesh with ``axis_name`` is in context, it does not divide the experts, the
        inner axis not their width, or a size is out of range.
      TypeError: an argument has the wrong type, or a dtype is none that the layer computes in.
    """
    check_arguments(gating, config, activation, dtype, param_dtype)
    check_type("rngs", rngs, nnx.Rngs)
    shapes = param_shapes(
      embed_dim,
      expert_dim,
      gating.num_experts,
      num_shared_experts,
      layout=layout,
      use_bias=use_bias,
      use_shared_gate=use_shared_gate,
      use_router_bias=use_router_bias,
      latent_dim=latent_dim,
    )
    check_mesh(axis_name, gating.num_experts)
    self.gating = gating
    self.config = config
    self.activation = activation
    self.dtype = dtype
    self.axis_name = axis_name
    self.token_axes = token_axes
    self.layout = layout
    self.inner_axis = inner_axis
    check_inner(block_of(self), shapes)
    where = axis_name, inner_axis
    for name, shape in shapes.items():
      value = init_param(name, rngs.params(), shape, kernel_init, param_dtype, *where)
      setattr(self, name, nnx.Param(value, out_sharding=param_axes(name, shape, *where)))
    if gating.use_selection_bias:
      bias_E = jnp.zeros(gating.num_experts, jnp.float32)
      self.selection_bias = SelectionBias(bias_E, out_sharding=(None,))
    self.param_names = tuple(shapes)

  def __call__(
    self, x: Array, mask: Array | None = None, *, expert_index: Array | None = None
  ) -> tuple[Array, MoEAux]:
    """Applies the layer; changes no state.

    Args:
      x: ``[..., D]``; the mesh axes of the tokens divide its first axis.
      mask: ``[...]`` bool, False for tokens that take no part: their input may be anything,
        their output is 0 and they count in no loss.
      expert_index: ``[..., K]`` int32, the choices of every token, if they are made already, as
        another call's ``aux.expert_index`` or by a table of tokens; −1: no expert. The router
        then makes the gates only.

    Returns:
      ``y`` ``[..., D]`` in ``dtype``, on Explicit meshes sharded like ``x``, and ``MoEAux``.

    Raises:
      ValueError: a shape or the mesh does not fit.
      TypeError: a dtype is wrong.
    """
    bias = self.selection_bias[...] if self.gating.use_selection_bias else None
    params = {name: getattr(self, name)[...] for name in self.param_names}
    return apply_moe(params, x, mask, bias, block_of(self), expert_index)

  def update_bias(self, aux: MoEAux, rate: float | Array) -> None:
    """Moves the selection bias one step of ``rate`` towards balance (once per train step).

    With several microbatches, sum their ``expert_load_E`` first:
    ``aux._replace(expert_load_E=total_E)``.

    Raises:
      ValueError: the gating uses no selection bias, or the rate has axes.
      TypeError: the rate is no number.
    """
    if not self.gating.use_selection_bias:
      raise ValueError("update_bias: expected gating.use_selection_bias=True, got False")
    old_E = self.selection_bias[...]
    self.selection_bias[...] = update_selection_bias(old_E, aux.expert_load_E, rate)
