"""What of the matmuls ``bench tune`` tries: schedules, the order of tiles, and the ring."""

import dataclasses
import functools
from collections.abc import Mapping

from pallas_kernels import MatmulTuning
from ultraep_jax.bench.contest import Contest
from ultraep_jax.bench.kernels.matmul_problems import Problem

_DEFERRED = MatmulTuning("deferred")
_IN_TURNS = MatmulTuning("in_turns", stages=6)
_FEW = {
  "deferred": _DEFERRED,
  "in turns": _IN_TURNS,
  # A narrower band's weights stay in the cache, a wider one reads the rows less often.
  "deferred, band 1024": dataclasses.replace(_DEFERRED, band=1024),
  "deferred, band 4096": dataclasses.replace(_DEFERRED, band=4096),
}
_FEW_OF_WGRAD = {
  "band 1024": MatmulTuning(band=1024),
  "band 4096": MatmulTuning(band=4096),
  "pairs": MatmulTuning(cluster=2),
  "bare": MatmulTuning(auto_barriers=False),
}
_MORE = {
  "band 1024": MatmulTuning(band=1024),
  "band 4096": MatmulTuning(band=4096),
  "in turns, band 4096": dataclasses.replace(_IN_TURNS, band=4096),
  "in turns, band 1024": dataclasses.replace(_IN_TURNS, band=1024),
  "deferred, bare": dataclasses.replace(_DEFERRED, auto_barriers=False),
  "in turns, bare": dataclasses.replace(_IN_TURNS, auto_barriers=False),
  "in turns, 5 stages, 4 buffers": dataclasses.replace(_IN_TURNS, stages=5, buffers=4),
  "deferred, pairs": dataclasses.replace(_DEFERRED, cluster=2),
  "in turns, pairs": dataclasses.replace(_IN_TURNS, cluster=2),
}


def candidates(problem: Problem, more: bool) -> dict[str, MatmulTuning]:
  """Tunings to try beside the kernel's own, by a label."""
  tried = {}
  wgrad = problem.operation.startswith("wgrad")
  few = _FEW_OF_WGRAD if wgrad else _FEW
  for label, tuning in (few | (_MORE if more else {})).items():
    if wgrad and tuning.schedule != "together":
      continue  # it has no other
    if problem.operation.endswith("beside") and tuning.cluster > 1:
      continue
    if tuning.band > problem.default.band >= problem.widths[-1]:
      continue  # all columns are in one band already
    tried[label] = dataclasses.replace(tuning, waves=problem.default.waves)
  return tried


def contest(problem: Problem, tunings: Mapping[str, MatmulTuning]) -> Contest:
  """The kernel of a problem in several tunings, of which the first is right."""
  kernel = problem.parts().kernel
  return problem.contest(
    {label: functools.partial(kernel, tuning=tuning) for label, tuning in tunings.items()}
  )
