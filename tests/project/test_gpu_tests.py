"""That tests marked ``gpu`` can run, and say why where they cannot."""

import os
import pathlib
import subprocess
import sys

import gpu_tests
import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize(
  ("markexpr", "alone"),
  [
    ("gpu", True),
    ("gpu and slow", True),
    ("(slow or browser) and gpu", True),
    ("gpu and not multiprocess", True),
    ("", False),
    ("slow", False),
    ("not gpu", False),
    ("not (gpu or slow)", False),
    ("gpu or slow", False),
    ("not slow", False),
    ("gpu and not gpu", False),
  ],
)
def test_what_takes_gpu_tests_alone(markexpr, alone):
  assert gpu_tests.only_gpu(markexpr) == alone


PROBE = """
import os
import jax
import pytest

@pytest.mark.gpu
def test_marked():
  assert "JAX_PLATFORMS" not in os.environ and jax.config.jax_platforms is None

def test_other():
  assert os.environ["JAX_PLATFORMS"] == jax.config.jax_platforms == "cpu"
"""


@pytest.mark.parametrize(
  ("arguments", "machine", "said"),
  [
    (["-m", "gpu"], "gpu", "1 passed, 1 deselected"),
    (["-m", "gpu"], "cpu", "1 skipped, 1 deselected"),
    ([], "cpu", "1 passed, 1 skipped"),
  ],
)
def test_what_runs_where(tmp_path, arguments, machine, said):
  """With this folder's ``conftest.py``; whether there are GPUs is only told."""
  told = f"\njax.default_backend = lambda: {machine!r}\n"
  (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text() + told)
  (tmp_path / "test_probe.py").write_text(PROBE)
  (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
  environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests" / "helpers")}
  environment.pop("JAX_PLATFORMS")
  command = [sys.executable, "-m", "pytest", "-q", "-rs", *arguments]
  done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
  assert said in done.stdout, done.stdout
  assert ("skipped" in said) == ("needs NVIDIA GPUs: `python -m pytest -m gpu`" in done.stdout)
