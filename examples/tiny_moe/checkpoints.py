"""Saving a run and going on with it."""

import dataclasses
import pathlib
from typing import Any

import jax
import orbax.checkpoint as ocp

from tiny_moe.settings import Settings, SettingsError, flag
from tiny_moe.training import Params, TrainState, make_training

# How and where experts run may change between runs of one checkpoint; the rest may not.
FREE = ("strategy", "ranks", "data", "replica_slots")
# What the shapes of parameters and the meaning of the computation depend on.
MODEL = ("layers", "width", "experts", "dtype")


def open_checkpoints(folder: pathlib.Path, every: int, resume: bool) -> ocp.CheckpointManager:
  """The checkpoints of a run, saved each ``every`` steps.

  Raises:
    SettingsError: resuming needs a checkpoint and finds none, a new run finds some, or the
      folder is a file.
  """
  if resume and not folder.is_dir():  # the manager would make it
    raise SettingsError(f"--checkpoint-dir: expected a checkpoint in {folder}, got no folder")
  if folder.exists() and not folder.is_dir():  # the manager would find out when it saves, and hang
    raise SettingsError(f"--checkpoint-dir: expected a folder, got another file at {folder}")
  options = ocp.CheckpointManagerOptions(save_interval_steps=every, max_to_keep=2)
  manager = ocp.CheckpointManager(folder.absolute(), options=options)
  latest = manager.latest_step()
  if resume != (latest is not None):
    manager.close()
    if resume:
      raise SettingsError(f"--checkpoint-dir: expected a checkpoint in {folder}, got none")
    raise SettingsError(
      f"--checkpoint-dir: expected no checkpoint in {folder} without --resume, got step {latest}"
    )
  return manager


def save(manager: ocp.CheckpointManager, done: int, state: TrainState, settings: Settings) -> None:
  """Saves the state after ``done`` steps, where the interval or the end of the run asks for it."""
  parts = ocp.args.Composite(
    state=ocp.args.StandardSave(state), settings=ocp.args.JsonSave(_fixed(settings))
  )
  manager.save(done, args=parts, force=done == settings.steps)


def restore(
  manager: ocp.CheckpointManager, state: TrainState, settings: Settings
) -> tuple[TrainState, int]:
  """The newest state, placed like ``state``, and the number of steps behind it.

  Raises:
    SettingsError: the checkpoint is of a run with other settings, or of a finished run.
  """
  done = max(manager.all_steps())
  parts = ocp.args.Composite(settings=ocp.args.JsonRestore())
  saved = manager.restore(done, args=parts)["settings"]
  for name, value in _fixed(settings).items():
    if saved[name] != value:
      raise SettingsError(f"{flag(name)}: expected {saved[name]} as in the checkpoint, got {value}")
  if done == settings.steps:
    raise SettingsError(f"--resume: expected steps left to run, got all {done} done")
  return _restore_state(manager, done, state), done


def load_params(folder: pathlib.Path, settings: Settings) -> tuple[Params, Settings]:
  """The newest parameters of a run, on the mesh in context, and ``settings`` with its model.

  Args:
    folder: ``--checkpoint-dir`` of the run.
    settings: all but those of the model stay as they are.

  Raises:
    SettingsError: the folder has no checkpoint, or the experts do not fit the ranks.
  """
  with open_checkpoints(folder, every=1, resume=True) as manager:
    done = max(manager.all_steps())
    parts = ocp.args.Composite(settings=ocp.args.JsonRestore())
    saved = manager.restore(done, args=parts)["settings"]
    settings = dataclasses.replace(settings, **{name: saved[name] for name in MODEL})
    return _restore_state(manager, done, make_training(settings).state).params, settings


def _restore_state(manager: ocp.CheckpointManager, done: int, state: TrainState) -> TrainState:
  like = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
  parts = ocp.args.Composite(state=ocp.args.StandardRestore(like))
  return manager.restore(done, args=parts)["state"]


def _fixed(settings: Settings) -> dict[str, Any]:
  return {k: v for k, v in dataclasses.asdict(settings).items() if k not in FREE}
