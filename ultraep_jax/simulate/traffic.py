"""Loads over many steps and layers: how skewed they are, and how they change.

The weight of an expert is a base that stays, times what drifts slowly, times what is new in every
step, times a burst now and then. The base has the form of ``workloads.zipf_loads`` (a power of the
rank from the hottest, a power within the rank, at random places) and its exponent is fitted so
that home placement ends at a wanted imbalance. Without a base (``imbalance=None``) this is the
noise around a mean that an auxiliary loss has balanced.

Recorded loads have the same form, ``[step, layer, G, E]`` int32: everything that simulates takes
either.
"""

import dataclasses

import numpy as np

from ultraep_jax.config import as_python, as_python_numbers, check_int
from ultraep_jax.workloads import check_sizes, sample_loads

LOCAL_EXPONENT = 4.0
_MAX_ALPHA = 8.0
_FIT_SAMPLES = 48
_MOST = {"drift": 10, "noise": 10, "bursts": 1, "local_exponent": 10}  # of those that may be 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
  """How loads change. Deviations are of the logarithm of an expert's weight.

  Attributes:
    imbalance: busiest over mean rank at home, averaged over steps and layers; the base is fitted
      to it. ``None``: no base.
    drift: standard deviation of what changes slowly.
    drift_steps: steps in which the drift forgets.
    noise: standard deviation of what is new in every step.
    bursts: share of steps in which an expert's weight is multiplied.
    burst_factor: by how much.
    burst_steps: for how many steps.
    phase_steps: steps after which hot experts are others; ``None``: never.
    local_exponent: of the power law within a rank; 0: no expert of a rank is hotter.

  Raises:
    ValueError: a number is outside its range.
    TypeError: ``burst_steps`` or ``phase_steps`` is no integer, or another is no number.
  """

  imbalance: float | None = None
  drift: float = 0.0
  drift_steps: float = 100.0
  noise: float = 0.0
  bursts: float = 0.0
  burst_factor: float = 4.0
  burst_steps: int = 3
  phase_steps: int | None = None
  local_exponent: float = LOCAL_EXPONENT

  def __post_init__(self) -> None:
    as_python_numbers(self)
    for field in dataclasses.fields(self):
      name, value = field.name, getattr(self, field.name)
      if value is None and name in ("imbalance", "phase_steps"):
        continue
      if name in ("burst_steps", "phase_steps"):
        check_int(name, value, minimum=1, maximum=10**9)
      elif isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
      elif name not in _MOST and not 1 <= value <= 1e9:
        raise ValueError(f"{name}: expected a number in [1, 1e9], got {value}")
      elif name in _MOST and not 0 <= value <= _MOST[name]:
        raise ValueError(f"{name}: expected a number in [0, {_MOST[name]}], got {value}")


TRAFFIC = {
  "steady": Traffic(imbalance=2.0),
  "auxiliary": Traffic(noise=0.15),
  "drifting": Traffic(imbalance=2.0, drift=0.3, drift_steps=30),
  "bursty": Traffic(imbalance=1.5, noise=0.1, bursts=0.2),
  "phases": Traffic(imbalance=2.5, noise=0.1, phase_steps=20),
}


def probabilities(
  seed: int,
  traffic: Traffic,
  *,
  num_experts: int,
  num_ranks: int,
  top_k: int,
  steps: int,
  layers: int,
) -> np.ndarray:
  """Probabilities that an expert is in a token, ``[step, layer, E]`` float64 with sums K.

  Args:
    seed: of ``numpy.random.default_rng``.
    traffic: how loads change.
    num_experts: E, a multiple of ``num_ranks``.
    num_ranks: G.
    top_k: K.
    steps: steps.
    layers: layers; each has its own hot experts.

  Raises:
    ValueError: sizes do not fit, or the imbalance cannot be reached.
    TypeError: a size is no integer.
  """
  _check(num_experts, num_ranks, 1, top_k, steps=steps, layers=layers)
  weights = _Weights(seed, traffic, num_experts, num_ranks, top_k, steps, layers)
  if traffic.imbalance is None:
    return _inclusion(np.exp(weights.change_sLE), top_k)
  low, high = 0.0, _MAX_ALPHA
  ends = weights.imbalance(low), weights.imbalance(high)
  least, most = sorted(ends)
  if not least <= traffic.imbalance + 0.02 or not traffic.imbalance <= most + 1e-9:
    raise ValueError(
      f"imbalance: expected a number in [{least:.3g}, {most:.3g}] for these sizes, this drift and "
      f"this noise, got {traffic.imbalance}"
    )
  rises = ends[0] <= ends[1]  # else what changes is so large that a base evens it
  for _ in range(14):
    middle = (low + high) / 2
    short = (weights.imbalance(middle) < traffic.imbalance) == rises
    low, high = (middle, high) if short else (low, middle)
  return _inclusion(weights.skewed(low), top_k)


def imbalance_range(
  seed: int,
  traffic: Traffic,
  *,
  num_experts: int,
  num_ranks: int,
  top_k: int,
  steps: int,
  layers: int = 1,
) -> tuple[float, float]:
  """The least and the most that ``traffic.imbalance`` may be, whatever it is.

  Arguments as for ``probabilities``.

  Raises:
    ValueError: sizes do not fit.
    TypeError: a size is no integer.

  >>> sizes = {"num_experts": 8, "num_ranks": 4, "top_k": 2, "steps": 3}
  >>> tuple(round(end, 2) for end in imbalance_range(0, Traffic(), **sizes))
  (1.0, 3.74)
  """
  _check(num_experts, num_ranks, 1, top_k, steps=steps, layers=layers)
  weights = _Weights(seed, traffic, num_experts, num_ranks, top_k, steps, layers)
  least, most = sorted((weights.imbalance(0.0), weights.imbalance(_MAX_ALPHA)))
  return least, most


def generate_loads(
  seed: int,
  traffic: Traffic,
  *,
  num_experts: int,
  num_ranks: int,
  tokens: int,
  top_k: int,
  steps: int,
  layers: int = 1,
) -> np.ndarray:
  """Loads, ``[step, layer, G, E]`` int32; every rank has ``tokens * top_k`` assignments.

  Arguments and errors as for ``probabilities``; ``tokens`` is T, of one rank.

  >>> loads = generate_loads(
  ...   0, Traffic(imbalance=2.0), num_experts=8, num_ranks=4, tokens=64, top_k=2, steps=3
  ... )
  >>> loads.shape, set(loads.sum(axis=3).flat) == {128}
  ((3, 1, 4, 8), True)
  """
  _check(num_experts, num_ranks, tokens, top_k)
  p_sLE = probabilities(
    seed,
    traffic,
    num_experts=num_experts,
    num_ranks=num_ranks,
    top_k=top_k,
    steps=steps,
    layers=layers,
  )
  rng = np.random.default_rng([seed, 1])
  loads = [sample_loads(rng, p_E, num_ranks, tokens) for p_E in p_sLE.reshape(-1, num_experts)]
  return np.stack(loads).reshape(steps, layers, num_ranks, num_experts)


def generate_totals(
  seed: int,
  traffic: Traffic,
  *,
  num_experts: int,
  num_ranks: int,
  tokens: int,
  top_k: int,
  steps: int,
  layers: int = 1,
) -> np.ndarray:
  """Loads of experts alone, ``[step, layer, E]`` int32: for many ranks, whose sources are alike.

  Arguments and errors as for ``generate_loads``.
  """
  _check(num_experts, num_ranks, tokens, top_k)
  p_sLE = probabilities(
    seed,
    traffic,
    num_experts=num_experts,
    num_ranks=num_ranks,
    top_k=top_k,
    steps=steps,
    layers=layers,
  )
  running = np.cumsum(p_sLE, axis=-1) * (num_ranks * tokens)
  return np.diff(np.round(running), axis=-1, prepend=0).astype(np.int32)


def _check(num_experts: int, num_ranks: int, tokens: int, top_k: int, **counts: int) -> None:
  """Checks sizes, each by itself and then against each other."""
  sizes = {"num_experts": num_experts, "num_ranks": num_ranks, "tokens": tokens, "top_k": top_k}
  for name, value in {**sizes, **counts}.items():
    check_int(name, as_python(value), minimum=1)
  check_sizes(num_experts, num_ranks, tokens, top_k)


def _inclusion(weight: np.ndarray, top_k: int) -> np.ndarray:
  """``workloads.inclusion`` for many rows at once: ``1 - exp(-c w)``, sums K, c for each row."""
  low = np.full((*weight.shape[:-1], 1), -40.0)
  high = low + 100.0
  weight = weight / weight.mean(axis=-1, keepdims=True)
  for _ in range(45):
    middle = (low + high) / 2
    enough = -np.expm1(-np.exp(middle) * weight).sum(axis=-1, keepdims=True) >= top_k
    low, high = np.where(enough, low, middle), np.where(enough, middle, high)
  return -np.expm1(-np.exp(high) * weight)


class _Weights:
  """Experts' weights without and with a base, whose exponent is to be found."""

  def __init__(
    self,
    seed: int,
    traffic: Traffic,
    num_experts: int,
    num_ranks: int,
    top_k: int,
    steps: int,
    layers: int,
  ) -> None:
    rng = np.random.default_rng(seed)
    # The base is linear in the exponent, with the part within a rank apart.
    self._rank_sLE, local_sLE = _log_base(rng, traffic, num_experts, num_ranks, steps, layers)
    self.change_sLE = _log_change(rng, traffic, (steps, layers, num_experts))
    self._changed_sLE = self.change_sLE + traffic.local_exponent * local_sLE
    self._sample = rng.permutation(steps * layers)[:_FIT_SAMPLES]
    self._num_ranks, self._top_k = num_ranks, top_k

  def skewed(self, alpha: float) -> np.ndarray:
    """``[step, layer, E]`` with a base of this exponent."""
    return np.exp(alpha * self._rank_sLE + self._changed_sLE)

  def imbalance(self, alpha: float) -> float:
    """Busiest over mean rank with such a base, on average over some steps and layers."""
    rank_xE, changed_xE = (
      part.reshape(-1, part.shape[-1])[self._sample] for part in (self._rank_sLE, self._changed_sLE)
    )
    p_xE = _inclusion(np.exp(alpha * rank_xE + changed_xE), self._top_k)
    load_xG = p_xE.reshape(len(p_xE), self._num_ranks, -1).sum(axis=2)
    return float((load_xG.max(axis=1) / load_xG.mean(axis=1)).mean())


def _log_base(
  rng: np.random.Generator,
  traffic: Traffic,
  num_experts: int,
  num_ranks: int,
  steps: int,
  layers: int,
) -> tuple[np.ndarray, np.ndarray]:
  """Logarithms of both powers for exponent 1, ``[step, layer, E]``, at random places."""
  num_home = num_experts // num_ranks
  phases = 1 if traffic.phase_steps is None else -(-steps // traffic.phase_steps)
  rank = -np.log(np.arange(1.0, num_ranks + 1))
  local = -np.log(np.arange(1.0, num_home + 1))
  rank_hLG = rng.permuted(np.broadcast_to(rank, (phases, layers, num_ranks)), axis=-1)
  local_hLGM = rng.permuted(np.broadcast_to(local, (phases, layers, num_ranks, num_home)), axis=-1)
  rank_hLE = np.repeat(rank_hLG, num_home, axis=-1)
  local_hLE = local_hLGM.reshape(phases, layers, num_experts)
  phase_s = np.arange(steps) // (traffic.phase_steps or steps)
  return rank_hLE[phase_s], local_hLE[phase_s]


def _log_change(
  rng: np.random.Generator, traffic: Traffic, shape: tuple[int, int, int]
) -> np.ndarray:
  """Drift (a stationary first-order process), noise and bursts, ``[step, layer, E]``."""
  steps = shape[0]
  change = traffic.noise * rng.normal(size=shape)
  if traffic.drift:
    keep = np.exp(-1 / traffic.drift_steps)
    state = rng.normal(size=shape[1:])
    for step in range(steps):
      change[step] += traffic.drift * state
      state = keep * state + np.sqrt(1 - keep**2) * rng.normal(size=shape[1:])
  if traffic.bursts:
    for step, layer in np.argwhere(rng.random(shape[:2]) < traffic.bursts):
      expert = rng.integers(shape[2])
      change[step : step + traffic.burst_steps, layer, expert] += np.log(traffic.burst_factor)
  return change
