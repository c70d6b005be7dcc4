"""Transfer trees: which rank sends each replica its copy.

They are those that ``ultraep_jax/planning/relay.py`` describes, bit for bit. One warpgroup builds
them from the number of copies that each member of an expert sends (``flow.py``).

An expert of rank 0 with copies on ranks 1, 2 and 3. Without relays its home sends three; with
them no rank sends more than one::

  0 ──► 1
  0 ──► 2      or      0 ──► 1 ──► 2 ──► 3
  0 ──► 3
"""

import jax.numpy as jnp

from pallas_kernels.planner.flow import least_egress
from pallas_kernels.planner.members import Item, Members, Vectors, over_pairs, sum_greater
from pallas_kernels.planner.tables import Problem
from pallas_kernels.support import Array
from pallas_kernels.warp.scatter import barrier, max_at, put_at
from pallas_kernels.warp.warps import divide, lookup, where

# Two numbers in one int32: shared memory holds fewer slots, and fewer ranks.
_UNIT = 1 << 16
_NO_PLACE = (1 << 15) - 1


def direct(vectors: Vectors, used: Array | int, problem: Problem) -> None:
  """Homes send every copy: from ``expert`` to ``parent``."""
  Members.read(vectors, used, problem).each(
    lambda item: put_at(vectors.parent, item.index, where(item.filled, item.home, -1))
  )
  barrier()


def relayed(vectors: Vectors, used: Array | int, problem: Problem) -> None:
  """The trees of the lowest maximum egress, then the least depth: ``expert`` to ``parent``."""
  members = Members.read(vectors, used, problem)
  least_egress(members)
  _arrange(members)


def _arrange(members: Members) -> None:
  """Numbers an expert's slots in level order, those with more children first.

  The first are children of the home, the next of the first slot, and so on.
  """
  v, size = members.vectors, members.items

  def order(item: Item) -> None:
    children = lookup(v.extra, item.index)
    put_at(v.key, item.index, children * size - item.index)
    put_at(v.value, item.index, children + _UNIT)
    put_at(v.result, item.index, item.index * 0)

  members.each(order)
  barrier()
  sum_greater(size, v.expert, v)
  barrier()

  # The slot that feeds a slot is the last in order whose first child is not after it.
  def number(item: Item) -> None:
    place, children_before = divide(lookup(v.result, item.index), _UNIT)
    first_child = lookup(v.home_extra, item.expert) + 1 + children_before
    first_child = where(lookup(v.extra, item.index) > 0, first_child, _NO_PLACE)
    put_at(v.key, item.index, first_child * _UNIT)
    put_at(v.value, item.index, place * _UNIT + item.rank)
    put_at(v.result, item.index, item.index * 0)

  members.each(number)
  barrier()

  def last(feeder: Array, same: Array, own: Array, first_child: Array, value: Array) -> Array:
    return where(same & (first_child <= own), jnp.maximum(value, feeder), feeder)

  over_pairs(size, v.expert, v.value, (v.key, v.value), last, max_at, v.result)
  barrier()

  def lead(item: Item) -> None:
    place = divide(lookup(v.value, item.index), _UNIT)[0]
    feeder = divide(lookup(v.result, item.index), _UNIT)[1]
    parent = where(place <= lookup(v.home_extra, item.expert), item.home, feeder)
    put_at(v.parent, item.index, where(item.filled, parent, -1))

  members.each(lead)
  barrier()
