"""Router traces of Megatron-LM, as load traces.

Megatron's tracer writes a file ``router_trace_rank{r}.jsonl`` for each rank r, a line per step and
layer with the experts that each token chose: ``{"step": 3, "block": "decoder", "layer": 5,
"rank": 0, "num_tokens": 4096, "topk": 8, "top_indices": [[17, 3, ...], ...]}``.

What it does not say is assumed:

- the ranks of the files are expert-parallel ranks; with ``num_ranks`` below their number, group g
  is the ranks from ``g * num_ranks`` on;
- expert e has its home on rank ``e // (num_experts / num_ranks)`` of the group;
- a second line of the same step and layer in a file is the second microbatch, and so on; behind a
  damaged line that cannot be told, so the step that goes on there is left out;
- no plan was made: the trace has the plans that ``config`` makes of the loads.

What it does say must agree: a line with its file's rank, its own counts and ``num_experts``, and
all lines on the experts of a token.
"""

import collections
import dataclasses
import json
import os
import pathlib
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ultraep_jax.config import BalanceConfig, check_int
from ultraep_jax.files import check_folder, make_folder
from ultraep_jax.planning.capacity import row_capacity
from ultraep_jax.planning.fit import num_slots
from ultraep_jax.planning.plan import plan_quotas
from ultraep_jax.planning.route import slot_sizes
from ultraep_jax.trace import disk
from ultraep_jax.trace.format import COLUMNS, Columns, Manifest, TraceError
from ultraep_jax.trace.reader import Trace, read

_FILE = re.compile(r"router_trace_rank(\d+)\.jsonl")
_PER_CHUNK = 256
MOST_EXPERT_BYTES = 2**40  # a terabyte: a record of 2**22 copies is below 2**63 bytes


class _Choice(NamedTuple):
  """What the tokens of one rank chose in one layer."""

  load_E: np.ndarray
  assignments: int
  masked: int


class _Key(NamedTuple):
  """One layer's run on one microbatch."""

  step: int
  microbatch: int
  layer: str


class _Line(NamedTuple):
  """What a line says, and what must agree with other lines; ``top_k`` is 0 without tokens."""

  key: _Key
  choice: _Choice
  top_k: int
  largest: int
  where: str


def import_megatron(
  source: str | pathlib.Path,
  path: str | pathlib.Path,
  *,
  num_experts: int,
  num_ranks: int | None = None,
  config: BalanceConfig | None = None,
  expert_bytes: int = 0,
  name: str | None = None,
  progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> Trace:
  """Makes a trace of Megatron-LM's router traces; see the module for what is assumed.

  Memory is that of the load matrices. Steps that some ranks lack, as at the end of a run that
  was killed, are left out and counted in the metadata. Nothing is in ``path`` before all is
  written, and nothing of an import that fails stays there.

  Args:
    source: the folder of ``router_trace_rank*.jsonl``.
    path: the new trace's folder.
    num_experts: E; the files do not tell. Every index must be below.
    num_ranks: G, a divisor of the number of files; ``None``: all are one group.
    config: plans the loads; by default ``BalanceConfig(objective="balance")``. ``"time"`` needs
      costs that the files do not tell.
    expert_bytes: of one expert's weights, to know the bytes of copies; at most 2**40.
    name: of the run; the source folder's by default.
    progress: wraps the loops over files and records, e.g. ``tqdm``.

  Returns:
    The new trace, as ``read`` gives it.

  Raises:
    TraceError: the files are not as described, contradict each other or ``num_experts``, or
      ``path`` has a trace already, or a part of one.
    ValueError: a number does not fit.
    OSError: ``path`` cannot be written to.
  """
  source, folder = pathlib.Path(source), pathlib.Path(path)
  config = BalanceConfig(objective="balance") if config is None else config
  if config.objective == "time":
    raise ValueError('config: expected objective="balance", got "time", which needs costs')
  if config.strategy != "quota":
    raise ValueError(f'config: expected strategy="quota", got {config.strategy!r}')
  check_int("num_experts", num_experts, minimum=1)
  check_int("expert_bytes", expert_bytes, minimum=0, maximum=MOST_EXPERT_BYTES)
  check_folder(folder)
  _check_new(folder)
  by_rank = _rank_files(source)
  num_ranks = len(by_rank) if num_ranks is None else num_ranks
  if num_ranks < 1 or len(by_rank) % num_ranks:
    raise ValueError(f"num_ranks: expected a divisor of {len(by_rank)} files, got {num_ranks}")
  if num_experts % num_ranks:
    raise ValueError(f"num_experts: expected a multiple of {num_ranks} ranks, got {num_experts}")
  config.domain_of(num_ranks)
  manifest = Manifest(
    name=(source.resolve().name if name is None else name).encode(errors="replace").decode(),
    num_ranks=num_ranks,
    num_experts=num_experts,
    replica_slots=num_slots(config, num_experts, num_ranks),
    measured=False,
    config={"strategy": config.strategy, "objective": config.objective},
  )
  disk.manifest_bytes(manifest)  # refuses sizes that no trace can have, before files are read

  choices, damaged = _read_files(by_rank, num_experts, progress)
  whole = sorted(key for key, ranks in choices.items() if len(ranks) == len(by_rank))
  if not whole:
    raise TraceError(f"{source}: expected a step and layer that all ranks have, got none")
  metadata = {
    "source": "router traces of Megatron-LM",
    "incomplete_records": len(choices) - len(whole),
    "damaged_lines": damaged,
  }

  make_folder(folder)
  with tempfile.TemporaryDirectory(suffix=".partial", dir=folder) as made:
    records = [(key, group) for key in whole for group in range(len(by_rank) // num_ranks)]
    rows: list[Columns] = []
    index = 0
    for written, (key, group) in enumerate(progress(records)):
      ranks = [choices[key][group * num_ranks + rank] for rank in range(num_ranks)]
      rows.append(_row(key, group, ranks, config, expert_bytes))
      if len(rows) == _PER_CHUNK or written == len(records) - 1:
        columns = {name: np.stack([row[name] for row in rows]) for name in COLUMNS}
        index = disk.write_chunks(pathlib.Path(made), index, columns)
        rows = []
    _publish(pathlib.Path(made), folder, dataclasses.replace(manifest, metadata=metadata))
  return read(folder)


def _check_new(folder: pathlib.Path) -> None:
  """Raises ``TraceError`` if a trace is there, or what may be left of one."""
  if os.path.lexists(folder / disk.MANIFEST):
    raise _has_one(folder)
  left = [path.name for path in (*disk.chunks(folder), *sorted(folder.glob("choices-*.npz")))]
  if left:
    more = f" and {len(left) - 3} more" if len(left) > 3 else ""
    raise TraceError(
      f"{folder}: expected a folder without parts of a trace, got {', '.join(left[:3])}{more} "
      f"but no {disk.MANIFEST}; bring {disk.MANIFEST} back if it was lost, or delete these files "
      "if nobody needs them, or name another folder"
    )


def _has_one(folder: pathlib.Path) -> TraceError:
  return TraceError(f"{folder}: expected a folder without a trace, got one")


def _publish(made: pathlib.Path, folder: pathlib.Path, manifest: Manifest) -> None:
  """Gives the chunks in ``made`` and the manifest their place in ``folder``: all or none."""
  published: list[pathlib.Path] = []
  try:
    for path in disk.chunks(made):
      if not disk.publish(path, folder / path.name):
        raise _has_one(folder)
      published.append(folder / path.name)
    if disk.write_manifest(folder, manifest) != manifest:
      raise _has_one(folder)
  except BaseException:
    for path in published:
      path.unlink(missing_ok=True)
    raise


def _rank_files(source: pathlib.Path) -> list[pathlib.Path]:
  matches: list[tuple[int, pathlib.Path]] = []
  for path in sorted(source.glob("router_trace_rank*.jsonl")):
    match = _FILE.fullmatch(path.name)
    if match is None:  # such as a copy of a rank's file
      raise TraceError(f"{source}: expected router_trace_rank and a number, got {path.name}")
    matches.append((int(match[1]), path))
  found = dict(matches)
  if not found:
    raise TraceError(f"{source}: expected router_trace_rank*.jsonl, got no such file")
  for rank, path in matches:
    if path != found[rank]:
      raise TraceError(f"{source}: expected one file of a rank, got {path.name} of rank {rank} too")
    if not path.is_file():
      raise TraceError(f"{path}: expected a file")
  missing = sorted(set(range(len(found))) - set(found))
  if missing:
    raise TraceError(f"{source}: expected the ranks 0 to {max(found)}, got none of {missing}")
  return [found[rank] for rank in range(len(found))]


def _read_files(
  by_rank: list[pathlib.Path],
  num_experts: int,
  progress: Callable[[Iterable[Any]], Iterable[Any]],
) -> tuple[dict[_Key, dict[int, _Choice]], int]:
  """What each rank chose in each layer, and the number of damaged lines.

  Raises:
    TraceError: lines are not as described, or contradict each other or ``num_experts``.
  """
  choices: dict[_Key, dict[int, _Choice]] = collections.defaultdict(dict)
  damaged = 0
  first: _Line | None = None
  beyond: _Line | None = None
  for rank, file in enumerate(progress(by_rank)):
    for line in _lines(file, rank, num_experts):
      if line is None:
        damaged += 1
        continue
      choices[line.key][rank] = line.choice
      if line.top_k:
        first = line if first is None else first
        if line.top_k != first.top_k:
          raise TraceError(
            f"{line.where}: top_indices: expected {first.top_k} experts of each token, as in "
            f"{first.where}, got {line.top_k}"
          )
      if line.largest >= (num_experts if beyond is None else beyond.largest + 1):
        beyond = line
  if beyond is not None:
    raise TraceError(
      f"{beyond.where}: top_indices: expected indices below {num_experts} (num_experts, "
      f"--experts), got {beyond.largest}, the largest of all files"
    )
  return choices, damaged


def _lines(file: pathlib.Path, rank: int, num_experts: int) -> Iterator[_Line | None]:
  """What each line says; ``None`` for a damaged line.

  Which microbatches come behind a damaged line, in the step that is next, is not known.
  """
  seen: collections.Counter[tuple[int, str]] = collections.Counter()
  damaged, doubtful = False, None
  try:
    lines = file.open(errors="replace")
  except OSError as error:
    raise TraceError(f"{file}: expected a readable file, got: {error.strerror}") from None
  with lines:
    for number, line in enumerate(lines, 1):
      if not line.strip():
        continue
      try:
        record = json.loads(line)
      except (ValueError, RecursionError):
        damaged = True
        yield None
        continue
      where = f"{file.name}, line {number}"
      step, layer = _place(record, where)
      if damaged:
        damaged, doubtful = False, step
      elif step != doubtful:
        doubtful = None
      if step == doubtful:
        continue
      index = _indices(record, where)
      _check_agrees(record, index, where, rank, num_experts)
      yield _Line(
        key=_Key(step, seen[step, layer], layer),
        choice=_counts(index, num_experts),
        top_k=index.shape[1],
        largest=int(index.max()) if index.size else -1,
        where=where,
      )
      seen[step, layer] += 1


def _place(record: Any, where: str) -> tuple[int, str]:
  if not isinstance(record, dict) or not {"step", "layer", "top_indices"} <= set(record):
    raise TraceError(f'{where}: expected a record with "step", "layer" and "top_indices"')
  step, layer = record["step"], record["layer"]
  if type(step) is not int or type(layer) is not int:
    raise TraceError(f"{where}: expected integers, got step {step!r:.20} and layer {layer!r:.20}")
  if not -(2**63) <= step < 2**63 or not 0 <= layer < 2**31:
    raise TraceError(f"{where}: expected a step and a layer, got {step!r:.40} and {layer!r:.40}")
  block, index = record.get("block", "decoder"), record.get("mtp_idx", 0)
  if not isinstance(block, str) or not block.isprintable() or type(index) is not int:
    raise TraceError(f"{where}: expected a block's name, got {block!r:.40} and {index!r:.40}")
  if "mtp_idx" in record:
    block += f" {index}"
  return step, f"{block} {layer:03d}"  # zeros let names sort as numbers do


def _indices(record: dict[str, Any], where: str) -> np.ndarray:
  """``[T, K]`` integers; K is 0 without tokens."""
  try:
    index = np.asarray(record["top_indices"])
  except ValueError:
    raise TraceError(f"{where}: top_indices: expected rows of equal length") from None
  if index.size == 0:
    return np.zeros((0, 0), np.int64)
  if index.ndim != 2 or index.dtype.kind not in "iu":
    raise TraceError(f"{where}: top_indices: expected rows of integers, got {index.dtype}")
  if index.min() < -1:
    raise TraceError(f"{where}: top_indices: expected at least -1 (masked), got {index.min()}")
  return index


def _check_agrees(
  record: dict[str, Any], index: np.ndarray, where: str, rank: int, num_experts: int
) -> None:
  """Raises ``TraceError`` if what a line says of itself is not so; it need not say it."""
  tokens, top_k = index.shape
  expected = {"rank": (rank, "as in the file's name"), "num_tokens": (tokens, "its top_indices")}
  if tokens:
    expected["topk"] = top_k, "the experts in each row of top_indices"
  for name, (value, why) in expected.items():
    if name in record and (type(record[name]) is not int or record[name] != value):
      raise TraceError(f"{where}: {name}: expected {value}, {why}, got {record[name]!r:.40}")
  logits = record.get("logit_shape")
  if logits is not None and logits != [tokens, num_experts]:
    raise TraceError(
      f"{where}: logit_shape: expected {[tokens, num_experts]}, its tokens and num_experts "
      f"(--experts), got {logits!r:.40}"
    )


def _counts(index: np.ndarray, num_experts: int) -> _Choice:
  valid = (index >= 0) & (index < num_experts)
  return _Choice(
    load_E=np.bincount(index[valid], minlength=num_experts).astype(np.int32),
    assignments=index.size,
    masked=int((index == -1).sum()),
  )


def _row(
  key: _Key, group: int, ranks: list[_Choice], config: BalanceConfig, expert_bytes: int
) -> Columns:
  """The record that a layer would have given."""
  load_GE = np.stack([choice.load_E for choice in ranks])
  num_ranks, num_experts = load_GE.shape
  plan = plan_quotas(jnp.asarray(load_GE), config)
  quota_EG, tokens_GP = np.asarray(plan.quota), np.asarray(slot_sizes(plan))
  domain = config.domain_of(num_ranks)
  domain_load = load_GE.sum(axis=0).reshape(num_ranks // domain, -1).sum(axis=1)
  planned_G = quota_EG.sum(axis=0)
  capacity = row_capacity(max(choice.assignments for choice in ranks), 1, num_ranks, config)
  values = {
    "step_N": key.step,
    "layer_N": key.layer,
    "microbatch_N": key.microbatch,
    "group_N": group,
    "load_NGE": load_GE,
    "planned_NG": planned_G,
    "after_NG": planned_G,
    "floor_N": -(-int(domain_load.max()) // domain),
    "replica_expert_NGS": np.asarray(plan.replica_expert),
    "replica_parent_NGS": np.asarray(plan.parent),
    "replica_load_NGS": tokens_GP[:, num_experts // num_ranks :],
    "replica_bytes_N": float(expert_bytes * int((np.asarray(plan.replica_expert) >= 0).sum())),
    "remote_N": int((load_GE - np.minimum(load_GE, quota_EG.T)).sum()),
    "rounds_N": max(1, -(-int(planned_G.max()) // max(capacity, 1))),
    "masked_N": sum(choice.masked for choice in ranks),
    "invalid_N": 0,
  }
  return {name: np.asarray(value) for name, value in values.items()}
