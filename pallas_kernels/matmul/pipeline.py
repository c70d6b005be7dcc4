"""What the matmul kernels share: persistent blocks around a ring of stages in shared memory.

Of a block's three warpgroups one loads operands by TMA into the ring and runs ahead into the next
tile; the other two multiply. Either they work on one tile together, a strip of its rows each, or
they take turns: each has a tile of its own, and stores it while the other multiplies.

A ring of three stages. A stage is loaded again when it has been multiplied::

  loads        0  1  2  0  1  2  …
  multiplies      0  1  2  0  1  …
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import support
from pallas_kernels.launch import launch as launch_kernel
from pallas_kernels.matmul import deal
from pallas_kernels.matmul.deal import Claims, InTurn, Scalars
from pallas_kernels.matmul.layout import (
  MULTIPLYING,
  SWIZZLE,
  TILE_ROWS,
  WARPGROUPS,
  MatmulTuning,
  Tile,
)
from pallas_kernels.support import Array
from pallas_kernels.transfer import tiles
from pallas_kernels.transfer.tiles import Transfer
from pallas_kernels.transfer.tuning import TransferTuning
from pallas_kernels.warp.branches import cond, when
from pallas_kernels.warp.opaque import opaque

_BLOCK_AXIS, _CLUSTER_AXIS, _GROUP_AXIS = tiles.BLOCK_AXIS, "cluster", tiles.WORKER_AXIS


# Registers of a thread that multiplies, and of one that loads, which the compiler makes do with.
FEW_TO_LOAD, MORE_TO_LOAD = (240, 24), (232, 40)


@dataclasses.dataclass(frozen=True)
class Ring:
  """The stages in shared memory, as the loading and the multiplying warpgroups see them.

  Steps are counted over all tiles of a block; a step uses stage ``step % stages``. Who waits for
  a barrier must see each of its phases, so each owner of a tile has its own ``full`` ones.
  """

  full: Any
  free: Any
  stages: int

  def stage(self, step: Array) -> Array:
    return lax.rem(step, jnp.int32(self.stages))

  def _full(self, owner: Array, stage: Array) -> Any:
    return self.full.at[owner * self.stages + stage]

  def acquire(self, step: Array, owner: Array) -> tuple[Array, Any]:
    """The stage to load and the barrier that loads arrive on, once its last use is over."""
    stage = self.stage(step)
    when(step >= self.stages)(lambda: plgpu.barrier_wait(self.free.at[stage]))
    return stage, self._full(owner, stage)

  def finish(self, steps: Array) -> None:
    """Waits until the stages of the last of ``steps`` steps are given back."""

    def wait(step: Array, _: None) -> None:
      plgpu.barrier_wait(self.free.at[self.stage(step)])

    lax.fori_loop(lax.max(steps - self.stages, jnp.int32(0)), steps, wait, None)

  def multiply(
    self,
    owner: Array,
    first: Array,
    count: Array | int,
    wgmma: Callable[[Array | int, Array, Any], Any],
    *,
    sums: Any = None,
    meanwhile: Sequence[Callable[[], None]] = (),
  ) -> Any:
    """Multiplies ``count`` stages, giving each back once the next one's product is under way.

    Args:
      owner: of the tile.
      first: the steps before this tile.
      count: at least as many as there is to do meanwhile.
      wgmma: starts to multiply a stage: given which of them it is, the stage, and the sums so far.
        It returns those after, or nothing where it adds to an accumulator.
      sums: before the first stage, if they are in no accumulator.
      meanwhile: what to do while the first stages are multiplied, one by one.

    Returns:
      The sums after the last stage, if they are in no accumulator.
    """
    first = opaque(first)

    def step(k: Array | int, sums: Any, other: Callable[[], None] = lambda: None) -> Any:
      stage = self.stage(first + k)
      plgpu.barrier_wait(self._full(owner, stage))
      sums = wgmma(k, stage, sums)
      other()
      plgpu.wgmma_wait(1)
      when(jnp.int32(k) > 0)(lambda: plgpu.barrier_arrive(self.free.at[self.stage(first + k - 1)]))
      return sums

    for k, other in enumerate(meanwhile):
      sums = step(k, sums, other)
    sums = lax.fori_loop(len(meanwhile), count, step, sums)
    plgpu.wgmma_wait(0)
    when(count > 0)(lambda: plgpu.barrier_arrive(self.free.at[self.stage(first + count - 1)]))
    return sums

  def skip(self, owner: Array, first: Array, count: Array | int) -> None:
    """Gives ``count`` stages back unused."""

    def step(k: Array, _: None) -> None:
      stage = self.stage(first + k)
      plgpu.barrier_wait(self._full(owner, stage))
      plgpu.commit_smem()  # One thread arrives for all: none may be left waiting.
      plgpu.barrier_arrive(self.free.at[stage])

    lax.fori_loop(0, count, step, None)


@dataclasses.dataclass(frozen=True)
class Work:
  """A tile: how many steps it takes, and what else the kernel knows of it."""

  steps: Array
  rest: Scalars


def persist(
  num_tiles: Array | int,
  describe: Callable[[Array, Array], Work],
  load: Callable[[Work, Array, Array], None],
  compute: Callable[[Work, Array, Array, Any], Any],
  dealt: InTurn | Claims,
  ring: Ring,
  tile: Tile,
  registers: tuple[int, int] = FEW_TO_LOAD,
  pending: Callable[[], Any] = lambda: None,
  flush: Callable[[Any], None] = lambda pending: None,
  loaded: Callable[[Array], None] = lambda steps: None,
) -> None:
  """Runs this block's share of the tiles.

  Args:
    num_tiles: of all clusters.
    describe: the work of a tile's index and of a block's index in the cluster.
    load: loads the steps of a tile: given the steps before it and its owner.
    compute: multiplies a tile, or a strip of it, given the same and what is not stored yet, and
      returns what it leaves to be stored.
    dealt: which tiles are this block's.
    ring: shared by both.
    tile: its number of strips decides who computes.
    registers: of a thread that multiplies, and of one that loads.
    pending: what is to be stored before the first tile: nothing, in the form of something.
    flush: stores what is left.
    loaded: what the loading warpgroup does after the last of so many steps.
  """
  rank, group = lax.axis_index(_CLUSTER_AXIS), lax.axis_index(_GROUP_AXIS)
  multiplies, loads = registers
  last = lax.max(jnp.int32(num_tiles - 1), jnp.int32(0))
  together = tile.strips == MULTIPLYING

  def described(t: Array) -> Scalars:
    work = describe(lax.min(t, last), rank)
    return t, work.steps, *work.rest

  def run(body: Callable[[Work, Array, Array, Any], Any], state: Any, loading: bool) -> Any:
    def step(i: Array, carry: deal.Carry) -> deal.Carry:
      (_, steps, *rest), before, state = carry
      begun = dealt.begin(i + 1, described, loading)  # which hides its latency
      owner = jnp.int32(0) if together else lax.rem(i, jnp.int32(2))
      state = body(Work(steps, tuple(rest)), before, owner, state)
      return dealt.end(i + 1, begun, described, loading), before + steps, state

    none = jnp.int32(0)
    first = dealt.end(none, dealt.begin(none, described, loading), described, loading)
    return dealt.each(jnp.int32(num_tiles), step, (first, none, state), loading)[1:]

  def compute_mine(work: Work, before: Array, owner: Array, state: Any) -> Any:
    if together:
      return compute(work, before, owner, state)
    when(owner == group)(lambda: compute(work, before, owner, None))
    return None

  @when(group < MULTIPLYING)
  def _() -> None:
    plgpu.set_max_registers(multiplies, action="increase")
    flush(run(compute_mine, pending(), loading=False)[1])
    plgpu.wait_smem_to_gmem(0)  # landed: the kernel may be part of one that peers take part in

  @when(group == MULTIPLYING)
  def _() -> None:
    plgpu.set_max_registers(loads, action="decrease")
    steps, _ = run(lambda work, before, owner, _: load(work, before, owner), None, loading=True)
    loaded(steps)
    ring.finish(steps)


def strip_index(tile: Tile) -> Array:
  """Which strip of a tile this warpgroup multiplies."""
  group = lax.axis_index(_GROUP_AXIS)
  return group if tile.strips == MULTIPLYING else jnp.int32(0)


def cluster_rank() -> Array:
  """This block, of those of its cluster."""
  return lax.axis_index(_CLUSTER_AXIS)


def warpgroup() -> Array:
  """This warpgroup, of those that multiply."""
  return lax.axis_index(_GROUP_AXIS)


def load_common_rows(source: Any, target: Any, loaded: Any, tuning: MatmulTuning) -> None:
  """Loads what all blocks of a cluster need, each its part for all."""
  axis = _CLUSTER_AXIS if tuning.cluster > 1 else None
  plgpu.copy_gmem_to_smem(source, target, loaded, collective_axes=axis)


def smem(*shape: int, dtype: Any = jnp.bfloat16, tiled: bool = True) -> Any:
  """Shared memory whose rows are swizzled by 128 bytes, in tiles of eight rows or as one."""
  transforms: tuple[Any, ...] = (plgpu.SwizzleTransform(SWIZZLE),)  # pyright: ignore[reportAbstractUsage]
  if tiled:
    tiling = (TILE_ROWS, SWIZZLE // jnp.dtype(dtype).itemsize)
    transforms = (plgpu.TilingTransform(tiling), *transforms)  # pyright: ignore[reportAbstractUsage]
  return plgpu.SMEM(shape, dtype, transforms=transforms)


def launch(
  body: Callable[..., None],
  *operands: Array,
  loads: int,
  out_type: Sequence[Any],
  shared: Sequence[Sequence[Any]],
  tile: Tile,
  tuning: MatmulTuning,
  kernel_name: str,
  approx_math: bool = False,
  into: Sequence[Array] = (),
  beside: Transfer | None = None,
  reads_beside: bool = False,
  claims: Callable[[Sequence[Any]], Array] | None = None,
) -> tuple[list[Array], Any]:
  """Runs a kernel of persistent blocks around a ring, and a transfer beside it.

  Args:
    body: called with references to operands, results and shared memory, the barriers of the ring
      (full, free), one for the warpgroups that multiply, and which tiles are the block's; and if it
      reads what the transfer brings, with references to that and the slots' arrivals.
    operands: arrays.
    loads: that arrive at a stage.
    out_type: of the results, the first of them those of ``into``.
    shared: shared memory; views of one memory in the order of their parts.
    tile: its number of strips decides who waits for what.
    tuning: of the kernel, placed.
    kernel_name: in traces.
    approx_math: whether exp, tanh, … may be the device's approximations.
    into: arrays to write results into, in their memory if nothing else needs them: what the
      kernel does not write stays. Not with ``beside``.
    beside: a transfer with as many workers a block as this kernel has warpgroups, which does not
      touch this kernel's operands. It runs in blocks of its own, the first ones: the device starts
      them first, so that on no rank they wait for blocks that multiply. The last of these start
      where the transfer's have ended, and claim what is left.
    reads_beside: whether the body reads the transfer's results. It has to wait for each slot.
    claims: whether blocks claim their tiles even if no transfer runs beside, as references to the
      operands say. ``None``: they do not.

  Returns:
    The results, and the transfer's.
  """
  if into and beside is not None:
    raise ValueError("into: expected no transfer beside")
  owners = MULTIPLYING // tile.strips
  ride = beside or _NO_TRANSFER
  if beside is not None and (tuning.cluster > 1 or beside.tuning.workers != WARPGROUPS):
    raise ValueError(
      f"beside: expected {WARPGROUPS} workers and clusters of 1, got {beside.tuning.workers} "
      f"and {tuning.cluster}"
    )
  riding = beside.blocks if beside else 0
  written = out_type[len(into) :]
  ride_given = len(ride.operands) + len(ride.updated)
  counts = [len(operands), ride_given + len(into), len(written), len(ride.out_type)]

  def both(*refs: Any) -> None:
    inputs, ride_inputs, outs, ride_outs, ride_scratch, rest = tiles.split(
      refs, [*counts, len(ride.scratch_types)]
    )
    if into:
      outs = [*ride_inputs, *outs]
    views, full, free, both, *queue = rest
    *views, buffers = views if beside else (*views, ())
    block, barriers = lax.axis_index(_BLOCK_AXIS), (full, free, both)
    dealt = InTurn(block, tuning.clusters)
    rides = ride.has_work(ride_inputs) if beside else jnp.bool_(False)
    if queue:
      counter = pl.get_global(plgpu.SemaphoreType.REGULAR(deal.COUNTER))
      claimed = rides if claims is None else rides | claims(inputs)
      dealt = Claims(counter, dealt, claimed, *queue)
    if not beside:
      body(inputs, outs, views, *barriers, dealt)
      return
    semaphores = ride.semaphore_refs()
    arrivals = tiles.Arrivals(semaphores, ride.tuning)
    brought = (ride_outs, arrivals) if reads_beside else ()
    ride_refs = ride_inputs, ride_outs, ride_scratch, buffers, semaphores
    # Without work there, the last blocks are too many: the first ones take their place.
    cond(
      lax.select(rides, block >= riding, block < tuning.clusters),
      lambda: body(inputs, outs, views, *barriers, dealt, *brought),
      lambda: when(rides)(lambda: ride.body(*ride_refs)),
    )

  results = launch_kernel(
    both,
    [*operands, *ride.operands],
    out_type=[*written, *ride.out_type],
    updated=into or ride.updated,
    reaches_others=beside is not None,
    generations=support.WGMMA,
    grid=(riding + tuning.clusters,),
    grid_names=(_BLOCK_AXIS,),
    cluster=(tuning.cluster,),
    cluster_names=(_CLUSTER_AXIS,),
    num_threads=WARPGROUPS,
    thread_name=_GROUP_AXIS,
    scratch_types=[
      *ride.scratch_types,
      plgpu.RefUnion(*map(tuple, shared), *([tuple(ride.buffers)] if beside else [])),
      plgpu.Barrier(num_arrivals=loads, num_barriers=owners * tuning.stages),
      # Of a cluster also if that is one block: one thread arrives for its warpgroup, not all 128.
      plgpu.ClusterBarrier(
        collective_axes=(_CLUSTER_AXIS,), num_arrivals=tile.strips, num_barriers=tuning.stages
      ),
      plgpu.Barrier(num_arrivals=MULTIPLYING),
      *(deal.queue_types() if beside or claims else ()),
    ],
    compiler_params=plgpu.CompilerParams(
      # Only this lowering lets two views name one memory.
      lowering_semantics=plgpu.LoweringSemantics.Lane,
      approx_math=approx_math,
      unsafe_no_auto_barriers=not tuning.auto_barriers,
      skip_device_barrier=beside is None,  # reaches no other device
    ),
    kernel_name=kernel_name,
  )
  if into:
    return [*results[len(written) :], *results[: len(written)]], None
  return results[: len(out_type)], ride.finish(results[len(out_type) :])


_NO_TRANSFER = Transfer(
  (), (), (), (), (), lambda *_: None, lambda _: None, TransferTuning(), "", (0, 0), 0
)
