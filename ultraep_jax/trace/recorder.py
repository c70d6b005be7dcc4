"""Writing a trace while a model trains."""

import concurrent.futures
import dataclasses
import logging
import operator
import pathlib
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

import jax
import numpy as np

from ultraep_jax import advice
from ultraep_jax.config import BalanceConfig, check_int, check_type, strategy_name
from ultraep_jax.files import make_folder
from ultraep_jax.mesh import axes_of
from ultraep_jax.trace import disk
from ultraep_jax.trace import format as form
from ultraep_jax.trace.choices import check_choices, check_count, write_choices
from ultraep_jax.trace.format import Columns, Manifest, TraceError
from ultraep_jax.types import LayerStats

_log = logging.getLogger("ultraep_jax")
_AXES = ("layer", "microbatch", "group")
# What the warning of a run is made from.
_LIMITED = ("after_NG", "replica_expert_NGS", "rounds_N")

# What a record keeps of the statistics. The loads before balancing follow from the load matrix.
_FIELDS = {
  "load_NGE": "load_GE",
  "planned_NG": "load_planned_G",
  "after_NG": "load_after_G",
  "floor_N": "load_floor",
  "replica_expert_NGS": "replica_expert_GS",
  "replica_parent_NGS": "replica_parent_GS",
  "replica_load_NGS": "replica_load_GS",
  "replica_bytes_N": "replica_bytes",
  "remote_N": "remote_assignments",
  "rounds_N": "rounds",
  "masked_N": "masked",
  "invalid_N": "invalid",
}


class _Call(NamedTuple):
  """The arguments of one ``record``, for one layer or a stack of them."""

  step: int
  layer: str
  microbatch: int
  stats: LayerStats
  axes: tuple[str, ...]
  expert_index: jax.Array | None


class Recorder:
  """Appends what layers did to a trace. A context manager.

  ``record`` only keeps references; a thread fetches, compresses and writes them once
  ``flush_seconds`` have passed or ``flush_bytes`` are held. A run that is killed loses what came
  after the last flush. Once a run, a warning is logged if layers run several rounds or stay uneven
  with all slots in use. A folder that has a trace is continued; a record of the same step, layer,
  microbatch and group replaces the earlier one when read, as after going back to a checkpoint.

  In a program of several processes only process 0 writes; the others' calls do nothing.
  """

  def __init__(
    self,
    path: str | pathlib.Path,
    *,
    name: str | None = None,
    config: BalanceConfig | None = None,
    token_bytes: int = 0,
    metadata: Mapping[str, Any] | None = None,
    every: int = 1,
    flush_seconds: float = 30.0,
    flush_bytes: int = 32 << 20,
  ):
    """Opens the trace; the files appear with the first flush.

    Args:
      path: the trace's folder.
      name: of the run; the folder's by default.
      config: of the layers, to be shown beside the loads.
      token_bytes: of one token's activations, ``D * itemsize``, to show traffic in bytes; of what
        crosses to its experts, if ``BalanceConfig.dispatch_dtype`` is another dtype.
      metadata: to keep with the trace, JSON; NaN, infinities, paths and the like as texts.
      every: keep only steps that are a multiple of this.
      flush_seconds: how much a killed run may lose; 0 writes at every call of ``record``.
      flush_bytes: of statistics held in (device) memory before they are written.

    Raises:
      ValueError: a number is out of range, or the metadata cannot be JSON.
      TypeError: the configuration or the metadata is none, or a number is no integer.
      TraceError: the folder has something else than a trace of this version.
      OSError: the folder cannot be made or written to.
    """
    check_int("every", every, minimum=1)
    if not flush_seconds >= 0:
      raise ValueError(f"flush_seconds: expected at least 0, got {flush_seconds}")
    if config is not None:
      check_type("config", config, BalanceConfig)
    check_type("metadata", {} if metadata is None else metadata, Mapping)
    self._folder = pathlib.Path(path)
    self._every, self._flush_seconds, self._flush_bytes = every, flush_seconds, flush_bytes
    self._calls: list[_Call] = []
    self._bytes, self._flushed = 0, time.monotonic()
    self._writes: concurrent.futures.Future[None] | None = None
    self._closed, self._active = False, jax.process_index() == 0
    self._warned = False
    values = {
      "config": {} if config is None else _describe(config),
      "metadata": dict(metadata or {}),
    }
    self._about = {
      "name": (self._folder.name if name is None else str(name)).encode(errors="replace").decode(),
      "token_bytes": _integer("token_bytes", token_bytes, 0, 2**31),
      **form.as_json("metadata", values),
    }
    if not self._active:
      return
    make_folder(self._folder)
    self._manifest = disk.manifest_there(self._folder)
    self._index = disk.next_chunk(self._folder)
    self._executor = concurrent.futures.ThreadPoolExecutor(1, "ultraep_trace")

  def record(
    self,
    step: int,
    stats: LayerStats | Mapping[str, LayerStats],
    *,
    microbatch: int = 0,
    axes: str | Sequence[str] = ("group",),
    expert_index: jax.Array | Mapping[str, jax.Array] | None = None,
  ) -> None:
    """Keeps the statistics of one step, or of one microbatch of it, to be written.

    Args:
      step: of training, from 0.
      stats: of each layer by name, or of one layer (or a stack of them, with axes). The layers of
        a stack are named by its name and their index in it, as far as there are these.
      microbatch: within the step.
      axes: the leading axes of the statistics, of ``"layer"``, ``"microbatch"`` and ``"group"``, or
        the one.
        ``sharded_moe`` and the modules add a group axis; a ``scan`` puts its own before it, e.g.
        ``("microbatch", "group")``. For ``moe`` inside your own ``shard_map`` say ``()``.
      expert_index: ``[..., K]`` integers, the experts that every token chose, by layer as
        ``stats``, with the same axes but the group's; ``read_choices`` gives them back. They must
        be as many as the statistics count, which is seen when they are written. They take a few
        bytes for each token and layer.

    Raises:
      ValueError: ``axes`` does not fit the statistics, a number is out of range, or a name is no
        text.
      TypeError: the statistics are none, or a number is no integer.
      RuntimeError: the recorder is closed.
      TraceError: an earlier write failed.
    """
    self._check_open()
    step = _integer("step", step, 0, 2**63)
    microbatch = _integer("microbatch", microbatch, 0, 2**31)
    given: Any = tuple(axes) if isinstance(axes, list) else axes
    axes = axes_of(given, "axes")
    if len(set(axes)) != len(axes) or not set(axes) <= set(_AXES):
      raise ValueError(f"axes: expected distinct names of {_AXES}, got {axes}")
    if not self._active or step % self._every:
      return
    layers = stats if isinstance(stats, Mapping) else {"": stats}
    chosen = {} if expert_index is None else expert_index
    chosen = chosen if isinstance(chosen, Mapping) else {"": chosen}
    if unknown := set(chosen) - set(layers):
      raise ValueError(f"expert_index: expected layers of stats, got {sorted(map(str, unknown))}")
    for layer, leaves in layers.items():
      _check_name(str(layer))
      _check_stats(leaves, axes)
      if layer in chosen:
        _check_choices(chosen[layer], leaves, axes)
    for layer, leaves in layers.items():
      call = _Call(step, str(layer), microbatch, leaves, axes, chosen.get(layer))
      self._calls.append(call)
      self._bytes += sum(leaf.nbytes for leaf in jax.tree.leaves((leaves, call.expert_index)))
    late = time.monotonic() - self._flushed >= self._flush_seconds
    if late or self._bytes >= self._flush_bytes:
      self._start_write()

  def flush(self) -> None:
    """Writes everything recorded so far and waits until it is on disk.

    Raises:
      RuntimeError: the recorder is closed.
      TraceError: it cannot be written, or does not fit the trace.
    """
    self._check_open()
    if self._active:
      self._start_write()
      self._finish_write()

  def close(self) -> None:
    """Flushes and ends the writing thread. Once closed it does nothing.

    Raises:
      TraceError: as ``flush``; the recorder is closed then, too.
    """
    if self._closed:
      return
    try:
      self.flush()
    finally:
      self._closed = True
      if self._active:
        self._executor.shutdown()

  def __enter__(self) -> Self:
    return self

  def __exit__(
    self,
    kind: type[BaseException] | None,
    error: BaseException | None,
    traceback: TracebackType | None,
  ) -> None:
    self.close()

  def _check_open(self) -> None:
    if self._closed:
      raise RuntimeError("recorder: expected an open one, got one that was closed")

  def _start_write(self) -> None:
    self._finish_write()  # at most one at a time, so that memory stays bounded
    calls, self._calls, self._bytes = self._calls, [], 0
    self._flushed = time.monotonic()
    if calls:
      self._writes = self._executor.submit(self._write, calls)

  def _finish_write(self) -> None:
    writes, self._writes = self._writes, None
    if writes is not None:
      try:
        writes.result()
      except OSError as error:
        raise TraceError(f"{self._folder}: expected to write, got: {error}") from error

  def _write(self, calls: list[_Call]) -> None:
    """Runs in the thread."""
    fetched = _fetch(calls)
    columns = _columns(calls, fetched)
    _, num_ranks, num_experts = columns["load_NGE"].shape
    shape = {
      "num_ranks": num_ranks,
      "num_experts": num_experts,
      "replica_slots": columns["replica_expert_NGS"].shape[2],
    }
    manifest = Manifest(**shape, **self._about)
    forms = {name: (column.shape, column.dtype) for name, column in columns.items()}
    form.check_forms(str(self._folder), forms, manifest)
    for name, column in columns.items():
      form.check_values(str(self._folder), name, column, manifest)
    if self._manifest is None:
      self._manifest = disk.write_manifest(self._folder, manifest)
    there = {name: getattr(self._manifest, name) for name in shape}
    if there != shape:
      raise TraceError(f"{self._folder}: expected loads of {there}, as in the trace, got {shape}")
    choices = _choices(calls, fetched)
    for chosen in choices.values():
      check_choices(chosen, num_experts)
    self._index = disk.write_chunks(self._folder, self._index, columns)
    for (step, microbatch), chosen in choices.items():
      write_choices(self._folder, step, microbatch, chosen)
    if not self._warned:
      warning = advice.limits(*(columns[name] for name in _LIMITED))
      self._warned = bool(warning)
      if warning:
        _log.warning("%s: %s", self._folder, warning)


def _choices(
  calls: list[_Call], fetched: list[LayerStats]
) -> dict[tuple[int, int], dict[str, np.ndarray]]:
  """What each layer chose, by step and microbatch."""
  found: dict[tuple[int, int], dict[str, np.ndarray]] = {}
  for call, stats in zip(calls, fetched, strict=True):
    if call.expert_index is None:
      continue
    axes = [axis for axis in call.axes if axis != "group"]
    index = np.asarray(jax.device_get(call.expert_index))
    assignments = np.sum(stats.load_GE, axis=(-2, -1), dtype=np.int64)
    assignments = np.asarray(assignments + stats.masked + stats.invalid)
    if "group" in call.axes:
      assignments = assignments.sum(axis=call.axes.index("group"))
    for place in np.ndindex(index.shape[: len(axes)]):
      position = dict(zip(axes, place, strict=True))
      layer = call.layer or "0"
      if "layer" in position:
        layer = f"{call.layer} {position['layer']}".lstrip()
      key = call.step, call.microbatch + position.get("microbatch", 0)
      check_count(layer, index[place], int(assignments[place]))
      found.setdefault(key, {})[layer] = index[place]
  return found


def _columns(calls: list[_Call], fetched: list[LayerStats]) -> Columns:
  """A row per layer, microbatch and group of each call."""
  parts = [_rows(call, stats) for call, stats in zip(calls, fetched, strict=True)]
  shapes = {part["load_NGE"].shape[1:] + part["replica_expert_NGS"].shape[2:] for part in parts}
  if len(shapes) > 1:
    raise TraceError(f"stats: expected layers of one [G, E, S], got {sorted(shapes)}")
  return {name: np.concatenate([part[name] for part in parts]) for name in form.COLUMNS}


def _fetch(calls: list[_Call]) -> list[LayerStats]:
  return jax.device_get([call.stats for call in calls])


def _rows(call: _Call, stats: LayerStats) -> Columns:
  lead = stats.load_GE.shape[:-2]
  count = int(np.prod(lead, dtype=np.int64))
  position = dict(zip(call.axes, np.indices(lead).reshape(len(lead), count), strict=True))
  zeros = np.zeros(count, np.int32)
  index_N = position.get("layer")
  names = [call.layer or "0"] * count
  if index_N is not None:
    names = [f"{call.layer} {i}".lstrip() for i in index_N]
  return {
    "step_N": np.full(count, call.step, np.int64),
    "layer_N": np.array(names, str),
    "microbatch_N": position.get("microbatch", zeros) + call.microbatch,
    "group_N": position.get("group", zeros),
  } | {
    column: np.asarray(getattr(stats, field)).reshape(
      count, *getattr(stats, field).shape[len(lead) :]
    )
    for column, field in _FIELDS.items()
  }


def _integer(name: str, value: Any, least: int, bound: int) -> int:
  """Of Python, NumPy or JAX."""
  try:
    number = operator.index(value)
  except TypeError as error:
    raise TypeError(f"{name}: expected an integer, got {type(value).__name__}") from error
  if not least <= number < bound:
    raise ValueError(f"{name}: expected a value in [{least}, {bound}), got {number}")
  return number


def _check_name(layer: str) -> None:
  """NumPy keeps no zeros at the end of a text, and half of a surrogate pair cannot be printed."""
  try:
    layer.encode()
  except UnicodeEncodeError:
    raise ValueError(f"stats: expected names of layers that are text, got {layer!r}") from None
  if "\0" in layer:
    raise ValueError(f"stats: expected names of layers without a zero, got {layer!r}")


def _check_stats(stats: LayerStats, axes: tuple[str, ...]) -> None:
  if not isinstance(stats, LayerStats):
    raise TypeError(f"stats: expected LayerStats by layer, got {type(stats).__name__}")
  if stats.load_GE.ndim != len(axes) + 2:
    raise ValueError(
      f"axes: expected the {stats.load_GE.ndim - 2} leading axes of the statistics, got {axes}"
    )
  lead = stats.load_GE.shape[: len(axes)]
  for field, leaf in zip(stats._fields, stats, strict=True):
    if leaf.shape[: len(axes)] != lead:
      raise ValueError(f"{field}: expected the leading axes {lead}, got shape {leaf.shape}")
    _check_readable("stats", leaf)


def _check_choices(expert_index: jax.Array, stats: LayerStats, axes: tuple[str, ...]) -> None:
  lead = tuple(n for n, axis in zip(stats.load_GE.shape, axes, strict=False) if axis != "group")
  if expert_index.shape[: len(lead)] != lead or expert_index.ndim <= len(lead):
    raise ValueError(
      f"expert_index: expected the leading axes {lead} of stats, got shape {expert_index.shape}"
    )
  _check_readable("expert_index", expert_index)


def _check_readable(name: str, leaf: jax.Array) -> None:
  if not getattr(leaf, "is_fully_addressable", True) and not leaf.is_fully_replicated:
    raise ValueError(
      f"{name}: expected arrays that this process can read, got some of other processes; "
      "gather them with jax.experimental.multihost_utils.process_allgather"
    )


def _describe(config: BalanceConfig) -> dict[str, Any]:
  values = dataclasses.asdict(dataclasses.replace(config, device=None))
  if config.device is not None:
    values["device"] = config.device.name
  values["strategy"] = strategy_name(config.strategy)
  return values
