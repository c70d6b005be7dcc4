"""What this machine has, and what ``implementation="auto"`` picks on it for each operation."""

import collections
import dataclasses
import importlib.metadata
import platform

import jax
import numpy as np

import pallas_kernels as kernels
from ultraep_jax import implementation, nodes
from ultraep_jax.devices import known

_PACKAGES = ("ultraep-jax", "jax", "jaxlib", "flax")
_KERNEL_RUNS = "its kernel runs here; sizes that it cannot do fall to plain JAX"
_NEVER_RUN = "its kernel compiles for Blackwell GPUs and has never run on one"


@dataclasses.dataclass(frozen=True)
class Report:
  """The answer of ``doctor``; ``str(report)`` is the text for people.

  Attributes:
    versions: version of python and of each package, ``"not installed"`` if it has no metadata.
    devices: number of devices of each kind, over all processes, e.g. ``{"cpu": 8}``.
    processes: JAX processes that own those devices.
    implementation: what ``implementation="auto"`` picks here, in a word or a few.
    operations: for each operation, what it picks and why.
    nodes: devices of each node, as JAX numbers them; see ``BalanceConfig.node_size``.
    domain_size: ranks that copies stay among, by ``domain_size="auto"`` on a mesh of all devices.
    description: which description of devices says what copies cost and how kernels are laid out.
    mesh: how to lay a mesh over these devices.
  """

  versions: dict[str, str]
  devices: dict[str, int]
  processes: int
  implementation: str
  operations: dict[str, tuple[str, str]]
  nodes: list[int]
  domain_size: int
  description: str
  mesh: str

  def __str__(self) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
    devices = ", ".join(f"{count} x {kind}" for kind, count in self.devices.items())
    table = "".join(
      f"\n  {operation:<12}  {picked:<10}  {reason}"
      for operation, (picked, reason) in self.operations.items()
    )
    return (
      f"versions:       {versions}\n"
      f"devices:        {devices} ({self.processes} process{'es' * (self.processes != 1)})\n"
      f"nodes:          {node_advice(self.nodes, self.domain_size)}\n"
      f'implementation: "auto" is {self.implementation}{table}\n'
      f"description:    {self.description}\n"
      f"mesh:           {self.mesh}"
    )


def doctor() -> Report:
  """Reports versions, devices, what ``"auto"`` picks for each operation and why, and a mesh.

  Initialises JAX's backend, as any computation does.

  >>> print(doctor())  # doctest: +ELLIPSIS
  versions:       python 3..., ultraep-jax ..., jax 0..., jaxlib 0..., flax 0...
  devices:        ...
  nodes:          ...
  implementation: "auto" is ...
    choose ...
  description:    ...
  mesh:           ...
  """
  devices = jax.devices()
  node_N = nodes.of_devices(devices)
  reasons = implementation.picks()
  return Report(
    versions={"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES},
    devices=dict(collections.Counter(device.device_kind for device in devices)),
    processes=jax.process_count(),
    implementation=implementation.summary(reasons),
    operations={operation: _pick(operation, reason) for operation, reason in reasons.items()},
    nodes=np.bincount(node_N).tolist(),
    domain_size=nodes.smallest(node_N),
    description=description_advice(),
    mesh=mesh_advice(len(devices), devices[0].platform, nodes.smallest(node_N)),
  )


def _pick(operation: str, reason: str | None) -> tuple[str, str]:
  if reason is not None:
    return "portable", reason
  device = kernels.device()
  blackwell = str(getattr(device, "compute_capability", "")).startswith("10.")
  text = _NEVER_RUN if blackwell else _KERNEL_RUNS
  slow = kernels.why_slow(operation, device)
  return "mosaic_gpu", text if slow is None else f"{text}. Slowly: {slow}"


def node_advice(sizes: list[int], domain_size: int) -> str:
  """How devices are joined, and where copies go by default.

  >>> node_advice([8, 8], 8)
  '2, of 8 devices; domain_size="auto" keeps copies among 8 ranks'
  """
  text = f"{len(sizes)}, of {' and '.join(map(str, sorted(set(sizes))))} devices"
  if len(sizes) == 1:
    return f"{text}; copies go to any rank"
  return f'{text}; domain_size="auto" keeps copies among {domain_size} ranks'


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


def mesh_advice(total: int, platform_name: str, node_size: int) -> str:
  """How to lay a mesh over the devices.

  Args:
    total: devices of all processes.
    platform_name: ``"cpu"``, ``"gpu"`` or ``"tpu"``.
    node_size: devices of a node.
  """
  if total == 1:
    advice = "one device has nothing to balance; the layer runs as a plain one"
    if platform_name == "cpu":
      advice += "; for virtual ones set jax.config.update('jax_num_cpu_devices', 8) first"
    return advice
  if node_size < total:  # several nodes, which jax.make_mesh refuses
    sizes = total // node_size, node_size
    advice = f'jax.sharding.Mesh(np.reshape(jax.devices(), {sizes}), ("data", "expert")) '
    return advice + 'for experts inside a node; one axis "expert" for experts on all'
  advice = f'jax.make_mesh(({total},), ("expert",)) for a multiple of {total} experts; for fewer '
  return advice + '("data", "expert")'


def _version(package: str) -> str:
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return "not installed"
