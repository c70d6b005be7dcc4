"""Draws the charts of the documentation: ``python tests/make_figures.py``.

They are of tables in ``docs/results.md`` and ``docs/lab/layer.md``, where alone the numbers stand.
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
  models = many_models((ROOT / "docs/results.md").read_text())
  draw(models).savefig(ROOT / "docs/images/many_models.png", dpi=DPI)
  layers = layer_times((ROOT / "docs/lab/layer.md").read_text())
  plot.draw(layers).savefig(ROOT / "docs/images/layer_h200.png", dpi=DPI)


def many_models(text: str) -> list[tuple[str, str, list[float]]]:
  """Model, loads and three times, ms, of each row of the table of one layer on two GPUs.

  Rows of another commit, which stands behind the model's name, are left out.
  """
  table = text[text.index("| forward, ms | independent") :].split("\n\n")[0]
  cells = [line.replace("*", "").split(" | ")[:3] for line in table.splitlines()[2:]]
  return [
    (row[0].removeprefix("| "), loads, [float(x) for x in times.split(" / ")])
    for column, loads in enumerate(("independent", "zipf"), 1)
    for row in cells
    if "," not in row[0]
    for times in [re.sub(r" \(.*?\)", "", row[column])]
  ]


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
  made, axes = figure(len(kinds), 9, 3.8)
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
        bars, [f"{times[i]:#.3g} ms" for _, times in mine], fontsize=6.5, padding=2, rotation=90
      )
    names = [model for model, _ in mine]
    ax.set_xticks(range(len(mine)), names, fontsize=8, rotation=20, ha="right")
    ax.set_title(f"Time over that of equal loads, {kind} loads", loc="left", fontsize=10)
    ax.set_ylim(0, 2)
    ax.margins(x=0.02)
  legend_above(made, axes[0])
  return made


if __name__ == "__main__":
  main()
