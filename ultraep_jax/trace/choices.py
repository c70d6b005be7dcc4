"""The experts that tokens chose, beside a trace's records: what makes a run choose the same again.

A file has what the layers of one microbatch chose::

  choices-7-0-00000000.npz  of step 7, microbatch 0; one that is written later has a higher number

Its arrays are ``layer_N``, ``shape_NA``, the shape of each layer's choices, filled up with −1, and
``expert_X``, the values of all layers one behind the other.
"""

import math
import pathlib
import zipfile
from collections.abc import Mapping

import numpy as np

from ultraep_jax.trace import disk
from ultraep_jax.trace.format import CHUNK_BYTES, TraceError

_ARRAYS = {"layer_N": (1, "U"), "shape_NA": (2, "i"), "expert_X": (1, "iu")}  # axes and kinds
_MOST_AXES = 8


def check_choices(expert_index: Mapping[str, np.ndarray], num_experts: int) -> None:
  """Raises ``TraceError`` unless these are choices of layers, by name."""
  for layer, index in expert_index.items():
    if not 1 <= index.ndim <= _MOST_AXES or index.dtype.kind not in "iu":
      raise TraceError(
        f"expert_index, {layer}: expected [..., K] integers, got {index.dtype} {index.shape}"
      )
    if index.size and not (index.min() >= -1 and index.max() < num_experts):
      raise TraceError(
        f"expert_index, {layer}: expected values in [-1, {num_experts}), "
        f"got {index.min()} to {index.max()}"
      )


def check_count(layer: str, index: np.ndarray, assignments: int) -> None:
  """Raises ``TraceError`` unless a layer's choices are as many as its statistics count."""
  if index.size != assignments:
    raise TraceError(
      f"expert_index, {layer}: expected {assignments} choices, as the statistics count (loads, "
      f"masked and invalid), got {index.size} of shape {list(index.shape)}"
    )


def write_choices(
  folder: pathlib.Path, step: int, microbatch: int, expert_index: Mapping[str, np.ndarray]
) -> None:
  """Writes what each layer chose, ``[..., K]`` integers.

  Raises:
    TraceError: they are too large for a file.
    OSError: it cannot be written.
  """
  shape_NA = np.full((len(expert_index), _MOST_AXES), -1, np.int64)
  for i, index in enumerate(expert_index.values()):
    shape_NA[i, : index.ndim] = index.shape
  if sum(index.size for index in expert_index.values()) * 4 > CHUNK_BYTES:
    raise TraceError(f"expert_index: expected at most {CHUNK_BYTES} bytes in a step")
  flat = np.concatenate([index.ravel() for index in expert_index.values()])
  arrays = {
    "layer_N": np.array(list(expert_index), str),
    "shape_NA": shape_NA,
    "expert_X": disk.narrow(flat),
  }
  number = 0
  with disk.whole_file(folder, lambda file: np.savez_compressed(file, **arrays)) as temporary:  # pyright: ignore[reportArgumentType]
    while not disk.publish(temporary, folder / f"choices-{step}-{microbatch}-{number:08d}.npz"):
      number += 1


def read_choices(path: str | pathlib.Path, step: int, microbatch: int = 0) -> dict[str, np.ndarray]:
  """The experts that tokens chose in one microbatch of a step.

  Args:
    path: the trace's folder.
    step: of training.
    microbatch: of the step.

  Returns:
    For each layer ``[..., K]`` int32 in the shape that was recorded: what the modules take as
    ``expert_index``. Of a layer that was recorded twice, the last.

  Raises:
    TraceError: the folder is no trace, has no choices of that step, or they are damaged.
  """
  folder = pathlib.Path(path)
  manifest = disk.read_manifest(folder)
  found: dict[str, np.ndarray] = {}
  for file in sorted(folder.glob(f"choices-{step}-{microbatch}-*.npz")):
    of_file = _read(file)
    check_choices(of_file, manifest.num_experts)
    found |= of_file
  if not found:
    raise TraceError(
      f"{folder}: expected choices of step {step}, microbatch {microbatch}, got none"
    )
  return found


def _read(path: pathlib.Path) -> dict[str, np.ndarray]:
  """The layers of a file; no array is inflated whose shape and size are not as they must be."""
  try:
    with zipfile.ZipFile(path) as archive:
      entries = {name: archive.getinfo(f"{name}.npy") for name in _ARRAYS}
      for name, (axes, kinds) in _ARRAYS.items():
        shape, dtype, start = disk.header(archive, entries[name])
        size = start + math.prod(shape) * dtype.itemsize
        if len(shape) != axes or dtype.kind not in kinds or min(shape) < 0:
          raise ValueError(f"{name}: expected another form than {dtype} {shape}")
        if entries[name].file_size != size or size > CHUNK_BYTES:
          raise ValueError(f"{name}: expected {size} bytes, got {entries[name].file_size}")
      layer_N, shape_NA, expert_X = (disk.read_array(archive, entry) for entry in entries.values())
    shapes = [tuple(n for n in row if n >= 0) for row in shape_NA.tolist()]
    sizes = [math.prod(shape) for shape in shapes]
    if len(layer_N) != len(shapes) or sum(sizes) != len(expert_X):
      raise ValueError(f"expert_X: expected {sum(sizes)} choices, got {len(expert_X)}")
    parts = np.split(expert_X.astype(np.int32), np.cumsum(sizes)[:-1])
    return {
      layer: part.reshape(shape)
      for layer, part, shape in zip(layer_N.tolist(), parts, shapes, strict=True)
    }
  except OSError as error:
    raise TraceError(f"{path}: expected a readable file, got: {error}") from None
  except Exception as error:  # damage comes out of zip and NumPy in many ways
    raise TraceError(f"{path.name}: expected whole choices, got damaged ones: {error}") from None
