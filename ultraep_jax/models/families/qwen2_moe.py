"""Qwen2-MoE and Qwen1.5-MoE: biases of queries, keys and values, shared experts with a gate."""

from collections.abc import Mapping
from typing import Any

from ultraep_jax.gating import GatingConfig
from ultraep_jax.models import hf_fields as fields
from ultraep_jax.models import hf_rope
from ultraep_jax.models.families import family as common

MOE = common.MOE | {
  "shared_wi_gate": "mlp.shared_expert.gate_proj.weight",
  "shared_wi_up": "mlp.shared_expert.up_proj.weight",
  "shared_wo": "mlp.shared_expert.down_proj.weight",
  "shared_gate": "mlp.shared_expert_gate.weight",
}


def mixtures(hf: Mapping[str, Any], *, normalize_topk: bool = False) -> dict[str, Any]:
  """The second halves of layers, with the shared experts as one; the flag where it is missing."""
  width = fields.integer(hf, "moe_intermediate_size")
  shared = fields.integer(hf, "shared_expert_intermediate_size")
  if shared % width:
    raise fields.wrong("shared_expert_intermediate_size", f"a multiple of {width}", shared)
  return {
    "is_moe": common.sparse_layers(hf),
    "dense_dim": fields.integer(hf, "intermediate_size"),
    "expert_dim": width,
    "num_shared_experts": shared // width,
    "shared_gate": True,
    "gating": GatingConfig(
      num_experts=common.num_experts(hf, "num_experts", "num_local_experts"),
      num_experts_per_tok=fields.integer(hf, "num_experts_per_tok"),
      normalize_topk=fields.flag(hf, "norm_topk_prob", normalize_topk),
    ),
  }


def _read(hf: Mapping[str, Any]) -> dict[str, Any]:
  layers = common.num_layers(hf)
  slides = fields.flag(hf, "use_sliding_window", False)
  last = fields.integer(hf, "max_window_layers", 28, minimum=0)
  # Every other layer of the first ones, unless layer_types says which.
  windows = common.windows(hf, [slides and i % 2 == 0 and i < last for i in range(layers)])
  bias = fields.flag(hf, "qkv_bias", True)
  attention = [common.grouped_query(hf, bias=bias, window=window) for window in windows]
  return {
    "attention": common.one_or_each(attention),
    "rotary": hf_rope.rotary(hf, attention[0].head_dim),
    **mixtures(hf),
  }


QWEN2_MOE = common.Family(
  model_type="qwen2_moe",
  read=_read,
  mixer=common.NORMS | common.GROUPED_QUERY,
  dense=common.DENSE,
  moe=MOE,
)
