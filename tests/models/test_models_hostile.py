"""Checkpoints of unknown origin: whatever their files hold, errors are those that are promised."""

import json
import math
import os
import pathlib

import jax
import numpy as np
import pytest
from checkpoint_files import write_checkpoint, write_raw
from hostile_values import VALUES, places, replaced
from published_configs import PUBLISHED, QWEN3_30B

from ultraep_jax import models
from ultraep_jax.config import BalanceConfig
from ultraep_jax.models import Checkpoint, ModelConfig
from ultraep_jax.models.rotary import frequencies

DEEP = "[" * 100_000  # overflows a recursive parser's stack
HALF = '{"%s": "\\ud800"}'  # half a surrogate pair, which no UTF-8 can hold
STRETCHED = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
CONFIGS = [hf | STRETCHED if hf is QWEN3_30B else hf for hf in PUBLISHED]
# Fields that the files above leave out.
ABSENT = {
  "layer_types": [],
  "num_local_experts": 8,
  "num_mtp_layers": 1,
  "rope_interleave": True,
  "rope_parameters": {},
  "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
  "original_max_position_embeddings": 4096,
}


@pytest.mark.parametrize("hf", CONFIGS, ids=lambda hf: hf["model_type"])
def test_any_value_of_any_field_is_read_or_refused(hf):
  hf = ABSENT | hf
  refused = 0
  for place in places(hf):
    for value in VALUES:
      try:
        config = ModelConfig.from_hf(replaced(hf, place, value))
      except ValueError as error:
        refused += 1
        str(error).encode()
        continue
      hash(config)
      with np.errstate(over="ignore"):
        assert frequencies(config.rotary).shape == (config.rotary.dim // 2,), (place, value)
  assert refused > 150


@pytest.mark.parametrize("changes", [{"hidden_size": 2**31 - 1}, {"vocab_size": 2**31 - 1}])
def test_sizes_beyond_the_checkpoint_are_refused(changes, tmp_path):
  folder = write_checkpoint(tmp_path, [{"a": np.zeros(2, np.float32)}])
  hf = QWEN3_30B | {"num_hidden_layers": 1, "num_experts": 8} | changes
  (folder / "config.json").write_text(json.dumps(hf))
  mesh = jax.make_mesh((1,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
  with jax.set_mesh(mesh), pytest.raises(ValueError, match="missing tensors"):
    models.load(folder, balance=BalanceConfig())


@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize(
  ("content", "message"),
  [
    (DEEP, "expected JSON, got values nested too deeply"),
    ('{"weight_map":' + DEEP, "expected JSON, got values nested too deeply"),
    (HALF % "weight_map", "expected JSON, got .*surrogates"),
    ('{"\\udfff": 1}', "expected JSON, got .*surrogates"),
    ("1" * 5000, "expected JSON"),
    ("\ufeff{}", "expected JSON"),
    (b"\xff\xfe{}", "expected JSON"),
    ("NaN", "expected a JSON object"),
    (pathlib.Path("/"), "expected a file, got a folder"),
    (pathlib.Path("/dev/zero"), "expected a file, got a device"),
  ],
)
def test_files_that_are_no_json(file, content, message, tmp_path):
  write_checkpoint(tmp_path, [{"a": np.zeros(2, np.float32)}] * 2)
  path = tmp_path / file
  path.unlink(missing_ok=True)
  if isinstance(content, pathlib.Path):
    path.symlink_to(content)
  else:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
  read = [Checkpoint] if file != "config.json" else [Checkpoint, ModelConfig.from_folder]
  for function in read:
    with pytest.raises(ValueError, match=rf"{file}: {message}") as error:
      function(tmp_path)
    str(error.value).encode()


def test_a_file_as_folder_has_no_checkpoint(tmp_path):
  (tmp_path / "file").write_text("")
  for function in (Checkpoint, ModelConfig.from_folder):
    with pytest.raises(FileNotFoundError):
      function(tmp_path / "file")


@pytest.mark.parametrize(
  "file",
  [
    *("", ".", "..", "../other/model.safetensors", "/etc/passwd", "a/../b", "a\\b", "a\0b"),
    *(1, None, True, math.nan, 10**400, [], ["model-00001-of-00001.safetensors"], {}),
  ],
  ids=lambda file: f"{file!r:.20}",
)
def test_places_that_are_no_names_of_files(file, tmp_path):
  a = {"a": np.zeros(2, np.float32)}
  (tmp_path / "other").mkdir()
  write_checkpoint(tmp_path / "other", [a])
  folder = write_checkpoint(tmp_path / "one", [a], index={"a": file})
  with pytest.raises(ValueError, match=r"index\.json, weight_map: expected names of files"):
    Checkpoint(folder)


def test_files_may_be_links_as_in_the_cache_of_the_hub(tmp_path):
  tensors = [{"a": np.arange(3.0, dtype=np.float32)}, {"b": np.zeros(1, np.float32)}]
  blobs = write_checkpoint(tmp_path / "blobs", tensors, block=[2, 2])
  snapshot = tmp_path / "snapshot"
  snapshot.mkdir()
  for path in blobs.iterdir():
    (snapshot / path.name).symlink_to(os.path.relpath(path, snapshot))
  opened = Checkpoint(snapshot)
  np.testing.assert_array_equal(opened.read("a"), tensors[0]["a"])
  assert opened.block == (2, 2)


def test_folders_and_devices_where_tensors_should_be(tmp_path):
  for content in ("/", "/dev/zero"):
    path = tmp_path / "model.safetensors"
    path.symlink_to(content)
    with pytest.raises(ValueError, match="expected a file, got a"):
      Checkpoint(tmp_path)
    path.unlink()
  index = {"a": "folder"}
  folder = write_checkpoint(tmp_path, [{"a": np.zeros(2, np.float32)}], index=index)
  (folder / "folder").mkdir()
  with pytest.raises(ValueError, match=r"damaged files \(1\):\n.*folder: expected a file"):
    Checkpoint(folder)


@pytest.mark.parametrize("length", [10**8, 2**32, 2**63 - 1, 2**64 - 1])
def test_headers_that_claim_to_be_longer_than_the_file(length, tmp_path):
  (tmp_path / "model.safetensors").write_bytes(length.to_bytes(8, "little") + b"{}")
  with pytest.raises(ValueError, match="expected a whole safetensors file, got 10 bytes"):
    Checkpoint(tmp_path)


@pytest.mark.parametrize("shape", [[0, 2**62], [2**63, 0], [0, 2**64 - 1], [1] * 65])
def test_shapes_that_no_array_can_have(shape, tmp_path):
  size = 4 * (0 not in shape)
  header = {
    "a": {"dtype": "F32", "shape": shape, "data_offsets": [0, size]},
    "b": {"dtype": "F32", "shape": [2], "data_offsets": [size, size + 8]},
  }
  write_raw(tmp_path / "model.safetensors", header, bytes(size + 8))
  opened = Checkpoint(tmp_path)  # others may be readable
  assert opened.read("b").shape == (2,)
  for function in (opened.read, opened.nbytes):
    with pytest.raises(ValueError, match="a: expected a shape that NumPy can hold"):
      function("a")
  with pytest.raises(ValueError, match="a: expected a shape that NumPy can hold"):
    opened.read_into(np.zeros(2), "a")
