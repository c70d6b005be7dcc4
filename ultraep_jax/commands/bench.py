"""Measure an operation; arguments after its name go to the measurement, --help too.

Without a name, lists the measurements. All but ``portable`` and ``compile`` need GPUs, and most of
them need two.
"""

import argparse
import ast
import importlib
import pathlib
import sys
from types import ModuleType

import ultraep_jax.bench
from ultraep_jax.tables import table
from ultraep_jax.tools.errors import CommandError, UsageError

PASSES_ARGUMENTS_ON = True
# By name, the module of ``ultraep_jax.bench`` with its ``main``.
MEASUREMENTS = {
  "layer": "layer.command",
  "matrix": "matrix.command",
  "train": "train.command",
  "beside": "kernels.beside",
  "costs": "tune.costs",
  "exchange": "kernels.exchange",
  "grouped_matmul": "kernels.grouped_matmul",
  "plan": "kernels.plan",
  "portable": "kernels.portable",
  "prefill": "prefill.command",
  "reduce": "kernels.reduce",
  "compile": "compile.command",
  "replicate": "kernels.replicate",
  "stress": "stress.command",
  "tune": "tune.command",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """The measurement's name."""
  parser.add_argument("name", nargs="?", help=f"one of {', '.join(MEASUREMENTS)}")


def run(args: argparse.Namespace) -> int:
  """Runs the measurement's ``main``, which reads the program's arguments."""
  if args.name is None and set(args.rest) <= {"--help", "-h"}:
    print(table(["ultraep bench …", "what it does"], [[n, _summary(n)] for n in MEASUREMENTS]))
    print("\nMost need GPUs, and many of them two. Portable, compile and prefill --model tiny need")
    print("none. Each has --help.")
    return 0
  if args.name not in MEASUREMENTS:
    raise UsageError(f"name: expected one of {', '.join(MEASUREMENTS)}, got {args.name!r}")
  module = _module(args.name)
  before = sys.argv
  sys.argv = [f"ultraep bench {args.name}", *args.rest]
  try:
    return module.main() or 0
  except (ValueError, ArithmeticError) as error:  # an option's
    raise CommandError(f"{args.name}: {error}") from error
  finally:
    sys.argv = before


def _module(name: str) -> ModuleType:
  try:
    return importlib.import_module(f"{ultraep_jax.bench.__name__}.{MEASUREMENTS[name]}")
  except ModuleNotFoundError as error:
    raise CommandError(
      f"{name} needs {error.name}; in the clone, pip install -e '.[models,paper]' has all that any "
      "needs"
    ) from error


def _summary(name: str) -> str:
  """A module's first line, read and not imported: some need more than the library does."""
  path = pathlib.Path(*ultraep_jax.bench.__path__, *MEASUREMENTS[name].split(".")).with_suffix(
    ".py"
  )
  return (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()[0]
