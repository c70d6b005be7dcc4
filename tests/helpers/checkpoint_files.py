"""Small checkpoints on disk, and what is read of them."""

import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from safetensors.numpy import save_file


def write_checkpoint(
  folder: pathlib.Path,
  files: Sequence[Mapping[str, np.ndarray]],
  *,
  block: Sequence[int] | None = None,
  index: Mapping[str, str] | None = None,
) -> pathlib.Path:
  """Writes a folder: one file, or several with an index, which may be a wrong one."""
  folder.mkdir(exist_ok=True)
  if len(files) == 1 and index is None:
    save_file(dict(files[0]), folder / "model.safetensors")
  else:
    names = [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    places: dict[str, str] = {}
    for name, tensors in zip(names, files, strict=True):
      save_file(dict(tensors), folder / name)
      places |= dict.fromkeys(tensors, name)
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": places if index is None else index}))
  if block is not None:
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": block}}
    (folder / "config.json").write_text(json.dumps(config))
  return folder


def write_raw(path: pathlib.Path, header: Mapping[str, Any], data: bytes) -> None:
  """Writes a file whose header may be a wrong one."""
  text = json.dumps(header).encode()
  path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def count_reads(monkeypatch) -> list[tuple[int, int]]:
  """(offset, bytes) of each positioned read from now on."""
  reads: list[tuple[int, int]] = []
  preadv = os.preadv

  def counted(descriptor, buffers, offset):
    count = preadv(descriptor, buffers, offset)
    reads.append((offset, count))
    return count

  monkeypatch.setattr(os, "preadv", counted)
  return reads
