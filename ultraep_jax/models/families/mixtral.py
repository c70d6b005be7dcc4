"""Mixtral: grouped queries, a softmax over the experts that a token chose, no dense layer."""

from collections.abc import Mapping
from typing import Any

from ultraep_jax.gating import GatingConfig
from ultraep_jax.models import hf_fields as fields
from ultraep_jax.models import hf_rope
from ultraep_jax.models.families import family as common

MOE = {
  "router": "block_sparse_moe.gate.weight",
  "selection_bias": "block_sparse_moe.e_score_correction_bias",
  "wi_gate": "block_sparse_moe.experts.{expert}.w1.weight",
  "wi_up": "block_sparse_moe.experts.{expert}.w3.weight",
  "wo": "block_sparse_moe.experts.{expert}.w2.weight",
}


def _read(hf: Mapping[str, Any]) -> dict[str, Any]:
  window = None if hf.get("sliding_window") is None else fields.integer(hf, "sliding_window")
  attention = common.grouped_query(hf, window=window)
  return {
    "is_moe": (True,) * common.num_layers(hf),
    "attention": attention,
    "rotary": hf_rope.rotary(hf, attention.head_dim, theta=1e6),
    "expert_dim": fields.integer(hf, "intermediate_size"),
    "gating": GatingConfig(
      num_experts=common.num_experts(hf, "num_local_experts", "num_experts"),
      num_experts_per_tok=fields.integer(hf, "num_experts_per_tok"),
    ),
  }


MIXTRAL = common.Family(
  model_type="mixtral",
  read=_read,
  mixer=common.NORMS | common.GROUPED_QUERY,
  dense={},
  moe=MOE,
)
