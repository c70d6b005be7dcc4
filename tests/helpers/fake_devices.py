"""GPUs that are not here, as JAX describes devices, and programs traced as for them."""

import contextlib
import dataclasses
from collections.abc import Iterator

import pytest

from pallas_kernels import support


@dataclasses.dataclass
class Device:
  """What is asked of a device."""

  platform: str = "gpu"
  compute_capability: str = "9.0"
  process_index: int = 0
  slice_index: int = 0
  id: int = 0
  local_hardware_id: int | None = 0
  coords: tuple[int, ...] = (0,)

  @property
  def device_kind(self) -> str:
    return f"a {self.platform}"


@contextlib.contextmanager
def gpus(compute_capability: str = "9.0") -> Iterator[None]:
  """As if the devices at hand were such GPUs, driven by one process.

  Inner functions under ``jit`` that were traced before are not traced again.
  """
  with pytest.MonkeyPatch.context() as patched:
    patched.setattr(support, "device", lambda: Device(compute_capability=compute_capability))
    yield
