"""What these devices, this JAX and this mesh can run; nothing is asked at import time."""

import collections
import ctypes
import os
from collections.abc import Sequence
from typing import Any

import jax

Array = jax.Array
AxisName = str | tuple[str, ...]  # of a mesh, or of several as one, the first one slowest

_JAX_VERSIONS = ((0, 11, 2), (0, 13))
# Of Hopper, where no GPU can be asked: as kernels are lowered on a CPU.
_SMS, _SHARED_BYTES = 132, 227 * 1024
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


def num_sms() -> int:
  """SMs of a device of the current mesh, for which kernels are lowered, else of a default one."""
  device = jax.sharding.get_abstract_mesh().abstract_device
  if device is not None and device.platform == "gpu" and device.num_cores:
    return device.num_cores
  return _ask_device("core_count", otherwise=_SMS)


def num_blocks(wanted: int | None) -> int:
  """Of a kernel: one for each SM, so that all run at a time, or fewer if ``wanted``.

  Raises:
    ValueError: more than the device has SMs.
  """
  sms = num_sms()
  if wanted is not None and wanted > sms:
    raise ValueError(f"blocks: expected at most the {sms} SMs of the device, got {wanted}")
  return sms if wanted is None else wanted


def shared_bytes() -> int:
  """What a block may use of the shared memory of a default device."""
  return _ask_device("shared_memory_per_block_optin", otherwise=_SHARED_BYTES)


def _ask_device(attribute: str, otherwise: int) -> int:
  device = jax.devices()[0]
  return getattr(device, attribute, otherwise) if device.platform == "gpu" else otherwise


def check_mesh(axis_name: AxisName) -> None:
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
