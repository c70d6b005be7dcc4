"""The quota planner: replicas, quotas and transfer trees from a load matrix, in two kernels.

The first makes all candidates side by side (``probes.py``); the second chooses the best of each
domain and writes the quotas, while one of its blocks plans the trees (``tree.py``). Both are
local: every rank of a mesh computes the same plan.

::

  loads ──► block 0:   4 candidates ──► its best ┐
            block 1:   4 candidates ──► its best ├─► block 0:      transfer trees
            …                                    │   other blocks: quotas
            last:      construction ──► its own  ┘
"""

import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import varying
from pallas_kernels.launch import check_shared, launch
from pallas_kernels.planner import place as plan_place
from pallas_kernels.planner import probes as plan_probes
from pallas_kernels.planner.probes import (
  BLOCK_AXIS,
  DOMAIN_AXIS,
)
from pallas_kernels.planner.tables import PROBES, Problem, Tables
from pallas_kernels.support import Array

_NO_COST = (1, 0, 0, 0)  # unread; XLA launches a separate kernel to fill constants and iotas
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
  searches: bool = True,
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
    cost: ``[4]`` int32 with ``by_time``: rows of a copy, of a round's capacity, of a copy on the
      links, and of a group.
    steps: thresholds to try, from the mean to the busiest rank in units of 2^-15 of the way.
    searches: tries thresholds; else the plan is that of the exact construction.

  Returns:
    ``replica_expert_GS`` ``[G, S]``, ``quota_EG`` ``[E, G]`` and ``parent_GS`` ``[G, S]``, int32.

  Raises:
    NotImplementedError: there is nothing to plan (S = 0 or R = 1), or more slots, home experts
      or ranks than the kernels hold.
    ValueError: a shape does not fit, the cost is missing, or there is neither a search nor a
      construction, which needs slots that suffice for every load and ``min_tokens`` of 1.
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
    searches=searches,
  )
  _check_size(problem)
  if not searches and not problem.constructs:
    raise ValueError(
      "num_slots, min_tokens: expected slots that suffice for every load and 1 without a search, "
      f"got {num_slots} and {min_tokens}"
    )
  load, cost_4 = load_GE.reshape(-1), jnp.array(_NO_COST, jnp.int32) if cost is None else cost
  load = varying.vary(load, varying.axes_of(cost_4))
  domains, candidates = problem.num_domains, problem.num_domains * problem.blocks * PROBES
  typed = jax.typeof(load)
  steps_T = jnp.array(problem.steps or (0,), jnp.int32)
  total, report, slots = launch(
    functools.partial(plan_probes.kernel, problem=problem),
    [load, steps_T, cost_4],
    out_type=[
      typed.update(shape=(num_experts,)),
      typed.update(shape=(domains * problem.blocks * problem.report,)),
      typed.update(shape=(candidates * problem.placement,)),
    ],
    grid=(domains, problem.blocks),
    grid_names=(DOMAIN_AXIS, BLOCK_AXIS),
    scratch_types=_shared(Tables.sizes(problem)),
    compiler_params=_PARAMS,
    kernel_name="plan_probes",
  )
  items, quotas = num_ranks * num_slots, num_experts * num_ranks
  replica_expert, quota, parent = launch(
    functools.partial(plan_place.kernel, problem=problem, relays=_relays(problem, transfer)),
    [total, report, slots],
    out_type=[
      typed.update(shape=(items,)),
      typed.update(shape=(quotas,)),
      typed.update(shape=(items,)),
    ],
    grid=(1 + -(-quotas // plan_place.BLOCK),),
    grid_names=(BLOCK_AXIS,),
    scratch_types=_shared(plan_place.sizes(problem)),
    compiler_params=_PARAMS,
    kernel_name="plan_quotas",
  )
  return (
    replica_expert.reshape(num_ranks, num_slots),
    quota.reshape(num_experts, num_ranks),
    parent.reshape(num_ranks, num_slots),
  )


def _shared(sizes: Sequence[int]) -> list[Any]:
  return [plgpu.SMEM((size,), jnp.int32) for size in sizes]


def _relays(problem: Problem, transfer: str) -> bool:
  """Whether an expert can have copies that send others."""
  return transfer != "direct" and problem.domain_size > 2


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
    raise ValueError("cost: expected an int32 array of shape (4,) with by_time, got None")
  if cost is not None and cost.shape != (4,):
    raise ValueError(f"cost: expected shape (4,), got {cost.shape}")
  if cost is not None and cost.dtype != jnp.int32:
    raise TypeError(f"cost: expected int32, got {cost.dtype}")


def _check_size(problem: Problem) -> None:
  if problem.num_slots == 0 or problem.domain_size == 1:
    raise NotImplementedError(
      "num_slots, domain_size: expected replica slots and ranks to share, got "
      f"{problem.num_slots} and {problem.domain_size}"
    )
  # Of the second kernel too before the first is launched.
  check_shared("plan_probes", _shared(Tables.sizes(problem)))
  check_shared("plan_quotas", _shared(plan_place.sizes(problem)))
