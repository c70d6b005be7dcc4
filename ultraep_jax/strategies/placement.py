"""Replicas from a list of loads, and an even split over copies, as EPLB makes them.

Shapes: N domains, R ranks of a domain, M home experts of a rank, S slots of a rank; X experts of a
domain, ``X = R * M``.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from ultraep_jax.planning.load import position_in_group
from ultraep_jax.planning.plan import join_domains
from ultraep_jax.types import Array


def count_copies(load_X: Array, extra: int, most: int) -> Array:
  """Gives one copy after the other to the expert with the highest load per copy.

  Args:
    load_X: ``[X]`` float32.
    extra: copies to give.
    most: copies that an expert may have.

  Returns:
    ``[X]`` int32, copies with the first, at least 1.
  """

  def give(_: int, count_X: Array) -> Array:
    share_X = jnp.where(count_X < most, load_X / count_X.astype(jnp.float32), -1.0)
    expert = jnp.argmax(share_X)
    return count_X.at[expert].add((share_X[expert] >= 0).astype(jnp.int32))

  return lax.fori_loop(0, extra, give, (load_X * 0).astype(jnp.int32) + 1)


@functools.partial(jax.jit, static_argnames=("num_ranks", "num_slots", "domain_size", "max_copies"))
def place_replicas(
  load_E: Array,
  *,
  num_ranks: int,
  num_slots: int,
  domain_size: int,
  max_copies: int | None = None,
) -> Array:
  """Fills replica slots by load: replicate the highest load per copy, then pack.

  Homes stay where they are. Copies go, in falling order of their share of the load, to the least
  loaded rank of the domain with an empty slot that does not have the expert; one for which there
  is none is not made.

  Args:
    load_E: ``[E]`` float32, not negative.
    num_ranks: G.
    num_slots: S.
    domain_size: ranks of a domain.
    max_copies: copies that an expert may have, its home one of them; ``None``: one on each rank.

  Returns:
    ``[G, S]`` int32, the expert in each slot, −1 if empty.
  """
  domains, per_rank = num_ranks // domain_size, load_E.shape[0] // num_ranks
  if num_slots == 0 or domain_size == 1:
    return jnp.full((num_ranks, num_slots), -1, jnp.int32)
  load_NX = load_E.reshape(domains, -1)
  most = domain_size if max_copies is None else min(max_copies, domain_size)
  place = functools.partial(_place, num_ranks=domain_size, num_slots=num_slots, most=most)
  return join_domains(jax.vmap(place)(load_NX), per_rank)


def _place(load_X: Array, num_ranks: int, num_slots: int, most: int) -> Array:
  """``[R, S]``, the expert in each slot of one domain."""
  per_rank = load_X.shape[0] // num_ranks
  copies = num_ranks * num_slots
  count_X = count_copies(load_X, copies, most)
  share_X = load_X / count_X.astype(jnp.float32)
  order_X = jnp.argsort(-share_X, stable=True)
  end_X = jnp.cumsum(count_X[order_X] - 1)
  home_R = jnp.sum(share_X.reshape(num_ranks, per_rank), axis=1)

  def put(index: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
    expert_RS, load_R = state
    expert = order_X[jnp.minimum(jnp.searchsorted(end_X, index, side="right"), end_X.size - 1)]
    filled_R = jnp.sum(expert_RS >= 0, axis=1)
    has_R = jnp.any(expert_RS == expert, axis=1) | (jnp.arange(num_ranks) == expert // per_rank)
    open_R = (filled_R < num_slots) & ~has_R
    rank = jnp.argmin(jnp.where(open_R, load_R, jnp.inf))
    fits = open_R[rank] & (index < end_X[-1])
    slot = jnp.where(fits, filled_R[rank], num_slots)  # one past the end is dropped
    expert_RS = expert_RS.at[rank, slot].set(expert.astype(jnp.int32), mode="drop")
    return expert_RS, load_R.at[rank].add(jnp.where(fits, share_X[expert], 0.0))

  # Zeros made from the load vary over the same mesh axes, as a carry inside shard_map must.
  empty_RS = jnp.broadcast_to((home_R * 0).astype(jnp.int32)[:, None] - 1, (num_ranks, num_slots))
  return lax.fori_loop(0, copies, put, (empty_RS, home_R))[0]


def split_evenly(load_E: Array, replica_expert_GS: Array) -> tuple[Array, Array]:
  """Splits each expert's load into equal shares, the first larger by one where needed.

  Args:
    load_E: ``[E]`` int32.
    replica_expert_GS: ``[G, S]`` int32, the expert in each slot, −1 if empty.

  Returns:
    ``[G, S]`` int32, the experts without the slots that nothing is left for, and ``[G, S]``
    int32, what each slot serves. The home comes first, then the slots in their order.
  """
  num_experts = load_E.shape[0]
  expert = replica_expert_GS.reshape(-1)
  group = jnp.where(expert < 0, num_experts, expert)
  position, count_E = position_in_group(group, num_experts)
  share_E, rest_E = jnp.divmod(load_E, count_E + 1)
  index = jnp.maximum(expert, 0)
  tokens = share_E[index] + (position + 1 < rest_E[index]).astype(jnp.int32)
  return drop_idle(
    replica_expert_GS, jnp.where(expert < 0, 0, tokens).reshape(replica_expert_GS.shape)
  )


def drop_idle(replica_expert_GS: Array, tokens_GS: Array) -> tuple[Array, Array]:
  """Empties the slots that serve nothing: their copy would be sent for nothing."""
  return jnp.where(tokens_GS > 0, replica_expert_GS, -1), tokens_GS
