"""Grouped matmul in plain JAX, right on every backend: a loop over tiles of rows.

One matmul per tile, each by the weights of its slot; measured, it beats what XLA makes of
``lax.ragged_dot`` on GPUs and CPUs. Where a host launches every turn of a loop, the first tiles of
home slots are one product (``first_tiles.py``), and a turn does more: forward several tiles, each
with its own copy of its slot's weights, and for gradients to weights a larger tile. It is under
``jit``: layers of the same sizes trace it once.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from ultraep_jax.compute import first_tiles
from ultraep_jax.compute.tiles import Tiles, rows_of_turn, tile_rows, tiles_of_turn
from ultraep_jax.mesh import to_varying, varying_axes
from ultraep_jax.types import Array


def matmul(
  rows_CK: Array,
  home_MKN: Array,
  replica_SKN: Array,
  group_size_P: Array,
  transpose_rhs: bool,
  bias: tuple[Array, Array] | None = None,
  *,
  together: bool = False,
) -> Array:
  """As ``grouped.grouped_matmul``; unused rows are zero.

  ``together``: a host launches each turn of a loop, so that few turns are wanted. The bits of a
  row then depend on which tile it is in.
  """
  home_bias, replica_bias = bias or (None, None)
  # jaxlib 0.11.2 crashes as it compiles this if an operand is empty.
  replica = (replica_SKN, replica_bias) if replica_SKN.shape[0] else None
  return _matmul(rows_CK, (home_MKN, home_bias), replica, group_size_P, transpose_rhs, together)


@functools.partial(jax.jit, static_argnames=("transpose_rhs", "together"))
def _matmul(
  rows_CK: Array,
  home: tuple[Array, Array | None],
  replica: tuple[Array, Array | None] | None,
  group_size_P: Array,
  transpose_rhs: bool,
  together: bool,
) -> Array:
  num_home, contract = home[0].shape[0], 1 if transpose_rhs else 0
  capacity = rows_CK.shape[0]
  first_rows = first_tiles.tile_rows(capacity, num_home) if together else 0
  rows = first_rows or tile_rows(capacity, group_size_P.shape[0])
  tiles = Tiles.of(capacity, group_size_P, rows, num_home, first_rows)
  several = tiles_of_turn(rows, math.prod(home[0].shape[1:])) if together else 1
  axes = varying_axes(rows_CK, home, replica, group_size_P)
  if together:
    out_CN = first_tiles.matmul(rows_CK, *home, group_size_P, first_rows, transpose_rhs)
  else:
    out_CN = jnp.zeros((capacity, home[0].shape[2 - contract]), rows_CK.dtype)

  def multiply(
    weights: Array, bias_PN: Array | None, slots_before: int, first: Array, end: Array
  ) -> Callable[[Array, Array], Array]:
    def one_tile(i: Array, out_CN: Array) -> Array:
      slot, start, _, mine_B = tiles.locate(first + i)
      rows_BK = lax.dynamic_slice_in_dim(rows_CK, start, rows)
      rhs = lax.dynamic_index_in_dim(weights, slot - slots_before, keepdims=False)
      product_BN = lax.dot_general(
        rows_BK, rhs, (((1,), (contract,)), ((), ())), preferred_element_type=jnp.float32
      )
      if bias_PN is not None:
        bias_1N = lax.dynamic_index_in_dim(bias_PN, slot - slots_before)
        product_BN += bias_1N.astype(jnp.float32)
      kept_BN = lax.dynamic_slice_in_dim(out_CN, start, rows)
      merged_BN = jnp.where(mine_B[:, None], product_BN.astype(out_CN.dtype), kept_BN)
      return lax.dynamic_update_slice_in_dim(out_CN, merged_BN, start, 0)

    def several_tiles(i: Array, out_CN: Array) -> Array:
      tile_I = first + i * several + jnp.arange(several, dtype=jnp.int32)
      slot_I, _, row_IB, mine_IB = jax.vmap(tiles.locate)(tile_I)
      slot_I = jnp.minimum(slot_I - slots_before, weights.shape[0] - 1)
      product_IBN = lax.dot_general(
        rows_CK[row_IB],
        weights[slot_I],
        (((2,), (1 + contract,)), ((0,), (0,))),
        preferred_element_type=jnp.float32,
      )
      if bias_PN is not None:
        product_IBN += bias_PN[slot_I][:, None].astype(jnp.float32)
      mine_IB &= (tile_I < end)[:, None]
      # What is not a tile's own goes to rows beyond the buffer, each to another.
      beyond_IB = capacity + jnp.arange(row_IB.size, dtype=jnp.int32).reshape(row_IB.shape)
      row_IB = jnp.where(mine_IB, row_IB, beyond_IB)
      return out_CN.at[row_IB].set(
        product_IBN.astype(out_CN.dtype), mode="drop", unique_indices=True
      )

    return one_tile if several == 1 else several_tiles

  out_CN = to_varying(out_CN, axes)
  home_tiles, all_tiles = tiles.end_P[num_home - 1], tiles.end_P[-1]
  parts = [(home, 0, jnp.int32(0), home_tiles)]
  if replica is not None:
    parts.append((replica, num_home, home_tiles, all_tiles))
  for operands, slots_before, first, end in parts:
    turns = -(-(end - first) // several)
    turn = multiply(*operands, slots_before, first, end)
    out_CN = lax.fori_loop(jnp.int32(0), turns, turn, out_CN)
  return out_CN


@functools.partial(jax.jit, static_argnames=("num_home", "together"))
def wgrad(
  rows_CK: Array,
  grad_CN: Array,
  group_size_P: Array,
  num_home: int,
  into_MKN: Array | None = None,
  *,
  together: bool = False,
) -> tuple[Array, Array]:
  """As ``grouped.wgrad_beside``, in float32; a replica slot without rows has zero gradient.

  ``together``: as in ``matmul``.
  """
  capacity, num_slots = rows_CK.shape[0], group_size_P.shape[0]
  matrix_size = rows_CK.shape[1] * grad_CN.shape[1]
  first_rows = first_tiles.tile_rows(capacity, num_home) if together else 0
  rows = rows_of_turn(first_rows, matrix_size) if together else tile_rows(capacity, num_slots)
  rows = min(rows, capacity)
  tiles = Tiles.of(capacity, group_size_P, rows, num_home, first_rows)
  axes = varying_axes(rows_CK, grad_CN, group_size_P)

  def accumulate(first_slot: int) -> Callable[[Array, Array], Array]:
    def tile(i: Array, grad_XKN: Array) -> Array:
      slot, start, _, mine_B = tiles.locate(i)
      rows_BK, grad_BN = (
        jnp.where(mine_B[:, None], lax.dynamic_slice_in_dim(array_CX, start, rows), 0)
        for array_CX in (rows_CK, grad_CN)
      )
      sum_KN = lax.dynamic_index_in_dim(grad_XKN, slot - first_slot, keepdims=False)
      sum_KN += lax.dot_general(
        rows_BK, grad_BN, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
      )
      return lax.dynamic_update_index_in_dim(grad_XKN, sum_KN, slot - first_slot, 0)

    return tile

  def zeros(slots: int) -> Array:
    shape = (slots, rows_CK.shape[1], grad_CN.shape[1])
    return to_varying(jnp.zeros(shape, jnp.float32), axes)

  num_replica = num_slots - num_home
  home_tiles, all_tiles = tiles.end_P[num_home - 1], tiles.end_P[-1]
  home_MKN = zeros(num_home) if into_MKN is None else into_MKN.astype(jnp.float32)
  if together:
    first_MKN = first_tiles.wgrad(rows_CK, grad_CN, group_size_P, num_home, first_rows)
    home_MKN = first_MKN if into_MKN is None else home_MKN + first_MKN
  home_MKN = to_varying(home_MKN, axes)
  home_MKN = lax.fori_loop(jnp.int32(0), home_tiles, accumulate(0), home_MKN)
  replica_SKN = zeros(num_replica)
  if num_replica:
    replica_SKN = lax.fori_loop(home_tiles, all_tiles, accumulate(num_home), replica_SKN)
  return home_MKN, replica_SKN
