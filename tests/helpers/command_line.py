"""Commands, run here or to be run by another process."""

import sys

from ultraep_jax import cli


def run(capsys, *arguments: object) -> tuple[int, str, str]:
  try:
    status = cli.main([str(argument) for argument in arguments])
  except SystemExit as end:  # a wrong command line
    assert isinstance(end.code, int)
    status = end.code
  out, err = capsys.readouterr()
  return status, out, err


def command(*arguments: object) -> list[str]:
  return [sys.executable, "-m", "ultraep_jax", *map(str, arguments)]
