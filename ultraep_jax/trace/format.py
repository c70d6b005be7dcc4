"""The files of a trace: a manifest, and chunks of records that are written once.

::

  trace.json         {"format": "ultraep_jax trace", "version": 1, "num_ranks": ..., ...}
  chunk-00000000.npz  columns of the first records
  chunk-00000001.npz  ...

A record is one layer's run on one token group's microbatch. A chunk is a compressed NPZ file:
NumPy is here anyway, any program reads it, each column carries a checksum and nothing in it is
executed. A chunk gets its name only when it is complete and on disk, and is never touched again.
"""

import dataclasses
import json
import math
import os
import pathlib
import uuid
from typing import Any

import numpy as np

FORMAT = "ultraep_jax trace"
VERSION = 1
MANIFEST = "trace.json"
CHUNKS = "chunk-*.npz"

# Axes of each column after the first, which is the record. All but three hold integers.
COLUMNS = {
  "step_N": "",
  "layer_N": "",
  "microbatch_N": "",
  "group_N": "",
  "load_NGE": "GE",
  "planned_NG": "G",
  "after_NG": "G",
  "floor_N": "",
  "replica_expert_NGS": "GS",
  "replica_parent_NGS": "GS",
  "replica_load_NGS": "GS",
  "replica_bytes_N": "",
  "remote_N": "",
  "rounds_N": "",
  "masked_N": "",
  "invalid_N": "",
}
KEYS = ("step_N", "layer_N", "microbatch_N", "group_N")
_TEXT, _FLOAT = "layer_N", "replica_bytes_N"
_FROM_MINUS_ONE = {"replica_expert_NGS": "E", "replica_parent_NGS": "G"}

_TYPES = {
  "name": str,
  "num_ranks": int,
  "num_experts": int,
  "replica_slots": int,
  "measured": bool,
  "token_bytes": int,
  "config": dict,
  "metadata": dict,
}

Columns = dict[str, np.ndarray]


class TraceError(ValueError):
  """A folder is no trace that this version can read, or does not fit what is to be added."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
  """What holds for every record of a trace.

  Attributes:
    name: of the run, for people.
    num_ranks: G.
    num_experts: E.
    replica_slots: S.
    measured: ``after_NG`` was counted by a layer; otherwise it is the plan's answer.
    token_bytes: of one token's activations on the way to its experts, 0 if unknown.
    config: how the layers were balanced, in words.
    metadata: the user's.
  """

  name: str
  num_ranks: int
  num_experts: int
  replica_slots: int
  measured: bool = True
  token_bytes: int = 0
  config: dict[str, Any] = dataclasses.field(default_factory=dict)
  metadata: dict[str, Any] = dataclasses.field(default_factory=dict)

  @property
  def axes(self) -> dict[str, int]:
    return {"G": self.num_ranks, "E": self.num_experts, "S": self.replica_slots}


def write_manifest(folder: pathlib.Path, manifest: Manifest) -> None:
  """Writes ``trace.json``; there is the whole file or none."""
  values = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(manifest)}
  _write_whole(folder / MANIFEST, json.dumps(values, indent=2, default=str).encode() + b"\n")


def read_manifest(folder: pathlib.Path) -> Manifest:
  """Reads ``trace.json``.

  Raises:
    TraceError: there is none, or not one of this version.
  """
  path = folder / MANIFEST
  try:
    values = json.loads(path.read_bytes())
  except FileNotFoundError:
    raise TraceError(_what_it_is(folder)) from None
  except NotADirectoryError:
    raise TraceError(f"{folder}: expected the folder of a trace, got a file") from None
  except OSError as error:
    raise TraceError(f"{path}: expected a readable file, got: {error.strerror}") from None
  except ValueError:
    raise TraceError(
      f"{path}: expected the JSON of a trace; it is damaged or of another program"
    ) from None
  if not isinstance(values, dict) or values.get("format") != FORMAT:
    raise TraceError(f'{path}: expected "format": "{FORMAT}"; it is of another program')
  if values.get("version") != VERSION:
    raise TraceError(
      f"{path}: expected version {VERSION}, got {values.get('version')!r}; read it with the "
      "version of ultraep_jax that wrote it"
    )
  return _checked(path, values)


def _what_it_is(folder: pathlib.Path) -> str:
  if not folder.exists():
    return f"{folder}: expected the folder of a trace, got nothing there"
  text = f"{folder}: expected a trace (a folder with {MANIFEST}), got none"
  if any(folder.glob("router_trace_rank*.jsonl")):
    return text + "; for Megatron's router traces see `python -m ultraep_jax trace import`"
  traces = sorted(str(path.parent) for path in folder.glob(f"*/{MANIFEST}"))
  if traces:
    return text + f"; there are traces in {', '.join(traces[:3])}"
  return text + "; a recorder writes it with its first records"


def _checked(path: pathlib.Path, values: dict[str, Any]) -> Manifest:
  known = {name: values.get(name) for name in _TYPES}
  for name, expected in _TYPES.items():
    if type(known[name]) is not expected:
      raise TraceError(f"{path}: {name}: expected {expected.__name__}, got {known[name]!r:.40}")
  manifest = Manifest(**known)  # pyright: ignore[reportArgumentType]
  ranks, experts = manifest.num_ranks, manifest.num_experts
  if ranks < 1 or experts < ranks or experts % ranks:
    raise TraceError(f"{path}: expected E a positive multiple of G, got E = {experts}, G = {ranks}")
  if manifest.replica_slots < 0 or manifest.token_bytes < 0:
    raise TraceError(f"{path}: replica_slots, token_bytes: expected no negative value")
  return manifest


def write_chunk(folder: pathlib.Path, index: int, columns: Columns) -> int:
  """Writes a chunk; it has its name only when it is whole.

  Another recorder of the same folder may have taken the number: returned is the one it got, the
  first that is free.
  """
  arrays: dict[str, Any] = {name: _narrow(column) for name, column in columns.items()}
  temporary = folder / f"{uuid.uuid4().hex}.partial"
  with temporary.open("xb") as file:
    np.savez_compressed(file, **arrays)
    file.flush()
    os.fsync(file.fileno())
  while True:
    path = folder / CHUNKS.replace("*", f"{index:08d}")
    try:
      os.link(temporary, path)
    except FileExistsError:
      index += 1
      continue
    except OSError:  # no links on this file system
      temporary.replace(path)
      return index
    temporary.unlink()
    return index


def read_chunk(path: pathlib.Path, manifest: Manifest) -> Columns:
  """Reads and checks a chunk.

  Raises:
    TraceError: it is damaged, or its columns are not what the manifest and the format say.
  """
  try:
    with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
      columns = {name: file[name] for name in COLUMNS}
  except KeyError as error:
    raise TraceError(f"{path.name}: expected the columns of a trace, got none {error}") from None
  except Exception as error:  # damage comes out of zip and NumPy in many ways
    raise TraceError(f"{path.name}: expected a whole chunk, got a damaged one: {error}") from None
  for name, column in columns.items():
    columns[name] = check_column(path.name, name, column, len(columns["step_N"]), manifest)
  return columns


def check_column(
  where: str, name: str, column: np.ndarray, count: int, manifest: Manifest
) -> np.ndarray:
  """The column in the type it is read as.

  Raises:
    TraceError: a shape, a type or a value is not as it must be.
  """
  shape = (count, *(manifest.axes[axis] for axis in COLUMNS[name]))
  if column.shape != shape:
    raise TraceError(f"{where}: {name}: expected shape {shape}, got {column.shape}")
  kinds = "U" if name == _TEXT else "f" if name == _FLOAT else "iu"
  if column.dtype.kind not in kinds:
    raise TraceError(f"{where}: {name}: expected another type than {column.dtype}")
  if name == _TEXT or not column.size:
    return column.astype(np.int32) if name not in (_TEXT, _FLOAT) else column
  if name == _FLOAT and not np.isfinite(column).all():
    raise TraceError(
      f"{where}: {name}: expected finite values, got {column[~np.isfinite(column)][0]}"
    )
  least, most = column.min(), column.max()
  floor, bound = (0, math.inf if name == _FLOAT else 2**31)
  if name in _FROM_MINUS_ONE:
    floor, bound = -1, manifest.axes[_FROM_MINUS_ONE[name]]
  elif name == "step_N":
    floor, bound = -(2**63), 2**63
  if least < floor or most >= bound:
    wrong = least if least < floor else most
    raise TraceError(f"{where}: {name}: expected values in [{floor}, {bound}), got {wrong}")
  return column.astype({"step_N": np.int64, _FLOAT: np.float64}.get(name, np.int32))


def chunks(folder: pathlib.Path) -> list[pathlib.Path]:
  """The chunks, in the order of writing."""
  return sorted(folder.glob(CHUNKS))


def _narrow(column: np.ndarray) -> np.ndarray:
  """Integers in the least type that holds them: smaller, and faster to compress."""
  if column.dtype.kind not in "iu" or not column.size:
    return column
  least, most = int(column.min()), int(column.max())
  for dtype in (np.int8, np.uint8, np.int16, np.uint16, np.int32):
    if np.iinfo(dtype).min <= least and most <= np.iinfo(dtype).max:
      return column.astype(dtype)
  return column


def _write_whole(path: pathlib.Path, content: bytes) -> None:
  temporary = path.with_suffix(".partial")
  with temporary.open("wb") as file:
    file.write(content)
    file.flush()
    os.fsync(file.fileno())
  temporary.replace(path)
