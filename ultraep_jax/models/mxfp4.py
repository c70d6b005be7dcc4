"""Weights in MXFP4, as GPT-OSS stores them: four bits a value, a power of two for each 32.

``X_blocks`` ``[E, out, in / 32, 16]`` holds two values of the in axis a byte, the first in the low
half, and ``X_scales`` ``[E, out, in / 32]`` the exponents of their factors plus 127. Together they
are the values of a tensor ``X`` ``[E, in, out]``, transposed as where it is not quantised.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from ultraep_jax.models.safetensors_file import Tensor

FORMAT = "MXFP4"
SIZE = 32  # values with one factor
_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_VALUES = np.concatenate([_MAGNITUDES, -_MAGNITUDES])
# The two values of each byte.
_PAIRS = np.stack([np.tile(_VALUES, 16), np.repeat(_VALUES, 16)], axis=1)


def join(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
  """The tensors of a checkpoint with one ``X`` for each ``X_blocks`` and ``X_scales``.

  Pairs whose shapes do not fit each other stay as they are.
  """
  joined = dict(tensors)
  for name, blocks in tensors.items():
    scales = tensors.get(scales_name(name.removesuffix("_blocks")))
    if not name.endswith("_blocks") or scales is None or {blocks.format, scales.format} != {"U8"}:
      continue
    if len(blocks.shape) == 4 and blocks.shape[3] == SIZE // 2 and scales.shape == blocks.shape[:3]:
      whole = name.removesuffix("_blocks")
      experts, rows, groups, _ = blocks.shape
      del joined[name], joined[scales_name(whole)]
      joined[whole] = Tensor(blocks.file, FORMAT, (experts, groups * SIZE, rows), blocks.start)
  return joined


def blocks_name(name: str) -> str:
  return f"{name}_blocks"


def scales_name(name: str) -> str:
  return f"{name}_scales"


def stored_ranges(ranges: Sequence[range]) -> tuple[tuple[range, ...], tuple[range, ...]]:
  """Which blocks and which scales a slice ``[E, in, out]`` of the values needs."""
  experts, inner, rows = ranges
  groups = range(inner.start // SIZE, -(-inner.stop // SIZE)) if len(inner) else range(0)
  return (experts, rows, groups, range(SIZE // 2)), (experts, rows, groups)


def dequantize(blocks: np.ndarray, scales: np.ndarray, inner: range) -> np.ndarray:
  """The values of a slice: float32 ``[E, in, out]``.

  Args:
    blocks: uint8 ``[E, out, groups, 16]``, those of ``stored_ranges``.
    scales: uint8 ``[E, out, groups]``.
    inner: which values of the in axis.
  """
  values = np.take(_PAIRS, blocks, axis=0)  # [E, out, groups, 16, 2]
  values = values.reshape(*scales.shape, SIZE)
  with np.errstate(over="ignore"):  # an infinity is what such a file says
    values = np.ldexp(values, scales.astype(np.int32)[..., None] - 127)
  experts, rows, groups = scales.shape
  values = values.reshape(experts, rows, groups * SIZE)
  first = inner.start % SIZE
  return values[..., first : first + len(inner)].swapaxes(1, 2)
