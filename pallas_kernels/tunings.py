"""How kernels are laid out where somebody measured it: by operation and widths.

Looking something up asks no device: what was measured on one is passed in.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from pallas_kernels.matmul import layout
from pallas_kernels.transfer.tuning import (
  GRADIENT_UNIT,
  SHARED_BYTES,
  ExchangeTuning,
  TransferTuning,
)

Tuning = layout.MatmulTuning | TransferTuning
_REDUCED = 2 * 4 * GRADIENT_UNIT  # bytes, of both halves of a tile of float32 gradients
_FARTHEST = 2.0  # a width may be so many times that of a neighbour which it is laid out like


@dataclasses.dataclass(frozen=True)
class Operation:
  """What can be tuned.

  Attributes:
    tuning: the type of its tunings.
    widths: what its sizes are called.
  """

  tuning: type[Tuning]
  widths: tuple[str, ...]


_MATMUL = Operation(layout.MatmulTuning, ("contracted", "columns"))
_WGRAD = Operation(layout.MatmulTuning, ("rows", "columns"))  # of a slot's gradient
_EXCHANGE = Operation(ExchangeTuning, ("token bytes",))
_TRANSFER = Operation(TransferTuning, ("expert bytes",))
OPERATIONS: Mapping[str, Operation] = {
  "forward": _MATMUL,
  "forward beside": _MATMUL,  # a transfer of the replicas that it multiplies by
  "gated": _MATMUL,  # and keeps the projections
  "gated beside": _MATMUL,  # likewise
  "gated only": _MATMUL,
  "gated only beside": _MATMUL,
  "dgrad": _MATMUL,
  "dgrad beside": _MATMUL,  # any other transfer
  "sum": _MATMUL,  # contracted: both together
  "sum beside": _MATMUL,
  "wgrad": _WGRAD,
  "wgrad beside": _WGRAD,
  "dispatch": _EXCHANGE,
  "dispatch scaled": _EXCHANGE,
  "combine": _EXCHANGE,
  "replicate": _TRANSFER,
  "reduce": _TRANSFER,
  "copying": _TRANSFER,  # replicate, beside a matmul
  "reducing": _TRANSFER,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
  """What is best for one operation at one shape.

  Attributes:
    operation: one of ``OPERATIONS``.
    widths: the sizes that matter, as ``OPERATIONS`` names them; ``()``: any. How many rows or
      tokens there are does not matter much.
    tuning: ``None``: the kernel's own, since no other was faster.

  Raises:
    ValueError: an unknown operation, widths that are not its, or a tuning that its kernel cannot
      be laid out by.
    TypeError: a tuning of another kind of operation.
  """

  operation: str
  widths: tuple[int, ...]
  tuning: Tuning | None

  def __post_init__(self) -> None:
    if self.operation not in OPERATIONS:
      raise ValueError(f"operation: expected one of {list(OPERATIONS)}, got {self.operation!r}")
    _check_widths(self.operation, self.widths)
    if self.tuning is not None:
      _check_tuning(self.operation, self.tuning)


@dataclasses.dataclass(frozen=True)
class Tunings:
  """Which tuning a kernel has for which shape. Hashable.

  >>> together, deferred = layout.MatmulTuning(), layout.MatmulTuning("deferred")
  >>> tunings = Tunings(
  ...   (
  ...     Entry(operation="forward", widths=(4096, 1536), tuning=deferred),
  ...     Entry(operation="forward", widths=(7168, 2048), tuning=None),
  ...   )
  ... )
  >>> tunings.find("forward", 4096, 1536) == tunings.find("forward", 5120, 1536) == deferred
  True
  >>> tunings.find("forward", 7168, 2048), tunings.find("forward", 512, 256)
  (None, None)

  Attributes:
    entries: at most one for an operation and its widths.

  Raises:
    ValueError: two entries for the same.
  """

  entries: tuple[Entry, ...] = ()

  def __post_init__(self) -> None:
    keys = [(entry.operation, entry.widths) for entry in self.entries]
    for key in keys:
      if keys.count(key) > 1:
        raise ValueError(f"entries: expected one for each operation and widths, got {key} again")

  def find(self, operation: str, *widths: int) -> Any:
    """The tuning for an operation's widths; ``None``: the kernel's own.

    The entry with these widths comes first. Next is the nearest whose widths are between half and
    twice of these, if its columns divide into tiles alike (a multiple of 256 or not). Last is the
    entry for any widths.
    """
    mine = {entry.widths: entry for entry in self.entries if entry.operation == operation}
    near = [known for known in mine if known and _alike(operation, widths, known)]
    nearest = min(near, key=lambda known: _distance(widths, known), default=())
    return mine[nearest].tuning if nearest in mine else None


UNTUNED = Tunings()


def parse(entries: Any) -> Tunings:
  """Tunings from a list of entries as JSON holds them; ``measured`` says how they were found.

  >>> found = {"operation": "forward", "widths": [], "tuning": {"stages": 3}, "measured": {}}
  >>> parse([found]).find("forward", 4096, 1536).stages
  3

  Raises:
    ValueError: it is something else; the message says where.
  """
  if not isinstance(entries, list):
    raise ValueError(f"entries: expected a list, got {type(entries).__name__}")
  parsed = []
  for index, entry in enumerate(entries):
    try:
      parsed.append(_parse_entry(entry))
    except (TypeError, ValueError) as error:
      raise ValueError(f"entries[{index}]: {error}") from error
  return Tunings(tuple(parsed))


def _parse_entry(entry: Any) -> Entry:
  _check_keys("entry", entry, {"operation", "widths", "tuning", "measured"})
  operation, values = entry["operation"], entry["tuning"]
  if operation not in OPERATIONS or values is None:
    tuning = values
  else:
    kind = OPERATIONS[operation].tuning
    names = {field.name for field in dataclasses.fields(kind)}
    if not isinstance(values, dict) or set(values) - names:
      raise ValueError(f"tuning: expected null or an object of {sorted(names)}, got {values!r}")
    tuning = kind(**values)
  if not isinstance(entry["widths"], list):
    raise ValueError(f"widths: expected a list, got {entry['widths']!r}")
  return Entry(operation=operation, widths=tuple(entry["widths"]), tuning=tuning)


def _check_keys(name: str, value: Any, keys: set[str]) -> None:
  if not isinstance(value, dict) or set(value) != keys:
    got = sorted(value) if isinstance(value, dict) else type(value).__name__
    raise ValueError(f"{name}: expected an object of {sorted(keys)}, got {got}")


def _check_widths(operation: str, widths: tuple[int, ...]) -> None:
  names = OPERATIONS[operation].widths
  if not isinstance(widths, tuple) or any(
    isinstance(width, bool) or not isinstance(width, int) or width < 1 for width in widths
  ):
    raise ValueError(f"widths: expected a tuple of positive integers, got {widths!r}")
  if widths and len(widths) != len(names):
    raise ValueError(f"widths: expected {len(names)} ({', '.join(names)}), got {widths}")


def _check_tuning(operation: str, tuning: Tuning) -> None:
  """What the type does not check itself."""
  expected = OPERATIONS[operation].tuning
  if type(tuning) is not expected:
    raise TypeError(f"tuning: expected {expected.__name__} for {operation!r}, got {tuning!r}")
  if isinstance(tuning, layout.MatmulTuning):
    if operation.startswith("wgrad") and tuning.schedule == "deferred":
      raise ValueError(
        f"schedule: expected 'together' or 'in_turns' for {operation!r}, got 'deferred'"
      )
    if operation.endswith("beside") and tuning.cluster > 1:
      raise ValueError(f"cluster: expected 1 for {operation!r}, got {tuning.cluster}")
    shared = tuning.ring_bytes + tuning.store_bytes
    if shared > SHARED_BYTES:
      raise ValueError(
        f"stages, buffers: expected at most {SHARED_BYTES} shared bytes for {operation!r}, "
        f"got {shared}"
      )
    return
  beside = operation in ("copying", "reducing")
  if beside and tuning.workers != layout.WARPGROUPS:
    raise ValueError(
      f"workers: expected {layout.WARPGROUPS} for {operation!r}, got {tuning.workers}"
    )
  if operation in ("reduce", "reducing"):
    if tuning.tile_bytes % (unit := 2 * GRADIENT_UNIT):
      raise ValueError(
        f"tile_bytes: expected a multiple of {unit} for {operation!r}, got {tuning.tile_bytes}"
      )
    shared = tuning.workers * -(-tuning.tile_bytes // _REDUCED) * _REDUCED
    if shared > SHARED_BYTES:
      raise ValueError(
        f"workers * tile_bytes: expected at most {SHARED_BYTES} for {operation!r}, tiles in whole "
        f"{_REDUCED} bytes, got {shared}"
      )


def _alike(operation: str, widths: tuple[int, ...], known: tuple[int, ...]) -> bool:
  if any(max(a / b, b / a) > _FARTHEST for a, b in zip(widths, known, strict=True)):
    return False
  matmul = OPERATIONS[operation].tuning is layout.MatmulTuning
  return not matmul or (widths[-1] % 256 == 0) == (known[-1] % 256 == 0)


def _distance(widths: tuple[int, ...], known: tuple[int, ...]) -> float:
  return sum(abs(math.log(a / b)) for a, b in zip(widths, known, strict=True))
