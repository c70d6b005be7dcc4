"""Writes BUILD, the Bazel targets: ``python tests/make_build.py`` after files or imports change.

A folder of modules is a target, and so is every module at the top of ``ultraep_jax``; deps are
what they import. ``tests/project/test_build.py`` compares.
"""

import collections
import pathlib
import sys
from collections.abc import Mapping
from typing import NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).parent / "helpers"))
from source_tree import BARE, FILES, PROGRAMS, ROOT, files, imported_modules, source_file

HEAD = """# Bazel targets, for rules_python >= 1.7 and a pip hub named "pip".
# Written by tests/make_build.py; do not edit.

load("@rules_python//python:py_binary.bzl", "py_binary")
load("@rules_python//python:py_library.bzl", "py_library")
load("@rules_python//python:py_test.bzl", "py_test")

package(default_visibility = ["//visibility:private"])

exports_files([
    "LICENSE",
    "README.md",
])
"""
# What users depend on.
PUBLIC = ("ultraep_jax", "models", "packed", "serve", "simulate", "pallas_kernels", "main")
# Import name to requirement, where they differ; names as rules_python normalises them.
REQUIREMENTS = {
  "_pytest": "pytest",
  "absl": "absl_py",
  "griffe": "griffelib",
  "orbax": "orbax_checkpoint",
  "tensorboardX": "tensorboardx",
  "tunix": "google_tunix",
}
# These start programs, read the checkout or build the wheel: they run where the sources are.
IN_CHECKOUT = ("test_docs", "test_examples", "test_project")
# Folders whose modules and their parent's need each other: one target.
ONE_TARGET = {"models_families": "models"}

Value = str | bool | list[str]


class Target(NamedTuple):
  """A rule of BUILD and its attributes."""

  rule: str
  attributes: Mapping[str, Value]

  def __str__(self) -> str:
    lines = [
      f"    {name} = {_starlark(value)}," for name, value in self.attributes.items() if value
    ]
    return "\n".join([f"{self.rule}(", *lines, ")"])


def _starlark(value: Value) -> str:
  if isinstance(value, bool):
    return str(value)
  if isinstance(value, str):
    return f'"{value}"'
  if len(value) == 1:
    return f'["{value[0]}"]'
  return "\n".join(["[", *(f'        "{each}",' for each in value), "    ]"])


def target_of(path: str) -> str:
  """The name of the target that a Python file belongs to."""
  top, *folders, name = pathlib.PurePath(path).with_suffix("").parts
  if not folders and top in ("ultraep_jax", "pallas_kernels"):
    own = {"__init__": top, "__main__": "main"}
    return own.get(name, name if top == "ultraep_jax" else f"{top}_{name}")
  if top == "tests":
    return "_".join(["test", *folders]) if folders else name
  if top == "pallas_kernels":
    return "_".join([top, *folders])
  target = "_".join(folders) or name
  return ONE_TARGET.get(target, target)


def make_targets() -> list[Target]:
  """All targets, in the order of their files."""
  sources = collections.defaultdict(list)
  for path in FILES:
    sources[target_of(path)].append(path)
  data = collections.defaultdict(list)
  for path in files("*"):
    if not path.endswith((".py", ".ipynb")):
      data[_owner_of_data(path)].append(path)
  return [_make_target(name, paths, data[name]) for name, paths in sources.items()]


def _owner_of_data(path: str) -> str:
  top, *_ = pathlib.PurePath(path).parts
  if top in ("tests", "examples"):
    return {"tests": "test_helpers", "examples": "tiny_moe"}[top]
  package = pathlib.PurePath(path).parent
  while not (ROOT / package / "__init__.py").exists():
    package = package.parent
  return target_of(str(package / "__init__.py"))


def _make_target(name: str, paths: list[str], data: list[str]) -> Target:
  folder = str(pathlib.PurePath(paths[0]).parent)
  is_test = any(pathlib.PurePath(path).name.startswith("test_") for path in paths)
  is_program = folder == "examples" or name == "main"
  deps = _deps(name, paths)
  attributes: dict[str, Value] = {"name": name, "srcs": paths}
  if is_test:
    attributes |= {
      "args": [path for path in paths if pathlib.PurePath(path).name.startswith("test_")],
      "data": [*data, "pyproject.toml"],
      "main_module": "pytest",
      "size": "enormous",
      "tags": ["local", "manual"] if name in IN_CHECKOUT else [],
    }
    deps |= {":conftest", "@pip//pytest"}
  else:
    starts = BARE + PROGRAMS
    bare = [each for each in starts if folder == each or pathlib.PurePath(folder).parent == each]
    attributes |= {
      "data": data,
      "imports": [each for each in starts if folder.startswith(each) and not is_program] or bare,
      "main": paths[0] if is_program else "",
      "testonly": folder.startswith("tests"),
      "visibility": ["//visibility:public"] if name in PUBLIC else [],
    }
  rule = "py_test" if is_test else "py_binary" if is_program else "py_library"
  return Target(rule, attributes | {"deps": sorted(deps)})


def _deps(name: str, paths: list[str]) -> set[str]:
  deps = set()
  for module in {module for path in paths for module in imported_modules(path)}:
    top, source = module.partition(".")[0], source_file(module)
    if source is not None:
      deps.add(f":{target_of(source)}")
    elif top not in sys.stdlib_module_names:
      deps.add(f"@pip//{REQUIREMENTS.get(top, top)}")
  return deps - {f":{name}"}


def make_build() -> str:
  """The text of BUILD."""
  return "\n".join([HEAD, *(f"{target}\n" for target in make_targets())])


if __name__ == "__main__":
  (ROOT / "BUILD").write_text(make_build())
