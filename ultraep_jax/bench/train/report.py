"""Measurements of training as a table."""

from collections.abc import Mapping, Sequence
from typing import Any

from ultraep_jax.tables import table_of_records


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
  kinds = [row.get("kinds_us", {}) for row in rows]
  return table_of_records(columns, rows, parts={" us": kinds})
