"""How commands and measurements say that they cannot do what was asked."""

import argparse
from collections.abc import Mapping, Sequence

import jax


class CommandError(Exception):
  """Ends the program with this message and status 1, without a traceback."""


class UsageError(CommandError):
  """Ends the program with its usage, this message and status 2: the command line is wrong."""


def refused(
  error: Exception, args: argparse.Namespace, options: Mapping[str, Sequence[str]]
) -> CommandError:
  """What a command says of a check that failed: the option as typed, where one is at fault.

  Args:
    error: begins with the name of what was checked, as ``num_ranks: expected …``.
    args: of the command; an option that is ``None`` was not given and is not at fault.
    options: for each name, the options that it comes from.
  """
  name, _, reason = str(error).partition(": ")
  given = [
    option
    for option in options.get(name, ())
    if getattr(args, option.removeprefix("--").replace("-", "_")) is not None
  ]
  return UsageError(f"{', '.join(given)}: {reason}") if given else CommandError(str(error))


def no_devices(error: BaseException) -> str:
  """What to say when JAX raises this instead of finding devices."""
  # JAX asserts, without words, where JAX_PLATFORMS names a backend that is not installed.
  reason = str(error) or f"none of the platforms {jax.config.jax_platforms!r}"  # pyright: ignore[reportAttributeAccessIssue]
  return f"devices: expected some that JAX can start, got: {reason.splitlines()[0]}"


def described(error: BaseException, most: int = 300) -> str:
  """An error in a line of a report: its kind, and so many characters of what it says."""
  return f"{type(error).__name__}: {str(error)[:most]}"
