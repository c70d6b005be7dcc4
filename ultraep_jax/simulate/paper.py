"""The UltraEP paper's evaluation on our loads, planner and cost model, beside its own figures."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ultraep_jax.devices.device import Device
from ultraep_jax.simulate import published
from ultraep_jax.simulate.cost import Setting, copy_seconds
from ultraep_jax.simulate.models import MODELS, ModelShape
from ultraep_jax.simulate.published import CASES, Case
from ultraep_jax.simulate.run import (
  Band,
  Outcome,
  band,
  flops_per_second,
  share_of_ideal,
  simulate,
)
from ultraep_jax.simulate.traffic import generate_loads
from ultraep_jax.workloads import flat_loads, zipf_loads

STRATEGIES = ("none", "eplb", "lplb", "eplb+", "quota", "quota (time)", "ideal")
# Steps before the first rearrangement by history, which no strategy is judged by.
WARM_UP = 20
Progress = Callable[[Iterable[Any]], Iterable[Any]]


class Effort(NamedTuple):
  """How much is simulated.

  Attributes:
    seeds: independent runs; bands are over them.
    steps: microbatches that count.
    layers: layers, each with its own hot experts.
  """

  seeds: int = 3
  steps: int = 100
  layers: int = 1


QUICK = Effort(seeds=1, steps=40, layers=1)


class Row(NamedTuple):
  """One strategy in one case, ours and published.

  Attributes:
    case: its name.
    strategy: its name.
    imbalance: ours, after.
    published_imbalance: the paper's.
    share: ours, throughput over the ideal's.
    published_share: the paper's.
    tflops: ours, model TFLOP/s of a device in training.
  """

  case: str
  strategy: str
  imbalance: Band
  published_imbalance: float | None
  share: Band
  published_share: float | None
  tflops: float


def case_setting(case: Case, device: Device) -> Setting:
  """The simulator's setting of a case."""
  return Setting(
    model=MODELS[case.model],
    device=device,
    num_ranks=case.num_ranks,
    domain_size=case.num_ranks,
    replica_slots=case.replica_slots,
    training=case.training,
  )


def evaluate(case: Case, device: Device, effort: Effort) -> list[Row]:
  """Imbalance and throughput of every strategy in one case."""
  setting = case_setting(case, device)
  runs: list[dict[str, Outcome]] = []
  for seed in range(effort.seeds):
    loads = generate_loads(
      seed,
      case.traffic,
      num_experts=setting.model.num_experts,
      num_ranks=case.num_ranks,
      tokens=setting.tokens,
      top_k=setting.model.top_k,
      steps=WARM_UP + effort.steps,
      layers=effort.layers,
    )
    outcomes = simulate(loads, setting, STRATEGIES)
    runs.append({name: outcome.after(WARM_UP) for name, outcome in outcomes.items()})
  return [
    Row(
      case=case.name,
      strategy=name,
      imbalance=band([float(run[name].imbalance.mean()) for run in runs]),
      published_imbalance=case.imbalance.get(name),
      share=band([share_of_ideal(run[name], run["ideal"]) for run in runs]),
      published_share=case.published_share(name),
      tflops=float(np.mean([flops_per_second(run[name], run["ideal"]) for run in runs])) / 1e12,
    )
    for name in STRATEGIES
  ]


def bubble_range(device: Device) -> dict[str, tuple[float, float]]:
  """Share of quota if nothing or all of what is outside the layers are bubbles, by model."""
  result = {}
  for case in CASES:
    if not case.training:
      continue
    setting = case_setting(case, device)
    sizes = setting.model.num_experts, case.num_ranks, setting.tokens, setting.model.top_k
    loads = zipf_loads(0, *sizes, case.imbalance["none"])[None, None]
    shares = []
    for bubble in (0.0, 1.0):
      changed = device.replace("sensitivity", bubble=bubble)
      outcomes = simulate(loads, case_setting(case, changed), ("quota", "ideal"))
      shares.append(share_of_ideal(outcomes["quota"], outcomes["ideal"]))
    result[case.name] = (shares[0], shares[1])
  return result


class Balance(NamedTuple):
  """The planner on one load.

  Attributes:
    loads: which.
    before: busiest over mean rank at home.
    after: as planned.
    bound: below which no plan with these slots can end.
    replicas: copies.
  """

  loads: str
  before: float
  after: float
  bound: float
  replicas: int


def balance(device: Device, seeds: Sequence[int] = (0, 1, 2)) -> list[Balance]:
  """Quota at every published imbalance on the paper's generator, and on flat loads.

  Of several seeds the one that ends highest.
  """
  result = []
  for case in CASES:
    setting = case_setting(case, device)
    sizes = setting.model.num_experts, case.num_ranks, setting.tokens, setting.model.top_k
    what = f"Zipf, {case.model} EP{case.num_ranks}"
    drawn = [zipf_loads(seed, *sizes, case.imbalance["none"]) for seed in seeds]
    ends = [_balance(what, load_GE, setting) for load_GE in drawn]
    result.append(max(ends, key=lambda end: end.after))
  for ranks, slots, ratio in ((4, 2, 2.0), (4, 4, 2.0), (8, 2, 2.0), (64, 2, 2.0)):
    model = dataclasses.replace(MODELS["Qwen3-235B"], num_experts=max(16 * ranks, 128))
    setting = Setting(
      model=model,
      device=device,
      num_ranks=ranks,
      domain_size=ranks,
      replica_slots=slots,
    )
    load_GE = flat_loads(0, model.num_experts, ranks, setting.tokens, model.top_k, ratio)
    # All slots of the others take whole experts of the hot rank.
    taken = (ranks - 1) * slots * ratio / (model.num_experts // ranks)
    what = f"flat inside a rank, E{model.num_experts} G{ranks} S{slots}"
    result.append(_balance(what, load_GE, setting, bound=max(1.0, ratio - taken)))
  return result


def _balance(what: str, load_GE: np.ndarray, setting: Setting, bound: float = 1.0) -> Balance:
  outcomes = simulate(load_GE[None, None], setting, ("none", "quota"))
  quota = outcomes["quota"]
  before = float(outcomes["none"].imbalance.mean())
  return Balance(what, before, float(quota.imbalance.mean()), bound, int(quota.replicas.mean()))


class Planner(NamedTuple):
  """One planner with one number of slots, over loads of several skews.

  Attributes:
    strategy: its name.
    slots: S.
    imbalance: after, mean.
    replicas: copies, mean.
    fan_out: the most copies that a rank sends, with relays.
    direct: the same without relays.
    remote: share of assignments computed away from their token, sources taking their own first.
    remote_by_chance: the same without that.
  """

  strategy: str
  slots: int
  imbalance: float
  replicas: float
  fan_out: float
  direct: float
  remote: float
  remote_by_chance: float


ABLATION_RATIOS = (1.5, 2.0, 3.0, 4.0, 6.0, 8.0)


def ablation(device: Device, slots: Sequence[int] = (1, 2, 3, 4), seeds: int = 3) -> list[Planner]:
  """Planners and slots on the paper's generator, E128 and G64."""
  model = MODELS["Qwen3-235B"]
  loads = _zipf_steps(model, 64, ABLATION_RATIOS, seeds)
  result = []
  for count in slots:
    setting = Setting(model=model, device=device, num_ranks=64, domain_size=64, replica_slots=count)
    for name, outcome in simulate(loads, setting, ("eplb+", "quota")).items():
      result.append(
        Planner(
          strategy=name,
          slots=count,
          imbalance=float(outcome.imbalance.mean()),
          replicas=float(outcome.replicas.mean()),
          fan_out=float(outcome.fan_out.mean()),
          direct=float(outcome.placed.direct.mean()),
          remote=float(outcome.remote_share().mean()),
          remote_by_chance=float(outcome.remote_share(locality=False).mean()),
        )
      )
  return result


class Skewed(NamedTuple):
  """One imbalance before.

  Attributes:
    before: busiest over mean rank at home.
    eplb_plus: EPLB+ after, with one slot.
    quota: quota after, with one slot.
    direct: seconds of weight distribution with two slots, homes sending all.
    relay: the same with relays.
    published: the paper's (direct, relay), in seconds.
  """

  before: float
  eplb_plus: float
  quota: float
  direct: float
  relay: float
  published: tuple[float, float]


def by_skew(device: Device, seeds: int = 3) -> list[Skewed]:
  """Relay against direct copies, and one slot, as skew grows; E128 and G64."""
  model = MODELS["Qwen3-235B"]
  result = []
  for ratio, milliseconds in published.DISTRIBUTION.items():
    loads = _zipf_steps(model, 64, (ratio,), seeds)
    base = Setting(model=model, device=device, num_ranks=64, domain_size=64)
    one_slot = dataclasses.replace(base, replica_slots=1)
    one = simulate(loads, one_slot, ("eplb+", "quota"))
    two = simulate(loads, base, ("quota",))["quota"]
    direct = copy_seconds(dataclasses.replace(base, relay=False), two.placed)
    result.append(
      Skewed(
        before=ratio,
        eplb_plus=float(one["eplb+"].imbalance.mean()),
        quota=float(one["quota"].imbalance.mean()),
        direct=float(direct.mean()),
        relay=float(copy_seconds(base, two.placed).mean()),
        published=(milliseconds[0] * 1e-3, milliseconds[1] * 1e-3),
      )
    )
  return result


def _zipf_steps(model: ModelShape, ranks: int, ratios: Sequence[float], seeds: int) -> np.ndarray:
  sizes = model.num_experts, ranks, 8192, model.top_k
  steps = [zipf_loads(seed, *sizes, ratio) for ratio in ratios for seed in range(seeds)]
  return np.stack(steps)[:, None]


class Report(NamedTuple):
  """All of it."""

  device: Device
  rows: list[Row]
  balance: list[Balance]
  planners: list[Planner]
  skews: list[Skewed]


def run(
  effort: Effort = Effort(),  # noqa: B008 - a NamedTuple of ints
  *,
  device: Device | None = None,
  progress: Progress = iter,
) -> Report:
  """Everything but the scaling, which ``scaling.sweep`` does.

  Args:
    effort: how much is simulated.
    device: its description; ``None``: the paper's, as far as it is known.
    progress: wraps the loop over cases, which takes most of the time, e.g. ``tqdm``.
  """
  machine = Device.load("nvl64") if device is None else device
  rows = []
  for case in progress(CASES):
    rows += evaluate(case, machine, effort)
  balances = balance(machine, range(effort.seeds))
  quick = effort == QUICK
  planners = ablation(machine, (1, 2) if quick else (1, 2, 3, 4), effort.seeds)
  return Report(machine, rows, balances, planners, by_skew(machine, effort.seeds))
