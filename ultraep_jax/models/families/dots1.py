"""dots.llm1: queries and keys normed per head, DeepSeek-V3's router, windows in late layers."""

from collections.abc import Mapping
from typing import Any

from ultraep_jax.models import hf_fields as fields
from ultraep_jax.models import hf_rope
from ultraep_jax.models.families import family as common


def _read(hf: Mapping[str, Any]) -> dict[str, Any]:
  bias = fields.flag(hf, "attention_bias", False)
  layers = common.num_layers(hf)
  first = fields.integer(hf, "max_window_layers", 62, minimum=0)
  hf = {"sliding_window": 4096, **hf}  # null is no window
  slides = hf["sliding_window"] is not None
  windows = common.windows(hf, [slides and layer >= first for layer in range(layers)])
  attention = [
    common.grouped_query(hf, qk_norm="head", bias=bias, out_bias=bias, window=window)
    for window in windows
  ]
  return {
    "attention": common.one_or_each(attention),
    "rotary": hf_rope.rotary(hf, attention[0].head_dim),
    **common.sigmoid_routed(hf, normalize_topk=False),
  }


DOTS1 = common.Family(
  model_type="dots1",
  read=_read,
  mixer=common.NORMS | common.GROUPED_QUERY,
  dense=common.DENSE,
  moe=common.MOE,
)
