"""What these devices, this JAX and this mesh can run; nothing is asked at import time."""

import collections
import ctypes
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

Array = jax.Array
AxisName = str | tuple[str, ...]  # of a mesh, or of several as one, the first one slowest

_JAX_VERSIONS = ((0, 11, 2), (0, 13))
# Of Hopper, where no GPU can be asked: as kernels are lowered on a CPU.
_SMS, _SHARED_BYTES = 132, 227 * 1024
_NCCL_ACROSS_PROCESSES = (2, 29)  # has ncclGetPeerDevicePointer, through which XLA finds peers
_MOST_PEERS = 32  # that XLA's barrier in front of such a kernel holds (openxla/xla#47283)
HOPPER, BLACKWELL = 9, 10  # major numbers of the compute capability
_GENERATIONS = {HOPPER: "Hopper", BLACKWELL: "Blackwell"}
# Of GPUs that are only described, to compile for, JAX says the name and no compute capability.
_NAMES = {
  HOPPER: ("H100", "H200", "H20", "H800", "GH200"),
  BLACKWELL: ("B100", "B200", "B300", "GB200", "GB300"),
}


class Needs(NamedTuple):
  """What the kernels of an operation need; of shared memory, ``launch`` checks how much.

  Attributes:
    generations: of GPUs that have their instructions, by major compute capability.
    reaches_others: whether they write into the memory of other GPUs.
  """

  generations: tuple[int, ...]
  reaches_others: bool = False


# Bulk copies, mbarriers and clusters. On Blackwell these kernels were compiled and never run.
EITHER = (HOPPER, BLACKWELL)
WGMMA = (HOPPER,)  # Blackwell multiplies by other instructions, and has but JAX's matmul of them
NEEDS: Mapping[str, Needs] = {
  "choose": Needs(EITHER),
  "plan": Needs(EITHER),
  "route": Needs(EITHER),
  "replicate": Needs(EITHER, reaches_others=True),
  "exchange": Needs(EITHER, reaches_others=True),
  "place": Needs(EITHER),
  "matmul": Needs(EITHER),
}


def why_unsupported(
  operation: str, device: Any, jax_version: tuple[int, ...] = jax.__version_info__
) -> str | None:
  """Why the kernels of an operation of ``NEEDS`` cannot run on a JAX device, else ``None``."""
  low, high = _JAX_VERSIONS
  if not low <= tuple(jax_version) < high:
    return f"the kernels need jax >= 0.11.2 and < 0.13, this is {jax.__version__}"
  if device.platform != "gpu":
    return f"the kernels need NVIDIA GPUs, this is a {device.device_kind}"
  return _why_not_compiled(NEEDS[operation].generations, device)


def _why_not_compiled(generations: Sequence[int], device: Any) -> str | None:
  if generation(device) in generations:
    return None
  names = " or ".join(_GENERATIONS[generation] for generation in generations)
  return f"the kernels need {names} GPUs, this is a {device.device_kind}"


def has_instructions(device: Any) -> bool:
  """Whether a GPU, here or described, has the instructions of every operation's kernels."""
  return all(generation(device) in needs.generations for needs in NEEDS.values())


def generation(device: Any) -> int | None:
  """The major compute capability of a GPU; ``None`` if it is of AMD or of no known name."""
  if (capability := getattr(device, "compute_capability", None)) is not None:
    major = str(capability).partition(".")[0]
    return int(major) if major.isdecimal() else None  # AMD's are such as "gfx942"
  words = device.device_kind.split()
  return next((major for major, names in _NAMES.items() if {*names} & {*words}), None)


def why_unreachable(devices: Sequence[Any], size: int) -> str | None:
  """Why kernels cannot reach the memory of all GPUs of a node, else ``None``.

  That NVLink joins the GPUs cannot be asked of JAX and is not checked.

  Args:
    devices: all of JAX's.
    size: of the mesh, which is on one node.
  """
  if size > _MOST_PEERS:
    most = f"at most {_MOST_PEERS}"
    return f"it reaches other GPUs, of which XLA joins {most}, this is a mesh of {size}"
  per_process = collections.Counter(device.process_index for device in devices)
  if len(per_process) == 1 or size == 1:
    return None
  if max(per_process.values()) > 1:
    return "it reaches other GPUs, which needs one process that drives all, or one for each"
  if size != len(devices):
    return f"it reaches other GPUs, which needs a mesh of all {len(devices)}, this is of {size}"
  nccl = nccl_version()
  if nccl is None or nccl < _NCCL_ACROSS_PROCESSES:
    found = "no NCCL is loaded" if nccl is None else f"this is {'.'.join(map(str, nccl))}"
    return (
      "it reaches GPUs of other processes, which needs NCCL >= 2.29 "
      f"(pip install -U nvidia-nccl-cu13), {found}"
    )
  return None


def nccl_version() -> tuple[int, int, int] | None:
  """Of the NCCL library that this process has loaded; ``None`` if it has none.

  JAX's plugin loads the one of the package ``nvidia-nccl-cu13`` as it starts. One that XLA finds
  elsewhere is loaded with the first collective, and ``None`` before.
  """
  library, number = _loaded("libnccl.so.2"), ctypes.c_int()
  if not hasattr(library, "ncclGetVersion"):
    return None
  library.ncclGetVersion(ctypes.byref(number))
  return number.value // 10_000, number.value // 100 % 100, number.value % 100


def why_slow(
  operation: str, device: Any, jax_version: tuple[int, ...] = jax.__version_info__
) -> str | None:
  """Why the kernels of an operation run here, but not as fast as they are made for, else ``None``.

  Warpgroups that multiply take registers from the one that loads. Since 0.12 JAX compiles kernels
  by nvJitLink where that is loaded, as with its packages of CUDA. It leaves registers where they
  are, so that sums do not fit, and no instruction multiplies while another does
  (docs/lab/kernels.md, Registers and spills).
  """
  if operation != "matmul" or generation(device) != HOPPER or tuple(jax_version) < (0, 12):
    return None
  if not any(_loaded(f"libnvJitLink.so.{major}") for major in (12, 13)):
    return None
  return "JAX compiles it by nvJitLink, with registers that spill; jax 0.11.2 does not"


def _loaded(library: str) -> Any:
  """A library that this process has loaded, else ``None``."""
  try:
    return ctypes.CDLL(library, mode=os.RTLD_NOW | os.RTLD_NOLOAD)
  except (OSError, AttributeError):  # not loaded; no such mode
    return None


def num_sms() -> int:
  """SMs of a device of the current mesh, for which kernels are lowered, else of a default one."""
  described = jax.sharding.get_abstract_mesh().abstract_device
  if described is not None and described.platform == "gpu" and described.num_cores:
    return described.num_cores
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
  """What a block may use of the shared memory of such a device."""
  return _ask_device("shared_memory_per_block_optin", otherwise=_SHARED_BYTES)


def _ask_device(attribute: str, otherwise: int) -> int:
  found = device()
  return getattr(found, attribute, otherwise) if found.platform == "gpu" else otherwise


def device() -> Any:
  """A device like those of the current mesh, else the default one.

  A mesh under a trace only says of which kind they are. Where JAX has none of that kind, as when it
  compiles for others, it is that.
  """
  devices = jax.devices()
  default = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
  known = [default, *devices] if isinstance(default, jax.Device) else devices
  described = jax.sharding.get_abstract_mesh().abstract_device
  if described is None:
    return known[0]
  return next((each for each in known if each.device_kind == described.device_kind), described)


def check_instructions(kernel_name: str, generations: Sequence[int]) -> None:
  """Raises NotImplementedError if the device, as far as it is known, lacks a kernel's instructions.

  Lowered for none, as on a CPU, every kernel is.
  """
  found = device()
  if found.platform != "gpu" or generation(found) is None:
    return
  if reason := _why_not_compiled(generations, found):
    raise NotImplementedError(f"{kernel_name}: {reason}")


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
