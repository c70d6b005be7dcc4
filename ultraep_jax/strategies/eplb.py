"""Periodic balancing by the history of loads: DeepSeek's EPLB.

Every ``period`` batches, experts are replicated by the load that was seen and packed onto ranks;
between, the placement stands, and every copy of an expert serves an equal share. The load of the
batch itself plays no part, so balance is as good as the past predicts the present.

``rebalance`` is the published algorithm: every physical slot is placed anew, homes too, with
expert groups kept on one node where their number allows. The layer here keeps homes where the
parameters are: ``planner`` fills replica slots alone, inside domains, and its copies are sent
again in every layer call, where EPLB's stay until the next rearrangement.

The history is a value that the caller keeps, one for each layer::

  state = eplb.init(num_experts, num_ranks, config)
  # then, inside the jitted step:
  balanced = dataclasses.replace(config, strategy=eplb.planner(state))
  y, stats = uep.sharded_moe(x, expert_index, gate, weights, config=balanced)
  state = eplb.update(state, stats.expert_load_E, config, period=100)
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import Partial

from ultraep_jax.config import BalanceConfig, check_int
from ultraep_jax.planning.fit import num_slots
from ultraep_jax.planning.plan import check_load, plan_slots
from ultraep_jax.strategies import placement
from ultraep_jax.types import Array, Plan, PlanCost


class History(NamedTuple):
  """What a history-based strategy knows of one layer.

  Attributes:
    load_E: ``[E]`` float32, the sum of the loads seen, older ones decayed.
    age: ``[]`` int32, batches seen.
    replica_expert: ``[G, S]`` int32, the placement in force, −1 in empty slots.
  """

  load_E: Array
  age: Array
  replica_expert: Array


def init(num_experts: int, num_ranks: int, config: BalanceConfig) -> History:
  """No history and no replicas.

  Raises:
    ValueError: ``num_experts`` is no multiple of ``num_ranks``.
  """
  if num_ranks < 1 or num_experts < num_ranks or num_experts % num_ranks:
    raise ValueError(f"num_experts: expected a multiple of {num_ranks} ranks, got {num_experts}")
  return History(
    load_E=jnp.zeros(num_experts, jnp.float32),
    age=jnp.int32(0),
    replica_expert=jnp.full((num_ranks, num_slots(config, num_experts, num_ranks)), -1, jnp.int32),
  )


def update(
  state: History,
  expert_load_E: Array,
  config: BalanceConfig,
  *,
  period: int = 100,
  decay: float = 1.0,
  max_copies: int | None = None,
) -> History:
  """Adds a batch to the history, and places replicas anew after every ``period`` of them.

  Args:
    state: the history so far.
    expert_load_E: ``[..., E]``, the batch's loads, as in ``LayerStats``; leading axes (token
      groups) are summed.
    config: ``replica_slots`` and ``domain_size`` count.
    period: batches between placements.
    decay: by which the sum is multiplied for each batch, in (0, 1].
    max_copies: copies that an expert may have, its home one of them; ``None``: one on each rank
      of its domain.

  Raises:
    ValueError: ``period``, ``decay``, ``max_copies``, ``domain_size`` or a shape is not as
      described.
    TypeError: ``period`` or ``max_copies`` is not an int.
  """
  check_int("period", period, minimum=1)
  if max_copies is not None:
    check_int("max_copies", max_copies, minimum=1)
  check_decay(decay)
  num_experts, (num_ranks, slots) = state.load_E.shape[0], state.replica_expert.shape
  if expert_load_E.shape[-1:] != (num_experts,):
    raise ValueError(f"expert_load_E: expected [..., {num_experts}], got {expert_load_E.shape}")
  if slots != (expected := num_slots(config, num_experts, num_ranks)):
    raise ValueError(f"state: expected {expected} slots, got {slots}")
  domain_size = config.domain_of(num_ranks)
  seen_E = jnp.sum(expert_load_E.astype(jnp.float32).reshape(-1, num_experts), axis=0)
  load_E, age = state.load_E * decay + seen_E, state.age + 1
  place = functools.partial(
    placement.place_replicas,
    num_ranks=num_ranks,
    num_slots=slots,
    domain_size=domain_size,
    max_copies=max_copies,
  )
  replica_expert = lax.cond(age % period == 0, place, lambda _: state.replica_expert, load_E)
  return History(load_E, age, replica_expert)


def check_decay(decay: float) -> None:
  """Raises ValueError unless a history can be multiplied by it."""
  if not 0 < decay <= 1:
    raise ValueError(f"decay: expected a number in (0, 1], got {decay}")


def planner(state: History) -> Partial:
  """A planner whose replicas are the history's and whose copies serve equal shares.

  Use it inside ``jit``, with the state an argument of the jitted function. ``sharded_moe`` and the
  Flax modules take the state's arrays as arguments, though a configuration is static.
  """
  return Partial(eplb, state)


def eplb(
  state: History, load_GE: Array, config: BalanceConfig, cost: PlanCost | None = None
) -> Plan:
  """The plan by a history: what ``planner`` binds to it."""
  del cost
  replica_expert_GS, load_E = check_history(state, load_GE, config)
  expert_GS, tokens_GS = placement.split_evenly(load_E, replica_expert_GS)
  return plan_slots(load_E, expert_GS, tokens_GS, config.transfer)


def check_history(state: History, load_GE: Array, config: BalanceConfig) -> tuple[Array, Array]:
  """The placement in force and the loads of experts, ``[E]`` int32.

  Replicas that were placed for larger domains, and lie outside their home's, are left out: copies
  do not get there.

  Raises:
    TypeError: ``load_GE`` is not int32.
    ValueError: the state is of another layer, or ``load_GE`` not as in ``plan_quotas``.
  """
  check_load(load_GE)
  num_ranks, num_experts = load_GE.shape
  expected = (num_experts,), (num_ranks, num_slots(config, num_experts, num_ranks))
  got = state.load_E.shape, state.replica_expert.shape
  if got != expected:
    raise ValueError(f"state: expected a history of shapes {expected}, got {got}")
  domain = config.domain_of(num_ranks)
  domain_E = jnp.arange(num_experts) // (num_experts // num_ranks * domain)
  domain_G1 = jnp.arange(num_ranks)[:, None] // domain
  inside_GS = domain_E[state.replica_expert] == domain_G1
  replica_expert = jnp.where(inside_GS, state.replica_expert, -1)
  return replica_expert, jnp.sum(load_GE, axis=0, dtype=jnp.int32)


@functools.partial(jax.jit, static_argnames=("num_ranks", "num_slots", "num_groups", "num_nodes"))
def rebalance(
  load_E: Array, *, num_ranks: int, num_slots: int, num_groups: int = 1, num_nodes: int = 1
) -> Array:
  """EPLB as published: replicates and packs every physical slot, homes too.

  If the nodes divide the expert groups, groups are packed onto nodes first and each node then
  plans for its own experts (the hierarchical form); else all ranks are one node. An expert may
  be twice on a rank.

  Args:
    load_E: ``[E]`` float32, the history.
    num_ranks: G.
    num_slots: P, all slots of a rank; ``G * P`` is at least E.
    num_groups: groups of consecutive experts that a router chooses from together.
    num_nodes: groups of ranks with fast links.

  Returns:
    ``[G, P]`` int32, the expert in each slot.

  Raises:
    ValueError: sizes do not fit.
  """
  num_experts = load_E.shape[0]
  if num_groups % num_nodes:
    num_groups = num_nodes = 1
  if num_experts % num_groups or num_ranks % num_nodes or num_ranks * num_slots < num_experts:
    raise ValueError(
      f"num_groups, num_nodes, num_slots: expected divisors of {num_experts} experts and "
      f"{num_ranks} ranks, and a slot for each expert, got {num_groups}, {num_nodes}, {num_slots}"
    )
  group_size, per_node = num_experts // num_groups, num_experts // num_nodes
  node_g = pack(jnp.sum(load_E.reshape(num_groups, group_size), axis=1), num_nodes)
  group_g = jnp.argsort(node_g, stable=True)  # groups in the order of their nodes
  expert_NX = (group_g[:, None] * group_size + jnp.arange(group_size)[None]).reshape(
    num_nodes, per_node
  )

  def place(load_X: Array) -> Array:
    slots = num_ranks // num_nodes * num_slots
    count_X = placement.count_copies(load_X, slots - per_node, slots)
    copy_x = jnp.repeat(jnp.arange(per_node), count_X, total_repeat_length=slots)
    rank_x = pack((load_X / count_X.astype(jnp.float32))[copy_x], num_ranks // num_nodes)
    return copy_x[jnp.argsort(rank_x, stable=True)]

  index_Nx = jax.vmap(place)(load_E[expert_NX])
  expert_Nx = jnp.take_along_axis(expert_NX, index_Nx, axis=1)
  return expert_Nx.reshape(num_ranks, num_slots).astype(jnp.int32)


def pack(weight_x: Array, num_packs: int) -> Array:
  """Packs items into packs of equally many: the heaviest next, into the lightest open pack.

  Args:
    weight_x: ``[x]`` float32, x a multiple of ``num_packs``.
    num_packs: packs.

  Returns:
    ``[x]`` int32, the pack of each item.

  >>> pack(jnp.array([5.0, 1.0, 4.0, 3.0]), 2).tolist()
  [0, 0, 1, 1]
  """
  size = weight_x.shape[0] // num_packs
  order_x = jnp.argsort(-weight_x, stable=True)

  def put(index: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
    pack_x, weight_p, items_p = state
    item = order_x[index]
    chosen = jnp.argmin(jnp.where(items_p < size, weight_p, jnp.inf)).astype(jnp.int32)
    return (
      pack_x.at[item].set(chosen),
      weight_p.at[chosen].add(weight_x[item]),
      items_p.at[chosen].add(1),
    )

  zero_x, zero_p = (weight_x * 0).astype(jnp.int32), jnp.zeros(num_packs, jnp.float32)
  start = (zero_x, zero_p, jnp.zeros(num_packs, jnp.int32))
  return lax.fori_loop(0, weight_x.shape[0], put, start)[0]
