"""A measurement of training in a line."""

from collections.abc import Mapping
from typing import Any


def describe(row: Mapping[str, Any]) -> str:
  """Of what ``Bench.measure`` adds to the results."""
  line = f"{row['loads']:>5} {row['variant']:6} {row['ms']:9.2f} ms"
  line += f" {row['tokens_per_second']:9.0f} tokens/s, MFU {row['mfu']:5.1%}"
  if row["of_ideal"] is not None:
    line += f", {row['of_ideal']:6.1%} of ideal"
  if row["over_none"] is not None:
    line += f", {row['over_none']:4.2f} x none"
  line += f", imbalance {row['imbalance_before']:.3f} -> {row['imbalance_after']:.4f}"
  line += f" (worst {row['worst_before']:.3f} -> {row['worst_after']:.4f})"
  line += f", replicas {row['replicas']:.1f}, rounds {row['rounds']:.0f}"
  line += f", {row['gigabytes']:.1f} GB"
  if "kinds_us" in row:
    line += " | us: " + ", ".join(f"{k} {v:.0f}" for k, v in row["kinds_us"].items())
  return line
