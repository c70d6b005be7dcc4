"""The cells of the matrix: a model's shape, tokens a rank, a load and a pass; all or a choice."""

import random
from collections.abc import Sequence
from typing import NamedTuple

from ultraep_jax.bench.covering import covering_array

TOKENS = (32, 128, 512, 2048, 8192, 16384)
HIGHEST = "max"
RATIOS = ("1", "1.3", "1.6", HIGHEST)
LOADS = ("zipf", "flat", "independent")
PASSES = ("forward", "train")


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
    pairwise: a few groups in which every two of shape, tokens and pass meet, with all loads of
      each; otherwise all.

  >>> groups = choose(["a", "b"], [32, 64], ["1"], ["zipf"], PASSES, pairwise=True)
  >>> len(groups), sum(map(len, groups.values()))
  (4, 4)
  """
  factors = {"shape": shapes, "tokens": tokens, "direction": passes}
  if pairwise:
    chosen, _ = covering_array(factors, lambda case: True)
    groups = [Group(**case) for case in chosen]  # pyright: ignore[reportArgumentType]
    random.Random(0).shuffle(groups)  # so that the first few differ in everything
  else:
    groups = [Group(s, t, d) for s in shapes for t in tokens for d in passes]
  return {
    group: [Cell(group, ratio, kind) for ratio in ratios for kind in loads] for group in groups
  }
