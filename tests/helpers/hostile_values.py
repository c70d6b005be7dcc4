"""JSON with a hostile value in each of its places in turn."""

import collections
import copy
import json
import math
from collections.abc import Iterator
from typing import Any

VALUES: tuple[Any, ...] = (
  *(None, True, 0, 1, -1, 2**31, 10**400, 0.5, 1e-320, 1e308, math.nan, math.inf),
  *("", "x", [], [[]], [None], {}, {"a": []}, json.loads("[" * 500 + "]" * 500)),
)

Place = tuple[str | int, ...]


def places(value: Any) -> Iterator[Place]:
  """The keys and indices that lead to every value within an object or a list."""
  inside = value.items() if isinstance(value, dict) else enumerate(value)
  for key, below in inside:
    yield (key,)
    if isinstance(below, dict | list):
      yield from ((key, *place) for place in places(below))


def replaced(value: Any, place: Place, new: Any) -> Any:
  """A copy with another value in one place."""
  if not place:
    return new
  value = copy.copy(value)
  value[place[0]] = replaced(value[place[0]], place[1:], new)
  return value


def some_places(value: Any, each: int = 2) -> list[Place]:
  """Up to so many places of each kind: at a depth, with a key, whatever is above it."""
  seen: collections.Counter[tuple[int, str | int]] = collections.Counter()
  chosen = []
  for place in places(value):
    kind = len(place), place[-1] if isinstance(place[-1], str) else 0
    seen[kind] += 1
    if seen[kind] <= each:
      chosen.append(place)
  return chosen
