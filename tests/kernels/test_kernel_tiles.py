"""How transfers between GPUs cut rows into tiles and deal them to workers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.transfer import tiles
from pallas_kernels.transfer.tuning import TransferTuning


@settings(max_examples=40)
@given(
  st.lists(
    st.tuples(st.integers(1, 300), st.sampled_from(["int8", "bfloat16", "float32"])), min_size=1
  ),
  st.integers(1, 9),
)
def test_tiles_cover_rows_and_are_dealt_evenly(rows, num_workers):
  arrays = [np.zeros((1, 16 * units), jnp.dtype(dtype)) for units, dtype in rows]
  cuts = tiles.cut("arrays", arrays, TransferTuning(blocks=1, workers=1, tile_bytes=1024))
  for tile in cuts:
    assert tile.start * tile.dtype.itemsize % 16 == 0
    assert tile.length * tile.dtype.itemsize % 16 == 0
    assert tile.length * tile.dtype.itemsize <= 1024
  check_dealt(cuts, [np.zeros(array.size, int) for array in arrays], num_workers)


@settings(max_examples=40)
@given(
  st.lists(
    st.tuples(
      st.integers(1, 70), st.sampled_from([8, 24, 64]), st.sampled_from(["bfloat16", "float32"])
    ),
    min_size=1,
    max_size=4,
  ),
  st.integers(1, 9),
)
def test_tiles_of_matrices_have_whole_trailing_axes(matrices, num_workers):
  arrays = [np.zeros((1, rows, cols), jnp.dtype(dtype)) for rows, cols, dtype in matrices]
  tuning = TransferTuning(blocks=1, workers=1, tile_bytes=1024)
  cuts = tiles.cut("arrays", arrays, tuning, flat=False)
  forms = len({(array.dtype, array.shape[2:]) for array in arrays})  # each has its own buffer
  for tile in cuts:
    array = arrays[tile.array]
    assert (tile.dtype, tile.rest) == (array.dtype, array.shape[2:])
    whole = tile.length * array.shape[2] * tile.dtype.itemsize
    assert whole % 16 == 0 and (whole * forms <= 1024 or tile.length == 1)
  check_dealt(cuts, [np.zeros(array.shape[1], int) for array in arrays], num_workers)
  longest = {}
  for tile in cuts:
    form = tile.dtype, tile.rest
    longest[form] = max(longest.get(form, 0), tile.length)
  shapes = [ref.shape for ref in tiles.buffers(cuts, tuning, 2)]
  assert shapes == [(2, length, *rest) for (_, rest), length in longest.items()]


def test_matrices_whose_rows_are_no_multiple_of_16_bytes_are_cut_flat_alone():
  arrays = [np.zeros((1, 8, 12), jnp.bfloat16)]
  assert tiles.cut("arrays", arrays, TransferTuning())
  with pytest.raises(NotImplementedError, match="arrays: expected rows of a positive multiple"):
    tiles.cut("arrays", arrays, TransferTuning(), flat=False)


def test_runs_of_tiles_cover_rows_and_are_dealt_in_turn():
  """Of all arrays; the last run of an array's tiles may be shorter."""
  arrays = [np.zeros((1, 11 * 32), np.float32), np.zeros((1, 6 * 32 + 8), np.float32)]
  cuts = tiles.cut("arrays", arrays, TransferTuning(tile_bytes=128), run=3)
  assert [(tile.count, tile.before, tile.runs) for tile in cuts] == [
    (11, 0, 4),
    (6, 4, 2),
    (1, 6, 1),
  ]
  for num_workers in (1, 2, 3, 5):
    covered, runs = [np.zeros(array.shape[1:], int) for array in arrays], []
    for tile in cuts:
      for worker in range(num_workers):
        for offset, count in visited(tile, worker, num_workers):
          covered[tile.array][offset : offset + count * tile.length] += 1
          runs.append((tile.before + (offset - tile.start) // (3 * tile.length), worker))
    assert all((array == 1).all() for array in covered)
    assert sorted(runs) == [(run, run % num_workers) for run in range(7)]


def test_tiles_have_room_for_every_dtype():
  arrays = [np.zeros((1, 32), dtype) for dtype in (np.float32, np.int8, np.int16)]
  assert len(tiles.cut("arrays", arrays, TransferTuning(tile_bytes=384))) == 3
  with pytest.raises(ValueError, match="tile_bytes: expected at least 384 for 3 dtypes, got 256"):
    tiles.cut("arrays", arrays, TransferTuning(tile_bytes=256))


def check_dealt(cuts, covered, num_workers):
  """Workers visit every place once, and as many tiles each but for one; ``covered`` is zeros."""
  dealt = np.zeros(num_workers, int)
  for tile in cuts:
    for worker in range(num_workers):
      for offset, count in visited(tile, worker, num_workers):
        assert count == 1
        covered[tile.array][offset : offset + tile.length] += 1
        dealt[worker] += 1
  assert all((array == 1).all() for array in covered)
  assert np.ptp(dealt) <= 1


def visited(tile, worker, num_workers):
  """Where a worker's runs begin, and how many tiles they have."""
  runs = []
  with jax.disable_jit():
    tile.each(
      jnp.int32(worker), num_workers, lambda *run: runs.append(tuple(map(int, run[:2]))), None
    )
  return runs
