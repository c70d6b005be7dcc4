"""Which rows each tile of grouped rows computes: a table that XLA makes before the kernel.

Groups of 300, 90, 0 and 122 rows, tiles of 128 rows, short ones in units of 64::

  slot 0   rows   0–127, 128–255, and 236–299: a tile of 64 that ends with the group
  slot 1   rows 300–427; 90 are stored: the group is smaller than its tile
  slot 3   rows 390–517; 122 are stored

The same groups in even tiles of at most 192 rows::

  slot 0   rows   0–159, and 140–299: two tiles, of 160 rows each
  slot 1   rows 300–395; 90 are stored
  slot 3   rows 390–517; 122 are stored
"""

import jax.numpy as jnp

from pallas_kernels.matmul.layout import EVEN_SIZES, UNIT, sum_before
from pallas_kernels.support import Array

_SMALL_GROUP = 320  # the weights of fewer rows take an H100 as long to read twice as to multiply
_LEAST_EVEN = 96  # rows of a slot; most of smaller groups are stored in part by either kind of tile
_LARGE_WEIGHTS = 18_000_000  # bytes of a slot; the cache of a GPU holds two or three such slots


def row_tiles(
  capacity: int,
  group_size_P: Array,
  tile_rows: int,
  num_home: int,
  short_last: bool,
) -> Array:
  """What each tile of rows computes.

  Tiles begin where their group begins. What is left at the group's end is a tile of as many rows
  as it needs, rounded up to ``UNIT``, that ends with the group, so that none crosses a border:
  rows computed twice are stored twice, with the same bits. Only a group smaller than its tile has
  a tile that is stored in part. Tiles of fewer rows come last or after their group's others; see
  ``MatmulTuning.short_last``.

  Returns:
    ``[5, T]`` int32: slot, first row, rows to store; in the last two lines the number of tiles, and
    of those of home slots, which come first unless short ones are last.
  """
  num_slots = group_size_P.shape[0]
  start_P = sum_before(group_size_P)
  end_P = start_P + group_size_P
  left_P = group_size_P % tile_rows
  # A whole tile moved up is as good as one of the same size at the end.
  rounded_P = -(-left_P // UNIT) * UNIT
  short_P = ((left_P > 0) & (rounded_P < tile_rows)).astype(jnp.int32)
  tiles = [-(-group_size_P // tile_rows) - short_P, short_P]
  tiles_Q = jnp.concatenate(tiles) if short_last else jnp.stack(tiles, axis=1).reshape(-1)
  before_Q = sum_before(tiles_Q)
  tile_T = jnp.arange(capacity // tile_rows + num_slots, dtype=jnp.int32)
  # Along the last axis: XLA makes one kernel of such a sum, and two of one along the first.
  q_T = jnp.sum((before_Q + tiles_Q)[None, :] <= tile_T[:, None], axis=1, dtype=jnp.int32)
  q_T = jnp.minimum(q_T, 2 * num_slots - 1)
  slot_T = q_T % num_slots if short_last else q_T // 2
  whole_T = q_T < num_slots if short_last else q_T % 2 == 0
  rows_T = jnp.where(whole_T, tile_rows, rounded_P[slot_T])
  first_T = start_P[slot_T] + (tile_T - before_Q[q_T]) * tile_rows
  # Short tiles are counted apart from the whole ones before them: they end with their group.
  first_T = jnp.where(whole_T, first_T, end_P[slot_T])
  first_T = jnp.maximum(jnp.minimum(first_T, end_P[slot_T] - rows_T), start_P[slot_T])
  stored_T = jnp.minimum(group_size_P[slot_T], rows_T)
  tiles_P = tiles[0] + tiles[1]
  return jnp.stack([slot_T, first_T, stored_T, *_counts(tiles_P, num_home, tile_T)])


def _counts(tiles_P: Array, num_home: int, tile_T: Array) -> list[Array]:
  counts = (jnp.sum(tiles, dtype=jnp.int32) for tiles in (tiles_P, tiles_P[:num_home]))
  return [jnp.broadcast_to(count, tile_T.shape) for count in counts]


def short_comes_last(capacity: int, num_slots: int, slot_bytes: int) -> bool:
  """Where ``MatmulTuning.short_last`` does not say it.

  Tiles of unequal length, one after the other, make blocks drift apart. If weights are large,
  blocks then work on more of them than the cache holds. Small weights stay there; to come back to
  them at the end costs what it saves, or more. So do few rows, whose weights are read twice then.

  Args:
    capacity: rows of all slots.
    num_slots: P.
    slot_bytes: of the weights that a slot's rows are multiplied by.
  """
  return slot_bytes >= _LARGE_WEIGHTS and capacity >= _SMALL_GROUP * num_slots


def even_row_tiles(capacity: int, group_size_P: Array, num_home: int) -> Array:
  """As ``row_tiles``: each group in as few tiles as there can be, all of equally many rows.

  That is the least of ``EVEN_SIZES`` that is enough. The last tile ends with its group, so it may
  begin inside the one before.
  """
  most, num_slots = EVEN_SIZES[-1], group_size_P.shape[0]
  start_P = sum_before(group_size_P)
  tiles_P = -(-group_size_P // most)
  least_P = -(-group_size_P // jnp.maximum(tiles_P, 1))
  sizes = jnp.array(EVEN_SIZES, jnp.int32)
  rows_P = jnp.min(jnp.where(sizes[None, :] >= least_P[:, None], sizes[None, :], most), axis=1)
  stored_P = jnp.minimum(rows_P, group_size_P)
  before_P = sum_before(tiles_P)
  tile_T = jnp.arange(capacity // most + num_slots, dtype=jnp.int32)
  ended_TP = (before_P + tiles_P)[None, :] <= tile_T[:, None]
  slot_T = jnp.minimum(jnp.sum(ended_TP, axis=1, dtype=jnp.int32), num_slots - 1)
  first_T = (tile_T - before_P[slot_T]) * stored_P[slot_T]
  first_T = start_P[slot_T] + jnp.minimum(first_T, (group_size_P - stored_P)[slot_T])
  return jnp.stack([slot_T, first_T, stored_P[slot_T], *_counts(tiles_P, num_home, tile_T)])


def even_tiles_pay(capacity: int, num_slots: int) -> bool:
  """Where ``MatmulTuning.even`` does not say it: rows of all P slots are not few."""
  return capacity >= _LEAST_EVEN * num_slots
