"""Show versions, devices, what runs here and why not, and check a small layer.

The check balances a small layer on the devices that are here and compares it with a dense one.
Without a GPU it takes virtual CPU devices, so that there is something to balance. The exit status
is 1 if it fails.
"""

import argparse
import contextlib
import dataclasses
import json
import os

import jax

from ultraep_jax.doctor import doctor
from ultraep_jax.tools import processes
from ultraep_jax.tools.errors import CommandError, no_devices
from ultraep_jax.tools.selfcheck import self_check

_VIRTUAL = 4  # devices


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """How much to do and how to print it."""
  parser.add_argument("--no-check", action="store_true", help="only look, run no layer")
  parser.add_argument("--json", action="store_true", help="print JSON")
  processes.add_argument(parser)


def run(args: argparse.Namespace) -> int:
  """Prints the report and the outcome of the check."""
  return processes.run(_report, args)


def _report(args: argparse.Namespace) -> int:
  virtual = args.processes == 1 and _ask_for_virtual_devices()
  try:
    report = doctor()
  except (RuntimeError, AssertionError) as error:
    raise CommandError(no_devices(error)) from None
  if virtual and set(report.devices) == {"cpu"}:
    report = dataclasses.replace(report, devices={"virtual cpu": report.devices["cpu"]})
  if not args.json:
    print(report, flush=True)
  check = None if args.no_check else self_check()
  if args.json:
    outcome = None if check is None else dataclasses.asdict(check)
    print(json.dumps({**dataclasses.asdict(report), "check": outcome}, indent=2))
  elif check is not None:
    print(f"check:          {check}")
  return 0 if check is None or check.passed else 1


def _ask_for_virtual_devices() -> bool:
  """Whether CPUs will count as several devices: not if the user or JAX has settled it before."""
  if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
    return False
  if getattr(jax.config, "jax_num_cpu_devices", -1) != -1:
    return False
  with contextlib.suppress(RuntimeError):
    jax.config.update("jax_num_cpu_devices", _VIRTUAL)
    return True
  return False
