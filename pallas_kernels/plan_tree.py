"""Transfer trees: which rank sends each replica its copy, as ``ultraep_jax/relay.py`` describes.

One warpgroup computes the same trees bit for bit. It holds an expert, a rank or a slot per
thread, in pieces of 128, and shares what the others need in vectors in shared memory. Sums by
expert are loops over all slots, in which every thread looks at the same slot at a time.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.plan_tables import Problem
from pallas_kernels.warps import (
  INT32_MAX,
  THREADS,
  ceil_div,
  chunks,
  clip,
  divide,
  lookup,
  ones,
  over_all,
  padded,
  unrolled,
  warp_max,
  warp_min,
  warp_sum,
  where,
)

Array = jax.Array
Pieces = list[Array]

_FAR = 1 << 30  # a distance that no path has


class Vectors(NamedTuple):
  """Vectors in shared memory, padded to 128. Slot s of rank g is item ``g * S + s``."""

  expert: Any  # [I], the expert in each slot, -1 if empty
  parent: Any  # [I], the result
  extra: Any  # [I], copies that the holder in each slot sends
  copies: Any  # [E]
  home_extra: Any  # [E], copies beyond the first that the home sends
  need: Any  # [E], copies that nobody sends yet
  far_expert: Any  # [E], links to the nearest rank that can send one more copy
  base: Any  # [G], copies that a rank must send: one of each of its replicated experts
  spare: Any  # [G], copies that the rank could still send
  far: Any  # [G]
  offer: Any  # [G]
  chosen: Any  # [G], the slot that a rank offers to send for
  taken: Any  # [G]
  scratch: Any  # [128]

  @staticmethod
  def sizes(problem: Problem) -> "Vectors":
    items = padded(problem.num_ranks * problem.num_slots)
    experts, ranks = padded(problem.num_experts), padded(problem.num_ranks)
    return Vectors(
      *(items, items, items),
      *(experts, experts, experts, experts),
      *(ranks, ranks, ranks, ranks, ranks, ranks),
      THREADS,
    )


class _Tree:
  """The steps; each leaves its result in the vectors."""

  def __init__(self, vectors: Vectors, problem: Problem):
    self.v = vectors
    self.ranks, self.experts = problem.num_ranks, problem.num_experts
    self.home, self.slots = problem.num_home, problem.num_slots
    self.items = self.ranks * self.slots

  def every(self, reduce: Callable[[Array], Array], pieces: Pieces) -> Array:
    """Over all threads and pieces, in all threads."""
    return over_all(reduce, pieces, self.v.scratch)

  def first(self, size: int, values: Pieces, value: Array) -> Array:
    """The least index with this value."""
    places = [
      where((x == value) & (i < size), i, INT32_MAX)
      for x, (_, i) in zip(values, chunks(size), strict=True)
    ]
    return self.every(warp_min, places)

  def read(self, ref: Any, size: int) -> Pieces:
    return [ref[pl.ds(start, THREADS)] for start, _ in chunks(size)]

  def write(self, ref: Any, pieces: Pieces) -> None:
    for place, piece in enumerate(pieces):
      ref[pl.ds(place * THREADS, THREADS)] = piece

  def of_slots(self, value: Callable[[Array], Array]) -> Pieces:
    """For each expert the sum of a value over the slots that hold it."""
    experts = [e for _, e in chunks(self.experts)]

    def add(item: Array, sums: Pieces) -> Pieces:
      expert, amount = self.v.expert[item], value(item)
      return [s + where(e == expert, amount, 0) for s, e in zip(sums, experts, strict=True)]

    return unrolled(self.items, add, [e * 0 for e in experts], most=8)

  def rank_of(self, item: Array) -> Array:
    return divide(item, self.slots)[0]

  def at_expert(self, ref: Any, expert: Array, empty: int) -> Array:
    return where(expert < 0, empty, lookup(ref, jnp.maximum(expert, 0)))

  # --- the least cap -------------------------------------------------------------------------

  def count(self) -> Array:
    """Copies and bases; returns the lower bound of the cap."""
    v = self.v
    copies = self.of_slots(lambda item: jnp.int32(1))
    self.write(v.copies, copies)
    bases, active = [], []
    for _, g in chunks(self.ranks):
      index = jnp.minimum(g, self.ranks - 1)

      def replicated(m: Array, total: Array, first: Array = index * self.home) -> Array:
        return total + jnp.minimum(lookup(v.copies, first + m), 1)

      def holds(s: Array, found: Array, first: Array = index * self.slots) -> Array:
        return found | ones(lookup(v.expert, first + s) >= 0)

      inside = g < self.ranks
      base = where(inside, unrolled(self.home, replicated, g * 0), 0)
      bases.append(base)
      active.append(where(inside, ones(base > 0) | unrolled(self.slots, holds, g * 0), 0))
    self.write(v.base, bases)
    all_copies = self.every(warp_sum, copies)
    overall = ceil_div(all_copies, jnp.maximum(self.every(warp_sum, active), 1))
    held = self.of_slots(lambda item: v.base[self.rank_of(item)])
    alone = []
    for (_, e), c, base in zip(chunks(self.experts), copies, held, strict=True):
      rank = divide(jnp.minimum(e, self.experts - 1), self.home)[0]
      members = c - 1 + base + lookup(v.base, rank)
      alone.append(where(c > 0, ceil_div(jnp.maximum(members, 0), c + 1), 0))
    bound = self.every(warp_max, [jnp.maximum(a, overall) for a in alone])
    return jnp.maximum(bound, self.every(warp_max, bases))

  def homes_send(self, cap: Array) -> None:
    """Homes take the need of their own experts, the neediest first, as far as the cap allows."""
    v, taken, needs = self.v, [], []
    for _, e in chunks(self.experts):
      e = jnp.minimum(e, self.experts - 1)
      rank = divide(e, self.home)[0]
      need, own = jnp.maximum(lookup(v.copies, e) - 1, 0), divide(e, self.home)[1]

      def add(m: Array, before: Array, need=need, own=own, first=e - own) -> Array:
        other = jnp.maximum(lookup(v.copies, first + m) - 1, 0)
        return before + where((other > need) | ((other == need) & (m < own)), other, 0)

      before = unrolled(self.home, add, e * 0)
      takes = clip(cap - lookup(v.base, rank) - before, need)
      taken.append(takes)
      needs.append(need - takes)
    self.write(v.home_extra, taken)
    inside = [e < self.experts for _, e in chunks(self.experts)]
    self.write(v.need, [where(i, n, 0) for i, n in zip(inside, needs, strict=True)])
    spare = []
    for _, g in chunks(self.ranks):
      first = jnp.minimum(g, self.ranks - 1) * self.home

      def add_own(m: Array, total: Array, first: Array = first) -> Array:
        return total + lookup(v.home_extra, first + m)

      left = cap - lookup(v.base, jnp.minimum(g, self.ranks - 1))
      spare.append(left - unrolled(self.home, add_own, g * 0))
    self.write(v.spare, spare)
    self.write(v.extra, [i * 0 for _, i in chunks(self.items)])

  def holders_send(self) -> None:
    """In rounds, each rank offers all its spare to its neediest slot; larger offers go first."""

    def offer_round(turn: Array) -> Array:
      self._offer()
      self._accept()
      return turn + 1

    def unfinished(turn: Array) -> Array:
      return (turn < self.slots) & self.has_need()

    lax.while_loop(unfinished, offer_round, jnp.int32(0))

  def has_need(self) -> Array:
    """A scalar; the same for all threads, since all read one element."""
    total = self.every(warp_sum, self.read(self.v.need, self.experts))
    self.v.scratch[pl.ds(0, THREADS)] = total
    return self.v.scratch[0] > 0

  def _offer(self) -> None:
    v, offers, chosen = self.v, [], []
    for _, g in chunks(self.ranks):
      index = jnp.minimum(g, self.ranks - 1)

      def pick(s: Array, best: tuple[Array, Array], first: Array = index * self.slots):
        need, slot = best
        other = self.at_expert(v.need, lookup(v.expert, first + s), 0)
        return jnp.maximum(other, need), where(other > need, s, slot)

      need, slot = unrolled(self.slots, pick, (g * 0, g * 0))
      chosen.append(slot)
      offers.append(where(g < self.ranks, jnp.minimum(lookup(v.spare, index), need), 0))
    self.write(v.offer, offers)
    self.write(v.chosen, chosen)

  def _chosen_expert(self, rank: Array) -> Array:
    return self.v.expert[rank * self.slots + self.v.chosen[rank]]

  def _accept(self) -> None:
    v, taken = self.v, []
    for _, g in chunks(self.ranks):
      index = jnp.minimum(g, self.ranks - 1)
      offer = lookup(v.offer, index)
      expert = lookup(v.expert, index * self.slots + lookup(v.chosen, index))

      def add(h: Array, before: Array, offer=offer, expert=expert, g=g) -> Array:
        other = v.offer[h]
        goes_first = (other > offer) | ((other == offer) & (h < g))
        return before + where(goes_first & (expert == self._chosen_expert(h)), other, 0)

      before = unrolled(self.ranks, add, g * 0, most=8)
      need = self.at_expert(v.need, expert, 0)
      taken.append(where(g < self.ranks, clip(need - before, offer), 0))
    self.write(v.taken, taken)
    spare = self.read(v.spare, self.ranks)
    self.write(v.spare, [s - t for s, t in zip(spare, taken, strict=True)])
    extras = []
    for (_, i), extra in zip(chunks(self.items), self.read(v.extra, self.items), strict=True):
      rank = self.rank_of(jnp.minimum(i, self.items - 1))
      here = (i - rank * self.slots) == lookup(v.chosen, rank)
      extras.append(extra + where(here, lookup(v.taken, rank), 0))
    self.write(v.extra, extras)
    experts = [e for _, e in chunks(self.experts)]

    def subtract(h: Array, needs: Pieces) -> Pieces:
      expert, amount = self._chosen_expert(h), v.taken[h]
      return [n - where(e == expert, amount, 0) for n, e in zip(needs, experts, strict=True)]

    needs = unrolled(self.ranks, subtract, self.read(v.need, self.experts), most=8)
    self.write(v.need, needs)

  # --- leftovers -----------------------------------------------------------------------------

  def place_leftovers(self) -> None:
    """Places the remaining need along shortest augmenting paths; stops where there is none."""

    def place(_: Array) -> Array:
      v = self.v
      self.measure()
      needs = self.read(v.need, self.experts)
      expert = self.first(self.experts, needs, self.every(warp_max, needs))
      stuck = lookup(v.far_expert, expert) >= _FAR
      takes = [ones((e == expert) & ~stuck) for _, e in chunks(self.experts)]
      self.write(v.need, [n - t for n, t in zip(needs, takes, strict=True)])
      self.push(where(stuck, -1, expert))
      return ones(self.scalar(stuck) == 0) * ones(self.has_need())

    lax.while_loop(lambda more: more > 0, place, ones(self.has_need()))

  def scalar(self, x: Array) -> Array:
    """A scalar from an array that is the same in all threads."""
    self.v.scratch[pl.ds(0, THREADS)] = ones(x) if x.dtype == jnp.bool_ else x
    return self.v.scratch[0]

  def measure(self) -> None:
    """Links from each expert and rank to the nearest rank that can send one more copy."""
    v = self.v
    inside = [g < self.ranks for _, g in chunks(self.ranks)]
    start = [
      where(i & (s > 0), 0, _FAR)
      for i, s in zip(inside, self.read(v.spare, self.ranks), strict=True)
    ]
    self.write(v.far, start)
    experts = [e for _, e in chunks(self.experts)]

    def relax(more: Array) -> Array:
      del more

      def nearest(item: Array, far: Pieces) -> Pieces:
        expert, other = v.expert[item], v.far[self.rank_of(item)] + 1
        return [
          where(e == expert, jnp.minimum(f, other), f) for e, f in zip(experts, far, strict=True)
        ]

      homes = [
        lookup(v.far, divide(jnp.minimum(e, self.experts - 1), self.home)[0]) + 1 for e in experts
      ]
      homes = [jnp.minimum(far, _FAR) for far in homes]
      self.write(v.far_expert, unrolled(self.items, nearest, homes, most=8))
      before, after = self.read(v.far, self.ranks), []
      for (_, g), own_far in zip(chunks(self.ranks), start, strict=True):
        index = jnp.minimum(g, self.ranks - 1)

        def own(m: Array, far: Array, first: Array = index * self.home) -> Array:
          step = lookup(v.far_expert, first + m) + 1
          return where(lookup(v.home_extra, first + m) > 0, jnp.minimum(far, step), far)

        def held(s: Array, far: Array, first: Array = index * self.slots) -> Array:
          step = self.at_expert(v.far_expert, lookup(v.expert, first + s), _FAR) + 1
          return where(lookup(v.extra, first + s) > 0, jnp.minimum(far, step), far)

        after.append(unrolled(self.slots, held, unrolled(self.home, own, own_far)))
      self.write(v.far, after)
      changed = [where(i, ones(x != y), 0) for i, x, y in zip(inside, before, after, strict=True)]
      return self.scalar(self.every(warp_max, changed))

    lax.while_loop(lambda changed: changed > 0, relax, jnp.int32(1))

  def push(self, expert: Array) -> None:
    """Gives a sender to one more copy of ``expert`` along a shortest path; none if it is -1."""
    v = self.v

    def step(expert: Array) -> Array:
      home = where(expert < 0, -1, divide(jnp.maximum(expert, 0), self.home)[0])
      far = []
      for (_, g), value in zip(chunks(self.ranks), self.read(v.far, self.ranks), strict=True):
        index = jnp.minimum(g, self.ranks - 1)

        def holds(s: Array, found: Array, first: Array = index * self.slots) -> Array:
          return found | ones(lookup(v.expert, first + s) == expert)

        member = unrolled(self.slots, holds, ones(g == home)) > 0
        far.append(where(member & (g < self.ranks), value, _FAR))
      rank = self.first(self.ranks, far, self.every(warp_min, far))
      done = lookup(v.spare, rank) > 0

      # The rank gives up a copy of the member of it that is nearest to a free rank, home
      # experts before slots, each from the first up.
      first_own, first_slot = rank * self.home, rank * self.slots

      def own(m: Array, best: tuple[Array, Array]) -> tuple[Array, Array]:
        distance, place = best
        movable = lookup(v.home_extra, first_own + m) > 0
        far = where(movable, lookup(v.far_expert, first_own + m), _FAR)
        return jnp.minimum(far, distance), where(far < distance, m, place)

      def held(s: Array, best: tuple[Array, Array]) -> tuple[Array, Array]:
        distance, place = best
        movable = lookup(v.extra, first_slot + s) > 0
        far = self.at_expert(v.far_expert, lookup(v.expert, first_slot + s), _FAR)
        far = where(movable, far, _FAR)
        return jnp.minimum(far, distance), where(far < distance, self.home + s, place)

      best = unrolled(self.home, own, (rank * 0 + INT32_MAX, rank * 0))
      _, given_up = unrolled(self.slots, held, best)
      next_slot = first_slot + jnp.maximum(given_up - self.home, 0)
      from_home = given_up < self.home
      next_expert = where(from_home, first_own + given_up, lookup(v.expert, next_slot))

      def changed(pieces: Pieces, size: int, up: Callable, down: Callable) -> Pieces:
        return [
          x + ones(up(i)) - ones(~done & down(i))
          for x, (_, i) in zip(pieces, chunks(size), strict=True)
        ]

      home_extra = changed(
        self.read(v.home_extra, self.experts),
        self.experts,
        lambda e: (e == expert) & (rank == home),
        lambda e: from_home & (e == first_own + given_up),
      )
      expert_items = self.read(v.expert, self.items)
      extras = []
      for (_, i), held_expert, extra in zip(
        chunks(self.items), expert_items, self.read(v.extra, self.items), strict=True
      ):
        mine = self.rank_of(jnp.minimum(i, self.items - 1)) == rank
        up = mine & (held_expert == expert) & (i < self.items)
        down = ~done & ~from_home & (i == next_slot)
        extras.append(extra + ones(up) - ones(down))
      spares = [
        s - ones(done & (g == rank))
        for s, (_, g) in zip(self.read(v.spare, self.ranks), chunks(self.ranks), strict=True)
      ]
      self.write(v.home_extra, home_extra)
      self.write(v.extra, extras)
      self.write(v.spare, spares)
      return where(done, -1, next_expert)

    lax.while_loop(lambda expert: self.scalar(expert) >= 0, step, expert)

  # --- the trees -----------------------------------------------------------------------------

  def arrange(self) -> None:
    """Numbers an expert's slots in level order, those with more children first."""
    v = self.v
    experts, children = self.read(v.expert, self.items), self.read(v.extra, self.items)
    items = [i for _, i in chunks(self.items)]
    zeros = [i * 0 for i in items]

    def order(j: Array, carry: tuple[Pieces, Pieces]) -> tuple[Pieces, Pieces]:
      places, befores = carry
      expert, other = v.expert[j], v.extra[j]
      goes_first = [
        (e == expert) & ((other > c) | ((other == c) & (j < i)))
        for e, c, i in zip(experts, children, items, strict=True)
      ]
      return (
        [p + ones(f) for p, f in zip(places, goes_first, strict=True)],
        [b + where(f, other, 0) for b, f in zip(befores, goes_first, strict=True)],
      )

    places, befores = unrolled(self.items, order, (zeros, zeros), most=8)
    of_home = [self.at_expert(v.home_extra, e, 0) + 1 for e in experts]
    firsts = [
      where(c > 0, b + h, INT32_MAX) for c, b, h in zip(children, befores, of_home, strict=True)
    ]
    # The slot that feeds a slot is the last in order whose first child is not after it.
    self.write(v.parent, firsts)
    self.write(v.extra, places)

    def feed(j: Array, carry: tuple[Pieces, Pieces]) -> tuple[Pieces, Pieces]:
      lasts, feeders = carry
      expert, first, place = v.expert[j], v.parent[j], v.extra[j]
      feeds = [
        (e == expert) & (first <= p) & (place > last)
        for e, p, last in zip(experts, places, lasts, strict=True)
      ]
      return (
        [where(f, place, last) for f, last in zip(feeds, lasts, strict=True)],
        [where(f, j, feeder) for f, feeder in zip(feeds, feeders, strict=True)],
      )

    nowhere = [i - 1 for i in zeros]
    _, feeders = unrolled(self.items, feed, (nowhere, zeros), most=8)
    parents = []
    for expert, place, children_of_home, feeder in zip(
      experts, places, of_home, feeders, strict=True
    ):
      home = divide(jnp.maximum(expert, 0), self.home)[0]
      parent = where(place < children_of_home, home, self.rank_of(feeder))
      parents.append(where(expert < 0, -1, parent))
    self.write(v.parent, parents)


def direct(vectors: Vectors, problem: Problem) -> None:
  """Homes send every copy: from ``expert`` to ``parent``."""
  tree = _Tree(vectors, problem)
  experts = tree.read(vectors.expert, tree.items)
  homes = [divide(jnp.maximum(e, 0), tree.home)[0] for e in experts]
  tree.write(vectors.parent, [where(e < 0, -1, h) for e, h in zip(experts, homes, strict=True)])


def relayed(vectors: Vectors, problem: Problem) -> None:
  """The trees of the least busiest egress, then the least depth: ``expert`` to ``parent``."""
  tree = _Tree(vectors, problem)
  bound = tree.count()

  def search(cap: Array) -> Array:
    tree.homes_send(cap)
    tree.holders_send()
    tree.place_leftovers()
    return cap + 1

  # The first cap has to be tried before anything is known to be left.
  tree.write(vectors.need, [e * 0 + 1 for _, e in chunks(tree.experts)])
  lax.while_loop(lambda cap: tree.has_need(), search, bound)
  tree.arrange()
