"""Measurements of training as a table."""

from collections.abc import Mapping, Sequence
from typing import Any

from ultraep_jax.tables import table


def times_table(rows: Sequence[Mapping[str, Any]]) -> str:
  """The variants of one kind of loads, of what ``Bench.measure`` adds to the results."""
  columns = {
    "loads": "loads",
    "variant": "variant",
    "ms": "ms",
    "tokens/s": "tokens_per_second",
    "MFU": "mfu",
    "of ideal": "of_ideal",
    "x none": "over_none",
    "before": "imbalance_before",
    "after": "imbalance_after",
    "worst": "worst_before",
    "worst after": "worst_after",
    "copies": "replicas",
    "rounds": "rounds",
    "GB": "gigabytes",
  }
  kinds = dict.fromkeys(kind for row in rows for kind in row.get("kinds_us", {}))
  return table(
    [*columns, *(f"{kind} us" for kind in kinds)],
    [
      [row[name] for name in columns.values()]
      + [row.get("kinds_us", {}).get(kind) for kind in kinds]
      for row in rows
    ],
    digits=3,
  )
