"""Writes one safetensors file: its header first, then tensors in any order."""

import json
import math
import os
import pathlib
from collections.abc import Mapping
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np

from ultraep_jax.models.safetensors_file import DTYPES

_FORMATS = {dtype: name for name, dtype in DTYPES.items()}


class Form(NamedTuple):
  """A tensor as a file will hold it."""

  shape: tuple[int, ...]
  dtype: np.dtype

  @property
  def nbytes(self) -> int:
    return math.prod(self.shape) * self.dtype.itemsize


class Writer:
  """A file that gets its name when all tensors are written. A context manager."""

  def __init__(self, path: pathlib.Path, forms: Mapping[str, Form]):
    """Makes the file with its header.

    Args:
      path: of the file.
      forms: of its tensors, which lie in this order.

    Raises:
      FileExistsError: there is one.
      OSError: it cannot be written.
    """
    if path.exists():
      raise FileExistsError(f"{path}: expected no file yet, got one")
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers asks for it
    end = 0
    self._start = {}
    for name, form in forms.items():
      start, end = end, end + form.nbytes
      self._start[name] = start
      header[name] = {
        "dtype": _FORMATS[form.dtype],
        "shape": form.shape,
        "data_offsets": [start, end],
      }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at multiples of 8 bytes
    self._forms, self._data = dict(forms), 8 + len(text)
    self._path, self._partial = path, path.with_name(path.name + ".partial")
    self._file = os.open(self._partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    self._put(len(text).to_bytes(8, "little") + text, 0)

  def write(self, name: str, values: np.ndarray) -> None:
    """Writes a tensor; several threads may write others."""
    form = self._forms[name]
    assert (values.shape, values.dtype) == form, (name, values.shape, values.dtype, form)
    # bfloat16 and float8 have no buffers of their own.
    self._put(
      np.ascontiguousarray(values).reshape(-1).view(np.uint8), self._data + self._start[name]
    )

  def _put(self, content: bytes | np.ndarray, offset: int) -> None:
    rest = memoryview(content)
    while rest:
      count = os.pwrite(self._file, rest, offset)
      rest, offset = rest[count:], offset + count

  def __enter__(self) -> Self:
    return self

  def __exit__(
    self,
    kind: type[BaseException] | None,
    error: BaseException | None,
    traceback: TracebackType | None,
  ) -> None:
    if kind is None:
      os.fsync(self._file)
    os.close(self._file)
    if kind is None:
      self._partial.replace(self._path)
    else:
      self._partial.unlink(missing_ok=True)
