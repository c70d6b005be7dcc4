"""What the UltraEP paper published, to stand beside our predictions. Nothing here is ours.

Figures are those of the paper's third version and of the authors' README; requests per second and
times of weight distribution are read off figures. Throughput is TFLOP/s of a GPU for training and
requests per second at the limit of time to first token for prefill; only shares of the ideal are
compared.
"""

import dataclasses
import math

from ultraep_jax.simulate.traffic import Traffic


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """One row of the paper's evaluation.

  Attributes:
    name: for tables.
    model: of ``models.MODELS``.
    num_ranks: G, all in one domain.
    replica_slots: S; two in training and for Qwen3, as the authors' defaults, where not stated.
    training: or prefill.
    imbalance: published busiest over mean rank by strategy; before is ``none``.
    throughput: published throughput by strategy, ``ideal`` among them.
    traffic: our loads for it. Only the imbalance before is the paper's; how loads change is
      ours, one rule for training and one for prefill.
  """

  name: str
  model: str
  num_ranks: int
  replica_slots: int
  training: bool
  imbalance: dict[str, float]
  throughput: dict[str, float]
  traffic: Traffic

  def published_share(self, strategy: str) -> float | None:
    """Published throughput over the ideal's."""
    value = self.throughput.get(strategy)
    return None if value is None else value / self.throughput["ideal"]


# Standard deviations of drift and of noise, each, over the logarithm of the imbalance: skewed
# routers also change more. The factors are chosen so that EPLB ends near what was published of it.
TRAINING_CHANGE = 0.25
PREFILL_CHANGE = 0.2
# Prompts of another kind arrive, and other experts are hot.
PREFILL_PHASE = 50


def training_traffic(imbalance: float) -> Traffic:
  """Loads of training: a lasting skew. Half of its changes are slow."""
  change = TRAINING_CHANGE * math.log(imbalance)
  return Traffic(imbalance=imbalance, drift=change, drift_steps=20, noise=change)


def prefill_traffic(imbalance: float) -> Traffic:
  """Loads of prefill: the same, and hot experts change with the prompts."""
  change = PREFILL_CHANGE * math.log(imbalance)
  return Traffic(
    imbalance=imbalance, drift=change, drift_steps=20, noise=change, phase_steps=PREFILL_PHASE
  )


def _training(name: str, model: str, imbalance: list[float], throughput: list[float]) -> Case:
  strategies = ("none", "eplb", "lplb", "eplb+", "quota")
  return Case(
    name=name,
    model=model,
    num_ranks=64,
    replica_slots=2,
    training=True,
    imbalance=dict(zip(strategies, imbalance, strict=True)),
    throughput=dict(zip((*strategies, "ideal"), throughput, strict=True)),
    traffic=training_traffic(imbalance[0]),
  )


def _prefill(
  name: str, model: str, ranks: int, slots: int, imbalance: list[float], throughput: list[float]
) -> Case:
  return Case(
    name=name,
    model=model,
    num_ranks=ranks,
    replica_slots=slots,
    training=False,
    imbalance=dict(zip(("none", "eplb", "eplb+", "quota"), imbalance, strict=True)),
    throughput=dict(zip(("none", "eplb", "quota", "ideal"), throughput, strict=True)),
    traffic=prefill_traffic(imbalance[0]),
  )


CASES = (
  _training(
    "GLM-4.5-106B training EP64",
    "GLM-4.5-106B",
    [2.23, 1.34, 1.29, 1.10, 1.02],
    [545, 646, 618, 695, 757, 785.4],
  ),
  _training(
    "Qwen3-235B training EP64",
    "Qwen3-235B",
    [2.86, 1.34, 1.58, 1.17, 1.03],
    [315, 449, 385, 474, 524, 574.7],
  ),
  _training(
    "DeepSeek-V3 training EP64",
    "DeepSeek-V3",
    [1.30, 1.28, 1.09, 1.18, 1.01],
    [509, 505, 516, 553, 613, 637.6],
  ),
  _prefill(
    "Qwen3-235B prefill STEM EP64",
    "Qwen3-235B",
    64,
    2,
    [3.68, 2.59, 1.11, 1.04],
    [176, 278, 362, 375],
  ),
  _prefill(
    "Qwen3-235B prefill mixed EP64",
    "Qwen3-235B",
    64,
    2,
    [4.01, 2.56, 1.11, 1.03],
    [125, 133, 151, 158],
  ),
  _prefill(
    "GLM-4.7 prefill STEM EP40", "GLM-4.7", 40, 4, [3.09, 2.05, 1.08, 1.01], [303, 357, 548, 625]
  ),
  _prefill(
    "GLM-4.7 prefill mixed EP40", "GLM-4.7", 40, 4, [2.06, 1.80, 1.06, 1.01], [82, 81, 95, 103]
  ),
)

# The planner ablation: EPLB+ and UltraEP, mean over cases.
ABLATION = {
  "imbalance": (1.19, 1.03),
  "replicas": (107.0, 45.0),
  "fan-out": (8.5, 6.8),
  "remote share": (0.999, 0.960),
}
# UltraEP without locality.
REMOTE_WITHOUT_LOCALITY = 0.984
# One slot, E128 G64, at imbalance 6 and 8: EPLB+ and UltraEP.
ONE_SLOT = {6.0: (1.40, 1.07), 8.0: (1.40, 1.09)}
# Weight distribution in ms by imbalance before: without and with relays.
DISTRIBUTION = {
  1.5: (0.22, 0.24),
  2.0: (0.27, 0.28),
  4.0: (0.37, 0.29),
  6.0: (0.47, 0.28),
  8.0: (0.52, 0.28),
}
