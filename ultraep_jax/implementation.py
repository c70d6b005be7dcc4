"""Which implementation of an operation runs: the first of an ordered list that can.

It is told for each operation by itself. Kernels that stay on their GPU run wherever the GPU can;
those that write into the memory of others where the mesh can, too.
"""

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import jax

import pallas_kernels as kernels
from pallas_kernels import UNTUNED, Tunings
from ultraep_jax import nodes
from ultraep_jax.config import Implementation
from ultraep_jax.devices import known
from ultraep_jax.devices.device import Device
from ultraep_jax.nodes import NodeSize

Implementations = tuple[str, ...]

_log = logging.getLogger("ultraep_jax")


OPERATIONS = tuple(kernels.NEEDS)


def resolve(
  implementation: Implementation, operation: str, node_size: NodeSize = "auto"
) -> Implementations:
  """The implementations of an operation to try, in order.

  Asks for the devices unless it is ``"portable"``. Why kernels cannot run is logged once, as a
  warning on GPUs; so is that kernels are asked for which do not run: lowered for another device
  they still compile.

  Args:
    implementation: as in ``BalanceConfig``.
    operation: one of ``OPERATIONS``.
    node_size: as in ``BalanceConfig``; counts for operations whose kernels reach other GPUs.

  >>> resolve("portable", "plan")
  ('portable',)
  """
  if implementation == "portable":
    return ("portable",)
  reason = why_portable(operation, node_size)
  if implementation == "mosaic_gpu":
    if reason is not None:
      _say_once(f'implementation "mosaic_gpu" does not run here: {reason}', logging.WARNING)
    return ("mosaic_gpu",)
  if reason is None:
    return ("mosaic_gpu", "portable")
  level = logging.WARNING if kernels.device().platform == "gpu" else logging.INFO
  _say_once(f'implementation "auto" is "portable" where kernels cannot run: {reason}', level)
  return ("portable",)


def why_portable(operation: str, node_size: NodeSize = "auto") -> str | None:
  """Why ``"auto"`` picks no kernels for an operation, else ``None``.

  On the devices of the current mesh, or on all default ones.
  """
  reasons = (kernels.why_unsupported(operation, device) for device in _kinds())
  reason = next((each for each in reasons if each is not None), None)
  if reason is not None or not kernels.NEEDS[operation].reaches_others:
    return reason
  mesh, devices = jax.sharding.get_abstract_mesh(), jax.devices()
  node_N = nodes.of_devices(devices) if mesh.empty else nodes.number(mesh, node_size)
  if (count := int(node_N.max()) + 1) > 1:
    return f"it reaches other GPUs, which needs a mesh on one node, this is on {count}"
  return kernels.why_unreachable(devices, len(node_N))


def _kinds() -> list[Any]:
  """The device that the current mesh says it has, and others where it must have others, too.

  A mesh under a trace only says what its first device is.
  """
  device, mesh = kernels.device(), jax.sharding.get_abstract_mesh()
  all_of_them = [each for each in jax.devices() if each.platform == device.platform]
  alike = sum(each.device_kind == device.device_kind for each in all_of_them)
  return [device] if not mesh.empty and mesh.size <= alike else [device, *all_of_them]


def picks(node_size: NodeSize = "auto") -> dict[str, str | None]:
  """For each operation, why ``"auto"`` picks no kernel for it here; ``None``: it does."""
  return {operation: why_portable(operation, node_size) for operation in OPERATIONS}


def summary(reasons: Mapping[str, str | None]) -> str:
  """Of ``picks``, in a word or a few.

  >>> summary({"plan": None, "exchange": "…"})
  'mosaic_gpu, portable exchange'
  """
  portable = [operation for operation, reason in reasons.items() if reason is not None]
  if not portable:
    return "mosaic_gpu"
  return (
    "portable" if len(portable) == len(reasons) else f"mosaic_gpu, portable {', '.join(portable)}"
  )


def resolve_tunings(device: Device | None, implementations: Implementations) -> Tunings:
  """How to lay kernels out: as the description of the devices says, given or at hand."""
  described = known.resolve(device) if "mosaic_gpu" in implementations else None
  return UNTUNED if described is None else described.tunings


def first_that_can[T](
  implementations: Implementations, candidates: Mapping[str, Callable[[], T]]
) -> T:
  """The result of the first of ``implementations`` that does not raise NotImplementedError.

  Raises:
    NotImplementedError: the last reason, if none can.

  >>> def cannot():
  ...   raise NotImplementedError("not here")
  >>> first_that_can(("kernel", "plain"), {"kernel": cannot, "plain": lambda: "done"})
  'done'
  """
  *preferred, last = implementations
  for name in preferred:
    try:
      return candidates[name]()
    except NotImplementedError as reason:
      _log.debug("%s: %s", name, reason)
  if last != "mosaic_gpu":
    return candidates[last]()
  try:
    return candidates[last]()
  except NotImplementedError as reason:
    # Sizes that a kernel cannot do are of no use to know where no kernel runs.
    if (obstacle := why_portable(OPERATIONS[0])) is None:
      raise
    raise NotImplementedError(f'implementation "mosaic_gpu": {obstacle}; {reason}') from reason


@functools.cache
def _say_once(text: str, level: int) -> None:
  _log.log(level, text)
