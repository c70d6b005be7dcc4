"""Exact-load expert balancing for Mixture-of-Experts layers: tools for the command line.

Every command has its own --help. The exit status is 0 if all went well, 1 if something failed,
2 if the command line is wrong and 130 after Ctrl-C.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from ultraep_jax.commands import bench, demo, doctor, paper, plan, simulate, trace, view
from ultraep_jax.commands.errors import CommandError

# By name; the first line of a module's docstring stands in the list of commands.
COMMANDS: dict[str, ModuleType] = {
  "demo": demo,
  "plan": plan,
  "trace": trace,
  "view": view,
  "simulate": simulate,
  "paper": paper,
  "bench": bench,
  "doctor": doctor,
}


def main(argv: Sequence[str] | None = None) -> int:
  """Runs one command and returns its exit status.

  Args:
    argv: arguments after the program's name; ``None`` takes them from ``sys.argv``.
  """
  parser = make_parser()
  args, rest = parser.parse_known_args(argv)
  command = COMMANDS[args.command]
  if getattr(command, "PASSES_ARGUMENTS_ON", False):
    args.rest = rest
  elif rest:
    parser.error(f"unrecognized arguments: {' '.join(rest)}")
  try:
    status = command.run(args)
    sys.stdout.flush()
    return status
  except CommandError as error:
    print(f"{parser.prog} {args.command}: {error}", file=sys.stderr)
    return 1
  except BrokenPipeError:  # the reader of a pipe had enough
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
  except KeyboardInterrupt:
    return 130


def make_parser() -> argparse.ArgumentParser:
  """The parser of all commands."""
  parser = argparse.ArgumentParser(
    prog="python -m ultraep_jax",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  commands = parser.add_subparsers(dest="command", required=True, metavar="command")
  for name, module in COMMANDS.items():
    text = module.__doc__ or ""
    command = commands.add_parser(
      name,
      help=text.splitlines()[0],
      description=text,
      formatter_class=argparse.RawDescriptionHelpFormatter,
      # A program that gets its arguments passed on has its own --help.
      add_help=not getattr(module, "PASSES_ARGUMENTS_ON", False),
    )
    module.add_arguments(command)
  return parser
