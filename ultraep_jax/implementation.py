"""Which implementation of an operation runs: an ordered list, of which the first that can does."""

import functools
import logging
from collections.abc import Callable, Mapping

import jax

import pallas_kernels as kernels
from pallas_kernels import UNTUNED, Tunings
from ultraep_jax.config import Implementation
from ultraep_jax.devices import known
from ultraep_jax.devices.device import Device

Implementations = tuple[str, ...]

_log = logging.getLogger("ultraep_jax")


def resolve(implementation: Implementation) -> Implementations:
  """The implementations to try, in order; asks for the devices unless it is ``"portable"``.

  On GPUs that the kernels do not run on, the reason is logged once, and so is that kernels are
  asked for where none run: lowered for another device they still compile.

  >>> resolve("portable")
  ('portable',)
  """
  if implementation == "portable":
    return ("portable",)
  reason = why_portable()
  if implementation == "mosaic_gpu":
    if reason is not None:
      _warn_once(f'implementation "mosaic_gpu" (kernels for Hopper GPUs) does not run: {reason}')
    return ("mosaic_gpu",)
  if reason is None:
    return ("mosaic_gpu", "portable")
  _say_once(reason)
  return ("portable",)


def why_portable() -> str | None:
  """Why ``"auto"`` picks no kernels for the current mesh or the default devices, else ``None``."""
  device = jax.sharding.get_abstract_mesh().abstract_device
  if device is not None and device.platform != "gpu":
    return f"the kernels need NVIDIA GPUs, these are {[device.device_kind]}"
  return kernels.why_unsupported(jax.devices())


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
    if (obstacle := why_portable()) is None:
      raise
    message = f'implementation "mosaic_gpu" (kernels for Hopper GPUs): {obstacle}; {reason}'
    raise NotImplementedError(message) from reason


@functools.cache
def _say_once(reason: str) -> None:
  on_gpu = any(device.platform == "gpu" for device in jax.devices())
  _log.log(
    logging.WARNING if on_gpu else logging.INFO, 'implementation "auto" is "portable": %s', reason
  )


@functools.cache
def _warn_once(text: str) -> None:
  _log.warning(text)
