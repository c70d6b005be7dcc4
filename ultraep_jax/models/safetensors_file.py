"""One safetensors file: what its header describes, and ranges of its bytes.

The ``safetensors`` library checks the header. It does not read the data, because its NumPy
framework cannot hand out float8, the others put whole tensors on a device first, and its slices
come at 1.1 GB/s where positioned reads come at 6 to 9 (one thread, file cached). A memory map is as
fast as those, but dies of SIGBUS if the file shrinks, and reads network folders page by page.
"""

import math
import os
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from ultraep_jax.files import parse_json, regular

try:
  from safetensors import SafetensorError, safe_open
except ImportError as error:
  raise ImportError(
    "checkpoints need safetensors, which is not installed: in the clone, pip install -e '.[models]'"
  ) from error

# The format's names of the dtypes that this library reads.
DTYPES = {
  "BOOL": np.dtype(np.bool_),
  "U8": np.dtype(np.uint8),
  "I8": np.dtype(np.int8),
  "I16": np.dtype(np.int16),
  "I32": np.dtype(np.int32),
  "I64": np.dtype(np.int64),
  "F8_E4M3": np.dtype(jnp.float8_e4m3fn),
  "BF16": np.dtype(jnp.bfloat16),
  "F16": np.dtype(np.float16),
  "F32": np.dtype(np.float32),
  "F64": np.dtype(np.float64),
}


class Tensor(NamedTuple):
  """A tensor as the header of its file describes it.

  Attributes:
    file: the file's name in its folder.
    format: the dtype's name in the format, e.g. ``"BF16"``.
    shape: as stored.
    start: its first byte in the file. Elements follow in C order, little endian.
  """

  file: str
  format: str
  shape: tuple[int, ...]
  start: int

  @property
  def dtype(self) -> np.dtype | None:
    """As it is stored, of MXFP4 as it is read. None: not a dtype that this library reads."""
    return np.dtype(np.float32) if self.is_mxfp4 else DTYPES.get(self.format)

  @property
  def is_fp8(self) -> bool:
    """Its values are those stored times factors in another tensor, see `fp8`."""
    return self.format == "F8_E4M3"

  @property
  def is_mxfp4(self) -> bool:
    """Its values are those of two other tensors, see `mxfp4`; it lies where the first does."""
    return self.format == "MXFP4"

  @property
  def is_quantized(self) -> bool:
    return self.is_fp8 or self.is_mxfp4


def read_header(folder: pathlib.Path, file: str) -> dict[str, Tensor]:
  """The tensors of a file, by name, without reading data.

  Args:
    folder: of the file.
    file: its name there.

  Raises:
    ValueError: the file is not a whole safetensors file.
    OSError: it cannot be read.
  """
  path = regular(folder / file)
  try:
    with safe_open(path, "numpy"):
      pass  # opening checks everything, also that the file ends where its last tensor does
  except SafetensorError as error:
    raise ValueError(
      f"{path}: expected a whole safetensors file, got {path.stat().st_size} bytes: {error}"
    ) from error
  with path.open("rb") as stream:
    length = int.from_bytes(stream.read(8), "little")
    header = parse_json(stream.read(length), str(path))
  return {
    name: Tensor(file, entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0])
    for name, entry in header.items()
    if name != "__metadata__"
  }


def read_ranges(descriptor: int, tensor: Tensor, ranges: Sequence[range], out: np.ndarray) -> None:
  """Reads a slice of a tensor, and no byte beside it.

  Args:
    descriptor: of the open file. Several threads may share it.
    tensor: of a dtype that this library reads.
    ranges: per axis, of step 1.
    out: C-contiguous, of the tensor's dtype and the lengths of ``ranges``.

  Raises:
    OSError: the file ends before the slice does.
  """
  if out.size == 0:
    return
  # A run is what lies together: from the last axis that is cut, to the end.
  axes = len(ranges)
  while axes and len(ranges[axes - 1]) == tensor.shape[axes - 1]:
    axes -= 1
  cut = max(axes - 1, 0)
  strides = [out.itemsize * math.prod(tensor.shape[i + 1 :]) for i in range(len(ranges))]
  buffer = memoryview(out.reshape(-1).view(np.uint8))
  run = out.nbytes // math.prod(len(r) for r in ranges[:cut])
  first = sum(r.start * stride for r, stride in zip(ranges, strides, strict=True))
  for i, place in enumerate(np.ndindex(*(len(r) for r in ranges[:cut]))):
    offset = first + sum(p * stride for p, stride in zip(place, strides[:cut], strict=True))
    _read(descriptor, tensor, buffer[i * run : (i + 1) * run], tensor.start + offset)


def _read(descriptor: int, tensor: Tensor, buffer: memoryview, offset: int) -> None:
  while buffer:
    count = os.preadv(descriptor, [buffer], offset)
    if not count:
      raise OSError(f"{tensor.file}: expected {len(buffer)} more bytes at {offset}, got its end")
    buffer, offset = buffer[count:], offset + count
