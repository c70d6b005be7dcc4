"""The constants of the cost model, each with where it is from.

A calibration is a JSON file; the benchmarks' numbers are written into one by hand, with their
source. Where no file exists, ``datasheet`` scales data sheets by what H200 reached of its own::

  {"format": 1, "name": "h200", "hardware": "4 x NVIDIA H200, …",
   "constants": {"copy_rate": {"value": 350e9, "unit": "B/s", "kind": "measured",
                               "source": "docs/benchmarks.md, Replication"}, …}}
"""

import dataclasses
import importlib.resources
import pathlib
from typing import NamedTuple

from ultraep_jax.files import parse_json, regular
from ultraep_jax.simulate.clusters import Cluster

FORMAT = 1
_MOST = 1e30  # of a number; times and rates made of such are finite
KINDS = ("measured", "datasheet", "paper", "derived", "assumed")

# Name, unit, and what it is. Every calibration has all of them.
CONSTANTS = {
  "matmul_forward": ("FLOP/s", "grouped matmul of the experts, forward"),
  "matmul_backward": ("FLOP/s", "grouped matmul of the experts, both gradients"),
  "matmul_tile": ("rows", "rows of a tile: each expert's rows are padded to a multiple"),
  "rest_forward": ("FLOP/s", "attention, shared experts and all else in a layer, forward"),
  "rest_backward": ("FLOP/s", "the same, backward"),
  "dispatch_rate": ("B/s", "what a rank receives or sends of tokens, dispatch"),
  "combine_rate": ("B/s", "the same, combine"),
  "exchange_seconds": ("s", "fixed cost of a dispatch or a combine"),
  "network_rate": ("B/s", "what a rank sends to other domains"),
  "routing_forward": ("", "exchange under real routing over exchange under forced even routing"),
  "routing_backward": ("", "the same, backward"),
  "load_seconds": ("s", "counting and gathering the loads"),
  "plan_seconds": ("s", "planning, fixed part"),
  "plan_seconds_per_rank": ("s", "planning, for each rank of a domain"),
  "route_seconds": ("s", "routing that nothing hides"),
  "copy_rate": ("B/s", "what a rank sends or receives of expert weights"),
  "copy_seconds": ("s", "fixed cost of a replication"),
  "copy_hop_seconds": ("s", "each further hop of a relay"),
  "copy_exposed_forward": ("", "share of the replication that nothing hides, forward"),
  "copy_exposed_backward": ("", "the same, backward, where replicas are made again"),
  "reduce_rate": ("B/s", "float32 gradients of replicas that a rank gathers"),
  "reduce_exposed": ("", "share of the reduction that nothing hides"),
  "outside": ("", "share of an ideal training step that is in no MoE layer"),
  "bubble": ("", "of what is outside, the share that grows with the layers' time"),
}


class Constant(NamedTuple):
  """One number of a calibration.

  Attributes:
    value: in ``unit``.
    unit: as in ``CONSTANTS``.
    kind: one of ``KINDS``.
    source: where it is from.
  """

  value: float
  unit: str
  kind: str
  source: str


@dataclasses.dataclass(frozen=True)
class Calibration:
  """The constants of one machine; ``calibration["copy_rate"]`` is the value.

  Attributes:
    name: for tables.
    hardware: what it was measured on.
    constants: by name.
  """

  name: str
  hardware: str
  constants: dict[str, Constant]

  def __getitem__(self, name: str) -> float:
    return self.constants[name].value

  def replace(self, source: str, kind: str = "assumed", **values: float) -> "Calibration":
    """The same with other values."""
    changed = {k: Constant(v, CONSTANTS[k][0], kind, source) for k, v in values.items()}
    return dataclasses.replace(self, constants={**self.constants, **changed})


def parse(text: str | bytes, name: str = "calibration") -> Calibration:
  """Reads a calibration from JSON.

  Raises:
    ValueError: the text is not a calibration of this format; the message begins with ``name``.
  """
  data = parse_json(text, name)
  if not isinstance(data, dict) or data.get("format") != FORMAT:
    got = data.get("format") if isinstance(data, dict) else type(data).__name__
    raise ValueError(f'{name}: expected an object with "format": {FORMAT}, got {got!r}')
  given = data.get("constants")
  if not isinstance(given, dict) or set(given) != set(CONSTANTS):
    got = sorted(set(given or ()) ^ set(CONSTANTS)) if isinstance(given, dict) else given
    raise ValueError(
      f"{name}: expected the constants {tuple(CONSTANTS)}, missing or unknown: {got}"
    )
  constants = {key: _constant(f"{name}, {key}", key, value) for key, value in given.items()}
  return Calibration(str(data.get("name", name)), str(data.get("hardware", "")), constants)


def _constant(where: str, key: str, given: object) -> Constant:
  if not isinstance(given, dict) or set(given) != set(Constant._fields):
    raise ValueError(f"{where}: expected an object with {Constant._fields}, got {given!r}")
  value, unit = given["value"], CONSTANTS[key][0]
  if type(value) not in (int, float) or not abs(value) < _MOST:
    raise ValueError(f"{where}: expected a finite number, got {value!r:.80}")
  positive = key.endswith("rate") or unit in ("FLOP/s", "rows") or key.startswith("routing")
  if value < 0 or (positive and value < 1 / _MOST):
    raise ValueError(f"{where}: expected a positive number, got {value}")
  if given["unit"] != unit or given["kind"] not in KINDS:
    raise ValueError(
      f"{where}: expected unit {unit!r} and a kind of {KINDS}, "
      f"got {given['unit']!r} and {given['kind']!r}"
    )
  return Constant(float(value), unit, given["kind"], str(given["source"]))


def names() -> list[str]:
  """The calibrations that come with the package."""
  folder = importlib.resources.files("ultraep_jax.simulate") / "calibrations"
  return sorted(entry.name.removesuffix(".json") for entry in folder.iterdir())


def load_calibration(name_or_path: str) -> Calibration:
  """A calibration of the package by name, or a file by path.

  Raises:
    ValueError: there is none, or it is not a calibration.
  """
  if name_or_path in names():
    folder = importlib.resources.files("ultraep_jax.simulate") / "calibrations"
    return parse((folder / f"{name_or_path}.json").read_text(encoding="utf-8"), name_or_path)
  try:
    text = regular(pathlib.Path(name_or_path)).read_bytes()
  except (OSError, ValueError) as error:
    raise ValueError(
      f"calibration: expected one of {names()} or a readable file, got {name_or_path!r} ({error})"
    ) from error
  return parse(text, name_or_path)


def datasheet(cluster: Cluster) -> Calibration:
  """Rates of the data sheet, scaled by what the H200 calibration reached of H200's."""
  base = load_calibration("h200")
  matmul, link = cluster.peak / 989e12, cluster.link / 450e9
  scaled = {name: base[name] * matmul for name in CONSTANTS if CONSTANTS[name][0] == "FLOP/s"}
  scaled |= {
    name: base[name] * link
    for name in ("dispatch_rate", "combine_rate", "copy_rate", "reduce_rate")
  }
  note = f"{cluster.source}; times the share of its data sheet that H200 was measured to reach"
  made = base.replace(note, "datasheet", **scaled)
  made = made.replace(cluster.source, "datasheet", network_rate=cluster.network)
  return dataclasses.replace(made, name=f"{cluster.name} (data sheet)", hardware=cluster.source)


def for_cluster(cluster: Cluster) -> Calibration:
  """The measured calibration of a cluster if there is one, else its data sheet's."""
  return load_calibration(cluster.name) if cluster.name in names() else datasheet(cluster)
