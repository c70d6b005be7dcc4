"""The work lists of a plan's transfers, all by one kernel.

XLA makes the same lists (``replicate_work``, ``reduce_work``) in several kernels each, one after
the other, for a few hundred integers. Here each block makes a list. Those of a layer::

  block 0   plan ──► links of slots ──► copies of projections, which a matmul awaits
  block 1   plan ──► links of slots ──► copies of wo, likewise
  block 2   plan ──► links of slots ──► copies of projections that none awaits
  block 3   plan ──► links of slots ──► gradients on their way home
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import varying
from pallas_kernels.launch import launch
from pallas_kernels.support import Array, AxisName
from pallas_kernels.transfer import (
  peers,
  reduce_lists,
  reduce_work,
  replicate_lists,
  replicate_work,
  slots,
  trees,
)
from pallas_kernels.transfer.slots import Links, Sizes, Slots
from pallas_kernels.warp.branches import cond, one_if, when
from pallas_kernels.warp.scatter import fill
from pallas_kernels.warp.warps import each_piece, lookup, ones, padded, store, thread_index

_LIST_AXIS = "list"
# Slots and experts of all ranks. Of more, one block would count for longer than all SMs take in
# several kernels, or have no room.
_MOST_SLOTS, _MOST_EXPERTS = 512, 4096


class TransferLists(NamedTuple):
  """What one rank sends and awaits.

  Attributes:
    copying: for each group of arrays that travel together, the list that ``replicate`` works on.
    reducing: the list that ``reduce_replicas`` works on.
  """

  copying: tuple[Array, ...]
  reducing: Array


def transfer_lists(
  replica_expert_GS: Array,
  parent_GS: Array,
  home_rows_G: Array | None = None,
  *,
  axis_name: AxisName,
  num_home: int,
  expert_bytes: Sequence[int | None],
  rank: Array | None = None,
) -> TransferLists:
  """The work lists of this rank (inside a ``shard_map``).

  Args:
    replica_expert_GS: ``[G, S]`` int32 with slots, as ``replicate`` takes it.
    parent_GS: ``[G, S]`` int32, likewise.
    home_rows_G: ``[G]`` int32, likewise; unless all groups have one turn.
    axis_name: the expert mesh axis, of size G.
    num_home: M, experts of a rank.
    expert_bytes: of an expert in each group of arrays that travel together, by which experts share
      turns; ``None``: all have one, as nothing waits for the first ones.
    rank: ``[]`` int32, this rank along the axis, if it is known (see ``gather.Gathered``).

  Raises:
    NotImplementedError: a mesh that kernels cannot cross, or a plan too large for int32.
    ValueError, TypeError: the shape or the dtype of ``home_rows_G`` is wrong.
  """
  num_ranks, num_slots = replica_expert_GS.shape
  trees.check_place(num_ranks, num_slots, num_home, axis_name)
  together = (
    None if size is None else replicate_work.experts_together(size) for size in expert_bytes
  )
  wanted = Wanted(num_home, tuple(together))
  rank = peers.rank(axis_name) if rank is None else rank
  return lists_of_rank(rank, replica_expert_GS, parent_GS, home_rows_G, wanted)


class Wanted(NamedTuple):
  """Which lists, and what is fixed at trace time.

  Attributes:
    num_home: M.
    together: for each group of arrays, how many experts have a turn together; ``None``: all.
  """

  num_home: int
  together: tuple[int | None, ...]


def lists_of_rank(
  rank: Array,
  replica_expert_GS: Array,
  parent_GS: Array,
  home_rows_G: Array | None,
  wanted: Wanted,
) -> TransferLists:
  """Those of any rank."""
  num_ranks, num_slots = replica_expert_GS.shape
  if all(each is None for each in wanted.together):
    home_rows_G = None
  if home_rows_G is not None:
    replicate_work.check_rows(home_rows_G, num_ranks)
  few = num_ranks * num_slots <= _MOST_SLOTS and num_ranks * wanted.num_home <= _MOST_EXPERTS
  make = _lists_by_kernel if few else by_xla
  return make(rank, replica_expert_GS, parent_GS, home_rows_G, wanted)


def by_xla(
  rank: Array,
  replica_expert_GS: Array,
  parent_GS: Array,
  home_rows_G: Array | None,
  wanted: Wanted,
) -> TransferLists:
  """The same without a kernel."""
  num_home, plan, copying = wanted.num_home, (replica_expert_GS, parent_GS), []
  for each in wanted.together:
    turn_N = replicate_work.turns_of_slots(replica_expert_GS, home_rows_G, num_home, each)
    copying.append(replicate_work.work_list(*plan, turn_N, rank, num_home))
  return TransferLists(tuple(copying), reduce_work.work_list(*plan, rank, num_home))


# A function of its own: layers alike, not in a scan, lower and compile one kernel.
@functools.partial(jax.jit, static_argnums=4)
def _lists_by_kernel(
  rank: Array,
  replica_expert_GS: Array,
  parent_GS: Array,
  home_rows_G: Array | None,
  wanted: Wanted,
) -> TransferLists:
  num_ranks, num_slots = replica_expert_GS.shape
  sizes = Sizes(num_ranks, num_slots, wanted.num_home)
  experts = [replicate_work.experts_of_turn(*sizes, each) for each in wanted.together]
  operands = [replica_expert_GS.reshape(-1), parent_GS.reshape(-1), rank.reshape(1)]
  operands = varying.vary_alike(*operands, *([] if home_rows_G is None else [home_rows_G]))
  lengths = [replicate_work.Fields.length(sizes.slots, sizes.items)] * len(experts)
  lengths.append(reduce_work.Fields.length(*sizes))
  shared = _Shared.lengths(sizes, max(lengths))
  lists = launch(
    functools.partial(_kernel, sizes=sizes, lengths=lengths, experts=experts),
    operands,
    out_type=[jax.typeof(operands[0]).update(shape=(length,)) for length in lengths],
    grid=(len(lengths),),
    grid_names=(_LIST_AXIS,),
    scratch_types=[plgpu.SMEM((size,), jnp.int32) for size in jax.tree.leaves(shared)],
    # Only this lowering takes loads of each thread's own. The kernel reaches no other device.
    compiler_params=plgpu.CompilerParams(
      lowering_semantics=plgpu.LoweringSemantics.Lane, skip_device_barrier=True
    ),
    kernel_name="transfer_lists",
  )
  *copying, reducing = lists
  return TransferLists(tuple(copying), reducing)


class _Shared(NamedTuple):
  """Shared memory."""

  links: Any
  copying: Any
  reducing: Any
  fields: Any  # the list

  @staticmethod
  def lengths(sizes: Sizes, length: int) -> "_Shared":
    return _Shared(
      Links.lengths(sizes),
      replicate_lists.Shared.lengths(sizes),
      reduce_lists.Shared.lengths(sizes),
      padded(length),
    )


def _kernel(*refs: Any, sizes: Sizes, lengths: Sequence[int], experts: Sequence[int]) -> None:
  like = _Shared.lengths(sizes, max(lengths))
  scratch = len(jax.tree.leaves(like))
  shared = jax.tree.unflatten(jax.tree.structure(like), refs[-scratch:])
  outs = refs[-scratch - len(lengths) : -scratch]
  expert_ref, parent_ref, rank_ref, *rows_ref = refs[: -scratch - len(lengths)]
  block = lax.axis_index(_LIST_AXIS)
  plan_slots = Slots(shared.links, sizes, lookup(rank_ref, thread_index() * 0))
  fill(shared.fields, padded(max(lengths)), 0)
  slots.read(plan_slots, expert_ref, parent_ref)

  def copying() -> None:
    together = sum((one_if(block == i) * each for i, each in enumerate(experts)), jnp.int32(0))
    rows = rows_ref[0] if rows_ref else None
    replicate_lists.write(shared.copying, plan_slots, shared.fields, rows, together)

  def reducing() -> None:
    reduce_lists.write(shared.reducing, plan_slots, shared.fields)

  cond(block < len(experts), copying, reducing)
  for i, (out, length) in enumerate(zip(outs, lengths, strict=True)):
    when(block == i)(functools.partial(_store, out, length, shared.fields))


def _store(out_ref: Any, length: int, fields_ref: Any) -> None:
  def write(place: Array) -> None:
    index = jnp.minimum(place, length - 1)
    store(out_ref, index, lookup(fields_ref, index), ones(place < length))

  each_piece(length, write)
