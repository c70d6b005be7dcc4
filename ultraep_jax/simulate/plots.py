"""Figures of the paper's evaluation and of scaling; needs the extra ``paper``."""

import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ultraep_jax.simulate.paper import Planner, Report, Skewed
from ultraep_jax.simulate.scaling import Point

if TYPE_CHECKING:
  from matplotlib.axes import Axes
  from matplotlib.figure import Figure

_COLORS = {
  "none": "#b0413e",
  "eplb": "#d98e32",
  "lplb": "#c9b037",
  "eplb+": "#6b8fb5",
  "quota": "#2f6b4f",
  "quota (time)": "#7fb069",
}
_DPI = 130


def save(report: Report, scaling: Sequence[Point], folder: pathlib.Path) -> list[pathlib.Path]:
  """Writes all figures as PNG and returns their paths.

  Raises:
    ImportError: Matplotlib is not installed; says which extra has it.
  """
  folder.mkdir(parents=True, exist_ok=True)
  figures = {
    "paper": _paper(report),
    "planner": _planner(report.planners, report.skews),
  }
  if scaling:
    figures["scaling"] = _scaling(scaling)
  paths = []
  for name, figure in figures.items():
    paths.append(folder / f"{name}.png")
    figure.savefig(paths[-1], dpi=_DPI)
  return paths


def figure(columns: int, width: float, height: float, rows: int = 1) -> "tuple[Figure, list[Axes]]":
  """A figure with axes side by side, row by row, without any global state.

  Raises:
    ImportError: Matplotlib is not installed.
  """
  try:
    from matplotlib.figure import Figure
  except ImportError as error:
    raise ImportError("plots need Matplotlib: pip install 'ultraep-jax[paper]'") from error
  made = Figure(figsize=(width, height), layout="constrained")
  axes = [made.add_subplot(rows, columns, i + 1) for i in range(rows * columns)]
  for ax in axes:
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", color="#e4e4e4", linewidth=0.8)
    ax.set_axisbelow(True)
  return made, axes


def _paper(report: Report) -> "Figure":
  """Bars are ours, with bands; diamonds are published."""
  made, (left, right) = figure(2, 14, 4.6)
  cases = list(dict.fromkeys(row.case for row in report.rows))
  names = list(_COLORS)
  width = 0.8 / len(names)
  for row in report.rows:
    if row.strategy not in names:
      continue
    x = cases.index(row.case) + (names.index(row.strategy) - (len(names) - 1) / 2) * width
    color = _COLORS[row.strategy]
    label = row.strategy if row.case == cases[0] else None
    for ax, value, other in (
      (left, row.imbalance, row.published_imbalance),
      (right, row.share, row.published_share),
    ):
      error = [[value.mean - value.low], [value.high - value.mean]]
      ax.bar(x, value.mean, 0.9 * width, color=color, label=label, yerr=error)
      if other is not None:
        ax.plot(x, other, "D", color="black", markersize=3.5, markerfacecolor="white")
  left.plot([], [], "D", color="black", markersize=3.5, markerfacecolor="white", label="published")
  left.set_ylim(bottom=0.9)
  left.set_title("Busiest over mean rank after balancing", loc="left")
  right.set_title("Throughput over that of even loads", loc="left")
  for ax in (left, right):
    ax.set_xticks(range(len(cases)), [_wrap(case) for case in cases], fontsize=7)
  left.legend(frameon=False, fontsize=8, ncols=2)
  return made


def _wrap(case: str) -> str:
  words = case.split()
  return f"{words[0]}\n{' '.join(words[1:-1])}\n{words[-1]}"


def _planner(planners: Sequence[Planner], skews: Sequence[Skewed]) -> "Figure":
  made, axes = figure(4, 15, 3.6)
  for name in ("eplb+", "quota"):
    rows = [row for row in planners if row.strategy == name]
    slots = [row.slots for row in rows]
    color = _COLORS[name]
    axes[0].plot(slots, [row.imbalance for row in rows], "o-", color=color, label=name)
    axes[1].plot(slots, [row.replicas for row in rows], "o-", color=color, label=name)
    axes[2].plot(slots, [row.direct for row in rows], "o--", color=color, label=f"{name}, direct")
    axes[2].plot(slots, [row.fan_out for row in rows], "o-", color=color, label=f"{name}, relayed")
  for ax, title in zip(
    axes, ("Busiest over mean rank", "Copies", "Copies of the busiest sender"), strict=False
  ):
    ax.set_title(title, loc="left")
    ax.set_xlabel("replica slots of a rank")
    ax.set_xticks(sorted({row.slots for row in planners}))
    ax.set_ylim(bottom=0.95 if ax is axes[0] else 0)
    ax.legend(frameon=False, fontsize=8)
  before = [row.before for row in skews]
  for label, values, style in (
    ("direct", [row.direct for row in skews], "o--"),
    ("relay", [row.relay for row in skews], "o-"),
    ("direct, published", [row.published[0] for row in skews], "D--"),
    ("relay, published", [row.published[1] for row in skews], "D-"),
  ):
    color = "#888888" if "published" in label else _COLORS["quota"]
    axes[3].plot(before, [1e3 * v for v in values], style, color=color, label=label, markersize=4)
  axes[3].set_title("Weight distribution, ms", loc="left")
  axes[3].set_xlabel("busiest over mean rank before")
  axes[3].set_ylim(bottom=0)
  axes[3].legend(frameon=False, fontsize=8)
  return made


def _scaling(points: Sequence[Point]) -> "Figure":
  made, (share, imbalance, cost) = figure(3, 15, 4)
  styles = {"groups": "-", "wide": "--"}
  markers = {size: "os^Dv"[i % 5] for i, size in enumerate(sorted({_size(p) for p in points}))}
  series: dict[tuple[str, str, int], list[Point]] = {}
  for point in points:
    series.setdefault((point.strategy, point.kind, _size(point)), []).append(point)
  for (strategy, kind, size), rows in series.items():
    ranks = [row.ranks for row in rows]
    style = f"{markers[size]}{styles[kind]}"
    label = f"{strategy}, {kind}, {size}"
    kwargs = {"color": _COLORS[strategy], "markersize": 4, "label": label}
    share.plot(ranks, [row.share for row in rows], style, **kwargs)
    imbalance.plot(ranks, [row.imbalance for row in rows], style, **kwargs)
    cost.plot(ranks, [row.seconds for row in rows], style, **kwargs)
  for ax, title in (
    (share, "MoE throughput over that of even loads"),
    (imbalance, "Busiest over mean rank of a group"),
    (cost, "Seconds to simulate 50 microbatches"),
  ):
    ax.set_xscale("log", base=2)
    ax.set_xticks([8, 64, 512, 2560], ["8", "64", "512", "2560"])
    ax.set_xlabel("ranks (solid: groups of one domain; dashed: one wide group)", fontsize=8)
    ax.set_title(title, loc="left")
  cost.set_yscale("log")
  share.legend(frameon=False, fontsize=7, loc="center", ncols=2, bbox_to_anchor=(0.5, 0.62))
  return made


def _size(point: Point) -> int:
  """The series of a point: sizes below a domain belong to domains of 64."""
  return point.domain_size if point.domain_size >= 64 else 64
