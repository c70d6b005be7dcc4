"""The checkout's modules and what they import, for tests of the project and for ``make_build``."""

import ast
import functools
import pathlib

ROOT = pathlib.Path(__file__).parents[2]
FOLDERS = ("ultraep_jax", "pallas_kernels", "examples", "tests")
# From where tests and examples import by bare name, as in pyproject.toml.
BARE = ("examples", "examples/maxtext", "examples/tunix", "tests", "tests/helpers")
# Of programs that import what lies beside them, and that no test imports.
PROGRAMS = ("tests/checkpoints",)


def files(pattern: str) -> list[str]:
  """Files of the project that match, relative to its root."""
  found = (path for folder in FOLDERS for path in (ROOT / folder).rglob(pattern))
  return sorted(
    str(path.relative_to(ROOT))
    for path in found
    if path.is_file() and "__pycache__" not in path.parts
  )


FILES = files("*.py")


@functools.cache
def imported_modules(path: str) -> frozenset[str]:
  """Names of the modules that a file imports, also for types alone; our own ones in full."""
  modules: set[str] = set()
  for node in ast.walk(ast.parse((ROOT / path).read_text())):
    if isinstance(node, ast.Import):
      modules |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f"{path}: expected absolute imports, got a relative one"
      parent = node.module or ""
      for alias in node.names:
        child = f"{parent}.{alias.name}"
        modules.add(child if source_file(child) else parent)
  return frozenset(modules)


@functools.cache
def source_file(module: str) -> str | None:
  """The file of one of our modules, or ``None``."""
  base = module.replace(".", "/")
  for start in (base, *(f"{folder}/{base}" for folder in BARE + PROGRAMS)):
    for candidate in (f"{start}.py", f"{start}/__init__.py"):
      if candidate in FILES:
        return candidate
  return None
