"""What the planner's kernel knows of replicas while it builds trees: who holds which expert.

One warpgroup has a rank or a slot per thread, in pieces of 128. An expert without replicas has
nothing to send, so what concerns an expert is worked out by the threads of its slots, all alike,
and lies in vectors in shared memory. A plan fills the first slots of each rank, mostly a few of
many: those behind the last filled one of any rank have no place in the vectors.

Two ranks that use two slots; threads 1 and 2 work out what concerns experts 7 and 2::

  rank      0   0   1   1
  item      0   1   2   3
  expert   −1   7   2  −1
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels.planner.tables import Problem
from pallas_kernels.support import Array
from pallas_kernels.warp.scatter import add_at
from pallas_kernels.warp.warps import (
  LANES,
  THREADS,
  chunks,
  divide,
  lookup,
  padded,
  pieces_of,
  thread_index,
  unrolled,
  unrolled_used,
  where,
)

_WARPS = THREADS // LANES


class Vectors(NamedTuple):
  """Vectors in shared memory, padded to 128.

  Of U used slots a rank, slot s of rank g is item ``g * U + s``.
  """

  expert: Any  # [I], the expert in each slot, -1 if empty, to the end of the last piece
  parent: Any  # [I], the result
  extra: Any  # [I], copies that the holder in each slot sends
  key: Any  # [I], three vectors for ``over_pairs``
  value: Any  # [I]
  result: Any  # [I]
  copies: Any  # [E]
  home_extra: Any  # [E], copies beyond the first that the home sends
  need: Any  # [E], copies that nobody sends yet
  from_expert: Any  # [E], how near a free rank is, and the member that leads there
  base: Any  # [G], copies that a rank must send: one of each of its replicated experts
  own_need: Any  # [G], of all its home experts
  spare: Any  # [G], copies that the rank could still send
  from_rank: Any  # [G], how near a free rank is, and the place of the expert that leads there
  offered: Any  # [G], the expert that a rank offers to send
  totals: Any  # [4], parts of the bound
  scratch: Any  # [128]
  used: Any  # [128], the first element alone: U, at least 1, if ``problem.finds_used``

  @staticmethod
  def sizes(problem: Problem) -> "Vectors":
    items = padded(problem.num_ranks * problem.num_slots)
    experts, ranks = padded(problem.num_experts), padded(problem.num_ranks)
    return Vectors(*[items] * 6, *[experts] * 4, *[ranks] * 5, *[THREADS] * 3)


class Item(NamedTuple):
  """128 slots; an empty one counts as one of expert 0."""

  index: Array
  filled: Array  # bool
  expert: Array
  rank: Array
  slot: Array
  home: Array  # the rank that the expert is from
  own: Array  # the expert's place among those of its home


@dataclasses.dataclass(frozen=True, kw_only=True)
class Members:
  """Who can send what: homes their own experts, holders those in their slots."""

  vectors: Vectors
  ranks: int  # G
  experts: int  # E
  home: int  # M
  slots: Array | int  # U, or all
  only: Item | None = None  # of 128 slots and fewer, used or not

  @staticmethod
  def read(vectors: Vectors, used: Array | int, problem: Problem) -> "Members":
    """The members that ``vectors.expert`` tells, of so many slots a rank."""
    members = Members(
      vectors=vectors,
      ranks=problem.num_ranks,
      experts=problem.num_experts,
      home=problem.num_home,
      slots=used,
    )
    if problem.num_ranks * problem.num_slots > THREADS:
      return members
    return dataclasses.replace(members, only=members.item(thread_index()))

  @property
  def items(self) -> Array | int:
    """Used slots of all ranks."""
    return self.ranks * self.slots

  def item(self, index: Array) -> Item:
    held = lookup(self.vectors.expert, index)
    expert = jnp.maximum(held, 0)
    rank, slot = divide(jnp.minimum(index, self.items - 1), self.slots)
    return Item(index, held >= 0, expert, rank, slot, *divide(expert, self.home))

  def fold[T](self, body: Callable[[Item, T], T], init: T) -> T:
    """Goes over all used slots: ``body(item, result so far)`` for each piece."""
    if self.only is not None:
      return body(self.only, init)
    first = thread_index()

    def step(piece: Array, carry: T) -> T:
      return body(self.item(first + piece * THREADS), carry)

    return unrolled(pieces_of(self.items), step, init, most=4)

  def each(self, body: Callable[[Item], None]) -> None:
    """Calls ``body`` for each piece of all used slots."""
    self.fold(lambda item, _: body(item), None)

  def over_rank[T](self, body: Callable[[Array, T], T], init: T) -> T:
    """Goes over the used slots of a rank: ``body(slot, result so far)``."""
    return unrolled(self.slots, body, init)

  def ranks_by_thread(self) -> list[tuple[Array, Array]]:
    """Each thread's number, and its rank; where there is no such rank, the last one."""
    return [(g, jnp.minimum(g, self.ranks - 1)) for _, g in chunks(self.ranks)]


def over_pairs(
  size: Array | int,
  group_ref: Any,
  own_ref: Any,
  other_refs: tuple[Any, Any],
  fold: Callable[[Array, Array, Array, Array, Array], Array],
  update_at: Callable[..., None],
  result_ref: Any,
) -> None:
  """Folds into each element of ``result_ref`` all elements of its group, ``size`` of them.

  A lane holds four elements, and each warp goes over a quarter of the others.

  Args:
    size: of all vectors but for the padding, whose group or value must make no difference.
    group_ref: the group of each element.
    own_ref: what an element is compared by.
    other_refs: two vectors of what the others bring.
    fold: from a result so far, a mask of the same group, the element's own, and the two others'.
    update_at: joins the results of the warps.
    result_ref: initial values; needs a barrier before and after.
  """
  warp, lane = divide(thread_index(), LANES)

  def fold_piece(first: Array | int, count: int) -> None:
    places = [lane + first + i * LANES for i in range(count)]
    mine = [(lookup(group_ref, place), lookup(own_ref, place)) for place in places]

    def step(turn: Array, results: list[Array]) -> list[Array]:
      other = turn * _WARPS + warp
      group, *brought = [lookup(ref, other) for ref in (group_ref, *other_refs)]
      return [
        fold(result, group == own_group, own, *brought)
        for result, (own_group, own) in zip(results, mine, strict=True)
      ]

    initial = [place * 0 for place in places]
    if isinstance(size, int):
      results = unrolled(-(-size // _WARPS), step, initial, most=8)
    else:
      turns = lax.div(size + (_WARPS - 1), jnp.int32(_WARPS))
      results = unrolled_used(THREADS // _WARPS, turns, step, initial, most=4)
    for place, result in zip(places, results, strict=True):
      update_at(result_ref, place, result, result > 0)

  if isinstance(size, int) and size <= THREADS:
    fold_piece(0, -(-size // LANES))
  else:
    unrolled(pieces_of(size), lambda piece, _: fold_piece(piece * THREADS, _WARPS), None, most=1)


def sum_greater(size: Array | int, group_ref: Any, vectors: Vectors) -> None:
  """Adds to ``result`` the values of those in the group whose key is greater."""
  v = vectors

  def fold(total: Array, same: Array, own: Array, key: Array, value: Array) -> Array:
    return total + where(same & (key > own), value, 0)

  over_pairs(size, group_ref, v.key, (v.key, v.value), fold, add_at, v.result)
