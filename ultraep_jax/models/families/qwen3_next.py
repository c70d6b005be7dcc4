"""Qwen3-Next: three layers of the gated delta rule, then one of gated attention, and so on."""

from collections.abc import Mapping
from typing import Any

from ultraep_jax.models import hf_fields as fields
from ultraep_jax.models import hf_rope
from ultraep_jax.models.families import family as common
from ultraep_jax.models.families import qwen2_moe
from ultraep_jax.models.parts import GatedDelta, Mixer

_DELTA = {
  "delta_in": "linear_attn.in_proj_qkvz.weight",
  "delta_rates": "linear_attn.in_proj_ba.weight",
  "delta_conv": "linear_attn.conv1d.weight",
  "delta_decay": "linear_attn.A_log",
  "delta_step": "linear_attn.dt_bias",
  "delta_norm": "linear_attn.norm.weight",
  "delta_out": "linear_attn.out_proj.weight",
}


def _read(hf: Mapping[str, Any]) -> dict[str, Any]:
  fields.choice(hf, "use_sliding_window", (False,), default=False)
  bias = fields.flag(hf, "attention_bias", False)
  attention = common.grouped_query(hf, qk_norm="head", bias=bias, out_bias=bias, gated=True)
  heads = fields.integer(hf, "linear_num_value_heads")
  key_heads = fields.integer(hf, "linear_num_key_heads")
  if heads % key_heads:
    raise fields.wrong("linear_num_key_heads", f"a divisor of {heads}", key_heads)
  delta = GatedDelta(
    num_heads=heads,
    num_key_heads=key_heads,
    key_dim=fields.integer(hf, "linear_key_head_dim"),
    value_dim=fields.integer(hf, "linear_value_head_dim"),
    conv_width=fields.integer(hf, "linear_conv_kernel_dim", 4),
  )
  names: dict[str, Mixer] = {"linear_attention": delta, "full_attention": attention}
  layers = common.num_layers(hf)
  kinds = fields.kinds(hf, "layer_types", layers, tuple(names))
  if kinds is None:
    step = fields.integer(hf, "full_attention_interval", 4)
    mixers = [delta if (i + 1) % step else attention for i in range(layers)]
  else:
    mixers = [names[kind] for kind in kinds]
  return {
    "attention": common.one_or_each(mixers),
    "rotary": hf_rope.rotary(hf, attention.head_dim, partial=0.25),
    "norms_around_one": True,
    **qwen2_moe.mixtures(hf, normalize_topk=True),
  }


QWEN3_NEXT = common.Family(
  model_type="qwen3_next",
  read=_read,
  mixer=common.NORMS | common.GROUPED_QUERY | _DELTA,
  dense=common.DENSE,
  moe=qwen2_moe.MOE,
  ignored=("mtp.*",),
)
