"""What kernels need of devices, processes and the mesh."""

import re

import pytest
from fake_devices import Device, gpus

from pallas_kernels import launch, support


@pytest.mark.parametrize(
  ("operation", "device", "version", "reason"),
  [
    ("matmul", Device(), (0, 11, 2), None),
    ("matmul", Device(), (0, 12, 1), None),
    ("plan", Device(), (0, 11, 1), "need jax >= 0.11.2"),
    ("plan", Device(), (0, 13, 0), "need jax >= 0.11.2"),
    ("choose", Device("cpu"), (0, 11, 2), "need NVIDIA GPUs, this is a a cpu"),
    ("choose", Device(compute_capability="8.0"), (0, 11, 2), "need Hopper or Blackwell GPUs"),
    ("exchange", Device(compute_capability="10.0"), (0, 12, 0), None),
    ("replicate", Device(compute_capability="10.3"), (0, 12, 0), None),
    ("matmul", Device(compute_capability="10.0"), (0, 12, 0), None),
    ("route", Device(compute_capability="12.0"), (0, 12, 0), "need Hopper or Blackwell GPUs"),
    ("route", Device(compute_capability="gfx942"), (0, 11, 2), "need Hopper or Blackwell GPUs"),
  ],
)
def test_says_why_a_device_cannot_run_kernels(operation, device, version, reason):
  answer = support.why_unsupported(operation, device, version)
  assert answer is None if reason is None else re.search(reason, answer)


def test_a_kernel_is_not_lowered_for_gpus_without_its_instructions():
  with gpus("10.0"), pytest.raises(NotImplementedError, match="product: the kernels need Hopper"):
    launch.launch(print, [], out_type=[], generations=support.WGMMA, kernel_name="product")


class Described:
  """A GPU to compile for."""

  platform = "gpu"

  def __init__(self, kind):
    self.device_kind = kind


@pytest.mark.parametrize(
  ("kind", "generation"),
  [
    ("NVIDIA H100 80GB HBM3", 9),
    ("NVIDIA GH200 480GB", 9),
    ("NVIDIA B200", 10),
    ("NVIDIA GB300", 10),
    ("NVIDIA A100-SXM4-80GB", None),
    ("NVIDIA H1000", None),
  ],
)
def test_described_gpus_have_the_generation_of_their_name(kind, generation):
  assert support.generation(Described(kind)) == generation
  answer = support.why_unsupported("plan", Described(kind), (0, 12, 0))
  assert (answer is None) == (generation is not None) == support.has_instructions(Described(kind))


def test_what_a_gpu_can_counts_before_its_name():
  assert support.has_instructions(Device(compute_capability="9.0"))
  assert not support.has_instructions(Device(compute_capability="8.0"))


@pytest.mark.parametrize(
  ("processes", "size", "reason"),
  [
    ([0, 0, 0], 3, None),
    ([0, 0, 1], 1, None),
    ([0, 0, 1], 3, "one process that drives all, or one for each"),
    ([0, 1, 2], 2, "needs a mesh of all 3, this is of 2"),
    ([0, 1], 2, "NCCL >= 2.29 .*, no NCCL is loaded"),
  ],
)
def test_says_why_gpus_of_other_processes_are_out_of_reach(processes, size, reason):
  devices = [Device(process_index=process) for process in processes]
  answer = support.why_unreachable(devices, size)
  assert answer is None if reason is None else re.search(reason, answer)


class Nccl:
  """A loaded library: writes its version where the caller points."""

  def __init__(self, number):
    self.number = number

  def ncclGetVersion(self, pointer):
    pointer._obj.value = self.number


@pytest.mark.parametrize(
  ("number", "version", "reason"),
  [
    (22809, (2, 28, 9), "NCCL >= 2.29 .*, this is 2.28.9"),
    (23203, (2, 32, 3), None),
  ],
)
def test_reads_the_version_of_a_loaded_nccl(monkeypatch, number, version, reason):
  monkeypatch.setattr(support.ctypes, "CDLL", lambda *args, **kwargs: Nccl(number))
  assert support.nccl_version() == version
  answer = support.why_unreachable([Device(), Device(process_index=1)], 2)
  assert answer is None if reason is None else re.search(reason, answer)


@pytest.mark.parametrize(
  ("operation", "capability", "version", "loaded", "slow"),
  [
    ("matmul", "9.0", (0, 12, 0, 1), True, True),
    ("matmul", "9.0", (0, 12, 0, 1), False, False),
    ("matmul", "9.0", (0, 11, 2), True, False),
    ("matmul", "10.0", (0, 12, 0, 1), True, False),
    ("plan", "9.0", (0, 12, 0, 1), True, False),
  ],
)
def test_says_where_matmuls_spill(monkeypatch, operation, capability, version, loaded, slow):
  def load(library, **_):
    if not loaded or library != "libnvJitLink.so.13":
      raise OSError
    return object()

  monkeypatch.setattr(support.ctypes, "CDLL", load)
  answer = support.why_slow(operation, Device(compute_capability=capability), version)
  assert ("nvJitLink" in answer) if slow else answer is None


def test_a_library_that_is_not_loaded_is_not_loaded_to_find_out():
  assert support.why_slow("matmul", Device(compute_capability="9.0"), (0, 12)) is None
