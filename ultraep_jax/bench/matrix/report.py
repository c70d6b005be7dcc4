"""What the matrix shows: tables of cells, a summary against the goals, and a heat map."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ultraep_jax.figures import figure
from ultraep_jax.tables import table_of_records

if TYPE_CHECKING:
  from matplotlib.figure import Figure

Row = Mapping[str, Any]
_MOST_EXTRA = 60e-6  # seconds over not balanced that a small batch may cost


def cells_table(rows: Sequence[Row]) -> str:
  """Cells of one group, as a table; times are milliseconds."""
  columns = {
    "": "shape",
    "tokens": "tokens",
    "pass": "direction",
    "loads": "loads",
    "before": "before",
    "after": "after",
    "bound": "bound",
    "regret": "regret",
    "floor": "floor_ms",
    "rounds": "rounds",
    "copies": "copies",
  }
  return table_of_records(columns, rows, parts={", ms": [row["ms"] for row in rows]})


def summarise(rows: Sequence[Row]) -> list[str]:
  """Lines about all cells: the goals of regret, and how near equal loads they come."""
  if not rows:
    return ["no cell was measured"]
  lines = []
  large = [row for row in rows if row["tokens"] >= 2048]
  small = [row for row in rows if row["tokens"] <= 512]
  uneven = [row for row in large if row["before"] >= 1.3]
  if large:
    worst = max(large, key=lambda row: row["regret"])
    lines.append(f"T >= 2048: worst regret {worst['regret']:.3f} ({_name(worst)}), goal 1.05")
  if uneven:
    mean = np.mean([row["regret"] for row in uneven])
    lines.append(f"T >= 2048, ratio >= 1.3: mean regret {mean:.3f}, goal 1.00")
  if small:
    worst = max(small, key=lambda row: row["extra_us"])
    allowed = sum(not _small_is_fine(row) for row in small)
    lines.append(
      f"T <= 512: at most {worst['extra_us']:.0f} us over not balanced ({_name(worst)}); "
      f"{allowed} of {len(small)} above the larger of 60 us and 5 %"
    )
  near = [row for row in rows if row["tokens"] >= 4096 and row["before"] >= 1.3]
  if near:
    worst = min(near, key=lambda row: row["of_bound"])
    lines.append(
      f"T >= 4096, ratio >= 1.3: at least {worst['of_bound']:.1%} of equal loads or of the load's "
      f"bound ({_name(worst)}), goal 95 %"
    )
  lines.append(f"equal loads over the floor: {_spread(row['ideal_over_floor'] for row in rows)}")
  return lines


def _small_is_fine(row: Row) -> bool:
  return row["extra_us"] <= max(_MOST_EXTRA * 1e6, 0.05 * row["best_unbalanced_ms"] * 1e3)


def _spread(values: Iterable[float]) -> str:
  found = sorted(values)
  return f"{found[0]:.2f} to {found[-1]:.2f}, median {np.median(found):.2f}"


def _name(row: Row) -> str:
  return f"{row['shape']} T{row['tokens']} {row['direction']} {row['loads']} {row['before']:.2f}"


def draw(rows: Sequence[Row]) -> "Figure":
  """Heat maps of regret, one a pass: a line for each shape and tokens, a column for each load.

  Raises:
    ImportError: Matplotlib is not installed.
  """
  passes = list(dict.fromkeys(row["direction"] for row in rows))
  lines = sorted({(row["shape"], row["tokens"]) for row in rows})
  columns = sorted({(row["loads"], str(row["ratio"])) for row in rows})
  width, height = 2.0 + 0.55 * len(columns) * len(passes), 1.4 + 0.24 * len(lines)
  made, axes = figure(len(passes), width, height)
  for ax, direction in zip(axes, passes, strict=True):
    regret = np.full((len(lines), len(columns)), np.nan)
    for row in rows:
      if row["direction"] == direction:
        at = (row["shape"], row["tokens"]), (row["loads"], str(row["ratio"]))
        regret[lines.index(at[0]), columns.index(at[1])] = row["regret"]
    image = ax.imshow(regret, cmap="RdYlGn_r", vmin=0.5, vmax=1.5, aspect="auto")
    for (y, x), value in np.ndenumerate(regret):
      if not np.isnan(value):
        ax.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=6)
    ax.set_xticks(range(len(columns)), [f"{kind} {ratio}" for kind, ratio in columns], rotation=90)
    names = [f"{shape} T{tokens}" for shape, tokens in lines] if direction == passes[0] else []
    ax.set_yticks(range(len(names)), names)
    ax.set_title(f"{direction}: balanced over the best of not balanced", loc="left")
    made.colorbar(image, ax=ax, shrink=0.6)
  return made
