"""What this machine has, and which implementation ``implementation="auto"`` picks on it."""

import collections
import dataclasses
import importlib.metadata
import platform

import jax

_PACKAGES = ("ultraep-jax", "jax", "jaxlib", "flax")


@dataclasses.dataclass(frozen=True)
class Report:
  """The answer of ``doctor``; ``str(report)`` is the text for people.

  Attributes:
    versions: version of python and of each package, ``"not installed"`` if it has no metadata.
    devices: number of devices of each kind, over all processes, e.g. ``{"cpu": 8}``.
    processes: JAX processes that own those devices.
    implementation: what ``implementation="auto"`` picks here.
    reason: why it does.
  """

  versions: dict[str, str]
  devices: dict[str, int]
  processes: int
  implementation: str
  reason: str

  def __str__(self) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
    devices = ", ".join(f"{count} x {kind}" for kind, count in self.devices.items())
    return (
      f"versions:       {versions}\n"
      f"devices:        {devices} ({self.processes} process{'es' * (self.processes != 1)})\n"
      f'implementation: "auto" picks "{self.implementation}": {self.reason}'
    )


def doctor() -> Report:
  """Reports versions, devices and the implementation that ``"auto"`` picks, and why.

  Initialises JAX's backend, as any computation does.

  >>> print(doctor())  # doctest: +ELLIPSIS
  versions:       python 3..., ultraep-jax ..., jax 0..., jaxlib 0..., flax 0...
  devices:        ...
  implementation: "auto" picks "portable": the layer does not use the GPU kernels yet
  """
  return Report(
    versions={"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES},
    devices=dict(collections.Counter(device.device_kind for device in jax.devices())),
    processes=jax.process_count(),
    implementation="portable",
    reason="the layer does not use the GPU kernels yet",
  )


def _version(package: str) -> str:
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return "not installed"
