"""Reads, merges and writes the tables of ``pallas_kernels.tunings``."""

import dataclasses
import json
import pathlib
from typing import Any

from pallas_kernels import tunings
from pallas_kernels.tunings import Tuning

Table = dict[str, Any]


def load(path: pathlib.Path, device_kind: str) -> Table:
  """The table of a file, or an empty one if there is none.

  Raises:
    ValueError: it is no table, or one of another kind of device.
  """
  if not path.exists():
    return {"device_kind": device_kind, "entries": []}
  table = json.loads(path.read_text())
  tunings.parse(table)
  if table["device_kind"] != device_kind:
    raise ValueError(f"{path}: expected a table of {device_kind}, got {table['device_kind']}")
  return table


def entry(
  operation: str, widths: tuple[int, ...], tuning: Tuning | None, measured: dict[str, Any]
) -> dict[str, Any]:
  """As tables hold it; ``measured`` says how it was found."""
  tunings.Entry(operation=operation, widths=widths, tuning=tuning)  # raises unless it is one
  fields = None if tuning is None else dataclasses.asdict(tuning)
  return {"operation": operation, "widths": list(widths), "tuning": fields, "measured": measured}


def merged(table: Table, entries: list[dict[str, Any]]) -> Table:
  """The table with entries in place of those for the same, sorted."""
  by_key = {_key(each): each for each in (*table["entries"], *entries)}
  return table | {"entries": [by_key[key] for key in sorted(by_key)]}


def save(path: pathlib.Path, table: Table) -> None:
  """Writes a line for each entry."""
  lines = ",\n".join("    " + json.dumps(each) for each in table["entries"])
  kind = json.dumps(table["device_kind"])
  path.write_text(f'{{\n  "device_kind": {kind},\n  "entries": [\n{lines}\n  ]\n}}\n')


def _key(each: dict[str, Any]) -> tuple[str, tuple[int, ...]]:
  return each["operation"], tuple(each["widths"])
