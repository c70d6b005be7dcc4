"""Zeros for weights' gradients of slots without rows, written by the warpgroup that loads.

Where loads are skewed, many slots have no rows. Written after all products, their zeros wait for
memory while the tensor cores have nothing to do. So they are cut into pieces: a block writes one
with every stage that it loads, and what is left when all is loaded comes then. Which of three
blocks write the pieces of slots 5 and 9, which have no rows::

  slot 5  0 1    slot 9  1 2
          2 0            0 1
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.matmul import layout
from pallas_kernels.matmul.layout import UNIT, MatmulTuning, Tile
from pallas_kernels.support import Array
from pallas_kernels.warp.branches import when

_WIDE = 2 * UNIT  # bytes of a piece's row, the widest swizzle


def with_room(tile: Tile, tuning: MatmulTuning) -> MatmulTuning:
  """With as many stages as leave memory for a piece, and no more than it has.

  With pieces of 1 KB, gradients of mostly empty slots took up to 1.7 times as long as with zeros
  after all products. With one stage less they are as fast or faster.
  """
  left = layout.SHARED_BYTES - tuning.store_bytes - UNIT * _WIDE
  most = max(left // layout.stage_bytes(tile.rows, tile.cols), 1)
  return dataclasses.replace(tuning, stages=min(tuning.stages, most))


def memory(dtype: jnp.dtype) -> Any:
  """Shared memory of a piece."""
  return plgpu.SMEM((UNIT, _WIDE // dtype.itemsize), dtype)


@dataclasses.dataclass(frozen=True)
class Zeros:
  """A block's pieces: of all in the order of slots, rows and columns, every so many-th.

  Attributes:
    piece: shared memory.
    outs: gradients of home slots, and of replica slots if there are any.
    slot_at: the i-th slot without rows.
    slots: ``[]`` int32, how many there are.
    block: ``[]`` int32, this one.
    blocks: all.
  """

  piece: Any
  outs: Sequence[Any]
  slot_at: Callable[[Array], Array]
  slots: Array
  block: Array
  blocks: int

  def fill(self) -> None:
    """Makes the piece, by one warpgroup."""
    by_threads = plgpu.Layout.WG_STRIDED(self.piece.shape, vec_size=2)
    empty = jnp.zeros(self.piece.shape, self.piece.dtype)
    self.piece[...] = plgpu.layout_cast(empty, by_threads)
    plgpu.commit_smem()

  @property
  def count(self) -> Array:
    """``[]`` int32, pieces of this block."""
    down, across = self._of_slot
    pieces = self.slots * (down * across)
    return lax.div(pieces + (self.blocks - 1 - self.block), jnp.int32(self.blocks))

  def write(self, i: Array) -> None:
    """The i-th piece of this block, which has so many."""
    down, across = self._of_slot
    piece = self.block + i * self.blocks
    number, inside = (f(piece, jnp.int32(down * across)) for f in (lax.div, lax.rem))
    place = (f(inside, jnp.int32(across)) for f in (lax.div, lax.rem))
    row, col = (pl.ds(n * size, size) for n, size in zip(place, self.piece.shape, strict=True))
    slot, first = self.slot_at(number), 0
    for out in self.outs:
      here = (slot >= first) & (slot < first + out.shape[0])
      target = out.at[slot - first, row, col]
      when(here)(lambda target=target: plgpu.copy_smem_to_gmem(self.piece, target))
      first += out.shape[0]

  def finish(self, written: Array) -> None:
    """Writes those after the first so many, and waits until all are written."""
    lax.fori_loop(written, self.count, lambda i, _: self.write(i), None)
    plgpu.wait_smem_to_gmem(0)

  @property
  def _of_slot(self) -> tuple[int, int]:
    """Pieces down and across a slot."""
    rows, cols = self.piece.shape
    height, width = self.outs[0].shape[1:]
    return height // rows, width // cols
