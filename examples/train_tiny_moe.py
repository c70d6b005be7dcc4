"""Trains a byte-level Mixture-of-Experts language model and balances its experts in every step.

The router is left uneven, as training makes it. Each layer counts what its router has just
chosen, copies the busy experts to other ranks and splits their tokens, in every forward pass.
The text is what every Python carries: the manual's topics and the standard library's sources.

  python examples/train_tiny_moe.py                     # 8 virtual CPU devices, or all GPUs
  python examples/train_tiny_moe.py --strategy dense    # the same model on one device
  python examples/train_tiny_moe.py --data 2            # two groups of ranks
  python examples/train_tiny_moe.py --checkpoint-dir runs/state           # and, to go on:
  python examples/train_tiny_moe.py --checkpoint-dir runs/state --resume

In the folder --out it writes metrics.jsonl (a line per step), events for TensorBoard, training.png
and trace, the loads of every layer in every step: ultraep view runs/tiny_moe/trace

Only in runs/tiny_moe, where --out is not given, does a new run replace the files of the last.
"""

import argparse
import contextlib
import dataclasses
import os
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
from tiny_moe import checkpoints, report
from tiny_moe.data import load_text
from tiny_moe.settings import Settings, SettingsError, flag
from tiny_moe.training import held_out_loss, make_mesh, make_training, microbatches
from tqdm import tqdm

import ultraep_jax as uep

if TYPE_CHECKING:
  from orbax.checkpoint import CheckpointManager

CPU_DEVICES = 8
OUT = pathlib.Path("runs/tiny_moe")
HELP = {
  "strategy": "how to balance; dense: every expert on every token, on one device",
  "ranks": "devices that share the experts (default: all)",
  "data": "groups of such ranks",
  "replica_slots": "expert copies that a rank can hold",
  "batch": "sequences per step",
  "seq": "bytes per sequence",
  "accumulate": "microbatches that a step is cut into",
  "balance_loss": "weight of the router's auxiliary loss",
  "dtype": "of the computation",
}
CHOICES = {"strategy": ("quota", "none", "ideal", "dense"), "dtype": ("float32", "bfloat16")}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
  """Trains as the flags say; a bad flag ends the program with a message.

  Returns:
    The numbers of the summary, and ``history``: the records of all steps.
  """
  parser = make_parser()
  args = parser.parse_args(argv)
  out = OUT if args.out is None else args.out
  try:
    settings = settings_of(args)
    folder, recorder = report.trace_folder(args.trace, out, settings), None
    earlier = [] if args.resume else report.earlier_files(out, folder)
    if earlier and args.out is not None:
      raise SettingsError(
        f"--out: expected a folder without the files of a run, got {', '.join(earlier)} in {out}; "
        "name another folder, or delete them"
      )
    with contextlib.ExitStack() as stack:
      stack.enter_context(jax.set_mesh(make_mesh(settings)))
      manager = None
      if args.checkpoint_dir:
        manager = checkpoints.open_checkpoints(
          args.checkpoint_dir, args.checkpoint_every, args.resume
        )
        stack.enter_context(manager)
      if earlier:
        print(f"replaces the last run's {', '.join(earlier)} in {out}")
      if folder is not None:
        recorder = stack.enter_context(
          report.open_trace(folder, settings, args.resume, replace=args.trace is None)
        )
      out.mkdir(parents=True, exist_ok=True)
      results = run(settings, out, manager, args.resume, recorder)
  except SettingsError as error:
    parser.exit(2, f"{parser.prog}: {error}\n")
  except OSError as error:  # a folder that cannot be made or written
    parser.exit(1, f"{parser.prog}: {error}\n")
  for name, value in results.items():
    if name != "history":
      print(f"{name:>18}  {value:.4f}")
  print(report.what_next(out, folder))
  return results


def make_parser() -> argparse.ArgumentParser:
  """Flags for all settings, and for the files of a run."""
  parser = argparse.ArgumentParser(
    prog=pathlib.Path(sys.argv[0]).name,
    description=__doc__,
    formatter_class=argparse.RawTextHelpFormatter,
  )
  for field in dataclasses.fields(Settings):
    default = None if field.name == "ranks" else field.default
    text = HELP.get(field.name, "")
    parser.add_argument(
      flag(field.name),
      type=type(field.default),
      default=default,
      choices=CHOICES.get(field.name),
      help=text if default is None else f"{text} (default: {default})".strip(),
    )
  add = parser.add_argument
  add("--out", type=pathlib.Path, help=f"new folder for results (default: {OUT}, replaced)")
  add("--trace", type=pathlib.Path, help="record every layer's loads here (default: OUT/trace)")
  add("--checkpoint-dir", type=pathlib.Path, help="save the run's state here")
  add("--checkpoint-every", type=int, default=100, help="steps (default: 100)")
  add("--resume", action="store_true", help="go on from the newest checkpoint")
  return parser


def settings_of(args: argparse.Namespace) -> Settings:
  """The settings that the flags give.

  Raises:
    SettingsError: they do not fit each other or the devices.
  """
  if args.checkpoint_every < 1:
    raise SettingsError(f"--checkpoint-every: expected at least 1, got {args.checkpoint_every}")
  if args.resume and args.checkpoint_dir is None:
    raise SettingsError("--resume: expected --checkpoint-dir with it, got none")
  values = {field.name: getattr(args, field.name) for field in dataclasses.fields(Settings)}
  if args.ranks is None:
    all_ranks = jax.device_count() // max(args.data, 1)
    values["ranks"] = 1 if args.strategy == "dense" else max(all_ranks, 1)
  settings = Settings(**values)
  if settings.devices > jax.device_count():
    raise SettingsError(
      f"--ranks x --data: expected at most {jax.device_count()} devices, got {settings.devices}"
    )
  return settings


def run(
  settings: Settings,
  out: pathlib.Path,
  manager: "CheckpointManager | None",
  resume: bool,
  recorder: uep.trace.Recorder | None,
) -> dict[str, Any]:
  """All steps of the run on the mesh in context, then its figure and summary."""
  text, held_out = load_text()
  mesh = dict(jax.sharding.get_mesh().shape)
  backend = jax.default_backend()
  print(f"strategy {settings.strategy} on {backend}, mesh {mesh}; compiling takes up to a minute")
  training = make_training(settings)
  state, first_step = training.state, 0
  if manager is not None and resume:
    state, first_step = checkpoints.restore(manager, state, settings)
  history, file = report.open_metrics(out / "metrics.jsonl", first_step)
  with (
    file,
    report.open_scalars(out, first_step) as scalars_file,
    tqdm(total=settings.steps, initial=first_step, unit="step") as bar,
  ):
    bar.set_postfix_str("compiling")
    for step in range(first_step, settings.steps):
      started = time.perf_counter()
      state, scalars, stats = training.step(state, microbatches(text, settings, step))
      scalars = jax.device_get(scalars)
      history.append(report.record_of(step, time.perf_counter() - started, scalars))
      report.write(file, history[-1])
      report.write_scalars(scalars_file, history[-1])
      if recorder is not None:
        recorder.record(step, stats, axes=("microbatch", "group"))
      if manager is not None:
        checkpoints.save(manager, step + 1, state, settings)
      bar.set_postfix_str(report.describe(history[-1]), refresh=False)
      if step == first_step:
        bar.unpause()  # compiling says nothing of the time that is left
      bar.update()
  val_loss = held_out_loss(training, state.params, held_out, settings)
  report.plot(history, out / "training.png")
  return {**report.summarise(history, val_loss), "history": history}


if __name__ == "__main__":
  if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    # Possible until JAX first looks for devices; without effect where it finds accelerators.
    jax.config.update("jax_num_cpu_devices", CPU_DEVICES)
  main()
