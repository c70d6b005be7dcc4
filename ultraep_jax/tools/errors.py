"""How commands and measurements say that they cannot do what was asked."""

import jax


class CommandError(Exception):
  """Ends the program with this message and status 1, without a traceback."""


def no_devices(error: BaseException) -> str:
  """What to say when JAX raises this instead of finding devices."""
  # JAX asserts, without words, where JAX_PLATFORMS names a backend that is not installed.
  reason = str(error) or f"none of the platforms {jax.config.jax_platforms!r}"  # pyright: ignore[reportAttributeAccessIssue]
  return f"devices: expected some that JAX can start, got: {reason.splitlines()[0]}"


def described(error: BaseException, most: int = 300) -> str:
  """An error in a line of a report: its kind, and so many characters of what it says."""
  return f"{type(error).__name__}: {str(error)[:most]}"
