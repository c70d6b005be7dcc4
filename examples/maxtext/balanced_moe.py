"""MaxText's ``RoutedMoE`` on balanced experts, for MaxText 0.2.5.

  model = maxtext.utils.model_creation_utils.from_config(config, rngs=rngs)
  balance(model)

Parameters, their names and shardings, the router and its losses are MaxText's. Replaced is
``sparse_matmul``: what happens between the router's logits and the sum of the experts.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import options
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P
from maxtext.common.common_types import DecoderBlockType
from maxtext.configs import types
from maxtext.layers import moe
from maxtext.utils.maxtext_utils import collect_intermediates_by_suffix
from maxtext.utils.sharding import mesh_axes_for_dim, remove_mesh_axes_from_partition_spec

import ultraep_jax as uep

try:
  from ultraep_jax import activations
except ImportError:
  activations = None

Array = jax.Array
SCALARS = "balance_scalars"  # the name of what a layer sows
# Of ``LayerStats.scalars``, and how those of several layers and token groups become one.
REDUCTIONS: dict[str, Callable[[Array], Array]] = {
  "imbalance_before": jnp.max,
  "imbalance_after": jnp.max,
  "rounds": jnp.max,
  "replicas": jnp.sum,
  "replica_megabytes": jnp.sum,
  "remote_fraction": jnp.mean,
  "invalid_assignments": jnp.sum,
}


class BalancedRoutedMoE(moe.RoutedMoE):
  """Has the variables of ``RoutedMoE`` and computes the same. Made by ``balance``.

  Attributes:
    balance: how to balance.
    sow_scalars: whether statistics become an ``nnx.Intermediate`` named ``SCALARS``.
  """

  balance: uep.BalanceConfig
  sow_scalars: bool

  def sparse_matmul(
    self,
    inputs: Array,
    gate_logits: Array,
    pre_bias_logits: Array | None,
    w0_kernel: Array,
    w1_kernel: Array,
    wo_kernel: Array,
    w0_bias: Array | None,
    w1_bias: Array | None,
    wo_bias: Array | None,
    input_ids: Array | None = None,
    forced_routed_experts: Array | None = None,
  ) -> tuple[Array, Array | None, Array | None]:
    """Of tokens ``[B, L, D]``: the output, the balance loss and the update of the router's bias."""
    ranks = mesh_axes_for_dim(self._expert_parallelism_name)
    by_token = self._logical_to_mesh_axes(("activation_batch", "activation_norm_length", None))
    by_inner = self._logical_to_mesh_axes(("exp", None, "mlp_no_fsdp"))
    by_inner = remove_mesh_axes_from_partition_spec(by_inner, ("fsdp",))
    inner = mesh_axes_for_dim(by_inner[2])
    if inputs.shape[0] == 1 or self.get_expert_parallelism_size() == 1:  # nothing to balance
      return super().sparse_matmul(
        inputs,
        gate_logits,
        pre_bias_logits,
        w0_kernel,
        w1_kernel,
        wo_kernel,
        w0_bias,
        w1_bias,
        wo_bias,
        input_ids=input_ids,
        forced_routed_experts=forced_routed_experts,
      )

    groups = self._check_axes(ranks, by_token, by_inner)
    # Each position on `inner` has a slice of the experts' inner width, and a term of every output.
    scatters = mesh_axes_for_dim(self._logical_to_mesh_axes(("activation_embed",))[0]) == inner

    def on_device(
      tokens: tuple[Array | None, ...], weights: uep.ExpertWeights
    ) -> tuple[Array, Array, Array | None, Array | None]:
      x_BLD, *routing = tokens
      assert x_BLD is not None
      x_TD, index_BLK, gate_TK = self._choose(x_BLD, *routing)
      if inner and getattr(weights, "wo_bias", None) is not None:  # a term of one position
        first = lax.axis_index(inner) == 0
        weights = weights._replace(wo_bias=jnp.where(first, weights.wo_bias, 0))
      y_TD, stats = uep.moe(
        x_TD,
        index_BLK.reshape(gate_TK.shape),
        gate_TK,
        weights,
        config=self.balance,
        axis_name=ranks[0] if len(ranks) == 1 else ranks,
        activation=activation(self),
      )
      if inner and scatters:
        y_TD = lax.psum_scatter(y_TD, inner, scatter_dimension=1, tiled=True)
      elif inner:
        y_TD = lax.psum(y_TD, inner)
      counts = scalars = None
      if self.should_update_load_balance():
        counts = moe.calculate_expert_counts(index_BLK, self.num_experts, groups + ranks)
      if self.sow_scalars:
        values = stats.scalars()
        scalars = jnp.stack([values[name] for name in REDUCTIONS])[None]
      return y_TD.reshape(*x_BLD.shape[:2], -1), index_BLK, counts, scalars

    tokens = (inputs, gate_logits, pre_bias_logits, input_ids, forced_routed_experts)
    tokens = tuple(None if leaf is None else self._maybe_shard_with_pspec(leaf, P(*by_token[:2])) for leaf in tokens)
    weights = uep.ExpertWeights(w0_kernel, w1_kernel, wo_kernel)
    if w0_bias is not None:
      weights = weights._replace(wi_gate_bias=w0_bias, wi_up_bias=w1_bias, wo_bias=wo_bias)
    specs = _specs(weights, by_inner)
    weights = jax.tree.map(self._maybe_shard_with_pspec, weights, specs)
    y_BLD, index_BLK, counts, scalars = jax.shard_map(
      on_device,
      mesh=self.mesh,
      in_specs=(P(*by_token[:2]), specs),
      out_specs=(P(*by_token[:2], inner if scatters else None), P(*by_token[:2]), P(), P(groups)),
      check_vma=self.config.check_vma,
    )(tokens, weights)
    if scalars is not None:
      self.sow(nnx.Intermediate, SCALARS, scalars)
    return y_BLD, self._loss(gate_logits, pre_bias_logits, index_BLK), self._update(counts)

  def _choose(
    self,
    x_BLD: Array,
    logits_BLE: Array,
    pre_bias_BLE: Array | None,
    input_ids_BL: Array | None,
    forced_BLK: Array | None,
  ) -> tuple[Array, Array, Array]:
    """A device's tokens ``[T, D]``, their experts ``[B, L, K]`` and weights ``[T, K]``."""
    gate_BLK, index_BLK = self.get_topk(
      logits_BLE, pre_bias_BLE, input_ids=input_ids_BL, forced_routed_experts=forced_BLK
    )
    if forced_BLK is not None:  # slots that are not used
      index_BLK = jnp.where(moe.valid_expert_mask(index_BLK, self.num_experts), index_BLK, -1)
    x_TD = x_BLD.reshape(-1, x_BLD.shape[-1])
    gate_TK = gate_BLK.reshape(x_TD.shape[0], -1).astype(jnp.float32)
    if self.config.decoder_block == DecoderBlockType.LLAMA4:  # a score scales the token itself
      x_TD = (x_TD * jax.nn.sigmoid(gate_TK)).astype(x_TD.dtype)
      gate_TK = jnp.ones_like(gate_TK)
    return x_TD, index_BLK, gate_TK

  def _loss(
    self, logits_BLE: Array, pre_bias_BLE: Array | None, index_BLK: Array
  ) -> Array | None:
    """MaxText's loss of the whole batch, as in ``dense_matmul``."""
    if not self.config.load_balance_loss_weight or self.is_hash_routing:
      return None
    scores_BLE = logits_BLE if pre_bias_BLE is None else pre_bias_BLE
    if moe.uses_megatron_seq_aux_loss(self.config):
      return self.megatron_seq_aux_loss(scores_BLE)
    likely_BLE = jax.nn.softmax(scores_BLE.astype(jnp.float32), axis=-1).astype(self.dtype)
    return self.load_balance_loss(index_BLK, likely_BLE)

  def _update(self, counts_E: Array | None) -> Array | None:
    if counts_E is None or self.config.gradient_accumulation_steps > 1:
      return counts_E  # of microbatches, which the trainer adds up
    return moe.load_balance_updates_from_counts(
      counts_E, self.num_experts, self.config.routed_bias_update_rate
    )

  def _check_axes(self, ranks: tuple[str, ...], by_token: P, by_inner: P) -> tuple[str, ...]:
    """The mesh axes of token groups, unless axes are used in a way that is not known here."""
    token_axes = tuple(axis for dim in by_token[:2] for axis in mesh_axes_for_dim(dim))
    of_experts, inner = mesh_axes_for_dim(by_inner[0]), mesh_axes_for_dim(by_inner[2])
    used = tuple(axis for axis in ranks if self.mesh.shape[axis] > 1)
    if of_experts != used:
      raise NotImplementedError(
        f"logical_axis_rules: expected 'exp' on the mesh axes {used}, got {of_experts}"
      )
    if not set(used) <= set(token_axes) or set(inner) & set(token_axes):
      raise NotImplementedError(
        f"logical_axis_rules: expected tokens on the experts' axes {used} and not on those of "
        f"the inner width {inner}, got {token_axes}"
      )
    return tuple(axis for axis in token_axes if axis not in ranks)


def activation(layer: moe.RoutedMoE) -> "activations.Activation":
  """What is between the matrices, as in ``RoutedMoE.apply_ffn_activation``."""
  config = layer.config
  name, limit = config.mlp_activations[0], config.mlp_activations_limit
  if config.decoder_block == DecoderBlockType.GPT_OSS:
    if name != "sigmoid":
      raise NotImplementedError(f"mlp_activations: expected 'sigmoid' first, got {name!r}")
    return activations.clamped_swiglu(1.702, limit)
  deepseek = config.decoder_block in (DecoderBlockType.DEEPSEEK, DecoderBlockType.DEEPSEEK4)
  if deepseek and limit > 0:
    if name != "silu":
      raise NotImplementedError(f"mlp_activations: expected 'silu' first, got {name!r}")
    return activations.clipped_swiglu(limit)
  return layer.activation_fn


def balance(
  model: nnx.Module, config: uep.BalanceConfig | None = None, *, sow_scalars: bool = True
) -> int:
  """Balances every ``RoutedMoE`` of a model, in place; variables stay as they are.

  Args:
    model: a model of MaxText, or a train state that has one; abstract or not.
    config: how to balance.
    sow_scalars: whether layers give statistics as ``nnx.Intermediate``; see ``scalars``.

  Returns:
    how many layers of this kind there are; one that is scanned over counts once.

  Raises:
    NotImplementedError: a layer is of a kind, or has an option, that cannot be balanced.
    ValueError: there is no such layer.
  """
  layers = [node for _, node in nnx.iter_graph(model) if isinstance(node, moe.RoutedMoE)]
  if not layers:
    raise ValueError(f"model: expected one with a RoutedMoE, got {type(model).__name__}")
  for layer in layers:
    if type(layer) not in (moe.RoutedMoE, BalancedRoutedMoE):
      raise NotImplementedError(f"layer: expected a RoutedMoE, got {type(layer).__name__}")
    if layer.quant is not None:
      raise NotImplementedError(f"quant: expected None, got {type(layer.quant).__name__}")
    options.check(layer.config, default_options())
  for layer in layers:
    layer.__class__ = BalancedRoutedMoE
    layer.balance = config or uep.BalanceConfig()
    layer.sow_scalars = sow_scalars
  return len(layers)


def default_options() -> dict[str, Any]:
  """MaxText's options about MoE, with their defaults."""
  sections = (getattr(types, name) for name in options.SECTIONS)
  return {name: field.default for s in sections for name, field in s.model_fields.items()}


def scalars(intermediates: Any) -> dict[str, Array]:
  """What the layers of a model did, as scalars by name.

  Imbalances, fan-out and rounds are those of the worst layer, ``remote_fraction`` is the mean, the
  rest are sums over layers. In a pipeline every iteration of a stage counts as a layer.

  Args:
    intermediates: of a call of the model, as MaxText's ``loss_fn`` returns them.
  """
  leaves = collect_intermediates_by_suffix(intermediates, SCALARS)
  if not leaves:
    return {}
  values = jnp.concatenate([leaf.reshape(-1, len(REDUCTIONS)) for leaf in leaves])
  return {name: reduce(values[:, i]) for i, (name, reduce) in enumerate(REDUCTIONS.items())}


def _specs(weights: uep.ExpertWeights, by_inner: P) -> uep.ExpertWeights:
  experts, _, inner = by_inner
  into, bias = P(experts, None, inner), P(experts, inner)
  specs = uep.ExpertWeights(into, into, P(experts, inner, None))  # pyright: ignore[reportArgumentType]
  if jax.tree.leaves(weights)[3:]:
    specs = specs._replace(wi_gate_bias=bias, wi_up_bias=bias, wo_bias=P(experts, None))
  return specs
