"""From 8 to 2560 ranks: what the busiest group costs all, and what the simulation itself costs."""

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ultraep_jax.devices.device import Device
from ultraep_jax.simulate.cost import Setting
from ultraep_jax.simulate.models import MODELS
from ultraep_jax.simulate.run import Outcome, simulate
from ultraep_jax.simulate.traffic import Traffic, generate_totals

RANKS = (8, 16, 64, 128, 256, 512, 1280, 2560)
STRATEGIES = ("none", "eplb+", "quota")
# Home experts of a rank, which a rank of 72 cannot have of a published model.
EXPERTS_PER_RANK = 4
# Over thousands of ranks, drift and noise alone bring the busiest to 2.5 times the mean.
TRAFFIC = {
  "groups": Traffic(imbalance=2.0, drift=0.2, drift_steps=20, noise=0.2),
  "wide": Traffic(imbalance=3.0, drift=0.2, drift_steps=20, noise=0.2),
}


class Point(NamedTuple):
  """One size.

  Attributes:
    ranks: all ranks.
    domain_size: ranks of a domain.
    kind: ``"groups"``: each domain is an expert group, and a training step waits for the slowest;
      ``"wide"``: all ranks are one expert group, and copies stay in their domain.
    strategy: its name.
    share: throughput of the MoE layers over that of even loads.
    imbalance: busiest over mean rank of a group, mean over microbatches.
    floor: what the domains allow, ``"wide"`` alone; else 1.
    seconds: that the simulation of this strategy took, compilation excluded.
  """

  ranks: int
  domain_size: int
  kind: str
  strategy: str
  share: float
  imbalance: float
  floor: float
  seconds: float


def sweep(
  ranks: Sequence[int] = RANKS,
  *,
  domain_size: int = 64,
  kind: str = "groups",
  microbatches: int = 50,
  device: Device | None = None,
  strategies: Sequence[str] = STRATEGIES,
  seed: int = 0,
  progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> list[Point]:
  """Simulates one MoE layer of DeepSeek-V3's widths with four experts a rank, at every size.

  Args:
    ranks: sizes, each up to ``domain_size`` or a multiple of it.
    domain_size: ranks of a domain.
    kind: ``"groups"`` or ``"wide"``, as in ``Point``.
    microbatches: of one step.
    device: its description; ``None``: the paper's, as far as it is known.
    strategies: what to compare with even loads.
    seed: of the loads.
    progress: wraps the loop over sizes, e.g. ``tqdm``.

  Raises:
    ValueError: a size is no multiple of the domain.
  """
  if kind not in TRAFFIC:
    raise ValueError(f"kind: expected one of {tuple(TRAFFIC)}, got {kind!r}")
  machine = Device.load("nvl64") if device is None else device
  points = []
  for count in progress(ranks):
    size = min(count, domain_size)
    if count % size:
      raise ValueError(f"ranks: expected multiples of {domain_size}, got {count}")
    group = count if kind == "wide" else size
    experts = EXPERTS_PER_RANK * group
    model = dataclasses.replace(MODELS["DeepSeek-V3"], num_experts=experts)
    setting = Setting(model=model, device=machine, num_ranks=group, domain_size=size)
    loads = generate_totals(
      seed,
      TRAFFIC[kind],
      num_experts=experts,
      num_ranks=group,
      tokens=setting.tokens,
      top_k=model.top_k,
      steps=microbatches,
      layers=count // group,
    )
    for name in strategies:
      simulate(loads[:1], setting, (name,))  # compiles
      start = time.perf_counter()
      outcomes = simulate(loads, setting, (name, "ideal"))
      seconds = time.perf_counter() - start
      outcome = outcomes[name]
      points.append(
        Point(
          ranks=count,
          domain_size=size,
          kind=kind,
          strategy=name,
          share=_share(outcome, outcomes["ideal"]),
          imbalance=float(outcome.imbalance.mean()),
          floor=_floor(loads, count // size if kind == "wide" else 1),
          seconds=seconds,
        )
      )
  return points


def _share(outcome: Outcome, ideal: Outcome) -> float:
  """Groups run their microbatches on their own and meet at the end of the step."""
  return float(ideal.seconds.sum(axis=0).max() / outcome.seconds.sum(axis=0).max())


def _floor(loads: np.ndarray, domains: int) -> float:
  domain_load = loads.reshape(*loads.shape[:-1], domains, -1).sum(axis=-1)
  return float((domain_load.max(axis=-1) / domain_load.mean(axis=-1)).mean())
