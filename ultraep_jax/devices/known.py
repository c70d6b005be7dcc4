"""Which description the devices at hand have."""

from typing import Any

import jax

import pallas_kernels as kernels
from ultraep_jax.devices.device import Device

# What a GPU without a description of its own is taken for: the one that was measured.
NEAREST = "h200"


def find(kind: str) -> Device | None:
  """The description of devices that JAX calls so; ``None`` if the package has none.

  >>> find("NVIDIA H200").name, find("NVIDIA H100 80GB HBM3").name, find("cpu")
  ('h200', 'h100', None)
  """
  best = max(map(Device.load, Device.names()), key=lambda device: len(device.match(kind)))
  return best if best.match(kind) else None


def resolve(given: Device | None = None) -> Device | None:
  """The description that counts: the given one, else that of the devices at hand.

  These are those of the current mesh, for which kernels are lowered, else the default ones. A GPU
  of an unknown kind is taken for the nearest one known, in plain JAX if it cannot run the kernels.
  Of other devices nothing is known.
  """
  if given is not None:
    return given
  device = here()
  if (found := find(device.device_kind)) is not None or device.platform != "gpu":
    return found
  return Device.load(NEAREST).running(kernels=kernels.has_instructions(device))


def here() -> Any:
  """A device of the current mesh, abstract or not, else one of the default devices."""
  return jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]
