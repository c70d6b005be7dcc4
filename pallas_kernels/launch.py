"""How every kernel is launched: what it needs must fit, and what it updates is no side effect."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import support, varying
from pallas_kernels.support import Array

ALIGNMENT = 1024  # bytes, of each buffer in shared memory
_BARRIER_BYTES = 8


def launch(
  body: Callable[..., None],
  operands: Sequence[Array],
  *,
  out_type: Sequence[Any],
  updated: Sequence[Array] = (),
  reaches_others: bool = False,
  generations: Sequence[int] = support.EITHER,
  kernel_name: str,
  scratch_types: Sequence[Any] = (),
  **options: Any,
) -> list[Array]:
  """Runs a kernel.

  Arrays are updated through references of their own scope. Those of ``jax.new_ref`` are an effect,
  and where ``jax.checkpoint`` runs a kernel again, it leaves out what has one.

  Args:
    body: called with references to operands, updated arrays, results and scratch.
    operands: what the kernel reads.
    out_type: of the results.
    updated: arrays that the kernel changes in place, in their memory if nothing else needs them;
      what it does not write stays.
    reaches_others: whether it writes into the memory of other GPUs.
    generations: of GPUs that have its instructions, as in ``support.NEEDS``.
    kernel_name: in traces.
    scratch_types: as ``plgpu.kernel`` takes them; see ``check_shared``.
    options: further ones of ``plgpu.kernel``.

  Returns:
    The results, then the updated arrays.

  Raises:
    NotImplementedError: the device lacks its instructions, or a block has not enough shared memory.
  """
  support.check_instructions(kernel_name, generations)
  check_shared(kernel_name, scratch_types)
  kernel = plgpu.kernel(
    body, out_type=list(out_type), scratch_types=scratch_types, kernel_name=kernel_name, **options
  )
  if reaches_others:
    operands, updated = _in_own_memory(operands), _in_own_memory(updated)
  results = _updating(kernel, operands, out_type, updated) if updated else kernel(*operands)
  return _in_own_memory(results) if reaches_others else list(results)


def check_shared(kernel_name: str, scratch_types: Iterable[Any]) -> None:
  """Raises NotImplementedError unless a block has shared memory for these buffers and barriers."""
  most = support.shared_bytes()
  if (needed := shared_bytes(scratch_types)) > most:
    raise NotImplementedError(
      f"{kernel_name}: expected at most {most} bytes of shared memory, got {needed}"
    )


def shared_bytes(scratch_types: Iterable[Any]) -> int:
  """What these buffers and barriers take of a block's shared memory."""
  total = 0
  for each in jax.tree.leaves(scratch_types):
    if isinstance(each, plgpu.Barrier | plgpu.ClusterBarrier):
      total += _BARRIER_BYTES * int(np.prod(each.num_barriers))
    elif each.memory_space == plgpu.SMEM:
      size = math.prod(each.shape) * jnp.dtype(each.dtype).itemsize
      total += -(-size // ALIGNMENT) * ALIGNMENT
  return total


def _updating(
  kernel: Callable[..., Sequence[Array]],
  operands: Sequence[Array],
  out_type: Sequence[Any],
  updated: Sequence[Array],
) -> list[Array]:
  # Under vmap one call after another: references have no batches.
  @jax.custom_batching.sequential_vmap
  def run(operands: Sequence[Array], updated: Sequence[Array]) -> list[Array]:
    axes, operands = varying.axes_of(*operands, *updated), varying.untyped(operands)

    def write(refs: Any) -> None:
      out_refs, updated_refs = refs
      for ref, result in zip(out_refs, kernel(*operands, *updated_refs), strict=True):
        ref[...] = varying.vary(result, axes)

    # Written as a whole, so that no zero is.
    outs = [varying.vary(jnp.zeros(each.shape, each.dtype), axes) for each in out_type]
    outs, updated = pl.run_state(write)((outs, varying.untyped(updated)))
    return [*outs, *(varying.vary(each, axes) for each in updated)]

  return run(list(operands), list(updated))


def _in_own_memory(arrays: Sequence[Array]) -> list[Array]:
  """What goes into or comes out of a kernel that reaches other GPUs, as arrays of their own.

  XLA hands kernels slices of larger arrays in place, such as a layer's weights in a scan. Among
  several processes NCCL has to make a window of the memory, and refuses one that starts anywhere
  ("Window address must be suitably aligned", openxla/xla#47461); there a barrier keeps slicing
  apart from the kernel.
  """
  return list(arrays if jax.process_count() == 1 else lax.optimization_barrier(list(arrays)))
