"""Zeros for slots without rows: who writes which, and in what memory.

What they write is compared with products in ``test_kernel_grouped_matmul_wgrad.py``.
"""

import jax
import jax.numpy as jnp
import pytest
from grouped_rows import LARGE_TILES

from pallas_kernels.matmul import layout, zeros
from pallas_kernels.matmul.layout import DEPTH, MatmulTuning
from pallas_kernels.matmul.wgrad import IN_TURNS
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


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("tuning", [IN_TURNS, MatmulTuning(), MatmulTuning(stages=3), LARGE_TILES])
def test_a_piece_fits_beside_stages_and_divides_every_slot(dtype, tuning):
  """In the 227 KB of a block, of which barriers and tables take one."""
  tile = layout.choose_tile(4096, 1536, 1, tuning)
  tuning = tuning.placed()
  piece = zeros.memory(tile, tuning, jnp.dtype(dtype))
  rows, cols = piece.shape
  assert cols * jnp.dtype(dtype).itemsize == 128
  assert 64 % rows == 0 and rows >= 8 and 64 % cols == 0
  stages = 2 * DEPTH * (tile.rows + tile.cols) * tuning.stages
  assert stages + tuning.store_bytes + 128 * rows <= 226 * 1024
