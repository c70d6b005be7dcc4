"""Fields of a Hugging Face ``config.json``, checked: nothing that changes a model is overlooked."""

import math
from collections.abc import Mapping
from typing import Any

from ultraep_jax.models.rotary import Rotary, Yarn

_MISSING: Any = object()

# Of rotary positions; any other key would change what they mean.
_ROPE_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
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


def wrong(name: str, expected: str, got: object) -> ValueError:
  return ValueError(f"config.json, {name}: expected {expected}, got {got!r}")


def integer(hf: Mapping[str, Any], name: str, default: Any = _MISSING, minimum: int = 1) -> int:
  value = _value(hf, name, f"an integer of at least {minimum}", default)
  if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
    raise wrong(name, f"an integer of at least {minimum}", value)
  return value


def number(hf: Mapping[str, Any], name: str, default: Any = _MISSING) -> float:
  value = _value(hf, name, "a number above 0", default)
  ok = isinstance(value, int | float) and not isinstance(value, bool)
  if not (ok and value > 0 and math.isfinite(value)):
    raise wrong(name, "a number above 0", value)
  return float(value)


def flag(hf: Mapping[str, Any], name: str, default: bool) -> bool:
  value = _value(hf, name, "true or false", default)
  if not isinstance(value, bool):
    raise wrong(name, "true or false", value)
  return value


def integers(hf: Mapping[str, Any], name: str) -> list[int]:
  value = _value(hf, name, "a list of integers", [])
  if not isinstance(value, list) or not all(type(item) is int for item in value):
    raise wrong(name, "a list of integers", value)
  return value


def choice(
  hf: Mapping[str, Any], name: str, choices: tuple[Any, ...], default: Any = _MISSING
) -> Any:
  value = _value(hf, name, f"one of {choices}", default)
  if value not in choices:
    raise wrong(name, f"one of {choices}", value)
  return value


def check_supported(hf: Mapping[str, Any]) -> None:
  """Refuses what other fields of these architectures may ask for."""
  choice(hf, "hidden_act", ("silu",), default="silu")
  choice(hf, "use_sliding_window", (False,), default=False)
  kinds = _value(hf, "layer_types", "a list", [])
  if set(kinds) - {"full_attention"}:
    raise wrong("layer_types", "only 'full_attention'", kinds)
  _check_quantization(hf)


def rotary(hf: Mapping[str, Any], head_dim: int, partial: float | None = None) -> Rotary:
  """Positions of heads with ``head_dim`` channels.

  Args:
    hf: the file.
    head_dim: channels that positions may turn.
    partial: the share of them that turns where the file is silent; None: always all.
  """
  rope = _rope(hf)
  share = 1.0
  if "partial_rotary_factor" in rope or partial is not None:
    share = number(rope, "partial_rotary_factor", partial)
  if share > 1 or (partial is None and share != 1):
    raise wrong("partial_rotary_factor", "1" if partial is None else "at most 1", share)
  dim = int(head_dim * share)
  if dim < 2 or dim % 2:
    raise wrong("partial_rotary_factor", f"an even number of {head_dim} channels to turn", share)
  theta = number(rope, "rope_theta", 10_000.0)
  return Rotary(dim=dim, theta=theta, yarn=_yarn(hf, rope))


def yarn_score_factor(hf: Mapping[str, Any]) -> float:
  """What DeepSeek's models multiply attention scores by when positions are stretched."""
  rope = _rope(hf)
  if rope["rope_type"] != "yarn" or not rope.get("mscale_all_dim"):
    return 1.0
  return _mscale(_yarn_factor(hf, rope), number(rope, "mscale_all_dim")) ** 2


def _check_quantization(hf: Mapping[str, Any]) -> None:
  where = "quantization_config."
  fields = {where + name: value for name, value in (hf.get("quantization_config") or {}).items()}
  if not fields:
    return
  choice(fields, where + "quant_method", ("fp8",))
  choice(fields, where + "fmt", ("e4m3",), default="e4m3")
  choice(fields, where + "activation_scheme", ("dynamic",), default="dynamic")
  block = integers(fields, where + "weight_block_size")
  if len(block) != 2 or min(block) < 1:
    raise wrong(where + "weight_block_size", "two sizes of at least 1", block)


def _rope(hf: Mapping[str, Any]) -> dict[str, Any]:
  """``rope_parameters``, or the older ``rope_scaling`` and fields beside it, as one dict."""
  old, new = hf.get("rope_scaling"), hf.get("rope_parameters")
  if old and new:
    raise wrong("rope_scaling", "nothing beside rope_parameters", old)
  outside = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
  rope = {name: hf[name] for name in outside if hf.get(name) is not None} | dict(old or new or {})
  if "original_max_position_embeddings" not in (old or new or {}):
    # That of the file's top level has a meaning for stretched positions only.
    rope["original_max_position_embeddings"] = rope.get(
      "original_max_position_embeddings", hf.get("max_position_embeddings")
    )
  rope["rope_type"] = rope.get("rope_type", rope.get("type", "default"))
  choice(rope, "rope_type", ("default", "yarn"))
  known = _ROPE_KEYS | (_YARN_KEYS if rope["rope_type"] == "yarn" else set())
  unknown = set(rope) - known - {"original_max_position_embeddings"}
  if unknown:
    raise wrong("rope_parameters", f"keys among {sorted(known)}", sorted(unknown))
  return rope


def _yarn(hf: Mapping[str, Any], rope: Mapping[str, Any]) -> Yarn | None:
  if rope["rope_type"] != "yarn":
    return None
  factor = _yarn_factor(hf, rope)
  if rope.get("attention_factor") is not None:
    attention_factor = number(rope, "attention_factor")
  elif rope.get("mscale") and rope.get("mscale_all_dim"):
    own, everywhere = number(rope, "mscale"), number(rope, "mscale_all_dim")
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


def _yarn_factor(hf: Mapping[str, Any], rope: Mapping[str, Any]) -> float:
  if rope.get("factor") is not None:
    return number(rope, "factor")
  original = integer(rope, "original_max_position_embeddings")
  return integer(hf, "max_position_embeddings") / original


def _mscale(factor: float, strength: float) -> float:
  return 1.0 if factor <= 1 else 0.1 * strength * math.log(factor) + 1.0


def _value(hf: Mapping[str, Any], name: str, expected: str, default: Any) -> Any:
  """The field; the default where it is missing or null."""
  value = hf.get(name)
  if value is not None:
    return value
  if default is _MISSING:
    raise ValueError(f"config.json, {name}: expected {expected}, got nothing")
  return default
