"""Measure an operation; arguments after its name go to the measurement, --help too.

Without a name, lists the measurements. Most of them want GPUs.
"""

import argparse
import importlib
import sys
from types import ModuleType

import ultraep_jax.bench
from ultraep_jax.commands.errors import CommandError

PASSES_ARGUMENTS_ON = True
# The modules of ``ultraep_jax.bench`` with a ``main``; the others are what these share.
MEASUREMENTS = (
  "layer",
  "train",
  "exchange",
  "grouped_matmul",
  "plan",
  "portable",
  "reduce",
  "replicate",
  "stress",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """The measurement's name."""
  parser.add_argument("name", nargs="?", help=f"one of {', '.join(MEASUREMENTS)}")


def run(args: argparse.Namespace) -> int:
  """Runs the ``main`` of ``ultraep_jax.bench.<name>``, which reads the program's arguments."""
  if args.name is None and set(args.rest) <= {"--help", "-h"}:
    for name in MEASUREMENTS:
      print(f"{name:16} {(_module(name).__doc__ or '').splitlines()[0]}")
    return 0
  if args.name not in MEASUREMENTS:
    raise CommandError(f"name: expected one of {', '.join(MEASUREMENTS)}, got {args.name!r}")
  before = sys.argv
  sys.argv = [f"python -m ultraep_jax bench {args.name}", *args.rest]
  try:
    return _module(args.name).main() or 0
  finally:
    sys.argv = before


def _module(name: str) -> ModuleType:
  return importlib.import_module(f"{ultraep_jax.bench.__name__}.{name}")
