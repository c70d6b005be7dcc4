"""Draws the charts of the documentation: ``python tests/make_figures.py``.

The charts of ``docs/lab/layer.md`` are of the tables there, so that no number stands in two places.
``ultraep demo``, ``paper`` and the benches draw the others themselves.
"""

import argparse
import pathlib
import re
from typing import Any

from ultraep_jax.bench.layer import plot
from ultraep_jax.figures import COLORS, DPI, LABELS, figure, legend_above

ROOT = pathlib.Path(__file__).parents[1]
STRATEGIES = ("none", "quota", "ideal")


def main() -> None:
  """Writes ``docs/images/many_models.png`` and ``layer_h200.png``."""
  argparse.ArgumentParser(description=__doc__).parse_args()
  text = (ROOT / "docs/lab/layer.md").read_text()
  draw(many_models(text)).savefig(ROOT / "docs/images/many_models.png", dpi=DPI)
  plot.draw(layer_times(text)).savefig(ROOT / "docs/images/layer_h200.png", dpi=DPI)


def many_models(text: str) -> list[tuple[str, str, list[float]]]:
  """Model, loads and milliseconds of each row of the table of many models that has all three."""
  section = text.split("## Many models, default settings")[1].split("\n## ")[0]
  rows = re.findall(r"^\| ([^,|]+), (zipf|independent) \| (.+?) \|$", section, re.MULTILINE)
  cells = [(model, loads, rest.replace("*", "").split(" | ")) for model, loads, rest in rows]
  return [(model, loads, [float(row[i]) for i in (0, 2, 3)]) for model, loads, row in cells]


def layer_times(text: str) -> list[dict[str, Any]]:
  """Rows of the bench of a layer, from the laboratory's first table of four imbalances."""
  table = text[text.index("| none / **quota** / ideal, ms") :].split("\n\n")[0]
  header, *lines = table.splitlines()
  ratios = [float(cell) for cell in header.split("|")[2:-1]]
  rows = []
  for line in lines[1:]:
    title, *cells = (cell.strip() for cell in line.split("|")[1:-1])
    shape, _, direction = title.partition(", ")
    for ratio, cell in zip(ratios, cells, strict=True):
      times = dict(zip(STRATEGIES, map(float, cell.replace("*", "").split(" / ")), strict=True))
      rows += [
        {
          "shape": shape,
          "pass": direction,
          "ratio": ratio,
          "variant": variant,
          "of_ideal": times["ideal"] / ms,
        }
        for variant, ms in times.items()
      ]
  return rows


def draw(rows: list[tuple[str, str, list[float]]]):
  """Times over those of equal loads, a panel for each kind of loads."""
  kinds = list(dict.fromkeys(loads for _, loads, _ in rows))
  made, axes = figure(len(kinds), 9, 3.6)
  for ax, kind in zip(axes, kinds, strict=True):
    mine = [(model, times) for model, loads, times in rows if loads == kind]
    for i, strategy in enumerate(STRATEGIES):
      places = [place + (i - 1) * 0.27 for place in range(len(mine))]
      bars = ax.bar(
        places,
        [times[i] / times[-1] for _, times in mine],
        0.25,
        color=COLORS[strategy],
        label=LABELS[strategy],
      )
      ax.bar_label(
        bars, [f"{times[i]:.3g} ms" for _, times in mine], fontsize=6.5, padding=2, rotation=90
      )
    ax.set_xticks(range(len(mine)), [model.partition(" (")[0] for model, _ in mine], fontsize=9)
    ax.set_title(f"Time over that of equal loads, {kind} loads", loc="left", fontsize=10)
    ax.set_ylim(0, 2.2)
    ax.margins(x=0.02)
  legend_above(made, axes[0])
  return made


if __name__ == "__main__":
  main()
