"""Matmul of grouped rows on Blackwell by the kernel that JAX ships. Compiled, and never run.

It takes one array of weights, so those of home and replica slots are joined first: a pass over all
weights, for which ``tcgen05`` multiplies several times as fast as what XLA makes of plain JAX.

Groups of 2, 0 and 1 rows::

  home[0], home[1] + replica[0]  ──►  three weights; rows 0, 1 × the first, row 2 × the third
"""

import jax
import jax.numpy as jnp

from pallas_kernels import varying
from pallas_kernels.matmul import layout
from pallas_kernels.support import Array

_TILE = 128  # rows and columns of a block; a pair of blocks has twice as many of each
_DEPTH = 64
_STAGES = 4
_BAND = 8
_MOST_SLOTS = 128  # their sizes are in registers


def grouped_matmul(
  rows_CK: Array,
  home_MKN: Array,
  replica_SKN: Array,
  group_size_P: Array,
  *,
  transpose_rhs: bool,
  bias: tuple[Array, Array] | None,
) -> Array:
  """As ``grouped.grouped_matmul``.

  Raises:
    NotImplementedError: a bias, more than 128 slots, a dtype other than bfloat16, C or N no
      multiple of 128, or K no multiple of 64.
  """
  if bias is not None:
    raise NotImplementedError("bias: expected none on Blackwell GPUs")
  layout.expect_bfloat16(rows_CK=rows_CK, home_MKN=home_MKN, replica_SKN=replica_SKN)
  (capacity, depth), num_slots = rows_CK.shape, group_size_P.shape[0]
  cols = home_MKN.shape[1 if transpose_rhs else 2]
  layout.expect_multiple("C", capacity, _TILE)
  layout.expect_multiple("N", cols, _TILE)
  layout.expect_multiple("K", depth, _DEPTH)
  if num_slots > _MOST_SLOTS:
    raise NotImplementedError(
      f"group_size_P: expected at most {_MOST_SLOTS} slots, got {num_slots}"
    )
  if not hasattr(jax.local_devices()[0], "core_count"):
    raise NotImplementedError("grouped_matmul: JAX's kernel asks a GPU at hand for its SMs")
  # Here, because it loads JAX's test utilities.
  from jax.experimental.pallas.ops.gpu import blackwell_matmul_mgpu, blackwell_ragged_dot_mgpu

  weights_PKN = jnp.concatenate([home_MKN, replica_SKN]) if replica_SKN.shape[0] else home_MKN
  config = blackwell_ragged_dot_mgpu.TuningConfig(
    tile_m=_TILE,
    tile_n=_TILE,
    tile_k=_DEPTH,
    max_concurrent_steps=_STAGES,
    collective=capacity % (2 * _TILE) == 0 and cols % (2 * _TILE) == 0,
    grid_tile_width=_BAND,
    grid_minor_dim=blackwell_matmul_mgpu.MatmulDimension.N,
  )
  operands = rows_CK, weights_PKN.mT if transpose_rhs else weights_PKN, group_size_P
  # Its loop over warps takes no reference of a varying type.
  rows, weights, sizes = varying.untyped(operands)
  out_CN = blackwell_ragged_dot_mgpu.ragged_dot_kernel(rows, weights, sizes, config)
  return varying.vary(out_CN, varying.axes_of(*operands))
