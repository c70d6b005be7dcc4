"""The tables and the figure of the prefill measurement."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ultraep_jax.figures import DPI, figure, legend_above, style
from ultraep_jax.tables import table


def loads_table(loads: Sequence[Mapping[str, float]], slots: int, each: bool) -> str:
  """Busiest over mean rank of each layer, or of all in short."""
  names = ("home", "planned", "floor")
  header = ["layer", "home", f"planned, {slots} slots", "no plan below"]
  rows: list[list[object]] = []
  if each:
    rows = [[str(i), *(row[name] for name in names)] for i, row in enumerate(loads)]
  for word, function in (("mean", np.mean), ("worst", np.max)):
    rows.append([word, *(float(function([row[name] for row in loads])) for name in names)])
  return table(header, rows)


def points_table(points: Sequence[Mapping[str, Any]]) -> str:
  """A row for each rate and strategy, in the order they were measured in."""
  header = ["order", "strategy", "requests/s", "TTFT ms", "p50", "p99", "tokens/s", "padding %"]
  header += ["imbalance", "balanced", "note"]
  rows = [
    [
      p["order"],
      p["strategy"],
      p["rate"],
      *(1e3 * p[f"ttft_{name}"] for name in ("mean", "p50", "p99")),
      round(p["tokens_per_second"]),
      100 * p["padding_share"],
      p["imbalance_before"],
      p["imbalance_after"],
      p["overloaded"] or "",
    ]
    for p in points
  ]
  return table(header, rows)


def summary_table(results: Mapping[str, Any]) -> str:
  """A row for each strategy: what it holds, and what its layers did."""
  header = ["strategy", "tokens/s, saturated", "requests/s held", "not held", "estimate"]
  header += ["of ideal %", "imbalance", "balanced", "worst", "rounds"]
  ideal = results["limits"].get("ideal", {}).get("estimate")
  rows = []
  for name, row in results["strategies"].items():
    limit = results["limits"].get(name)
    rows.append(
      [
        name,
        round(results["saturated"][name]["tokens_per_second"]),
        *((limit[key] for key in ("held", "exceeded", "estimate")) if limit else [None] * 3),
        100 * limit["estimate"] / ideal if limit and ideal else None,
        float(np.mean(row["imbalance_before_L"])),
        float(np.mean(row["imbalance_after_L"])),
        row["worst_after"],
        row["rounds"],
      ]
    )
  return table(header, rows)


def plot(results: Mapping[str, Any], path: pathlib.Path) -> None:
  """Times to first token over rates, and each layer's imbalance.

  Raises:
    ImportError: Matplotlib is not installed.
  """
  made, (mean, tail, layers) = figure(3, 14, 4.2)
  for name, row in results["strategies"].items():
    kept = sorted(
      (p["rate"], 1e3 * p["ttft_mean"], 1e3 * p["ttft_p99"])
      for p in results["points"]
      if p["strategy"] == name and p["overloaded"] is None
    )
    rates, *both = zip(*kept, strict=True) if kept else ((), (), ())
    for ax, values in zip((mean, tail), both, strict=True):
      ax.plot(rates, values, "o-", **style(name, markersize=4))
    limit = results["limits"].get(name)
    if limit and limit["held"]:
      mean.axvline(limit["estimate"], color=style(name)["color"], linewidth=0.8, alpha=0.6)
    layers.plot(row["imbalance_after_L"], "o-", **style(name, markersize=4))
  mean.axhline(1e3 * results["bound_s"], color="black", linewidth=0.8, linestyle="--")
  mean.set_title("Mean time to first token, ms; dashed: its bound", loc="left")
  tail.set_title("The slowest of 100, ms", loc="left")
  for ax in (mean, tail):
    ax.set_yscale("log")
    ax.set_xlabel("requests/s offered")
  layers.set_title("Busiest over mean rank", loc="left")
  layers.set_xlabel("MoE layer")
  layers.set_ylim(bottom=0.95)
  legend_above(made, layers)
  made.savefig(path, dpi=DPI)
