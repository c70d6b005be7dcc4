"""Reading a trace back, as NumPy arrays or a pandas table."""

import dataclasses
import numbers
import pathlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ultraep_jax.advice import recorded_config, with_domains
from ultraep_jax.config import BalanceConfig
from ultraep_jax.trace import disk
from ultraep_jax.trace.format import COLUMNS, Columns, Manifest, TraceError, shape_of
from ultraep_jax.types import Plan

if TYPE_CHECKING:
  import pandas as pd


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Trace:
  """Records, one for each layer, microbatch and token group of each step; axis N.

  Records are in order of step, then microbatch, then as the layers were first recorded, then
  group. Axes as in ``ultraep_jax.types``.

  Attributes:
    manifest: what holds for all records: name, G, E, S, configuration.
    problems: what could not be read, in words. Empty for a sound trace.
    step_N: ``[N]`` int64.
    layer_N: ``[N]`` text.
    microbatch_N: ``[N]`` int32.
    group_N: ``[N]`` int32.
    load_NGE: ``[N, G, E]`` int32, the load matrices: what ``plan_quotas`` and simulations take.
    planned_NG: ``[N, G]`` int32, assignments that the plan gives each rank.
    after_NG: ``[N, G]`` int32, assignments that went to each rank (the plan's in a trace that
      was imported).
    floor_N: ``[N]`` int32, the lowest maximum load that replication inside domains can reach.
    replica_expert_NGS: ``[N, G, S]`` int32, the expert in each replica slot, −1 if empty.
    replica_parent_NGS: ``[N, G, S]`` int32, the rank that sends the slot its copy, −1 if empty.
    replica_load_NGS: ``[N, G, S]`` int32, assignments that the slot serves.
    replica_bytes_N: ``[N]`` float64, bytes of all copies.
    remote_N: ``[N]`` int32, assignments computed on another rank than their token's.
    rounds_N: ``[N]`` int32.
    masked_N: ``[N]`` int32.
    invalid_N: ``[N]`` int32.
  """

  manifest: Manifest
  problems: tuple[str, ...] = ()
  step_N: np.ndarray
  layer_N: np.ndarray
  microbatch_N: np.ndarray
  group_N: np.ndarray
  load_NGE: np.ndarray
  planned_NG: np.ndarray
  after_NG: np.ndarray
  floor_N: np.ndarray
  replica_expert_NGS: np.ndarray
  replica_parent_NGS: np.ndarray
  replica_load_NGS: np.ndarray
  replica_bytes_N: np.ndarray
  remote_N: np.ndarray
  rounds_N: np.ndarray
  masked_N: np.ndarray
  invalid_N: np.ndarray

  def __len__(self) -> int:
    return len(self.step_N)

  def __getitem__(self, index: Any) -> "Trace":
    """The records that a slice, a mask or indices along N choose."""
    columns = {name: getattr(self, name)[index] for name in COLUMNS}
    if columns["step_N"].ndim != 1:
      raise TypeError(f"index: expected a slice, a mask or a list of indices, got {index!r}")
    return dataclasses.replace(self, **columns)

  @property
  def config(self) -> BalanceConfig:
    """What decided how even plans could be; domains that the mesh settled are found by loads."""
    recorded = recorded_config(self.manifest.config)
    return with_domains(recorded, self.load_NGE, self.floor_N, self.replica_expert_NGS)

  @property
  def layers(self) -> list[str]:
    """The names of the layers, in the order in which they were recorded."""
    return list(dict.fromkeys(self.layer_N.tolist()))

  @property
  def expert_load_NE(self) -> np.ndarray:
    """Assignments per expert."""
    return self.load_NGE.sum(axis=1)

  @property
  def home_load_NE(self) -> np.ndarray:
    """Assignments of each expert that its home keeps: those that no copy serves."""
    return self.expert_load_NE - _served(
      self.replica_expert_NGS, self.replica_load_NGS, self.manifest
    )

  @property
  def before_NG(self) -> np.ndarray:
    """Assignments that home placement would give each rank."""
    return self.expert_load_NE.reshape(len(self), self.manifest.num_ranks, -1).sum(axis=2)

  @property
  def imbalance_before_N(self) -> np.ndarray:
    """Busiest rank over mean rank under home placement; 1 without any assignment."""
    return self._imbalance(self.before_NG.max(axis=1))

  @property
  def imbalance_after_N(self) -> np.ndarray:
    """Busiest rank over mean rank as computed."""
    return self._imbalance(self.after_NG.max(axis=1))

  @property
  def imbalance_floor_N(self) -> np.ndarray:
    """The least ``imbalance_after_N`` that the domains allow."""
    return self._imbalance(self.floor_N)

  @property
  def replicas_N(self) -> np.ndarray:
    """Filled replica slots."""
    return (self.replica_expert_NGS >= 0).sum(axis=(1, 2))

  @property
  def relayed_N(self) -> np.ndarray:
    """Copies that another rank than their expert's home sends."""
    home_NGS = self.replica_expert_NGS // (self.manifest.num_experts // self.manifest.num_ranks)
    away = (self.replica_expert_NGS >= 0) & (self.replica_parent_NGS != home_NGS)
    return away.sum(axis=(1, 2))

  @property
  def max_fanout_N(self) -> np.ndarray:
    """The most copies that one rank sends along the plan's trees."""
    ranks = np.arange(self.manifest.num_ranks)
    sent_NG = (self.replica_parent_NGS[..., None] == ranks).sum(axis=(1, 2))
    return sent_NG.max(axis=1)

  def plan(self, index: int) -> Plan:
    """The plan of one record, of NumPy arrays."""
    expert_GS, parent_GS = self.replica_expert_NGS[index], self.replica_parent_NGS[index]
    num_ranks, num_experts = self.load_NGE.shape[1:]
    quota_EG = np.zeros((num_experts, num_ranks), np.int32)
    rank, slot = np.nonzero(expert_GS >= 0)
    np.add.at(quota_EG, (expert_GS[rank, slot], rank), self.replica_load_NGS[index, rank, slot])
    expert = np.arange(num_experts)
    kept_E = self.load_NGE[index].sum(axis=0) - quota_EG.sum(axis=1)
    quota_EG[expert, expert // (num_experts // num_ranks)] += kept_E
    values: Any = (expert_GS, quota_EG, parent_GS)
    return Plan(*values)

  def to_pandas(self) -> "pd.DataFrame":
    """A table of a row per record: the keys and every number that is not an array.

    Raises:
      ImportError: pandas is not installed.
    """
    import pandas as pd

    total_N = np.maximum(self.after_NG.sum(axis=1), 1)
    values = {
      "step": self.step_N,
      "layer": self.layer_N,
      "microbatch": self.microbatch_N,
      "group": self.group_N,
      "imbalance_before": self.imbalance_before_N,
      "imbalance_after": self.imbalance_after_N,
      "imbalance_floor": self.imbalance_floor_N,
      "busiest_before": self.before_NG.argmax(axis=1),
      "busiest_after": self.after_NG.argmax(axis=1),
      "replicas": self.replicas_N,
      "relayed": self.relayed_N,
      "max_fanout": self.max_fanout_N,
      "replica_megabytes": self.replica_bytes_N / 1e6,
      "remote_fraction": self.remote_N / total_N,
      "rounds": self.rounds_N,
      "masked_assignments": self.masked_N,
      "invalid_assignments": self.invalid_N,
    }
    return pd.DataFrame(values)

  def _imbalance(self, busiest_N: np.ndarray) -> np.ndarray:
    mean_N = self.after_NG.mean(axis=1)
    return np.where(mean_N == 0, 1.0, busiest_N / np.where(mean_N == 0, 1.0, mean_N))


def read(
  path: str | pathlib.Path, *, steps: Callable[[np.ndarray], np.ndarray] | slice | None = None
) -> Trace:
  """Reads a trace.

  A chunk that is damaged is left out and named in ``Trace.problems``. Of records of the same
  step, layer, microbatch and group, the last written counts.

  Args:
    path: the trace's folder.
    steps: only these: ``slice(100, 200)`` or a function from steps to a mask. Chunks are
      reduced one by one, so a part of a long trace needs little memory.

  Raises:
    TraceError: the folder is no trace of this version, or nothing in it can be read.
    TypeError: ``steps`` is neither a slice of numbers nor a function.
    ValueError: the slice has a stride.
  """
  folder = pathlib.Path(path)
  keep = _mask_of(steps)
  manifest = disk.read_manifest(folder)
  parts: list[Columns] = []
  problems: list[str] = []
  for file in disk.chunks(folder):
    try:
      columns = disk.read_chunk(file, manifest)
      wrong = _inconsistent(columns, manifest)
      if wrong:
        raise TraceError(f"{file.name}: {wrong}")
    except TraceError as error:
      problems.append(str(error))
      continue
    mask = keep(columns["step_N"])
    parts.append({name: column[mask] for name, column in columns.items()})
  if problems and not parts:
    raise TraceError(f"{folder}: expected readable chunks, got none: {'; '.join(problems[:3])}")
  columns = _join(parts, manifest)
  return Trace(manifest=manifest, problems=tuple(problems), **columns)


def _mask_of(
  steps: Callable[[np.ndarray], np.ndarray] | slice | None,
) -> Callable[[np.ndarray], np.ndarray]:
  if callable(steps):
    return steps
  if steps is None:
    return lambda step_N: np.ones(step_N.shape, bool)
  if not isinstance(steps, slice):
    raise TypeError(f"steps: expected a slice or a function, got {type(steps).__name__}")
  if steps.step not in (None, 1):
    raise ValueError(f"steps: expected a slice without a stride, got {steps}")
  for bound in (steps.start, steps.stop):
    if bound is not None and not isinstance(bound, numbers.Real):
      raise TypeError(f"steps: expected numbers in the slice, got {type(bound).__name__}")
  low = -np.inf if steps.start is None else steps.start
  high = np.inf if steps.stop is None else steps.stop
  return lambda step_N: (step_N >= low) & (step_N < high)


def _join(parts: list[Columns], manifest: Manifest) -> Columns:
  """All records in order, the last written of each key."""
  if not parts:
    return {
      name: np.zeros(shape_of(name, 0, manifest), str if name == "layer_N" else np.int32)
      for name in COLUMNS
    }
  columns = {name: np.concatenate([part[name] for part in parts]) for name in COLUMNS}
  layers = {name: i for i, name in enumerate(dict.fromkeys(columns["layer_N"].tolist()))}
  layer = np.array([layers[name] for name in columns["layer_N"].tolist()], np.int64)
  keys = np.stack(
    [columns["step_N"], columns["microbatch_N"], layer, columns["group_N"]], axis=1
  ).astype(np.int64)
  # `unique` sorts, and returns the first of equals: the last written, of the reversed.
  _, first = np.unique(keys[::-1], axis=0, return_index=True)
  order = len(keys) - 1 - first
  return {name: column[order] for name, column in columns.items()}


def _inconsistent(columns: Columns, manifest: Manifest) -> str | None:
  """Why the loads of a chunk cannot belong together, or None."""
  load_NGE, expert_NGS = columns["load_NGE"].astype(np.int64), columns["replica_expert_NGS"]
  served_NE = _served(expert_NGS, columns["replica_load_NGS"], manifest)
  total_N = load_NGE.sum(axis=(1, 2))
  for name in ("planned_NG", "after_NG"):
    if (columns[name].sum(axis=1, dtype=np.int64) != total_N).any():
      return f"{name}: expected the sum of load_NGE in each record"
  if (columns["replica_load_NGS"][expert_NGS < 0] != 0).any():
    return "replica_load_NGS: expected 0 in empty slots"
  if (served_NE > load_NGE.sum(axis=1)).any():
    return "replica_load_NGS: expected at most the load of each expert"
  return None


def _served(expert_NGS: np.ndarray, tokens_NGS: np.ndarray, manifest: Manifest) -> np.ndarray:
  """Assignments of each expert that copies serve, ``[N, E]`` int64."""
  served_NE = np.zeros((len(expert_NGS), manifest.num_experts), np.int64)
  n, g, s = np.nonzero(expert_NGS >= 0)
  np.add.at(served_NE, (n, expert_NGS[n, g, s]), tokens_NGS[n, g, s])
  return served_NE
