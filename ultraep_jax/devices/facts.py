"""What a description of a device says, each number with its unit, kind and source."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

KINDS = ("measured", "datasheet", "paper", "derived", "assumed")

# Name, unit, and what it is. Every description has all of them.
FACTS: Mapping[str, tuple[str, str]] = {
  "peak": ("FLOP/s", "dense bf16"),
  "sms": ("", "streaming multiprocessors"),
  "shared_bytes": ("B", "shared memory of a thread block, at most"),
  "memory_bytes": ("B", "the device's own memory"),
  "memory_rate": ("B/s", "the same"),
  "link_rate": ("B/s", "scale-up links, one direction"),
  "network_rate": ("B/s", "what a rank sends to other domains"),
  "domain_size": ("", "devices that scale-up links join, as machines are usually built"),
  "launch_seconds": ("s", "from one kernel that does next to nothing to the next"),
  "balance_seconds": ("s", "of a layer that may copy, whatever it copies, over one that cannot"),
  "balance_training_seconds": ("s", "the same of a call with gradients"),
  "matmul_tile": ("rows", "rows of a tile: each expert's rows are padded to a multiple"),
  "tile_seconds": ("s", "of a tile in each matmul beyond its rows, if a host launches it"),
  "weights_exposed": ("", "share of the time to read an expert's weights that matmuls do not hide"),
  "rest_forward": ("FLOP/s", "attention, shared experts and all else in a layer, forward"),
  "rest_backward": ("FLOP/s", "the same, backward"),
  "dispatch_rate": ("B/s", "what a rank receives or sends of tokens, dispatch"),
  "combine_rate": ("B/s", "the same, combine"),
  "exchange_seconds": ("s", "fixed cost of a dispatch or a combine"),
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
  "reduce_rate": ("B/s", "gradients of replicas that a rank gathers, measured with float32"),
  "reduce_exposed": ("", "share of the reduction that nothing hides"),
  "outside": ("", "share of an ideal training step that is in no MoE layer"),
  "bubble": ("", "of what is outside, the share that grows with the layers' time"),
}
_MOST = 1e30  # of a number; times and rates made of such are finite
# The most of what is counted: more than machines have, and exact as a float.
_COUNTS = {
  "sms": 2**20,
  "shared_bytes": 2**40,
  "memory_bytes": 2**53,
  "domain_size": 2**20,
  "matmul_tile": 2**20,
}
_SHARES = ("weights_exposed", "copy_exposed_forward", "copy_exposed_backward", "reduce_exposed")
_SHARES += ("outside", "bubble")
_OPERATIONS = ("dispatch_", "combine_", "exchange_", "copy_", "reduce_")
TRANSFERS = tuple(name for name in FACTS if name.startswith(_OPERATIONS))  # over scale-up links
_OVER_LINKS = ("dispatch_rate", "combine_rate", "copy_rate", "reduce_rate")


class Fact(NamedTuple):
  """One number of a description.

  Attributes:
    value: in ``unit``.
    unit: as in ``FACTS``.
    kind: one of ``KINDS``.
    source: where it is from.
  """

  value: float
  unit: str
  kind: str
  source: str

  def scaled(self, owner: str, factor: float) -> "Fact":
    """The same for another device, so many times as fast by the data sheets."""
    how = "as on" if factor == 1 else f"{factor:.3g} times, by data sheets, that of"
    return Fact(self.value * factor, self.unit, "derived", f"{how} {owner}: {self.source}")


class Matmul(NamedTuple):
  """Rates of the grouped matmuls of experts of one shape.

  Of rows padded to tiles, and without what reading the weights adds.

  Attributes:
    widths: D and F.
    forward: FLOP/s of the three products.
    backward: FLOP/s of the six.
    kind: one of ``KINDS``.
    source: where they are from.
  """

  widths: tuple[int, int]
  forward: float
  backward: float
  kind: str
  source: str

  def scaled(self, owner: str, factor: float) -> "Matmul":
    """As ``Fact.scaled``."""
    rate = Fact(self.forward, "FLOP/s", self.kind, self.source).scaled(owner, factor)
    return Matmul(self.widths, rate.value, self.backward * factor, rate.kind, rate.source)


def factor(name: str, facts: Mapping[str, Fact], base: Mapping[str, Fact]) -> float:
  """By which a fact of ``base`` is scaled to another device's data sheet."""
  if FACTS[name][0] == "FLOP/s":
    return facts["peak"].value / base["peak"].value
  if name in _OVER_LINKS:
    return facts["link_rate"].value / base["link_rate"].value
  return 1.0


def parse_facts(where: str, given: Any) -> dict[str, Fact]:
  """Facts by name.

  Raises:
    ValueError: they are not as ``FACTS`` and ``Fact`` say; the message begins with ``where``.
  """
  if not isinstance(given, dict) or set(given) - set(FACTS):
    got = sorted(set(given) - set(FACTS)) if isinstance(given, dict) else given
    raise ValueError(f"{where}: expected facts of {tuple(FACTS)}, got {got!r}")
  return {name: _fact(f"{where}, {name}", name, value) for name, value in given.items()}


def parse_matmuls(where: str, given: Any) -> tuple[Matmul, ...]:
  """Rates by shape.

  Raises:
    ValueError: they are not as ``Matmul`` says; the message begins with ``where``.
  """
  if not isinstance(given, list):
    raise ValueError(f"{where}: expected a list, got {type(given).__name__}")
  return tuple(_matmul(f"{where}[{index}]", each) for index, each in enumerate(given))


def _fact(where: str, name: str, given: Any) -> Fact:
  _check_keys(where, given, Fact._fields)
  unit = FACTS[name][0]
  positive = unit in ("FLOP/s", "B/s", "rows") or name in _COUNTS or name.startswith("routing")
  value = _number(where, given["value"], positive)
  if name in _COUNTS and value != int(value):
    raise ValueError(f"{where}: expected a whole number, got {value}")
  if value > _COUNTS.get(name, _MOST):
    raise ValueError(f"{where}: expected at most {_COUNTS[name]}, got {value:g}")
  if name in _SHARES and value > 1:
    raise ValueError(f"{where}: expected a share in [0, 1], got {value}")
  if name == "outside" and value == 1:
    raise ValueError(f"{where}: expected a share below 1, got {value}")
  if given["unit"] != unit:
    raise ValueError(f"{where}: expected unit {unit!r}, got {given['unit']!r}")
  return Fact(value, unit, _kind(where, given["kind"]), str(given["source"]))


def _matmul(where: str, given: Any) -> Matmul:
  _check_keys(where, given, Matmul._fields)
  widths = given["widths"]
  if (
    not isinstance(widths, list)
    or len(widths) != 2
    or any(isinstance(width, bool) or not isinstance(width, int) or width < 1 for width in widths)
  ):
    raise ValueError(f"{where}: expected widths [D, F], got {widths!r}")
  forward, backward = (
    _number(f"{where}, {name}", given[name], True) for name in ("forward", "backward")
  )
  kind, source = _kind(where, given["kind"]), str(given["source"])
  return Matmul((widths[0], widths[1]), forward, backward, kind, source)


def _check_keys(where: str, given: Any, keys: tuple[str, ...]) -> None:
  if not isinstance(given, dict) or set(given) != set(keys):
    raise ValueError(f"{where}: expected an object with {keys}, got {given!r}")


def _number(where: str, value: Any, positive: bool) -> float:
  if isinstance(value, np.integer | np.floating):
    value = value.item()
  number = isinstance(value, int | float) and not isinstance(value, bool)
  if not number or not abs(value) < _MOST:
    raise ValueError(f"{where}: expected a finite number, got {value!r}")
  if value < 0 or (positive and value < 1 / _MOST):
    raise ValueError(f"{where}: expected a positive number, got {value}")
  return float(value)


def _kind(where: str, kind: Any) -> str:
  if kind not in KINDS:
    raise ValueError(f"{where}: expected a kind of {KINDS}, got {kind!r}")
  return kind
