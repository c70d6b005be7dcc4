"""Zeros for slots without rows: who writes which, and in what memory.

What they write is compared with products in ``test_kernel_grouped_matmul_wgrad.py``.
"""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from grouped_rows import LARGE_TILES

from pallas_kernels.matmul import layout, zeros
from pallas_kernels.matmul.layout import DEPTH, MatmulTuning
from pallas_kernels.matmul.wgrad import turns_for
from pallas_kernels.matmul.zeros import Zeros


@pytest.mark.parametrize("blocks", [1, 2, 7, 132])
@pytest.mark.parametrize("slots", [0, 1, 3])
@pytest.mark.parametrize(("height", "width", "pieces"), [(64, 64, 1), (192, 320, 15)])
def test_blocks_share_all_pieces_evenly(blocks, slots, height, width, pieces):
  piece = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
  home = jax.ShapeDtypeStruct((4, height, width), jnp.bfloat16)
  counts = [
    int(Zeros(piece, [home], lambda i: i, jnp.int32(slots), jnp.int32(block), blocks).count)
    for block in range(blocks)
  ]
  assert sum(counts) == slots * pieces
  assert sorted(counts, reverse=True) == counts
  assert counts[0] - counts[-1] <= 1


SIX_STAGES = MatmulTuning("in_turns", rows=128, cols=128, stages=6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
  "given", [turns_for(4096, 1536), MatmulTuning(), MatmulTuning(stages=3), LARGE_TILES, SIX_STAGES]
)
def test_stages_leave_room_for_a_whole_piece(dtype, given):
  tile = layout.choose_tile(4096, 1536, 1, given)
  tuning = zeros.with_room(tile, given.placed())
  piece = zeros.memory(jnp.dtype(dtype))
  assert piece.shape == (64, 128 // jnp.dtype(dtype).itemsize)

  def taken(stages):
    return 2 * DEPTH * (tile.rows + tile.cols) * stages + tuning.store_bytes + 64 * 128

  assert taken(tuning.stages) <= layout.SHARED_BYTES
  assert tuning.stages == given.stages or taken(tuning.stages + 1) > layout.SHARED_BYTES
  assert dataclasses.replace(tuning, stages=given.stages) == given.placed()
  if given is SIX_STAGES:
    assert tuning.stages == 5
