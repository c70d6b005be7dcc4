"""Transfer trees: which rank sends each replica slot its copy of an expert's weights.

A rank that holds a copy can forward it, so the home of a hot expert need not send every copy
itself. The copies of one expert form a tree rooted at the home. Trees minimise the *egress* of
the busiest rank, the copies it sends over all experts, and keep the depth low.

Any numbers of children that add up to the copies of an expert can be arranged as a tree, as
long as the home has at least one. So the search is not over trees but over how many copies
each member (the home or a holder) sends: a bipartite flow from experts to ranks, where each
rank sends at most ``cap`` copies. Each home is charged one copy of each of its replicated
experts; the other copies of an expert, its *need*, may go to any member:

1. Start from the largest of three lower bounds on the cap.
2. Homes take as much of their own experts' need as fits.
3. Holders offer all they can still send to the neediest expert they hold.
4. What is left over is placed along shortest augmenting paths. If there is no path, no trees
   with this cap exist: the search starts again with one copy more, so the final cap is the least.
5. The members of an expert are numbered from the root in levels, those with more children
   first, which is the shallowest tree with these numbers of children.
"""

from typing import Literal, NamedTuple

import jax.numpy as jnp
from jax import lax

from ultraep_jax.types import Array

_FAR = 1 << 30  # a distance that no path has


class _Members(NamedTuple):
  """Who can send what. Home experts are the first M columns, replica slots the last S."""

  expert_GP: Array  # [G, M + S] int32, -1 for an empty slot
  copies_E: Array
  base_G: Array  # copies that the rank must send: one of each of its replicated experts


class _Flow(NamedTuple):
  """A state of the search for one cap."""

  extra_GP: Array  # copies sent beyond the base
  spare_G: Array  # copies that the rank could still send
  need_E: Array  # copies that nobody sends yet


def transfer_tree(
  replica_expert_GS: Array,
  *,
  num_experts: int,
  transfer: Literal["auto", "direct", "relay"] = "auto",
) -> Array:
  """Plans which rank sends each replica slot its copy.

  With ``"relay"`` and ``"auto"`` the busiest rank's egress is the least that any trees reach,
  and the depth is the least that these counts of children allow. Where sending every copy from
  its home reaches that egress, the result is the direct one. Ties go to the lowest rank and slot.

  Args:
    replica_expert_GS: ``[G, S]`` int32, the expert in each slot, −1 if empty. An expert is at
      most once on a rank and never on its home.
    num_experts: E, a multiple of G.
    transfer: ``"direct"`` (the home sends each copy), ``"relay"`` or ``"auto"``.

  Returns:
    ``[G, S]`` int32, the rank that sends the slot its copy, −1 if the slot is empty.

  Raises:
    TypeError: ``replica_expert_GS`` is not int32.
    ValueError: a shape or ``transfer`` is not as described.
  """
  if transfer not in ("auto", "direct", "relay"):
    raise ValueError(f"transfer: expected 'auto', 'direct' or 'relay', got {transfer!r}")
  _check_placement(replica_expert_GS, num_experts)
  if transfer == "direct" or replica_expert_GS.size == 0:
    return _home(replica_expert_GS, num_experts)
  members = _members(replica_expert_GS, num_experts)
  return _arrange(members, _least_egress(members).extra_GP)


def egress_per_rank(parent_GS: Array) -> Array:
  """Copies that each rank sends, ``[..., G]`` int32, from ``Plan.parent``, ``[..., G, S]``."""
  num_ranks = parent_GS.shape[-2]
  rank_G = jnp.expand_dims(jnp.arange(num_ranks, dtype=jnp.int32), tuple(range(parent_GS.ndim)))
  return jnp.sum(parent_GS[..., None] == rank_G, axis=(-3, -2), dtype=jnp.int32)


def depth(replica_expert_GS: Array, parent_GS: Array, num_experts: int) -> Array:
  """The most links that a copy travels from its home, ``[]`` int32; 0 without replicas.

  Args:
    replica_expert_GS: ``[G, S]`` int32, the expert in each slot, −1 if empty.
    parent_GS: ``[G, S]`` int32, trees as from ``transfer_tree``.
    num_experts: E.

  Raises:
    TypeError: ``replica_expert_GS`` is not int32.
    ValueError: a shape is not as described.
  """
  _check_placement(replica_expert_GS, num_experts)
  if parent_GS.shape != replica_expert_GS.shape:
    raise ValueError(f"parent_GS: expected shape {replica_expert_GS.shape}, got {parent_GS.shape}")
  num_ranks, num_slots = replica_expert_GS.shape
  size = num_ranks * num_slots
  if size == 0:
    return jnp.int32(0)
  # The slot that feeds each slot; a slot fed by a home points past the end, where depth is 0.
  same_GSS = replica_expert_GS[parent_GS] == replica_expert_GS[:, :, None]
  feeder_GS = parent_GS * num_slots + jnp.argmax(same_GSS, axis=-1).astype(jnp.int32)
  relayed_GS = parent_GS != _home(replica_expert_GS, num_experts)
  feeder = jnp.append(jnp.where(relayed_GS, feeder_GS, size), size)
  links = jnp.append((replica_expert_GS >= 0).astype(jnp.int32), jnp.int32(0))
  for _ in range(num_ranks.bit_length()):  # pointer doubling
    links, feeder = links + links[feeder], feeder[feeder]
  return jnp.max(links)


def _check_placement(replica_expert_GS: Array, num_experts: int) -> None:
  if replica_expert_GS.ndim != 2 or replica_expert_GS.shape[0] == 0:
    raise ValueError(f"replica_expert_GS: expected shape [G, S], got {replica_expert_GS.shape}")
  if replica_expert_GS.dtype != jnp.int32:
    raise TypeError(f"replica_expert_GS: expected int32, got {replica_expert_GS.dtype}")
  num_ranks = replica_expert_GS.shape[0]
  if num_experts < num_ranks or num_experts % num_ranks:
    raise ValueError(f"num_experts: expected a multiple of {num_ranks} ranks, got {num_experts}")


def _home(replica_expert_GS: Array, num_experts: int) -> Array:
  num_home = num_experts // replica_expert_GS.shape[0]
  return jnp.where(replica_expert_GS < 0, -1, replica_expert_GS // num_home)


def _members(replica_expert_GS: Array, num_experts: int) -> _Members:
  num_ranks = replica_expert_GS.shape[0]
  own_GM = jnp.arange(num_experts, dtype=jnp.int32).reshape(num_ranks, -1)
  expert_GP = jnp.concatenate([own_GM, replica_expert_GS], axis=1)
  copies_E = _sum_by(replica_expert_GS, jnp.ones_like(replica_expert_GS), num_experts)
  base_G = jnp.sum(copies_E.reshape(num_ranks, -1) > 0, axis=1, dtype=jnp.int32)
  return _Members(expert_GP, copies_E, base_G)


def _sum_by(index: Array, value: Array, size: int) -> Array:
  """Sums values with the same index; index -1 is dropped."""
  return jnp.zeros(size, jnp.int32).at[jnp.where(index < 0, size, index)].add(value, mode="drop")


def _take(value_E: Array, index: Array, empty: int) -> Array:
  return jnp.where(index < 0, empty, value_E[jnp.maximum(index, 0)])


def _least_egress(members: _Members) -> _Flow:
  """Raises the cap from its lower bound to the first where every copy has a sender."""

  def search(state: tuple[Array, _Flow]) -> tuple[Array, _Flow]:
    cap, _ = state
    flow = _place_leftovers(members, _holders_send(members, _homes_send(members, cap)))
    return cap + 1, flow

  def unfinished(state: tuple[Array, _Flow]) -> Array:
    return jnp.any(state[1].need_E > 0)

  none = jnp.zeros_like(members.expert_GP)
  start = _Flow(none, jnp.zeros_like(members.base_G), jnp.maximum(members.copies_E - 1, 0))
  return lax.while_loop(unfinished, search, (_lower_bound(members), start))[1]


def _lower_bound(members: _Members) -> Array:
  """The cap must cover the base, all copies over all members, and each expert over its own."""
  expert_GP, copies_E, base_G = members
  num_ranks, num_experts = base_G.size, copies_E.size
  slot_GS = expert_GP[:, num_experts // num_ranks :]
  active = jnp.sum((base_G > 0) | jnp.any(slot_GS >= 0, axis=1), dtype=jnp.int32)
  overall = -(-jnp.sum(copies_E) // jnp.maximum(active, 1))
  base_GP = jnp.broadcast_to(base_G[:, None], expert_GP.shape)
  base_E = _sum_by(expert_GP, base_GP, num_experts)  # of the members of an expert
  alone = -(-(copies_E - 1 + base_E) // (copies_E + 1))
  alone = jnp.max(jnp.where(copies_E > 0, alone, 0))
  return jnp.maximum(jnp.maximum(jnp.max(base_G), overall), alone)


def _homes_send(members: _Members, cap: Array) -> _Flow:
  """Homes take the need of their own experts, the neediest first, as far as the cap allows."""
  expert_GP, copies_E, base_G = members
  num_ranks = base_G.size
  need_GM = jnp.maximum(copies_E - 1, 0).reshape(num_ranks, -1)
  order_GM = jnp.argsort(-need_GM, axis=1, stable=True)
  need_sorted_GM = jnp.take_along_axis(need_GM, order_GM, axis=1)
  before_GM = jnp.cumsum(need_sorted_GM, axis=1) - need_sorted_GM
  spare_G = cap - base_G
  taken_sorted_GM = jnp.clip(spare_G[:, None] - before_GM, 0, need_sorted_GM)
  taken_GM = jnp.take_along_axis(taken_sorted_GM, jnp.argsort(order_GM, axis=1), axis=1)
  extra_GP = jnp.zeros_like(expert_GP).at[:, : taken_GM.shape[1]].set(taken_GM)
  return _Flow(extra_GP, spare_G - jnp.sum(taken_GM, axis=1), (need_GM - taken_GM).reshape(-1))


def _holders_send(members: _Members, flow: _Flow) -> _Flow:
  """In rounds, each rank offers all its spare to its neediest slot; larger offers go first.

  After a round each rank has spent its spare or its neediest expert needs nothing more, so S
  rounds leave no rank that could still help an expert it holds.
  """
  num_ranks, num_experts = members.base_G.size, members.copies_E.size
  num_home = num_experts // num_ranks
  slot_GS = members.expert_GP[:, num_home:]
  rank_G = jnp.arange(num_ranks)

  def offer_round(_: int, flow: _Flow) -> _Flow:
    extra_GP, spare_G, need_E = flow
    need_GS = _take(need_E, slot_GS, 0)
    slot_G = jnp.argmax(need_GS, axis=1)
    expert_G = slot_GS[rank_G, slot_G]
    need_G = need_GS[rank_G, slot_G]
    offer_G = jnp.minimum(spare_G, need_G)
    before_G = _sum_before(expert_G, offer_G)
    taken_G = jnp.clip(need_G - before_G, 0, offer_G)
    return _Flow(
      extra_GP.at[rank_G, num_home + slot_G].add(taken_G),
      spare_G - taken_G,
      need_E - _sum_by(expert_G, taken_G, num_experts),
    )

  return lax.fori_loop(0, slot_GS.shape[1], offer_round, flow)


def _sum_before(group: Array, value: Array) -> Array:
  """For each item, the sum over items of its group that are larger, or equal and earlier."""
  order = jnp.lexsort((-value, group))
  group, value = group[order], value[order]
  total = jnp.cumsum(value) - value
  first = jnp.searchsorted(group, group, side="left")
  return jnp.zeros_like(value).at[order].set(total - total[first])


def _place_leftovers(members: _Members, flow: _Flow) -> _Flow:
  """Places the remaining need along shortest augmenting paths; stops where there is none."""

  def place(state: tuple[_Flow, Array]) -> tuple[_Flow, Array]:
    flow, left = state
    expert = jnp.argmax(flow.need_E).astype(jnp.int32)
    far_E, far_G = _distances(members, flow)
    stuck = far_E[expert] >= _FAR
    flow = _push(members, flow, jnp.where(stuck, -1, expert), far_E, far_G)
    flow = flow._replace(need_E=flow.need_E.at[expert].add(jnp.where(stuck, 0, -1)))
    return flow, jnp.where(stuck, 0, left - 1)

  return lax.while_loop(lambda state: state[1] > 0, place, (flow, jnp.sum(flow.need_E)))[0]


def _distances(members: _Members, flow: _Flow) -> tuple[Array, Array]:
  """Links from each expert and each rank to the nearest rank that can send one more copy.

  An expert leads to its members, a rank to the experts it could give up a copy of.
  """
  expert_GP, copies_E, _ = members
  num_experts = copies_E.size
  index_GP = jnp.where(expert_GP < 0, num_experts, expert_GP)
  start_G = jnp.where(flow.spare_G > 0, 0, _FAR)

  def relax(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
    _, far_G, _ = state
    far_GP = jnp.broadcast_to(far_G[:, None] + 1, index_GP.shape)
    far_E = jnp.full_like(copies_E, _FAR).at[index_GP].min(far_GP, mode="drop")
    step_GP = jnp.where(flow.extra_GP > 0, _take(far_E, expert_GP, _FAR) + 1, _FAR)
    return far_E, jnp.minimum(start_G, jnp.min(step_GP, axis=1)), far_G

  def changed(state: tuple[Array, Array, Array]) -> Array:
    return jnp.any(state[1] != state[2])

  start = (jnp.full_like(copies_E, _FAR), start_G, start_G - 1)
  far_E, far_G, _ = lax.while_loop(changed, relax, start)
  return far_E, far_G


def _push(members: _Members, flow: _Flow, expert: Array, far_E: Array, far_G: Array) -> _Flow:
  """Gives a sender to one more copy of ``expert`` along a shortest path; none if it is -1."""
  expert_GP = members.expert_GP

  def step(state: tuple[Array, _Flow]) -> tuple[Array, _Flow]:
    expert, flow = state
    member_GP = expert_GP == expert
    rank = jnp.argmin(jnp.where(jnp.any(member_GP, axis=1), far_G, _FAR))
    extra_P = flow.extra_GP[rank] + member_GP[rank].astype(jnp.int32)
    movable_P = flow.extra_GP[rank] > 0
    given_up = jnp.argmin(jnp.where(movable_P, far_E[expert_GP[rank]], _FAR))
    done = flow.spare_G[rank] > 0
    extra_P = extra_P.at[given_up].add(jnp.where(done, 0, -1))
    spare_G = flow.spare_G.at[rank].add(jnp.where(done, -1, 0))
    pushed = flow._replace(extra_GP=flow.extra_GP.at[rank].set(extra_P), spare_G=spare_G)
    return jnp.where(done, -1, expert_GP[rank, given_up]), pushed

  return lax.while_loop(lambda state: state[0] >= 0, step, (expert, flow))[1]


def _arrange(members: _Members, extra_GP: Array) -> Array:
  """Builds the trees from the number of copies that each member sends.

  The slots of an expert in level order are sorted by falling number of children. The first are
  children of the home, the next of the first slot, and so on.
  """
  expert_GP, copies_E, base_G = members
  num_ranks, num_experts = base_G.size, copies_E.size
  num_home = num_experts // num_ranks
  num_slots = expert_GP.shape[1] - num_home
  expert = expert_GP[:, num_home:].reshape(-1)
  children = extra_GP[:, num_home:].reshape(-1)
  of_home_E = extra_GP[:, :num_home].reshape(-1) + jnp.minimum(copies_E, 1)
  order = jnp.lexsort((-children, jnp.where(expert < 0, num_experts, expert)))
  expert, children = expert[order], children[order]

  place = jnp.arange(expert.size, dtype=jnp.int32)
  end_of_home_E = jnp.cumsum(copies_E) - copies_E + of_home_E
  first_child = jnp.cumsum(children) - children + _take(jnp.cumsum(of_home_E), expert, 0)
  feeder = jnp.zeros_like(place)
  feeder = feeder.at[jnp.where(children > 0, first_child, place.size)].max(place, mode="drop")
  from_home = place < _take(end_of_home_E, expert, 0)
  parent = jnp.where(from_home, expert // num_home, order[lax.cummax(feeder)] // num_slots)
  parent = jnp.where(expert < 0, -1, parent).astype(jnp.int32)
  return jnp.zeros_like(parent).at[order].set(parent).reshape(num_ranks, num_slots)
