"""Covering arrays: few cases in which every pair of factor values that can occur does occur."""

import itertools
from collections.abc import Callable, Mapping, Sequence

Case = dict[str, object]


def pairs_of(case: Mapping[str, object]) -> set[tuple]:
  return {tuple(pair) for pair in itertools.combinations(sorted(case.items(), key=_name), 2)}


def covering_array(
  factors: Mapping[str, Sequence[object]], possible: Callable[[Case], bool] = lambda case: True
) -> tuple[list[Case], set[tuple]]:
  """Greedy pairwise covering array, and the pairs that it covers: all that can occur."""
  names = sorted(factors)
  cases = [
    case
    for values in itertools.product(*(factors[name] for name in names))
    if possible(case := dict(zip(names, values, strict=True)))
  ]
  covers = [pairs_of(case) for case in cases]
  wanted = set().union(*covers)
  chosen, missing = [], set(wanted)
  while missing:
    best = max(range(len(cases)), key=lambda i: len(covers[i] & missing))
    chosen.append(cases[best])
    missing -= covers[best]
  return chosen, wanted


def _name(item: tuple[str, object]) -> str:
  return item[0]
