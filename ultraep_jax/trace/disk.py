"""Reading and writing the files of a trace, so that there is a whole one or none."""

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import uuid
import zipfile
from collections.abc import Callable, Iterator
from typing import IO, Any

import numpy as np

from ultraep_jax.trace import format as form
from ultraep_jax.trace.format import Columns, Manifest, TraceError

MANIFEST = "trace.json"
CHUNKS = "chunk-*.npz"
_MANIFEST_BYTES = 1 << 24


# --- the manifest -----------------------------------------------------------------------------


def manifest_bytes(manifest: Manifest) -> bytes:
  """The content of ``trace.json``.

  Raises:
    TraceError: nobody could read it.
  """
  values = {"format": form.FORMAT, "version": form.VERSION, **dataclasses.asdict(manifest)}
  content = json.dumps(values, indent=2).encode() + b"\n"
  if len(content) > _MANIFEST_BYTES:
    raise TraceError(f"{MANIFEST}: expected at most {_MANIFEST_BYTES} bytes, got {len(content)}")
  form.manifest_of(MANIFEST, values)
  return content


def write_manifest(folder: pathlib.Path, manifest: Manifest) -> Manifest:
  """Writes ``trace.json``, unless another recorder has; returns the manifest that is there.

  Raises:
    TraceError: nobody could read it, or what is there.
    OSError: it cannot be written.
  """
  content = manifest_bytes(manifest)
  with whole_file(folder, lambda file: file.write(content)) as temporary:
    publish(temporary, folder / MANIFEST)
  return read_manifest(folder)


def read_manifest(folder: pathlib.Path) -> Manifest:
  """Reads ``trace.json``.

  Raises:
    TraceError: there is none, or not one of this version.
  """
  path = folder / MANIFEST
  try:
    size = path.stat().st_size
    if not path.is_file() or size > _MANIFEST_BYTES:
      raise TraceError(f"{path}: expected a file of at most {_MANIFEST_BYTES} bytes")
    values = json.loads(path.read_bytes())
    form.check_json(str(path), values)
    return form.manifest_of(str(path), values)
  except FileNotFoundError:
    raise TraceError(_what_it_is(folder)) from None
  except NotADirectoryError:
    raise TraceError(f"{folder}: expected the folder of a trace, got a file") from None
  except OSError as error:
    raise TraceError(f"{path}: expected a readable file, got: {error.strerror}") from None
  except TraceError:
    raise
  except (ValueError, RecursionError):
    raise TraceError(
      f"{path}: expected the JSON of a trace; it is damaged or of another program"
    ) from None


def manifest_there(folder: pathlib.Path) -> Manifest | None:
  """Reads ``trace.json`` if a trace has begun in the folder.

  Raises:
    TraceError: as `read_manifest`, or there are chunks of a trace without one.
  """
  if os.path.lexists(folder / MANIFEST):
    return read_manifest(folder)
  if chunks(folder):
    raise TraceError(f"{folder}: expected {MANIFEST} beside its chunks, got none")
  return None


def _what_it_is(folder: pathlib.Path) -> str:
  if not folder.exists():
    return f"{folder}: expected the folder of a trace, got nothing there"
  text = f"{folder}: expected a trace (a folder with {MANIFEST}), got none"
  if any(folder.glob("router_trace_rank*.jsonl")):
    return text + "; for Megatron's router traces see `ultraep trace import`"
  traces = sorted(str(path.parent) for path in folder.glob(f"*/{MANIFEST}"))
  if traces:
    return text + f"; there are traces in {', '.join(traces[:3])}"
  return text + "; a recorder writes it with its first records"


# --- chunks -----------------------------------------------------------------------------------


def chunks(folder: pathlib.Path) -> list[pathlib.Path]:
  """The chunks, in the order of writing."""
  return sorted(folder.glob(CHUNKS))


def next_chunk(folder: pathlib.Path) -> int:
  """A number that is greater than those of all chunks."""
  numbers = [path.stem.rpartition("-")[2] for path in chunks(folder)]
  return max((int(n) + 1 for n in numbers if n.isdecimal()), default=0)


def write_chunks(folder: pathlib.Path, index: int, columns: Columns) -> int:
  """Writes records as one chunk, or as several if they are many.

  Another recorder of the same folder may have taken a number: a chunk gets the first that is free
  from ``index`` on. Returned is the one after the last.

  Raises:
    TraceError: a single record is too large.
    OSError: they cannot be written.
  """
  for part in form.parts(columns):
    arrays: dict[str, Any] = {name: narrow(column) for name, column in part.items()}
    with whole_file(folder, lambda file, a=arrays: np.savez_compressed(file, **a)) as temporary:
      while not publish(temporary, folder / CHUNKS.replace("*", f"{index:08d}")):
        index += 1
    index += 1
  return index


def read_chunk(path: pathlib.Path, manifest: Manifest) -> Columns:
  """Reads and checks a chunk. No column is inflated whose shape and size are not as they must be.

  Raises:
    TraceError: it is damaged, or its columns are not what the manifest and the format say.
  """
  if not path.is_file():
    raise TraceError(f"{path.name}: expected a file")
  try:
    with zipfile.ZipFile(path) as archive:
      entries = {name: archive.getinfo(f"{name}.npy") for name in form.COLUMNS}
      headers = {name: header(archive, entry) for name, entry in entries.items()}
      forms = {name: (shape, dtype) for name, (shape, dtype, _) in headers.items()}
      form.check_forms(path.name, forms, manifest)
      form.check_size(path.name, forms)
      for name, (shape, dtype, size) in headers.items():
        expected = size + math.prod(shape) * dtype.itemsize
        if entries[name].file_size != expected:
          raise ValueError(f"{name}: expected {expected} bytes, got {entries[name].file_size}")
      columns = {name: read_array(archive, entry) for name, entry in entries.items()}
  except TraceError:
    raise
  except KeyError as error:
    raise TraceError(f"{path.name}: expected the columns of a trace, got none {error}") from None
  except Exception as error:  # damage comes out of zip and NumPy in many ways
    raise TraceError(f"{path.name}: expected a whole chunk, got a damaged one: {error}") from None
  return {
    name: form.check_values(path.name, name, column, manifest) for name, column in columns.items()
  }


def header(
  archive: zipfile.ZipFile, entry: zipfile.ZipInfo
) -> tuple[tuple[int, ...], np.dtype, int]:
  """Shape, type, and the bytes before the values. Little is inflated for it."""
  if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
    raise ValueError(f"{entry.filename}: expected deflated bytes")  # others inflate by the block
  with archive.open(entry) as file:
    version = np.lib.format.read_magic(file)
    if version != (1, 0):  # in a later one the header itself may be gigabytes
      raise ValueError(f"{entry.filename}: expected an array of format 1.0, got {version}")
    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    return shape, dtype, file.tell()


def read_array(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> np.ndarray:
  with archive.open(entry) as file:
    return np.lib.format.read_array(file, allow_pickle=False)


def narrow(column: np.ndarray) -> np.ndarray:
  """Integers in the least type that holds them: smaller, and faster to compress."""
  if column.dtype.kind not in "iu" or not column.size:
    return column
  least, most = int(column.min()), int(column.max())
  for dtype in (np.int8, np.uint8, np.int16, np.uint16, np.int32):
    if np.iinfo(dtype).min <= least and most <= np.iinfo(dtype).max:
      return column.astype(dtype)
  return column


# --- the folder, and whole files --------------------------------------------------------------


@contextlib.contextmanager
def whole_file(
  folder: pathlib.Path, write: Callable[[IO[bytes]], object]
) -> Iterator[pathlib.Path]:
  """A file that is on disk, under a name that no other process has; gone afterwards."""
  path = folder / f"{uuid.uuid4().hex}.partial"
  try:
    with path.open("xb") as file:
      write(file)
      file.flush()
      os.fsync(file.fileno())
    yield path
  finally:
    path.unlink(missing_ok=True)


def publish(temporary: pathlib.Path, path: pathlib.Path) -> bool:
  """Gives a whole file its name, unless another has it."""
  try:
    os.link(temporary, path)
  except FileExistsError:
    return False
  except OSError:  # no links on this file system
    if path.exists():
      return False
    temporary.replace(path)
  return True
