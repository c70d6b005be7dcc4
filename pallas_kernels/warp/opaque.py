"""Integers that compilers must not see through.

The first step of a tile is a multiple of its steps. Where the compilers find that out, they know
the stages in shared memory of a tile's first steps while they compile, and hold what points to them
in uniform registers all through the kernel. There are 63. Beside a transfer they are too few, and
then ptxas keeps the loop itself in registers of threads: each step moves ten of them over before it
can multiply, which made matmuls 2 to 5 % slower on H200 (ptxas of CUDA 13).
"""

from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from pallas_kernels.support import Array


def opaque(x: Array) -> Array:
  """The same int32, alike in all threads of a warpgroup, as if it had been read from somewhere."""

  def move(ctx: Any, x: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
    del ctx
    i32 = ir.IntegerType.get_signless(32)
    moved = mgpu.utils.inline_ptx("mov.b32 $0, $1;", x.registers.item(), result_types=i32)
    return mgpu.FragmentedArray.splat(moved, shape=(), is_signed=True)

  move.twin = lambda x: x
  splat = plgpu.Layout.WG_SPLAT
  result = plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.int32), layout=splat)
  return plgpu.inline_mgpu(arg_types=(splat,), return_type=result)(move)(x)
