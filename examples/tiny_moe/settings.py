"""What a run is: its model, data, optimisation and devices."""

import dataclasses
from typing import Literal

_MOST = 1_000_000  # far beyond what a small model can use


class SettingsError(ValueError):
  """A flag is out of range or does not fit another flag, the devices or the checkpoint."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """Flags of the same names, checked.

  Attributes:
    strategy: how experts are balanced; ``"dense"`` runs every expert on every token.
    ranks: devices that share the experts.
    data: groups of such ranks.
    replica_slots: expert copies that a rank can hold.
    steps: updates of the whole run; the learning rate's schedule spans them.
    batch: sequences per step.
    seq: bytes per sequence.
    accumulate: microbatches that a step is cut into.
    learning_rate: its peak.
    balance_loss: weight of the router's auxiliary loss, small enough to leave it uneven.
    dtype: of the computation; parameters are float32.
    seed: of the parameters and the order of the data.
    layers: transformer blocks, each with a mixture of experts.
    width: of the residual stream.
    experts: in each layer; a token takes two.

  Raises:
    SettingsError: a value is out of range or does not fit another.
  """

  strategy: Literal["quota", "none", "ideal", "dense"] = "quota"
  ranks: int = 8
  data: int = 1
  replica_slots: int = 2
  steps: int = 200
  batch: int = 16
  seq: int = 128
  accumulate: int = 1
  learning_rate: float = 3e-3
  balance_loss: float = 1e-3
  dtype: Literal["float32", "bfloat16"] = "float32"
  seed: int = 0
  layers: int = 2
  width: int = 64
  experts: int = 16

  def __post_init__(self) -> None:
    for name in ("ranks", "data", "steps", "batch", "seq", "accumulate", "layers", "width"):
      _check_range(1, name, getattr(self, name))
    for name in ("replica_slots", "learning_rate", "balance_loss", "seed"):
      _check_range(0, name, getattr(self, name))
    _check_range(2, "experts", self.experts)
    _check_multiple("width", self.width, 16, "the channels of a head")
    _check_multiple("experts", self.experts, self.ranks, "--ranks")
    parts = self.devices * self.accumulate
    _check_multiple("batch", self.batch, parts, "--ranks x --data x --accumulate")
    if self.strategy == "dense" and self.devices > 1:
      raise SettingsError(f"--ranks: expected one device for 'dense', got {self.devices}")

  @property
  def devices(self) -> int:
    return self.ranks * self.data


def flag(name: str) -> str:
  return "--" + name.replace("_", "-")


def _check_range(minimum: int, name: str, value: float) -> None:
  if not value >= minimum:
    raise SettingsError(f"{flag(name)}: expected at least {minimum}, got {value}")
  if value > _MOST:
    raise SettingsError(f"{flag(name)}: expected at most {_MOST}, got {value}")


def _check_multiple(name: str, value: int, divisor: int, what: str) -> None:
  if value < 1 or value % divisor:
    raise SettingsError(
      f"{flag(name)}: expected a positive multiple of {divisor} ({what}), got {value}"
    )
