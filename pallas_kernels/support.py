"""What these devices, this JAX and this mesh can run; nothing is asked at import time."""

import collections
import ctypes
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

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
  # XLA numbers hosts, or sets of hosts that NVLink joins, by this.
  hosts = {getattr(device, "slice_index", device.process_index) for device in devices}
  if len(hosts) > 1:
    return f"the kernels reach the GPUs of one host, these are of {len(hosts)}"
  nccl = nccl_version()
  if nccl is None or nccl < _NCCL_ACROSS_PROCESSES:
    found = "no NCCL is loaded" if nccl is None else f"this is {'.'.join(map(str, nccl))}"
    return (
      "with one process for each GPU the kernels need NCCL >= 2.29 "
      f"(pip install -U nvidia-nccl-cu13), {found}"
    )
  return None


def nccl_version() -> tuple[int, int, int] | None:
  """Of the NCCL library that this process has loaded; ``None`` if it has none.

  JAX's plugin loads the one of the package ``nvidia-nccl-cu13`` as it starts. One that XLA finds
  elsewhere is loaded with the first collective, and ``None`` before.
  """
  try:
    library = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOW | os.RTLD_NOLOAD)
    number = ctypes.c_int()
    library.ncclGetVersion(ctypes.byref(number))
  except (OSError, AttributeError):  # not loaded; no such mode or function
    return None
  return number.value // 10_000, number.value // 100 % 100, number.value % 100


def call(kernel: Callable[..., Sequence[Any]], operands: Sequence[Any]) -> list[Any]:
  """The results of a kernel that reaches other GPUs: what all of these are called through."""
  return _in_own_memory(kernel(*_in_own_memory(operands)))


def _in_own_memory(values: Sequence[Any]) -> list[Any]:
  """What goes into or comes out of a kernel that reaches other GPUs, as arrays of their own.

  XLA hands kernels slices of larger arrays in place, such as a layer's weights in a scan. Among
  several processes NCCL has to make a window of the memory, and refuses one that starts anywhere
  ("Window address must be suitably aligned", openxla/xla#47461); there a barrier keeps slicing
  apart from the kernel. Mutable references pass.
  """
  if jax.process_count() == 1:
    return list(values)
  arrays = [value for value in values if isinstance(value, jax.Array)]
  apart = iter(lax.optimization_barrier(arrays))
  return [next(apart) if isinstance(value, jax.Array) else value for value in values]


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
