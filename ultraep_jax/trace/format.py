"""The format of a trace: a manifest, and chunks of records that are written once.

::

  trace.json         {"format": "ultraep_jax trace", "version": 1, "num_ranks": ..., ...}
  chunk-00000000.npz  columns of the first records
  chunk-00000001.npz  ...

A record is one layer's run on one token group's microbatch. A chunk is a compressed NPZ file:
NumPy is here anyway, any program reads it, each column carries a checksum and nothing in it is
executed. A chunk gets its name only when it is complete and on disk, and is never touched again.
``ultraep_jax.trace.disk`` reads and writes the files.
"""

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from ultraep_jax.advice import recorded_config

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
_READ_AS = {"step_N": np.int64, _FLOAT: np.float64}  # the others as int32

# Of a chunk's columns as they are read. More is neither written nor read, whatever a file promises.
CHUNK_BYTES = 1 << 29

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
Forms = dict[str, tuple[tuple[int, ...], np.dtype]]  # the shape and type of each column


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


def manifest_of(where: str, values: Any) -> Manifest:
  """The manifest that a file's JSON means.

  Raises:
    TraceError: it is none of this version, or nothing can have its sizes.
  """
  if not isinstance(values, dict) or values.get("format") != FORMAT:
    raise TraceError(f'{where}: expected "format": "{FORMAT}"; it is of another program')
  if values.get("version") != VERSION:
    raise TraceError(
      f"{where}: expected version {VERSION}, got {values.get('version')!r:.40}; read it with the "
      "version of ultraep_jax that wrote it"
    )
  known = {name: values.get(name) for name in _TYPES}
  for name, expected in _TYPES.items():
    if type(known[name]) is not expected:
      raise TraceError(f"{where}: {name}: expected {expected.__name__}, got {known[name]!r:.40}")
  manifest = Manifest(**known)  # pyright: ignore[reportArgumentType]
  ranks, experts = manifest.num_ranks, manifest.num_experts
  if ranks < 1 or experts < ranks or experts % ranks:
    raise TraceError(
      f"{where}: expected E a positive multiple of G, got E = {experts!r:.40}, G = {ranks!r:.40}"
    )
  if manifest.replica_slots < 0 or manifest.token_bytes < 0:
    raise TraceError(f"{where}: replica_slots, token_bytes: expected no negative value")
  if manifest.token_bytes >= 2**31:
    raise TraceError(f"{where}: token_bytes: expected less than {2**31}")
  try:
    recorded_config(manifest.config).domain_of(ranks)
  except (TypeError, ValueError) as error:
    raise TraceError(f"{where}: config: {error}") from None
  size = sum(_bytes(name, shape_of(name, 1, manifest)) for name in COLUMNS)
  if size > CHUNK_BYTES:
    raise TraceError(f"{where}: expected records of at most {CHUNK_BYTES} bytes, got {size!r:.40}")
  return manifest


def check_json(what: str, values: Any) -> None:
  """Whether ``values`` can be JSON, and printed: no half of a surrogate pair, not nested too deep.

  Raises:
    ValueError: they cannot.
  """
  try:
    json.dumps(values, ensure_ascii=False).encode()
  except (TypeError, ValueError, RecursionError) as error:
    raise ValueError(f"{what}: expected what JSON can say, got: {error}") from None


def as_json(what: str, values: Any) -> Any:
  """What ``trace.json`` keeps of ``values``.

  JSON has neither NaN nor infinities: they are kept as texts, and so is what has a text, such as a
  path or a dtype. Scalars of NumPy and JAX are numbers.

  Raises:
    ValueError: there is no JSON of them, or a text is but an address in memory.
  """
  try:
    plain = json.loads(json.dumps(values, default=_plain), parse_constant=str)
  except (TypeError, ValueError, RecursionError) as error:
    raise ValueError(f"{what}: expected what JSON can say, got: {error}") from None
  check_json(what, plain)
  return plain


def _plain(value: Any) -> Any:
  if isinstance(value, np.generic | np.ndarray | jax.Array) and not value.ndim:
    return value.item()
  if isinstance(value, Mapping):
    return dict(value)
  text = str(value)
  if re.search(r"\bat 0x[0-9a-f]+", text):
    raise TypeError(f"{text}, which is an address in memory")
  return text


def shape_of(name: str, count: int, manifest: Manifest) -> tuple[int, ...]:
  """The shape of a column of ``count`` records."""
  return (count, *(manifest.axes[axis] for axis in COLUMNS[name]))


def check_forms(where: str, forms: Forms, manifest: Manifest) -> None:
  """Whether columns of one count of records can have these shapes and types.

  Raises:
    TraceError: they cannot.
  """
  step_shape = forms["step_N"][0]
  if len(step_shape) != 1 or step_shape[0] < 0:
    raise TraceError(f"{where}: step_N: expected one axis, got shape {step_shape}")
  for name, (shape, dtype) in forms.items():
    expected = shape_of(name, step_shape[0], manifest)
    if shape != expected:
      raise TraceError(f"{where}: {name}: expected shape {expected}, got {shape}")
    kinds = "U" if name == _TEXT else "f" if name == _FLOAT else "iu"
    if dtype.kind not in kinds:
      raise TraceError(f"{where}: {name}: expected another type than {dtype}")


def check_values(where: str, name: str, column: np.ndarray, manifest: Manifest) -> np.ndarray:
  """The column in the type it is read as; its form is checked already.

  Raises:
    TraceError: a value is not as it must be.
  """
  if name == _TEXT:
    native = np.ascontiguousarray(column, column.dtype.newbyteorder("="))
    code = native.view(np.uint32) if native.dtype.itemsize else np.zeros(0, np.uint32)
    wrong = code[(code >= 0xD800) & (code < 0xE000) | (code > 0x10FFFF)]
    if wrong.size:
      raise TraceError(f"{where}: {name}: expected text, got the code point {wrong[0]:#x}")
    return native
  if column.size:
    if name == _FLOAT and not np.isfinite(column).all():
      wrong = column[~np.isfinite(column)][0]
      raise TraceError(f"{where}: {name}: expected finite values, got {wrong}")
    least, most = column.min(), column.max()
    floor, bound = (0, 2**63 if name == _FLOAT else 2**31)
    if name in _FROM_MINUS_ONE:
      floor, bound = -1, manifest.axes[_FROM_MINUS_ONE[name]]
    elif name == "step_N":
      floor, bound = -(2**63), 2**63
    if least < floor or most >= bound:
      wrong = least if least < floor else most
      raise TraceError(f"{where}: {name}: expected values in [{floor}, {bound}), got {wrong}")
  return column.astype(_READ_AS.get(name, np.int32))


def check_size(where: str, forms: Forms) -> None:
  """Whether a chunk can be so large.

  Raises:
    TraceError: it cannot.
  """
  size = _size(forms)
  if size > CHUNK_BYTES:
    raise TraceError(f"{where}: expected at most {CHUNK_BYTES} bytes in a chunk, got {size}")


def parts(columns: Columns) -> list[Columns]:
  """Columns in parts that a chunk can hold.

  Raises:
    TraceError: a single record is too large.
  """
  one = {name: ((1, *column.shape[1:]), column.dtype) for name, column in columns.items()}
  check_size("record", one)
  rows = CHUNK_BYTES // _size(one)
  return [
    {name: column[first : first + rows] for name, column in columns.items()}
    for first in range(0, len(columns["step_N"]), rows)
  ]


def _size(forms: Forms) -> int:
  return sum(_bytes(name, shape, dtype) for name, (shape, dtype) in forms.items())


def _bytes(name: str, shape: tuple[int, ...], dtype: np.dtype | None = None) -> int:
  """Of a column as it is read; without its type, of one whose texts are empty."""
  if name == _TEXT:
    return 0 if dtype is None else math.prod(shape) * dtype.itemsize
  return math.prod(shape) * np.dtype(_READ_AS.get(name, np.int32)).itemsize
