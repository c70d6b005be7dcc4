"""Which devices of a mesh scale-up links join: a *node*, as JAX numbers them or as declared.

Kernels write into memory of their node only, and copies of experts stay inside it unless told
otherwise. A function that is being traced sees no devices, only how many there are along each axis.
So their nodes are taken to be those of JAX's devices in JAX's order, and compared with those of the
mesh when the program is lowered.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from ultraep_jax.config import BalanceConfig
from ultraep_jax.mesh import Mesh, axes_of, axis_size
from ultraep_jax.types import Array, AxisName

NodeSize = int | Literal["auto"]


def settle(config: BalanceConfig, mesh: Mesh, axis_name: AxisName) -> BalanceConfig:
  """The configuration with ``node_size`` and ``domain_size`` as numbers.

  Args:
    config: of a layer.
    mesh: of the layer; its devices are asked if it has any.
    axis_name: the experts' axis.

  Raises:
    ValueError: the ranks of a node are not side by side along the axis, or a size does not fit.
  """
  node_N = number(mesh, config.node_size)
  size = _side_by_side(node_N, mesh, axis_name, _domain(config, mesh, axis_name))
  if config.domain_size != "auto":
    size = config.domain_of(axis_size(mesh, axis_name))
  return dataclasses.replace(config, node_size=smallest(node_N), domain_size=size)


def ranks(config: BalanceConfig, mesh: Mesh, axis_name: AxisName) -> int:
  """Ranks along the axis that are on one node, side by side; divides all of them.

  Raises:
    ValueError: as ``settle``.
  """
  node_N = number(mesh, config.node_size)
  return _side_by_side(node_N, mesh, axis_name, _domain(config, mesh, axis_name))


def number(mesh: Mesh, node_size: NodeSize) -> np.ndarray:
  """``[N]``, the node of each device of a mesh, counted from 0 in the order of the mesh.

  Raises:
    ValueError: ``node_size`` does not divide the devices.
  """
  if node_size != "auto":
    if mesh.size > node_size and mesh.size % node_size:
      raise ValueError(
        f"node_size: expected a divisor of the {mesh.size} devices of the mesh, or more, "
        f"got {node_size}"
      )
    return np.arange(mesh.size) // node_size
  if isinstance(mesh, jax.sharding.Mesh):
    return of_devices(mesh.devices.flat)
  devices = likely_devices(mesh)
  return of_devices(devices) if devices else np.zeros(mesh.size, int)


def likely_devices(mesh: jax.sharding.AbstractMesh) -> Sequence[Any]:
  """The devices of an abstract mesh if it has JAX's in their order; none if they are others."""
  devices, kind = jax.devices(), mesh.abstract_device and mesh.abstract_device.device_kind
  if kind not in (None, devices[0].device_kind) or len(devices) < mesh.size:
    return []
  return devices[: mesh.size]


def of_devices(devices: Iterable[Any]) -> np.ndarray:
  """The node of each device, counted from 0 in their order.

  >>> of_devices(jax.devices()[:2]).tolist()
  [0, 0]
  """
  numbers: dict[tuple[int, ...], int] = {}
  return np.array([numbers.setdefault(_node(device), len(numbers)) for device in devices])


def _node(device: Any) -> tuple[int, ...]:
  """What devices of a node have in common.

  XLA numbers sets of devices that scale-up links join as slices: the GPUs of a host, or those that
  ``jax.distributed.initialize`` was told. Devices that are only described, to compile for, say it
  in their coordinates. Of other devices, those of a process are taken to be joined.
  """
  coordinates = getattr(device, "coords", None) or ()
  if device.platform == "gpu" and device.local_hardware_id is None and len(coordinates) == 3:
    return (coordinates[0],)
  return (getattr(device, "slice_index", device.process_index),)


def smallest(node_N: np.ndarray) -> int:
  """Devices of a node; where nodes differ, as many as fit all of them side by side.

  >>> smallest(np.array([0, 0, 0, 0, 1, 1]))
  2
  """
  return math.gcd(*np.unique(node_N, return_counts=True)[1].tolist())


def confirm(value: Array, config: BalanceConfig, mesh: Mesh, axis_name: AxisName) -> Array:
  """The same value. Raises ValueError as it is lowered if the nodes are not as while tracing."""
  if config.node_size != "auto" or mesh.size == 1:
    return value
  node_N = tuple(number(mesh, "auto").tolist())
  domain_size = _domain(config, mesh, axis_name)
  return _confirmed_p.bind(value, node_N=node_N, axis_name=axis_name, domain_size=domain_size)


def _domain(config: BalanceConfig, mesh: Mesh, axis_name: AxisName) -> int | None:
  """The ranks of a domain, if declared."""
  return None if config.domain_size == "auto" else config.domain_of(axis_size(mesh, axis_name))


def _side_by_side(
  node_N: np.ndarray, mesh: Mesh, axis_name: AxisName, domain_size: int | None
) -> int:
  """Ranks along the axis that are on one node, side by side; divides all of them.

  Raises:
    ValueError: a node has ranks on both sides of another's; or, with ``domain_size``, ranks in
      several domains that other nodes have ranks in, too.
  """
  axes = [mesh.axis_names.index(axis) for axis in axes_of(axis_name)]
  by_axis = node_N.reshape(tuple(mesh.shape.values()))
  last = range(-len(axes), 0)
  lines = np.moveaxis(by_axis, axes, tuple(last)).reshape(-1, axis_size(mesh, axis_name))
  runs: list[int] = []
  for line in lines:
    ends = [*(np.flatnonzero(np.diff(line)) + 1).tolist(), len(line)]
    runs += np.diff([0, *ends]).tolist()
    apart = len(ends) > len(set(line.tolist()))
    if apart and (domain_size is None or _shared(line.reshape(-1, domain_size))):
      raise ValueError(_interleaved(node_N, line, mesh, axis_name))
  return math.gcd(*runs)


def _shared(node_DR: np.ndarray) -> bool:
  """Whether a domain has ranks of several nodes, and one of these nodes reaches another domain."""
  domains = [set(node_R) for node_R in node_DR.tolist()]
  others = (set().union(*domains[:i], *domains[i + 1 :]) for i in range(len(domains)))
  return any(len(nodes) > 1 and nodes & other for nodes, other in zip(domains, others, strict=True))


def _interleaved(node_N: np.ndarray, line: np.ndarray, mesh: Mesh, axis_name: AxisName) -> str:
  message = (
    f"mesh: expected the ranks of each node side by side along {axis_name!r}, got those of nodes "
    f"{line.tolist()}"
  )
  if not isinstance(mesh, jax.sharding.Mesh):
    return message
  order = np.argsort(node_N, kind="stable")
  ids = [device.id for device in mesh.devices.flat]
  shape = tuple(mesh.shape.values())
  return (
    f"{message}; devices with the ids {[ids[i] for i in order]}, reshaped to {shape}, have them so"
  )


_confirmed_p = Primitive("nodes_confirmed")
_confirmed_p.def_abstract_eval(lambda aval, **_: aval)
batching.primitive_batchers[_confirmed_p] = lambda values, axes, **params: (
  _confirmed_p.bind(*values, **params),
  axes[0],
)


def _lower(
  context: Any, value: Any, *, node_N: tuple[int, ...], axis_name: AxisName, domain_size: int | None
) -> list[Any]:
  mesh = getattr(context.module_context.axis_context, "mesh", None)
  if not isinstance(mesh, jax.sharding.Mesh):
    return [value]
  found_N = of_devices(mesh.devices.flat)
  if found_N.tolist() != list(node_N):
    _side_by_side(found_N, mesh, axis_name, domain_size)
    raise ValueError(
      f"mesh: expected devices of nodes {list(node_N)}, as JAX orders them, got "
      f"{found_N.tolist()}; give the mesh to sharded_moe, or say node_size in BalanceConfig"
    )
  return [value]


mlir.register_lowering(_confirmed_p, _lower)
