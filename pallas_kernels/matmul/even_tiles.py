"""Even tiles: each group of rows in the fewest tiles there can be, all of equally many rows.

Which rows each tile of rows computes is a table that XLA makes before the kernel; the kernel finds
there what a tile of the result is. Groups come one after the other. Of a group, tiles of some rows
and some columns come by turns, row by row, and then those of the next columns: blocks that work at
the same time read the same rows and weights, and memory is read once for all of them.

Groups of 300, 90, 0 and 122 rows, all of home slots, of two tiles of columns by turns::

  slot 0   rows   0–159 and 140–299: two tiles    columns 0, 1 of both, columns 2, 3 of both, …
  slot 1   rows 300–395; 90 are stored            columns 0, 1, 2, …
  slot 3   rows 390–517; 122 are stored           columns 0, 1, 2, …
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels.matmul import layout
from pallas_kernels.matmul.layout import EVEN_SIZES
from pallas_kernels.sums import ceil_div, sum_lines
from pallas_kernels.support import Array

_LEAST = 96  # rows of a slot; most of smaller groups are stored in part by either kind of tile
_SMALL_GROUP = 1536  # rows of a slot, on average
_FEW_ROWS = 8  # tiles of small groups that come by turns
_FEW_COLS, _COLS = 256, 1024  # columns that do: of wide results of small groups, and of others
_SEVERAL, _SINGLE, _REPLICA = range(3)  # groups of several tiles, of a single one, of copies


def even_tiles_pay(capacity: int, num_slots: int) -> bool:
  """Whether even tiles pay, where ``MatmulTuning.even`` does not say it: with 96 rows a slot."""
  return capacity >= _LEAST * num_slots


class Turns(NamedTuple):
  """How many tiles of a group come by turns, at most.

  Attributes:
    rows: tiles of rows.
    cols: tiles of columns.
  """

  rows: int
  cols: int


def turns_of(capacity: int, num_slots: int, width: int, tile_cols: int) -> Turns:
  """Those for which memory is read least.

  Small groups have more weights than rows: tiles that read the same weights follow each other so
  soon that the cache still holds these. Of narrow results all columns come by turns, as then the
  same blocks go on with the same columns.

  Args:
    capacity: rows that there is room for, in all slots; how many are used is not known yet.
    num_slots: P.
    width: columns of the result.
    tile_cols: of a tile.
  """
  small = capacity < _SMALL_GROUP * num_slots
  columns = _FEW_COLS if small and width > _COLS else _COLS
  return Turns(_FEW_ROWS if small else capacity, columns // tile_cols)


class Entry(NamedTuple):
  """What the table says of a tile of the result.

  Attributes:
    slot: whose weights it is multiplied by.
    start: first row of the tiles that come by turns.
    stored: rows of each.
    last_start: first row of the group's last tile.
    turns: tiles of rows that come by turns.
    place: of this tile, among all that have these rows.
  """

  slot: Array
  start: Array
  stored: Array
  last_start: Array
  turns: Array
  place: Array


class EvenTile(NamedTuple):
  """A tile of the result.

  Attributes:
    slot: whose weights it is multiplied by.
    start: its first row.
    stored: its rows.
    col: which tile of columns it is.
  """

  slot: Array
  start: Array
  stored: Array
  col: Array


def entry(table: Any, t: Array, num_cols: int) -> Entry:
  """Of the t-th tile of the result.

  Args:
    table: of ``even_row_tiles``, or a reference to it.
    t: less than ``num_cols`` times the number of tiles of rows, line 3 of the table.
    num_cols: tiles of columns.
  """
  row_tile = lax.div(t, jnp.int32(num_cols))  # one of those that come by turns
  slot, start, stored, last_start, begin, turns = (table[i, row_tile] for i in (0, 1, 2, 4, 5, 6))
  return Entry(slot, start, stored, last_start, turns, t - begin * num_cols)


def even_tile(of: Entry, num_cols: int, most: int) -> EvenTile:
  """The tile. Not part of ``entry``: who computes with what is read must wait for it.

  Args:
    of: its entry.
    num_cols: tiles of columns.
    most: of these that come by turns.
  """
  turn, col = layout.position(of.place, of.turns, num_cols, most)
  start = lax.min(of.start + turn * of.stored, of.last_start)
  return EvenTile(of.slot, start, of.stored, col)


def even_row_tiles(capacity: int, group_size_P: Array, num_home: int, most_turns: int) -> Array:
  """What each tile of rows computes.

  It has the least of ``EVEN_SIZES`` that is enough for its group in so few tiles. The last one ends
  with its group, so it may begin inside the one before: rows computed twice are stored twice, with
  the same bits. Only a group smaller than its tile is stored in part.

  Home slots of one tile are spread among those of several. Weights are read from memory once for
  all tiles of a slot: for a single one this takes longer than to multiply, for several it does not.
  Slots of copies come last, since copies may still travel.

  Returns:
    ``[7, T]`` int32: slot, first row of the tiles that come by turns with this one, rows of each to
    store, number of all tiles, first row of the group's last tile, and of those that come by turns
    the first place in the table and the number.
  """
  slot_P, most = jnp.arange(group_size_P.shape[0], dtype=jnp.int32), EVEN_SIZES[-1]
  many_P = jnp.where(group_size_P > most, _SEVERAL, _SINGLE)
  kind_P = jnp.where(slot_P >= num_home, _REPLICA, many_P)
  size_1P, tiles_1P = group_size_P[None, :], ceil_div(group_size_P, most)[None, :]
  before_PP = slot_P[None, :] < slot_P[:, None]
  like_PP = kind_P[None, :] == kind_P[:, None]
  start_P, before_P, tiles_P, several_P, single_P = sum_lines(
    jnp.where(before_PP, size_1P, 0),
    jnp.where(before_PP & like_PP, tiles_1P, 0),
    jnp.where(slot_P[None, :] == slot_P[:, None], tiles_1P, 0),
    *(
      jnp.broadcast_to(jnp.where(kind_P == kind, tiles_1P, 0), before_PP.shape)
      for kind in (_SEVERAL, _SINGLE)
    ),
  )
  # Of single ones as large a part comes before a group of several tiles as of all these tiles.
  share_P = jnp.where(kind_P == _SINGLE, (before_P + 1) * several_P, before_P * single_P)
  other_PP = jnp.where(
    kind_P[:, None] == _SINGLE,
    share_P[None, :] < share_P[:, None],
    (kind_P[:, None] == _REPLICA) | (share_P[None, :] <= share_P[:, None]),
  )
  other_PP &= kind_P[None, :] != _REPLICA
  (begin_P,) = sum_lines(jnp.where(jnp.where(like_PP, before_PP, other_PP), tiles_P[None, :], 0))
  rows_P = jnp.full_like(start_P, most)
  for size in reversed(EVEN_SIZES):
    rows_P = jnp.where(group_size_P <= size * tiles_P, size, rows_P)
  stored_P = jnp.minimum(rows_P, group_size_P)

  num_tiles = capacity // most + slot_P.size
  tile_T1 = jnp.arange(num_tiles, dtype=jnp.int32)[:, None]
  is_mine_TP = (tile_T1 >= begin_P[None, :]) & (tile_T1 < (begin_P + tiles_P)[None, :])
  inside_TP = tile_T1 - begin_P[None, :]
  first_TP = inside_TP - lax.rem(inside_TP, jnp.int32(most_turns))

  def of_mine(x_TP: Array) -> Array:
    return jnp.where(is_mine_TP, x_TP, 0)

  return sum_lines(
    of_mine(slot_P[None, :]),
    of_mine(start_P[None, :] + first_TP * stored_P[None, :]),
    of_mine(stored_P[None, :]),
    jnp.broadcast_to(tiles_P[None, :], is_mine_TP.shape),
    of_mine((start_P + group_size_P - stored_P)[None, :]),
    of_mine(begin_P[None, :] + first_TP),
    of_mine(jnp.minimum(tiles_P[None, :] - first_TP, most_turns)),
  )
