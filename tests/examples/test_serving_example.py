"""The example of serving: results are the trained model's, balanced or not, and loads are even."""

import pathlib
import shlex

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import serve_tiny_moe
import train_tiny_moe
from flax import nnx
from tiny_moe.checkpoints import load_params
from tiny_moe.data import load_text
from tiny_moe.model import LanguageModel
from tiny_moe.settings import Settings
from tiny_moe.training import make_mesh

TRAIN = shlex.split("--layers 1 --width 16 --experts 16 --batch 8 --seq 16 --steps 6 --ranks 2")
SERVE = shlex.split("--requests 40 --lengths 5 24 --buckets 64 --alignment 8")


@pytest.fixture(scope="module")
def state(tmp_path_factory):
  folder = tmp_path_factory.mktemp("served")
  files = ["--out", str(folder), "--checkpoint-dir", str(folder / "state")]
  with jax.numpy_dtype_promotion("standard"):  # Adam of optax takes the power of a float to an int
    train_tiny_moe.main([*TRAIN, *files])
  return folder / "state"


def likeliest(folder: pathlib.Path, prompts) -> np.ndarray:
  """The next byte by the dense model that training has, all prompts with padding behind them."""
  settings = Settings(strategy="dense", ranks=1)
  with jax.set_mesh(make_mesh(settings)):
    params, settings = load_params(folder, settings)
    model = LanguageModel(settings)
    nnx.update(model, params)
    padded = np.stack([np.pad(prompt, (0, 24 - len(prompt))) for prompt in prompts])
    logits_NTV = nnx.jit(model)(jnp.asarray(padded))[0]
  last = np.array([len(prompt) - 1 for prompt in prompts])
  return np.argmax(np.asarray(logits_NTV)[np.arange(len(prompts)), last], axis=-1)


@pytest.mark.slow
def test_serves_what_was_trained(state, capsys):
  results = serve_tiny_moe.main([*SERVE, "--checkpoint-dir", str(state)])
  prompts, answers = serve_tiny_moe.make_prompts(load_text()[1], 40, 5, 24)
  expected_N = likeliest(state, prompts)
  for served in results.values():
    np.testing.assert_array_equal(served.tokens_N, expected_N)
    assert served.right == np.mean(expected_N == answers)
  none, quota = results["none"], results["quota"]
  np.testing.assert_array_equal(none.before_L, none.after_L)
  assert none.before_L.shape == (1,) and none.before_L > 1.2
  assert quota.after_L < none.after_L - 0.1
  assert "next byte right" in capsys.readouterr().out


def test_says_what_is_wrong(tmp_path, capsys):
  with pytest.raises(SystemExit):
    serve_tiny_moe.main(["--checkpoint-dir", str(tmp_path)])
  said = capsys.readouterr().err
  assert f"--checkpoint-dir: expected a checkpoint in {tmp_path}, got none" in said
  assert "--resume" not in said


@pytest.mark.parametrize("name", ["nothing", "a file"])
def test_no_folder_is_an_error_and_makes_none(name, tmp_path, capsys):
  folder = tmp_path / name
  if name == "a file":
    folder.touch()
  with pytest.raises(SystemExit):
    serve_tiny_moe.main(["--checkpoint-dir", str(folder)])
  said = capsys.readouterr().err
  assert f"--checkpoint-dir: expected a checkpoint in {folder}, got no folder" in said
  assert not folder.is_dir()


@pytest.mark.parametrize("lengths", ["9 3", "0 4", "8 300"])
def test_lengths_that_no_prompt_can_have(lengths, tmp_path, capsys):
  with pytest.raises(SystemExit):
    serve_tiny_moe.main(
      ["--checkpoint-dir", str(tmp_path), "--buckets", "256", "--lengths", *lengths.split()]
    )
  said = capsys.readouterr().err
  assert f"--lengths: expected two rising ones in [1, 256], got {lengths}" in said
