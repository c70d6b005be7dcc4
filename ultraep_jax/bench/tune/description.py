"""Reads, merges and writes descriptions of devices (``ultraep_jax/devices``) as JSON."""

import dataclasses
import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from pallas_kernels import tunings
from pallas_kernels.tunings import Tuning
from ultraep_jax.devices import device, known
from ultraep_jax.devices.facts import Fact, Matmul
from ultraep_jax.files import regular, write_text

Description = dict[str, Any]


def load(path: pathlib.Path, kind: str, hardware: str) -> Description:
  """The description of a file; if there is none, one like the package's nearest.

  Args:
    path: of the file.
    kind: of the devices here, as JAX calls them.
    hardware: what is measured, for a new file.

  Raises:
    ValueError: it is no description, or one of other devices.
  """
  if not path.exists():
    near = known.find(kind)
    about = {"format": device.FORMAT, "name": path.stem, "kinds": [kind], "hardware": hardware}
    return about | {"like": known.NEAREST if near is None else near.name}
  text = regular(path).read_bytes()
  found = device.parse(text, str(path))
  if not found.match(kind):
    raise ValueError(f"{path}: expected a description of {kind}, got one of {found.kinds}")
  return json.loads(text)


def entry(
  operation: str, widths: tuple[int, ...], tuning: Tuning | None, measured: dict[str, Any]
) -> dict[str, Any]:
  """A tuning as descriptions hold it; ``measured`` says how it was found."""
  tunings.Entry(operation=operation, widths=widths, tuning=tuning)  # raises unless it is one
  fields = None if tuning is None else dataclasses.asdict(tuning)
  return {"operation": operation, "widths": list(widths), "tuning": fields, "measured": measured}


def with_tunings(data: Description, entries: Iterable[dict[str, Any]]) -> Description:
  """The description with entries in place of those for the same, sorted."""
  by_key = {
    (each["operation"], tuple(each["widths"])): each
    for each in (*data.get("tunings", ()), *entries)
  }
  return data | {"tunings": [by_key[key] for key in sorted(by_key)]}


def with_facts(
  data: Description, facts: Mapping[str, Fact], matmuls: Iterable[Matmul]
) -> Description:
  """The description with facts and rates in place of those for the same."""
  by_widths = {
    tuple(each["widths"]): each
    for each in (
      *data.get("matmuls", ()),
      *(each._asdict() | {"widths": list(each.widths)} for each in matmuls),
    )
  }
  named = {name: fact._asdict() for name, fact in facts.items()}
  return data | {
    "facts": data.get("facts", {}) | named,
    "matmuls": [by_widths[widths] for widths in sorted(by_widths)],
  }


def save(path: pathlib.Path, data: Description) -> None:
  """Writes two lines for a number and its source, and one for each tuning."""
  write_text(path, _object(data, "") + "\n")


def _object(data: Mapping[str, Any], indent: str) -> str:
  inner = indent + "  "
  lines = [f"{inner}{json.dumps(key)}: {_value(value, inner)}" for key, value in data.items()]
  return _joined("{", lines, indent, "}")


def _value(value: Any, indent: str) -> str:
  if isinstance(value, dict):
    return _number(value, indent) if "source" in value else _object(value, indent)
  if isinstance(value, list) and value and isinstance(value[0], dict):
    lines = [f"{indent}  {_element(each, indent + '  ')}" for each in value]
    return _joined("[", lines, indent, "]")
  return json.dumps(value, ensure_ascii=False)


def _element(value: Mapping[str, Any], indent: str) -> str:
  return _number(value, indent) if "source" in value else json.dumps(value, ensure_ascii=False)


def _number(value: Mapping[str, Any], indent: str) -> str:
  """A fact, or the rates of a shape."""
  first = ", ".join(
    f"{json.dumps(key)}: {format(part, '.6g') if isinstance(part, float) else json.dumps(part)}"
    for key, part in value.items()
    if key != "source"
  )
  source = f'"source": {json.dumps(value["source"], ensure_ascii=False)}'
  return _joined("{", [f"{indent}  {first}", f"{indent}  {source}"], indent, "}")


def _joined(begin: str, lines: Iterable[str], indent: str, end: str) -> str:
  return "\n".join([begin, ",\n".join(lines), indent + end])
