"""Tiles of grouped rows, and how much of them a turn of a loop multiplies."""

import dataclasses

import jax.numpy as jnp

from ultraep_jax.types import Array

# Of a turn, where a host launches it: forward, and of gradients to weights. Measured
# (docs/lab/portable.md, Several tiles in a turn).
_TURN_FLOPS, _WGRAD_FLOPS = 4e10, 1e10
_MOST_TILES, _MOST_TIMES_ROWS = 16, 4


@dataclasses.dataclass(frozen=True)
class Tiles:
  """Work items of at most ``rows`` rows, none crossing a group's border, in row order."""

  rows: int
  capacity: int
  group_start_P: Array
  group_size_P: Array
  end_P: Array  # running count of tiles

  @classmethod
  def of(
    cls, capacity: int, group_size_P: Array, rows: int, num_home: int, first_rows: int
  ) -> "Tiles":
    """Those of all groups, but for the first rows of each home slot."""
    start_P = jnp.cumsum(group_size_P, dtype=jnp.int32) - group_size_P
    is_home_P = jnp.arange(group_size_P.shape[0]) < num_home
    first_P = jnp.minimum(jnp.where(is_home_P, first_rows, 0).astype(jnp.int32), group_size_P)
    start_P, group_size_P = start_P + first_P, group_size_P - first_P
    end_P = jnp.cumsum(-(-group_size_P // rows), dtype=jnp.int32)
    return cls(rows, capacity, start_P, group_size_P, end_P)

  def locate(self, i: Array) -> tuple[Array, Array, Array, Array]:
    """Tile i: its slot, the first of ``rows`` consecutive rows, these, and which belong to it."""
    slot = jnp.sum(self.end_P <= i, dtype=jnp.int32)
    group_start, group_size = self.group_start_P[slot], self.group_size_P[slot]
    tiles_before = self.end_P[slot] - -(-group_size // self.rows)
    first = group_start + (i - tiles_before) * self.rows
    # A slice may not pass the buffer's end: the last one starts earlier and masks its head.
    start = jnp.minimum(first, self.capacity - self.rows)
    row_B = start + jnp.arange(self.rows, dtype=jnp.int32)
    mine_B = (row_B >= first) & (row_B < group_start + group_size)
    return slot, start, row_B, mine_B


def slot_of_rows(group_size_P: Array, capacity: int) -> Array:
  """``[C]`` int32, the slot of each row of a buffer; P behind the last group."""
  end_P = jnp.cumsum(group_size_P, dtype=jnp.int32)
  row_C = jnp.arange(capacity, dtype=jnp.int32)
  return jnp.sum(end_P[None, :] <= row_C[:, None], axis=1, dtype=jnp.int32)


def tile_rows(capacity: int, num_slots: int) -> int:
  """About a mean group, within what keeps both an H200 and a CPU busy (docs/lab/portable.md)."""
  mean = max(capacity // num_slots, 1)
  return min(capacity, max(8, min(1024, 1 << (mean.bit_length() - 1))))


def tiles_of_turn(rows: int, matrix_size: int) -> int:
  """How many tiles of so many rows a turn multiplies by matrices of so many elements.

  >>> [tiles_of_turn(1024, size) for size in (2048 * 768, 4096 * 1536, 7168 * 2048)]
  [12, 3, 1]
  """
  return min(max(int(_TURN_FLOPS / (2 * rows * matrix_size)), 1), _MOST_TILES)


def rows_of_turn(rows: int, matrix_size: int) -> int:
  """Rows of a tile of which a turn adds up the gradient to such a matrix, at least ``rows``.

  >>> [rows_of_turn(1024, size) for size in (2048 * 768, 4096 * 1536, 7168 * 2048)]
  [3072, 1024, 1024]
  """
  return rows * min(max(int(_WGRAD_FLOPS / (2 * rows * matrix_size)), 1), _MOST_TIMES_ROWS)
