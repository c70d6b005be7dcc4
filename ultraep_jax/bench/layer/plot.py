"""The figure of the bench of a layer: times over that of forced equal loads."""

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ultraep_jax.figures import COLORS, LABELS, figure, legend_above

if TYPE_CHECKING:
  from matplotlib.figure import Figure

_ORDER = ("none", "eplb", "quota", "quota-time", "plain", "tuned")


def draw(rows: Sequence[Mapping[str, Any]]) -> "Figure":
  """A column for each shape and a row for each pass; a group of bars a ratio, a bar a variant.

  Args:
    rows: of the bench, with ``of_ideal``.

  Raises:
    ImportError: Matplotlib is not installed.
    ValueError: no row has a time of ``ideal`` beside it.
  """
  drawn = [row for row in rows if row["of_ideal"] is not None and row["variant"] != "ideal"]
  if not drawn:
    raise ValueError("rows: expected times of a variant beside those of ideal, got none")
  shapes = list(dict.fromkeys(row["shape"] for row in drawn))
  passes = list(dict.fromkeys(row["pass"] for row in drawn))
  ratios = sorted({row["ratio"] for row in drawn})
  variants = [v for v in _ORDER if any(row["variant"] == v for row in drawn)]
  width = 0.8 / len(variants)
  sizes = 1.8 + 4.2 * len(shapes), 0.4 + 3.2 * len(passes)
  made, axes = figure(len(shapes), *sizes, rows=len(passes))
  for ax, (direction, shape) in zip(axes, itertools.product(passes, shapes), strict=True):
    for i, variant in enumerate(variants):
      mine = [
        row
        for row in drawn
        if (row["shape"], row["pass"], row["variant"]) == (shape, direction, variant)
      ]
      offset = (i - (len(variants) - 1) / 2) * width
      places = [ratios.index(row["ratio"]) + offset for row in mine]
      over = [1 / row["of_ideal"] for row in mine]
      ax.bar(places, over, 0.9 * width, color=COLORS[variant], label=LABELS[variant])
    ax.axhline(1.0, color="black", linewidth=0.8)
    ax.set_xticks(range(len(ratios)), [f"{ratio:g}" for ratio in ratios])
    ax.set_xlabel("busiest over mean rank, as routed")
    ax.set_title(f"{shape}, {direction}", loc="left")
    if shape == shapes[0]:
      ax.set_ylabel("time over that of equal loads")
  legend_above(made, axes[0])
  return made
