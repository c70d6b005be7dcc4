"""A folder of Hugging Face safetensors: everything known and checked before data is read."""

import math
import os
import pathlib
import weakref
from collections.abc import Mapping, Sequence

import numpy as np

from ultraep_jax.models import fp8, mxfp4
from ultraep_jax.models.folder import read_block_size, read_tensors
from ultraep_jax.models.problems import closest
from ultraep_jax.models.safetensors_file import DTYPES, Tensor, read_ranges

ROWS = 32  # converted and transposed at a time, in the cache


class Checkpoint:
  """The tensors of a folder, read by slices.

  The folder holds ``model.safetensors``, or ``model.safetensors.index.json`` and the files that it
  names. Tensors that the index does not name are left out. Opening reads headers only.
  Block-scaled FP8 weights (`fp8`) read as their values; the size of a block is in ``config.json``.
  So do weights in MXFP4 (`mxfp4`), as one tensor each.
  Files stay open for as long as the object lives; several threads may read at once.

  Attributes:
    folder: of the checkpoint.
    tensors: by name.
    block: rows and columns per factor of FP8 weights; None: the configuration names none.
  """

  folder: pathlib.Path
  tensors: Mapping[str, Tensor]
  block: tuple[int, int] | None

  def __init__(self, folder: str | os.PathLike[str]) -> None:
    """Opens a folder.

    Raises:
      FileNotFoundError: no checkpoint in it, or its index names files that are not there.
      ValueError: a file is damaged or cut short, or the index names tensors that its files lack.
      OSError: a file cannot be read.
    """
    self.folder = pathlib.Path(folder)
    self._stored_tensors = read_tensors(self.folder)
    self.tensors = mxfp4.join(self._stored_tensors)
    self.block = read_block_size(self.folder)
    self._descriptors: dict[str, int] = {}
    for file in {tensor.file: None for tensor in self.tensors.values()}:
      descriptor = os.open(self.folder / file, os.O_RDONLY)
      weakref.finalize(self, os.close, descriptor)
      self._descriptors[file] = descriptor

  def problem(self, name: str) -> str | None:
    """What keeps a tensor from being read, or None."""
    tensor = self.tensors.get(name)
    if tensor is None:
      if packed := [other for other in _packed_names(name) if other in self.tensors]:
        return f"{name}: expected its values, got {packed[0]}: weights quantised in another way"
      near = closest(name, self.tensors)
      return f"{name}: not in the checkpoint" + (f" (closest: {', '.join(near)})" if near else "")
    if tensor.dtype is None:
      return f"{name}: expected a dtype of {', '.join(DTYPES)}, got {tensor.format}"
    # A tensor without elements may claim anything of its other axes.
    if len(tensor.shape) > 64 or math.prod(max(n, 1) for n in tensor.shape) >= 2**60:
      return f"{name}: expected a shape that NumPy can hold, got {tensor.shape}"
    return self._scale_problem(name, tensor) if tensor.is_fp8 else None

  def _scale_problem(self, name: str, tensor: Tensor) -> str | None:
    if self.block is None:
      return f"{name}: expected quantization_config.weight_block_size in config.json for FP8"
    scales = self.tensors.get(fp8.scales_name(name))
    if scales is None:
      return f"{name}: expected scales {fp8.scales_name(name)} for FP8, got none"
    if len(tensor.shape) != 2:
      return f"{name}: expected a matrix for FP8, got shape {tensor.shape}"
    expected = tuple(-(-n // size) for n, size in zip(tensor.shape, self.block, strict=True))
    if scales.shape != expected or scales.format not in fp8.SCALE_FORMATS:
      formats = " or ".join(fp8.SCALE_FORMATS)
      got = f"{scales.format} {scales.shape}"
      return f"{fp8.scales_name(name)}: expected {formats} of shape {expected}, got {got}"
    return None

  @property
  def names(self) -> list[str]:
    """Of the tensors, without those that hold factors of others."""
    factors = {fp8.scales_name(name) for name, tensor in self.tensors.items() if tensor.is_fp8}
    return [name for name in self.tensors if name not in factors]

  def parts(self, name: str) -> tuple[str, ...]:
    """The tensors that reading one needs: itself, and its factors if it is FP8."""
    is_fp8 = name in self.tensors and self.tensors[name].is_fp8
    return (name, fp8.scales_name(name)) if is_fp8 else (name,)

  def nbytes(self, name: str, index: Sequence[slice] = ()) -> int:
    """Bytes that reading a slice takes from the disk."""
    parts = self._stored(name, index)
    return sum(math.prod(map(len, ranges)) * _dtype(tensor).itemsize for tensor, ranges in parts)

  def read(self, name: str, index: Sequence[slice] = ()) -> np.ndarray:
    """Values of a slice of a tensor.

    Args:
      name: of the tensor.
      index: slices of step 1 along the first axes; the other axes whole.

    Returns:
      An array of the tensor's dtype; float32 for block-scaled FP8 and MXFP4.

    Raises:
      ValueError: what `problem` says.
      OSError: a file was cut short since the checkpoint was opened.
    """
    stored = self._stored(name, index)
    values, *scales = [self._read(*part) for part in stored]
    if self.tensors[name].is_mxfp4:
      return mxfp4.dequantize(values, scales[0], _ranges(self.tensors[name], index)[1])
    return self._dequantized(values, scales, stored, slice(None))

  def read_into(self, out: np.ndarray, name: str, index: Sequence[slice] = ()) -> None:
    """Writes values of a slice of a tensor into an array, converted to its dtype.

    Args:
      out: of the shape of the slice, with any strides: a transposed view transposes.
      name: as for `read`.
      index: likewise.

    Raises:
      ValueError, OSError: as for `read`.
    """
    stored = self._stored(name, index)
    tensor, ranges = stored[0]
    shape = tuple(map(len, _ranges(self.tensors[name], index)))
    if out.shape != shape:
      raise ValueError(f"out: expected shape {shape}, got {out.shape}")
    if self.tensors[name].is_mxfp4:
      out[...] = self.read(name, index).astype(out.dtype, copy=False)
      return
    if out.flags.c_contiguous and out.dtype == tensor.dtype and not tensor.is_fp8:
      self._read(tensor, ranges, out)
      return
    values, *scales = [self._read(*part) for part in stored]
    if out.ndim < 2:
      out[...] = values.astype(out.dtype)
      return
    bits = np.dtype(f"u{out.itemsize}")  # 0.7 ns per bfloat16 as integers, 1.1 as themselves
    for first in range(0, out.shape[-2], ROWS):
      rows = slice(first, first + ROWS)
      part = self._dequantized(values[..., rows, :], scales, stored, rows)
      out[..., rows, :].view(bits)[...] = part.astype(out.dtype, copy=False).view(bits)

  def _stored(self, name: str, index: Sequence[slice]) -> list[tuple[Tensor, tuple[range, ...]]]:
    """What a slice needs of its tensor, and of that tensor's factors if it is quantised."""
    if problem := self.problem(name):
      raise ValueError(f"checkpoint {self.folder}: {problem}")
    tensor = self.tensors[name]
    ranges = _ranges(tensor, index)
    if tensor.is_mxfp4:
      names = mxfp4.blocks_name(name), mxfp4.scales_name(name)
      parts = zip(names, mxfp4.stored_ranges(ranges), strict=True)
      return [(self._stored_tensors[part], part_ranges) for part, part_ranges in parts]
    if not tensor.is_fp8:
      return [(tensor, ranges)]
    assert self.block is not None
    scales = self.tensors[fp8.scales_name(name)]
    return [(tensor, ranges), (scales, fp8.scale_ranges(ranges, self.block))]

  def _read(
    self, tensor: Tensor, ranges: Sequence[range], out: np.ndarray | None = None
  ) -> np.ndarray:
    out = np.empty([len(r) for r in ranges], _dtype(tensor)) if out is None else out
    read_ranges(self._descriptors[tensor.file], tensor, ranges, out)
    return out

  def _dequantized(
    self,
    values: np.ndarray,
    scales: Sequence[np.ndarray],
    stored: Sequence[tuple[Tensor, tuple[range, ...]]],
    rows: slice,
  ) -> np.ndarray:
    """The values of those rows of a slice, which for FP8 are the stored ones times factors."""
    if not scales:
      return values
    assert self.block is not None
    (_, ranges), (_, places) = stored
    return fp8.dequantize(values, (ranges[0][rows], ranges[1]), scales[0], places, self.block)


def _packed_names(name: str) -> tuple[str, ...]:
  """Where values of fewer bits may be, under the names of other programs."""
  return f"{name}_packed", f"{name}_blocks", f"{name.removesuffix('weight')}qweight"


def _ranges(tensor: Tensor, index: Sequence[slice]) -> tuple[range, ...]:
  if len(index) > len(tensor.shape):
    raise ValueError(f"index: expected at most {len(tensor.shape)} slices, got {len(index)}")
  slices = [*index, *[slice(None)] * (len(tensor.shape) - len(index))]
  ranges = tuple(range(*s.indices(n)) for s, n in zip(slices, tensor.shape, strict=True))
  if any(r.step != 1 for r in ranges):
    raise ValueError(f"index: expected slices of step 1, got {index}")
  return tuple(r if len(r) else range(0) for r in ranges)


def _dtype(tensor: Tensor) -> np.dtype:
  assert tensor.dtype is not None, tensor
  return tensor.dtype
