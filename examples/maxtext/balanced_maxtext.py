"""MaxText's ``RoutedMoE`` on balanced experts. Tested with MaxText 0.2.5.

  model = maxtext.utils.model_creation_utils.from_config(config, rngs=rngs)
  balance(model)

Parameters with their names and shardings, the router and its losses are MaxText's. Replaced is
``sparse_matmul``: what happens between the router's logits and the sum of the experts.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import maxtext_options as options
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P
from maxtext.common.common_types import DecoderBlockType
from maxtext.configs import types
from maxtext.layers import moe
from maxtext.utils.maxtext_utils import collect_intermediates_by_suffix
from maxtext.utils.sharding import mesh_axes_for_dim, remove_mesh_axes_from_partition_spec

import ultraep_jax as uep
from ultraep_jax import activations

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
# What MaxText's ``remat_policy=custom`` can keep of its own path, and our names of the same.
_KEPT = dict(zip(("moe_routing_maps", "moe_x_sorted", "moe_mlpwi_0"), uep.REMAT_NAMES, strict=True))


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
    *kernels: Array | None,
    input_ids: Array | None = None,
    forced_routed_experts: Array | None = None,
  ) -> tuple[Array, Array | None, Array | None]:
    """Of tokens ``[B, L, D]``: the output, the balance loss and the update of the router's bias.

    ``kernels`` are those of gate, up and down, then their biases, in the compute dtype.
    """
    if inputs.shape[0] == 1 or self.get_expert_parallelism_size() == 1:  # nothing to balance
      return super().sparse_matmul(
        inputs,
        gate_logits,
        pre_bias_logits,
        *kernels,
        input_ids=input_ids,
        forced_routed_experts=forced_routed_experts,
      )
    weights = uep.ExpertWeights(*kernels)  # pyright: ignore[reportArgumentType]
    ranks = mesh_axes_for_dim(self._expert_parallelism_name)
    by_token = self._logical_to_mesh_axes(("activation_batch", "activation_norm_length"))
    into = self._logical_to_mesh_axes(("exp", None, "mlp_no_fsdp"))
    by_weight = _specs(remove_mesh_axes_from_partition_spec(into, ("fsdp",)), weights)
    groups, inner = self._check_axes(ranks, by_token, by_weight.wi_gate)
    # Each position on the axes `inner` has a slice of the inner width, and a term of every output.
    by_width = self._logical_to_mesh_axes(("activation_embed",))[0]
    scatter = bool(inner) and mesh_axes_for_dim(by_width) == inner

    def on_device(
      tokens: tuple[Array, ...], weights: uep.ExpertWeights
    ) -> tuple[Array, Array, Array | None, Array | None]:
      x_TD, index_BLK, gate_TK = self._choose(*tokens)
      if inner and weights.wo_bias is not None:  # a term of the first position alone
        first = lax.axis_index(inner) == 0
        weights = weights.replace(wo_bias=jnp.where(first, weights.wo_bias, 0))
      y_TD, stats = uep.moe(
        x_TD,
        index_BLK.reshape(gate_TK.shape),
        gate_TK,
        weights,
        config=self.balance,
        axis_name=ranks,
        activation=_activation(self),
      )
      if scatter:
        y_TD = lax.psum_scatter(y_TD, inner, scatter_dimension=1, tiled=True)
      elif inner:
        y_TD = lax.psum(y_TD, inner)
      counts_E = scalars = None
      if self.should_update_load_balance():
        counts_E = moe.calculate_expert_counts(index_BLK, self.num_experts, groups + ranks)
      if self.sow_scalars:
        values = stats.scalars()
        scalars = jnp.stack([values[name] for name in REDUCTIONS])[None]
      return y_TD.reshape(*index_BLK.shape[:2], -1), index_BLK, counts_E, scalars

    tokens = inputs, gate_logits, pre_bias_logits, input_ids, forced_routed_experts
    tokens = jax.tree.map(lambda leaf: self._maybe_shard_with_pspec(leaf, by_token), tokens)
    weights = jax.tree.map(self._maybe_shard_with_pspec, weights, by_weight)
    y_BLD, index_BLK, counts_E, scalars = jax.shard_map(
      on_device,
      mesh=self.mesh,
      in_specs=(by_token, by_weight),
      out_specs=(P(*by_token, inner if scatter else None), by_token, P(), P(groups)),
      check_vma=self.config.check_vma,
    )(tokens, weights)
    if scalars is not None:
      self.sow(nnx.Intermediate, SCALARS, scalars)
    return y_BLD, self._loss(gate_logits, pre_bias_logits, index_BLK), self._update(counts_E)

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
    if self.config.decoder_block == DecoderBlockType.LLAMA4:  # the score scales the token itself
      x_TD = (x_TD * jax.nn.sigmoid(gate_TK)).astype(x_TD.dtype)
      gate_TK = jnp.ones_like(gate_TK)
    return x_TD, index_BLK, gate_TK

  def _loss(self, logits_BLE: Array, pre_bias_BLE: Array | None, index_BLK: Array) -> Array | None:
    """MaxText's balance loss, of the whole batch as in ``dense_matmul``."""
    if not self.config.load_balance_loss_weight or self.is_hash_routing:
      return None
    scores_BLE = logits_BLE if pre_bias_BLE is None else pre_bias_BLE
    if moe.uses_megatron_seq_aux_loss(self.config):
      return self.megatron_seq_aux_loss(scores_BLE)
    likely_BLE = jax.nn.softmax(scores_BLE.astype(jnp.float32), axis=-1).astype(self.dtype)
    return self.load_balance_loss(index_BLK, likely_BLE)

  def _update(self, counts_E: Array | None) -> Array | None:
    if counts_E is None or self.config.gradient_accumulation_steps > 1:
      return counts_E  # of a microbatch; the trainer adds them up
    rate = self.config.routed_bias_update_rate
    return moe.load_balance_updates_from_counts(counts_E, self.num_experts, rate)

  def _check_axes(
    self, ranks: tuple[str, ...], by_token: P, by_wi: P
  ) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The mesh axes of token groups, and those that share the experts' inner width.

    Raises:
      NotImplementedError: the rules use axes in a way that is not known here.
    """
    of_tokens = tuple(axis for dim in by_token for axis in mesh_axes_for_dim(dim))
    of_experts, inner = mesh_axes_for_dim(by_wi[0]), mesh_axes_for_dim(by_wi[2])
    used = tuple(axis for axis in ranks if self.mesh.shape[axis] > 1)
    if of_experts != used:
      raise NotImplementedError(
        f"logical_axis_rules: expected 'exp' on the mesh axes {used}, got {of_experts}"
      )
    if not set(used) <= set(of_tokens) or set(inner) & set(of_tokens):
      raise NotImplementedError(
        f"logical_axis_rules: expected tokens on the experts' axes {used} and not on those of "
        f"'mlp_no_fsdp', {inner}, got {of_tokens}"
      )
    return tuple(axis for axis in of_tokens if axis not in ranks), inner


def balance(
  model: nnx.Module, config: uep.BalanceConfig | None = None, *, sow_scalars: bool = True
) -> int:
  """Balances every ``RoutedMoE`` of a model, in place; variables stay as they are.

  Args:
    model: of MaxText, abstract or not, or something that holds one, such as its train state.
    config: how to balance.
    sow_scalars: whether layers give statistics, which ``scalars`` reads. Those of a circular
      pipeline give none.

  Returns:
    how many such layers there are; those that are scanned over count once.

  Raises:
    NotImplementedError: a layer is of a kind, or has an option, that cannot be balanced.
    ValueError: there is no such layer.
  """
  layers = [node for _, node in nnx.iter_graph(model) if isinstance(node, moe.RoutedMoE)]
  if not layers:
    raise ValueError(f"model: expected one with a RoutedMoE, got {type(model).__name__}")
  for layer in layers:
    if type(layer) not in (moe.RoutedMoE, BalancedRoutedMoE):
      raise NotImplementedError(f"layer: expected a RoutedMoE, got a {type(layer).__name__}")
    if layer.quant is not None:
      raise NotImplementedError(f"quant: expected None, got {type(layer.quant).__name__}")
    options.check(layer.config, default_options())
    _activation(layer)
  for layer in layers:
    layer.__class__ = BalancedRoutedMoE
    layer.balance = config or uep.BalanceConfig()
    # MaxText's circular pipeline takes nothing that its layers sow.
    circular = layer.config.using_pipeline_parallelism and layer.config.num_pipeline_repeats > 1
    layer.sow_scalars = sow_scalars and not circular
  return len(layers)


def scalars(intermediates: Any) -> dict[str, Array]:
  """What the layers of a model did, as scalars by name; empty if they gave no statistics.

  Imbalances and rounds are those of the worst layer, ``remote_fraction`` is the mean, the rest
  are sums over layers. In a pipeline each iteration of a stage counts as a layer.

  Args:
    intermediates: of a call of the model, as a dict.
  """
  leaves = collect_intermediates_by_suffix(intermediates, SCALARS)
  if not leaves:
    return {}
  values = jnp.concatenate([leaf.reshape(-1, len(REDUCTIONS)) for leaf in leaves])
  return {name: reduce(values[:, i]) for i, (name, reduce) in enumerate(REDUCTIONS.items())}


def keep_named(config: Any) -> None:
  """Has ``remat_policy=custom`` keep of balanced layers what it keeps of MaxText's own.

  ``moe_routing_maps`` stands for the plan, ``moe_x_sorted`` for the tokens that arrived,
  ``moe_mlpwi_0`` for both projections. Call it before the model is made.
  """
  for names in (config.tensors_on_device, config.tensors_to_offload):
    if names is not None:
      names += [ours for theirs, ours in _KEPT.items() if theirs in names and ours not in names]


def default_options() -> dict[str, Any]:
  """MaxText's options about MoE, with their defaults."""
  sections = [getattr(types, name) for name in options.SECTIONS]
  return {name: field.default for s in sections for name, field in s.model_fields.items()}


def _activation(layer: moe.RoutedMoE) -> activations.Activation:
  """What is between the matrices, as in ``RoutedMoE.apply_ffn_activation``."""
  config = layer.config
  name, limit = config.mlp_activations[0], config.mlp_activations_limit
  if config.decoder_block == DecoderBlockType.GPT_OSS:
    expected, unit = "sigmoid", activations.clamped_swiglu(1.702, limit)
  elif "deepseek" in config.decoder_block.value and limit > 0:
    expected, unit = "silu", activations.clipped_swiglu(limit)
  else:
    return layer.activation_fn
  if name != expected:
    raise NotImplementedError(f"mlp_activations: expected {expected!r} first, got {name!r}")
  return unit


def _specs(by_wi: P, weights: uep.ExpertWeights) -> Any:
  """How weights are divided, if the matrices in are as ``by_wi`` says."""
  experts, _, inner = by_wi
  specs = [by_wi, by_wi, P(experts, inner, None)]
  if weights.wo_bias is not None:
    specs += [P(experts, inner), P(experts, inner), P(experts, None)]
  return uep.ExpertWeights(*specs)
