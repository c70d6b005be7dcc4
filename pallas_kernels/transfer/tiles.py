"""What all transfers between GPUs share: workers, and rows cut into tiles.

A *worker* is one warpgroup with its own tile buffer in shared memory. It moves one tile at a
time: it loads the tile, stores it wherever it is wanted, and reuses the buffer. Tiles are dealt
to the workers in turn, so worker w of one rank handles exactly the tiles that worker w of every
other rank handles, and two such workers can agree about a tile with a semaphore of their own.

A worker never overlaps its own steps; enough workers keep the links busy. This is what makes
waiting safe: a worker that waits holds nothing back that another one waits for.

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
    start: where in a row the first tile begins, in elements, as all lengths.
    length: of a tile.
    count: of tiles.
    before: tiles dealt before these; the workers' turns go on from there.
    dtype: of the array.
  """

  array: int
  start: int
  length: int
  count: int
  before: int
  dtype: jnp.dtype

  def each(self, worker: Array, num_workers: int, visit: Callable[[Array], None]) -> None:
    """Calls ``visit(offset)`` for the tiles of a worker, in order (inside a kernel)."""
    first = lax.rem(worker + (-self.before) % num_workers, jnp.int32(num_workers))
    steps = lax.div(self.count + num_workers - 1 - first, jnp.int32(num_workers))

    @pl.loop(jnp.int32(0), steps)
    def _(step: Array) -> None:
      visit(self.start + (first + step * num_workers) * self.length)

  def step(self, offset: Array, num_workers: int) -> Array:
    """How many tiles a worker handles before the one at ``offset``, over all ``Tiles``."""
    return lax.div(self.before + lax.div(offset - self.start, self.length), num_workers)


def count(tiles: Sequence[Tiles], worker: Array, num_workers: int) -> Array:
  """How many tiles a worker handles in all."""
  num_tiles = tiles[-1].before + tiles[-1].count
  return lax.div(num_tiles + num_workers - 1 - worker, num_workers)


def worker_index(tuning: TransferTuning) -> Array:
  """This worker's index among all of its rank (inside a kernel)."""
  return lax.axis_index(BLOCK_AXIS) * tuning.workers + lax.axis_index(WORKER_AXIS)


def cut(name: str, arrays: Sequence[Array], tuning: TransferTuning) -> list[Tiles]:
  """Cuts the rows (all but the leading axis) of arrays into tiles without overlap.

  Raises:
    NotImplementedError: a dtype that bulk copies cannot move, or a row that is not a multiple of
      16 bytes.
    ValueError: a tuning whose tiles have no room for a buffer of each dtype.
  """
  num_dtypes = max(len({array.dtype for array in arrays}), 1)
  if tuning.tile_bytes < (least := num_dtypes * SHARED_ALIGNMENT):
    raise ValueError(
      f"tile_bytes: expected at least {least} for {num_dtypes} dtypes, got {tuning.tile_bytes}"
    )
  most = tuning.tile_bytes // num_dtypes // SHARED_ALIGNMENT * SHARED_ALIGNMENT
  tiles: list[Tiles] = []
  before = 0
  for index, array in enumerate(arrays):
    if array.dtype not in _MOVABLE:
      raise NotImplementedError(f"{name}: expected a dtype of {_MOVABLE}, got {array.dtype}")
    row, length = math.prod(array.shape[1:]), most // array.dtype.itemsize
    if row == 0 or row * array.dtype.itemsize % ALIGNMENT:
      raise NotImplementedError(
        f"{name}: expected rows of a positive multiple of {ALIGNMENT} bytes, got "
        f"{row * array.dtype.itemsize} bytes ({array.shape[1:]} of {array.dtype})"
      )
    full, rest = divmod(row, length)
    for start, size, count in ((0, length, full), (full * length, rest, 1)):
      if size and count:
        tiles.append(Tiles(index, start, size, count, before, array.dtype))
        before += count
  return tiles


_MOVABLE = tuple(
  jnp.dtype(name)
  for name in (
    *("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"),
    *("int8", "uint8", "int16", "uint16", "int32", "uint32"),
  )
)


def buffers(tiles: Sequence[Tiles], tuning: TransferTuning) -> list[Any]:
  """Scratch types for a tile buffer per worker and dtype; see ``buffer``."""
  return [
    plgpu.SMEM((tuning.workers, _padded(length, dtype)), dtype)
    for dtype, length in _buffer_lengths(tiles).items()
  ]


def buffer(tiles: Tiles, all_tiles: Sequence[Tiles], buffer_refs: Sequence[Any]) -> Any:
  """This worker's buffer for a tile of ``tiles`` (inside a kernel)."""
  return whole_buffer(tiles, all_tiles, buffer_refs).at[jnp.s_[: tiles.length]]


def whole_buffer(tiles: Tiles, all_tiles: Sequence[Tiles], buffer_refs: Sequence[Any]) -> Any:
  """The same, to its end at a multiple of 128 bytes."""
  index = list(_buffer_lengths(all_tiles)).index(tiles.dtype)
  return buffer_refs[index].at[lax.axis_index(WORKER_AXIS)]


def _buffer_lengths(tiles: Sequence[Tiles]) -> Mapping[jnp.dtype, int]:
  lengths: dict[jnp.dtype, int] = {}
  for each in tiles:
    lengths[each.dtype] = max(lengths.get(each.dtype, 0), each.length)
  return lengths


def _padded(length: int, dtype: jnp.dtype) -> int:
  unit = SHARED_ALIGNMENT // dtype.itemsize
  return -(-length // unit) * unit


@dataclasses.dataclass(frozen=True)
class Transfer:
  """A transfer that is not launched yet: alone, or in the first blocks of another kernel.

  In another kernel it takes a few SMs for as long as it lasts, and the links are busy while the
  rest of the GPU computes. XLA runs kernels one after the other, so this is how they overlap.

  Attributes:
    operands: arrays.
    updated: arrays that it changes in place.
    out_type: of the results.
    scratch_types: barriers and semaphores.
    buffers: shared memory; blocks that run something else use theirs for that.
    body: called with references to operands and updated arrays, results, scratch and buffers.
    finish: from the kernel's results and updated arrays to what the caller wants.
    tuning: its blocks and workers, placed.
    name: of the kernel, when alone.
  """

  operands: Sequence[Array]
  updated: Sequence[Array]
  out_type: Sequence[Any]
  scratch_types: Sequence[Any]
  buffers: Sequence[Any]
  body: Callable[[Sequence[Any], Sequence[Any], Sequence[Any], Sequence[Any]], None]
  finish: Callable[[Sequence[Array]], Any]
  tuning: TransferTuning
  name: str

  def launch(self) -> Any:
    """Runs it in a kernel of its own."""
    given = len(self.operands) + len(self.updated)
    counts = [given, len(self.out_type), len(self.scratch_types)]

    def body(*refs: Any) -> None:
      self.body(*split(refs, counts))

    results = launch(
      body,
      self.operands,
      out_type=self.out_type,
      updated=self.updated,
      reaches_others=True,
      grid=(self.tuning.num_blocks,),
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
