"""Which of MaxText's options a balanced ``RoutedMoE`` obeys, replaces or refuses.

Nothing here imports MaxText: options are read from whatever object has them as attributes.
"""

from collections.abc import Mapping
from typing import Any

# Parts of MaxText's configuration (classes of maxtext.configs.types) whose options concern a MoE.
SECTIONS = ("MoEGeneral", "MoEKernels", "DeepSeekMoE")

# What the block is, what its router does, and what MaxText does outside of ``sparse_matmul``.
OBEYED = frozenset(
  {
    "base_moe_mlp_dim",
    "first_num_dense_layers",
    "first_num_hash_layers",
    "float32_gate_logits",
    "fuse_expert_scales",
    "interleave_moe_layer_step",
    "load_balance_loss_weight",
    "log_moe_bias_norms",
    "log_step_diagnostics",
    "mlp_bias",
    "moe_expert_input_dim",
    "moe_use_megatron_seq_aux_loss",
    "n_routing_groups",
    "norm_topk_prob",
    "num_experts",
    "num_experts_per_tok",
    "padded_base_moe_mlp_dim",
    "prefuse_moe_weights",
    "return_routed_experts",
    "routed_bias",
    "routed_bias_update_rate",
    "routed_scaling_factor",
    "routed_score_func",
    "router_topk_matmul_vjp",
    "shared_experts",
    "topk_routing_group",
    "warmup_programs_in_init",
  }
)

# How ``sparse_matmul`` sends, sorts and multiplies: the balanced layer does that in its own way,
# with the same result. Options of tile sizes are told by their prefixes.
REPLACED = frozenset(
  {
    "float32_weight_sum",  # always in float32
    "megablox",
    "merge_gating_gmm",
    "moe_chunk_barrier",
    "moe_dispatch_no_expert_sharding",
    "moe_ep_all_gather_sparse_core_id",
    "moe_fsdp_all_gather_sparse_core_id",
    "moe_pin_sparse_core_all_gathers",
    "moe_pin_sparse_core_ep_all_gathers",
    "moe_pin_sparse_core_fsdp_all_gathers",
    "moe_pin_sparse_core_fsdp_all_gathers_fwd_only",
    "moe_topk_before_ep_all_gather",
    "moe_use_direct_token_gather",
    "num_moe_emb_chunks",
    "num_moe_token_chunks",
    "te_ep_overflow_check_every_n_steps",
    "use_custom_sort_vjp",
    "use_gather_mosaic_kernel",
    "use_gmm_v2",
    "use_gmm_v2_heuristic_tiling",
    "use_ragged_sort",
    "use_ring_of_experts",
    "use_tokamax_gmm",
  }
)
REPLACED_PREFIXES = ("wi_tile_", "wo_tile_", "eval_wi_tile_", "eval_wo_tile_", "ragged_")

_DROPS = "the balanced layer drops no token"
_EXPERTS = "every rank then holds all experts, and there is nothing to balance"
_OTHER_PATH = "MaxText then computes the experts elsewhere, not in sparse_matmul"
# Option, the value to set, why.
REFUSED: tuple[tuple[str, Any, str], ...] = (
  ("sparse_matmul", True, "sparse_matmul is what the balanced layer replaces"),
  ("te_moe_block", False, _OTHER_PATH),
  ("use_batch_split_schedule", False, _OTHER_PATH),
  ("batch_split_factor", 1, _OTHER_PATH),
  ("use_lineage", False, _OTHER_PATH),
  ("quantization", "", "quantised matmuls are not known here"),
  ("use_qwix_quantization", False, "quantised matmuls are not known here"),
  ("te_gmm_quantization", "", "quantised matmuls are not known here"),
  ("moe_quantize_token_all_gather", False, "there is no such gather"),
  ("moe_quantize_combine_bwd_method", "", "there is no such gather"),
  ("capacity_factor", -1.0, _DROPS),
  ("ragged_buffer_factor", -1.0, _DROPS),
  ("eval_ragged_buffer_factor", -1.0, _DROPS),
  ("first_phase_ragged_buffer_factor", 0.0, _DROPS),
  ("moe_dropless_fallback", None, _DROPS),
  ("retry_dropless_first_steps", 0, _DROPS),
  ("log_required_ragged_buffer_factor", False, f"{_DROPS}; its scalars say more"),
  ("moe_log_max_load_ratio", False, "the layer's scalars say it, before and after balancing"),
  ("defer_small_all_reduces", False, "expert counts are reduced in the layer"),
  ("moe_fsdp_use_two_stage_all_gather", False, "weights are gathered at once"),
  ("shard_exp_on_fsdp", False, _EXPERTS),
  ("use_2d_fsdp_sharding", False, _EXPERTS),
  ("shard_embed_moe_on_fsdp", False, "weights are gathered before the layer"),
  ("use_random_routing", False, "every rank would draw the same choices"),
)
# Attention of vLLM, with which MaxText multiplies experts in a kernel of its own.
_VLLM = ("vllm_rpa", "vllm_batched_rpa")
# Decoders whose experts are known here: gated, with the activation named first or one of their own.
DECODERS = frozenset(
  {
    "default",
    "deepseek",
    "deepseek4",
    "envy",
    "gemma4",
    "gpt_oss",
    "llama4",
    "mixtral",
    "qwen3_custom_moe",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_5",
  }
)


def check(config: Any, defaults: Mapping[str, Any] | None = None) -> None:
  """Raises unless the balanced layer computes what the configuration says.

  Args:
    config: MaxText's configuration.
    defaults: MaxText's options about MoE with their defaults. An option among them that this
      module does not know must have its default.

  Raises:
    NotImplementedError: names the option, what was expected and what was found.
  """
  for name, expected, reason in REFUSED:
    got = _plain(getattr(config, name, expected))
    if got != expected and not (_unset(expected) and _unset(got)):
      raise NotImplementedError(f"{name}: expected {expected!r}, got {got!r}: {reason}")
  if config.attention in _VLLM:
    raise NotImplementedError(
      f"attention: expected none of {_VLLM}, got {config.attention!r}: {_OTHER_PATH}"
    )
  decoder = _plain(config.decoder_block)
  if decoder not in DECODERS:
    raise NotImplementedError(
      f"decoder_block: expected one of {sorted(DECODERS)}, whose experts are known here, "
      f"got {decoder!r}"
    )
  if decoder == "llama4" and config.num_experts_per_tok != 1:
    raise NotImplementedError(
      "num_experts_per_tok: expected 1 with decoder_block='llama4', whose scores scale the "
      f"tokens, got {config.num_experts_per_tok}"
    )
  for name, default in (defaults or {}).items():
    got = getattr(config, name, default)
    if not known(name) and got != default:
      raise NotImplementedError(
        f"{name}: expected {default!r}, as this option is not known here, got {got!r}"
      )


def known(name: str) -> bool:
  """Whether an option is obeyed, replaced, or refused by name."""
  refused = {option for option, _, _ in REFUSED}
  return name in OBEYED | REPLACED | refused or name.startswith(REPLACED_PREFIXES)


def _plain(value: Any) -> Any:
  """The value of an enumeration's member, anything else as it is."""
  return getattr(value, "value", value)


def _unset(value: Any) -> bool:
  """Empty, or a negative or zero factor: MaxText's ways to say that something is off."""
  return value is None or value == "" or (isinstance(value, float | int) and value <= 0)
