"""The notebook runs, on public names only."""

import ast
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

import ultraep_jax as uep

ROOT = pathlib.Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "balance_explorer.ipynb"


def cells(kind: str) -> list[str]:
  return [
    "".join(cell["source"])
    for cell in json.loads(NOTEBOOK.read_text())["cells"]
    if cell["cell_type"] == kind
  ]


def test_uses_public_names_only():
  code = "\n".join(cells("code"))
  names = re.findall(r"\buep\.([\w.]+)", code)
  assert len(set(names)) > 8
  for name in names:
    value = uep
    for part in name.split("."):
      assert not part.startswith("_"), name
      value = getattr(value, part)
  imports = [n for n in ast.walk(ast.parse(code)) if isinstance(n, ast.ImportFrom)]
  assert not [n for n in imports if (n.module or "").startswith("ultraep_jax")]


def test_has_plots_and_no_traces_of_a_machine():
  outputs = [
    output
    for cell in json.loads(NOTEBOOK.read_text())["cells"]
    for output in cell.get("outputs", [])
  ]
  assert sum("image/png" in output.get("data", {}) for output in outputs) >= 5
  assert not [output for output in outputs if output["output_type"] == "error"]
  assert not [output for output in outputs if output.get("name") == "stderr"]
  text = json.dumps([output.get("text", "") for output in outputs])
  assert "/tmp" not in text and str(pathlib.Path.home()) not in text


RUN = """
import sys
import nbclient, nbformat
notebook = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
for cell in notebook.cells:
  for output in cell.get("outputs", []):
    print(output.get("text", ""), end="")
"""


@pytest.mark.slow
def test_runs(tmp_path):
  """With other sizes than its own; in a process of its own, because kernels leave sockets open."""
  notebook = json.loads(NOTEBOOK.read_text())
  cell = next(c for c in notebook["cells"] if "parameters" in c["metadata"].get("tags", []))
  source = "".join(cell["source"])
  for old, new in (
    ("RANKS = 8 ", "RANKS = 4 "),
    ("EXPERTS = 64", "EXPERTS = 16"),
    ("K = 8 ", "K = 2 "),
  ):
    assert old in source
    source = source.replace(old, new)
  cell["source"] = source
  (tmp_path / "notebook.ipynb").write_text(json.dumps(notebook))
  environment = os.environ | {
    "XLA_FLAGS": re.sub(r"--xla_force_host\S+", "", os.environ["XLA_FLAGS"]),  # it says how many
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "PYTHONPATH": str(ROOT),
  }
  done = subprocess.run(
    [sys.executable, "-c", RUN, tmp_path / "notebook.ipynb"],
    cwd=tmp_path,
    env=environment,
    capture_output=True,
    text=True,
    timeout=500,
  )
  assert done.returncode == 0, done.stderr
  difference = re.search(r"largest difference: (\S+),", done.stdout)
  assert difference is not None and float(difference[1]) < 1e-5
  after = re.search(r"imbalance_after +([\d.]+)", done.stdout)
  assert after is not None and float(after[1]) < 1.1
