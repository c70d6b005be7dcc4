"""GLM-4.5 and its successors: half of a head's channels turn, DeepSeek-V3's router."""

from collections.abc import Mapping
from typing import Any

from ultraep_jax.models import hf_fields as fields
from ultraep_jax.models import hf_rope
from ultraep_jax.models.families import family as common


def _read(hf: Mapping[str, Any]) -> dict[str, Any]:
  fields.check_no_windows(hf)
  attention = common.grouped_query(
    hf,
    qk_norm="head" if fields.flag(hf, "use_qk_norm", False) else None,
    bias=fields.flag(hf, "attention_bias", False),
  )
  return {
    "attention": attention,
    "rotary": hf_rope.rotary(hf, attention.head_dim, partial=0.5),
    **common.sigmoid_routed(hf),
  }


GLM4_MOE = common.Family(
  model_type="glm4_moe",
  read=_read,
  mixer=common.NORMS | common.GROUPED_QUERY,
  dense=common.DENSE,
  moe=common.MOE,
)
