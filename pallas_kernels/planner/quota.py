"""The quota planner: replicas, quotas and transfer trees from a load matrix, in two kernels.

The first makes all candidates side by side (``plan_probes.py``); the second chooses the best of
each domain and writes the quotas, while one of its blocks plans the trees (``tree.py``).
Both are local: every rank of a mesh computes the same plan.
"""

import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import varying
from pallas_kernels.planner import probes as plan_probes
from pallas_kernels.planner import tree
from pallas_kernels.planner.members import Vectors
from pallas_kernels.planner.probes import (
  ABOVE,
  BLOCK_AXIS,
  BUSIEST,
  COPIES,
  DOMAIN_AXIS,
  REPLICAS,
  VALUE,
  WARP,
  before,
)
from pallas_kernels.planner.tables import PROBES, Problem, Tables
from pallas_kernels.warp.branches import when
from pallas_kernels.warp.warps import (
  INT32_MAX,
  LANES,
  THREADS,
  chunks,
  divide,
  lookup,
  ones,
  padded,
  store,
  thread_index,
  warp_min,
  warp_sum,
  where,
)

Array = jax.Array

_MOST_SLOTS = 64  # S * parts: two registers each
_MOST_CONSTRUCTED = 32  # home experts that the exact construction sorts in registers
_SHARED_BYTES = 224 * 1024
_NO_COST = (1, 0)  # unread; XLA fills equal or counted numbers by a kernel of their own
_PIECES = 4  # of 128 quotas that a block of the second kernel writes
# Only this lowering leaves a warp its own control flow. The kernels reach no other device.
_PARAMS = plgpu.CompilerParams(
  lowering_semantics=plgpu.LoweringSemantics.Lane, skip_device_barrier=True
)


def plan_quota(
  load_GE: Array,
  *,
  domain_size: int,
  num_slots: int,
  min_tokens: int,
  transfer: Literal["auto", "direct", "relay"],
  by_time: bool,
  target: float | None,
  cost: Array | None,
  steps: Sequence[int],
) -> tuple[Array, Array, Array]:
  """Plans replicas and quotas for a load matrix.

  The result is that of ``ultraep_jax.plan_quotas``, bit for bit, which describes it.

  Args:
    load_GE: ``[G, E]`` int32, assignments of each source rank to each expert, not negative, with
      a total below 2^31.
    domain_size: R, ranks that plan together; divides G.
    num_slots: S, replica slots of a rank.
    min_tokens: no replica serves fewer assignments.
    transfer: ``"direct"`` (the home sends each copy), ``"relay"`` or ``"auto"``.
    by_time: judge candidates by ``cost``, not by the busiest rank.
    target: a busiest rank below ``ceil(target * mean)`` counts as that.
    cost: ``[2]`` int32 with ``by_time``: rows of a copy, and of a round's capacity.
    steps: thresholds to try, from the mean to the busiest rank in units of 2^-15 of the way.

  Returns:
    ``replica_expert_GS`` ``[G, S]``, ``quota_EG`` ``[E, G]`` and ``parent_GS`` ``[G, S]``, int32.

  Raises:
    NotImplementedError: there is nothing to plan (S = 0 or R = 1), or more slots, home experts
      or ranks than the kernels hold.
    ValueError: a shape does not fit, or the cost is missing.
    TypeError: ``load_GE`` or ``cost`` is not int32.
  """
  num_ranks, num_experts = load_GE.shape
  _check(load_GE, domain_size, by_time, cost)
  problem = Problem(
    num_ranks=num_ranks,
    num_experts=num_experts,
    domain_size=domain_size,
    num_slots=num_slots,
    min_tokens=min_tokens,
    count_copies=transfer == "direct",
    by_time=by_time,
    target=target,
    steps=tuple(steps),
  )
  _check_size(problem)
  load, cost_2 = load_GE.reshape(-1), jnp.array(_NO_COST, jnp.int32) if cost is None else cost
  load = varying.vary(load, varying.axes_of(cost_2))
  domains, experts = problem.num_domains, padded(problem.domain_experts)
  typed = jax.typeof(load)
  probes = plgpu.kernel(
    functools.partial(plan_probes.kernel, problem=problem),
    out_type=[
      typed.update(shape=(domains * experts,)),
      typed.update(shape=(domains * problem.blocks * THREADS,)),
      typed.update(shape=(domains * problem.blocks * problem.fields * THREADS,)),
    ],
    grid=(domains, problem.blocks),
    grid_names=(DOMAIN_AXIS, BLOCK_AXIS),
    scratch_types=_shared(Tables.sizes(problem)),
    compiler_params=_PARAMS,
    kernel_name="plan_probes",
  )
  steps_T = jnp.array(problem.steps or (0,), jnp.int32)
  total, report, slots = probes(load, steps_T, cost_2)
  items, quotas = num_ranks * num_slots, num_experts * num_ranks
  blocks = -(-quotas // (_PIECES * THREADS))
  place = plgpu.kernel(
    functools.partial(_place, problem=problem, relays=transfer != "direct"),
    out_type=[
      typed.update(shape=(items,)),
      typed.update(shape=(quotas,)),
      typed.update(shape=(items,)),
    ],
    grid=(1 + blocks,),
    grid_names=(BLOCK_AXIS,),
    scratch_types=_shared((padded(domains), padded(items), *_row_sizes(problem)))
    + _shared(Vectors.sizes(problem)),
    compiler_params=_PARAMS,
    kernel_name="plan_quotas",
  )
  replica_expert, quota, parent = place(total, report, slots)
  return (
    replica_expert.reshape(num_ranks, num_slots),
    quota.reshape(num_experts, num_ranks),
    parent.reshape(num_ranks, num_slots),
  )


def _shared(sizes: Sequence[int]) -> list[Any]:
  return [plgpu.SMEM((size,), jnp.int32) for size in sizes]


def _row_sizes(problem: Problem) -> tuple[int]:
  return (_row_groups(problem) * THREADS,)


def _row_groups(problem: Problem) -> int:
  """Groups of four rows, one a warp, that one block's quotas can lie in."""
  rows = (_PIECES * THREADS - 1) // problem.num_ranks + 2
  return -(-min(rows, problem.num_experts) // PROBES)


def _check(load_GE: Array, domain_size: int, by_time: bool, cost: Array | None) -> None:
  num_ranks, num_experts = load_GE.shape
  if load_GE.dtype != jnp.int32:
    raise TypeError(f"load_GE: expected int32, got {load_GE.dtype}")
  if load_GE.size == 0 or num_experts % num_ranks:
    raise ValueError(
      f"load_GE: expected shape [G, E], E a positive multiple of G, got {load_GE.shape}"
    )
  if domain_size < 1 or num_ranks % domain_size:
    raise ValueError(f"domain_size: expected a divisor of {num_ranks} ranks, got {domain_size}")
  if by_time and cost is None:
    raise ValueError("cost: expected an int32 array of shape (2,) with by_time, got None")
  if cost is not None and cost.shape != (2,):
    raise ValueError(f"cost: expected shape (2,), got {cost.shape}")
  if cost is not None and cost.dtype != jnp.int32:
    raise TypeError(f"cost: expected int32, got {cost.dtype}")


def _check_size(problem: Problem) -> None:
  if problem.num_slots == 0 or problem.domain_size == 1:
    raise NotImplementedError(
      "num_slots, domain_size: expected replica slots and ranks to share, got "
      f"{problem.num_slots} and {problem.domain_size}"
    )
  if problem.num_slots * problem.parts > _MOST_SLOTS:
    raise NotImplementedError(
      f"num_slots: expected at most {_MOST_SLOTS // problem.parts} for domains of "
      f"{problem.domain_size} ranks, got {problem.num_slots}"
    )
  if problem.constructs and problem.num_home > _MOST_CONSTRUCTED:
    raise NotImplementedError(
      f"load_GE: expected at most {_MOST_CONSTRUCTED} home experts where num_slots reaches them, "
      f"got {problem.num_home}"
    )
  shared = 4 * max(sum(Tables.sizes(problem)), sum(Vectors.sizes(problem)) * 2)
  if shared > _SHARED_BYTES:
    raise NotImplementedError(
      f"load_GE: expected sizes that fit {_SHARED_BYTES} bytes of shared memory, got {shared}"
    )


def _place(
  total_ref: Any,
  report_ref: Any,
  slots_ref: Any,
  expert_ref: Any,
  quota_ref: Any,
  parent_ref: Any,
  best_ref: Any,
  tokens_ref: Any,
  home_ref: Any,
  *vectors: Any,
  problem: Problem,
  relays: bool,
) -> None:
  """Chooses each domain's best candidate; block 0 writes trees, the others quotas."""
  vector = Vectors(*vectors)
  block = lax.axis_index(BLOCK_AXIS)
  _choose(report_ref, best_ref, problem)
  _gather_slots(slots_ref, best_ref, vector.expert, tokens_ref, problem)

  @when(block == 0)
  def _() -> None:
    (tree.relayed if relays else tree.direct)(vector, problem)
    items = problem.num_ranks * problem.num_slots
    for _, i in chunks(items):
      store(expert_ref, i, lookup(vector.expert, i), ones(i < items))
      store(parent_ref, i, lookup(vector.parent, i), ones(i < items))

  @when(block > 0)
  def _() -> None:
    first = (block - 1) * (_PIECES * THREADS)
    _write_quotas(first, total_ref, vector.expert, tokens_ref, home_ref, quota_ref, problem)


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
      line = (domain * problem.blocks + jnp.minimum(block, problem.blocks - 1)) * THREADS
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


def _gather_slots(
  slots_ref: Any, best_ref: Any, expert_ref: Any, tokens_ref: Any, problem: Problem
) -> None:
  """Experts and tokens of all slots, from the chosen candidates."""
  items = problem.num_ranks * problem.num_slots
  for start, i in chunks(items):
    inside, i = i < items, jnp.minimum(i, items - 1)
    rank, slot = divide(i, problem.num_slots)
    domain, own = divide(rank, problem.domain_size)
    chosen = lookup(best_ref, domain)
    block, warp = divide(chosen, PROBES)
    part, lane = divide(own, LANES)
    line = (domain * problem.blocks + block) * problem.fields + 2 * (slot * problem.parts + part)
    place = line * THREADS + warp * LANES + lane
    expert_ref[pl.ds(start, THREADS)] = where(inside, lookup(slots_ref, place), -1)
    tokens_ref[pl.ds(start, THREADS)] = where(inside, lookup(slots_ref, place + THREADS), 0)


def _write_quotas(
  first: Array,
  total_ref: Any,
  expert_ref: Any,
  tokens_ref: Any,
  home_ref: Any,
  quota_ref: Any,
  problem: Problem,
) -> None:
  """Replicas serve their tokens, homes what remains; from element ``first`` of ``[E, G]`` on."""
  ranks, slots, thread = problem.num_ranks, problem.num_slots, thread_index()
  items = ranks * slots
  warp, lane = divide(thread, LANES)
  first_row = lax.div(first, ranks)
  for group in range(_row_groups(problem)):
    expert = jnp.minimum(first_row + group * PROBES + warp, problem.num_experts - 1)
    away = thread * 0
    for start in range(0, items, LANES):
      item = jnp.minimum(lane + start, items - 1)
      mine = (lookup(expert_ref, item) == expert) & (lane + start < items)
      away += where(mine, lookup(tokens_ref, item), 0)
    domain, own = divide(expert, problem.domain_experts)
    load = lookup(total_ref, domain * padded(problem.domain_experts) + own)
    home_ref[pl.ds(group * THREADS, THREADS)] = load - warp_sum(away)
  for piece in range(_PIECES):
    place = first + piece * THREADS + thread
    element = jnp.minimum(place, problem.num_experts * ranks - 1)
    expert, rank = divide(element, ranks)
    row = expert - first_row
    group, warp = divide(row, PROBES)
    at_home = rank == divide(expert, problem.num_home)[0]
    quota = where(at_home, lookup(home_ref, group * THREADS + warp * LANES), 0)
    for slot in range(slots):
      item = rank * slots + slot
      here = lookup(expert_ref, item) == expert
      quota += where(here, lookup(tokens_ref, item), 0)
    store(quota_ref, element, quota, ones(place == element))
