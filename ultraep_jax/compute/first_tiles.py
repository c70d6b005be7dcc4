"""The first tile of every home slot, in one product of all slots.

A GPU's host launches every turn of a loop, 25 to 80 µs for each. With the first tile of each slot
in one product, a loop has left what slots have beyond.

Slots of 5, 2 and 4 rows, tiles of 4::

  rows   0 1 2 3 4 | 5 6 | 7 8 9 10        tile 0: 0 1 2 3    one product
                                           tile 1: 5 6 · ·
                                           tile 2: 7 8 9 10
                                           row 4              a turn of a loop
"""

import jax.numpy as jnp
from jax import lax

from ultraep_jax.compute.tiles import slot_of_rows
from ultraep_jax.types import Array

# Rows up to which a product takes as long as reading the weights, on most GPUs; and what keeps
# one busy.
_LEAST, _MOST = 128, 1024
_TURN_BYTES = 60_000_000  # of weights that most GPUs read in the time of a turn


def pays(capacity: int, num_home: int, matrix_bytes: int) -> bool:
  """Whether one product takes less than turns for the slots that have rows.

  It reads the weights of all slots, also of those without rows.

  >>> pays(8, 64, 4 << 20), pays(8, 128, 12 << 20), pays(128, 128, 12 << 20)
  (True, False, True)
  """
  used = min(capacity, num_home)
  return (num_home - used) * matrix_bytes < used * _TURN_BYTES


def tile_rows(capacity: int, num_home: int) -> int:
  """B, rows of a tile: what a home slot has of the buffer, within limits."""
  mean = -(-capacity // num_home)
  return min(capacity, _MOST, max(_LEAST, -(-mean // 8) * 8))


def matmul(
  rows_CK: Array,
  home_MKN: Array,
  bias_MN: Array | None,
  group_size_P: Array,
  rows: int,
  transpose_rhs: bool,
) -> Array:
  """``[C, N]``, the products of the first ``rows`` rows of each home slot; others are zero."""
  num_home, contract = home_MKN.shape[0], 2 if transpose_rhs else 1
  row_MB, _ = _first_rows(group_size_P, num_home, rows, rows_CK.shape[0])
  product_MBN = lax.dot_general(
    rows_CK[row_MB],
    home_MKN,
    (((2,), (contract,)), ((0,), (0,))),
    preferred_element_type=jnp.float32,
  )
  if bias_MN is not None:
    product_MBN += bias_MN[:, None].astype(jnp.float32)
  product_AN = product_MBN.astype(rows_CK.dtype).reshape(num_home * rows, -1)
  size_M = group_size_P[:num_home]
  slot_C = slot_of_rows(size_M, rows_CK.shape[0])
  is_home_C, slot_C = slot_C < num_home, jnp.minimum(slot_C, num_home - 1)
  start_M = jnp.cumsum(size_M, dtype=jnp.int32) - size_M
  place_C = jnp.arange(rows_CK.shape[0], dtype=jnp.int32) - start_M[slot_C]
  is_first_C = is_home_C & (place_C < rows)
  out_CN = product_AN[jnp.where(is_first_C, slot_C * rows + place_C, 0)]
  return jnp.where(is_first_C[:, None], out_CN, 0)


def wgrad(rows_CK: Array, grad_CN: Array, group_size_P: Array, num_home: int, rows: int) -> Array:
  """``[M, K, N]`` float32, the gradients to home weights by the first rows of each slot."""
  row_MB, mine_MB1 = _first_rows(group_size_P, num_home, rows, rows_CK.shape[0])
  rows_MBK, grad_MBN = (jnp.where(mine_MB1, array[row_MB], 0) for array in (rows_CK, grad_CN))
  return lax.dot_general(
    rows_MBK, grad_MBN, (((1,), (1,)), ((0,), (0,))), preferred_element_type=jnp.float32
  )


def _first_rows(
  group_size_P: Array, num_home: int, rows: int, capacity: int
) -> tuple[Array, Array]:
  """The first rows of each home slot, within the buffer, and which are its own."""
  size_M = group_size_P[:num_home]
  start_M = jnp.cumsum(size_M, dtype=jnp.int32) - size_M
  place_1B = jnp.arange(rows, dtype=jnp.int32)[None, :]
  row_MB = jnp.minimum(start_M[:, None] + place_1B, capacity - 1)
  return row_MB, (place_1B < size_M[:, None])[:, :, None]
