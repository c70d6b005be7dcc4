"""What the tensors of published checkpoints are called, for every parameter of a model."""

from ultraep_jax.models import families
from ultraep_jax.models.config import ModelConfig
from ultraep_jax.models.params import Path, param_specs
from ultraep_jax.models.sources import Source

HEAD = "lm_head.weight"
_TOP = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": HEAD}


def sources(config: ModelConfig) -> dict[Path, Source]:
  """For each path of ``param_specs``, the tensors on disk that make it up.

  Experts have a tensor each, as on the Hugging Face Hub.
  """
  family = families.by_name(config.architecture)
  found: dict[Path, Source] = {}
  for path, spec in param_specs(config).items():
    # The embedding is a table of rows, in memory as on disk.
    transpose = spec.kind == "matrix" and path != ("embed",)
    if len(path) == 1:
      found[path] = Source(_TOP[str(path[0])], transpose)
      continue
    layers = config.stacks[int(path[1])]
    transpose = transpose and not (config.is_moe[layers[0]] and path[2] in family.untransposed)
    below = _below_layer(config, config.is_moe[layers[0]], str(path[2]))
    names = [_layer_names(config, f"model.layers.{layer}.{below}") for layer in layers]
    found[path] = Source(names, transpose, int(path[2] in family.single))
  return found


def ignored_patterns(config: ModelConfig) -> tuple[str, ...]:
  """Patterns (``fnmatch``) of tensors that checkpoints have and prefill does not need.

  They are the layers that predict several tokens at once, behind the last one, frequencies that
  older checkpoints store, an output matrix that is the embedding, and what the family names.
  """
  layers = range(config.num_layers, config.num_layers + config.num_extra_layers)
  head = (HEAD,) if config.tied_embeddings else ()
  own = families.by_name(config.architecture).ignored
  extra = (f"model.layers.{layer}.*" for layer in layers)
  return (*extra, "model.*rotary_emb.inv_freq", *head, *own)


def _below_layer(config: ModelConfig, is_moe: bool, name: str) -> str:
  family = families.by_name(config.architecture)
  names = {**family.mixer, **(family.moe if is_moe else family.dense)}
  if name in names:
    return names[name]
  beside = names[name.removesuffix("_bias")]
  return beside.removesuffix(".weight") + ".bias"


def _layer_names(config: ModelConfig, name: str) -> str | list[str]:
  if "{expert}" not in name:
    return name
  return [name.format(expert=expert) for expert in range(config.gating.num_experts)]
