"""What all transfers between GPUs share: workers, and rows cut into tiles.

A *worker* is one warpgroup with its own tile buffers in shared memory. It loads a tile, stores it
wherever it is wanted, and reuses the buffer. Tiles, or runs of a few, are dealt to the workers in
turn, so worker w of one rank handles exactly the tiles that worker w of every other rank handles,
and two such workers can agree about them with a semaphore of their own.

What makes waiting safe: a worker that waits holds nothing back that another one waits for. It has
announced all that it sent.

Seven tiles, three workers, on every rank::

  tile      0  1  2  3  4  5  6
  worker    0  1  2  0  1  2  0
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.launch import launch
from pallas_kernels.support import Array
from pallas_kernels.transfer.tuning import SHARED_ALIGNMENT, TransferTuning

ALIGNMENT = 16  # bytes: the unit of bulk copies
BLOCK_AXIS, WORKER_AXIS = "block", "warpgroup"  # of every kernel that a transfer can ride in


@dataclasses.dataclass(frozen=True)
class Tiles:
  """Tiles of one length that follow each other in the rows of one array.

  Attributes:
    array: which of the arrays.
    start: where in a row the first tile begins; lengths and offsets are along the row's first axis.
    length: of a tile.
    count: of tiles.
    before: runs of tiles dealt before these; the workers' turns go on from there.
    dtype: of the array.
    rest: the row's other axes, which tiles have whole.
    run: tiles that a worker handles one after the other.
  """

  array: int
  start: int
  length: int
  count: int
  before: int
  dtype: jnp.dtype
  rest: tuple[int, ...] = ()
  run: int = 1

  def each[T](
    self, worker: Array, num_workers: int, visit: Callable[[Array, Array, T], T], carry: T
  ) -> T:
    """``carry = visit(offset, count, carry)`` for a worker's tiles, in order (inside a kernel).

    ``count`` tiles that lie one behind the other begin there.
    """
    first = lax.rem(worker + (-self.before) % num_workers, jnp.int32(num_workers))
    steps = lax.div(self.runs + num_workers - 1 - first, jnp.int32(num_workers))

    def step(step: Array, carry: T) -> T:
      tile = (first + step * num_workers) * self.run
      count = lax.min(self.count - tile, jnp.int32(self.run))
      return visit(self.start + tile * self.length, count, carry)

    return lax.fori_loop(jnp.int32(0), steps, step, carry)

  @property
  def runs(self) -> int:
    """Of up to ``run`` tiles, which are dealt to the workers in turn."""
    return -(-self.count // self.run)


def count(tiles: Sequence[Tiles], worker: Array, num_workers: int) -> Array:
  """How many runs of tiles a worker handles in all."""
  num_runs = tiles[-1].before + tiles[-1].runs
  return lax.div(num_runs + num_workers - 1 - worker, num_workers)


def worker_index(tuning: TransferTuning) -> Array:
  """This worker's index among all of its rank (inside a kernel)."""
  return lax.axis_index(BLOCK_AXIS) * tuning.workers + lax.axis_index(WORKER_AXIS)


def cut(
  name: str,
  arrays: Sequence[Array],
  tuning: TransferTuning,
  *,
  flat: bool = True,
  run: int = 1,
) -> list[Tiles]:
  """Cuts the rows (all but the leading axis) of arrays into tiles without overlap.

  Args:
    name: of the arrays.
    arrays: ``[X, ...]``.
    tuning: the most bytes of a tile.
    flat: a row is cut as one vector; otherwise along its first axis alone, so that a tile may be
      larger than asked for.
    run: tiles that a worker handles one after the other.

  Raises:
    NotImplementedError: a dtype that bulk copies cannot move, or a row that is not a multiple of
      16 bytes; not flat, a part of it.
    ValueError: a tuning whose tiles have no room for a buffer of each dtype.
  """
  rests = [() if flat else array.shape[2:] for array in arrays]
  num_dtypes = max(len({(array.dtype, rest) for array, rest in zip(arrays, rests, strict=True)}), 1)
  if tuning.tile_bytes < (least := num_dtypes * SHARED_ALIGNMENT):
    raise ValueError(
      f"tile_bytes: expected at least {least} for {num_dtypes} dtypes, got {tuning.tile_bytes}"
    )
  most = tuning.tile_bytes // num_dtypes // SHARED_ALIGNMENT * SHARED_ALIGNMENT
  tiles: list[Tiles] = []
  before = 0
  for index, (array, rest) in enumerate(zip(arrays, rests, strict=True)):
    if array.dtype not in _MOVABLE:
      raise NotImplementedError(f"{name}: expected a dtype of {_MOVABLE}, got {array.dtype}")
    size = math.prod(array.shape[1:])
    whole = math.prod(rest) * array.dtype.itemsize  # bytes that a tile cannot divide
    if size == 0 or (size if flat else math.prod(rest)) * array.dtype.itemsize % ALIGNMENT:
      raise NotImplementedError(
        f"{name}: expected rows of a positive multiple of {ALIGNMENT} bytes, got "
        f"{size * array.dtype.itemsize} bytes ({array.shape[1:]} of {array.dtype})"
      )
    length, row = max(most // whole, 1), size // math.prod(rest)
    full, left = divmod(row, length)
    for start, each, count in ((0, length, full), (full * length, left, 1)):
      if each and count:
        tiles.append(Tiles(index, start, each, count, before, array.dtype, rest, run))
        before += tiles[-1].runs
  return tiles


_MOVABLE = tuple(
  jnp.dtype(name)
  for name in (
    *("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"),
    *("int8", "uint8", "int16", "uint16", "int32", "uint32"),
  )
)


def buffers(tiles: Sequence[Tiles], tuning: TransferTuning, each: int = 1) -> list[Any]:
  """Scratch types for tile buffers, so many for each worker and form of tiles; see ``buffer``."""
  return [
    plgpu.SMEM((tuning.workers * each, length if rest else _padded(length, dtype), *rest), dtype)
    for (dtype, rest), length in _buffer_lengths(tiles).items()
  ]


def buffer(
  tiles: Tiles,
  all_tiles: Sequence[Tiles],
  buffer_refs: Sequence[Any],
  which: Array | None = None,
) -> Any:
  """This worker's buffer for a tile of ``tiles``, or of all that there are (inside a kernel)."""
  return whole_buffer(tiles, all_tiles, buffer_refs, which).at[jnp.s_[: tiles.length]]


def whole_buffer(
  tiles: Tiles,
  all_tiles: Sequence[Tiles],
  buffer_refs: Sequence[Any],
  which: Array | None = None,
) -> Any:
  """The same, to its end; flat, that is a multiple of 128 bytes."""
  index = list(_buffer_lengths(all_tiles)).index((tiles.dtype, tiles.rest))
  return buffer_refs[index].at[lax.axis_index(WORKER_AXIS) if which is None else which]


def _buffer_lengths(tiles: Sequence[Tiles]) -> Mapping[tuple[jnp.dtype, tuple[int, ...]], int]:
  lengths: dict[tuple[jnp.dtype, tuple[int, ...]], int] = {}
  for each in tiles:
    form = each.dtype, each.rest
    lengths[form] = max(lengths.get(form, 0), each.length)
  return lengths


def _padded(length: int, dtype: jnp.dtype) -> int:
  unit = SHARED_ALIGNMENT // dtype.itemsize
  return -(-length // unit) * unit


@dataclasses.dataclass(frozen=True)
class Arrivals:
  """Which slots of a rank are filled, known to all blocks of a kernel (inside it).

  The workers of a sender count a slot up, on the rank that has it. One warpgroup there, the
  watcher, waits until all have, and tells its own GPU. All other blocks wait for the watcher, for
  each of their tiles: to wait for another GPU takes 3 µs, even if all is there.

  Attributes:
    semaphores: ``[2 or more, S]``, counts of workers, and one for each slot that is complete.
    tuning: of the transfer.
  """

  semaphores: Any
  tuning: TransferTuning

  def of_worker(self, slot: Array) -> Any:
    """What each worker adds one to when it has filled a slot."""
    return self.semaphores.at[0, slot]

  def watch(self, slot: Array) -> None:
    """Waits for all workers, and tells the other blocks."""
    pl.semaphore_wait(self.of_worker(slot), self.tuning.num_workers)
    plgpu.semaphore_signal(self.semaphores.at[1, slot], memory_scope="gpu")

  def wait(self, slot: Array) -> None:
    """Waits until a slot is complete."""
    done = self.semaphores.at[1, slot]
    plgpu.semaphore_wait(done, decrement=False, memory_scope="gpu")


@dataclasses.dataclass(frozen=True)
class Transfer:
  """A transfer not launched yet: alone, or by the functions ``*_beside``, in a matmul's kernel.

  In another kernel it takes a few SMs for as long as it lasts, and the links are busy while the
  rest of the GPU computes. XLA runs kernels one after the other, so this is how they overlap.

  Attributes:
    operands: arrays. The first one is the work list, a vector of int32.
    updated: arrays that it changes in place.
    out_type: of the results.
    scratch_types: barriers.
    buffers: shared memory; blocks that run something else use theirs for that.
    body: called with references to operands and updated arrays, results, scratch and buffers, and
      to the semaphores.
    finish: from the kernel's results and updated arrays to what the caller wants.
    tuning: its blocks and workers, placed.
    name: of the kernel, when alone.
    semaphores: their shape. All blocks share them: XLA clears them before the kernel, and those of
      each block would be as many times more as the matmul beside has blocks.
    work: where in the work list a number stands that is 0 on ranks that have no part in it.
    watched: whether the first are those of slots (``Arrivals``), which a block more watches.
  """

  operands: Sequence[Array]
  updated: Sequence[Array]
  out_type: Sequence[Any]
  scratch_types: Sequence[Any]
  buffers: Sequence[Any]
  body: Callable[..., None]
  finish: Callable[[Sequence[Array]], Any]
  tuning: TransferTuning
  name: str
  semaphores: tuple[int, int]
  work: int
  watched: bool = False

  @property
  def blocks(self) -> int:
    """Of the kernel, or of its first ones."""
    return self.tuning.num_blocks + self.watched

  def has_work(self, operand_refs: Sequence[Any]) -> Array:
    """Whether this rank has a part in it (inside a kernel); else the body does nothing."""
    return operand_refs[0][self.work] > 0

  def semaphore_refs(self) -> Any:
    """References to the semaphores (inside a kernel)."""
    return pl.get_global(plgpu.SemaphoreType.REGULAR(self.semaphores))

  def launch(self) -> Any:
    """Runs it in a kernel of its own."""
    given = len(self.operands) + len(self.updated)
    counts = [given, len(self.out_type), len(self.scratch_types)]

    def body(*refs: Any) -> None:
      self.body(*split(refs, counts), self.semaphore_refs())

    results = launch(
      body,
      self.operands,
      out_type=self.out_type,
      updated=self.updated,
      reaches_others=True,
      grid=(self.blocks,),
      grid_names=(BLOCK_AXIS,),
      num_threads=self.tuning.workers,
      thread_name=WORKER_AXIS,
      scratch_types=[*self.scratch_types, *self.buffers],
      kernel_name=self.name,
    )
    return self.finish(results)


def split(refs: Sequence[Any], counts: Sequence[int]) -> list[Sequence[Any]]:
  """Parts of so many, and the rest."""
  parts, start = [], 0
  for count in counts:
    parts.append(refs[start : start + count])
    start += count
  return [*parts, refs[start:]]
