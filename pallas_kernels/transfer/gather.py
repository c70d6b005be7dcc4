"""A small vector of every rank on all ranks: an ``all_gather`` that is one kernel.

Between other kernels a collective of NCCL makes a GPU wait for streams that wait for each other.
Each of three ranks writes its vector into its row of every result, and waits for the others'::

  rank 0  a a  ──►  a a        rank 1  b b  ──►  a a        rank 2  c c  ──►  a a
                    b b                          b b                          b b
                    c c                          c c                          c c
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import support
from pallas_kernels.launch import launch
from pallas_kernels.support import Array, AxisName
from pallas_kernels.transfer import chunks, peers

_UNIT = 32  # int32: 128 bytes, what shared memory and bulk copies like
_THREADS = 128


class Gathered(NamedTuple):
  """What ``gather`` returns.

  Attributes:
    value_GN: ``[G, N]`` int32, equal on all ranks of the axis and typed so.
    rank: ``[]`` int32, this rank along the axis. A kernel has it at hand. ``lax.axis_index``
      between kernels makes a GPU wait for about 8 µs.
  """

  value_GN: Array
  rank: Array


@functools.partial(jax.jit, static_argnames=("axis_name",))
def gather(value_N: Array, *, axis_name: AxisName) -> Gathered:
  """``lax.all_gather(value_N, axis_name, to="invarying")``, and ``lax.axis_index(axis_name)``.

  Call it inside a ``shard_map`` over all axes of a mesh whose devices reach each other's memory
  (see ``support.why_unreachable``). It cannot deadlock: a rank writes before it waits.

  Args:
    value_N: ``[N]`` int32, this rank's vector, which fits into shared memory.
    axis_name: the expert mesh axis, of size G.

  Raises:
    NotImplementedError: a mesh that the kernel does not handle, or too long a vector.
    TypeError: not int32.
    ValueError: no vector.
  """
  support.check_mesh(axis_name)
  if value_N.ndim != 1:
    raise ValueError(f"value_N: expected a vector, got shape {value_N.shape}")
  if value_N.dtype != jnp.int32:
    raise TypeError(f"value_N: expected int32, got {value_N.dtype}")
  (length,), num_ranks = value_N.shape, lax.axis_size(axis_name)
  if not length or not peers.are_any(axis_name):
    gathered_GN = lax.all_gather(value_N, axis_name, to="invarying")
    return Gathered(gathered_GN, peers.rank(axis_name))
  padded_L = jnp.pad(value_N, (0, -length % _UNIT))
  typed = jax.typeof(padded_L)
  varying, axes = typed.manual_axis_type.varying, set(peers.axes_of(axis_name))
  typed_as = jax.sharding.ManualAxisType
  value_GL, rank_X = launch(
    functools.partial(_kernel, axis_name=axis_name),
    [padded_L],
    out_type=[
      typed.update(
        shape=(num_ranks, *padded_L.shape),
        manual_axis_type=typed_as(varying=varying - axes),
      ),
      typed.update(shape=(_THREADS,), manual_axis_type=typed_as(varying=varying | axes)),
    ],
    reaches_others=True,
    scratch_types=[
      plgpu.SMEM(padded_L.shape, jnp.int32),
      plgpu.Barrier(num_barriers=1),
      plgpu.SemaphoreType.REGULAR((1,)),
    ],
    kernel_name="gather",
  )
  return Gathered(value_GL[:, :length], rank_X[0])


def _kernel(
  value_ref: Any,
  all_ref: Any,
  rank_ref: Any,
  buffer: Any,
  loaded: Any,
  sent: Any,
  *,
  axis_name: AxisName,
) -> None:
  rank, num_ranks = peers.rank(axis_name), lax.axis_size(axis_name)
  rank_ref[pl.ds(0, _THREADS)] = jnp.full(_THREADS, rank)
  others = [chunks.peer(index, axis_name) for index in range(1, num_ranks)]
  # Without tests of bounds it is a bulk copy of any length.
  bulk = plgpu.OOBFillMode.PROMISE_IN_BOUNDS
  plgpu.copy_gmem_to_smem(value_ref, buffer, loaded.at[0], oob_mode=bulk)
  plgpu.barrier_wait(loaded.at[0])
  for to in (rank, *others):
    plgpu.copy_smem_to_gmem(buffer, peers.remote_ref(all_ref, to, axis_name).at[rank])
  plgpu.wait_smem_to_gmem(0)  # landed, not only read from the buffer
  for to in others:
    peers.signal(sent.at[0], to, axis_name)
  pl.semaphore_wait(sent.at[0], num_ranks - 1)
