"""OLMoE: queries and keys normed over all heads together, a softmax router, no dense layer."""

from collections.abc import Mapping
from typing import Any

from ultraep_jax.gating import GatingConfig
from ultraep_jax.models import hf_fields as fields
from ultraep_jax.models import hf_rope
from ultraep_jax.models.families import family as common


def _read(hf: Mapping[str, Any]) -> dict[str, Any]:
  fields.check_no_windows(hf)
  fields.check_absent(hf, "clip_qkv")
  bias = fields.flag(hf, "attention_bias", False)
  attention = common.grouped_query(hf, qk_norm="all", bias=bias, out_bias=bias)
  return {
    "is_moe": (True,) * common.num_layers(hf),
    "attention": attention,
    "rotary": hf_rope.rotary(hf, attention.head_dim),
    "expert_dim": fields.integer(hf, "intermediate_size"),
    "gating": GatingConfig(
      num_experts=common.num_experts(hf, "num_experts", "num_local_experts"),
      num_experts_per_tok=fields.integer(hf, "num_experts_per_tok"),
      normalize_topk=fields.flag(hf, "norm_topk_prob", False),
    ),
  }


OLMOE = common.Family(
  model_type="olmoe",
  read=_read,
  mixer=common.NORMS | common.GROUPED_QUERY,
  dense={},
  moe=common.MOE,
)
