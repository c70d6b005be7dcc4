"""ERNIE 4.5: neighbouring channels turn together, a softmax router with a selection bias."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ultraep_jax.gating import GatingConfig
from ultraep_jax.models import hf_fields as fields
from ultraep_jax.models import hf_rope
from ultraep_jax.models.families import family as common


def _read(hf: Mapping[str, Any]) -> dict[str, Any]:
  fields.check_no_windows(hf)
  fields.choice(hf, "use_bias", (False,), default=False)
  fields.choice(hf, "moe_use_aux_free", (True,), default=True)
  fields.choice(hf, "moe_gate", ("topk",), default="topk")
  attention = common.grouped_query(hf)
  rotary = hf_rope.rotary(hf, attention.head_dim, theta=5e5)
  layers = common.num_layers(hf)
  first = fields.integer(hf, "moe_layer_start_index", 1, minimum=0)
  last = fields.integer(hf, "moe_layer_end_index", -1, minimum=-1)
  step = fields.integer(hf, "moe_layer_interval", 1)
  last = layers - 1 if last == -1 else last
  return {
    "is_moe": tuple(first <= i <= last and (i + 1) % step == 0 for i in range(layers)),
    "attention": attention,
    "rotary": dataclasses.replace(rotary, interleaved=True),
    "dense_dim": fields.integer(hf, "intermediate_size"),
    "expert_dim": fields.integer(hf, "moe_intermediate_size"),
    "num_shared_experts": fields.integer(hf, "moe_num_shared_experts", 2, minimum=0),
    "gating": GatingConfig(
      num_experts=common.num_experts(hf, "moe_num_experts"),
      num_experts_per_tok=fields.integer(hf, "moe_k"),
      use_selection_bias=True,
    ),
  }


ERNIE4_5_MOE = common.Family(
  model_type="ernie4_5_moe",
  read=_read,
  mixer=common.NORMS | common.GROUPED_QUERY,
  dense=common.DENSE,
  moe=common.MOE | {"selection_bias": "mlp.moe_statics.e_score_correction_bias"},
  single=frozenset({"selection_bias"}),
  tied_embeddings=True,
  ignored=("model.mtp_*",),
)
