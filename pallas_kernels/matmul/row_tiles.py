"""Which rows each tile of grouped rows computes: a table that XLA makes before the kernel.

Groups of 300, 90, 0 and 122 rows, tiles of 128 rows, short ones in units of 64::

  slot 0   rows   0–127, 128–255, and 236–299: a tile of 64 that ends with the group
  slot 1   rows 300–427; 90 are stored: the group is smaller than its tile
  slot 3   rows 390–517; 122 are stored

``even_tiles.py`` has others, of equally many rows in a group.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels.matmul.layout import UNIT
from pallas_kernels.sums import ceil_div, sum_lines, sums_before
from pallas_kernels.support import Array

_SMALL_GROUP = 320  # the weights of fewer rows take an H100 as long to read twice as to multiply
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
  left_P = lax.rem(group_size_P, jnp.int32(tile_rows))
  # A whole tile moved up is as good as one of the same size at the end.
  rounded_P = ceil_div(left_P, UNIT) * UNIT
  short_P = ((left_P > 0) & (rounded_P < tile_rows)).astype(jnp.int32)
  whole_P = ceil_div(group_size_P, tile_rows) - short_P
  if short_last:
    start_E, whole_E, short_E = sums_before(group_size_P, whole_P, short_P)
    short_E += whole_E[-1]
    begins, ends = (whole_E[:-1], short_E[:-1]), (whole_E[1:], short_E[1:])
  else:
    start_E, both_E = sums_before(group_size_P, whole_P + short_P)
    border_P = both_E[1:] - short_P
    begins, ends = (both_E[:-1], border_P), (border_P, both_E[1:])
  start_P, end_P = start_E[:-1], start_E[1:]

  def whole(tile_T1: Array) -> Array:
    first_TP = start_P[None, :] + (tile_T1 - begins[0][None, :]) * tile_rows
    return jnp.minimum(first_TP, (end_P - tile_rows)[None, :])

  kinds = [
    _Kind(begins[0], ends[0], jnp.full_like(start_P, tile_rows), whole),
    _Kind(begins[1], ends[1], rounded_P, lambda _: (end_P - rounded_P)[None, :]),
  ]
  num_tiles = capacity // tile_rows + group_size_P.shape[0]
  return _table(num_tiles, group_size_P, start_P, num_home, kinds)


class _Kind(NamedTuple):
  """Tiles of one kind, some of each slot that follow each other in the table.

  Attributes:
    begin_P: where those of a slot begin in the table.
    end_P: where they end.
    rows_P: of each.
    first: from ``[T, 1]``, places in the table, to the tiles' first rows, ``[T, P]`` or
      ``[1, P]``; before the slot's own if that has fewer rows than a tile.
  """

  begin_P: Array
  end_P: Array
  rows_P: Array
  first: Callable[[Array], Array]


def _table(
  num_tiles: int,
  group_size_P: Array,
  start_P: Array,
  num_home: int,
  kinds: Sequence[_Kind],
) -> Array:
  """``[5, T]``, as ``row_tiles`` returns it, of the tiles of all kinds."""
  slot_P = jnp.arange(group_size_P.shape[0], dtype=jnp.int32)
  tile_T1 = jnp.arange(num_tiles, dtype=jnp.int32)[:, None]
  lines_TP = [jnp.zeros((num_tiles, slot_P.size), jnp.int32)] * 3
  for kind in kinds:
    mine_TP = (tile_T1 >= kind.begin_P[None, :]) & (tile_T1 < kind.end_P[None, :])
    first_TP = jnp.maximum(kind.first(tile_T1), start_P[None, :])
    stored_P = jnp.minimum(group_size_P, kind.rows_P)
    values = slot_P[None, :], first_TP, stored_P[None, :]
    lines_TP = [jnp.where(mine_TP, *each) for each in zip(values, lines_TP, strict=True)]
  tiles_P = sum(kind.end_P - kind.begin_P for kind in kinds)
  for counted_P in (tiles_P, jnp.where(slot_P < num_home, tiles_P, 0)):
    lines_TP.append(jnp.broadcast_to(counted_P, lines_TP[0].shape))
  return sum_lines(*lines_TP)


def short_comes_last(capacity: int, num_slots: int, slot_bytes: int) -> bool:
  """Whether short tiles come after all others, where ``MatmulTuning.short_last`` does not say it.

  Tiles of unequal length, one after the other, make blocks drift apart. If weights are large,
  blocks then work on more of them than the cache holds. Small weights stay there; to come back to
  them at the end costs what it saves, or more. So do few rows, whose weights are read twice then.

  Args:
    capacity: rows that there is room for, in all slots.
    num_slots: P.
    slot_bytes: of the weights that a slot's rows are multiplied by.
  """
  return slot_bytes >= _LARGE_WEIGHTS and capacity >= _SMALL_GROUP * num_slots
