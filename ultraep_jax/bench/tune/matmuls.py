"""What of the matmuls ``bench tune`` tries: schedules, the order of tiles, and the ring."""

import dataclasses
import functools
from collections.abc import Mapping

from pallas_kernels import EVEN, MatmulTuning, Tile, even_tiles_pay, short_comes_last
from ultraep_jax.bench.contest import Contest
from ultraep_jax.bench.kernels.matmul_problems import Problem

_DEFERRED = MatmulTuning("deferred")
_IN_TURNS = MatmulTuning("in_turns", stages=6)
# Tiles whose columns divide, that read memory less often, or that have few rows too many.
_TILES = {
  "128 x 256": MatmulTuning(rows=128, cols=256),
  "128 x 192": MatmulTuning(rows=128, cols=192),
  "256 x 128": MatmulTuning(rows=256, cols=128),
  "256 x 192": MatmulTuning(rows=256, cols=192, stages=3),
  "in turns": _IN_TURNS,
  "in turns, 128 x 192": MatmulTuning("in_turns", rows=128, cols=192),
}
_FEW = {
  "even": MatmulTuning(even=True),
  "together": MatmulTuning(),
  "deferred": _DEFERRED,
  **_TILES,
  # A narrower band's weights stay in the cache, a wider one reads the rows less often.
  "deferred, band 1024": dataclasses.replace(_DEFERRED, band=1024),
  "deferred, band 4096": dataclasses.replace(_DEFERRED, band=4096),
  "short last": MatmulTuning(short_last=True),
  "by slot": MatmulTuning(short_last=False),
}
_FEW_OF_WGRAD = {
  **_TILES,
  "in turns, 192 x 128": MatmulTuning("in_turns", rows=192, cols=128),
  "in turns, 64 x 256": MatmulTuning("in_turns", rows=64, cols=256),
  "band 1024": MatmulTuning(band=1024),
  "band 4096": MatmulTuning(band=4096),
}
_MORE = {
  "128 x 384": MatmulTuning(rows=128, cols=384, stages=3),  # of two weights
  "band 1024": MatmulTuning(band=1024),
  "band 4096": MatmulTuning(band=4096),
  "in turns, band 4096": dataclasses.replace(_IN_TURNS, band=4096),
  "in turns, band 1024": dataclasses.replace(_IN_TURNS, band=1024),
  "bare": MatmulTuning(auto_barriers=False),
  "deferred, bare": dataclasses.replace(_DEFERRED, auto_barriers=False),
  "in turns, bare": dataclasses.replace(_IN_TURNS, auto_barriers=False),
  "in turns, 5 stages, 4 buffers": dataclasses.replace(_IN_TURNS, stages=5, buffers=4),
  "pairs": MatmulTuning(cluster=2),
  "deferred, pairs": dataclasses.replace(_DEFERRED, cluster=2),
  "in turns, pairs": dataclasses.replace(_IN_TURNS, cluster=2),
}


def candidates(problem: Problem, more: bool) -> dict[str, MatmulTuning]:
  """Tunings to try beside the kernel's own, by a label; none leaves open whether tiles are even."""
  wgrad = problem.operation.startswith("wgrad")
  weights = 2 if problem.operation.startswith("gated") else 1
  tried, known = {}, [_as_laid_out(problem, problem.default)]
  for label, tuning in ((_FEW_OF_WGRAD if wgrad else _FEW) | (_MORE if more else {})).items():
    if wgrad and tuning.schedule == "deferred":
      continue  # it has no other
    if problem.operation.endswith("beside") and tuning.cluster > 1:
      continue
    tile = problem.tile(tuning)
    if tuning.rows not in (None, tile.rows) or tuning.cols not in (None, tile.cols * weights):
      continue  # the result has no room for it
    if tuning.band > problem.default.band >= problem.widths[-1]:
      continue  # all columns are in one band already
    if not wgrad:
      tuning = dataclasses.replace(tuning, even=bool(tuning.even))
    if (laid_out := _as_laid_out(problem, tuning)) not in known:
      known.append(laid_out)
      tried[label] = tuning
  return tried


def _as_laid_out(problem: Problem, tuning: MatmulTuning) -> tuple[Tile, MatmulTuning]:
  """What of a tuning is in use."""
  slots = problem.home + problem.replica
  short_last, even = tuning.short_last, tuning.even
  if short_last is None:
    short_last = short_comes_last(problem.rows, slots, problem.slot_bytes)
  if problem.replicas_arrive:
    short_last = False  # whatever is asked for
  if even is None:
    even = even_tiles_pay(problem.rows, slots)
  if problem.operation.startswith("wgrad"):
    short_last = even = None
  if even:
    tuning = dataclasses.replace(EVEN, blocks=tuning.blocks)
    return problem.tile(tuning), tuning
  rest = dataclasses.replace(tuning, rows=None, cols=None, short_last=short_last, even=even)
  return problem.tile(tuning), rest


def contest(problem: Problem, tunings: Mapping[str, MatmulTuning]) -> Contest:
  """The kernel of a problem in several tunings. The first one's result is the reference."""
  kernel = problem.parts().kernel
  return problem.contest(
    {label: functools.partial(kernel, tuning=tuning) for label, tuning in tunings.items()}
  )
