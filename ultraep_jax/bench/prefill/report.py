"""The tables and the figure of the prefill measurement."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ultraep_jax.simulate.plots import figure
from ultraep_jax.tables import table

_COLORS = {"none": "#b0413e", "quota": "#2f6b4f", "ideal": "#888888"}


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
  made, (times, layers) = figure(2, 12, 4.2)
  for name, row in results["strategies"].items():
    color = _COLORS.get(name)
    kept = sorted(
      (p["rate"], p["ttft_mean"], p["ttft_p99"])
      for p in results["points"]
      if p["strategy"] == name and p["overloaded"] is None
    )
    if kept:
      rates, mean, p99 = zip(*kept, strict=True)
      times.plot(rates, [1e3 * t for t in mean], "o-", color=color, label=f"{name}, mean")
      times.plot(rates, [1e3 * t for t in p99], ".:", color=color, label=f"{name}, p99")
    limit = results["limits"].get(name)
    if limit and limit["held"]:
      times.axvline(limit["estimate"], color=color, linewidth=0.8, alpha=0.6)
    if name != "ideal":  # which routes otherwise
      layers.plot(row["imbalance_before_L"], ".:", color=color, label=f"{name}, as routed")
    layers.plot(row["imbalance_after_L"], "o-", color=color, markersize=4, label=name)
  times.axhline(1e3 * results["bound_s"], color="black", linewidth=0.8, linestyle="--")
  times.set_yscale("log")
  times.set_title("Time to first token, ms; dashed: the bound on the mean", loc="left")
  times.set_xlabel("requests/s offered; lines: the most that hold the bound")
  layers.set_title("Busiest over mean rank, mean over batches", loc="left")
  layers.set_xlabel("MoE layer")
  layers.set_ylim(bottom=0.95)
  for ax in (times, layers):
    ax.legend(frameon=False, fontsize=8)
  made.savefig(path, dpi=130)
