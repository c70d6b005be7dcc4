"""Exact-load expert balancing for Mixture-of-Experts layers: tools for the command line.

Every command has its own --help. The exit status is 0 if all went well, 1 if something failed,
2 if the command line is wrong and 130 after Ctrl-C.
"""

import argparse
import importlib
import io
import os
import pathlib
import sys
from collections.abc import Sequence

import jax

import ultraep_jax
import ultraep_jax.commands
from ultraep_jax.tools.errors import CommandError, UsageError, no_devices

# Modules of ``ultraep_jax.commands``, imported when chosen.
COMMANDS = ("demo", "view", "trace", "recommend", "plan", "simulate", "paper", "bench", "doctor")
_PROGRAM = "ultraep"


def main(argv: Sequence[str] | None = None) -> int:
  """Runs one command and returns its exit status.

  Args:
    argv: arguments after the program's name; ``None`` takes them from ``sys.argv``.
  """
  argv = sys.argv[1:] if argv is None else argv
  for stream in (sys.stdout, sys.stderr):
    if isinstance(stream, io.TextIOWrapper):
      stream.reconfigure(errors="replace")  # of what its encoding does not have
  name = make_parser().parse_args(argv[:1] or ["--help"]).command
  command = importlib.import_module(f"{ultraep_jax.commands.__name__}.{name}")
  # A program that gets its arguments passed on has its own --help.
  passes_on = getattr(command, "PASSES_ARGUMENTS_ON", False)
  parser = argparse.ArgumentParser(
    prog=f"{_PROGRAM} {name}",
    description=command.__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    add_help=not passes_on,
  )
  command.add_arguments(parser)
  args, rest = parser.parse_known_args(argv[1:])
  if passes_on:
    args.rest = rest
  elif rest:
    getattr(args, "parser", parser).error(f"unrecognized arguments: {' '.join(rest)}")
  try:
    status = command.run(args)
    if sys.stdout is not None:  # it may be closed
      sys.stdout.flush()
    return status
  except UsageError as error:
    chosen: argparse.ArgumentParser = getattr(args, "parser", parser)
    chosen.error(str(error))
  except KeyboardInterrupt:
    return 130
  except BrokenPipeError:  # the reader of a pipe had enough
    _discard_output()
    return 0
  except Exception as error:
    reason = _reason(error)
    if reason is None:  # a fault of this program
      raise
    print(f"{parser.prog}: {reason}", file=sys.stderr)
    return 1


def _reason(error: Exception) -> str | None:
  """One line for an error that is the command line's or the machine's."""
  if isinstance(error, CommandError):
    return str(error)
  if isinstance(error, MemoryError) or str(error).startswith("RESOURCE_EXHAUSTED"):
    return f"memory: expected enough for these sizes, got: {error}".splitlines()[0]
  if isinstance(error, OSError):
    try:
      sys.stdout.flush()
    except OSError:
      _discard_output()
    unnamed = error.filename is None and error.strerror  # so has what is printed
    if unnamed:
      return f"output: expected to write it, got: {error.strerror}"
    return f"{error.filename}: {error.strerror}" if error.strerror else str(error)
  if isinstance(error, RuntimeError | AssertionError):
    try:
      jax.devices()
    except (RuntimeError, AssertionError) as cause:
      return no_devices(cause)
  return None


def _discard_output() -> None:
  """Else Python would try to write what is left of it once more, when it ends."""
  os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def make_parser() -> argparse.ArgumentParser:
  """The parser of a command's name."""
  parser = argparse.ArgumentParser(
    prog=_PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument(
    "--version", action="version", version=f"ultraep_jax {ultraep_jax.__version__}"
  )
  commands = parser.add_subparsers(dest="command", required=True, metavar="command")
  for name in COMMANDS:
    commands.add_parser(name, help=_summary(name), add_help=False)
  return parser


def _summary(name: str) -> str:
  """The first line of a command's module, which is read and not imported."""
  path = pathlib.Path(*ultraep_jax.commands.__path__, name).with_suffix(".py")
  with path.open(encoding="utf-8") as lines:
    return lines.readline().strip().strip('"')
