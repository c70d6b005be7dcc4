"""Grouped matmul over home and replica weights, and the gated expert built on it.

Rows are grouped by slot: first the M home slots, then the S replica slots. The weights stay in
two operands, the parameters and the replica buffer, because joining them would copy every home
weight. Rows at or beyond the used count may hold anything, NaN included.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ultraep_jax.mesh import to_varying, varying_axes
from ultraep_jax.types import Array, ExpertWeights


def grouped_matmul(
  rows_CK: Array,
  home_MKN: Array,
  replica_SKN: Array,
  group_size_P: Array,
  *,
  transpose_rhs: bool = False,
) -> Array:
  """Multiplies each group of rows by the weights of its slot.

  Args:
    rows_CK: ``[C, K]``, grouped by slot from row 0 on.
    home_MKN: ``[M, K, N]`` (``[M, N, K]`` with ``transpose_rhs``).
    replica_SKN: ``[S, K, N]``, likewise; S may be 0.
    group_size_P: ``[M + S]`` int32, rows per slot; the sum is at most C.
    transpose_rhs: multiply by the transposed weights (the gradient to the rows).

  Returns:
    ``[C, N]`` in the rows' dtype, accumulated in float32; unused rows are zero.
  """
  tiles = _Tiles.of(rows_CK.shape[0], group_size_P)
  axes = varying_axes(rows_CK, home_MKN, replica_SKN, group_size_P)
  num_home = home_MKN.shape[0]
  contract = 1 if transpose_rhs else 0
  out_CN = jnp.zeros((rows_CK.shape[0], home_MKN.shape[2 - contract]), rows_CK.dtype)

  def multiply(weights: Array, first_slot: int) -> Callable[[Array, Array], Array]:
    def tile(i: Array, out_CN: Array) -> Array:
      slot, start, mine_B1 = tiles.locate(i)
      rows_BK = lax.dynamic_slice_in_dim(rows_CK, start, tiles.rows)
      rhs = lax.dynamic_index_in_dim(weights, slot - first_slot, keepdims=False)
      product_BN = lax.dot_general(
        rows_BK, rhs, (((1,), (contract,)), ((), ())), preferred_element_type=jnp.float32
      )
      kept_BN = lax.dynamic_slice_in_dim(out_CN, start, tiles.rows)
      merged_BN = jnp.where(mine_B1, product_BN.astype(out_CN.dtype), kept_BN)
      return lax.dynamic_update_slice_in_dim(out_CN, merged_BN, start, 0)

    return tile

  out_CN = to_varying(out_CN, axes)
  home_tiles, all_tiles = tiles.end_P[num_home - 1], tiles.end_P[-1]
  out_CN = lax.fori_loop(jnp.int32(0), home_tiles, multiply(home_MKN, 0), out_CN)
  if replica_SKN.shape[0]:
    out_CN = lax.fori_loop(home_tiles, all_tiles, multiply(replica_SKN, num_home), out_CN)
  return out_CN


def grouped_matmul_wgrad(
  rows_CK: Array, grad_CN: Array, group_size_P: Array, num_home: int
) -> tuple[Array, Array]:
  """The gradient of ``grouped_matmul`` to its weights: per slot, ``rows.T @ grad``.

  Args:
    rows_CK: ``[C, K]``.
    grad_CN: ``[C, N]``.
    group_size_P: ``[M + S]`` int32.
    num_home: M.

  Returns:
    ``[M, K, N]`` and ``[S, K, N]``, float32; an empty slot's gradient is zero.
  """
  tiles = _Tiles.of(rows_CK.shape[0], group_size_P)
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
  home_MKN = lax.fori_loop(jnp.int32(0), home_tiles, accumulate(0), zeros(num_home))
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
  def of(cls, capacity: int, group_size_P: Array) -> "_Tiles":
    rows = _tile_rows(capacity, group_size_P.shape[0])
    end_P = jnp.cumsum(-(-group_size_P // rows), dtype=jnp.int32)
    start_P = jnp.cumsum(group_size_P, dtype=jnp.int32) - group_size_P
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


def _tile_rows(capacity: int, num_slots: int) -> int:
  """About a mean group, within what keeps both an H200 and a CPU busy (docs/benchmarks.md)."""
  mean = max(capacity // num_slots, 1)
  return min(capacity, max(8, min(1024, 1 << (mean.bit_length() - 1))))


class Hidden(NamedTuple):
  """What backward needs of the experts' forward: the two projections of the rows."""

  gate_CF: Array
  up_CF: Array


def expert_forward(
  rows_CD: Array,
  home: ExpertWeights,
  replica: ExpertWeights,
  group_size_P: Array,
  activation: Callable[[Array], Array],
) -> tuple[Array, Hidden]:
  """``wo(activation(rows wi_gate) * (rows wi_up))`` for each row by its slot's expert."""
  hidden = Hidden(
    grouped_matmul(rows_CD, home.wi_gate, replica.wi_gate, group_size_P),
    grouped_matmul(rows_CD, home.wi_up, replica.wi_up, group_size_P),
  )
  inner_CF = _inner(hidden, activation)
  return grouped_matmul(inner_CF, home.wo, replica.wo, group_size_P), hidden


class ExpertGrads(NamedTuple):
  """Gradients of the gate-weighted experts."""

  rows_CD: Array
  gate_C: Array
  home: ExpertWeights
  replica: ExpertWeights


def expert_backward(
  grad_CD: Array,
  gate_C: Array,
  rows_CD: Array,
  hidden: Hidden,
  home: ExpertWeights,
  replica: ExpertWeights,
  group_size_P: Array,
  activation: Callable[[Array], Array],
) -> ExpertGrads:
  """The adjoint of ``gate * expert_forward(rows)``.

  Args:
    grad_CD: ``[C, D]``, per row the gradient of its token's output, not yet weighted.
    gate_C: ``[C]`` float32, the weight of each row.
    rows_CD: the rows of the forward pass.
    hidden: the projections of the forward pass.
    home: weights of the home slots.
    replica: weights of the replica slots.
    group_size_P: rows per slot.
    activation: of the forward pass.
  """
  num_home = home.wo.shape[0]
  inner_CF, inner_vjp = jax.vjp(lambda hidden: _inner(hidden, activation), hidden)
  # The gate's gradient <expert(row), grad> equals <inner, grad wo^T>: no third matmul again.
  ungated_CF = grouped_matmul(grad_CD, home.wo, replica.wo, group_size_P, transpose_rhs=True)
  gate_grad_C = jnp.sum(inner_CF.astype(jnp.float32) * ungated_CF.astype(jnp.float32), axis=1)
  (hidden_grad,) = inner_vjp(_scaled(ungated_CF, gate_C))
  weighted_CD = _scaled(grad_CD, gate_C)

  wo_home, wo_replica = grouped_matmul_wgrad(inner_CF, weighted_CD, group_size_P, num_home)
  gate_home, gate_replica = grouped_matmul_wgrad(
    rows_CD, hidden_grad.gate_CF, group_size_P, num_home
  )
  up_home, up_replica = grouped_matmul_wgrad(rows_CD, hidden_grad.up_CF, group_size_P, num_home)
  rows_grad_CD = grouped_matmul(
    hidden_grad.gate_CF, home.wi_gate, replica.wi_gate, group_size_P, transpose_rhs=True
  ) + grouped_matmul(hidden_grad.up_CF, home.wi_up, replica.wi_up, group_size_P, transpose_rhs=True)
  return ExpertGrads(
    rows_CD=rows_grad_CD,
    gate_C=gate_grad_C,
    home=ExpertWeights(gate_home, up_home, wo_home),
    replica=ExpertWeights(gate_replica, up_replica, wo_replica),
  )


def _scaled(rows_CX: Array, gate_C: Array) -> Array:
  return (rows_CX.astype(jnp.float32) * gate_C[:, None]).astype(rows_CX.dtype)


def _inner(hidden: Hidden, activation: Callable[[Array], Array]) -> Array:
  return activation(hidden.gate_CF) * hidden.up_CF
