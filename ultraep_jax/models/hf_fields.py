"""Fields of a Hugging Face ``config.json``, checked: nothing that changes a model is overlooked."""

import math
from collections.abc import Mapping
from typing import Any

_MISSING: Any = object()


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


def _value(hf: Mapping[str, Any], name: str, expected: str, default: Any) -> Any:
  """The field; the default where it is missing or null."""
  value = hf.get(name)
  if value is not None:
    return value
  if default is _MISSING:
    raise ValueError(f"config.json, {name}: expected {expected}, got nothing")
  return default
