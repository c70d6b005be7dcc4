"""What these devices, this JAX and this mesh can run; nothing is asked at import time."""

from collections.abc import Sequence
from typing import Any

import jax

_JAX_VERSIONS = ((0, 11, 2), (0, 13))
_HOPPER = "9"  # the matmuls are of its instructions, which Blackwell lacks


def why_unsupported(
  devices: Sequence[Any], jax_version: tuple[int, ...] = jax.__version_info__
) -> str | None:
  """Why kernels that reach other GPUs' memory cannot run on these ``jax`` devices, else ``None``.

  That the GPUs are joined by NVLink cannot be asked of JAX and is not checked.
  """
  low, high = _JAX_VERSIONS
  if not low <= tuple(jax_version) < high:
    return f"the kernels need jax >= 0.11.2 and < 0.13, this is {jax.__version__}"
  kinds = sorted({device.device_kind for device in devices})
  if any(device.platform != "gpu" for device in devices):
    return f"the kernels need NVIDIA GPUs, these are {kinds}"
  # AMD devices have names such as "gfx942" here.
  capabilities = {str(getattr(device, "compute_capability", "")) for device in devices}
  if any(capability.partition(".")[0] != _HOPPER for capability in capabilities):
    return f"the kernels need Hopper GPUs, these are {kinds}"
  if len({device.process_index for device in devices}) > 1:
    return "the kernels need one process that drives all GPUs"
  return None


def check_mesh(axis_name: str) -> None:
  """Checks that the enclosing ``shard_map`` is one that remote references work in.

  Raises:
    NotImplementedError: an axis of the mesh is not manual.
  """
  mesh = jax.sharding.get_abstract_mesh()
  automatic = [name for name in mesh.axis_names if name not in mesh.manual_axes]
  if automatic:
    raise NotImplementedError(
      f"mesh: expected a shard_map over all axes of {mesh.axis_names} for kernels along "
      f"{axis_name!r}, got {automatic} left out"
    )
