"""The second planner kernel: chooses each domain's best candidate, and writes quotas and trees.

Expert 0 of rank 0 has load 5. The best candidate gave copies to ranks 1, 2 and 3::

  tokens of slots    rank 1: 1   rank 2: 1   rank 3: 3
  quota of expert 0  rank 0: 5 - 1 - 1 - 3 = 0, then 1, 1, 3
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.planner import tree
from pallas_kernels.planner.members import Vectors
from pallas_kernels.planner.probes import (
  ABOVE,
  BLOCK_AXIS,
  BUSIEST,
  COPIES,
  REPLICAS,
  VALUE,
  WARP,
  before,
)
from pallas_kernels.planner.tables import PROBES, Problem
from pallas_kernels.support import Array
from pallas_kernels.warp.branches import when
from pallas_kernels.warp.scatter import add_at, barrier, fill, max_at, put_at
from pallas_kernels.warp.warps import (
  INT32_MAX,
  LANES,
  THREADS,
  divide,
  each_piece,
  lookup,
  ones,
  padded,
  store,
  thread_index,
  warp_max,
  warp_min,
  where,
)

BLOCK = 4 * THREADS  # quotas that a block writes


def sizes(problem: Problem) -> tuple[int, ...]:
  """Of the vectors in shared memory: best candidates, quotas, tokens of slots, ``Vectors``."""
  items = padded(problem.num_ranks * problem.num_slots)
  return (padded(problem.num_domains), BLOCK, items, *Vectors.sizes(problem))


def kernel(
  total_ref: Any,
  report_ref: Any,
  slots_ref: Any,
  expert_ref: Any,
  quota_ref: Any,
  parent_ref: Any,
  best_ref: Any,
  sum_ref: Any,
  tokens_ref: Any,
  *vectors: Any,
  problem: Problem,
  relays: bool,
) -> None:
  """Chooses each domain's best candidate; block 0 writes trees, the others ``BLOCK`` quotas each.

  Args:
    total_ref: ``[E]`` int32, what the first kernel writes, as the next two.
    report_ref: see ``probes.kernel``.
    slots_ref: likewise.
    expert_ref: ``[G * S]``, the expert in each slot, −1 if empty.
    quota_ref: ``[E * G]``.
    parent_ref: ``[G * S]``, who sends the slot its copy, −1 if empty.
    best_ref: shared memory, as ``sizes`` says, up to ``vectors``.
    sum_ref: the quotas of a block.
    tokens_ref: what each slot serves.
    vectors: ``Vectors``.
    problem: the rest.
    relays: whether holders may send.
  """
  vector = Vectors(*vectors)
  block = lax.axis_index(BLOCK_AXIS)
  _choose(report_ref, best_ref, problem)
  chosen = _Chosen(report_ref, slots_ref, best_ref, problem)

  @when(block == 0)
  def _() -> None:
    used = _find_used(chosen, vector.used) if problem.finds_used else problem.num_slots
    _gather(chosen, used, vector.expert)
    (tree.relayed if relays else tree.direct)(vector, used, problem)
    _write_trees(used, vector, expert_ref, parent_ref, problem)

  @when(block > 0)
  def _() -> None:
    _gather(chosen, problem.num_slots, vector.expert, tokens_ref)
    first = (block - 1) * BLOCK
    _write_quotas(first, total_ref, vector.expert, tokens_ref, sum_ref, quota_ref, problem)


def _choose(report_ref: Any, best_ref: Any, problem: Problem) -> None:
  """The first best candidate of each domain, as ``block * 4 + warp``; each warp sees all."""
  thread = thread_index()
  lane = thread & (LANES - 1)
  choice = thread * 0
  fields = (ABOVE, VALUE, REPLICAS, COPIES, BUSIEST)

  def choose(domain: Array, choice: Array) -> Array:
    best: list[Array] = []
    for first in range(0, problem.blocks, LANES):
      block = lane + first
      line = (domain * problem.blocks + jnp.minimum(block, problem.blocks - 1)) * problem.report
      keys = [lookup(report_ref, line + field) for field in fields]
      keys = [where(block < problem.blocks, key, INT32_MAX) for key in keys]
      keys.append(block * PROBES + lookup(report_ref, line + WARP))
      if best:
        wins = before(keys, best)
        keys = [where(wins, new, old) for new, old in zip(keys, best, strict=True)]
      best = keys
    alike = thread == thread
    for key in best:
      key = where(alike, key, INT32_MAX)
      alike &= key == warp_min(key)
    chosen = warp_min(where(alike, best[-1], INT32_MAX))
    return where(lax.rem(domain, THREADS) == thread, chosen, choice)

  for start in range(0, problem.num_domains, THREADS):
    end = min(start + THREADS, problem.num_domains)
    best_ref[pl.ds(start, THREADS)] = lax.fori_loop(start, end, choose, choice)


class _Chosen(NamedTuple):
  """The chosen candidates of all domains."""

  report_ref: Any
  slots_ref: Any
  best_ref: Any
  problem: Problem

  def filled(self, rank: Array) -> Array:
    """How many slots of a rank are: the first ones."""
    candidate, own = self._of(rank)
    block, warp = divide(candidate, PROBES)
    part, lane = divide(own, LANES)
    line = block * self.problem.report + (1 + part) * THREADS
    return lookup(self.report_ref, line + warp * LANES + lane)

  def slot(self, rank: Array, slot: Array) -> Array:
    """Where the expert of a slot is; its tokens are the next."""
    candidate, own = self._of(rank)
    return candidate * self.problem.placement + 2 * (own * self.problem.num_slots + slot)

  def _of(self, rank: Array) -> tuple[Array, Array]:
    """The candidate of a rank's domain, and its place there."""
    domain, own = divide(rank, self.problem.domain_size)
    return domain * (self.problem.blocks * PROBES) + lookup(self.best_ref, domain), own


def _gather(
  chosen: _Chosen, slots: Array | int, expert_ref: Any, tokens_ref: Any | None = None
) -> None:
  """Experts, and tokens, of so many slots of each rank."""
  items = chosen.problem.num_ranks * slots

  def gather(item: Array) -> None:
    rank, slot = divide(jnp.minimum(item, items - 1), slots)
    filled, place = (item < items) & (slot < chosen.filled(rank)), chosen.slot(rank, slot)
    put_at(expert_ref, item, where(filled, lookup(chosen.slots_ref, place), -1))
    if tokens_ref is not None:
      put_at(tokens_ref, item, where(filled, lookup(chosen.slots_ref, place + 1), 0))

  each_piece(items, gather)
  barrier()


def _find_used(chosen: _Chosen, used_ref: Any) -> Array:
  """Slots of a rank up to the last filled one of any, at least one."""
  ranks = chosen.problem.num_ranks
  fill(used_ref, THREADS, 1)
  barrier()

  def count(rank: Array) -> None:
    filled = chosen.filled(jnp.minimum(rank, ranks - 1))
    max_at(used_ref, rank * 0, warp_max(filled), ones(rank & (LANES - 1) == 0))

  each_piece(ranks, count)
  barrier()
  return used_ref[0]


def _write_trees(
  used: Array | int, vector: Vectors, expert_ref: Any, parent_ref: Any, problem: Problem
) -> None:
  items = problem.num_ranks * problem.num_slots

  def write(i: Array) -> None:
    rank, slot = divide(jnp.minimum(i, items - 1), problem.num_slots)
    place = rank * used + jnp.minimum(slot, used - 1)
    for result_ref, of_used in ((expert_ref, vector.expert), (parent_ref, vector.parent)):
      store(result_ref, i, where(slot < used, lookup(of_used, place), -1), ones(i < items))

  each_piece(items, write)


def _write_quotas(
  first: Array,
  total_ref: Any,
  expert_ref: Any,
  tokens_ref: Any,
  sum_ref: Any,
  quota_ref: Any,
  problem: Problem,
) -> None:
  """Replicas serve their tokens, homes what remains; from element ``first`` of ``[E, G]`` on."""
  ranks, slots, experts = problem.num_ranks, problem.num_slots, problem.num_experts

  def add(expert: Array, rank: Array, tokens: Array, mask: Array) -> None:
    place = expert * ranks + rank - first
    add_at(sum_ref, place, tokens, mask & (place >= 0) & (place < BLOCK))

  fill(sum_ref, BLOCK, 0)
  barrier()

  def add_slot(item: Array) -> None:
    expert, tokens = lookup(expert_ref, item), lookup(tokens_ref, item)
    home = divide(jnp.maximum(expert, 0), problem.num_home)[0]
    add(expert, divide(item, slots)[0], tokens, expert >= 0)
    add(expert, home, -tokens, expert >= 0)

  def add_load(row: Array) -> None:
    expert = row + lax.div(first, ranks)
    load = lookup(total_ref, jnp.minimum(expert, experts - 1))
    add(expert, divide(expert, problem.num_home)[0], load, expert < experts)

  each_piece(ranks * slots, add_slot)
  each_piece((BLOCK - 1) // ranks + 2, add_load)
  barrier()

  def write(i: Array) -> None:
    store(quota_ref, first + i, lookup(sum_ref, i), ones(first + i < experts * ranks))

  each_piece(BLOCK, write)
