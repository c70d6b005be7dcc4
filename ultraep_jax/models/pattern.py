"""Which layers of a model run in one loop: those whose kinds repeat."""

from collections.abc import Hashable, Sequence

_LONGEST = 8  # kinds of a cycle


def cycles(kinds: Sequence[Hashable]) -> list[list[tuple[int, ...]]]:
  """Cuts a sequence into runs, each a cycle of kinds one or more times.

  Every place of a cycle costs one more layer to compile. Of the cuts with the fewest it takes one
  with the fewest runs.

  Args:
    kinds: of the layers, in order.

  Returns:
    For each run, for each place of its cycle, the indices of the layers.

  >>> cycles("DDDMMMM")
  [[(0, 1, 2)], [(3, 4, 5, 6)]]
  >>> cycles("LLLFLLLF")
  [[(0, 4), (1, 5), (2, 6), (3, 7)]]
  """
  count = len(kinds)
  # From the back: places and runs of the best cut behind each layer, and its first run's cycle.
  best: list[tuple[int, int, int, int]] = [(0, 0, 0, 0)] * (count + 1)
  repeats = dict.fromkeys(range(1, _LONGEST + 1), 0)  # layers that equal those a cycle on
  for i in reversed(range(count)):
    options = []
    for length in repeats:
      same = i + length < count and kinds[i] == kinds[i + length]
      repeats[length] = repeats[length] + 1 if same else 0
      times = 1 + repeats[length] // length
      if length == 1 or times > 1:
        places, runs, *_ = best[i + length * times]
        options.append((places + length, runs + 1, length, times))
    best[i] = min(options)
  runs, first = [], 0
  while first < count:
    _, _, length, times = best[first]
    runs.append([tuple(range(first + i, first + length * times, length)) for i in range(length)])
    first += length * times
  return runs
