"""What a model is made of: frozen sizes, read from the ``config.json`` of a checkpoint."""

import dataclasses
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax

from ultraep_jax.activations import Activation
from ultraep_jax.gating import GatingConfig
from ultraep_jax.models import families
from ultraep_jax.models import hf_fields as fields
from ultraep_jax.models.folder import read_object
from ultraep_jax.models.parts import Mixer
from ultraep_jax.models.pattern import cycles
from ultraep_jax.models.rotary import Rotary


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
  """A decoder with mixtures of experts. Hashable, so it can be a static argument of ``jax.jit``.

  Attributes:
    architecture: whose names the tensors have on disk, a ``model_type`` of Hugging Face.
    vocab_size: V, tokens.
    embed_dim: D, width of the residual stream.
    is_moe: for each layer, whether it has a mixture of experts or one dense MLP.
    attention: of every layer, or one for each.
    rotary: positions of every layer.
    dense_dim: inner width of a dense MLP; 0 where no layer has one.
    expert_dim: F, inner width of an expert.
    num_shared_experts: experts that every token takes, kept as one MLP.
    shared_gate: they count as often as a sigmoid of the token says.
    expert_layout: where the matrices into an expert are, a name of ``types.Layout``.
    expert_bias: every matrix of an expert has a bias.
    activation: what is between the matrices of an expert; of ``ultraep_jax.activations``, or such.
    router_bias: the routers' logits have a bias.
    gating: how every router chooses.
    norm_eps: added to the mean square in norms.
    norms_around_one: norms scale by 1 and their parameter, rather than by it.
    tied_embeddings: the output matrix is the embedding.
    num_extra_layers: layers behind the last one that checkpoints hold and prefill does not run,
      as they predict several tokens at once.

  Raises:
    ValueError: the fields do not fit each other.
  """

  architecture: str
  vocab_size: int
  embed_dim: int
  is_moe: tuple[bool, ...]
  attention: Mixer | tuple[Mixer, ...]
  rotary: Rotary
  dense_dim: int = 0
  expert_dim: int
  num_shared_experts: int = 0
  shared_gate: bool = False
  expert_layout: str = "apart"
  expert_bias: bool = False
  activation: Activation = jax.nn.silu
  router_bias: bool = False
  gating: GatingConfig
  norm_eps: float = 1e-6
  norms_around_one: bool = False
  tied_embeddings: bool = False
  num_extra_layers: int = 0

  def __post_init__(self) -> None:
    families.by_name(self.architecture)
    if isinstance(self.attention, tuple) and len(self.attention) != len(self.is_moe):
      raise ValueError(
        f"attention: expected one or {len(self.is_moe)}, as is_moe has, got {len(self.attention)}"
      )
    if not self.dense_dim and not all(self.is_moe):
      raise ValueError("dense_dim: expected a width, as some layers are no mixtures, got 0")

  @property
  def num_layers(self) -> int:
    return len(self.is_moe)

  def mixer(self, layer: int) -> Mixer:
    """The attention of a layer."""
    return self.attention[layer] if isinstance(self.attention, tuple) else self.attention

  @property
  def stacks(self) -> tuple[tuple[int, ...], ...]:
    """Indices of the layers whose parameters lie in one array, which are of one kind."""
    return tuple(stack for run in self._cycles for stack in run)

  @property
  def runs(self) -> tuple[tuple[int, ...], ...]:
    """Indices of the stacks that one scan goes through, a layer of each in turn."""
    runs, first = [], 0
    for run in self._cycles:
      runs.append(tuple(range(first, first + len(run))))
      first += len(run)
    return tuple(runs)

  @property
  def _cycles(self) -> list[list[tuple[int, ...]]]:
    return cycles([(self.mixer(i), is_moe) for i, is_moe in enumerate(self.is_moe)])

  def first(self, layers: int) -> "ModelConfig":
    """The model without its layers behind the first ``layers``."""
    attention = self.attention[:layers] if isinstance(self.attention, tuple) else self.attention
    return dataclasses.replace(self, is_moe=self.is_moe[:layers], attention=attention)

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
    family = families.of_config(hf)
    fields.check_supported(hf, family.quantization)
    return cls(
      architecture=family.model_type,
      vocab_size=fields.integer(hf, "vocab_size"),
      embed_dim=fields.integer(hf, "hidden_size"),
      norm_eps=fields.number(hf, "rms_norm_eps"),
      tied_embeddings=fields.flag(hf, "tie_word_embeddings", family.tied_embeddings),
      **family.read(hf),
    )
