"""MiniMax-M2: queries and keys normed over all heads, a sigmoid router, no dense layer."""

from collections.abc import Mapping
from typing import Any

from ultraep_jax.gating import GatingConfig
from ultraep_jax.models import hf_fields as fields
from ultraep_jax.models import hf_rope
from ultraep_jax.models.families import family as common
from ultraep_jax.models.families.mixtral import MOE


def _read(hf: Mapping[str, Any]) -> dict[str, Any]:
  fields.check_no_windows(hf)
  for name, expected in (
    ("use_qk_norm", True),
    ("qk_norm_type", "per_layer"),
    ("scoring_func", "sigmoid"),
    ("use_routing_bias", True),
    ("shared_intermediate_size", 0),
  ):
    fields.choice(hf, name, (expected,), default=expected)
  if set(kinds := fields.integers(hf, "attn_type_list")) > {1}:  # the others are linear
    raise fields.wrong("attn_type_list", "a list of 1", kinds)
  attention = common.grouped_query(hf, qk_norm="all")
  turned = fields.integer(hf, "rotary_dim", attention.head_dim, maximum=attention.head_dim)
  share = turned / attention.head_dim
  return {
    "is_moe": (True,) * common.num_layers(hf),
    "attention": attention,
    "rotary": hf_rope.rotary(hf, attention.head_dim, partial=share, theta=5e6),
    "expert_dim": fields.integer(hf, "intermediate_size"),
    "num_extra_layers": fields.integer(
      hf, "num_mtp_modules", 0, minimum=0, maximum=common.MOST_LAYERS
    ),
    "gating": GatingConfig(
      num_experts=common.num_experts(hf, "num_local_experts", "num_experts"),
      num_experts_per_tok=fields.integer(hf, "num_experts_per_tok"),
      scoring="sigmoid",
      use_selection_bias=True,
    ),
  }


MINIMAX_M2 = common.Family(
  model_type="minimax_m2",
  read=_read,
  mixer=common.NORMS | common.GROUPED_QUERY,
  dense={},
  moe=MOE,
)
