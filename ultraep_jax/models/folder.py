"""The files of a checkpoint's folder, and the headers that say what is in them."""

import pathlib
from typing import Any

from ultraep_jax.files import read_json
from ultraep_jax.models import hf_fields
from ultraep_jax.models.problems import summary
from ultraep_jax.models.safetensors_file import Tensor, read_header

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def read_tensors(folder: pathlib.Path) -> dict[str, Tensor]:
  """The tensors of a folder by name; see `Checkpoint` for what it raises."""
  single, index = folder / SINGLE, folder / INDEX
  if single.exists():
    return read_header(folder, single.name)
  if not index.exists():
    raise FileNotFoundError(
      f"checkpoint {folder}: expected {single.name} or {index.name}, got neither"
    )
  places = _weight_map(index)
  files = sorted(set(places.values()))
  if missing := [file for file in files if not (folder / file).exists()]:
    report = summary({"missing files": missing})
    raise FileNotFoundError(f"checkpoint {folder}: expected the files of its index, got\n{report}")
  headers: dict[str, dict[str, Tensor]] = {}
  damaged = []
  for file in files:
    try:
      headers[file] = read_header(folder, file)
    except ValueError as error:
      damaged.append(str(error))
  # A damaged file's tensors are not missing.
  absent = [f"{n} in {f}" for n, f in places.items() if f in headers and n not in headers[f]]
  if damaged or absent:
    report = summary({"damaged files": damaged, "tensors of the index that are absent": absent})
    raise ValueError(f"checkpoint {folder}: expected what its index names, got\n{report}")
  return {name: headers[file][name] for name, file in places.items()}


def _weight_map(index: pathlib.Path) -> dict[str, str]:
  places = read_object(index).get("weight_map")
  if not isinstance(places, dict):
    raise ValueError(f"{index}: expected weight_map from tensor to file, got {places!r:.80}")
  for name, file in places.items():
    if not _is_file_name(file):
      raise ValueError(
        f"{index}, weight_map: expected names of files in this folder, got {file!r:.80} for {name}"
      )
  return places


def _is_file_name(file: object) -> bool:
  """No path: one could lead out of the folder, to what is no part of the checkpoint."""
  return isinstance(file, str) and file not in ("", ".", "..") and not set(file) & set("/\\\0")


def read_block_size(folder: pathlib.Path) -> tuple[int, int] | None:
  """Rows and columns per factor of FP8 weights, or None if config.json names none."""
  config = folder / "config.json"
  return hf_fields.block_size(read_object(config)) if config.exists() else None


def read_object(path: pathlib.Path) -> dict[str, Any]:
  """The object in a JSON file.

  Raises:
    FileNotFoundError: there is no file.
    ValueError: something else is there; the message begins with the path.
    OSError: it cannot be read.
  """
  value = read_json(path)
  if not isinstance(value, dict):
    raise ValueError(f"{path}: expected a JSON object, got {value!r:.80}")
  return value
