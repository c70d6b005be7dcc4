"""DeepSeek-V3 and R1: latent attention, a sigmoid router with groups and a selection bias."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ultraep_jax.models import hf_fields as fields
from ultraep_jax.models import hf_rope
from ultraep_jax.models.families import family as common
from ultraep_jax.models.parts import Latent

LATENT = {
  "query": "self_attn.q_proj.weight",
  "query_latent": "self_attn.q_a_proj.weight",
  "query_norm": "self_attn.q_a_layernorm.weight",
  "query_up": "self_attn.q_b_proj.weight",
  "latent": "self_attn.kv_a_proj_with_mqa.weight",
  "latent_norm": "self_attn.kv_a_layernorm.weight",
  "key_value": "self_attn.kv_b_proj.weight",
  "out": "self_attn.o_proj.weight",
}


def read(hf: Mapping[str, Any]) -> dict[str, Any]:
  fields.check_no_windows(hf)
  heads = fields.integer(hf, "num_attention_heads")
  fields.choice(hf, "num_key_value_heads", (heads,), default=heads)
  rope_dim = fields.integer(hf, "qk_rope_head_dim")
  nope_dim = fields.integer(hf, "qk_nope_head_dim")
  interleaved = fields.flag(hf, "rope_interleave", True)
  attention = Latent(
    num_heads=heads,
    query_rank=None if hf.get("q_lora_rank") is None else fields.integer(hf, "q_lora_rank"),
    latent_rank=fields.integer(hf, "kv_lora_rank"),
    nope_dim=nope_dim,
    rope_dim=rope_dim,
    value_dim=fields.integer(hf, "v_head_dim"),
    bias=fields.flag(hf, "attention_bias", False),
    scale=(nope_dim + rope_dim) ** -0.5 * hf_rope.yarn_score_factor(hf),
  )
  return {
    "attention": attention,
    "rotary": dataclasses.replace(hf_rope.rotary(hf, rope_dim), interleaved=interleaved),
    **common.sigmoid_routed(hf),
  }


DEEPSEEK_V3 = common.Family(
  model_type="deepseek_v3",
  read=read,
  mixer=common.NORMS | LATENT,
  dense=common.DENSE,
  moe=common.MOE,
)
