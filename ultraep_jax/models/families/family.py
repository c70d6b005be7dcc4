"""What a family is, and what families have in common."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ultraep_jax.gating import GatingConfig
from ultraep_jax.models import hf_fields as fields
from ultraep_jax.models.parts import GroupedQuery

# Far beyond any model; each expert of each layer has tensors, whose names are listed in memory.
MOST_LAYERS, MOST_EXPERTS = 4096, 65536

# Names of tensors below "model.layers.{layer}.". Biases lie beside weights.
NORMS = {
  "attention_norm": "input_layernorm.weight",
  "mlp_norm": "post_attention_layernorm.weight",
}
GROUPED_QUERY = {
  "query": "self_attn.q_proj.weight",
  "key": "self_attn.k_proj.weight",
  "value": "self_attn.v_proj.weight",
  "out": "self_attn.o_proj.weight",
  "query_norm": "self_attn.q_norm.weight",
  "key_norm": "self_attn.k_norm.weight",
}
DENSE = {
  "wi_gate": "mlp.gate_proj.weight",
  "wi_up": "mlp.up_proj.weight",
  "wo": "mlp.down_proj.weight",
}
MOE = {
  "router": "mlp.gate.weight",
  "selection_bias": "mlp.gate.e_score_correction_bias",
  "wi_gate": "mlp.experts.{expert}.gate_proj.weight",
  "wi_up": "mlp.experts.{expert}.up_proj.weight",
  "wo": "mlp.experts.{expert}.down_proj.weight",
  "shared_wi_gate": "mlp.shared_experts.gate_proj.weight",
  "shared_wi_up": "mlp.shared_experts.up_proj.weight",
  "shared_wo": "mlp.shared_experts.down_proj.weight",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
  """An architecture of the Hugging Face Hub: its fields and the names of its tensors.

  Attributes:
    model_type: in ``config.json``.
    read: from ``config.json`` to the fields of ``ModelConfig`` that families differ in; raises
      ``ValueError`` for what is not supported.
    mixer: the tensors of attention and of both norms by parameter, below
      ``model.layers.{layer}.``; ``x_bias`` without a line of its own is the bias beside ``x``.
    dense: those of a dense MLP.
    moe: those of a mixture; ``{expert}`` where each expert has one.
    untransposed: parameters of mixtures whose tensors are ``[..., in, out]``, as in memory.
    single: parameters whose tensors have an axis of size 1 before all others.
    tied_embeddings: where ``tie_word_embeddings`` is missing.
    quantization: the ``quant_method`` that its weights may have: ``"fp8"`` or ``"mxfp4"``.
    ignored: patterns (``fnmatch``) of tensors that prefill does not need.
  """

  model_type: str
  read: Callable[[Mapping[str, Any]], dict[str, Any]]
  mixer: Mapping[str, str]
  dense: Mapping[str, str]
  moe: Mapping[str, str]
  untransposed: frozenset[str] = frozenset()
  single: frozenset[str] = frozenset()
  tied_embeddings: bool = False
  quantization: str = "fp8"
  ignored: tuple[str, ...] = ()


def num_layers(hf: Mapping[str, Any]) -> int:
  return fields.integer(hf, "num_hidden_layers", maximum=MOST_LAYERS)


def num_experts(hf: Mapping[str, Any], *names: str) -> int:
  """By the first of the names that the file has; versions of transformers differ."""
  name = next((name for name in names if name in hf), names[0])
  return fields.integer(hf, name, maximum=MOST_EXPERTS)


def grouped_query(
  hf: Mapping[str, Any],
  *,
  qk_norm: Any = None,
  bias: bool = False,
  out_bias: bool = False,
  window: int | None = None,
  gated: bool = False,
  sinks: bool = False,
) -> GroupedQuery:
  heads = fields.integer(hf, "num_attention_heads")
  key_heads = fields.integer(hf, "num_key_value_heads", heads)
  if heads % key_heads:
    raise fields.wrong("num_key_value_heads", f"a divisor of {heads}", key_heads)
  return GroupedQuery(
    num_heads=heads,
    num_key_heads=key_heads,
    head_dim=fields.integer(hf, "head_dim", fields.integer(hf, "hidden_size") // heads),
    qk_norm=qk_norm,
    bias=bias,
    out_bias=out_bias,
    window=window,
    gated=gated,
    sinks=sinks,
  )


def windows(hf: Mapping[str, Any], slides: Sequence[bool]) -> list[int | None]:
  """The window of each layer's attention.

  Args:
    hf: the file; its ``layer_types`` say which layers slide.
    slides: for each layer, whether it does where the file is silent.
  """
  names = {"full_attention": False, "sliding_attention": True}
  if (kinds := fields.kinds(hf, "layer_types", len(slides), tuple(names))) is not None:
    slides = [names[kind] for kind in kinds]
  size = fields.integer(hf, "sliding_window") if any(slides) else None
  return [size if slide else None for slide in slides]


def one_or_each[T](parts: Sequence[T]) -> T | tuple[T, ...]:
  """The part that all layers have, or those of each."""
  return parts[0] if all(part == parts[0] for part in parts) else tuple(parts)


def sparse_layers(hf: Mapping[str, Any]) -> tuple[bool, ...]:
  """Which layers of Qwen's models are mixtures."""
  dense = set(fields.integers(hf, "mlp_only_layers"))
  step = fields.integer(hf, "decoder_sparse_step", 1)
  return tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers(hf)))


def sigmoid_routed(hf: Mapping[str, Any], *, normalize_topk: bool = True) -> dict[str, Any]:
  """The mixtures and routers of DeepSeek-V3 and what follows its lead; the flag where missing."""
  # Some name here how experts are chosen.
  fields.choice(hf, "scoring_func", ("sigmoid", "noaux_tc"), default="sigmoid")
  fields.choice(hf, "topk_method", ("noaux_tc",), default="noaux_tc")
  fields.choice(hf, "moe_layer_freq", (1,), default=1)
  dense = fields.integer(hf, "first_k_dense_replace", minimum=0)
  # Newer versions of transformers have another name.
  extra = "num_mtp_layers" if "num_mtp_layers" in hf else "num_nextn_predict_layers"
  return {
    "is_moe": tuple(layer >= dense for layer in range(num_layers(hf))),
    "dense_dim": fields.integer(hf, "intermediate_size"),
    "expert_dim": fields.integer(hf, "moe_intermediate_size"),
    "num_extra_layers": fields.integer(hf, extra, 1, minimum=0, maximum=MOST_LAYERS),
    "num_shared_experts": fields.integer(hf, "n_shared_experts", minimum=0),
    "gating": GatingConfig(
      num_experts=num_experts(hf, "n_routed_experts"),
      num_experts_per_tok=fields.integer(hf, "num_experts_per_tok"),
      scoring="sigmoid",
      normalize_topk=fields.flag(hf, "norm_topk_prob", normalize_topk),
      routed_scaling=fields.number(hf, "routed_scaling_factor"),
      num_expert_groups=fields.integer(hf, "n_group"),
      topk_groups=fields.integer(hf, "topk_group"),
      use_selection_bias=True,
    ),
  }
