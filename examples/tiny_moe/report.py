"""What a run tells: a record per step, a trace of its loads, a figure, a summary."""

import json
import pathlib
import shlex
import shutil
from typing import Any, TextIO

import numpy as np
from tensorboardX import SummaryWriter

import ultraep_jax as uep
from tiny_moe.model import Scalars
from tiny_moe.settings import Settings, SettingsError
from ultraep_jax.figures import DPI, figure, style

Record = dict[str, float]
IMBALANCES = ("imbalance_before", "imbalance_after")


def open_metrics(path: pathlib.Path, first_step: int) -> tuple[list[Record], TextIO]:
  """The records before ``first_step``, and the file, holding those, to write the next ones to."""
  lines = path.read_text().splitlines() if first_step and path.exists() else []
  history = [record for record in map(json.loads, lines) if record["step"] < first_step]
  file = path.open("w", buffering=1)
  for record in history:
    write(file, record)
  return history, file


def earlier_files(out: pathlib.Path, trace: pathlib.Path | None) -> list[str]:
  """Names of the files in ``out`` that a new run would replace; ``trace`` is where it records."""
  found = [out / name for name in ("metrics.jsonl", "training.png") if (out / name).exists()]
  found += sorted(out.glob("events.out.tfevents.*"))
  if trace is not None and trace == out / "trace" and any(trace.glob("*")):
    found.append(trace)
  return [path.name for path in found]


def trace_folder(
  given: pathlib.Path | None, out: pathlib.Path, settings: Settings
) -> pathlib.Path | None:
  """Where a run's loads are recorded; ``None`` for a dense model, which has none."""
  return out / "trace" if given is None and settings.strategy != "dense" else given


def open_trace(
  path: pathlib.Path, settings: Settings, resume: bool, replace: bool = False
) -> uep.trace.Recorder:
  """The recorder of a run's loads; a resumed run continues its trace.

  Args:
    path: its folder.
    settings: of the run.
    resume: go on with the trace that is there.
    replace: delete a trace that is there and not to go on with; it is in the folder ``--out``.

  Raises:
    SettingsError: the model has no loads, or the folder cannot take them.
  """
  if settings.strategy == "dense":
    raise SettingsError("--trace: expected a strategy that distributes experts, got 'dense'")
  if (path / "trace.json").exists() and not (resume and _goes_on(path, settings)):
    if not replace:
      raise SettingsError(f"--trace: expected no trace in {path} without --resume, got one")
    if resume:
      print(f"replaces the trace in {path}, which is of other ranks or slots")
    shutil.rmtree(path)
  config = uep.BalanceConfig(
    strategy=settings.strategy, replica_slots=settings.replica_slots, objective="balance"
  )
  try:
    return uep.trace.Recorder(
      path,
      name="tiny MoE",
      config=config,
      token_bytes=settings.width * (2 if settings.dtype == "bfloat16" else 4),
      metadata={"model": shape_of(settings)},
    )
  except (OSError, uep.trace.TraceError) as error:
    raise SettingsError(f"{'--out' if replace else '--trace'}: {error}") from None


def _goes_on(path: pathlib.Path, settings: Settings) -> bool:
  """Whether the records of a run with these settings fit the trace."""
  manifest = json.loads((path / "trace.json").read_text())
  sizes = {"num_ranks": settings.ranks, "replica_slots": settings.replica_slots}
  return all(manifest.get(name) == size for name, size in sizes.items())


def shape_of(settings: Settings) -> dict[str, Any]:
  """What ``ultraep simulate --trace`` asks of the model."""
  return {
    "name": "tiny MoE",
    "embed_dim": settings.width,
    "expert_dim": 2 * settings.width,
    "top_k": 2,
    "moe_layers": settings.layers,
    "dtype": settings.dtype,
  }


def open_scalars(out: pathlib.Path, first_step: int) -> SummaryWriter:
  """A writer of TensorBoard events, in place of those of an earlier run and of later steps."""
  if not first_step:
    for path in out.glob("events.out.tfevents.*"):
      path.unlink()
  return SummaryWriter(str(out), purge_step=first_step or None)


def write_scalars(writer: SummaryWriter, record: Record) -> None:
  for name, value in record.items():
    if name != "step":
      writer.add_scalar(name, value, int(record["step"]))


def write(file: TextIO, record: Record) -> None:
  file.write(json.dumps(record) + "\n")


def record_of(step: int, seconds: float, scalars: Scalars) -> Record:
  """One line of the metrics: the loss, every layer's scalars and the layers' mean imbalance."""
  values = {name: float(value) for name, value in scalars.items()}
  record = {"step": step, "seconds": seconds, "loss": values.pop("loss")}
  for name in IMBALANCES:
    layers = [value for key, value in values.items() if key.endswith("/" + name)]
    if layers:
      record[name] = float(np.mean(layers))
  return record | values


def describe(record: Record) -> str:
  """A record in the width of a progress bar."""
  text = f"loss {record['loss']:.3f}"
  if "imbalance_before" in record:
    text += f", imbalance {record['imbalance_before']:.2f} → {record['imbalance_after']:.2f}"
  return text


def plot(history: list[Record], path: pathlib.Path) -> None:
  """Loss and imbalance over the steps, as a PNG."""
  made, (left, right) = figure(2, 10, 4)
  left.plot(*_curve("loss", history), color="#4b5563")
  left.set(xlabel="step", ylabel="loss, nats per byte")
  for name, strategy in zip(IMBALANCES, ("none", "quota"), strict=True):
    steps, values = _curve(name, history)
    if steps:
      right.plot(steps, values, **style(strategy, label=name.replace("_", " ")))
      right.legend(frameon=False)
  right.set(xlabel="step", ylabel="busiest rank / mean rank")
  made.savefig(path, dpi=DPI)


def _curve(name: str, history: list[Record]) -> tuple[list[Any], list[Any]]:
  """Steps and values, where there are: a resumed run may go on with another strategy."""
  having = [record for record in history if name in record]
  return [record["step"] for record in having], [record[name] for record in having]


def summarise(history: list[Record], val_loss: float) -> Record:
  """The numbers at the end: last losses, mean imbalance, and speed without compilation."""
  summary = {"train_loss": _mean("loss", history[-10:]), "val_loss": val_loss}
  summary |= {name: _mean(name, history) for name in IMBALANCES if _curve(name, history)[0]}
  # The median leaves out the step that compiles, and those that other programs disturb.
  summary["steps_per_second"] = 1 / float(np.median([record["seconds"] for record in history]))
  return summary


def _mean(name: str, history: list[Record]) -> float:
  return float(np.mean(_curve(name, history)[1]))


def what_next(out: pathlib.Path, trace: pathlib.Path | None) -> str:
  """What the run wrote, and the command that shows most of it."""
  lines = [f"wrote {out / 'training.png'}, {out / 'metrics.jsonl'} and events for TensorBoard"]
  if trace is not None:
    lines[0] += f"; every step's loads in {trace}"
    lines.append(f"next: ultraep view {shlex.quote(str(trace))} --open")
  return "\n".join(lines)
