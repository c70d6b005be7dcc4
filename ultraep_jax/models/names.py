"""What the tensors of published checkpoints are called, for every parameter of a model."""

from ultraep_jax.models.config import GroupedQuery, ModelConfig
from ultraep_jax.models.params import Path, param_specs
from ultraep_jax.models.sources import Source

_TOP = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}

# Of a layer, below "model.layers.{layer}.". Biases lie beside weights, without a line of their own.
_LAYER = {
  "attention_norm": "input_layernorm",
  "mlp_norm": "post_attention_layernorm",
  "out": "self_attn.o_proj",
}
_GROUPED_QUERY = {
  "query": "self_attn.q_proj",
  "key": "self_attn.k_proj",
  "value": "self_attn.v_proj",
  "query_norm": "self_attn.q_norm",
  "key_norm": "self_attn.k_norm",
}
_LATENT = {
  "query_latent": "self_attn.q_a_proj",
  "query_norm": "self_attn.q_a_layernorm",
  "query": "self_attn.q_b_proj",
  "latent": "self_attn.kv_a_proj_with_mqa",
  "latent_norm": "self_attn.kv_a_layernorm",
  "key_value": "self_attn.kv_b_proj",
}
_DENSE = {"wi_gate": "mlp.gate_proj", "wi_up": "mlp.up_proj", "wo": "mlp.down_proj"}
_MOE = {
  "router": "mlp.gate",
  "wi_gate": "mlp.experts.{expert}.gate_proj",
  "wi_up": "mlp.experts.{expert}.up_proj",
  "wo": "mlp.experts.{expert}.down_proj",
  "shared_wi_gate": "mlp.shared_experts.gate_proj",
  "shared_wi_up": "mlp.shared_experts.up_proj",
  "shared_wo": "mlp.shared_experts.down_proj",
}


def sources(config: ModelConfig) -> dict[Path, Source]:
  """For each path of ``param_specs``, the tensors on disk that make it up.

  Experts have a tensor each, as on the Hugging Face Hub.
  """
  found: dict[Path, Source] = {}
  for path, spec in param_specs(config).items():
    # The embedding is a table of rows, in memory as on disk.
    transpose = spec.kind == "matrix" and path != ("embed",)
    if len(path) == 1:
      found[path] = Source(_TOP[str(path[0])], transpose)
      continue
    run = config.runs[int(path[1])]
    below = _below_layer(config, config.is_moe[run[0]], str(path[2]))
    names = [_layer_names(config, f"model.layers.{layer}.{below}") for layer in run]
    found[path] = Source(names, transpose)
  return found


def ignored_patterns(config: ModelConfig) -> tuple[str, ...]:
  """Patterns (``fnmatch``) of tensors that checkpoints have and prefill does not need.

  They are the layers that predict several tokens at once, behind the last one, frequencies that
  older checkpoints store, and an output matrix that is the embedding.
  """
  first = len(config.is_moe)
  layers = range(first, first + config.num_extra_layers)
  head = (_TOP["head"],) if config.tied_embeddings else ()
  return (*(f"model.layers.{layer}.*" for layer in layers), "model.*rotary_emb.inv_freq", *head)


def _below_layer(config: ModelConfig, is_moe: bool, name: str) -> str:
  if name == "selection_bias":
    return "mlp.gate.e_score_correction_bias"
  attention = config.attention
  if name == "query" and not isinstance(attention, GroupedQuery) and attention.query_rank is None:
    return "self_attn.q_proj.weight"
  mixer = _GROUPED_QUERY if isinstance(attention, GroupedQuery) else _LATENT
  weights = _LAYER | mixer | (_MOE if is_moe else _DENSE)
  if name in weights:
    return weights[name] + ".weight"
  return weights[name.removesuffix("_bias")] + ".bias"


def _layer_names(config: ModelConfig, name: str) -> str | list[str]:
  if "{expert}" not in name:
    return name
  return [name.format(expert=expert) for expert in range(config.gating.num_experts)]
