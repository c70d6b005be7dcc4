"""Numbers on command lines, for ``type=`` of ``argparse``: refused there if out of range."""

import argparse
import math
from collections.abc import Callable
from typing import Literal

_MOST = 2**31 - 1


def positive(text: str) -> int:
  """An integer of at least 1."""
  return _integer(text, 1)


def natural(text: str) -> int:
  """An integer of at least 0."""
  return _integer(text, 0)


def port(text: str) -> int:
  """A port of TCP; 0 is any that is free."""
  return _integer(text, 0, 2**16 - 1)


def natural_to(most: int) -> Callable[[str], int]:
  """An integer from 0 to ``most``, for ``type``."""
  return lambda text: _integer(text, 0, most)


def slot_count(text: str) -> int | Literal["auto"]:
  """An integer of at least 0, or ``auto``, as for ``BalanceConfig.replica_slots``."""
  return "auto" if text == "auto" else _integer(text, 0)


def amount(text: str) -> float:
  """A finite number above 0."""
  return _number(text, math.ulp(0.0), "above 0")


def nonnegative(text: str) -> float:
  """A finite number of at least 0."""
  return _number(text, 0.0, "of at least 0")


def factor(text: str) -> float:
  """A finite number of at least 1."""
  return _number(text, 1.0, "of at least 1")


def largest_divisor(number: int, most: int) -> int:
  """Of a number, up to ``most``, for defaults; that of kernels would load Mosaic.

  >>> largest_divisor(45, 8), largest_divisor(7, 6)
  (5, 1)
  """
  return max(d for d in range(1, min(number, most) + 1) if number % d == 0)


def _integer(text: str, least: int, most: int = _MOST) -> int:
  try:
    value = int(text)
  except ValueError:
    value = least - 1
  if not least <= value <= most:
    raise argparse.ArgumentTypeError(f"expected an integer from {least} to {most}, got {text!r}")
  return value


def _number(text: str, least: float, range_: str) -> float:
  try:
    value = float(text)
  except ValueError:
    value = math.nan
  if not least <= value < 1e9:  # also if it is NaN
    raise argparse.ArgumentTypeError(f"expected a number {range_} and below 1e9, got {text!r}")
  return value
