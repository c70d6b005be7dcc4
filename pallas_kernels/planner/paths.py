"""Copies that are left without a sender find one along shortest augmenting paths.

The last step of the search that ``ultraep_jax/planning/relay.py`` describes, bit for bit.
Distances and what leads on are found together, so that a path is then only followed.

A copy of expert A needs a sender. Rank 1 holds A but already sends its one copy, of expert B::

  A ──► rank 1, full ──► B ──► rank 4, free      rank 4 sends B in its place, and rank 1 sends A
"""

import jax.numpy as jnp
from jax import lax

from pallas_kernels.planner.members import Item, Members
from pallas_kernels.support import Array
from pallas_kernels.warp.scatter import add_at, any_of_all, barrier, min_at, put_at
from pallas_kernels.warp.warps import (
  INT32_MAX,
  any_of_warp,
  divide,
  lookup,
  ones,
  over_all,
  thread_index,
  warp_max,
  where,
)

_FAR = INT32_MAX  # not reached


def place_leftovers(members: Members) -> Array:
  """Places the remaining need along shortest augmenting paths, until there is none.

  Returns:
    1 in all threads if copies are left without a sender, else 0.
  """

  def place(state: tuple[Array, Array]) -> tuple[Array, Array]:
    neediest, _ = state
    expert = members.experts - 1 - divide(neediest, members.experts)[1]
    _measure(members, expert)
    reached = lookup(members.vectors.from_expert, expert) < _FAR
    _push(members, expert, reached)
    return _neediest(members), ones(reached)

  def possible(state: tuple[Array, Array]) -> Array:
    neediest, reached = state
    return any_of_warp(ones(neediest >= members.experts) & reached)

  neediest = _neediest(members)
  neediest, _ = lax.while_loop(possible, place, (neediest, neediest * 0 + 1))
  return ones(neediest >= members.experts)


def _neediest(members: Members) -> Array:
  """The greatest need and the first expert that has it, as ``need * E + E - 1 - expert``."""
  v = members.vectors

  def key(item: Item, most: Array) -> Array:
    order = members.experts - 1 - item.expert
    key = lookup(v.need, item.expert) * members.experts + order
    return where(item.filled, jnp.maximum(key, most), most)

  return over_all(warp_max, [members.fold(key, thread_index() * 0)], v.scratch)


def _measure(members: Members, target: Array) -> None:
  """Links from experts and ranks to the nearest rank that can send one more copy.

  An expert leads to its members, a rank to the experts it could give up a copy of. All that is
  as far is found at once, experts at odd distances and ranks at even ones, and with it the first
  of what leads on: ``distance * G + rank`` for experts, ``distance * (M + S) + place`` for ranks.
  The search ends where ``target`` is reached: only what is nearer lies on its path.
  """
  v, places = members.vectors, members.home + members.slots
  for g, rank in members.ranks_by_thread():
    free = lookup(v.spare, rank) > 0
    put_at(v.from_rank, g, where(free, 0, _FAR), g < members.ranks)
  members.each(lambda item: put_at(v.from_expert, item.expert, item.expert * 0 + _FAR, item.filled))
  barrier()

  def widen(state: tuple[Array, Array]) -> tuple[Array, Array]:
    distance, _ = state

    def reach_expert(item: Item) -> None:
      for rank in (item.home, item.rank):
        near = item.filled & (lookup(v.from_rank, rank) < _FAR)
        min_at(v.from_expert, item.expert, rank + distance * members.ranks, near)

    members.each(reach_expert)
    for g, rank in members.ranks_by_thread():
      put_at(v.offered, g, lookup(v.from_rank, rank))  # while others find more
    barrier()

    def reach_rank(item: Item, found_more: Array) -> Array:
      near = item.filled & (lookup(v.from_expert, item.expert) < _FAR)
      for rank, place, extra in (
        (item.home, item.own, lookup(v.home_extra, item.expert)),
        (item.rank, members.home + item.slot, lookup(v.extra, item.index)),
      ):
        further = near & (extra > 0) & (lookup(v.offered, rank) == _FAR)
        min_at(v.from_rank, rank, (distance + 1) * places + place, further)
        found_more |= ones(further)
      return found_more

    missing = lookup(v.from_expert, target) == _FAR
    found_more = members.fold(reach_rank, thread_index() * 0) > 0
    return distance + 2, any_of_all(found_more & missing)

  start = (jnp.int32(1), jnp.bool_(True))
  lax.while_loop(lambda state: state[1], widen, start)


def _push(members: Members, target: Array, reached: Array) -> None:
  """If it is reached, gives a sender to one more copy of ``target`` along a shortest path."""
  v, places = members.vectors, members.home + members.slots
  one_thread = thread_index() == 0

  def step(expert: Array) -> Array:
    home = divide(expert, members.home)[0]
    rank = divide(lookup(v.from_expert, expert), members.ranks)[1]
    distance, place = divide(lookup(v.from_rank, rank), places)
    ends, gives_own = distance == 0, place < members.home
    first_slot = rank * members.slots
    given_slot = where(ends | gives_own, -1, first_slot + place - members.home)
    given_own = rank * members.home + jnp.minimum(place, members.home - 1)

    def move(item: Item) -> None:
      more = item.filled & (item.expert == expert) & (item.rank == rank)
      less = item.index == given_slot
      extra = lookup(v.extra, item.index) + ones(more) - ones(less)
      put_at(v.extra, item.index, extra, more | less)

    members.each(move)
    add_at(v.home_extra, expert, 1, one_thread & (rank == home))
    add_at(v.home_extra, given_own, -1, one_thread & gives_own & ~ends)
    add_at(v.spare, rank, -1, one_thread & ends)
    held = lookup(v.expert, jnp.maximum(given_slot, 0))
    return where(ends, -1, where(gives_own, given_own, held))

  add_at(v.need, target, -1, one_thread & reached)
  start = where(reached, target, -1)
  lax.while_loop(lambda expert: any_of_warp(ones(expert >= 0)), step, start)
  barrier()
