"""What this machine has, and which implementation ``implementation="auto"`` picks on it."""

import collections
import dataclasses
import importlib.metadata
import platform

import jax

from ultraep_jax.devices import known
from ultraep_jax.implementation import why_portable

_PACKAGES = ("ultraep-jax", "jax", "jaxlib", "flax")
_KERNELS_RUN = 'its kernels run on these devices; what one of them cannot do falls to "portable"'


@dataclasses.dataclass(frozen=True)
class Report:
  """The answer of ``doctor``; ``str(report)`` is the text for people.

  Attributes:
    versions: version of python and of each package, ``"not installed"`` if it has no metadata.
    devices: number of devices of each kind, over all processes, e.g. ``{"cpu": 8}``.
    processes: JAX processes that own those devices.
    implementation: what ``implementation="auto"`` picks here.
    reason: why it does.
    description: which description of devices says what copies cost and how kernels are laid out.
    mesh: how to lay a mesh over these devices.
  """

  versions: dict[str, str]
  devices: dict[str, int]
  processes: int
  implementation: str
  reason: str
  description: str
  mesh: str

  def __str__(self) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
    devices = ", ".join(f"{count} x {kind}" for kind, count in self.devices.items())
    return (
      f"versions:       {versions}\n"
      f"devices:        {devices} ({self.processes} process{'es' * (self.processes != 1)})\n"
      f'implementation: "auto" picks "{self.implementation}": {self.reason}\n'
      f"description:    {self.description}\n"
      f"mesh:           {self.mesh}"
    )


def doctor() -> Report:
  """Reports versions, devices, the implementation that ``"auto"`` picks, and why, and a mesh.

  Initialises JAX's backend, as any computation does.

  >>> print(doctor())  # doctest: +ELLIPSIS
  versions:       python 3..., ultraep-jax ..., jax 0..., jaxlib 0..., flax 0...
  devices:        ...
  implementation: "auto" picks ...
  description:    ...
  mesh:           ...
  """
  devices = jax.devices()
  obstacle = why_portable()
  return Report(
    versions={"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES},
    devices=dict(collections.Counter(device.device_kind for device in devices)),
    processes=jax.process_count(),
    implementation="mosaic_gpu" if obstacle is None else "portable",
    reason=_KERNELS_RUN if obstacle is None else obstacle,
    description=description_advice(),
    mesh=mesh_advice(len(devices), len(jax.local_devices()), devices[0].platform),
  )


def description_advice() -> str:
  """Which description the devices at hand have, and what follows where they have none."""
  device, kind = known.resolve(), known.here().device_kind
  if device is None:
    return f'none of {kind}: objective="time" balances as if copies cost nothing'
  if device.match(kind):
    return f'"{device.name}": {device.hardware}'
  return (
    f'"{device.name}" as the nearest, as there is none of {kind}; '
    "`ultraep bench costs --write FILE` makes one"
  )


def mesh_advice(total: int, local: int, platform_name: str) -> str:
  """How to lay a mesh over the devices.

  Args:
    total: devices of all processes.
    local: of this one.
    platform_name: ``"cpu"``, ``"gpu"`` or ``"tpu"``.
  """
  if total == 1:
    advice = "one device has nothing to balance; the layer runs as a plain one"
    if platform_name == "cpu":
      advice += "; for virtual ones set jax.config.update('jax_num_cpu_devices', 8) first"
    return advice
  advice = f'jax.make_mesh(({total},), ("expert",)) for a multiple of {total} experts; for fewer '
  advice += '("data", "expert")'
  if 1 < local < total:
    advice += f"; domain_size={local} keeps copies among the devices of a process"
  return advice


def _version(package: str) -> str:
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return "not installed"
