"""Fields of a Hugging Face ``config.json``, checked: nothing that changes a model is overlooked."""

from collections.abc import Mapping
from typing import Any

_MISSING: Any = object()
_MOST = 2**31 - 1  # of sizes: an int32 holds them
_LEAST_FLOAT, _MOST_FLOAT = 2.0**-126, 2.0**127  # a float32 holds what lies between


def wrong(name: str, expected: str, got: object) -> ValueError:
  return ValueError(f"config.json, {name}: expected {expected}, got {got!r}")


def integer(
  hf: Mapping[str, Any],
  name: str,
  default: Any = _MISSING,
  minimum: int = 1,
  maximum: int = _MOST,
) -> int:
  expected = f"an integer from {minimum} to {maximum}"
  value = _value(hf, name, expected, default)
  if type(value) is not int or not minimum <= value <= maximum:
    raise wrong(name, expected, value)
  return value


def number(
  hf: Mapping[str, Any], name: str, default: Any = _MISSING, *, zero: bool = False
) -> float:
  """A number above 0 as a float, or with ``zero`` also 0."""
  expected = "0 or a number above it" if zero else "a number above 0"
  value = _value(hf, name, expected, default)
  if type(value) not in (int, float):
    raise wrong(name, expected, value)
  if not (_LEAST_FLOAT <= value <= _MOST_FLOAT or (zero and value == 0)):
    raise wrong(name, f"{expected} in float32", value)
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


def mapping(hf: Mapping[str, Any], name: str) -> Mapping[str, Any]:
  """An object; an empty one where it is missing."""
  value = _value(hf, name, "an object", {})
  if not isinstance(value, Mapping):
    raise wrong(name, "an object", value)
  return value


def choice(
  hf: Mapping[str, Any], name: str, choices: tuple[Any, ...], default: Any = _MISSING
) -> Any:
  value = _value(hf, name, f"one of {choices}", default)
  if not any(type(value) is type(choice) and value == choice for choice in choices):
    raise wrong(name, f"one of {choices}", value)
  return value


def kinds(
  hf: Mapping[str, Any], name: str, count: int, choices: tuple[str, ...]
) -> list[str] | None:
  """One of the choices for each of ``count`` layers, or None where the field is missing."""
  value = _value(hf, name, "a list", [])
  if value == []:
    return None
  known = isinstance(value, list) and all(isinstance(v, str) and v in choices for v in value)
  if not known or len(value) < count:
    raise wrong(name, f"{count} of {choices}", value)
  return value[:count]


def check_supported(hf: Mapping[str, Any], quantization: str) -> None:
  """Refuses what any architecture may ask for and none gets.

  Args:
    hf: the file.
    quantization: the ``quant_method`` that the architecture's weights may have.
  """
  choice(hf, "hidden_act", ("silu",), default="silu")
  _check_quantization(hf, quantization)


def check_no_windows(hf: Mapping[str, Any]) -> None:
  """Refuses layers that do not see the whole of a request."""
  choice(hf, "use_sliding_window", (False,), default=False)
  layers = _value(hf, "layer_types", "a list", [])
  if not isinstance(layers, list) or any(kind != "full_attention" for kind in layers):
    raise wrong("layer_types", "a list of 'full_attention'", layers)


def check_absent(hf: Mapping[str, Any], name: str) -> None:
  """Refuses any value but null."""
  if hf.get(name) is not None:
    raise wrong(name, "null", hf[name])


def _check_quantization(hf: Mapping[str, Any], method: str) -> None:
  fields = _quantization(hf)
  if not fields:
    return
  name = _QUANTIZATION + "quant_method"
  if fields.get(name) != method:  # such as four-bit integers
    raise wrong(name, f"{method!r}, or weights that are multiplied out", fields.get(name))
  if method != "fp8":
    return
  choice(fields, _QUANTIZATION + "fmt", ("e4m3", "float8_e4m3fn"), default="e4m3")
  choice(fields, _QUANTIZATION + "activation_scheme", ("dynamic",), default="dynamic")
  if block_size(hf) is None:
    raise wrong(_BLOCK, "two positive sizes", None)


def block_size(hf: Mapping[str, Any]) -> tuple[int, int] | None:
  """Rows and columns per factor of FP8 weights, or None if the file names none."""
  fields = _quantization(hf)
  if fields.get(_BLOCK) is None:
    return None
  block = integers(fields, _BLOCK)
  if len(block) != 2 or not all(1 <= size <= _MOST for size in block):
    raise wrong(_BLOCK, "two positive sizes", block)
  return block[0], block[1]


_QUANTIZATION = "quantization_config."
_BLOCK = _QUANTIZATION + "weight_block_size"


def _quantization(hf: Mapping[str, Any]) -> dict[str, Any]:
  return {_QUANTIZATION + name: value for name, value in mapping(hf, "quantization_config").items()}


def _value(hf: Mapping[str, Any], name: str, expected: str, default: Any) -> Any:
  """The field; the default where it is missing or null."""
  value = hf.get(name)
  if value is not None:
    return value
  if default is _MISSING:
    raise ValueError(f"config.json, {name}: expected {expected}, got nothing")
  return default
