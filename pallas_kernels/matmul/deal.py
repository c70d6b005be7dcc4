"""Which tiles a block of a matmul computes: dealt in turn, or claimed one by one.

A kernel that shares the GPU with a transfer has fewer SMs while that lasts. Tiles dealt beforehand
would wait for the blocks that start late, so there each block claims a tile when it begins to load
the one before, from a counter in the GPU's memory. The loading warpgroup claims, and tells the
others through a queue in shared memory::

  loads         claim b, load a    claim c, load b   …
  multiplies                       multiply a        multiply b

Where the transfer has nothing to do on this GPU, tiles are dealt in turn: blocks that are at work
on two tiles and have claimed a third do not end together. Tiles of very unequal length are claimed
even so, and without a transfer too: shorter ones, which come later, make up for the longest.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.matmul.layout import MULTIPLYING
from pallas_kernels.support import Array
from pallas_kernels.warp.branches import cond, when

Scalars = tuple[Array, ...]  # a tile, and what there is to do
Describe = Callable[[Array], Scalars]  # a tile's; past all tiles, anything
Carry = tuple[Scalars, *tuple[Any, ...]]  # the next tile's, and whatever else a loop carries
Step = Callable[[Array, Carry], Carry]

COUNTER = (1,)  # semaphores: how many tiles are claimed, which XLA clears before the kernel
_QUEUE = 4  # tiles that a block's warpgroups may be apart


@dataclasses.dataclass(frozen=True)
class InTurn:
  """Tiles are dealt to clusters of blocks in turn.

  Attributes:
    cluster: this one.
    clusters: of the kernel.
  """

  cluster: Array
  clusters: int

  def tile(self, i: Array) -> Array:
    """The i-th of this cluster; past all tiles if there is none."""
    return self.cluster + i * self.clusters

  def begin(self, i: Array, describe: Describe, loading: bool) -> Scalars:
    """The i-th tile of this cluster, described while the one before is at work."""
    return describe(self.tile(i))

  def end(self, i: Array, begun: Any, describe: Describe, loading: bool) -> Scalars:
    """The same."""
    return begun

  def each(self, num_tiles: Array, step: Step, first: Carry, loading: bool) -> Carry:
    """As ``lax.fori_loop`` over the tiles of this cluster."""
    count = lax.div(num_tiles + (self.clusters - 1 - self.cluster), jnp.int32(self.clusters))
    return lax.fori_loop(jnp.int32(0), count, step, first)


@dataclasses.dataclass(frozen=True)
class Claims:
  """Tiles are claimed by blocks; or dealt in turn, by what the kernel reads.

  Attributes:
    counter: a semaphore of ``COUNTER``, which all blocks share.
    in_turn: how they are dealt if they are not claimed.
    claimed: ``[]`` bool, whether they are; the same in all blocks.
    queue: shared memory, the block's next tiles.
    told: barriers: a tile is in the queue.
    free: both warpgroups that multiply have read it.
  """

  counter: Any
  in_turn: InTurn
  claimed: Array
  queue: Any
  told: Any
  free: Any

  @property
  def cluster(self) -> Array:
    """This one."""
    return self.in_turn.cluster

  def begin(self, i: Array, describe: Describe, loading: bool) -> Scalars | None:
    """Claims the i-th tile of this block, which is told while the one before is loaded.

    To those who multiply that one it has been told.
    """
    if not loading:
      return describe(self._tile(i, loading))
    when(self.claimed)(lambda: self._claim(i))
    return None

  def end(self, i: Array, begun: Any, describe: Describe, loading: bool) -> Scalars:
    """The i-th tile of this block."""
    return describe(self._tile(i, loading)) if loading else begun

  def _claim(self, i: Array) -> None:
    place = lax.rem(i, jnp.int32(_QUEUE))
    when(i >= _QUEUE)(lambda: plgpu.barrier_wait(self.free.at[place]))
    _take_one(self.counter, self.queue, place)
    plgpu.barrier_arrive(self.told.at[place])

  def _tile(self, i: Array, loading: bool) -> Array:
    def read() -> Array:
      place = lax.rem(i, jnp.int32(_QUEUE))
      plgpu.barrier_wait(self.told.at[place])
      t = self.queue[place]
      if not loading:
        plgpu.barrier_arrive(self.free.at[place])
      return t

    return cond(self.claimed, read, lambda: self.in_turn.tile(i))

  def each(self, num_tiles: Array, step: Step, first: Carry, loading: bool) -> Carry:
    """As ``lax.fori_loop`` over the tiles of this block, until one is past all tiles."""

    def is_tile(carry: tuple[Array, Carry]) -> Array:
      return carry[1][0][0] < num_tiles

    def one(carry: tuple[Array, Carry]) -> tuple[Array, Carry]:
      i, state = carry
      return i + 1, step(i, state)

    count, last = lax.while_loop(is_tile, one, (jnp.int32(0), first))
    if loading:  # who waits for a barrier must see each of its phases
      when(self.claimed)(lambda: self._wait_for_readers(count + 1))
    return last

  def _wait_for_readers(self, claims: Array) -> None:
    def wait(i: Array, _: None) -> None:
      plgpu.barrier_wait(self.free.at[lax.rem(i, jnp.int32(_QUEUE))])

    lax.fori_loop(lax.max(claims - _QUEUE, jnp.int32(0)), claims, wait, None)


def queue_types() -> list[Any]:
  """Scratch types of the last fields of ``Claims``."""
  return [
    plgpu.SMEM((_QUEUE,), jnp.int32),
    plgpu.Barrier(num_arrivals=1, num_barriers=_QUEUE),
    plgpu.Barrier(num_arrivals=MULTIPLYING, num_barriers=_QUEUE),
  ]


def _take_one(counter_ref: Any, queue_ref: Any, place: Array) -> None:
  """Writes into the queue what the counter was before this adds one."""

  def take(ctx: Any, counter: ir.Value, queue: ir.Value, place: mgpu.FragmentedArray) -> None:
    del ctx
    i32 = ir.IntegerType.get_signless(32)
    thread = arith.remui(utils.thread_idx(), arith.constant(i32, utils.WARPGROUP_SIZE))
    # Of a warp that starts no copies: it would wait for the counter.
    mine = arith.constant(i32, utils.WARPGROUP_SIZE - utils.WARP_SIZE)
    with utils.when(arith.cmpi(arith.CmpIPredicate.eq, thread, mine)):
      code, at = "atom.relaxed.gpu.global.add.u32 $0, [$1], 1;", utils.memref_ptr(counter)
      taken = utils.inline_ptx(code, at, result_types=i32, has_side_effects=True)
      element = utils.getelementptr(utils.memref_ptr(queue), [place.registers.item()], i32)
      llvm.store(taken, element)

  take.effect = "take_one"
  arg_types = plgpu.RefType(), plgpu.RefType(), plgpu.Layout.WG_SPLAT
  plgpu.inline_mgpu(arg_types=arg_types)(take)(counter_ref, queue_ref, place)
