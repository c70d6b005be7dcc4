"""Replication in plain JAX, right on every backend: in steps, one expert a rank.

In a step every rank may pass one expert to the rank that is so far after it in its domain, the same
distance for all. A rank that has several copies of another's experts gets them in turns. Steps
that no rank needs are left out: an empty plan has none, and one whose only busy rank sends n copies
has n. Homes send all copies; transfer trees are ignored. The adjoint sends gradients home in the
same steps, so every home adds them in the same order every time.

Shapes: R ranks of a domain.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ultraep_jax.mesh import axes_of, mesh_max, to_varying, varying_axes
from ultraep_jax.types import Array, AxisName

_WRITTEN_OUT = 3  # steps of copies between two ranks that need no loop
_AT_MOST_ONE: dict[str, Any] = {"mode": "drop", "unique_indices": True}


def replicate[T](
  home: T, replica_expert_GS: Array, axis_name: AxisName, domain_size: int | None
) -> T:
  """As ``replicate.replicate``."""
  num_slots = replica_expert_GS.shape[1]
  axes = varying_axes(home, replica_expert_GS) | {*axes_of(axis_name)}
  homes, tree = jax.tree.flatten(to_varying(home, axes))

  def empty() -> list[Array]:
    return [_unwritten((num_slots, *leaf.shape[1:]), leaf.dtype, axes) for leaf in homes]

  if not num_slots:
    return tree.unflatten(empty())
  steps = _Steps.of(replica_expert_GS, homes[0].shape[0], axis_name, domain_size)

  def step(i: Array, copies: list[Array]) -> list[Array]:
    this = steps.step(i)
    passed = steps.pass_on([leaf[this.expert] for leaf in homes], this, 1)
    return [_set(*each, this.slot) for each in zip(copies, passed, strict=True)]

  def loop() -> list[Array]:
    return lax.fori_loop(jnp.int32(0), steps.count, step, empty())

  def written_out(count: int) -> list[Array]:
    copies = empty()  # made in its branch: XLA copies those that are made outside
    for i in range(count):
      copies = step(jnp.int32(i), copies)
    return copies

  # Among more ranks a step has a branch for each distance, and several take long to compile.
  if steps.size != 2:
    return tree.unflatten(loop())
  # A GPU's host waits for every turn of a loop, and once for which branch to take.
  counts = range(min(_WRITTEN_OUT, num_slots) + 1)
  branches = [
    *(functools.partial(written_out, count) for count in counts),
    *([loop] if num_slots > _WRITTEN_OUT else []),
  ]
  return tree.unflatten(lax.switch(jnp.minimum(steps.count, len(branches) - 1), branches))


class _Sums(NamedTuple):
  """Gradients of homes while those of their copies arrive.

  Attributes:
    total: ``[M, ...]`` each.
    rest: what rounding left of each; ``None`` where nothing is rounded, or once at most.
    begun_M: whether the rests of an expert are written.
  """

  total: list[Array]
  rest: list[Array | None]
  begun_M: Array


def reduce_replicas[T](
  replica: T, home: T, replica_expert_GS: Array, axis_name: AxisName, domain_size: int | None
) -> T:
  """As ``replicate.reduce_replicas``; of a turn, the gradients of the next rank come first.

  Beside totals of bfloat16 is what rounding them left, in float32, so that sums are of float32.
  Experts without copies are not touched.
  """
  if not replica_expert_GS.shape[1]:
    return home
  axes = varying_axes(replica, home, replica_expert_GS) | {*axes_of(axis_name)}
  replicas = jax.tree.leaves(to_varying(replica, axes))
  homes, tree = jax.tree.flatten(to_varying(home, axes))
  num_home = homes[0].shape[0]
  steps = _Steps.of(replica_expert_GS, num_home, axis_name, domain_size)

  def step(i: Array, sums: _Sums) -> _Sums:
    this = steps.step(i)
    passed = steps.pass_on([leaf[this.slot] for leaf in replicas], this, -1)
    return _add(sums, this.expert, passed)

  # Of two ranks, an expert has one copy at most, and adding a term of its dtype rounds once.
  rests = [
    None
    if leaf.dtype == jnp.float32 or (steps.size <= 2 and leaf.dtype == term.dtype)
    else _unwritten(leaf.shape, jnp.dtype(jnp.float32), axes)
    for leaf, term in zip(homes, replicas, strict=True)
  ]
  sums = _Sums(homes, rests, to_varying(jnp.zeros(num_home, jnp.bool_), axes))
  # Always a loop: of branches XLA:CPU copies all homes' gradients.
  return tree.unflatten(lax.fori_loop(jnp.int32(0), steps.count, step, sums).total)


def _add(sums: _Sums, expert: Array, terms: Sequence[Array]) -> _Sums:
  """Adds gradients to those of an expert; to none if it is −1."""
  begun = sums.begun_M[jnp.maximum(expert, 0)]
  totals, rests = [], []
  for total, rest, term in zip(sums.total, sums.rest, terms, strict=True):
    if rest is None:
      totals.append(_at(total, expert).add(term.astype(total.dtype), **_AT_MOST_ONE))
    else:
      index = jnp.maximum(expert, 0)
      exact = total[index].astype(jnp.float32) + term.astype(jnp.float32)
      exact += jnp.where(begun, rest[index], -0.0)  # nothing, to a zero of either sign
      rounded = exact.astype(total.dtype)
      totals.append(_set(total, rounded, expert))
      rest = _set(rest, exact - rounded.astype(jnp.float32), expert)
    rests.append(rest)
  return _Sums(totals, rests, _set(sums.begun_M, jnp.bool_(True), expert))


def _at(array: Array, index: Array) -> Any:
  """An index of its first axis; none where it is −1, which would be the last."""
  return array.at[jnp.where(index < 0, array.shape[0], index)]


def _set(array: Array, value: Array, index: Array) -> Array:
  """The array with this at an index of its first axis; as it is where the index is −1.

  As a scatter this is one kernel. Of a slice that is read and written, XLA makes an array between.
  """
  return _at(array, index).set(value, **_AT_MOST_ONE)


def _unwritten(shape: tuple[int, ...], dtype: jnp.dtype, axes: frozenset[str]) -> Array:
  return to_varying(lax.empty(shape, dtype), axes)


class _Step(NamedTuple):
  """What this rank sends and gets in a step; −1: nothing.

  Attributes:
    distance: how far experts travel.
    expert: of its own, which the rank so far after this one copies.
    slot: of its own, which has a copy from the rank so far before this one.
  """

  distance: Array
  expert: Array
  slot: Array


@dataclasses.dataclass(frozen=True)
class _Steps:
  """Who passes what to whom in a domain, in which step.

  Attributes:
    axis_name: the expert mesh axis.
    size: R.
    place: of this rank in its domain.
    home_RS: the place of the home of each slot's expert, −1 where a slot is empty.
    expert_RS: the expert, counted among those of its home.
    turn_RS: how many slots of the rank before this one have the same home.
    used: the steps, as ``turn * R + distance``.
    count: how many.
  """

  axis_name: AxisName
  size: int
  place: Array
  home_RS: Array
  expert_RS: Array
  turn_RS: Array
  used: Array
  count: Array

  @classmethod
  def of(
    cls, replica_expert_GS: Array, num_home: int, axis_name: AxisName, domain_size: int | None
  ) -> "_Steps":
    num_ranks, num_slots = replica_expert_GS.shape
    size = domain_size or num_ranks
    filled_GS = replica_expert_GS >= 0
    home_GS = jnp.where(filled_GS, replica_expert_GS // num_home % size, -1)
    earlier_SS = jnp.tri(num_slots, k=-1, dtype=jnp.bool_)
    same_GSS = (home_GS[:, :, None] == home_GS[:, None, :]) & earlier_SS[None]
    turn_GS = jnp.sum(same_GSS, axis=2, dtype=jnp.int32)
    distance_GS = (jnp.arange(num_ranks, dtype=jnp.int32)[:, None] - home_GS) % size
    most = num_slots * size
    step_GS = jnp.where(filled_GS & (distance_GS > 0), turn_GS * size + distance_GS, most)
    is_used = jnp.zeros(most, jnp.int32).at[step_GS].set(1, mode="drop")
    is_used = mesh_max(is_used, same_along=axis_name)  # all of the axis have the plan
    rank = lax.axis_index(axis_name)
    mine = (home_GS, replica_expert_GS % num_home, turn_GS)
    return cls(
      axis_name,
      size,
      rank % size,
      *(lax.dynamic_slice_in_dim(array_GS, rank // size * size, size) for array_GS in mine),
      used=jnp.argsort(is_used, descending=True, stable=True).astype(jnp.int32),
      count=jnp.sum(is_used, dtype=jnp.int32),
    )

  def step(self, i: Array) -> _Step:
    turn, distance = self.used[i] // self.size, self.used[i] % self.size
    to, source = (self.place + distance) % self.size, (self.place - distance) % self.size
    copied_S = (self.home_RS[to] == self.place) & (self.turn_RS[to] == turn)
    filled_S = (self.home_RS[self.place] == source) & (self.turn_RS[self.place] == turn)
    slot_S = jnp.arange(self.home_RS.shape[1], dtype=jnp.int32)
    return _Step(
      distance,
      jnp.max(jnp.where(copied_S, self.expert_RS[to], -1)),
      jnp.max(jnp.where(filled_S, slot_S, -1)),
    )

  def pass_on(self, arrays: Sequence[Array], step: _Step, sign: int) -> list[Array]:
    """Passes arrays to the rank so far after this one, or before it, and returns what it gets."""
    joined = _joined(arrays)
    branches = [
      functools.partial(self._shift, distance=sign * distance) for distance in range(1, self.size)
    ]
    if len(branches) > 1:
      joined = lax.switch(step.distance - 1, branches, joined)
    elif branches:
      joined = branches[0](joined)
    return _parted(joined, arrays)

  def _shift(self, joined: list[Array], distance: int) -> list[Array]:
    pairs = []
    for rank in range(lax.axis_size(self.axis_name)):
      base = rank // self.size * self.size
      pairs.append((rank, base + (rank - base + distance) % self.size))
    return [lax.ppermute(array, self.axis_name, pairs) for array in joined]


def _joined(arrays: Sequence[Array]) -> list[Array]:
  """Arrays of one dtype as one: few large transfers are faster."""
  flat = [array.reshape(-1) for array in arrays]
  dtypes = _dtypes(arrays)
  return [jnp.concatenate([each for each in flat if each.dtype == dtype]) for dtype in dtypes]


def _parted(joined: Sequence[Array], like: Sequence[Array]) -> list[Array]:
  """The adjoint of ``_joined``."""
  rest = dict(zip(_dtypes(like), joined, strict=True))
  parts = []
  for array in like:
    parts.append(rest[array.dtype][: array.size].reshape(array.shape))
    rest[array.dtype] = rest[array.dtype][array.size :]
  return parts


def _dtypes(arrays: Sequence[Array]) -> list[jnp.dtype]:
  return list(dict.fromkeys(array.dtype for array in arrays))
