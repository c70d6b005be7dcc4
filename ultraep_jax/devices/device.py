"""The description of one kind of device, read from a JSON file.

Those of this folder come with the package; ``ultraep bench costs --write FILE`` and
``bench tune --write FILE`` make one where there is none::

  {"format": 1, "name": "h200", "kinds": ["NVIDIA H200"], "hardware": "4 × NVIDIA H200, …",
   "facts": {"copy_rate": {"value": 350e9, "unit": "B/s", "kind": "measured",
                           "source": "docs/lab/kernels.md, Replication"}, …},
   "matmuls": [{"widths": [4096, 1536], "forward": 795e12, "backward": 710e12, …}, …],
   "portable": {"facts": {…}, "matmuls": […]},
   "tunings": […]}

With ``"like": "h200"`` a file says only what differs; the rest is that of h200, rates times the
ratio of both data sheets. ``"portable"`` says what differs for the layer in plain JAX. The kinds
say whether the GPUs can run the kernels. If not, only the layer in plain JAX is described.
"""

import dataclasses
import functools
import importlib.resources
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import AbstractDevice

import pallas_kernels as kernels
from pallas_kernels import UNTUNED, Tunings, tunings
from ultraep_jax.devices.facts import (
  FACTS,
  TRANSFERS,
  Fact,
  Matmul,
  factor,
  parse_facts,
  parse_matmuls,
)
from ultraep_jax.files import parse_json, regular

FORMAT = 1
_KEYS = {"format", "name", "kinds", "hardware", "facts", "matmuls", "portable", "tunings", "like"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
  """What is known of a kind of device; ``device["copy_rate"]`` is the value of a fact. Hashable.

  Attributes:
    name: of the description.
    kinds: beginnings of the names that JAX has for such devices.
    hardware: what was measured, or whose data sheet was read.
    facts: by name, all of ``FACTS``; not to be changed.
    matmuls: rates of experts' matmuls, at least one.
    tunings: how kernels are laid out.
    in_blocks: tokens cross in equal blocks, as in plain JAX.
    portable: the same device, running the layer in plain JAX; ``None``: this is that, as
      it always is of devices that cannot run the kernels.
  """

  name: str
  kinds: tuple[str, ...]
  hardware: str
  facts: Mapping[str, Fact] = dataclasses.field(hash=False)
  matmuls: tuple[Matmul, ...]
  tunings: Tunings = UNTUNED
  in_blocks: bool = False
  portable: "Device | None" = None

  def __repr__(self) -> str:
    """Short: a configuration that holds a device is printed too.

    >>> Device.load("h100")
    Device('h100', of 'NVIDIA H100')
    """
    return f"{type(self).__name__}({self.name!r}, of {', '.join(map(repr, self.kinds)) or 'none'})"

  @staticmethod
  def names() -> list[str]:
    """The descriptions that come with the package."""
    found = (entry.name for entry in importlib.resources.files(__package__).iterdir())
    return sorted(name.removesuffix(".json") for name in found if name.endswith(".json"))

  @staticmethod
  def load(name_or_path: str | pathlib.Path) -> "Device":
    """A description of the package by name, or a file's by path.

    >>> Device.load("h200")["sms"]
    132.0

    Raises:
      ValueError: there is none, or it is not a description.
    """
    if str(name_or_path) in Device.names():
      return _packaged(str(name_or_path))
    try:
      text = regular(pathlib.Path(name_or_path)).read_bytes()
    except (OSError, ValueError) as error:
      raise ValueError(
        f"device: expected one of {Device.names()} or a readable file, "
        f"got {str(name_or_path)!r} ({error})"
      ) from error
    return parse(text, str(name_or_path))

  def match(self, kind: str) -> str:
    """The longest of ``kinds`` that JAX's name of a device begins with, as words; else ``""``."""
    begins = (b for b in self.kinds if kind.startswith(b) and not kind[len(b) :][:1].isalnum())
    return max(begins, key=len, default="")

  def __getitem__(self, fact: str) -> float:
    return self.facts[fact].value

  @property
  def layer(self) -> str:
    """Which layer its costs are of.

    >>> Device.load("h200").layer, Device.load("a100").layer
    ('the layer on kernels', 'the layer in plain JAX')
    """
    return "the layer in plain JAX" if self.portable is None else "the layer on kernels"

  def running(self, *, kernels: bool) -> "Device":
    """The device as it runs the layer on the kernels, where it can, or in plain JAX."""
    return self if kernels or self.portable is None else self.portable

  def on_nodes(self) -> "Device":
    """The device as it runs the layer over several nodes: transfers in plain JAX, not the rest.

    >>> h200 = Device.load("h200").on_nodes()
    >>> h200["dispatch_rate"] == h200.portable["dispatch_rate"], h200["matmul_tile"]
    (True, 128.0)
    """
    if self.portable is None:
      return self
    transfers = {name: self.portable.facts[name] for name in TRANSFERS}
    return dataclasses.replace(self, facts={**self.facts, **transfers}, in_blocks=True)

  def replace(self, source: str, kind: str = "assumed", **values: float) -> "Device":
    """The same with other values of facts, on the kernels and in plain JAX.

    As in a file that is ``"like"`` this device, rates that are not given in the same call follow
    ``peak`` and ``link_rate``: those of matmuls and the rest the first, those over links the
    second. So give measured rates last.

    Args:
      source: where the values are from.
      kind: one of ``facts.KINDS``.
      **values: by name, in the units that ``facts.FACTS`` says; Python's numbers or NumPy's.

    >>> h200 = Device.load("h200")
    >>> h200.replace("two cards of 400 Gb/s", network_rate=100e9)["network_rate"]
    100000000000.0
    >>> h200.replace("half the links", link_rate=225e9)["copy_rate"] / h200["copy_rate"]
    0.5

    Raises:
      ValueError: no such fact, or not a value that a description may have.
    """
    units = {name: FACTS[name][0] if name in FACTS else "" for name in values}
    given = {name: Fact(values[name], units[name], kind, source)._asdict() for name in values}
    changed = parse_facts(self.name, given)
    sheet = {**self.facts, **changed}
    others = {name: fact for name, fact in self.facts.items() if name not in changed}
    follow = {n: fact for n, fact in others.items() if factor(n, sheet, self.facts) != 1}
    same_peak = sheet["peak"].value == self["peak"]
    return dataclasses.replace(
      self,
      facts=sheet | _scaled(self, follow, sheet),
      matmuls=self.matmuls if same_peak else _scaled_matmuls(self, self.matmuls, sheet),
      portable=None if self.portable is None else self.portable.replace(source, kind, **values),
    )

  def matmul_rate(self, width: int, inner: int, *, backward: bool = False) -> float:
    """FLOP/s of the matmuls of experts of width D and inner width F, on rows padded to tiles.

    Of shapes that were not measured, the mean of those that were, weighted by the inverse fourth
    power of how far they are in the logarithms of D and F.
    """
    total = shares = 0.0
    for known in self.matmuls:
      rate = known.backward if backward else known.forward
      distance = math.dist(*(tuple(map(math.log, each)) for each in (known.widths, (width, inner))))
      if distance == 0:
        return rate
      total += rate / distance**4
      shares += 1 / distance**4
    return total / shares


def parse(text: str | bytes, name: str = "device") -> Device:
  """Reads a description from JSON.

  Raises:
    ValueError: the text is not a description of this format; the message begins with ``name``.
  """
  data = parse_json(text, name)
  if not isinstance(data, dict) or data.get("format") != FORMAT:
    got = data.get("format") if isinstance(data, dict) else type(data).__name__
    raise ValueError(f'{name}: expected an object with "format": {FORMAT}, got {got!r}')
  if set(data) - _KEYS:
    raise ValueError(f"{name}: expected keys of {sorted(_KEYS)}, got {sorted(set(data) - _KEYS)}")
  like = data.get("like")
  if like is not None and like not in Device.names():
    raise ValueError(f"{name}, like: expected one of {Device.names()}, got {like!r}")
  kinds = data.get("kinds", [])
  if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
    raise ValueError(f"{name}, kinds: expected a list of texts, got {kinds!r}")
  base = None if like is None else Device.load(like)
  about = {
    "name": str(data.get("name", name)),
    "kinds": tuple(kinds),
    "hardware": str(data.get("hardware", "")),
    "tunings": _tunings(name, data, base),
  }
  on_kernels = _on_kernels(name, data, base)
  portable = Device(**about, **_portable(name, data, base, on_kernels), in_blocks=True)
  if not _can_run_kernels(kinds, base):
    return portable
  return Device(**about, **on_kernels, portable=portable)


def _can_run_kernels(kinds: Sequence[str], base: Device | None) -> bool:
  """As the kinds say. A description without any, as of a planned machine, is as its base."""
  if base is not None and base.portable is None:
    return False  # what kernels cost is not known
  gpus = [AbstractDevice(kind, None, "gpu") for kind in kinds]
  return not gpus or any(map(kernels.has_instructions, gpus))


def _on_kernels(where: str, data: Any, base: Device | None) -> dict[str, Any]:
  """Facts and rates of the layer on kernels."""
  facts = parse_facts(f"{where}, facts", data.get("facts", {}))
  matmuls = parse_matmuls(f"{where}, matmuls", data.get("matmuls", []))
  if base is not None:
    sheet = {**base.facts, **facts}
    facts = _scaled(base, base.facts, sheet) | facts
    matmuls = matmuls or _scaled_matmuls(base, base.matmuls, sheet)
  if missing := [name for name in FACTS if name not in facts]:
    raise ValueError(f"{where}, facts: expected all of {tuple(FACTS)}, missing: {missing}")
  if not matmuls:
    raise ValueError(f"{where}, matmuls: expected at least one, got none")
  return {"facts": {name: facts[name] for name in FACTS}, "matmuls": matmuls}


def _portable(
  where: str, data: Any, base: Device | None, on_kernels: Mapping[str, Any]
) -> dict[str, Any]:
  """The same of the layer in plain JAX, where what is not said is as with the kernels."""
  given = data.get("portable", {})
  if not isinstance(given, dict) or set(given) - {"facts", "matmuls"}:
    raise ValueError(f"{where}, portable: expected an object of facts and matmuls, got {given!r}")
  facts = parse_facts(f"{where}, portable facts", given.get("facts", {}))
  matmuls = parse_matmuls(f"{where}, portable matmuls", given.get("matmuls", []))
  if base is not None and base.portable is not None:
    others = base.portable.facts.items()
    other = {name: fact for name, fact in others if fact != base.facts[name]}
    facts = _scaled(base, other, on_kernels["facts"]) | facts
    matmuls = matmuls or _scaled_matmuls(base, base.portable.matmuls, on_kernels["facts"])
  return {"facts": on_kernels["facts"] | facts, "matmuls": matmuls or on_kernels["matmuls"]}


def _scaled(base: Device, facts: Mapping[str, Fact], sheet: Mapping[str, Fact]) -> dict[str, Fact]:
  """Facts of ``base``, by the ratio of data sheets."""
  return {
    name: fact.scaled(base.name, factor(name, sheet, base.facts)) for name, fact in facts.items()
  }


def _scaled_matmuls(
  base: Device, matmuls: Sequence[Matmul], sheet: Mapping[str, Fact]
) -> tuple[Matmul, ...]:
  ratio = sheet["peak"].value / base["peak"]
  return tuple(each.scaled(base.name, ratio) for each in matmuls)


def _tunings(where: str, data: Any, base: Device | None) -> Tunings:
  """Its own, and for the operations that have none, those of the device that it is like."""
  try:
    own = tunings.parse(data.get("tunings", []))
  except ValueError as error:
    raise ValueError(f"{where}, tunings: {error}") from error
  others = () if base is None else base.tunings.entries
  tuned = {entry.operation for entry in own.entries}
  return Tunings(own.entries + tuple(e for e in others if e.operation not in tuned))


@functools.cache
def _packaged(name: str) -> Device:
  file = importlib.resources.files(__package__) / f"{name}.json"
  return parse(file.read_text(encoding="utf-8"), name)
