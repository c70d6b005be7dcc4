"""Figures of the paper's evaluation and of scaling; needs the extra ``paper``."""

import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ultraep_jax.figures import COLORS, DPI, LABELS, figure, legend_above, style
from ultraep_jax.files import make_folder
from ultraep_jax.simulate.paper import Planner, Report, Skewed
from ultraep_jax.simulate.scaling import Point

if TYPE_CHECKING:
  from matplotlib.figure import Figure

_SHOWN = ("none", "eplb", "lplb", "eplb+", "quota", "quota (time)")
_PUBLISHED = {"color": "black", "markersize": 3.5, "markerfacecolor": "white", "linestyle": ""}


def save(report: Report, scaling: Sequence[Point], folder: pathlib.Path) -> list[pathlib.Path]:
  """Writes all figures as PNG and returns their paths.

  Raises:
    ImportError: Matplotlib is not installed; says which extra has it.
    OSError: the folder cannot be made or written in.
  """
  make_folder(folder)
  figures = {
    "paper": _paper(report),
    "planner": _planner(report.planners, report.skews),
  }
  if scaling:
    figures["scaling"] = _scaling(scaling)
  paths = []
  for name, made in figures.items():
    paths.append(folder / f"{name}.png")
    made.savefig(paths[-1], dpi=DPI)
  return paths


def _paper(report: Report) -> "Figure":
  """Bars are ours, with bands; diamonds are published."""
  made, (left, right) = figure(2, 14, 4.6)
  cases = list(dict.fromkeys(row.case for row in report.rows))
  width = 0.8 / len(_SHOWN)
  for row in report.rows:
    if row.strategy not in _SHOWN:
      continue
    x = cases.index(row.case) + (_SHOWN.index(row.strategy) - (len(_SHOWN) - 1) / 2) * width
    color, label = COLORS[row.strategy], LABELS[row.strategy] if row.case == cases[0] else None
    for ax, value, other in (
      (left, row.imbalance, row.published_imbalance),
      (right, row.share, row.published_share),
    ):
      error = [[value.mean - value.low], [value.high - value.mean]]
      ax.bar(x, value.mean, 0.9 * width, color=color, label=label, yerr=error)
      if other is not None:
        ax.plot(x, other, "D", **_PUBLISHED)
  left.plot([], [], "D", label="published", **_PUBLISHED)
  left.set_ylim(bottom=0.9)
  left.set_title("Busiest over mean rank after balancing", loc="left")
  right.set_title("Throughput over that of equal loads", loc="left")
  for ax in (left, right):
    ax.set_xticks(range(len(cases)), [_wrap(case) for case in cases], fontsize=7)
  legend_above(made, left)
  return made


def _wrap(case: str) -> str:
  words = case.split()
  return f"{words[0]}\n{' '.join(words[1:-1])}\n{words[-1]}"


def _planner(planners: Sequence[Planner], skews: Sequence[Skewed]) -> "Figure":
  made, axes = figure(4, 15, 3.6)
  for name in ("eplb+", "quota"):
    rows = [row for row in planners if row.strategy == name]
    slots = [row.slots for row in rows]
    label = LABELS[name]
    axes[0].plot(slots, [row.imbalance for row in rows], "o-", **style(name))
    axes[1].plot(slots, [row.replicas for row in rows], "o-", **style(name))
    axes[2].plot(
      slots, [row.direct for row in rows], "o--", **style(name, label=f"{label}, direct")
    )
    axes[2].plot(
      slots, [row.fan_out for row in rows], "o-", **style(name, label=f"{label}, relayed")
    )
  for ax, title in zip(
    axes, ("Busiest over mean rank", "Copies", "Copies of the busiest sender"), strict=False
  ):
    ax.set_title(title, loc="left")
    ax.set_xlabel("replica slots of a rank")
    ax.set_xticks(sorted({row.slots for row in planners}))
    ax.set_ylim(bottom=0.95 if ax is axes[0] else 0)
    ax.legend(frameon=False, fontsize=8)
  before = [row.before for row in skews]
  for label, values, marks in (
    ("direct", [row.direct for row in skews], "o--"),
    ("relay", [row.relay for row in skews], "o-"),
    ("direct, published", [row.published[0] for row in skews], "D--"),
    ("relay, published", [row.published[1] for row in skews], "D-"),
  ):
    color = COLORS["ideal" if "published" in label else "quota"]
    axes[3].plot(before, [1e3 * v for v in values], marks, color=color, label=label, markersize=4)
  axes[3].set_title("Weight distribution, ms", loc="left")
  axes[3].set_xlabel("busiest over mean rank before")
  axes[3].set_ylim(bottom=0)
  axes[3].legend(frameon=False, fontsize=8)
  return made


def _scaling(points: Sequence[Point]) -> "Figure":
  """A row for each way to group ranks, so that no more than a line a strategy is in one place."""
  kinds = list(dict.fromkeys((point.kind, _size(point)) for point in points))
  made, axes = figure(2, 10, 0.6 + 2.6 * len(kinds), rows=len(kinds))
  for row, (kind, size) in enumerate(kinds):
    share, imbalance = axes[2 * row : 2 * row + 2]
    mine = [point for point in points if (point.kind, _size(point)) == (kind, size)]
    for strategy in dict.fromkeys(point.strategy for point in mine):
      line = [point for point in mine if point.strategy == strategy]
      ranks = [point.ranks for point in line]
      share.plot(ranks, [point.share for point in line], "o-", **style(strategy, markersize=4))
      imbalance.plot(
        ranks, [point.imbalance for point in line], "o-", **style(strategy, markersize=4)
      )
    groups = (
      f"groups of one domain of {size}" if kind == "groups" else f"one group, domains of {size}"
    )
    share.set_title(f"Throughput over that of equal loads, {groups}", loc="left", fontsize=9)
    imbalance.set_title("Busiest over mean rank of a group", loc="left", fontsize=9)
    for ax in (share, imbalance):
      ax.set_xscale("log", base=2)
      ax.set_xticks([8, 64, 512, 2560], ["8", "64", "512", "2560"])
      ax.set_xlim(7, 3000)
    imbalance.set_ylim(bottom=0.98)
  for ax in axes[-2:]:
    ax.set_xlabel("ranks")
  fullest = max(axes[::2], key=lambda ax: len(ax.get_lines()))
  legend_above(made, fullest)
  return made


def _size(point: Point) -> int:
  """The series of a point: sizes below a domain belong to domains of 64."""
  return point.domain_size if point.domain_size >= 64 else 64
