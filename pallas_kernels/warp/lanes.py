"""What the lanes of a warp tell each other one by one: who is equal, and sums of those before.

As in ``warps``, arrays have one element a thread and each operation carries a ``twin``.

Four lanes::

  values          3  5  3  3
  equal lanes     0, 2 and 3 · 1 · 0, 2 and 3 · 0, 2 and 3
  sums before     0  3  8  11
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith, math, nvvm

from pallas_kernels.support import Array
from pallas_kernels.warp.warps import ALL_LANES, LANES, LAYOUT, THREADS, element, mapped


def equal_in_warp(x: Array) -> tuple[Array, Array]:
  """How many of a warp's 32 elements equal a thread's own: those of earlier lanes, and all."""

  def match(ctx: Any, x: mgpu.FragmentedArray) -> tuple[mgpu.FragmentedArray, ...]:
    del ctx
    own = element(x)
    # The operation of the dialect loses its kind on the way to the compiler.
    code = f"match.any.sync.b32 $0, $1, {ALL_LANES};"
    equal = mgpu.utils.inline_ptx(code, own, result_types=own.type, convergent=True)
    earlier = arith.andi(equal, nvvm.read_ptx_sreg_lanemask_lt(results=[own.type]))
    return mapped(x, lambda _: math.ctpop(earlier)), mapped(x, lambda _: math.ctpop(equal))

  def twin(x: Array) -> tuple[Array, ...]:
    x_WL = x.reshape(-1, LANES)
    equal_WLL = (x_WL[:, :, None] == x_WL[:, None, :]).astype(jnp.int32)
    earlier_WLL = equal_WLL * jnp.tri(LANES, k=-1, dtype=jnp.int32)[None]
    return tuple(jnp.sum(y, axis=-1, dtype=jnp.int32).reshape(-1) for y in (earlier_WLL, equal_WLL))

  return _inlined(match, twin, 2)(x)


def earlier_in_warp(x: Array) -> Array:
  """The sum of a warp's elements in earlier lanes, int32."""

  def scan(ctx: Any, x: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
    del ctx
    own = element(x)
    total = own
    for distance in (1, 2, 4, 8, 16):
      code = f"""
        {{
          .reg .pred inside;
          shfl.sync.up.b32 $0|inside, $1, {distance}, 0, {ALL_LANES};
          @!inside mov.b32 $0, 0;
        }}
      """
      other = mgpu.utils.inline_ptx(code, total, result_types=own.type, convergent=True)
      total = arith.addi(total, other)
    return mapped(x, lambda value: arith.subi(total, value))

  def twin(x: Array) -> Array:
    x_WL = x.reshape(-1, LANES)
    return (jnp.cumsum(x_WL, axis=1, dtype=jnp.int32) - x_WL).reshape(-1)

  return _inlined(scan, twin, 1)(x)


def count_bits(x: Array) -> Array:
  """Ones in the binary form of each element, int32."""

  def count(ctx: Any, x: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
    del ctx
    return mapped(x, math.ctpop)

  return _inlined(count, jax.lax.population_count, 1)(x)


def _inlined(function: Any, twin: Callable[..., Any], results: int) -> Callable[[Array], Any]:
  """Code that takes an array of each thread's own and returns as many as that."""
  function.twin = twin
  result = plgpu.ShapeDtypeStruct((THREADS,), jnp.dtype(jnp.int32), layout=LAYOUT)
  returned = result if results == 1 else (result,) * results
  return plgpu.inline_mgpu(arg_types=(LAYOUT,), return_type=returned)(function)
