"""Tables for a terminal."""

from collections.abc import Sequence

from ultraep_jax.devices.device import Device


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
  """Columns that line up; numbers to the right, ``None`` as a dash.

  >>> print(table(["what", "value"], [["one", 1.0], ["two", None]]))
  what  value
  one    1.00
  two       –
  """
  cells = [list(header), *([_cell(value) for value in row] for row in rows)]
  widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
  right = [any(isinstance(row[i], int | float) for row in rows) for i in range(len(header))]
  lines = []
  for row in cells:
    padded = [
      cell.rjust(width) if numeric else cell.ljust(width)
      for cell, width, numeric in zip(row, widths, right, strict=True)
    ]
    lines.append("  ".join(padded).rstrip())
  return "\n".join(lines)


def _cell(value: object) -> str:
  if value is None:
    return "–"
  return f"{value:.2f}" if isinstance(value, float) else str(value)


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
    about = {"name": value.name, "hardware": value.hardware}
    return about | {"facts": to_json(value.facts), "matmuls": to_json(value.matmuls)}
  if isinstance(value, tuple) and hasattr(value, "_asdict"):
    return {key: to_json(part) for key, part in value._asdict().items()}  # type: ignore
  if isinstance(value, dict):
    return {str(key): to_json(part) for key, part in value.items()}
  if isinstance(value, list | tuple):
    return [to_json(part) for part in value]
  return value
