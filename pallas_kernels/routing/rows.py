"""Where each assignment of a rank runs: ``ultraep_jax/planning/route.py`` in one kernel.

An assignment's row follows from its ordinal, how many assignments to the same expert come before
it. A cluster of blocks takes a few thousand consecutive assignments. Instead of waiting for the
clusters before it, it counts their assignments again, each of its blocks a share: that is cheaper
than a second kernel or a barrier of the whole grid, which would need semaphores that a kernel
before it clears. Each warp counts its own 32 assignments by expert. Then the blocks of a cluster
send each other, through shared memory, what comes before their assignments, and look rows up in
lists of hosts that every block has made meanwhile (``route_lines``).

Only blocks of one cluster wait for each other, and a GPU starts a cluster whole or not at all. So
nothing can wait for ever, whatever else runs: a cluster that finds no room starts later, and no
other needs it.

An expert with 5 assignments: its home serves 3, and the copy on rank 6 serves 2. Four come from
rank 0 and one from rank 2. Where one stands on the expert's line decides::

  ordinal    0  1  2  3  4
  source     0  0  0  0  2
  host       h  h  h  6  6      h: the home
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import varying
from pallas_kernels.launch import ALIGNMENT, launch
from pallas_kernels.routing import counts as route_counts
from pallas_kernels.routing import lines
from pallas_kernels.routing.block import (
  CLUSTER_AXIS,
  GROUP_AXIS,
  PEER_AXIS,
  Block,
  RoutingTuning,
  Shared,
  Sizes,
)
from pallas_kernels.support import Array
from pallas_kernels.transfer.tuning import SHARED_BYTES
from pallas_kernels.warp.branches import when
from pallas_kernels.warp.clusters import arrive_at_cluster, wait_for_block, wait_for_cluster
from pallas_kernels.warp.warps import lookup, ones, store, thread_index, where


@functools.partial(jax.jit, static_argnames="tuning")
def route_rows(
  expert_index_TK: Array,
  load_GE: Array,
  replica_expert_GS: Array,
  quota_EG: Array,
  rank: Array,
  *,
  tuning: RoutingTuning | None = None,
) -> tuple[Array, Array, Array]:
  """Routes one rank's assignments; the result is that of ``ultraep_jax.route_tokens``.

  Args:
    expert_index_TK: ``[T, K]`` int32, this rank's choices; out of range is masked.
    load_GE: ``[G, E]`` int32, assignments of each source rank to each expert.
    replica_expert_GS: ``[G, S]`` int32, the expert in each slot, −1 if empty.
    quota_EG: ``[E, G]`` int32, assignments of an expert that run on a rank; 0 on a rank that is
      neither its home nor has a replica. Its sums over ranks are those of ``load_GE``.
    rank: ``[]`` int32, this rank.
    tuning: how the work is laid out.

  Returns:
    ``dest_TK``, −1 if masked, ``row_TK``, 0 if masked, and ``group_size_P`` of this rank; int32.

  Raises:
    NotImplementedError: no slots, no assignments, or too many experts for shared memory.
    ValueError: shapes do not fit together.
    TypeError: an array is not int32.
  """
  _check(expert_index_TK, load_GE, replica_expert_GS, quota_EG)
  num_ranks, num_slots = replica_expert_GS.shape
  sizes = _sizes(
    Sizes(
      num_ranks=num_ranks,
      num_experts=quota_EG.shape[0],
      num_slots=num_slots,
      assignments=expert_index_TK.size,
      tuning=tuning or RoutingTuning(),
    )
  )
  inputs = [expert_index_TK, load_GE, replica_expert_GS, quota_EG, rank]
  inputs = varying.vary_alike(*(x.reshape(-1) for x in inputs))
  lengths = [sizes.assignments, sizes.assignments, sizes.num_home + num_slots]
  dest, row, group_size_P = launch(
    functools.partial(_route, sizes=sizes),
    inputs,
    out_type=[jax.typeof(inputs[0]).update(shape=(length,)) for length in lengths],
    grid=(sizes.clusters,),
    grid_names=(CLUSTER_AXIS,),
    cluster=(sizes.tuning.peers,),
    cluster_names=(PEER_AXIS,),
    num_threads=sizes.tuning.groups,
    thread_name=GROUP_AXIS,
    scratch_types=[plgpu.SMEM((length,), jnp.int32) for length in Shared.lengths(sizes)],
    # Only this lowering takes loads per thread. The kernel reaches no other device.
    compiler_params=plgpu.CompilerParams(
      lowering_semantics=plgpu.LoweringSemantics.Lane, skip_device_barrier=True
    ),
    kernel_name="route_rows",
  )
  shape = expert_index_TK.shape
  return dest.reshape(shape), row.reshape(shape), group_size_P


def _sizes(sizes: Sizes) -> Sizes:
  """With as many assignments a thread as shared memory allows."""
  for most in range(sizes.pieces, 0, -1):
    tuning = dataclasses.replace(sizes.tuning, most_pieces=most)
    sizes = dataclasses.replace(sizes, tuning=tuning)
    units = sum(-(-4 * length // ALIGNMENT) for length in Shared.lengths(sizes))
    if units * ALIGNMENT <= SHARED_BYTES:
      return sizes
  raise NotImplementedError(
    "quota_EG, replica_expert_GS: expected fewer experts and slots, got "
    f"{sizes.num_experts} and {sizes.replicas}"
  )


def _check(
  expert_index_TK: Array, load_GE: Array, replica_expert_GS: Array, quota_EG: Array
) -> None:
  num_experts, num_ranks = quota_EG.shape
  if load_GE.shape != (num_ranks, num_experts):
    raise ValueError(f"load_GE: expected shape {(num_ranks, num_experts)}, got {load_GE.shape}")
  if replica_expert_GS.ndim != 2 or replica_expert_GS.shape[0] != num_ranks:
    raise ValueError(
      f"replica_expert_GS: expected shape [{num_ranks}, S], got {replica_expert_GS.shape}"
    )
  arrays = {
    "expert_index_TK": expert_index_TK,
    "load_GE": load_GE,
    "replica_expert_GS": replica_expert_GS,
    "quota_EG": quota_EG,
  }
  for name, array in arrays.items():
    if array.dtype != jnp.int32:
      raise TypeError(f"{name}: expected int32, got {array.dtype}")
  if expert_index_TK.size == 0 or replica_expert_GS.size == 0:
    raise NotImplementedError(
      "expert_index_TK, replica_expert_GS: expected assignments and slots, got shapes "
      f"{expert_index_TK.shape} and {replica_expert_GS.shape}"
    )


def _route(*refs: Any, sizes: Sizes) -> None:
  index_ref, load_ref, replica_ref, quota_ref, rank_ref = refs[:5]
  dest_ref, row_ref, size_ref = refs[5:8]
  block = Block(sizes, Shared(*refs[8:]), lookup(rank_ref, thread_index() * 0))

  # All loads that depend on no other, then those of the items' experts: two trips to memory.
  assignments = route_counts.own_assignments(block)
  experts = [route_counts.load_expert(block, index_ref, at) for at in assignments]
  loads = route_counts.load_before(block, load_ref)
  items = lines.load_items(block, replica_ref)
  earlier = route_counts.load_earlier(block, index_ref, 0)
  block.clear()
  quotas = lines.load_quotas(block, items, load_ref, quota_ref)
  wait_for_block()

  route_counts.count_earlier(block, index_ref, earlier)
  insides = route_counts.count_warps(block, experts)
  route_counts.add_before(block, loads)
  lines.share(block, items, quotas)
  wait_for_block()

  route_counts.send(block)
  lines.count_rows(block, items, quotas)
  lines.begin_lists(block)
  wait_for_block()

  positions = lines.enlist(block, items, quotas)
  arrive_at_cluster()
  wait_for_block()

  places = lines.place(block, items, positions)
  wait_for_cluster()

  route_counts.add_sent(block)
  lines.end_lists(block, items, quotas, places)
  wait_for_block()

  for piece, (at, expert, inside) in enumerate(zip(assignments, experts, insides, strict=True)):
    _tell(block, piece, at, expert, inside, dest_ref, row_ref)

  @when((block.cluster == 0) & (block.peer == 0))
  def _() -> None:
    lines.tell_sizes(block, size_ref)


def _tell(
  block: Block, piece: int, at: Array, expert: Array, inside: Array, dest_ref: Any, row_ref: Any
) -> None:
  """Writes where an assignment of each thread runs."""
  shared, sizes = block.shared, block.sizes
  valid = expert < sizes.num_experts
  expert = jnp.minimum(expert, sizes.num_experts - 1)
  ordinal = route_counts.ordinal(block, piece, expert, inside)
  kept = lookup(shared.own_kept, expert)
  place = lookup(shared.start, expert) + ordinal - kept
  host, row = lines.find_host(block, expert, place)
  stays = ordinal < kept
  host = where(stays, block.rank, host)
  row = where(stays, lookup(shared.own_first, expert) + ordinal, row)
  exists = ones(at < sizes.assignments)
  at = jnp.minimum(at, sizes.assignments - 1)
  store(dest_ref, at, where(valid, host, -1), exists)
  store(row_ref, at, where(valid, row, 0), exists)
