"""Block-scaled FP8 weights, as DeepSeek stores them.

``X.weight`` is float8_e4m3fn, and ``X.weight_scale_inv`` holds a factor for each block of
``weight_block_size`` rows and columns; the last blocks may be cut off. Despite its name, the factor
multiplies. Some publishers store the factors in bfloat16.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

SCALE_FORMATS = ("F32", "BF16")
# The value of each byte. Looking them up takes a third of the time of a conversion.
VALUES = np.arange(256, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float32)


def scales_name(name: str) -> str:
  """The tensor that holds the factors of a weight."""
  return f"{name}_scale_inv"


def scale_ranges(ranges: Sequence[range], block: Sequence[int]) -> tuple[range, ...]:
  """Which factors a slice of the weight needs.

  Args:
    ranges: per axis of the weight, of step 1.
    block: elements per factor along each axis.
  """
  return tuple(
    range(r.start // size, -(-r.stop // size)) if len(r) else range(0)
    for r, size in zip(ranges, block, strict=True)
  )


def dequantize(
  weight: np.ndarray,
  ranges: Sequence[range],
  scales: np.ndarray,
  places: Sequence[range],
  block: Sequence[int],
) -> np.ndarray:
  """Values of a slice of a weight: each element times the factor of its block, in float32.

  Args:
    weight: float8_e4m3fn [rows, columns], the slice.
    ranges: where the slice lies in the weight; it need not begin or end with a block.
    scales: factors, float32 or bfloat16.
    places: where these lie among all factors; those of `scale_ranges(ranges, block)` and perhaps
      more.
    block: rows and columns per factor.

  Returns:
    float32 [rows, columns].
  """
  rows, columns = (
    np.asarray(r, dtype=np.int64) // size - place.start
    for r, place, size in zip(ranges, places, block, strict=True)
  )
  values = np.take(VALUES, weight.view(np.uint8), mode="clip")  # checked, it takes twice as long
  values *= scales.astype(np.float32)[:, columns][rows]
  return values
