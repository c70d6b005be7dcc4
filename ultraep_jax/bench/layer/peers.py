"""The same MoE layer as JAX users compose it today, to measure beside.

Both are exact and drop nothing: their buffers are as large as the load needs, which a real user
cannot know before, so memory is in their favour.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu, transposed_ragged_dot_mgpu

from ultraep_jax.planning.load import expert_load
from ultraep_jax.types import Array, ExpertWeights


class Buffers(NamedTuple):
  """Sizes that drop nothing: rows that a rank receives in all, and from one rank."""

  received: int
  block: int

  @classmethod
  def of(cls, load_NGE: np.ndarray) -> "Buffers":
    """For all of several load matrices."""
    steps, ranks, experts = load_NGE.shape
    sent_NGG = load_NGE.reshape(steps, ranks, ranks, experts // ranks).sum(-1)
    return cls(_round_up(sent_NGG.sum(axis=1).max()), _round_up(sent_NGG.max()))


def _round_up(rows: int, unit: int = 128) -> int:
  return -(-int(rows) // unit) * unit


Matmul = Callable[[Array, Array, Array], Array]


def plain_layer(
  x_TD: Array, index_TK: Array, gate_TK: Array, weights: ExpertWeights, buffers: Buffers, axis: str
) -> Array:
  """``ragged_all_to_all`` and ``lax.ragged_dot``, as MaxText composes them."""
  sorted_AD, order_A, sizes_GG, load_GM = _sort_by_expert(x_TD, index_TK, weights, axis)
  rank = lax.axis_index(axis)
  before_GG = jnp.cumsum(sizes_GG, axis=0) - sizes_GG  # rows that come from earlier sources
  sent_G, received_G = sizes_GG[rank], sizes_GG[:, rank]
  offset_G = jnp.cumsum(sent_G) - sent_G
  landing_G = jnp.cumsum(received_G) - received_G
  rows_CD = lax.ragged_all_to_all(
    sorted_AD,
    jnp.zeros((buffers.received, x_TD.shape[1]), x_TD.dtype),
    offset_G,
    sent_G,
    before_GG[rank],
    received_G,
    axis_name=axis,
  )
  # Received rows are ordered by source, then expert; the matmul wants them by expert.
  expert_C = _expert_of_rows(load_GM, buffers.received)
  out_CD = _experts(rows_CD, expert_C, load_GM, weights, lax.ragged_dot)
  back_AD = lax.ragged_all_to_all(
    out_CD,
    jnp.zeros_like(sorted_AD),
    landing_G,
    received_G,
    (jnp.cumsum(sizes_GG, axis=1) - sizes_GG)[:, rank],
    sent_G,
    axis_name=axis,
  )
  return _weighted_sum(back_AD, order_A, gate_TK)


def tuned_layer(
  x_TD: Array, index_TK: Array, gate_TK: Array, weights: ExpertWeights, buffers: Buffers, axis: str
) -> Array:
  """Equal blocks by ``all_to_all`` and jax's own Hopper kernels for ragged matmuls."""
  sorted_AD, order_A, sizes_GG, load_GM = _sort_by_expert(x_TD, index_TK, weights, axis)
  ranks, rank = lax.axis_size(axis), lax.axis_index(axis)
  sent_G = sizes_GG[rank]
  offset_G = jnp.cumsum(sent_G) - sent_G
  place_N = jnp.arange(buffers.block, dtype=jnp.int32)
  source_GN = jnp.minimum(offset_G[:, None] + place_N[None], sorted_AD.shape[0] - 1)
  block_AD = lax.all_to_all(sorted_AD[source_GN.reshape(-1)], axis, 0, 0, tiled=True)
  # Row n of the block from source s holds the n-th row that s sent; its expert from s's loads.
  end_GM = jnp.cumsum(load_GM, axis=1)
  expert_GN = jnp.sum(end_GM[:, None, :] <= place_N[None, :, None], axis=-1, dtype=jnp.int32)
  out_AD = _experts(block_AD, expert_GN.reshape(-1), load_GM, weights, _hopper_matmul)
  back_AD = lax.all_to_all(out_AD, axis, 0, 0, tiled=True)
  dest_A = jnp.repeat(
    jnp.arange(ranks, dtype=jnp.int32), sent_G, total_repeat_length=sorted_AD.shape[0]
  )
  row_A = jnp.arange(sorted_AD.shape[0], dtype=jnp.int32) - offset_G[dest_A]
  return _weighted_sum(back_AD[dest_A * buffers.block + row_A], order_A, gate_TK)


def _sort_by_expert(
  x_TD: Array, index_TK: Array, weights: ExpertWeights, axis: str
) -> tuple[Array, Array, Array, Array]:
  """This rank's rows by expert, their order, rows from rank to rank, and loads of its experts."""
  ranks, per_rank = lax.axis_size(axis), weights.wo.shape[0]
  expert_A = index_TK.reshape(-1)
  order_A = jnp.argsort(expert_A)
  load_GE = lax.all_gather(expert_load(index_TK, ranks * per_rank), axis)
  load_GGM = load_GE.reshape(ranks, ranks, per_rank)
  sizes_GG = jnp.sum(load_GGM, axis=-1, dtype=jnp.int32)
  return x_TD[order_A // index_TK.shape[1]], order_A, sizes_GG, load_GGM[:, lax.axis_index(axis)]


def _expert_of_rows(load_GM: Array, rows: int) -> Array:
  """The home expert of each received row, M beyond the last."""
  ranks, per_rank = load_GM.shape
  expert_A = jnp.tile(jnp.arange(per_rank, dtype=jnp.int32), ranks)
  size_A = load_GM.reshape(-1)
  pad = rows - jnp.sum(size_A)
  return jnp.repeat(
    jnp.append(expert_A, per_rank), jnp.append(size_A, pad), total_repeat_length=rows
  )


def _experts(
  rows_CD: Array, expert_C: Array, load_GM: Array, weights: ExpertWeights, matmul: Matmul
) -> Array:
  order_C = jnp.argsort(expert_C)
  size_M = jnp.sum(load_GM, axis=0, dtype=jnp.int32)
  grouped_CD = rows_CD[order_C]
  gate_CF, up_CF = (matmul(grouped_CD, matrix, size_M) for matrix in weights.projections)
  inner_CF = jax.nn.silu(gate_CF) * up_CF
  out_CD = matmul(inner_CF, weights.wo, size_M)
  return jnp.zeros_like(out_CD).at[order_C].set(out_CD, unique_indices=True)


def _weighted_sum(back_AD: Array, order_A: Array, gate_TK: Array) -> Array:
  row_AD = jnp.zeros_like(back_AD).at[order_A].set(back_AD, unique_indices=True)
  row_TKD = row_AD.reshape(*gate_TK.shape, -1).astype(jnp.float32)
  return jnp.einsum("tkd,tk->td", row_TKD, gate_TK).astype(back_AD.dtype)


_BLOCKS = {
  "block_m": 128,
  "block_n": 128,
  "block_k": 64,
  "max_concurrent_steps": 5,
  "grid_block_n": 8,
}
_ragged_dot = functools.partial(ragged_dot_mgpu.ragged_dot, **_BLOCKS)


@jax.custom_vjp
def _hopper_matmul(rows_CK: Array, weights_MKN: Array, size_M: Array) -> Array:
  return _ragged_dot(rows_CK, weights_MKN, group_sizes=size_M)


def _hopper_forward(rows_CK: Array, weights_MKN: Array, size_M: Array) -> tuple[Array, tuple]:
  return _hopper_matmul(rows_CK, weights_MKN, size_M), (rows_CK, weights_MKN, size_M)


def _hopper_backward(saved: tuple, grad_CN: Array) -> tuple[Array, Array, None]:
  rows_CK, weights_MKN, size_M = saved
  used_C1 = (jnp.arange(rows_CK.shape[0]) < jnp.sum(size_M))[:, None]
  grad_CN = jnp.where(used_C1, grad_CN, 0)
  rows_grad_CK = _ragged_dot(grad_CN, weights_MKN, group_sizes=size_M, transpose_rhs=True)
  weights_grad_MKN = transposed_ragged_dot_mgpu.transposed_ragged_dot(
    jnp.where(used_C1, rows_CK, 0), grad_CN, group_sizes=size_M, **_BLOCKS
  )
  return jnp.where(used_C1, rows_grad_CK, 0), weights_grad_MKN, None


_hopper_matmul.defvjp(_hopper_forward, _hopper_backward)

LAYERS = {"plain": plain_layer, "tuned": tuned_layer}
