"""What of a token crosses the links: its row as it is, or in FP8 with a scale per block.

The FP8 form of a block of 128 channels is defined bit for bit, in float32:

- scale = max(max|x| * (1/448), 2^-116), where 1/448 is rounded to float32,
- value = x * (1 / scale), rounded to the nearest float8_e4m3fn, ties to even.

The reciprocal is spelled out because compilers divide by a shared scale so, or not, as they like.
448 is the largest e4m3 number, so nothing overflows. The least scale keeps a block of zeros
zero and every step out of float32's subnormals, which some devices flush. A block that holds
an infinity or a NaN becomes NaN as a whole.
"""

from collections.abc import Sequence

import jax.numpy as jnp

from pallas_kernels import SCALED, num_scales
from ultraep_jax.config import DispatchDtype
from ultraep_jax.types import Array

_LARGEST = 448.0  # of float8_e4m3fn
_LEAST_SCALE = 2.0**-116  # subnormals of float32 are below half the least value at this scale


def pack(x_TD: Array, dtype: DispatchDtype | None) -> list[Array]:
  """The arrays that cross for tokens ``[T, D]``: their rows go where the tokens go.

  Args:
    x_TD: bfloat16, float16 or float32.
    dtype: that values travel in; ``None``: that of ``x_TD``, which then crosses as it is.

  Returns:
    ``[x_TD]``, or values ``[T, D]`` and their scales, float32, one for each block of 128 and
    further ones up to a multiple of 4, which mean nothing.

  >>> value_TD, scale_TB = pack(jnp.array([[0.0, 3.0, -7.0]]), "float8_e4m3fn")
  >>> value_TD.astype(jnp.float32).tolist(), float(scale_TB[0, 0])
  ([[0.0, 192.0, -448.0]], 0.015625)
  """
  if dtype is None:
    return [x_TD]
  tokens, width = x_TD.shape
  blocks = num_scales(width)
  padded_TD = jnp.pad(x_TD.astype(jnp.float32), [(0, 0), (0, blocks * SCALED - width)])
  x_TBX = padded_TD.reshape(tokens, blocks, SCALED)
  scale_TB = jnp.max(jnp.abs(x_TBX), axis=2) * jnp.float32(1 / _LARGEST)
  scale_TB = jnp.maximum(scale_TB, jnp.float32(_LEAST_SCALE))
  value_TBX = (x_TBX * (1 / scale_TB)[:, :, None]).astype(jnp.dtype(dtype))
  return [value_TBX.reshape(tokens, -1)[:, :width], scale_TB]


def unpack(arrays: Sequence[Array], dtype: jnp.dtype) -> Array:
  """Rows ``[N, D]`` of what arrived of them: value times scale in float32, rounded to ``dtype``.

  Args:
    arrays: rows of those that ``pack`` returned, in any number and order.
    dtype: of the tokens.
  """
  if len(arrays) == 1:
    return arrays[0]
  value_ND, scale_NB = arrays
  rows, width = value_ND.shape
  scale_NBX = jnp.broadcast_to(scale_NB[:, :, None], (*scale_NB.shape, SCALED))
  scale_ND = scale_NBX.reshape(rows, -1)[:, :width]
  return (value_ND.astype(jnp.float32) * scale_ND).astype(dtype)


def token_bytes(width: int, itemsize: int, dtype: DispatchDtype | None) -> int:
  """Bytes that cross for one token of ``width`` channels of ``itemsize`` bytes.

  >>> token_bytes(4096, 2, None), token_bytes(4096, 2, "float8_e4m3fn")
  (8192, 4224)
  """
  if dtype is None:
    return width * itemsize
  return width + 4 * num_scales(width)
