"""The architectures whose published checkpoints load, a file for each; docs/models.md adds one."""

import difflib
from collections.abc import Mapping
from typing import Any

from ultraep_jax.models.families.deepseek_v3 import DEEPSEEK_V3
from ultraep_jax.models.families.dots1 import DOTS1
from ultraep_jax.models.families.ernie4_5_moe import ERNIE4_5_MOE
from ultraep_jax.models.families.family import Family as Family
from ultraep_jax.models.families.glm4_moe import GLM4_MOE
from ultraep_jax.models.families.gpt_oss import GPT_OSS
from ultraep_jax.models.families.kimi_k2 import KIMI_K2
from ultraep_jax.models.families.minimax_m2 import MINIMAX_M2
from ultraep_jax.models.families.mixtral import MIXTRAL
from ultraep_jax.models.families.olmoe import OLMOE
from ultraep_jax.models.families.qwen2_moe import QWEN2_MOE
from ultraep_jax.models.families.qwen3_moe import QWEN3_MOE
from ultraep_jax.models.families.qwen3_next import QWEN3_NEXT
from ultraep_jax.models.hf_fields import wrong

FAMILIES = {
  family.model_type: family
  for family in (
    DEEPSEEK_V3,
    DOTS1,
    ERNIE4_5_MOE,
    GLM4_MOE,
    GPT_OSS,
    KIMI_K2,
    MINIMAX_M2,
    MIXTRAL,
    OLMOE,
    QWEN2_MOE,
    QWEN3_MOE,
    QWEN3_NEXT,
  )
}


def by_name(model_type: str) -> Family:
  """The family of a ``model_type`` of Hugging Face.

  Raises:
    ValueError: it is not known; the message has those that are, and the nearest.
  """
  if model_type not in FAMILIES:
    raise ValueError(f"architecture: expected {_expected(model_type)}, got {model_type!r}")
  return FAMILIES[model_type]


def of_config(hf: Mapping[str, Any]) -> Family:
  """The family of a ``config.json``.

  Raises:
    ValueError: its ``model_type`` is missing or not known; the message has those that are known,
      and the nearest.
  """
  model_type = hf.get("model_type")
  if not isinstance(model_type, str) or model_type not in FAMILIES:
    raise wrong("model_type", _expected(model_type), model_type)
  return FAMILIES[model_type]


def _expected(model_type: object) -> str:
  near = difflib.get_close_matches(str(model_type)[:80], FAMILIES, 1, cutoff=0.5)
  return f"one of {', '.join(FAMILIES)}" + (f" (nearest: {near[0]})" if near else "")
