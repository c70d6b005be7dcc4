"""A rank and its peers along a mesh axis, inside a kernel.

A mesh axis of one rank has no peers. A kernel along it must not ask for them: on a mesh of one
device, Mosaic GPU has no table of other devices' memory and asks NVSHMEM, which XLA refuses.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.support import Array


def rank(axis_name: str) -> Array:
  """This rank along the axis."""
  return jnp.int32(0) if _is_alone(axis_name) else lax.axis_index(axis_name)


def remote_ref(ref: Any, rank: Array, axis_name: str) -> Any:
  """A result or operand of the kernel in the memory of another rank, to copy to."""
  if _is_alone(axis_name):
    return ref
  device: Any = {axis_name: rank}  # a type that remote_ref takes and does not declare
  return plgpu.remote_ref(ref, device)


def signal(semaphore: Any, rank: Array, axis_name: str) -> None:
  """Adds one to a semaphore of another rank."""
  pl.semaphore_signal(semaphore, device_id=None if _is_alone(axis_name) else {axis_name: rank})


def _is_alone(axis_name: str) -> bool:
  return lax.axis_size(axis_name) == 1
