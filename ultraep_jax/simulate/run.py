"""Runs strategies over loads and sums up what they reach."""

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ultraep_jax.config import BalanceConfig, as_python, check_int
from ultraep_jax.simulate import balancers
from ultraep_jax.simulate.balancers import Balancer, Loads, Placed, split_loads
from ultraep_jax.simulate.cost import Setting, Times, layer_times
from ultraep_jax.strategies.eplb import check_decay
from ultraep_jax.types import PlanCost


class Band(NamedTuple):
  """A mean over seeds, with the middle 95 % of the means of resampled seeds.

  One seed has no band: both ends are the mean.
  """

  mean: float
  low: float
  high: float

  def __str__(self) -> str:
    half = (self.high - self.low) / 2
    return f"{self.mean:.3f}" if half == 0 else f"{self.mean:.3f} ± {half:.3f}"


def band(value_per_seed: Sequence[float]) -> Band:
  """The band of one value for each seed."""
  values = np.asarray(value_per_seed, float)
  picks = np.random.default_rng(0).integers(len(values), size=(1000, len(values)))
  low, high = np.quantile(values[picks].mean(axis=1), (0.025, 0.975))
  return Band(float(values.mean()), float(low), float(high))


@dataclasses.dataclass(frozen=True)
class Outcome:
  """One strategy on one sequence of loads; arrays are ``[step, layer]``.

  Attributes:
    name: of the strategy.
    placed: where rows ran and which copies moved, ``[step, layer, ...]``.
    forward: seconds of the parts of the forward pass.
    backward: of the backward pass; zeros for prefill.
    setting: what was simulated.
  """

  name: str
  placed: Placed
  forward: Times
  backward: Times
  setting: Setting

  @property
  def imbalance(self) -> np.ndarray:
    """Busiest over mean rank."""
    return self.placed.imbalance

  @property
  def seconds(self) -> np.ndarray:
    """Seconds of the layer, forward and backward."""
    return self.forward.total + self.backward.total

  @property
  def replicas(self) -> np.ndarray:
    """Copies sent."""
    return self.placed.ingress.sum(axis=-1)

  @property
  def fan_out(self) -> np.ndarray:
    """The most copies that one rank sends."""
    return self.placed.egress.max(axis=-1)

  def remote_share(self, *, locality: bool = True) -> np.ndarray:
    """Share of assignments that run on another rank than their token's; 0 without any."""
    kept = self.placed.kept if locality else self.placed.kept_by_chance
    total = self.placed.load.sum(axis=-1)
    return np.where(total > 0, 1 - kept.sum(axis=-1) / np.maximum(total, 1), 0.0)

  def after(self, steps: int) -> "Outcome":
    """The same without the first steps, before which a history-based strategy knows nothing."""
    parts = [
      jax.tree.map(lambda leaf: leaf[steps:], part)
      for part in (self.placed, self.forward, self.backward)
    ]
    return Outcome(self.name, parts[0], parts[1], parts[2], self.setting)


def simulate(
  loads: Iterable[np.ndarray] | np.ndarray,
  setting: Setting,
  strategies: Sequence[str] = ("none", "quota", "ideal"),
  *,
  target: float | None = 1.01,
  period: int = 20,
  decay: float = 0.9,
) -> dict[str, Outcome]:
  """Places the loads of every step by every strategy and predicts the time of the layers.

  Args:
    loads: ``[step, layer, G, E]`` integers, as from ``traffic.generate_loads`` or a recorded
      trace, or ``[step, layer, E]``, totals of sources that are all alike; also an iterable of
      steps. Masked tokens are in none, so that ranks may have fewer than the setting's tokens.
    setting: model, machine and sizes.
    strategies: names of ``balancers.NAMES``.
    target: of the quota planner: the fewest copies that end there.
    period: batches between rearrangements, of strategies with a history.
    decay: by which the history is multiplied for each batch, in (0, 1].

  Returns:
    For each strategy its outcome, in the order given.

  Raises:
    ValueError: loads of another shape than the setting's, negative, not integers or none; loads of
      more than 1.5 times the setting's tokens, on average, or of fewer than half; no strategy or
      an unknown one; ``period`` or ``decay`` out of its range.
    TypeError: one name instead of a sequence, or ``period`` or ``decay`` is no number.

  >>> from ultraep_jax import simulate as sim, testing
  >>> model, device = sim.MODELS["Qwen3-235B"], sim.Device.load("h200")
  >>> setting = sim.Setting(model=model, device=device, num_ranks=4, domain_size=4)
  >>> load_GE = testing.zipf_loads(0, 128, 4, tokens=8192, top_k=8, ratio=2.0)
  >>> outcomes = sim.simulate(load_GE[None, None], setting, ("none", "ideal"))
  >>> {name: f"{outcome.imbalance.mean():.2f}" for name, outcome in outcomes.items()}
  {'none': '2.00', 'ideal': '1.00'}
  >>> sim.share_of_ideal(outcomes["none"], outcomes["ideal"]) < 1
  True
  """
  if isinstance(strategies, str):
    raise TypeError(f"strategies: expected a sequence of names, got {strategies!r}")
  period, decay = _history(period, decay)
  made = [make_balancer(name, setting, target, period, decay) for name in strategies]
  if not made:
    raise ValueError("strategies: expected at least one name, got none")
  states: list[Any] = [None] * len(made)
  steps: list[list[Placed]] = [[] for _ in made]
  assignments = layers = 0
  for index, step in enumerate(loads):
    parts = _checked(np.asarray(step), setting, index)
    if index == 0 and isinstance(loads, np.ndarray):  # now, rather than after all plans
      _check_tokens(setting, int(loads.sum(dtype=np.int64)), math.prod(loads.shape[:2]))
    assignments += int(parts.total.sum(dtype=np.int64))
    layers += len(parts.total)
    for i, balancer in enumerate(made):
      if index == 0:
        states[i] = balancer.init(len(parts.total), setting.model.num_experts, setting.num_ranks)
      states[i], placed = balancer.place(states[i], parts)
      steps[i].append(jax.device_get(placed))
  if not steps[0]:
    raise ValueError("loads: expected at least one step, got none")
  _check_tokens(setting, assignments, layers)
  return {
    balancer.name: _outcome(setting, balancer, placed)
    for balancer, placed in zip(made, steps, strict=True)
  }


def make_balancer(
  name: str, setting: Setting, target: float | None, period: int, decay: float
) -> Balancer:
  """The balancer of a name for a setting; with the same arguments always the same one."""
  config = BalanceConfig(
    replica_slots=setting.replica_slots,
    domain_size=setting.domain_size,
    target=target,
    transfer="auto" if setting.relay else "direct",
  )
  if name == "quota (time)":  # compiles once: its cost is an argument
    return balancers.make(name, config, setting.plan_cost)
  return _cached(name, config, period, decay)


@functools.lru_cache(maxsize=256)
def _cached(name: str, config: BalanceConfig, period: int, decay: float) -> Balancer:
  """Two balancers with a history compile twice, so they are kept."""
  return balancers.make(name, config, PlanCost(0, 0), period=period, decay=decay)


def _history(period: int, decay: float) -> tuple[int, float]:
  """Both as Python's numbers, if a history can have them."""
  period, decay = as_python(period), as_python(decay)
  check_int("period", period, minimum=1, maximum=2**31 - 1)
  if isinstance(decay, bool) or not isinstance(decay, int | float):
    raise TypeError(f"decay: expected a number, got {type(decay).__name__}")
  check_decay(decay)
  return period, float(decay)


def _check_tokens(setting: Setting, assignments: int, layers: int) -> None:
  """Refuses a setting whose times would be of other tokens than so many layers' loads have.

  Loads may have half fewer on average, or none at all: masked tokens, and ranks that have less to
  do. They may have half more: a part of a run that is busier than the run of the setting.
  """
  found = assignments / (layers * setting.num_ranks * setting.model.top_k)
  most = 1.5 * setting.tokens + 0.5  # tokens are rounded where they are taken from loads
  if found and not setting.tokens / 2 - 0.5 <= found <= most:
    raise ValueError(
      f"tokens: expected about {found:.6g}, as a rank has in the loads on average, "
      f"got {setting.tokens}"
    )


def _checked(loads: np.ndarray, setting: Setting, step: int) -> Loads:
  """The parts of one step's loads that planning needs, or why they cannot be."""
  ranks, experts = setting.num_ranks, setting.model.num_experts
  if loads.shape[1:] not in ((ranks, experts), (experts,)) or not len(loads):
    raise ValueError(
      f"loads: expected [layer, {ranks}, {experts}] or [layer, {experts}] in step {step}, "
      f"got {list(loads.shape)}"
    )
  got = loads.min() if np.issubdtype(loads.dtype, np.integer) else loads.dtype
  if not isinstance(got, np.integer) or got < 0:
    raise ValueError(f"loads: expected integers of at least 0 in step {step}, got {got}")
  totals = loads.reshape(len(loads), -1).sum(axis=1, dtype=np.int64)
  if max(loads.max(), totals.max()) >= 2**31:
    raise ValueError(f"loads: expected less than 2**31 assignments in a layer of step {step}")
  return split_loads(loads.astype(np.int32), ranks, setting.domain_size)


def _outcome(setting: Setting, balancer: Balancer, steps: list[Placed]) -> Outcome:
  placed = Placed(*(np.stack(leaves) for leaves in zip(*steps, strict=True)))
  forward, backward = layer_times(setting, balancer, placed)
  return Outcome(balancer.name, placed, forward, backward, setting)


def step_seconds(outcome: Outcome, ideal: Outcome) -> float:
  """Seconds of one microbatch through the model, on average over the steps.

  Layers that were simulated stand for all MoE layers. Training adds what is in no MoE layer, as
  the description's share of the *ideal* step: a part that no strategy changes (optimizer,
  embeddings, dense layers, gradient sums) and pipeline bubbles, which grow with the layers.
  """
  layers, rates = outcome.setting.model.moe_layers, outcome.setting.device
  seconds = float(outcome.seconds.mean())
  if outcome.setting.training:
    even = float(ideal.seconds.mean())
    outside = even * rates["outside"] / (1 - rates["outside"])
    seconds += outside * (1 + rates["bubble"] * (seconds / even - 1))
  return seconds * layers


def share_of_ideal(outcome: Outcome, ideal: Outcome) -> float:
  """Throughput over that of perfectly even loads."""
  return step_seconds(ideal, ideal) / step_seconds(outcome, ideal)


def flops_per_second(outcome: Outcome, ideal: Outcome) -> float:
  """Model FLOP/s of a device, as training frameworks count them: forward three times."""
  setting = outcome.setting
  flops = (
    setting.model.token_flops(setting.context) * setting.tokens * (3 if setting.training else 1)
  )
  return flops / step_seconds(outcome, ideal)
