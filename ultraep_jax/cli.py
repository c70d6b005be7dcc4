"""The command line, ``python -m ultraep_jax``."""

import argparse
import dataclasses
import json
import pathlib
import runpy
import sys
from collections.abc import Sequence

from ultraep_jax.doctor import doctor

_DEMO = pathlib.Path(__file__).parents[1] / "examples" / "train_tiny_moe.py"


def main(argv: Sequence[str] | None = None) -> int:
  """Runs one command and returns its exit status.

  Args:
    argv: arguments after the program's name; ``None`` takes them from ``sys.argv``.
  """
  parser = _parser()
  args, rest = parser.parse_known_args(argv)
  if args.command == "demo":
    return _demo(rest)
  if rest:
    parser.error(f"unrecognized arguments: {' '.join(rest)}")
  return _doctor(args.json)


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(prog="python -m ultraep_jax", description=__doc__)
  commands = parser.add_subparsers(dest="command", required=True)
  commands.add_parser(
    "demo",
    help="train a small MoE, balanced in every step; further arguments go to the example",
    add_help=False,  # --help is the example's
  )
  command = commands.add_parser("doctor", help="show versions, devices and what 'auto' picks")
  command.add_argument("--json", action="store_true", help="print JSON")
  return parser


def _demo(args: Sequence[str]) -> int:
  """Runs the example as a script; examples are in the repository, not in the wheel."""
  if not _DEMO.is_file():
    print(
      f"demo: expected the example at {_DEMO}; it is not part of the installed package. "
      "Clone the repository and run this command from its root.",
      file=sys.stderr,
    )
    return 1
  before = sys.argv, sys.path
  sys.argv = [str(_DEMO), *args]
  sys.path = [str(_DEMO.parent), *sys.path]  # as for `python examples/train_tiny_moe.py`
  try:
    runpy.run_path(str(_DEMO), run_name="__main__")
  finally:
    sys.argv, sys.path = before
  return 0


def _doctor(as_json: bool) -> int:
  report = doctor()
  print(json.dumps(dataclasses.asdict(report), indent=2) if as_json else report)
  return 0
