"""The cost model beside what was measured, with the error of every prediction."""

import dataclasses
from typing import NamedTuple

import numpy as np

from ultraep_jax.devices.device import Device
from ultraep_jax.simulate.balancers import Placed
from ultraep_jax.simulate.cost import Setting, copy_seconds
from ultraep_jax.simulate.models import MODELS, ModelShape
from ultraep_jax.simulate.run import simulate
from ultraep_jax.simulate.traffic import Traffic, generate_loads
from ultraep_jax.workloads import zipf_loads


class Point(NamedTuple):
  """One measured number and its prediction.

  Attributes:
    what: what was measured.
    measured: seconds.
    predicted: seconds.
    source: of the measurement.
    fitted: the description was made from this number, so that it tests nothing.
  """

  what: str
  measured: float
  predicted: float
  source: str
  fitted: bool = False

  @property
  def error(self) -> float:
    """Predicted over measured, less one."""
    return self.predicted / self.measured - 1


def points() -> list[Point]:
  """All measurements that the model can be held against."""
  return [*_replication(), *_portable_layer(), *_two_nodes(), *_paper_layer()]


def _shape(model: ModelShape, **changes: int) -> ModelShape:
  """A model with nothing but experts."""
  bare = {"attention_params": 0, "context_dim": 0, "shared_dim": 0, "dense_layers": 0}
  return dataclasses.replace(model, **bare, **changes)


def _replication() -> list[Point]:
  """Copies of the busiest rank and the kernel's times, as in the table."""
  # What, of which model, copies that the busiest rank sends, links, measured kernel in µs.
  cases = (
    ("ratio 1.5, 2 copies", "Qwen3-235B", 2, 1, 214, True),
    ("ratio 2, 2 copies", "Qwen3-235B", 2, 1, 242, True),
    ("ratio 2.5, 4 copies", "Qwen3-235B", 4, 1, 432, True),
    ("ratio 3, 5 copies", "Qwen3-235B", 5, 1, 547, True),
    ("one expert to 3 ranks, direct", "Qwen3-235B", 3, 1, 315, True),
    ("one expert to 3 ranks, chain", "Qwen3-235B", 1, 3, 128, True),
    ("one expert of 88.1 MB to 3 ranks, direct", "DeepSeek-V3", 3, 1, 726, False),
    ("one expert of 88.1 MB to 3 ranks, chain", "DeepSeek-V3", 1, 3, 267, False),
  )
  result = []
  for what, model, copies, depth, measured, fitted in cases:
    setting = Setting(
      model=_shape(MODELS[model], num_experts=64),
      device=Device.load("h200"),
      num_ranks=4,
      domain_size=4,
    )
    ones = np.ones((1, 4))
    placed = Placed(ones, ones, ones, ones * copies, ones, ones[:, 0] * copies, ones[:, 0], ones)
    placed = placed._replace(depth=np.array([depth]))
    seconds = float(copy_seconds(setting, placed)[0])
    source = "docs/lab/kernels.md, Replication"
    result.append(Point(f"H200 replicate, {what}", measured * 1e-6, seconds, source, fitted))
  return result


def _portable_layer() -> list[Point]:
  setting = Setting(
    model=_shape(MODELS["Qwen3-235B"], num_experts=64),
    device=Device.load("h200").running(kernels=False),
    num_ranks=4,
    domain_size=4,
    tokens=4096,
    capacity_factor=1.0625,
  )
  loads = zipf_loads(0, 64, 4, 4096, 8, 2.0)[None, None]
  outcomes = simulate(loads, setting, ("none", "quota", "ideal"), target=None)
  measured = {"none": (17.3, 50.6), "quota": (14.5, 37.7), "ideal": (7.7, 21.6)}
  result = []
  for name, (forward, both) in measured.items():
    outcome = outcomes[name]
    source = "docs/lab/portable.md, The portable operations on H200"
    seconds = float(outcome.forward.total.mean())
    result.append(Point(f"H200 portable layer, {name}, forward", forward * 1e-3, seconds, source))
    seconds = float(outcome.seconds.mean())
    result.append(Point(f"H200 portable layer, {name}, both", both * 1e-3, seconds, source))
  return result


def _two_nodes() -> list[Point]:
  """A layer on 2 GPUs as one node and as two, whose links are as fast."""
  h200 = Device.load("h200")
  loads = zipf_loads(0, 32, 2, 8192, 8, 1.42)[None, None]
  cases = (
    ("kernels", h200, 4.42, 13.6),
    ("as two nodes", h200.on_nodes(), 5.26, 15.7),
    ("plain JAX", h200.running(kernels=False), 20.4, 61.3),
  )
  result = []
  for what, device, *measured in cases:
    setting = Setting(
      model=_shape(MODELS["Qwen3-235B"], num_experts=32),
      device=device,
      num_ranks=2,
      domain_size=2,
      replica_slots=8,
    )
    outcome = simulate(loads, setting, ("quota (time)",))["quota (time)"]
    seconds = outcome.forward.total, outcome.seconds
    for direction, value, predicted in zip(("forward", "both"), measured, seconds, strict=True):
      if value is not None:
        title, source = (
          f"H200 layer, {what}, {direction}",
          "docs/lab/processes.md, Two nodes",
        )
        result.append(Point(title, value * 1e-3, float(predicted.mean()), source))
  return result


def _paper_layer() -> list[Point]:
  """The published times of a layer of Qwen3-235B at the paper's own imbalance before."""
  setting = Setting(
    model=MODELS["Qwen3-235B"],
    device=Device.load("nvl64"),
    num_ranks=64,
    domain_size=64,
  )
  loads = generate_loads(
    0,
    Traffic(imbalance=2.86),
    num_experts=128,
    num_ranks=64,
    tokens=8192,
    top_k=8,
    steps=1,
    layers=4,
  )
  outcomes = simulate(loads, setting, ("none", "quota", "ideal"))
  # Experts, exchange and everything else, in ms; the ideal is what the description was made from.
  measured = {
    "ideal": ((1.89, 1.68, 2.83), (4.32, 1.62, 4.49)),
    "none": ((5.95, 6.94, 2.88), (10.41, 4.75, 4.52)),
    "quota": ((2.11, 2.24, 3.16), (4.43, 1.79, 4.58)),
  }
  result = []
  for name, passes in measured.items():
    outcome = outcomes[name]
    for direction, times, values in zip(
      ("forward", "backward"), (outcome.forward, outcome.backward), passes, strict=True
    ):
      rest = times.total - times.matmul - times.exchange
      for part, seconds, value in zip(
        ("experts", "exchange", "other"), (times.matmul, times.exchange, rest), values, strict=True
      ):
        what = f"Qwen3-235B EP64, {name}, {direction} {part}"
        fitted = name == "ideal" or part == "exchange" or (name == "quota" and part == "other")
        result.append(Point(what, value * 1e-3, float(seconds.mean()), "the paper", fitted))
  return result
