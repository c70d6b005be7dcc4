"""How many copies each member of an expert sends, as ``ultraep_jax/planning/relay.py`` describes.

One warpgroup searches for the same flow bit for bit. Each step leaves its result in the vectors,
with a barrier after it.

An expert of rank 0 with copies on ranks 1, 2 and 3, and no rank may send more than one::

  need 3   rank 0, the home, sends 1     ──►  need 2
           ranks 1 and 2 send 1 each     ──►  need 0: trees with this cap exist
"""

import jax.numpy as jnp
from jax import lax

from pallas_kernels.planner.members import Item, Members, sum_greater
from pallas_kernels.planner.paths import place_leftovers
from pallas_kernels.support import Array
from pallas_kernels.warp.scatter import add_at, any_of_all, barrier, fill, max_at, put_at
from pallas_kernels.warp.warps import (
  LANES,
  THREADS,
  any_of_warp,
  ceil_div,
  clip,
  lookup,
  ones,
  thread_index,
  unrolled,
  warp_max,
  warp_sum,
  where,
)


def least_egress(members: Members) -> None:
  """Raises the cap from its lower bound to the first where every copy has a sender."""

  def search(state: tuple[Array, Array]) -> tuple[Array, Array]:
    cap, _ = state
    _homes_send(members, cap)
    _holders_send(members)
    return cap + 1, place_leftovers(members)

  start = _count(members)
  lax.while_loop(lambda state: any_of_warp(state[1]), search, (start, start * 0 + 1))


def _count(members: Members) -> Array:
  """Copies, bases and needs of the homes; returns the lower bound of the cap, in all threads."""
  v = members.vectors
  total, busy, most, alone = range(4)
  thread = thread_index()
  first_lane = thread & (LANES - 1) == 0
  of_members = v.from_expert  # the bases of the expert's members
  for ref in (v.copies, v.home_extra, v.need, of_members):
    fill(ref, members.experts, 0)
  fill(v.totals, THREADS, 0)
  barrier()

  def count_item(item: Item) -> None:
    add_at(v.copies, item.expert, 1, item.filled)
    add_at(v.totals, thread * 0 + total, warp_sum(ones(item.filled)), first_lane)

  members.each(count_item)
  barrier()

  for g, rank in members.ranks_by_thread():

    def add(m: Array, sums: tuple[Array, Array], first: Array = rank * members.home):
      base, need = sums
      copies = lookup(v.copies, first + m)
      return base + jnp.minimum(copies, 1), need + jnp.maximum(copies - 1, 0)

    def holds(s: Array, found: Array, first: Array = rank * members.slots) -> Array:
      return found | ones(lookup(v.expert, first + s) >= 0)

    base, need = unrolled(members.home, add, (g * 0, g * 0))
    held = members.over_rank(holds, g * 0)
    inside = g < members.ranks
    put_at(v.base, g, base, inside)
    put_at(v.own_need, g, need, inside)
    busy_here = warp_sum(ones(inside) * (ones(base > 0) | held))
    add_at(v.totals, thread * 0 + busy, busy_here, first_lane)
    max_at(v.totals, thread * 0 + most, warp_max(base), first_lane)
  barrier()

  members.each(lambda item: add_at(of_members, item.expert, lookup(v.base, item.rank), item.filled))
  barrier()

  def bound_item(item: Item) -> None:
    copies = lookup(v.copies, item.expert)
    sends = copies - 1 + lookup(of_members, item.expert) + lookup(v.base, item.home)
    bound = where(item.filled, ceil_div(jnp.maximum(sends, 0), copies + 1), 0)
    max_at(v.totals, thread * 0 + alone, warp_max(bound), first_lane)

  members.each(bound_item)
  barrier()

  of_all = [lookup(v.totals, thread * 0 + i) for i in (total, busy, most, alone)]
  overall = ceil_div(of_all[total], jnp.maximum(of_all[busy], 1))
  return jnp.maximum(overall, jnp.maximum(of_all[most], of_all[alone]))


def _homes_send(members: Members, cap: Array) -> None:
  """Homes take the need of their own experts, the neediest first, as far as the cap allows."""
  v = members.vectors

  def take(item: Item) -> None:
    need = lookup(v.copies, item.expert) - 1

    def add(m: Array, before: Array) -> Array:
      other = jnp.maximum(lookup(v.copies, item.expert - item.own + m) - 1, 0)
      goes_first = (other > need) | ((other == need) & (m < item.own))
      return before + where(goes_first, other, 0)

    before = unrolled(members.home, add, need * 0)
    taken = clip(cap - lookup(v.base, item.home) - before, need)
    put_at(v.home_extra, item.expert, taken, item.filled)
    put_at(v.need, item.expert, need - taken, item.filled)
    put_at(v.extra, item.index, need * 0)

  members.each(take)
  for g, rank in members.ranks_by_thread():
    room = cap - lookup(v.base, rank)
    left = room - jnp.minimum(room, lookup(v.own_need, rank))
    put_at(v.spare, g, left, g < members.ranks)
  barrier()


def _holders_send(members: Members) -> None:
  """In rounds, each rank offers all its spare to its neediest slot; larger offers go first."""

  v = members.vectors

  def unfinished(turn: Array) -> Array:
    def is_needy(item: Item, found: Array) -> Array:
      return found | ones(item.filled & (lookup(v.need, item.expert) > 0))

    needy = members.fold(is_needy, thread_index() * 0)
    return (turn < members.slots) & any_of_all(needy > 0)

  def offer_round(turn: Array) -> Array:
    _offer(members)
    return turn + 1

  lax.while_loop(unfinished, offer_round, jnp.int32(0))


def _offer(members: Members) -> None:
  v, offers = members.vectors, []
  for g, rank in members.ranks_by_thread():

    def pick(s: Array, best: tuple[Array, ...], rank: Array = rank) -> tuple[Array, ...]:
      need, slot, expert = best
      held = lookup(v.expert, rank * members.slots + s)
      other = where(held < 0, 0, lookup(v.need, jnp.maximum(held, 0)))
      better = other > need
      return jnp.maximum(other, need), where(better, s, slot), where(better, held, expert)

    need, slot, expert = members.over_rank(pick, (g * 0, g * 0, g * 0))
    spare = lookup(v.spare, rank)
    offer = where(g < members.ranks, jnp.minimum(spare, need), 0)
    put_at(v.offered, g, expert)
    put_at(v.key, g, offer * members.ranks + (members.ranks - 1 - rank))
    put_at(v.value, g, offer)
    put_at(v.result, g, g * 0)
    offers.append((g, rank * members.slots + slot, expert, need, offer, spare))
  barrier()
  sum_greater(members.ranks, v.offered, v)
  barrier()
  for g, item, expert, need, offer, spare in offers:
    taken = clip(need - lookup(v.result, g), offer)
    put_at(v.spare, g, spare - taken, g < members.ranks)
    add_at(v.extra, item, taken, taken > 0)
    add_at(v.need, expert, -taken, taken > 0)
  barrier()
