"""GPT-OSS: sinks, every other layer a window, biases everywhere, experts in MXFP4."""

from collections.abc import Mapping
from typing import Any

from ultraep_jax.activations import clamped_swiglu
from ultraep_jax.gating import GatingConfig
from ultraep_jax.models import hf_fields as fields
from ultraep_jax.models import hf_rope
from ultraep_jax.models.families import family as common

# Where the file says nothing of positions.
_STRETCHED = {
  "rope_type": "yarn",
  "factor": 32.0,
  "original_max_position_embeddings": 4096,
  "truncate": False,
}


def _read(hf: Mapping[str, Any]) -> dict[str, Any]:
  bias = fields.flag(hf, "attention_bias", True)
  layers = common.num_layers(hf)
  windows = common.windows(hf, [i % 2 == 0 for i in range(layers)])
  attention = [
    common.grouped_query(hf, bias=bias, out_bias=bias, sinks=True, window=window)
    for window in windows
  ]
  silent = not hf.get("rope_scaling") and hf.get("rope_parameters") is None
  rope = {**hf, "rope_parameters": _STRETCHED} if silent else hf
  alpha, limit = (
    fields.number(hf, name, default)
    for name, default in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0))
  )
  return {
    "is_moe": (True,) * layers,
    "attention": common.one_or_each(attention),
    "rotary": hf_rope.rotary(rope, attention[0].head_dim, theta=150_000.0),
    "expert_dim": fields.integer(hf, "intermediate_size"),
    "expert_layout": "interleaved",
    "expert_bias": True,
    "activation": clamped_swiglu(alpha, limit),
    "router_bias": True,
    "gating": GatingConfig(
      num_experts=common.num_experts(hf, "num_local_experts", "num_experts"),
      num_experts_per_tok=fields.integer(hf, "num_experts_per_tok"),
    ),
  }


GPT_OSS = common.Family(
  model_type="gpt_oss",
  read=_read,
  mixer=common.NORMS | common.GROUPED_QUERY | {"sinks": "self_attn.sinks"},
  dense={},
  moe={
    "router": "mlp.router.weight",
    "router_bias": "mlp.router.bias",
    "wi": "mlp.experts.gate_up_proj",
    "wi_bias": "mlp.experts.gate_up_proj_bias",
    "wo": "mlp.experts.down_proj",
    "wo_bias": "mlp.experts.down_proj_bias",
  },
  untransposed=frozenset({"wi", "wo"}),
  quantization="mxfp4",
)
