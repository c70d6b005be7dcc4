"""GPUs that are not here, as XLA's compiler takes them."""

import importlib.util
import os
import pathlib
import shutil
import sys
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from ultraep_jax.devices.device import Device
from ultraep_jax.tools.errors import CommandError

_PACKAGES = "jax-cuda13-plugin jax-cuda13-pjrt nvidia-cuda-nvcc nvidia-cuda-crt nvidia-nvvm"


class Chip(NamedTuple):
  """What the compiler asks of a GPU and its description does not say.

  Attributes:
    capability: major and minor compute capability.
    gigahertz: its clock.
    cache_bytes: of the second level.
  """

  capability: tuple[int, int]
  gigahertz: float
  cache_bytes: int


# By the name of the description.
CHIPS = {
  "h100": Chip((9, 0), 1.98, 50 << 20),
  "h200": Chip((9, 0), 1.98, 60 << 20),
  "gb200": Chip((10, 0), 1.92, 126 << 20),
  "gb300": Chip((10, 3), 1.92, 126 << 20),
}


def config(name: str) -> str:
  """The description of a GPU for XLA, a text protobuf."""
  device, chip = Device.load(name), CHIPS[name]
  major, minor = chip.capability
  shared = int(device["shared_bytes"])
  return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_block_optin: {shared}
  shared_memory_per_core: {shared + 1024}
  registers_per_block_limit: 65536 registers_per_core_limit: 65536
  core_count: {int(device["sms"])} fpus_per_core: 128 clock_rate_ghz: {chip.gigahertz}
  l2_cache_size: {chip.cache_bytes}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {int(device["memory_rate"])} device_memory_size: {int(device["memory_bytes"])}
  cuda_compute_capability {{
    major: {major} minor: {minor} feature_extension: ACCELERATED_FEATURES
  }}
}}
platform_name: "CUDA" device_description_str: "{device.kinds[0]}"
runtime_version {{ major: 13 }} dnn_version_info {{ major: 9 minor: 13 }}
"""


def devices(name: str, topology: str) -> list[Any]:
  """Described GPUs, for which programs can be compiled and not run.

  Args:
    name: of ``CHIPS``.
    topology: slices x processes x GPUs of each.
  """
  jax.devices()  # finds the plugin
  described = topologies.get_topology_desc(
    platform="cuda", topology=topology, target_config=config(name)
  )
  return list(described.devices)


def environment() -> dict[str, str]:
  """Of a process that compiles: no GPU is asked for, and ``ptxas`` is on the PATH.

  Raises:
    CommandError: XLA's CUDA compiler or ``ptxas`` is missing.
  """
  try:
    found = importlib.util.find_spec("jax_plugins.xla_cuda13")
  except ModuleNotFoundError:  # no plugin at all
    found = None
  if found is None:
    raise CommandError(f"compile: needs XLA's CUDA compiler; pip install {_PACKAGES}")
  folders = [folder / "nvidia/cu13/bin" for folder in map(pathlib.Path, sys.path)]
  path = os.pathsep.join([*map(str, folders), os.environ.get("PATH", "")])
  if shutil.which("ptxas", path=path) is None:
    raise CommandError(f"compile: needs ptxas on the PATH; pip install {_PACKAGES}")
  return {**os.environ, "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "PATH": path}
