"""BUILD, the Bazel targets: as ``make_build`` writes them, whole and without a circle."""

import collections
import graphlib
import sys

from source_tree import FILES, ROOT, files

sys.path.insert(0, str(ROOT / "tests"))
from make_build import make_build, make_targets

RULES = ("py_library", "py_test", "py_binary")


def read_build() -> list[dict]:
  """The rules of BUILD, which is Starlark and here also Python."""
  rules = []
  ignored = ("load", "package", "exports_files")
  scope = {name: lambda *args, **kwargs: None for name in ignored}
  scope |= {rule: lambda rule=rule, **attributes: rules.append(attributes) for rule in RULES}
  exec(compile((ROOT / "BUILD").read_text(), "BUILD", "exec"), scope)
  return rules


def test_build_is_what_its_program_writes():
  assert (ROOT / "BUILD").read_text() == make_build(), "run: python tests/make_build.py"


def test_every_file_is_in_one_target():
  sources = [source for rule in read_build() for source in rule["srcs"]]
  assert sorted(sources) == FILES


def test_packages_have_their_data():
  data = {file for rule in read_build() for file in rule.get("data", ())}
  packages = ("ultraep_jax/", "pallas_kernels/")
  assert data >= {f for f in files("*") if f.startswith(packages) and not f.endswith(".py")}


def test_names_are_unique_and_deps_have_no_circle():
  names = collections.Counter(target.attributes["name"] for target in make_targets())
  assert set(names.values()) == {1}
  deps = {}
  for rule in read_build():
    deps[rule["name"]] = [dep[1:] for dep in rule.get("deps", ()) if dep.startswith(":")]
  assert {dep for each in deps.values() for dep in each} <= set(deps)
  list(graphlib.TopologicalSorter(deps).static_order())  # raises for a circle
