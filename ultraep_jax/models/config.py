"""What a model is made of: frozen sizes, read from the ``config.json`` of a checkpoint."""

import dataclasses
import itertools
import os
import pathlib
from collections.abc import Mapping
from typing import Any, Literal

from ultraep_jax.gating import GatingConfig
from ultraep_jax.models import hf_fields as fields
from ultraep_jax.models import hf_rope
from ultraep_jax.models.folder import read_object
from ultraep_jax.models.rotary import Rotary

Architecture = Literal["qwen3_moe", "glm4_moe", "deepseek_v3"]
ARCHITECTURES = ("qwen3_moe", "glm4_moe", "deepseek_v3")
# Far beyond any model; each expert of each layer has tensors, whose names are listed in memory.
_MOST_LAYERS, _MOST_EXPERTS = 4096, 65536


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedQuery:
  """Attention whose query heads share key heads, with keys and values of ``head_dim`` channels.

  Attributes:
    num_heads: H, of queries.
    num_key_heads: N, a divisor of H.
    head_dim: C.
    qk_norm: queries and keys are normed per head before they are rotated.
    bias: the projections to queries, keys and values have one.
    out_bias: the projection back has one.
  """

  num_heads: int
  num_key_heads: int
  head_dim: int
  qk_norm: bool = False
  bias: bool = False
  out_bias: bool = False

  @property
  def scale(self) -> float:
    """Factor on the scores."""
    return self.head_dim**-0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Latent:
  """Multi-head latent attention (DeepSeek-V2, section 2.1): keys and values from one latent.

  Attributes:
    num_heads: H.
    query_rank: width of the queries' latent; None: queries straight from the hidden state.
    latent_rank: width of the latent of keys and values.
    nope_dim: channels of a query or key without position.
    rope_dim: those with; all heads' keys share them.
    value_dim: channels of a value.
    bias: the projections down to latents and the projection back have one.
    scale: factor on the scores.
    latent_norm_eps: of the norms of both latents.
  """

  num_heads: int
  query_rank: int | None
  latent_rank: int
  nope_dim: int
  rope_dim: int
  value_dim: int
  bias: bool = False
  scale: float
  latent_norm_eps: float = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
  """A decoder with mixtures of experts. Hashable, so it can be a static argument of ``jax.jit``.

  Attributes:
    architecture: whose names the tensors have on disk, a ``model_type`` of Hugging Face.
    vocab_size: V, tokens.
    embed_dim: D, width of the residual stream.
    is_moe: for each layer, whether it has a mixture of experts or one dense MLP.
    attention: of every layer.
    rotary: positions of every layer.
    dense_dim: inner width of a dense MLP.
    expert_dim: F, inner width of an expert.
    num_shared_experts: experts that every token takes, kept as one MLP.
    gating: how every router chooses.
    norm_eps: added to the mean square in norms.
    tied_embeddings: the output matrix is the embedding.
    num_extra_layers: layers behind the last one that checkpoints hold and prefill does not run,
      as they predict several tokens at once.
  """

  architecture: Architecture
  vocab_size: int
  embed_dim: int
  is_moe: tuple[bool, ...]
  attention: GroupedQuery | Latent
  rotary: Rotary
  dense_dim: int
  expert_dim: int
  num_shared_experts: int = 0
  gating: GatingConfig
  norm_eps: float = 1e-6
  tied_embeddings: bool = False
  num_extra_layers: int = 0

  @property
  def runs(self) -> tuple[tuple[int, ...], ...]:
    """Indices of the layers, consecutive layers of one kind together."""
    grouped = itertools.groupby(range(len(self.is_moe)), key=lambda layer: self.is_moe[layer])
    return tuple(tuple(layers) for _, layers in grouped)

  @classmethod
  def from_folder(cls, folder: str | os.PathLike[str]) -> "ModelConfig":
    """Reads ``config.json`` in the folder of a checkpoint.

    Raises:
      FileNotFoundError: there is none.
      ValueError: it holds no JSON object, or as ``from_hf``.
      OSError: it cannot be read.
    """
    return cls.from_hf(read_object(pathlib.Path(folder) / "config.json"))

  @classmethod
  def from_hf(cls, hf: Mapping[str, Any]) -> "ModelConfig":
    """Reads the contents of a ``config.json``.

    Raises:
      ValueError: a field is missing or has a value that is not supported.
    """
    architecture: Architecture = fields.choice(hf, "model_type", ARCHITECTURES)
    fields.check_supported(hf)
    read = {"qwen3_moe": _qwen3_moe, "glm4_moe": _glm4_moe, "deepseek_v3": _deepseek_v3}
    return cls(
      architecture=architecture,
      vocab_size=fields.integer(hf, "vocab_size"),
      embed_dim=fields.integer(hf, "hidden_size"),
      dense_dim=fields.integer(hf, "intermediate_size"),
      expert_dim=fields.integer(hf, "moe_intermediate_size"),
      norm_eps=fields.number(hf, "rms_norm_eps"),
      tied_embeddings=fields.flag(hf, "tie_word_embeddings", False),
      **read[architecture](hf),
    )


def _qwen3_moe(hf: Mapping[str, Any]) -> dict[str, Any]:
  bias = fields.flag(hf, "attention_bias", False)
  attention = _grouped_query(hf, qk_norm=True, bias=bias, out_bias=bias)
  dense = set(fields.integers(hf, "mlp_only_layers"))
  step = fields.integer(hf, "decoder_sparse_step", 1)
  layers = range(fields.integer(hf, "num_hidden_layers", maximum=_MOST_LAYERS))
  # Newer versions of transformers write the general name.
  experts = "num_experts" if "num_experts" in hf else "num_local_experts"
  return {
    "is_moe": tuple(layer not in dense and (layer + 1) % step == 0 for layer in layers),
    "attention": attention,
    "rotary": hf_rope.rotary(hf, attention.head_dim),
    "gating": GatingConfig(
      num_experts=fields.integer(hf, experts, maximum=_MOST_EXPERTS),
      num_experts_per_tok=fields.integer(hf, "num_experts_per_tok"),
      normalize_topk=fields.flag(hf, "norm_topk_prob", False),
    ),
  }


def _glm4_moe(hf: Mapping[str, Any]) -> dict[str, Any]:
  bias = fields.flag(hf, "attention_bias", False)
  qk_norm = fields.flag(hf, "use_qk_norm", False)
  attention = _grouped_query(hf, qk_norm=qk_norm, bias=bias, out_bias=False)
  return {
    "attention": attention,
    "rotary": hf_rope.rotary(hf, attention.head_dim, partial=0.5),
    **_sigmoid_routed(hf),
  }


def _deepseek_v3(hf: Mapping[str, Any]) -> dict[str, Any]:
  heads = fields.integer(hf, "num_attention_heads")
  fields.choice(hf, "num_key_value_heads", (heads,), default=heads)
  rope_dim = fields.integer(hf, "qk_rope_head_dim")
  nope_dim = fields.integer(hf, "qk_nope_head_dim")
  interleaved = fields.flag(hf, "rope_interleave", True)
  rotary = dataclasses.replace(hf_rope.rotary(hf, rope_dim), interleaved=interleaved)
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
  return {"attention": attention, "rotary": rotary, **_sigmoid_routed(hf)}


def _grouped_query(
  hf: Mapping[str, Any], *, qk_norm: bool, bias: bool, out_bias: bool
) -> GroupedQuery:
  heads = fields.integer(hf, "num_attention_heads")
  key_heads = fields.integer(hf, "num_key_value_heads", heads)
  if heads % key_heads:
    raise fields.wrong("num_key_value_heads", f"a divisor of {heads}", key_heads)
  head_dim = fields.integer(hf, "head_dim", fields.integer(hf, "hidden_size") // heads)
  return GroupedQuery(
    num_heads=heads,
    num_key_heads=key_heads,
    head_dim=head_dim,
    qk_norm=qk_norm,
    bias=bias,
    out_bias=out_bias,
  )


def _sigmoid_routed(hf: Mapping[str, Any]) -> dict[str, Any]:
  """The routers of DeepSeek-V3 and what follows its lead."""
  fields.choice(hf, "scoring_func", ("sigmoid",), default="sigmoid")
  fields.choice(hf, "topk_method", ("noaux_tc",), default="noaux_tc")
  fields.choice(hf, "moe_layer_freq", (1,), default=1)
  dense = fields.integer(hf, "first_k_dense_replace", minimum=0)
  layers = range(fields.integer(hf, "num_hidden_layers", maximum=_MOST_LAYERS))
  # Newer versions of transformers have another name.
  extra = "num_mtp_layers" if "num_mtp_layers" in hf else "num_nextn_predict_layers"
  return {
    "is_moe": tuple(layer >= dense for layer in layers),
    "num_extra_layers": fields.integer(hf, extra, 1, minimum=0, maximum=_MOST_LAYERS),
    "num_shared_experts": fields.integer(hf, "n_shared_experts", minimum=0),
    "gating": GatingConfig(
      num_experts=fields.integer(hf, "n_routed_experts", maximum=_MOST_EXPERTS),
      num_experts_per_tok=fields.integer(hf, "num_experts_per_tok"),
      scoring="sigmoid",
      normalize_topk=fields.flag(hf, "norm_topk_prob", True),
      routed_scaling=fields.number(hf, "routed_scaling_factor"),
      num_expert_groups=fields.integer(hf, "n_group"),
      topk_groups=fields.integer(hf, "topk_group"),
      use_selection_bias=True,
    ),
  }
