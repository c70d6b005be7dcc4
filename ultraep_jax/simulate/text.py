"""What commands print of a simulation."""

from ultraep_jax.devices.device import Device
from ultraep_jax.tables import table


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
