"""What commands print of a simulation."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ultraep_jax.devices.device import Device
from ultraep_jax.simulate.cost import Setting
from ultraep_jax.simulate.run import Outcome, band, share_of_ideal
from ultraep_jax.tables import table

PARTS = ("plan", "copy", "exchange", "matmul", "reduce", "rest", "move")
_EVEN = 1.1  # busiest over mean rank: below, there is next to nothing to balance


def percent(value: float | None) -> float | None:
  """A share in per cent."""
  return None if value is None else 100 * value


def difference(ours: float, other: float | None) -> str:
  """Ours less the other, with a sign."""
  return "–" if other is None else f"{ours - other:+.2f}"


def constants(device: Device) -> str:
  """Every constant with its kind and source."""
  rows = [
    [name, f"{fact.value:.4g} {fact.unit}".strip(), fact.kind, fact.source]
    for name, fact in device.facts.items()
  ]
  for each in device.matmuls:
    title = "matmuls {} x {}".format(*each.widths)
    rates = f"{each.forward:.4g}, {each.backward:.4g} FLOP/s"
    rows.append([title, rates, each.kind, each.source])
  title = f"Constants: {device.name} ({device.hardware})"
  return f"{title}\n{table(['name', 'value', 'kind', 'source'], rows)}"


def summary(name: str, runs: Sequence[Mapping[str, Outcome]]) -> dict[str, Any]:
  """A strategy's row: what its outcomes of all runs are on average, beside the ideal's."""
  outcomes = [run[name] for run in runs]

  def mean(value) -> float:
    return float(np.mean([np.mean(value(outcome)) for outcome in outcomes]))

  parts = {
    part: mean(lambda o, part=part: getattr(o.forward, part) + getattr(o.backward, part))
    for part in PARTS
  }
  return {
    "strategy": name,
    "imbalance": band([float(outcome.imbalance.mean()) for outcome in outcomes]),
    "imbalance_p99": mean(lambda o: np.quantile(o.imbalance, 0.99)),
    "share_of_ideal": band([share_of_ideal(run[name], run["ideal"]) for run in runs]),
    "layer_seconds": mean(lambda o: o.seconds),
    "parts_seconds": parts,
    "copies": mean(lambda o: o.replicas),
    "fan_out": mean(lambda o: o.fan_out),
    "remote_share": mean(lambda o: o.remote_share()),
  }


def conclusions(rows: Sequence[Mapping[str, Any]], setting: Setting) -> list[str]:
  """A note on why balancing takes longer than it saves, if it does."""
  row_of = {row["strategy"]: row for row in rows}
  none, quota = row_of.get("none"), row_of.get("quota")
  balanced = [row_of[name]["layer_seconds"] for name in ("quota", "quota (time)") if name in row_of]
  if none is None or not balanced or min(balanced) <= none["layer_seconds"]:
    return []
  more = f"{1e3 * (min(balanced) - none['layer_seconds']):.2f} ms a layer more than it saves"
  before = none["imbalance"].mean
  gained = before - quota["imbalance"].mean if quota else before
  if setting.num_ranks == 1:
    why = "one rank has nothing to balance"
  elif not setting.replica_slots:
    why = "nothing is copied without replica slots"
  elif setting.domain_size == 1:
    why = "nothing is copied in domains of one rank"
  elif before < _EVEN:
    why = f"the loads are nearly even, busiest over mean rank {before:.2f}"
  elif setting.domain_size < setting.num_ranks and gained < (before - 1) / 10:
    why = "copies do not leave the domains, which differ"
  else:
    return [
      f'at these sizes balancing takes {more}: layers this small are faster with strategy="none"'
    ]
  return [f'balancing takes {more}, as {why}: strategy="none" is faster']


def to_json(value: object) -> object:
  """NamedTuples as objects, descriptions without tunings; what ``json`` can write."""
  if isinstance(value, Device):
    about = {"name": value.name, "hardware": value.hardware, "layer": value.layer}
    return about | {"facts": to_json(value.facts), "matmuls": to_json(value.matmuls)}
  if isinstance(value, tuple) and hasattr(value, "_asdict"):
    return {key: to_json(part) for key, part in value._asdict().items()}  # type: ignore
  if isinstance(value, dict):
    return {str(key): to_json(part) for key, part in value.items()}
  if isinstance(value, list | tuple):
    return [to_json(part) for part in value]
  return value
