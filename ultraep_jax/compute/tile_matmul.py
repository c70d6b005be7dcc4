"""Grouped matmul in plain JAX, right on every backend: a loop over tiles of rows.

One matmul per tile, each by the weights of its slot; measured, it beats what XLA makes of
``lax.ragged_dot`` on GPUs and CPUs. On GPUs the first tiles of home slots are one product
(``first_tiles.py``). It is under ``jit``: layers of the same sizes trace it once.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from ultraep_jax.compute import first_tiles
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

  ``together``: the first tiles of home slots are one product. The bits of a row then depend on
  which tile it is in.
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
  tiles = _Tiles.of(rows_CK.shape[0], group_size_P, num_home if together else 0)
  axes = varying_axes(rows_CK, home, replica, group_size_P)
  if together:
    out_CN = first_tiles.matmul(rows_CK, *home, group_size_P, tiles.rows, transpose_rhs)
  else:
    out_CN = jnp.zeros((rows_CK.shape[0], home[0].shape[2 - contract]), rows_CK.dtype)

  def multiply(
    weights: Array, bias_PN: Array | None, first_slot: int
  ) -> Callable[[Array, Array], Array]:
    def tile(i: Array, out_CN: Array) -> Array:
      slot, start, mine_B1 = tiles.locate(i)
      rows_BK = lax.dynamic_slice_in_dim(rows_CK, start, tiles.rows)
      rhs = lax.dynamic_index_in_dim(weights, slot - first_slot, keepdims=False)
      product_BN = lax.dot_general(
        rows_BK, rhs, (((1,), (contract,)), ((), ())), preferred_element_type=jnp.float32
      )
      if bias_PN is not None:
        bias_1N = lax.dynamic_index_in_dim(bias_PN, slot - first_slot)
        product_BN += bias_1N.astype(jnp.float32)
      kept_BN = lax.dynamic_slice_in_dim(out_CN, start, tiles.rows)
      merged_BN = jnp.where(mine_B1, product_BN.astype(out_CN.dtype), kept_BN)
      return lax.dynamic_update_slice_in_dim(out_CN, merged_BN, start, 0)

    return tile

  out_CN = to_varying(out_CN, axes)
  home_tiles, all_tiles = tiles.end_P[num_home - 1], tiles.end_P[-1]
  out_CN = lax.fori_loop(jnp.int32(0), home_tiles, multiply(*home, 0), out_CN)
  if replica is not None:
    out_CN = lax.fori_loop(home_tiles, all_tiles, multiply(*replica, num_home), out_CN)
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
  tiles = _Tiles.of(rows_CK.shape[0], group_size_P, num_home if together else 0)
  axes = varying_axes(rows_CK, grad_CN, group_size_P)

  def accumulate(first_slot: int) -> Callable[[Array, Array], Array]:
    def tile(i: Array, grad_XKN: Array) -> Array:
      slot, start, mine_B1 = tiles.locate(i)
      rows_BK = jnp.where(mine_B1, lax.dynamic_slice_in_dim(rows_CK, start, tiles.rows), 0)
      grad_BN = jnp.where(mine_B1, lax.dynamic_slice_in_dim(grad_CN, start, tiles.rows), 0)
      sum_KN = lax.dynamic_index_in_dim(grad_XKN, slot - first_slot, keepdims=False)
      sum_KN += lax.dot_general(
        rows_BK, grad_BN, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
      )
      return lax.dynamic_update_index_in_dim(grad_XKN, sum_KN, slot - first_slot, 0)

    return tile

  def zeros(slots: int) -> Array:
    shape = (slots, rows_CK.shape[1], grad_CN.shape[1])
    return to_varying(jnp.zeros(shape, jnp.float32), axes)

  num_replica = group_size_P.shape[0] - num_home
  home_tiles, all_tiles = tiles.end_P[num_home - 1], tiles.end_P[-1]
  home_MKN = zeros(num_home) if into_MKN is None else into_MKN.astype(jnp.float32)
  if together:
    first_MKN = first_tiles.wgrad(rows_CK, grad_CN, group_size_P, num_home, tiles.rows)
    home_MKN = first_MKN if into_MKN is None else home_MKN + first_MKN
  home_MKN = to_varying(home_MKN, axes)
  home_MKN = lax.fori_loop(jnp.int32(0), home_tiles, accumulate(0), home_MKN)
  replica_SKN = zeros(num_replica)
  if num_replica:
    replica_SKN = lax.fori_loop(home_tiles, all_tiles, accumulate(num_home), replica_SKN)
  return home_MKN, replica_SKN


@dataclasses.dataclass(frozen=True)
class _Tiles:
  """Work items of at most ``rows`` rows, none crossing a group's border, in row order."""

  rows: int
  capacity: int
  group_start_P: Array
  group_size_P: Array
  end_P: Array  # running count of tiles

  @classmethod
  def of(cls, capacity: int, group_size_P: Array, num_together: int) -> "_Tiles":
    """Those of all groups, but for the first ones of so many groups."""
    num_slots = group_size_P.shape[0]
    start_P = jnp.cumsum(group_size_P, dtype=jnp.int32) - group_size_P
    rows = tile_rows(capacity, num_slots)
    if num_together:
      rows = first_tiles.tile_rows(capacity, num_together)
      first_P = jnp.where(jnp.arange(num_slots) < num_together, rows, 0).astype(jnp.int32)
      first_P = jnp.minimum(first_P, group_size_P)
      start_P, group_size_P = start_P + first_P, group_size_P - first_P
    end_P = jnp.cumsum(-(-group_size_P // rows), dtype=jnp.int32)
    return cls(rows, capacity, start_P, group_size_P, end_P)

  def locate(self, i: Array) -> tuple[Array, Array, Array]:
    """The slot of tile i, the first row to slice, and which of those rows are its own."""
    slot = jnp.sum(self.end_P <= i, dtype=jnp.int32)
    group_start, group_size = self.group_start_P[slot], self.group_size_P[slot]
    tiles_before = self.end_P[slot] - -(-group_size // self.rows)
    first = group_start + (i - tiles_before) * self.rows
    # A slice may not pass the buffer's end: the last one starts earlier and masks its head.
    start = jnp.minimum(first, self.capacity - self.rows)
    row_B = start + jnp.arange(self.rows, dtype=jnp.int32)
    mine_B = (row_B >= first) & (row_B < group_start + group_size)
    return slot, start, mine_B[:, None]


def tile_rows(capacity: int, num_slots: int) -> int:
  """About a mean group, within what keeps both an H200 and a CPU busy (docs/lab/portable.md)."""
  mean = max(capacity // num_slots, 1)
  return min(capacity, max(8, min(1024, 1 << (mean.bit_length() - 1))))
