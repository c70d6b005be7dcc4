"""What becomes of tokens that cross in FP8, from the definition of e4m3."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from layer_problems import Problem


def e4m3_numbers():
  """All numbers of e4m3 that are not negative, from its definition; index: its bits."""
  exponent, mantissa = np.divmod(np.arange(127), 8)  # 127 is NaN
  subnormal = mantissa * 2.0**-9
  return np.where(exponent == 0, subnormal, (8 + mantissa) * 2.0 ** (exponent - 10))


def to_e4m3(x):
  """Bits of the nearest e4m3 number of a magnitude, the even one of two that are as near."""
  numbers = e4m3_numbers()
  distance = np.abs(x[..., None].astype(np.float64) - numbers)
  odd = np.arange(127) % 2
  return np.lexsort((np.broadcast_to(odd, distance.shape), distance), axis=-1)[..., 0]


def rounded(x):
  """The float32 value of every element after the crossing, and the scale of its block."""
  x = np.asarray(x).astype(np.float32)
  value, scale = np.zeros_like(x), np.zeros_like(x)
  for start in range(0, x.shape[1], 128):
    part = np.s_[:, start : start + 128]
    largest = np.abs(x[part]).max(axis=1, keepdims=True)
    scale[part] = np.maximum(largest * np.float32(1 / 448), np.float32(2.0**-116))
    nearest = e4m3_numbers()[to_e4m3(np.abs(x[part]) * (1 / scale[part]))].astype(np.float32)
    value[part] = np.copysign(nearest, x[part]) * scale[part]
  return value, scale


def on_rounded_tokens(problem: Problem) -> Problem:
  """The problem whose dense output and gradients the layer's are: the rounding's slope is 1."""
  return dataclasses.replace(problem, x=jnp.asarray(rounded(problem.x)[0], problem.x.dtype))
