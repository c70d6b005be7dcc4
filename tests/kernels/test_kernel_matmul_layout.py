"""What the matmul kernels share: the order of tiles and their sizes."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.matmul import layout
from pallas_kernels.matmul.deal import InTurn
from pallas_kernels.matmul.layout import MatmulTuning, Tile


@pytest.mark.parametrize("band", [1, 8, 16])
@pytest.mark.parametrize(("num_rows", "num_cols"), [(1, 1), (7, 56), (3, 11), (20, 32), (5, 17)])
def test_position_is_a_bijection(num_rows, num_cols, band):
  tiles = jnp.arange(num_rows * num_cols, dtype=jnp.int32)
  position = layout.position
  positions = jax.vmap(lambda t: position(t, jnp.int32(num_rows), num_cols, band))(tiles)
  rows, cols = (np.asarray(x) for x in positions)
  got = set(zip(rows.tolist(), cols.tolist(), strict=True))
  assert got == {(r, c) for r in range(num_rows) for c in range(num_cols)}
  # The tiles worked on together stay within a band.
  assert len(set(cols[: num_rows * min(band, num_cols) // 2].tolist())) <= band


@pytest.mark.parametrize(("band", "at_once"), [(1, 3), (8, 39), (16, 4), (16, 132)])
@pytest.mark.parametrize(("home", "others"), [(0, 0), (0, 3), (7, 0), (7, 3), (1, 20)])
def test_tiles_of_home_slots_come_first_where_replicas_arrive(home, others, band, at_once):
  num_rows, num_cols = home + others, 11
  home_first, position = layout.home_first, layout.position
  rows, first = jnp.int32(num_rows), jnp.int32(home)
  tiles = jnp.arange(num_rows * num_cols, dtype=jnp.int32)
  places = jax.vmap(lambda t: home_first(t, rows, first, num_cols, band, at_once))(tiles)
  got = np.stack(places, axis=1)
  at_home = num_cols * home
  places = jax.vmap(lambda t: position(t, jnp.int32(home), num_cols, band))(tiles)
  np.testing.assert_array_equal(got[:at_home], np.stack(places, axis=1)[:at_home])
  # The others by as many rows as are worked on side by side: none waits for copies of later ones.
  together = max(at_once // min(band, num_cols), 1)
  for row in range(home, num_rows, together):
    part = got[row * num_cols : min(row + together, num_rows) * num_cols].tolist()
    expected = itertools.product(range(row, min(row + together, num_rows)), range(num_cols))
    assert sorted(part) == list(map(list, expected))
    assert (
      len({col for _, col in part[: len(part) * min(band, num_cols) // (2 * num_cols)]}) <= band
    )


@pytest.mark.parametrize("clusters", [132, 66, 39, 8])
@pytest.mark.parametrize("num_tiles", [0, 1, 131, 132, 1000, 6144])
def test_every_tile_that_is_dealt_in_turn_has_one_owner(num_tiles, clusters):
  """And owners have equally many, but for one."""

  def owned(cluster):
    dealt = InTurn(cluster, clusters)

    def step(i, carry):
      (t,), tiles_T = carry
      return (dealt.tile(i + 1),), tiles_T.at[t].add(1, mode="clip")

    first = (dealt.tile(jnp.int32(0)),), jnp.zeros(num_tiles + 1, jnp.int32)  # past all: no tile
    return dealt.each(jnp.int32(num_tiles), step, first, loading=False)[1]

  owned_BT = np.asarray(jax.vmap(owned)(jnp.arange(clusters, dtype=jnp.int32)))
  assert owned_BT.sum(axis=0).tolist() == [1] * num_tiles + [0]
  assert np.ptp(owned_BT.sum(axis=1)) <= 1


@pytest.mark.parametrize(
  ("rows", "cols", "operands", "schedule", "tile"),
  [
    (256, 2048, 1, "together", Tile(64, 256, 2)),
    (256, 1408, 1, "deferred", Tile(128, 128, 2)),
    (64, 1408, 1, "together", Tile(64, 256, 2)),
    (256, 2880, 1, "together", Tile(64, 192, 2)),
    (256, 192, 1, "together", Tile(64, 192, 2)),
    (192, 64, 1, "together", Tile(128, 64, 2)),
    (256, 2048, 2, "together", Tile(64, 128, 2)),
    (256, 64, 2, "together", Tile(128, 64, 2)),
    (256, 2048, 1, "in_turns", Tile(128, 128, 1)),
    (256, 64, 1, "in_turns", Tile(128, 64, 1)),
    (256, 2048, 2, "in_turns", Tile(128, 64, 1)),
  ],
)
def test_tiles_leave_little_over_and_fit_registers(rows, cols, operands, schedule, tile):
  got = layout.choose_tile(rows, cols, operands, MatmulTuning(schedule))
  assert got == tile
  assert got.strip <= rows and got.cols <= cols
  assert got.strip * got.cols * operands <= 128 * 128


def test_the_tile_of_a_tuning_is_taken_where_it_fits():
  tuning = MatmulTuning(rows=256, cols=192, stages=3)
  assert layout.choose_tile(256, 2880, 1, tuning) == Tile(128, 192, 2)
  assert layout.choose_tile(64, 2880, 1, tuning) == layout.choose_tile(64, 2880, 1, MatmulTuning())
  assert layout.choose_tile(256, 128, 1, tuning) == layout.choose_tile(256, 128, 1, MatmulTuning())
  assert layout.choose_tile(256, 2880, 2, tuning) == Tile(64, 128, 2)  # 96 is no multiple of 64


@pytest.mark.parametrize("rows", [64, 128, 192, 256, 2880, 4096])
@pytest.mark.parametrize("cols", range(64, 1024, 64))
@pytest.mark.parametrize("operands", [1, 2])
def test_all_multiples_of_64_have_a_tile(rows, cols, operands):
  """Two weights only for rows in groups of any size."""
  for schedule in ("together", "in_turns") if operands == 1 or rows >= 256 else ():
    tile = layout.choose_tile(rows, cols, operands, MatmulTuning(schedule))
    assert tile.strip <= rows and tile.cols <= cols
