"""Qwen3-MoE: queries and keys normed per head, a softmax router."""

from collections.abc import Mapping
from typing import Any

from ultraep_jax.gating import GatingConfig
from ultraep_jax.models import hf_fields as fields
from ultraep_jax.models import hf_rope
from ultraep_jax.models.families import family as common


def _read(hf: Mapping[str, Any]) -> dict[str, Any]:
  fields.check_no_windows(hf)
  bias = fields.flag(hf, "attention_bias", False)
  attention = common.grouped_query(hf, qk_norm="head", bias=bias, out_bias=bias)
  return {
    "is_moe": common.sparse_layers(hf),
    "attention": attention,
    "rotary": hf_rope.rotary(hf, attention.head_dim),
    "dense_dim": fields.integer(hf, "intermediate_size"),
    "expert_dim": fields.integer(hf, "moe_intermediate_size"),
    "gating": GatingConfig(
      num_experts=common.num_experts(hf, "num_experts", "num_local_experts"),
      num_experts_per_tok=fields.integer(hf, "num_experts_per_tok"),
      normalize_topk=fields.flag(hf, "norm_topk_prob", False),
    ),
  }


QWEN3_MOE = common.Family(
  model_type="qwen3_moe",
  read=_read,
  mixer=common.NORMS | common.GROUPED_QUERY,
  dense=common.DENSE,
  moe=common.MOE,
)
