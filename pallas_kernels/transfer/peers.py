"""A rank and its peers along a mesh axis, inside a kernel.

A mesh axis of one rank has no peers. A kernel along it must not ask for them: on a mesh of one
device, Mosaic GPU has no table of other devices' memory and asks NVSHMEM, which XLA refuses.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.support import Array, AxisName


def are_any(axis_name: AxisName) -> bool:
  """Whether the axis has more than this rank; ``()`` has not."""
  return lax.axis_size(axis_name) > 1


def rank(axis_name: AxisName) -> Array:
  """This rank along the axis."""
  if not are_any(axis_name):
    return jnp.int32(0)
  first, *others = axes_of(axis_name)
  index = lax.axis_index(first)
  for axis in others:
    index = index * lax.axis_size(axis) + lax.axis_index(axis)
  return index


def remote_ref(ref: Any, rank: Array, axis_name: AxisName) -> Any:
  """A result or operand of the kernel in the memory of another rank, to copy to."""
  if not are_any(axis_name):
    return ref
  device: Any = _device(rank, axis_name)  # a type that remote_ref takes and does not declare
  return plgpu.remote_ref(ref, device)


def signal(semaphore: Any, rank: Array, axis_name: AxisName) -> None:
  """Adds one to a semaphore of another rank."""
  device = _device(rank, axis_name) if are_any(axis_name) else None
  pl.semaphore_signal(semaphore, device_id=device)


def _device(rank: Array, axis_name: AxisName) -> dict[str, Array]:
  """The position of a rank on the axes."""
  first, *others = axes_of(axis_name)
  position = {}
  for axis in reversed(others):
    position[axis] = lax.rem(rank, jnp.int32(lax.axis_size(axis)))
    rank = lax.div(rank, jnp.int32(lax.axis_size(axis)))
  return {first: rank, **position}


def axes_of(axis_name: AxisName) -> tuple[str, ...]:
  """The mesh axes that an axis is made of."""
  return (axis_name,) if isinstance(axis_name, str) else axis_name
