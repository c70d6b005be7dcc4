"""The rates of the devices at hand, for the floor."""

from ultraep_jax.bench.matrix.floor import Rates
from ultraep_jax.devices import known
from ultraep_jax.devices.device import Device


def rates_here() -> Rates:
  """By the data sheet of the devices at hand; devices without a description count as H200."""
  device = known.resolve() or Device.load(known.NEAREST)
  return Rates(device["peak"], device["memory_rate"], device["link_rate"], device["launch_seconds"])
