"""Train a small MoE, balanced in every step; all arguments go to the example, --help too."""

import argparse
import pathlib
import runpy
import sys

from ultraep_jax.tools.errors import CommandError

PASSES_ARGUMENTS_ON = True
_EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "train_tiny_moe.py"


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Declares none: they are the example's."""


def run(args: argparse.Namespace) -> int:
  """Runs the example as a script; examples are in the repository, not in the wheel."""
  if not _EXAMPLE.is_file():
    raise CommandError(
      f"expected the example at {_EXAMPLE}; it is not part of the installed package. "
      "Clone the repository and run this command from its root."
    )
  before = sys.argv, sys.path
  sys.argv = ["ultraep demo", *args.rest]
  sys.path = [str(_EXAMPLE.parent), *sys.path]  # as for `python examples/train_tiny_moe.py`
  try:
    runpy.run_path(str(_EXAMPLE), run_name="__main__")
  finally:
    sys.argv, sys.path = before
  return 0
