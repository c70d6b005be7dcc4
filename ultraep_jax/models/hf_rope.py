"""Rotary positions in a Hugging Face ``config.json``, in the older form and the newer one.

Older files have ``rope_theta``, ``partial_rotary_factor`` and a dict ``rope_scaling``; newer ones
have all of it in a dict ``rope_parameters``.
"""

import math
from collections.abc import Mapping
from typing import Any

from ultraep_jax.models.hf_fields import choice, flag, integer, mapping, number, wrong
from ultraep_jax.models.rotary import Rotary, Yarn

_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_YARN_KEYS = {
  "factor",
  "original_max_position_embeddings",
  "attention_factor",
  "beta_fast",
  "beta_slow",
  "mscale",
  "mscale_all_dim",
  "truncate",
}


def rotary(
  hf: Mapping[str, Any], head_dim: int, partial: float | None = None, theta: float = 10_000.0
) -> Rotary:
  """Positions of heads with ``head_dim`` channels.

  Args:
    hf: the file.
    head_dim: channels that positions may turn.
    partial: the share of them that turns where the file is silent; None: always all.
    theta: where the file is silent.
  """
  rope = _rope(hf)
  share = number(rope, "partial_rotary_factor", 1.0 if partial is None else partial)
  if share > 1 or (partial is None and share != 1):
    raise wrong("partial_rotary_factor", "1" if partial is None else "at most 1", share)
  dim = int(head_dim * share)
  if dim < 2 or dim % 2:
    raise wrong("partial_rotary_factor", f"an even number of {head_dim} channels to turn", share)
  theta = number(rope, "rope_theta", theta)
  if _is_yarn(rope) and theta <= 1:
    raise wrong("rope_theta", "a number above 1 for stretched positions", theta)
  return Rotary(dim=dim, theta=theta, yarn=_yarn(rope) if _is_yarn(rope) else None)


def yarn_score_factor(hf: Mapping[str, Any]) -> float:
  """What DeepSeek's models multiply attention scores by when positions are stretched."""
  rope = _rope(hf)
  strength = number(rope, "mscale_all_dim", 0.0, zero=True)
  return _mscale(number(rope, "factor"), strength) ** 2 if _is_yarn(rope) and strength else 1.0


def _rope(hf: Mapping[str, Any]) -> dict[str, Any]:
  """Everything about positions as one dict, as ``rope_parameters`` has it."""
  old, new = mapping(hf, "rope_scaling"), mapping(hf, "rope_parameters")
  if old and new:
    raise wrong("rope_scaling", "nothing beside rope_parameters", dict(old))
  beside = ("rope_theta", "partial_rotary_factor")
  rope = {name: hf[name] for name in beside if name in hf} | dict(old or new)
  rope["rope_type"] = rope.get("rope_type", rope.get("type", "default"))
  choice(rope, "rope_type", ("default", "yarn"))
  known = _KEYS | _YARN_KEYS if _is_yarn(rope) else _KEYS
  if unknown := set(rope) - known:  # would change what positions mean
    raise wrong("rope_parameters", f"keys among {sorted(known)}", sorted(unknown))
  if _is_yarn(rope):
    length = "original_max_position_embeddings"
    if "factor" not in rope and length not in rope and length not in hf:
      raise wrong("rope_parameters", f"factor or {length} with yarn", rope)
    longest = integer(hf, "max_position_embeddings")
    trained = integer(rope, length, longest)
    # Some models have the trained length beside the dict; there it counts more.
    rope[length] = trained = integer(hf, length, trained)
    rope["factor"] = number(rope, "factor", longest / trained)
  return rope


def _is_yarn(rope: Mapping[str, Any]) -> bool:
  return rope["rope_type"] == "yarn"


def _yarn(rope: Mapping[str, Any]) -> Yarn:
  factor = number(rope, "factor")
  own, everywhere = (number(rope, n, 0.0, zero=True) for n in ("mscale", "mscale_all_dim"))
  if rope.get("attention_factor") is not None:
    attention_factor = number(rope, "attention_factor")
  elif own and everywhere:
    attention_factor = _mscale(factor, own) / _mscale(factor, everywhere)
  else:
    attention_factor = _mscale(factor, 1.0)
  return Yarn(
    factor=factor,
    original_positions=integer(rope, "original_max_position_embeddings"),
    beta_fast=number(rope, "beta_fast", 32.0),
    beta_slow=number(rope, "beta_slow", 1.0),
    attention_factor=attention_factor,
    truncate=flag(rope, "truncate", True),
  )


def _mscale(factor: float, strength: float) -> float:
  """How much sharper attention becomes over stretched positions (YaRN, section 3.4)."""
  return 1.0 if factor <= 1 else 0.1 * strength * math.log(factor) + 1.0
