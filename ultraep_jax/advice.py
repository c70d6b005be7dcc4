"""What keeps a layer's load uneven, and what would help.

``LayerStats.advice``, the commands ``plan`` and ``trace show``, the viewer and a ``Recorder``'s
warning all say what is found here. Works on NumPy arrays, outside ``jit``.
"""

import dataclasses
from typing import Any, NoReturn, get_args

import jax.numpy as jnp
import numpy as np

from ultraep_jax.config import BalanceConfig, Strategy, StrategyName
from ultraep_jax.planning.exact import slots_that_suffice
from ultraep_jax.planning.fit import num_slots
from ultraep_jax.planning.plan import plan_quotas
from ultraep_jax.types import LayerStats

EVEN = 1.02  # times the mean; below, there is nothing to say
_WARN = 1.1


def of_load(
  load_GE: np.ndarray,
  after_G: np.ndarray,
  config: BalanceConfig,
  *,
  slots: int,
  rounds: int = 1,
) -> list[str]:
  """One line for each cause, the largest first; a single one if the load is even.

  Plans the load again by quota, with more slots and with fewer constraints, a second or two the
  first time. Another strategy is the first cause, if such a plan is more even.

  Args:
    load_GE: ``[G, E]``, the load matrix.
    after_G: ``[G]``, assignments that each rank computed.
    config: of the layer: its strategy, domains, target and objective.
    slots: S that the layer had. With another strategy quota gets the configuration's, if more.
    rounds: that it ran.
  """
  num_ranks, num_experts = load_GE.shape
  by_quota = config.strategy == "quota"
  also = "" if by_quota else ', with strategy="quota"'
  if not by_quota:  # "none" has no slots at all
    slots = max(slots, num_slots(config, num_experts, num_ranks))
  mean = max(float(np.sum(after_G)) / num_ranks, 1e-9)
  reached, best = _imbalance(after_G), _floor(load_GE, config)
  lines = []
  if rounds > 1:
    factor = np.ceil(20 * np.max(after_G) / mean) / 20
    lines.append(
      f"buffer: {rounds} rounds were run; one suffices with an even load, or with "
      f"capacity_factor={factor:.2f}"
    )
  if reached <= EVEN or num_ranks == 1:
    return lines or [f"even: the busiest rank has {reached:.2f} times the mean"]
  if best > EVEN * _floor(load_GE, dataclasses.replace(config, domain_size=None)):
    lines.append(
      f"domains: copies stay inside them, which allows {best:.2f} at best; a larger domain_size "
      f"would help{also}"
    )
  if reached <= best * EVEN:
    few = f"even: the busiest rank has {reached:.2f} times the mean, as assignments are few"
    return lines or [few]
  same = planned_imbalance(load_GE, config, slots)
  if same < reached / EVEN:
    why = _why_not_taken(reached, same, config, slots)
    lines.insert(len(lines) if by_quota else 0, why)
  now = min(reached, same)
  if now > best * EVEN:
    more, then = _slots_that_help(load_GE, config, slots, same, best)
    if then < now / EVEN:
      with_more = f"{then:.2f} with {more}; set replica_slots{also}"
      lines.append(f"slots: {now:.2f} with {slots}, {with_more}")
  return lines


def of_stats(stats: LayerStats, config: BalanceConfig | None) -> list[str]:
  """Of the least even of the layers and token groups that the statistics have."""
  fields = {name: np.asarray(value) for name, value in zip(stats._fields, stats, strict=True)}
  lead = fields["load_GE"].shape[:-2]
  count = int(np.prod(lead, dtype=np.int64))
  flat = {name: value.reshape(count, *value.shape[len(lead) :]) for name, value in fields.items()}
  worst = int(np.argmax([_imbalance(after_G) for after_G in flat["load_after_G"]]))
  lines = []
  if invalid := int(flat["invalid"].sum()):
    lines.append(f"router: {invalid} assignments name no expert and were left out")
  config = BalanceConfig(objective="balance") if config is None else config
  return lines + of_load(
    flat["load_GE"][worst],
    flat["load_after_G"][worst],
    with_domains(config, flat["load_GE"], flat["load_floor"], flat["replica_expert_GS"]),
    slots=flat["replica_expert_GS"].shape[-1],
    rounds=int(flat["rounds"].max()),
  )


def with_domains(
  config: BalanceConfig,
  load_NGE: np.ndarray,
  floor_N: np.ndarray,
  replica_expert_NGS: np.ndarray,
) -> BalanceConfig:
  """The configuration with the domains that loads had, where it leaves them to the mesh.

  They are the smallest ones whose bounds are those of the loads, and which no copy left. So nothing
  is called possible that the layers' domains may not allow.

  Args:
    config: of the layers.
    load_NGE: ``[N, G, E]``, load matrices.
    floor_N: ``[N]``, the lowest maximum load that the domains allow each.
    replica_expert_NGS: ``[N, G, S]``, the expert in each slot, −1 if it is empty.
  """
  if config.domain_size != "auto" or not len(floor_N):
    return config
  num_ranks, num_experts = load_NGE.shape[1:]
  home_NGM = load_NGE.sum(axis=1, dtype=np.int64).reshape(-1, num_ranks, num_experts // num_ranks)
  home_NG = home_NGM.sum(axis=2)
  _, host, _ = filled = np.nonzero(replica_expert_NGS >= 0)
  home = replica_expert_NGS[filled] // (num_experts // num_ranks)
  for size in range(1, num_ranks + 1):
    if num_ranks % size == 0 and np.array_equal(host // size, home // size):
      busiest_N = home_NG.reshape(len(home_NG), -1, size).sum(axis=2).max(axis=1)
      if np.array_equal(-(-busiest_N // size), floor_N):
        return dataclasses.replace(config, domain_size=size)
  return config


def recorded_config(values: dict[str, Any]) -> BalanceConfig:
  """The configuration of recorded layers, as far as it decides what plans can reach.

  Of a planner of the user's only the name was recorded: it cannot plan again.
  """
  names = (
    "objective",
    "target",
    "min_tokens_per_replica",
    "domain_size",
    "replica_slots",
    "strategy",
  )
  known = {name: values[name] for name in names if values.get(name) is not None}
  strategy = known.get("strategy")
  if isinstance(strategy, str) and strategy not in get_args(StrategyName):
    known["strategy"] = Strategy(strategy, _not_recorded)
  return BalanceConfig(**known)


def _not_recorded(*_: object) -> NoReturn:
  raise NotImplementedError("strategy: expected a planner, got only the name that was recorded")


def limits(after_NG: np.ndarray, replica_expert_NGS: np.ndarray, rounds_N: np.ndarray) -> str:
  """A warning if records ran several rounds or ran out of slots, else an empty text.

  Args:
    after_NG: ``[N, G]``, assignments that each rank computed.
    replica_expert_NGS: ``[N, G, S]``, −1 for an empty slot.
    rounds_N: ``[N]``.
  """
  said = []
  if several := int(np.sum(rounds_N > 1)):
    said.append(f"{several} of {len(rounds_N)} layers ran more than one round")
  mean_N1 = after_NG.mean(axis=1, keepdims=True)
  full_NG = (replica_expert_NGS >= 0).all(axis=2)
  # A rank below the mean with an empty slot could take more.
  bound_N = (full_NG | (after_NG >= mean_N1)).all(axis=1) & (replica_expert_NGS.shape[2] > 0)
  uneven_N = after_NG.max(axis=1) > _WARN * np.maximum(mean_N1[:, 0], 1e-9)
  if short := int(np.sum(bound_N & uneven_N)):
    said.append(f"{short} of {len(rounds_N)} layers stayed uneven with all slots in use")
  if not said:
    return ""
  return f"{'; '.join(said)}: more replica_slots would help, stats.advice() says how many"


def planned_imbalance(load_GE: np.ndarray, config: BalanceConfig, slots: int) -> float:
  """Busiest over mean rank of the most even plan with so many slots."""
  config = dataclasses.replace(
    config, replica_slots=slots, objective="balance", target=None, min_tokens_per_replica=1
  )
  return _imbalance(np.asarray(plan_quotas(jnp.asarray(load_GE), config).quota).sum(axis=0))


def _why_not_taken(reached: float, same: float, config: BalanceConfig, slots: int) -> str:
  possible = f"{reached:.2f} was reached and {same:.2f} is possible with {slots} slots"
  if config.strategy != "quota":  # which may ignore what else is set
    return f"strategy: {possible} by quota"
  if config.target is not None and reached <= config.target * EVEN:
    return f"target: {possible}; target={config.target} stops plans there"
  if config.min_tokens_per_replica > 1:
    return f"min_tokens_per_replica: {possible}; small copies are not made"
  if config.objective == "time":
    return (
      f'objective: {possible}; by "time", more copies would cost more than they save, or the '
      "busiest rank has fewer groups of rows"
    )
  return f"plan: {possible}; is this the layer's configuration?"


def _slots_that_help(
  load_GE: np.ndarray, config: BalanceConfig, slots: int, same: float, best: float
) -> tuple[int, float]:
  """The fewest slots, of doubled numbers, that reach the best; and what they reach."""
  num_ranks, num_experts = load_GE.shape
  domain = config.domain_of(num_ranks)
  most = slots_that_suffice(num_experts // num_ranks * domain, domain)
  tried, reached = slots, same
  while tried < most and reached > best * EVEN:
    tried = min(max(2 * tried, 1), most)
    reached = planned_imbalance(load_GE, config, tried)
  return tried, float(reached)


def _floor(load_GE: np.ndarray, config: BalanceConfig) -> float:
  """The least imbalance that the domains allow to whole assignments."""
  num_ranks, num_experts = load_GE.shape
  home_G = load_GE.sum(axis=0).reshape(num_ranks, num_experts // num_ranks).sum(axis=1)
  domain_N = np.ceil(home_G.reshape(-1, config.domain_of(num_ranks)).mean(axis=1))
  return float(domain_N.max() / max(home_G.mean(), 1e-9)) if home_G.any() else 1.0


def _imbalance(load_G: np.ndarray) -> float:
  mean = float(np.mean(load_G))
  return float(np.max(load_G)) / mean if mean else 1.0
