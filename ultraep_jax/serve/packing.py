"""Which waiting requests run together, and where in the rows they lie: pure host code."""

import heapq
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ultraep_jax.packed import PackedBatch
from ultraep_jax.serve.config import EngineConfig


class Packing(NamedTuple):
  """The places of some of the waiting requests.

  Attributes:
    bucket: T, tokens of a row.
    taken: which they are, ascending: their numbers among those that wait.
    row: of each request.
    start: of each request, its first token's index in the row.
    slot: of each request, its number among those of its row.
  """

  bucket: int
  taken: tuple[int, ...]
  row: tuple[int, ...]
  start: tuple[int, ...]
  slot: tuple[int, ...]

  def split[T](self, waiting: Sequence[T]) -> tuple[list[T], list[T]]:
    """Of all that wait, those that are taken and those that are left, in order."""
    taken = set(self.taken)
    parts: tuple[list[T], list[T]] = ([], [])
    for i, each in enumerate(waiting):
      parts[i not in taken].append(each)
    return parts


def pack(lengths: Sequence[int], rows: int, config: EngineConfig) -> Packing:
  """Packs the longest run of first requests that fits, and later ones into what it leaves empty.

  Those that overtake put nobody into a later batch: the oldest request that does not fit would
  not have run now, and is the first of the next one.

  Of the run longer requests are placed first, each into the row with the fewest tokens: rows, and
  so devices, get about the same work, and the bucket is small. Later ones, which do not make the
  bucket larger, go where they leave the least room. Within a row requests keep their order.

  Args:
    lengths: tokens of the waiting requests, oldest first; at least one request, each of 1 to
      ``config.buckets[-1]`` tokens. No more are looked at than B rows can have.
    rows: B.
    config: buckets, alignment and requests per row.

  >>> pack([5, 3, 8, 2], 2, EngineConfig(buckets=(8, 16), alignment=4, max_requests=3))
  Packing(bucket=16, taken=(0, 1, 2, 3), row=(0, 0, 1, 1), start=(0, 8, 0, 8), slot=(0, 1, 0, 1))
  >>> pack([5, 8, 3], 1, EngineConfig(buckets=(12,), alignment=4, max_requests=3)).taken
  (0, 2)
  """
  largest = config.buckets[-1]
  sizes = [aligned(n, config.alignment) for n in lengths[: rows * config.max_requests]]
  within = sum(total <= rows * largest for total in itertools.accumulate(sizes))
  # Whether a run fits need not be monotone in its length: what is returned was seen to fit.
  best, low, high = _place(sizes[:within], rows, config), 1, within
  if best is None:
    best, high = _place(sizes[:1], rows, config), within - 1
    while low < high:
      middle = (low + high + 1) // 2
      placed = _place(sizes[:middle], rows, config)
      if placed is None:
        high = middle - 1
      else:
        best, low = placed, middle
  assert best is not None, f"lengths: expected at most {largest}, got {lengths[0]}"
  taken, start, slot = list(range(len(best))), [], []
  used, count = [0] * rows, [0] * rows

  def put(row: int, size: int) -> None:
    start.append(used[row])
    slot.append(count[row])
    used[row] += size
    count[row] += 1

  for row, size in zip(best, sizes, strict=False):
    put(row, size)
  bucket = next(bucket for bucket in config.buckets if bucket >= max(used))
  smallest = aligned(1, config.alignment)
  for i in range(len(best), len(sizes)):
    open_rows = [row for row in range(rows) if count[row] < config.max_requests]
    fits = [row for row in open_rows if used[row] + sizes[i] <= bucket]
    if fits:
      taken.append(i)
      best.append(max(fits, key=lambda row: used[row]))
      put(best[-1], sizes[i])
    elif not any(used[row] + smallest <= bucket for row in open_rows):
      break
  return Packing(bucket, tuple(taken), tuple(best), tuple(start), tuple(slot))


def fill(
  prompts: Sequence[np.ndarray], packing: Packing, rows: int, max_requests: int
) -> PackedBatch:
  """The batch of a packing's requests, in NumPy arrays.

  Args:
    prompts: tokens of each, ``[n]`` int32.
    packing: their places.
    rows: B.
    max_requests: R.
  """
  shape = (rows, packing.bucket)
  token_BT, position_BT, segment_BT = (np.zeros(shape, np.int32) for _ in range(3))
  last_BR = np.full((rows, max_requests), -1, np.int32)
  places = zip(prompts, packing.row, packing.start, packing.slot, strict=True)
  for prompt, row, start, slot in places:
    here = slice(start, start + len(prompt))
    token_BT[row, here] = prompt
    position_BT[row, here] = np.arange(len(prompt), dtype=np.int32)
    segment_BT[row, here] = slot + 1
    last_BR[row, slot] = here.stop - 1
  return PackedBatch(token_BT, position_BT, segment_BT, last_BR)  # type: ignore[arg-type]


def aligned(length: int, alignment: int) -> int:
  """The tokens that a request takes in its row."""
  return -(-length // alignment) * alignment


def _place(sizes: Sequence[int], rows: int, config: EngineConfig) -> list[int] | None:
  """The row of each request, or None if one does not fit."""
  room = config.buckets[-1]
  free = [(0, row) for row in range(rows)]  # tokens, row: a heap
  count, place = [0] * rows, [0] * len(sizes)
  for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
    used, row = heapq.heappop(free)
    if used + sizes[i] > room:
      return None
    place[i] = row
    count[row] += 1
    if count[row] < config.max_requests:
      heapq.heappush(free, (used + sizes[i], row))
  return place
