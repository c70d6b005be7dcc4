"""What these devices, this JAX and this mesh can run; nothing is asked at import time."""

import collections
import ctypes
import os
from collections.abc import Sequence
from typing import Any

import jax

_JAX_VERSIONS = ((0, 11, 2), (0, 13))
_HOPPER = "9"  # the matmuls are of its instructions, which Blackwell lacks
_NCCL_ACROSS_PROCESSES = (2, 29)  # has ncclGetPeerDevicePointer, through which XLA finds peers


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
  per_process = collections.Counter(device.process_index for device in devices)
  if len(per_process) == 1:
    return None
  if max(per_process.values()) > 1:
    return "the kernels need one process that drives all GPUs, or one process for each"
  return _why_not_across_processes(nccl_version())


def _why_not_across_processes(nccl: tuple[int, int, int] | None) -> str:
  """Also with a new NCCL: a kernel has been seen to run there, the whole layer has not."""
  if nccl is None or nccl < _NCCL_ACROSS_PROCESSES:
    found = "no NCCL is loaded" if nccl is None else f"this is {'.'.join(map(str, nccl))}"
    return (
      "with one process for each GPU the kernels need NCCL >= 2.29 "
      f"(pip install -U nvidia-nccl-cu13), {found}"
    )
  return (
    "the kernels have not been verified with one process for each GPU: "
    'implementation="mosaic_gpu" asks for them all the same'
  )


def nccl_version() -> tuple[int, int, int] | None:
  """Of the NCCL library that this process has loaded; ``None`` if it has none."""
  try:
    library = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOW | os.RTLD_NOLOAD)
    number = ctypes.c_int()
    library.ncclGetVersion(ctypes.byref(number))
  except (OSError, AttributeError):  # not loaded; no such mode or function
    return None
  return number.value // 10_000, number.value // 100 % 100, number.value % 100


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
