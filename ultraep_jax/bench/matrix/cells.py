"""The cells of the matrix: a model's shape, tokens a rank, a load and a pass; all or a choice."""

import collections
import itertools
import random
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

TOKENS = (32, 128, 512, 2048, 8192, 16384)
HIGHEST = "max"
RATIOS = ("1", "1.3", "1.6", HIGHEST)
LOADS = ("zipf", "flat", "independent")
PASSES = ("forward", "train")
WEIGHTS = ("bfloat16", "float32")


class Group(NamedTuple):
  """Cells that share compiled programs, since a load is data."""

  shape: str
  tokens: int
  direction: str


class Cell(NamedTuple):
  """One load of a group: how uneven the ranks are, and how the load lies inside them."""

  group: Group
  ratio: str
  loads: str


def choose(
  shapes: Sequence[str],
  tokens: Sequence[int],
  ratios: Sequence[str],
  loads: Sequence[str],
  passes: Sequence[str],
  *,
  pairwise: bool,
) -> dict[Group, list[Cell]]:
  """Cells by group.

  Args:
    shapes: names of models.
    tokens: tokens a rank.
    ratios: of ``RATIOS`` or numbers, busiest over mean rank.
    loads: of ``LOADS``.
    passes: of ``PASSES``.
    pairwise: a few cells in which every two of shape, tokens, ratio, loads and pass meet, most
      often two of a group, which takes longer to compile than to measure; otherwise all.

  >>> groups = choose(["a", "b"], [32, 64], RATIOS, LOADS, PASSES, pairwise=True)
  >>> len(groups), sum(map(len, groups.values()))
  (4, 12)
  """
  if pairwise:
    return _pairwise(shapes, tokens, ratios, loads, passes)
  groups = [Group(s, t, d) for s in shapes for t in tokens for d in passes]
  return {
    group: [Cell(group, ratio, kind) for ratio in ratios for kind in loads] for group in groups
  }


def _pairwise(
  shapes: Sequence[str],
  tokens: Sequence[int],
  ratios: Sequence[str],
  loads: Sequence[str],
  passes: Sequence[str],
) -> dict[Group, list[Cell]]:
  """Cells that meet new pairs of values, or those met least."""
  met: collections.Counter[Hashable] = collections.Counter()
  chosen: dict[Group, list[Cell]] = {}

  def pairs(cell: Cell) -> list[Hashable]:
    return list(itertools.combinations(enumerate((*cell.group, cell.ratio, cell.loads)), 2))

  def add(groups: Iterable[Group]) -> None:
    def gain(cell: Cell) -> tuple[int, bool, int]:
      counts = [met[pair] for pair in pairs(cell)]
      return counts.count(0), cell.group in chosen, -sum(counts)

    cells = [Cell(g, ratio, kind) for g in groups for ratio in ratios for kind in loads]
    new = [cell for cell in cells if cell not in chosen.get(cell.group, [])]
    if new:
      best = max(new, key=gain)
      met.update(pairs(best))
      chosen.setdefault(best.group, []).append(best)

  sizes = list(itertools.product(shapes, tokens))
  random.Random(0).shuffle(sizes)  # so that the first few differ in everything
  for size in sizes:
    add(Group(*size, direction) for direction in passes)
  for group in list(chosen):
    add([group])
  every = [Group(*size, direction) for size in sizes for direction in passes]
  all_pairs = {
    p for g in every for ratio in ratios for kind in loads for p in pairs(Cell(g, ratio, kind))
  }
  while all_pairs - met.keys():
    add(every)
  return chosen
