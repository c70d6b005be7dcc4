"""What each strategy does with a layer's loads: where rows run and which copies move.

The strategies of the layer are run as they are, domain by domain, so that for the same loads every
number here is the layer's own. ``eplb`` is the published algorithm with every physical slot placed
anew and weights that stay between rearrangements; ``eplb in slots`` is what the layer can do with
the same history: homes stay, copies are sent each time.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ultraep_jax import strategies
from ultraep_jax.config import BalanceConfig
from ultraep_jax.planning import relay
from ultraep_jax.planning.exact import slots_that_suffice
from ultraep_jax.planning.fit import num_slots
from ultraep_jax.planning.load import position_in_group
from ultraep_jax.planning.route import slot_sizes
from ultraep_jax.strategies import eplb, lplb
from ultraep_jax.types import Array, Plan, PlanCost


class Loads(NamedTuple):
  """The loads of several layers, as far as planning needs them.

  Attributes:
    total: ``[L, E]`` int32, assignments to each expert.
    own: ``[L, G, X]`` int32, of these, assignments of each rank to the experts of its domain,
      ``X = M * domain_size``.
  """

  total: Any
  own: Any


def split_loads(loads: np.ndarray, num_ranks: int, domain_size: int) -> Loads:
  """Takes the parts that planning needs.

  Args:
    loads: ``[L, G, E]`` int32, or ``[L, E]``, totals of sources that are all alike.
    num_ranks: G.
    domain_size: ranks of a domain.
  """
  domains = num_ranks // domain_size
  rank_G1 = np.arange(num_ranks)[:, None]
  if loads.ndim == 2:
    layers, num_experts = loads.shape
    home_LNX = loads.reshape(layers, domains, -1)
    # Dealt out in turn, so that the sources' shares add up.
    own = (home_LNX[:, rank_G1[:, 0] // domain_size] + num_ranks - 1 - rank_G1) // num_ranks
    return Loads(loads, own.astype(np.int32))
  layers, _, num_experts = loads.shape
  width = num_experts // domains
  column_GX = rank_G1 // domain_size * width + np.arange(width)
  return Loads(loads.sum(axis=1, dtype=np.int32), loads[:, rank_G1, column_GX])


class Placed(NamedTuple):
  """One or more layers' placement; leading axes are layers (and steps, once stacked).

  Attributes:
    rows: ``[..., G, P]`` int32, rows of each slot.
    kept: ``[..., G]`` int32, assignments of a rank that run on it, sources taking their own first.
    kept_by_chance: ``[..., G]`` float32, the same if sources took no care.
    egress: ``[..., G]`` int32, copies that a rank sends for this layer and batch.
    ingress: ``[..., G]`` int32, copies that it receives.
    direct: ``[...]`` int32, the most copies that a rank would send without relays.
    depth: ``[...]`` int32, links that a copy travels.
    moved: ``[..., G]`` int32, slots that a rearrangement after this batch refilled.
  """

  rows: Any
  kept: Any
  kept_by_chance: Any
  egress: Any
  ingress: Any
  direct: Any
  depth: Any
  moved: Any

  @property
  def load(self) -> Any:
    """``[..., G]``, rows of each rank."""
    return self.rows.sum(axis=-1)

  @property
  def imbalance(self) -> Any:
    """``[...]``, busiest over mean rank; 1 without any rows."""
    load = self.load
    mean = load.mean(axis=-1)
    return np.where(mean > 0, load.max(axis=-1) / np.maximum(mean, 1e-9), 1.0)


class Balancer(NamedTuple):
  """A strategy in the simulator.

  Attributes:
    name: for tables.
    init: ``(layers, num_experts, num_ranks) -> state``.
    place: ``(state, Loads) -> (state, Placed)``, both with a leading axis of layers.
    plans: it plans in every batch, which takes time.
    real_routing: tokens go where the router wants; not so for the ideal.
  """

  name: str
  init: Callable[[int, int, int], Any]
  place: Callable[[Any, Loads], tuple[Any, Placed]]
  plans: bool = True
  real_routing: bool = True


NAMES = (
  "none",
  "eplb",
  "eplb in slots",
  "lplb",
  "eplb+",
  "exact",
  "quota",
  "quota (time)",
  "ideal",
)


def make(
  name: str, config: BalanceConfig, cost: PlanCost, *, period: int = 20, decay: float = 0.9
) -> Balancer:
  """The balancer of a name.

  Args:
    name: one of ``NAMES``. ``quota`` has ``objective="balance"`` and the configuration's
      ``target``; ``quota (time)`` weighs copies.
    config: ``replica_slots`` (for ``exact`` raised to what suffices), ``domain_size``,
      ``target`` and ``transfer`` count.
    cost: what ``quota (time)`` weighs.
    period: batches between rearrangements, of those with a history.
    decay: of the history, for each batch.

  Raises:
    ValueError: an unknown name.
  """
  if name == "quota":
    return _by_planner(name, "quota", dataclasses.replace(config, objective="balance"), None)
  if name == "quota (time)":
    return _by_planner(name, "quota", dataclasses.replace(config, objective="time"), cost)
  if name in ("none", "eplb+", "exact"):
    return _by_planner(name, name, config, None)
  if name == "ideal":
    return Balancer(name, _no_state, _place_ideal, plans=False, real_routing=False)
  if name == "eplb":
    return _rearranging(config, period, decay)
  if name in ("eplb in slots", "lplb"):
    return _by_history(name, config, period, decay)
  raise ValueError(f"strategy: expected one of {NAMES}, got {name!r}")


def _no_state(layers: int, num_experts: int, num_ranks: int) -> None:
  del layers, num_experts, num_ranks


def _by_planner(name: str, strategy: str, config: BalanceConfig, cost: PlanCost | None) -> Balancer:
  costs = (
    None if cost is None else PlanCost(*(jnp.asarray(min(c, 2**31 - 1), jnp.int32) for c in cost))
  )
  alone = dataclasses.replace(config, domain_size=None)

  def one(state: None, total_X: np.ndarray, own_RX: np.ndarray) -> tuple[None, Placed]:
    return state, _place_by_planner(strategy, alone, costs, total_X, own_RX)

  def place(state: Any, loads: Loads) -> tuple[Any, Placed]:
    return _each_domain(one, itertools.repeat(None), loads)

  return Balancer(name, _no_state, place, plans=name != "none")


@functools.partial(jax.jit, static_argnums=(0, 1))
def _place_by_planner(
  strategy: str, config: BalanceConfig, cost: PlanCost | None, total_X: Array, own_RX: Array
) -> Placed:
  num_ranks, num_experts = own_RX.shape
  if strategy == "exact":
    enough = slots_that_suffice(num_experts, num_ranks)
    slots = max(num_slots(config, num_experts, num_ranks), enough)
    config = dataclasses.replace(config, replica_slots=slots)
  plan = strategies.resolve(strategy).plan(_matrix(total_X, num_ranks), config, cost)
  return _of_plan(own_RX, plan)


def _each_domain(
  place: Callable[[Any, np.ndarray, np.ndarray], tuple[Any, Placed]],
  states: Iterable[Any],
  loads: Loads,
) -> tuple[list[Any], Placed]:
  """Places every domain of every layer by itself, so that one compilation serves any number."""
  layers, num_ranks, width = loads.own.shape
  total_dX = loads.total.reshape(-1, width)
  own_dRX = loads.own.reshape(len(total_dX), -1, width)
  results = [place(*args) for args in zip(states, total_dX, own_dRX, strict=False)]
  placed = jax.device_get([placed for _, placed in results])

  def join(*leaves: np.ndarray) -> np.ndarray:
    leaf = np.stack(leaves)
    if leaf.ndim == 1:  # a maximum over ranks is one over domains
      return leaf.reshape(layers, -1).max(axis=1)
    return leaf.reshape(layers, num_ranks, *leaf.shape[2:])

  return [state for state, _ in results], jax.tree.map(join, *placed)


def _matrix(total_X: Array, num_ranks: int) -> Array:
  """A load matrix with these totals: plans depend on nothing else."""
  return jnp.pad(total_X[None], ((0, num_ranks - 1), (0, 0)))


def _of_plan(own_RX: Array, plan: Plan) -> Placed:
  num_ranks, num_experts = own_RX.shape
  home_RS = plan.replica_expert // (num_experts // num_ranks)
  home_RS = jnp.where(plan.replica_expert < 0, -1, home_RS)
  quota_RX = plan.quota.T
  total_X = jnp.maximum(jnp.sum(quota_RX, axis=0), 1).astype(jnp.float32)
  chance_RX = own_RX.astype(jnp.float32) * (quota_RX.astype(jnp.float32) / total_X[None])
  return Placed(
    rows=slot_sizes(plan),
    kept=jnp.sum(jnp.minimum(own_RX, quota_RX), axis=1, dtype=jnp.int32),
    kept_by_chance=jnp.sum(chance_RX, axis=1),
    egress=relay.egress_per_rank(plan.parent),
    ingress=jnp.sum(plan.replica_expert >= 0, axis=1, dtype=jnp.int32),
    direct=jnp.max(relay.egress_per_rank(home_RS)),
    depth=relay.depth(plan.replica_expert, plan.parent, num_experts),
    moved=jnp.zeros(num_ranks, jnp.int32),
  )


def _place_ideal(state: None, loads: Loads) -> tuple[None, Placed]:
  """Every expert and every rank with the same load, up to one row."""
  num_experts, (layers, num_ranks, _) = loads.total.shape[1], loads.own.shape
  total_L11 = loads.total.sum(axis=1, dtype=np.int64)[:, None, None]
  turn = np.arange(num_experts).reshape(-1, num_ranks).T[None]  # one expert of each rank in turn
  rows = total_L11 // num_experts + (turn < total_L11 % num_experts)
  kept = rows.sum(axis=2) / num_ranks
  zero_LG, zero_L = np.zeros((layers, num_ranks), np.int32), np.zeros(layers, np.int32)
  return state, Placed(rows, kept, kept, zero_LG, zero_LG, zero_L, zero_L, zero_LG)


def _by_history(name: str, config: BalanceConfig, period: int, decay: float) -> Balancer:
  """The layer's own history-based strategies; the state is a list over layers and domains."""
  module = lplb if name == "lplb" else eplb
  alone = dataclasses.replace(config, domain_size=None)

  @jax.jit
  def one(state: eplb.History, total_X: Array, own_RX: Array) -> tuple[eplb.History, Placed]:
    plan = module.planner(state)(_matrix(total_X, own_RX.shape[0]), alone, None)
    after = module.update(state, total_X, alone, period=period, decay=decay)
    return after, _of_plan(own_RX, plan)

  def init(layers: int, num_experts: int, num_ranks: int) -> list[eplb.History]:
    domains = num_ranks // config.domain_of(num_ranks)
    state = eplb.init(num_experts // domains, num_ranks // domains, alone)
    return [state] * (layers * domains)

  return Balancer(name, init, functools.partial(_each_domain, one))


def _rearranging(config: BalanceConfig, period: int, decay: float) -> Balancer:
  """EPLB as published; ``History.replica_expert`` holds all slots of a rank."""

  def init(layers: int, num_experts: int, num_ranks: int) -> eplb.History:
    home_GM = jnp.arange(num_experts, dtype=jnp.int32).reshape(num_ranks, -1)
    slots = num_slots(config, num_experts, num_ranks)
    slots_GP = jnp.pad(home_GM, ((0, 0), (0, slots)), constant_values=-1)
    state = eplb.History(jnp.zeros(num_experts, jnp.float32), jnp.int32(0), slots_GP)
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (layers, *leaf.shape)), state)

  @jax.jit
  def place(state: eplb.History, loads: Loads) -> tuple[eplb.History, Placed]:
    step = functools.partial(_rearranging_step, config, period, decay)
    return jax.vmap(step)(state, loads.total)

  return Balancer("eplb", init, place, plans=False)


def _rearranging_step(
  config: BalanceConfig, period: int, decay: float, state: eplb.History, load_E: Array
) -> tuple[eplb.History, Placed]:
  expert_GP = state.replica_expert
  num_ranks, num_slots = expert_GP.shape
  rows_GP = _equal_shares(load_E, expert_GP)
  kept_G = jnp.sum(rows_GP, axis=1).astype(jnp.float32) / num_ranks  # sources are alike

  seen_E, age = state.load_E * decay + load_E.astype(jnp.float32), state.age + 1
  nodes = num_ranks // config.domain_of(num_ranks)
  placed_GP = eplb.rebalance(
    seen_E, num_ranks=num_ranks, num_slots=num_slots, num_groups=nodes, num_nodes=nodes
  )
  placed_GP = jnp.where(age % period == 0, placed_GP, expert_GP)
  has_GP = jnp.any(placed_GP[:, :, None] == expert_GP[:, None, :], axis=2)
  zero_G = jnp.zeros(num_ranks, jnp.int32)
  return eplb.History(seen_E, age, placed_GP), Placed(
    rows=rows_GP,
    kept=kept_G,
    kept_by_chance=kept_G,
    egress=zero_G,
    ingress=zero_G,
    direct=jnp.int32(0),
    depth=jnp.int32(0),
    moved=jnp.sum(~has_GP, axis=1, dtype=jnp.int32),
  )


def _equal_shares(load_E: Array, expert_GP: Array) -> Array:
  """``[G, P]``, rows of each slot if all copies of an expert serve the same, within one."""
  num_experts = load_E.shape[0]
  expert = expert_GP.reshape(-1)
  position, count_E = position_in_group(jnp.where(expert < 0, num_experts, expert), num_experts)
  share_E, rest_E = jnp.divmod(load_E, jnp.maximum(count_E, 1))
  index = jnp.maximum(expert, 0)
  rows = share_E[index] + (position < rest_E[index]).astype(jnp.int32)
  return jnp.where(expert < 0, 0, rows).reshape(expert_GP.shape)
