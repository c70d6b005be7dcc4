"""The devices that a measurement runs on, or why it cannot."""

from collections.abc import Sequence
from typing import Any

import jax

from ultraep_jax import implementation
from ultraep_jax.tools.errors import CommandError


def devices(ranks: int | None = None, *, least: int = 1, full_size: bool = False) -> Sequence[Any]:
  """The first devices.

  Args:
    ranks: how many; ``None``: all.
    least: that the measurement needs.
    full_size: it has the sizes of published models, which no CPU computes in acceptable time.

  Raises:
    CommandError: there are no such devices.
  """
  found = jax.devices()
  if ranks is not None and ranks > len(found):
    raise CommandError(f"--ranks: expected at most {len(found)} devices, got {ranks}")
  chosen = found[:ranks]
  what = f"{len(chosen)} x {chosen[0].device_kind}"
  if len(chosen) < least:
    raise CommandError(f"devices: expected at least {least} GPUs, got {what}")
  if full_size and chosen[0].platform == "cpu":
    raise CommandError(f"devices: expected GPUs for models of full size, got {what}")
  return chosen


def devices_for_kernels(*, least: int = 1) -> Sequence[Any]:
  """All devices, on which kernels are measured that run nowhere else.

  Raises:
    CommandError: there are no such devices.
  """
  reasons = filter(None, implementation.picks().values())
  if (reason := next(reasons, None)) is not None:
    raise CommandError(f"devices: {reason}")
  return devices(least=least)
