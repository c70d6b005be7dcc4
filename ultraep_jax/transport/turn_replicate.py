"""Replication in plain JAX, right on every backend: in turns, one expert for each pair of ranks.

In a turn every rank may pass one expert to each rank of its domain, in steps of up to seven
``ppermute``: to the next rank, to the one after it, and so on. There are as many turns as one rank
has copies of another's experts at most, and steps that no rank needs are left out: an empty plan
has none. Homes send all copies; transfer trees are ignored. The adjoint sends gradients home in
the same steps, so every home adds them in the same order every time.

``ppermute`` and not ``all_to_all``: exchanges of tokens have all of those, and XLA:CPU may mix up
two of a kind that do not wait for each other.

Shapes: R ranks of a domain, X ranks that a rank passes experts to in a step.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ultraep_jax.mesh import axes_of, mesh_max, to_varying, varying_axes
from ultraep_jax.types import Array, AxisName

_MOST_AT_A_TIME = 7  # X, at most: all others of a node of eight


def replicate[T](
  home: T, replica_expert_GS: Array, axis_name: AxisName, domain_size: int | None
) -> T:
  """As ``replicate.replicate``."""
  num_slots = replica_expert_GS.shape[1]
  axes = varying_axes(home, replica_expert_GS) | {*axes_of(axis_name)}
  homes, tree = jax.tree.flatten(to_varying(home, axes))
  copies = [_unwritten((num_slots, *leaf.shape[1:]), leaf.dtype, axes) for leaf in homes]
  if not num_slots:
    return tree.unflatten(copies)
  steps = _Steps.of(replica_expert_GS, homes[0].shape[0], axis_name, domain_size)

  def step(i: Array, copies: list[Array]) -> list[Array]:
    this = steps.step(i)
    passed = steps.pass_on([leaf[this.expert_X] for leaf in homes], this, 1)
    slot_X = jnp.where(this.slot_X < 0, num_slots, this.slot_X)
    return [
      leaf.at[slot_X].set(block, mode="drop", unique_indices=True)
      for leaf, block in zip(copies, passed, strict=True)
    ]

  return tree.unflatten(lax.fori_loop(jnp.int32(0), steps.count, step, copies))


class _Sums(NamedTuple):
  """Gradients of homes while those of their copies arrive.

  Attributes:
    total: ``[M, ...]`` each.
    rest: what rounding left of each, where a total has less than float32; else ``None``.
    begun_M: whether the rests of an expert are written.
  """

  total: list[Array]
  rest: list[Array | None]
  begun_M: Array


def reduce_replicas[T](
  replica: T, home: T, replica_expert_GS: Array, axis_name: AxisName, domain_size: int | None
) -> T:
  """As ``replicate.reduce_replicas``; of a step, the gradients of the next rank come first.

  Beside totals of bfloat16 is what rounding them left, so that a sum loses no more than one
  rounding, and experts without copies are not touched.
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
    blocks = steps.pass_on([leaf[this.slot_X] for leaf in replicas], this, -1)

    def add(x: Array | int, sums: _Sums) -> _Sums:
      return _add(sums, this.expert_X[x], [block[x] for block in blocks])

    return lax.fori_loop(0, steps.at_a_time, add, sums)

  rests = [
    None if leaf.dtype == jnp.float32 else _unwritten(leaf.shape, leaf.dtype, axes)
    for leaf in homes
  ]
  sums = _Sums(homes, rests, to_varying(jnp.zeros(num_home, jnp.bool_), axes))
  return tree.unflatten(lax.fori_loop(jnp.int32(0), steps.count, step, sums).total)


def _add(sums: _Sums, expert: Array, terms: Sequence[Array]) -> _Sums:
  """Adds gradients to those of an expert; to none if it is −1."""
  wanted, expert = expert >= 0, jnp.maximum(expert, 0)
  begun = sums.begun_M[expert]
  totals, rests = [], []
  for total, rest, term in zip(sums.total, sums.rest, terms, strict=True):
    exact = total[expert].astype(jnp.float32) + term.astype(jnp.float32)
    if rest is not None:
      exact += jnp.where(begun, rest[expert].astype(jnp.float32), 0)
    rounded = exact.astype(total.dtype)
    totals.append(total.at[expert].set(jnp.where(wanted, rounded, total[expert])))
    if rest is not None:
      left = (exact - rounded.astype(jnp.float32)).astype(rest.dtype)
      rest = rest.at[expert].set(jnp.where(wanted, left, rest[expert]))
    rests.append(rest)
  return _Sums(totals, rests, sums.begun_M.at[expert].set(begun | wanted))


def _unwritten(shape: tuple[int, ...], dtype: jnp.dtype, axes: frozenset[str]) -> Array:
  return to_varying(lax.empty(shape, dtype), axes)


class _Step(NamedTuple):
  """What this rank sends and gets in a step; −1: nothing.

  Attributes:
    group: of distances; the ranks are those from ``group * X + 1`` further on.
    expert_X: of its own, which the rank so far after this one copies.
    slot_X: of its own, which has a copy from the rank so far before this one.
  """

  group: Array
  expert_X: Array
  slot_X: Array


@dataclasses.dataclass(frozen=True)
class _Steps:
  """Who passes what to whom in a domain, in which step.

  Attributes:
    axis_name: the expert mesh axis.
    size: R.
    at_a_time: X.
    place: of this rank in its domain.
    home_RS: the place of the home of each slot's expert, −1 where a slot is empty.
    expert_RS: the expert, counted among those of its home.
    turn_RS: how many slots of the rank before this one have the same home.
    used: turns and groups that are used anywhere on the mesh, as ``turn * groups + group``.
    count: how many.
  """

  axis_name: AxisName
  size: int
  at_a_time: int
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
    at_a_time = max(min(size - 1, _MOST_AT_A_TIME), 1)
    filled_GS = replica_expert_GS >= 0
    home_GS = jnp.where(filled_GS, replica_expert_GS // num_home % size, -1)
    earlier_SS = jnp.tri(num_slots, k=-1, dtype=jnp.bool_)
    same_GSS = (home_GS[:, :, None] == home_GS[:, None, :]) & earlier_SS[None]
    turn_GS = jnp.sum(same_GSS, axis=2, dtype=jnp.int32)
    groups = -(-(size - 1) // at_a_time)
    distance_GS = (jnp.arange(num_ranks, dtype=jnp.int32)[:, None] - home_GS) % size
    step_GS = turn_GS * groups + (distance_GS - 1) // at_a_time
    most = num_slots * groups
    step_GS = jnp.where(filled_GS & (distance_GS > 0), step_GS, most)
    is_used = mesh_max(jnp.zeros(most, jnp.int32).at[step_GS].set(1, mode="drop"))
    rank = lax.axis_index(axis_name)
    first = rank // size * size
    mine = (home_GS, replica_expert_GS % num_home, turn_GS)
    return cls(
      axis_name,
      size,
      at_a_time,
      rank % size,
      *(lax.dynamic_slice_in_dim(array_GS, first, size) for array_GS in mine),
      used=jnp.argsort(is_used, descending=True, stable=True).astype(jnp.int32),
      count=jnp.sum(is_used, dtype=jnp.int32),
    )

  @property
  def groups(self) -> int:
    """Steps of a turn."""
    return -(-(self.size - 1) // self.at_a_time)

  def step(self, i: Array) -> _Step:
    turn, group = self.used[i] // self.groups, self.used[i] % self.groups
    distance_X = group * self.at_a_time + 1 + jnp.arange(self.at_a_time, dtype=jnp.int32)
    to_X, from_X = (self.place + distance_X) % self.size, (self.place - distance_X) % self.size
    copied_XS = (self.home_RS[to_X] == self.place) & (self.turn_RS[to_X] == turn)
    copied_XS &= (distance_X < self.size)[:, None]
    filled_XS = self.home_RS[self.place][None] == from_X[:, None]
    filled_XS &= (self.turn_RS[self.place] == turn)[None] & (distance_X < self.size)[:, None]
    slot_1S = jnp.arange(self.home_RS.shape[1], dtype=jnp.int32)[None]
    return _Step(
      group,
      jnp.max(jnp.where(copied_XS, self.expert_RS[to_X], -1), axis=1),
      jnp.max(jnp.where(filled_XS, slot_1S, -1), axis=1),
    )

  def pass_on(self, arrays: Sequence[Array], step: _Step, sign: int) -> list[Array]:
    """Passes part x of ``[X, ...]`` arrays to the rank that is so far after, or before, this one.

    Returns:
      What this rank gets from ranks before, or after, it.
    """

    def group(index: int, joined: list[Array]) -> list[Array]:
      first = index * self.at_a_time + 1
      return [
        jnp.stack([self._shift(part, sign * (first + x)) for x, part in enumerate(array_XN)])
        for array_XN in joined
      ]

    branches = [functools.partial(group, index) for index in range(self.groups)]
    joined = _joined(arrays)
    passed = branches[0](joined) if len(branches) == 1 else lax.switch(step.group, branches, joined)
    return _parted(passed, arrays)

  def _shift(self, part: Array, distance: int) -> Array:
    if abs(distance) >= self.size:
      return part  # the last step of a turn has fewer
    pairs = []
    for rank in range(lax.axis_size(self.axis_name)):
      base = rank // self.size * self.size
      pairs.append((rank, base + (rank - base + distance) % self.size))
    return lax.ppermute(part, self.axis_name, pairs)


def _joined(arrays: Sequence[Array]) -> list[Array]:
  """Arrays ``[X, ...]`` of one dtype as one ``[X, N]``: few large transfers are faster."""
  flat = [array.reshape(array.shape[0], -1) for array in arrays]
  return [
    jnp.concatenate([each for each in flat if each.dtype == dtype], axis=1)
    for dtype in _dtypes(arrays)
  ]


def _parted(joined: Sequence[Array], like: Sequence[Array]) -> list[Array]:
  """The adjoint of ``_joined``."""
  rest = dict(zip(_dtypes(like), joined, strict=True))
  parts = []
  for array in like:
    size = array[0].size
    parts.append(rest[array.dtype][:, :size].reshape(array.shape))
    rest[array.dtype] = rest[array.dtype][:, size:]
  return parts


def _dtypes(arrays: Sequence[Array]) -> list[jnp.dtype]:
  return list(dict.fromkeys(array.dtype for array in arrays))
