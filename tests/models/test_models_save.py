"""Weights that go back to disk: the same bits, under the same names."""

import functools
import json
import operator
import re
import shutil
import sys
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checkpoint_files import write_checkpoint
from checkpoint_programs import mesh_of
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from prompts import FOLDER
from safetensors.numpy import load_file, save_file
from two_processes import run_on_two_processes

from ultraep_jax import models
from ultraep_jax.config import BalanceConfig
from ultraep_jax.models import Checkpoint, families
from ultraep_jax.models.safetensors_writer import Form

SAVE = sys.modules[models.save.__module__]  # the package has a function of its name

FOLDERS = sorted(path.name for path in FOLDER.iterdir() if path.is_dir())


def load(folder, **options) -> models.MoETransformer:
  return models.load(folder, balance=BalanceConfig(), attention_block=8, **options)


def tensors(folder) -> dict[str, np.ndarray]:
  """As they are stored; of quantised ones the values that they stand for."""
  opened = Checkpoint(folder)
  return {name: opened.read(name) for name in opened.names}


def arrays(model) -> dict[tuple, np.ndarray]:
  return {path: np.asarray(v[...]) for path, v in nnx.to_flat_state(nnx.state(model, nnx.Param))}


def same_bits(got: np.ndarray, want: np.ndarray) -> bool:
  return (got.shape, got.dtype) == (want.shape, want.dtype) and got.tobytes() == want.tobytes()


def test_a_mesh_must_be_in_context_to_load():
  with pytest.raises(ValueError, match=r"mesh: .* in context \(jax\.set_mesh\), got none; on one"):
    load(FOLDER / "mixtral")


def test_every_family_has_a_checkpoint_here():
  types = {
    json.loads((FOLDER / name / "config.json").read_text())["model_type"] for name in FOLDERS
  }
  assert types == set(families.FAMILIES)


@pytest.mark.parametrize("name", FOLDERS)
def test_what_was_loaded_goes_back_bit_for_bit(name, tmp_path):
  """FP8 and MXFP4 go back as the values that they stand for, as they were held."""
  opened, old = Checkpoint(FOLDER / name), tensors(FOLDER / name)
  held = old["model.norm.weight"].dtype
  with jax.set_mesh(mesh_of("2x4")):
    model = load(FOLDER / name, dtype=held)
    models.save(model, tmp_path, like=FOLDER / name, dtype="stored", file_bytes=50_000)
    again = arrays(load(tmp_path, dtype=held))
  for path, value in arrays(model).items():
    assert same_bits(again[path], value), path
  new = tensors(tmp_path)
  assert set(new) == set(opened.names)
  for key, value in new.items():
    want = old[key].astype(held) if opened.tensors[key].is_quantized else old[key]
    assert same_bits(value, want), key
  index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
  assert index["metadata"]["total_size"] == sum(value.nbytes for value in new.values())
  assert len(set(index["weight_map"].values())) > 1
  config = json.loads((tmp_path / "config.json").read_text())
  before = json.loads((FOLDER / name / "config.json").read_text())
  assert config == {k: v for k, v in before.items() if k != "quantization_config"}


@pytest.mark.parametrize(
  "name", ["qwen3_moe", "ernie4_5_moe", "minimax_m2", "gpt_oss", "qwen3_next"]
)
def test_what_was_trained_comes_back(name, tmp_path):
  @nnx.jit
  def step(model, optimizer):
    def loss(model):
      leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
      return functools.reduce(operator.add, [jnp.sum(jnp.square(leaf)) for leaf in leaves])

    optimizer.update(model, nnx.grad(loss)(model))

  with jax.set_mesh(mesh_of("4")):
    model = load(FOLDER / name, dtype=jnp.float32)
    before = arrays(model)
    step(model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param))
    trained = arrays(model)
    assert all((before[path] != value).any() for path, value in trained.items())
    models.save(model, tmp_path, like=FOLDER / name)
    again = arrays(load(tmp_path, dtype=jnp.float32))
    for path, value in trained.items():
      assert same_bits(again[path], value), path
    models.save(model, tmp_path / "narrow", like=FOLDER / name, dtype=jnp.bfloat16)
  narrow = tensors(tmp_path / "narrow")
  assert {value.dtype for value in narrow.values()} == {np.dtype(jnp.bfloat16)}
  config = json.loads((tmp_path / "config.json").read_text())
  assert config["torch_dtype"] == "float32"
  full = tensors(tmp_path)
  assert all(same_bits(narrow[key], value.astype(jnp.bfloat16)) for key, value in full.items())


def test_layers_that_the_model_lacks_are_taken_along(tmp_path):
  """And what lies beside weights; without tensors to take them from, the model's alone."""
  like = tmp_path / "like"
  shutil.copytree(FOLDER / "glm4_moe", like)
  (like / "tokenizer.json").write_text("{}")
  (like / "consolidated.pth").write_text("")
  with jax.set_mesh(mesh_of("1")):
    model = load(like, dtype=jnp.float32)
    models.save(model, tmp_path / "all", like=like)
    for path in like.glob("model*"):
      path.unlink()
    models.save(model, tmp_path / "own", like=like)
  every, own = tensors(tmp_path / "all"), tensors(tmp_path / "own")
  assert set(every) - set(own) == {"model.layers.3.eh_proj.weight", "model.layers.3.enorm.weight"}
  for folder in ("all", "own"):  # and no index of other files
    assert {path.name for path in (tmp_path / folder).iterdir()} == {
      *("model.safetensors", "config.json", "tokenizer.json")
    }


def test_a_folder_with_a_configuration_alone_is_filled(tmp_path):
  """It is what the model is like and where it goes, and then says of the weights what is so."""
  folder, link = tmp_path / "new", tmp_path / "link"
  folder.mkdir()
  link.symlink_to(folder)
  hf = json.loads((FOLDER / "mixtral" / "config.json").read_text())
  (folder / "config.json").write_text(json.dumps(hf | {"quantization_config": {}}))
  with jax.set_mesh(mesh_of("4")):
    model = load(FOLDER / "mixtral", dtype=jnp.float32)
    models.save(model, folder, like=link, file_bytes=10_000)
    again = arrays(load(folder, dtype=jnp.float32))
  assert all(same_bits(again[path], value) for path, value in arrays(model).items())
  config = json.loads((folder / "config.json").read_text())
  assert config == hf | {"torch_dtype": "float32"}


def test_files_that_are_there_are_not_written_over(tmp_path):
  like, folder = tmp_path / "like", tmp_path / "new"
  shutil.copytree(FOLDER / "mixtral", like)
  (like / "README.md").write_text("theirs")
  folder.mkdir()
  (folder / "README.md").write_text("mine")
  (folder / "notes.txt").write_text("mine")
  with jax.set_mesh(mesh_of("1")):
    model = load(like)
    with pytest.raises(FileExistsError, match=r"none of the files that come from .*got README\.md"):
      models.save(model, folder, like=like)
    assert {path.name for path in folder.iterdir()} == {"README.md", "notes.txt"}
    (folder / "README.md").unlink()
    models.save(model, folder, like=like)
  assert (folder / "README.md").read_text() == "theirs"
  assert (folder / "notes.txt").read_text() == "mine"


def test_an_output_matrix_that_is_the_embedding_is_left_out(tmp_path):
  like = tmp_path / "like"
  shutil.copytree(FOLDER / "qwen3_moe", like)
  old = load_file(like / "model.safetensors")
  both = old | {"lm_head.weight": old["model.embed_tokens.weight"]}
  save_file(both, like / "model.safetensors")
  with jax.set_mesh(mesh_of("1")):
    models.save(load(like), tmp_path / "new", like=like, dtype="stored")
  new = tensors(tmp_path / "new")
  assert set(new) == set(old) and all(same_bits(new[key], old[key]) for key in old)


@hypothesis.given(
  sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 2)), min_size=1, max_size=30),
  file_bytes=st.integers(1, 20),
)
def test_files_hold_as_much_as_they_may(sizes, file_bytes):
  """Of one process each, in order; a larger tensor has a file of its own."""
  parts = {
    str(i): SAVE._Part(Form((size,), np.dtype(np.uint8)), process)
    for i, (size, process) in enumerate(sizes)
  }
  files = list(SAVE._files(parts, file_bytes).values())
  totals = [sum(parts[name].form.nbytes for name in names) for names in files]
  owners = [{parts[name].process for name in names} for names in files]
  ordered = sorted(parts, key=lambda name: (parts[name].process, int(name)))
  assert [name for names in files for name in names] == ordered
  for i, (names, total) in enumerate(zip(files, totals, strict=True)):
    assert len(owners[i]) == 1 and (total <= file_bytes or len(names) == 1)
    if i + 1 < len(files) and owners[i] == owners[i + 1]:
      assert total + parts[files[i + 1][0]].form.nbytes > file_bytes


def test_parts_of_tensors_are_put_together(tmp_path):
  """Where a parameter lies otherwise than the model makes it; experts of GPT-OSS always do."""
  with jax.set_mesh(mesh_of("4")):
    model = load(FOLDER / "mixtral")
    wo: Any = model.stacks[0].arrays()["wo"]
    wo = jax.device_put(wo, NamedSharding(jax.sharding.get_mesh(), P(None, None, "expert")))
    setattr(model.stacks[0], "wo", nnx.Param(wo))  # noqa: B010
    models.save(model, tmp_path, like=FOLDER / "mixtral", dtype="stored")
  new, old = tensors(tmp_path), tensors(FOLDER / "mixtral")
  assert set(new) == set(old) and all(same_bits(new[key], old[key]) for key in old)


def test_what_cannot_be_saved(tmp_path):
  with jax.set_mesh(mesh_of("4")):
    model = load(FOLDER / "mixtral")

    def message(error, **options) -> str:
      with pytest.raises(error) as raised:
        models.save(model, tmp_path / "new", **{"like": FOLDER / "mixtral"} | options)
      return str(raised.value)

    assert "expected the configuration of the model" in message(ValueError, like=FOLDER / "olmoe")
    for dtype in ("float17", "float64", "int32", "float8_e4m3fn"):
      wanted = 'dtype: expected bfloat16, float16 or float32, "stored" or None, got'
      assert wanted in message(TypeError, dtype=dtype)
    with pytest.raises(TypeError, match="model: expected a MoETransformer, got NoneType"):
      models.save(None, tmp_path / "new", like=FOLDER / "mixtral")  # type: ignore[arg-type]
    assert not (tmp_path / "new").exists()
    file, long = tmp_path / "file", tmp_path / ("x" * 300)
    file.write_text("")
    for folder, expected in (
      (file, "expected a folder to write in, got a file"),
      (file / "new", f"expected a folder to write in, got a file at {file}"),
      (long, "expected to make it, got: File name too long"),
    ):
      with pytest.raises(OSError, match=f"^{re.escape(f'{folder}: {expected}')}$"):
        models.save(model, folder, like=FOLDER / "mixtral")
    write_checkpoint(tmp_path / "new", [{"a": np.zeros(1, np.float32)}])
    assert "expected no file yet" in message(FileExistsError)
    assert "expected no weights yet" in message(FileExistsError, file_bytes=10_000)
  assert not list(tmp_path.glob("new/*.partial"))


SAVE_TOGETHER = """
from ultraep_jax import models
from ultraep_jax.config import BalanceConfig
folder, like = arguments
with jax.set_mesh(jax.make_mesh((8,), ("expert",))):
  model = models.load(like, balance=BalanceConfig(), attention_block=8)
  models.save(model, folder, like=like, dtype="stored")
"""


@pytest.mark.slow
@pytest.mark.multiprocess
def test_each_process_writes_its_own_part(tmp_path):
  run_on_two_processes(SAVE_TOGETHER, tmp_path, FOLDER / "olmoe")
  got, want = tensors(tmp_path), tensors(FOLDER / "olmoe")
  assert set(got) == set(want) and all(same_bits(got[key], want[key]) for key in want)
  second = load_file(tmp_path / "model-00002-of-00002.safetensors")
  assert {key.split(".")[5] for key in second} == {str(e) for e in range(8, 16)}
