"""The project as a whole: public names, documents, the wheel."""

import ast
import importlib
import os
import pathlib
import re
import statistics
import subprocess
import sys
import sysconfig
import tomllib
import types
import venv
import zipfile

import jax.numpy as jnp
import pytest
from source_tree import FILES, ROOT

import pallas_kernels
import ultraep_jax

# What the packages hold beside modules.
DATA = {
  "pallas_kernels/py.typed",
  "ultraep_jax/py.typed",
  *(f"ultraep_jax/viewer/{name}" for name in ("charts.js", "page.css", "page.html", "page.js")),
  *(
    f"ultraep_jax/devices/{name}.json"
    for name in (
      *("a100", "a100_40gb", "a100_pcie", "gb200", "gb300"),
      *("h100", "h100_pcie", "h20", "h200", "nvl64"),
    )
  ),
}


# --- public names ----------------------------------------------------------------------------


@pytest.mark.parametrize("package", [ultraep_jax, pallas_kernels], ids=lambda p: p.__name__)
def test_public_names_are_what_a_package_shows(package):
  assert dir(package) == sorted(package.__all__) == sorted(set(package.__all__))
  with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'none'"):
    package.none  # noqa: B018


@pytest.mark.parametrize("name", ultraep_jax.__all__)
def test_public_name_is_described(name):
  value = getattr(ultraep_jax, name)
  if callable(value) or isinstance(value, types.ModuleType):
    assert value.__doc__, f"{name}: expected a docstring, got none"
  pages = "".join(page.read_text() for page in (ROOT / "docs/reference").glob("*.md"))
  assert re.search(rf"^::: ultraep_jax\.{name}\b", pages, re.MULTILINE), f"{name} is on no page"


@pytest.mark.parametrize(
  "kind", [v for v in vars(ultraep_jax).values() if isinstance(v, type) and v.__doc__], ids=str
)
def test_fields_are_described_in_docstrings(kind):
  fields = getattr(kind, "_fields", None) or getattr(kind, "__dataclass_fields__", ())
  described = re.findall(r"^    (\w+): ", kind.__doc__, re.MULTILINE)
  assert described[: len(fields)] == list(fields)


def test_scalars_are_described_in_their_docstring():
  stats = ultraep_jax.LayerStats(*[jnp.ones(1)] * len(ultraep_jax.LayerStats._fields))
  described = re.findall(r"^    \| ``(\w+)``", stats.scalars.__doc__ or "", re.MULTILINE)
  assert described == list(stats.scalars())


# --- documents and commands ------------------------------------------------------------------


def readme_blocks(language: str) -> list[str]:
  return re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_readme_has_a_demo_and_ci_runs_its_tests_last():
  install, demo, tests = (block.strip() for block in readme_blocks("bash"))
  assert install.endswith('pip install -e ".[examples]"') and demo == "ultraep demo"
  assert (ROOT / ".ci/run").read_text().splitlines()[-1] == tests
  assert os.access(ROOT / ".ci/run", os.X_OK)


def test_files_are_short():
  """A file has one subject; a test file goes with one of them."""
  lines = {path: (ROOT / path).read_text().count("\n") for path in FILES}
  product = {path: count for path, count in lines.items() if not path.startswith("tests/")}
  assert statistics.median(product.values()) <= 150
  assert not {path: count for path, count in product.items() if count > 400}
  assert not {path: count for path, count in lines.items() if count > 500}


def test_python_versions_agree():
  project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
  assert project["requires-python"] == ">=" + (ROOT / ".python-version").read_text().strip()


def test_jax_range_is_the_same_everywhere():
  project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

  def ranges(requirements):
    return {r.partition(">=")[2] for r in requirements if r.startswith("jax")}

  assert ranges(project["dependencies"]) == {"0.11.2,<0.13"}
  # The same, without what compiles matmuls that spill.
  assert ranges(project["optional-dependencies"]["cuda"]) == {"0.11.2,<0.12"}
  assert "jax ≥ 0.11.2 and < 0.13; 0.11.2 [on Hopper GPUs]" in (ROOT / "README.md").read_text()


# --- wheel -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> pathlib.Path:
  folder = tmp_path_factory.mktemp("wheel")
  command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
  subprocess.run([*command, str(ROOT)], check=True, stdout=subprocess.DEVNULL)
  return next(folder.glob("*.whl"))


def test_wheel_holds_both_packages_and_nothing_else(wheel):
  names = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
  modules = {f for f in FILES if f.startswith(("ultraep_jax/", "pallas_kernels/"))}
  assert names == modules | DATA


@pytest.mark.slow
def test_wheel_works_outside_the_checkout(wheel, tmp_path):
  """In an environment whose dependencies are those of this one, by a path file."""
  venv.create(tmp_path / "env")
  python = tmp_path / "env/bin/python"
  packages = next((tmp_path / "env/lib").glob("python*")) / "site-packages"
  (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
  install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
  subprocess.run([*install, "--no-deps", "--no-index", str(wheel)], check=True)
  code = "import ultraep_jax, pallas_kernels; print(ultraep_jax.__file__, pallas_kernels.__file__)"
  environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
  done = subprocess.run(
    [python, "-c", code], cwd=tmp_path, env=environment, check=True, capture_output=True, text=True
  )
  assert all(path.startswith(str(packages)) for path in done.stdout.split()), done.stdout


def test_modules_of_the_public_package_import():
  for path in FILES:
    if path.startswith(("ultraep_jax/", "pallas_kernels/")) and not path.endswith("__main__.py"):
      module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
      assert importlib.import_module(module).__doc__, f"{module}: expected a docstring, got none"


# Tables, checks and a row of settings need no picture.
PLAIN = {"elementwise", "operands", "block", "peers", "scales", "tuning", "__init__"}


def test_kernel_files_begin_with_an_example():
  """A drawing or worked numbers, as a literal block of the module's docstring."""
  folders = [
    ROOT / "pallas_kernels" / name for name in ("matmul", "planner", "routing", "transfer")
  ]
  files = [path for folder in folders for path in folder.glob("*.py") if path.stem not in PLAIN]
  docs = {path.name: ast.get_docstring(ast.parse(path.read_text())) or "" for path in files}
  assert len(docs) > 20
  assert not [name for name, doc in docs.items() if not re.search(r"::\n\n  +\S", doc)]
