"""A model's weights back in a folder as it is on the Hugging Face Hub."""

import contextlib
import json
import math
import os
import pathlib
import shutil
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from ultraep_jax.checks import as_compute_dtype
from ultraep_jax.config import check_int, check_type
from ultraep_jax.files import make_folder
from ultraep_jax.models.checkpoint import Checkpoint
from ultraep_jax.models.config import ModelConfig
from ultraep_jax.models.folder import INDEX, SINGLE, read_object
from ultraep_jax.models.names import HEAD, ignored_patterns, sources
from ultraep_jax.models.params import Path
from ultraep_jax.models.safetensors_writer import Form, Writer
from ultraep_jax.models.sources import Source, is_ignored
from ultraep_jax.models.transformer import MoETransformer
from ultraep_jax.tools.progress import byte_progress

Ranges = tuple[range, ...]
# What tokenizers and generation need. Weights in other formats stay behind.
_BESIDE = (".json", ".txt", ".model", ".jinja", ".py", ".md")


class _Part(NamedTuple):
  """One tensor to write.

  Attributes:
    form: of it on disk.
    process: that writes it.
  """

  form: Form
  process: int


def save(
  model: MoETransformer,
  folder: str | os.PathLike[str],
  *,
  like: str | os.PathLike[str],
  dtype: DTypeLike | Literal["stored"] | None = None,
  file_bytes: int = 5 << 30,
) -> None:
  """Writes a model under the names and in the layout that the Hugging Face Hub has.

  Every process writes the tensors that its own devices hold, one layer of one parameter at a time
  in host memory; the folder is whole when all have returned. Weights that were quantised are
  written as the model holds them, and the new ``config.json`` names no quantisation.

  Args:
    model: to write.
    folder: gets the files; has none of them yet, unless it is ``like``.
    like: the folder that the model was loaded from. Its configuration and tokenizer are copied,
      and the tensors that the model does not hold, such as layers that predict several tokens.
      It may lack the tensors; then those are missing. It may be ``folder`` itself, if that has no
      weights; then its ``config.json`` is brought up to date.
    dtype: of all floating point tensors: bfloat16, float16 or float32. ``"stored"``: of each as in
      ``like``; then what was loaded and not changed is written back bit for bit. ``None``: of each
      as the model holds it, so that nothing is rounded.
    file_bytes: of tensors in a file; a larger tensor has a file of its own.

  Raises:
    ValueError: ``like`` is of another model, or a tensor is divided over processes.
    FileExistsError: the folder has weights, or a file of the name of one that is copied.
    FileNotFoundError: ``like`` has no configuration, or no tensors and ``dtype`` is ``"stored"``.
    OSError: a file cannot be read or written, or the folder not be made.
    TypeError: another dtype, or no model.
  """
  check_type("model", model, MoETransformer)
  if dtype is not None and dtype != "stored":
    dtype = as_compute_dtype("dtype", dtype, ', "stored" or None')
  check_int("file_bytes", file_bytes, minimum=1)
  folder, like = pathlib.Path(folder), pathlib.Path(like)
  hf = read_object(like / "config.json")
  if ModelConfig.from_hf(hf) != model.config:
    raise ValueError(f"like: expected the configuration of the model, got another one in {like}")
  in_place = os.path.exists(folder) and folder.samefile(like)
  # In place, tensors that are there are those of other processes.
  has_tensors = not in_place and _has_tensors(like)
  checkpoint = Checkpoint(like) if dtype == "stored" or has_tensors else None
  params = {path: param[...] for path, param in nnx.to_flat_state(nnx.state(model, nnx.Param))}
  found = sources(model.config)
  parts = _parts(params, found, checkpoint, ignored_patterns(model.config), dtype)
  files = _files(parts, file_bytes)
  beside = [] if in_place else _beside(like)
  make_folder(folder)
  # Other processes may be writing theirs.
  there = {path.name for path in folder.glob("*.safetensors")} - set(files)
  if there or (jax.process_index() == 0 and (folder / INDEX).exists()):
    raise FileExistsError(f"{folder}: expected no weights yet, got {min(there, default=INDEX)}")
  if jax.process_index() == 0:  # which alone writes them
    taken = [path.name for path in beside if os.path.lexists(folder / path.name)]
    if taken:
      raise FileExistsError(
        f"{folder}: expected none of the files that come from {like}, got {min(taken)}"
      )
  _write(folder, files, parts, params, found, checkpoint)
  if jax.process_index() == 0:
    for path in beside:
      shutil.copyfile(path, folder / path.name)
    _write_config(folder, hf, parts)
    _write_index(folder, files, parts)


def _parts(
  params: Mapping[Path, jax.Array],
  found: Mapping[Path, Source],
  checkpoint: Checkpoint | None,
  ignored: tuple[str, ...],
  dtype: DTypeLike | Literal["stored"] | None,
) -> dict[str, _Part]:
  """Every tensor of the new checkpoint, in the order of its parameters."""

  def dtype_of(name: str, held: np.dtype) -> np.dtype:
    if dtype == "stored":
      tensor = checkpoint.tensors.get(name) if checkpoint else None
      kept = None if tensor is None or tensor.is_quantized else tensor.dtype
      return held if kept is None else kept
    keeps = dtype is None or not jnp.issubdtype(held, jnp.floating)
    return held if keeps else jnp.dtype(dtype)

  parts: dict[str, _Part] = {}
  for path, array in params.items():
    names = found[path].array()
    shape = array.shape[names.ndim :]
    shape = (*shape[:-2], *reversed(shape[-2:])) if found[path].transpose else shape
    shape = (*(1,) * found[path].lead, *shape)
    owners = _owners(array, names.ndim, path)
    for place in np.ndindex(names.shape):
      name = str(names[place])
      parts[name] = _Part(Form(shape, dtype_of(name, array.dtype)), int(owners[place]))
  # An output matrix beside an embedding that is it would not follow its changes.
  rest = [] if checkpoint is None else [name for name in checkpoint.names if name != HEAD]
  if wrong := [name for name in rest if name not in parts and not is_ignored(name, ignored)]:
    raise ValueError(f"like: expected the model's tensors, got {', '.join(wrong[:3])}")
  for name in rest:
    if checkpoint is not None and name not in parts:
      tensor = checkpoint.tensors[name]
      held = np.dtype(jnp.bfloat16) if tensor.is_quantized else tensor.dtype
      assert held is not None
      parts[name] = _Part(Form(tensor.shape, dtype_of(name, held)), 0)
  return parts


def _owners(array: jax.Array, lead: int, path: Path) -> np.ndarray:
  """For each place along the leading axes, the first process whose devices hold its tensor."""
  places = array.sharding.devices_indices_map(array.shape)
  parts = {(d.process_index, _ranges(index, array.shape)) for d, index in places.items()}
  owners = np.full(array.shape[:lead], -1)
  for process in sorted({process for process, _ in parts}, reverse=True):
    held = np.zeros(owners.shape, np.int64)
    for ranges in {ranges for of, ranges in parts if of == process}:
      held[np.ix_(*ranges[:lead])] += math.prod(map(len, ranges[lead:]))
    owners[held == math.prod(array.shape[lead:])] = process
  if (owners < 0).any():
    raise ValueError(
      f"{'.'.join(map(str, path))}: expected tensors that one process holds whole, got sharding "
      f"{array.sharding}"
    )
  return owners


def _files(parts: Mapping[str, _Part], file_bytes: int) -> dict[str, list[str]]:
  """The tensors of each file; the same on every process."""
  groups: list[list[str]] = []
  for process in sorted({part.process for part in parts.values()}):
    size, group = 0, []
    for name in [name for name, part in parts.items() if part.process == process]:
      size += parts[name].form.nbytes
      if group and size > file_bytes:
        groups.append(group)
        size, group = parts[name].form.nbytes, []
      group.append(name)
    groups.append(group)
  if len(groups) == 1:
    return {SINGLE: groups[0]}
  count = len(groups)
  return {f"model-{i + 1:05}-of-{count:05}.safetensors": group for i, group in enumerate(groups)}


def _write(
  folder: pathlib.Path,
  files: Mapping[str, list[str]],
  parts: Mapping[str, _Part],
  params: Mapping[Path, jax.Array],
  found: Mapping[Path, Source],
  checkpoint: Checkpoint | None,
) -> None:
  """What this process has to write."""
  process = jax.process_index()
  own = {file: names for file, names in files.items() if parts[names[0]].process == process}
  total = sum(parts[name].form.nbytes for names in own.values() for name in names)
  with contextlib.ExitStack() as stack:
    advance = stack.enter_context(byte_progress(total, "save"))
    writers = {}
    for file, names in own.items():
      forms = {name: parts[name].form for name in names}
      writer = stack.enter_context(Writer(folder / file, forms))
      writers |= dict.fromkeys(names, writer)
    for path, array in params.items():
      for name, values in _tensors(array, found[path]):
        if name in writers:
          form = parts[name].form
          writers.pop(name).write(name, values.reshape(form.shape).astype(form.dtype, copy=False))
          advance(form.nbytes)
    for name, writer in writers.items():  # those that the model does not hold
      assert checkpoint is not None
      form = parts[name].form
      writer.write(name, checkpoint.read(name).astype(form.dtype, copy=False))
      advance(form.nbytes)


def _tensors(array: jax.Array, source: Source) -> Iterator[tuple[str, np.ndarray]]:
  """The tensors of a parameter that this process's devices hold, a layer at a time."""
  names = source.array()
  for first in range(len(names)) if names.ndim else [None]:
    # Every process takes the same parts of the array in the same order.
    one = array if first is None else lax.dynamic_index_in_dim(array, first, keepdims=False)
    of_one = names if first is None else np.asarray(names[first], object)
    parts = {_ranges(shard.index, one.shape): shard.data for shard in one.addressable_shards}
    values = {ranges: np.asarray(part) for ranges, part in parts.items()}
    for place in np.ndindex(of_one.shape):
      tensor = _assembled(values, place, one.shape[of_one.ndim :])
      if tensor is not None:
        yield str(of_one[place]), tensor.swapaxes(-1, -2) if source.transpose else tensor


def _assembled(
  parts: Mapping[Ranges, np.ndarray], place: tuple[int, ...], shape: tuple[int, ...]
) -> np.ndarray | None:
  """The tensor at a place along the leading axes of an array whose parts these are, if all are."""
  out, held = np.empty(0), 0
  for ranges, values in parts.items():
    lead, rest = ranges[: len(place)], ranges[len(place) :]
    if not all(p in r for p, r in zip(place, lead, strict=True)):
      continue
    part: Any = values[tuple(p - r.start for p, r in zip(place, lead, strict=True))]
    if part.shape == shape:
      return part
    out = np.empty(shape, part.dtype) if not held else out
    out[tuple(slice(r.start, r.stop) for r in rest)] = part
    held += part.size
  return out if held == math.prod(shape) else None


def _beside(like: pathlib.Path) -> list[pathlib.Path]:
  """The configuration and what else a model needs."""
  paths = [path for path in like.iterdir() if path.suffix in _BESIDE and path.name != INDEX]
  return [path for path in paths if path.is_file()]


def _write_config(folder: pathlib.Path, hf: dict[str, Any], parts: Mapping[str, _Part]) -> None:
  """``config.json`` of what was written, if the copied one is of something else."""
  held = str(next(iter(parts.values())).form.dtype)
  changed = {name: value for name, value in hf.items() if name != "quantization_config"}
  changed |= {name: held for name in ("dtype", "torch_dtype") if name in hf}
  if changed != hf:
    (folder / "config.json").write_text(json.dumps(changed, indent=2) + "\n")


def _write_index(
  folder: pathlib.Path, files: Mapping[str, list[str]], parts: Mapping[str, _Part]
) -> None:
  """Which file has which tensor, if there are several."""
  if SINGLE in files:
    return
  places = {name: file for file, names in files.items() for name in names}
  size = sum(part.form.nbytes for part in parts.values())
  index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}
  (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _has_tensors(folder: pathlib.Path) -> bool:
  return (folder / SINGLE).exists() or (folder / INDEX).exists()


def _ranges(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> Ranges:
  assert index is not None
  return tuple(range(*s.indices(n)) for s, n in zip(index, shape, strict=True))
