"""Columns of a matrix in registers that take turns, told apart.

A warpgroup holds a tile of sums as ``wgmma`` leaves them: of each row and eight columns, four
neighbouring lanes have two columns each. So lane t of the four has the t-th pair of columns, and a
pair is one register of two bfloat16.

::

  lane       0     1     2     3
  columns   0 1   2 3   4 5   6 7
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, nvvm

from pallas_kernels.support import Array
from pallas_kernels.warp.warps import ALL_LANES

_LOW_HALVES, _HIGH_HALVES = 0x5410, 0x7632  # of two registers, as bytes that prmt picks


def apart(first: Array, second: Array) -> tuple[Array, Array]:
  """The even and the odd columns of two neighbours, ``[64, N]`` bfloat16 each, side by side.

  Of 16 columns, two registers of a lane, each result has 8, one register of a lane: lane t has
  pairs t and t + 4, and needs pairs 2t and 2t + 1. Each lane gives one of its registers to one
  lane and the other one to another, in two steps, and then takes the halves of what it got.
  """

  def told_apart(ctx: Any, *parts: mgpu.FragmentedArray) -> tuple[mgpu.FragmentedArray, ...]:
    del ctx
    # Eight columns at a time; rows t / 4 and t / 4 + 8 of a lane's warp.
    pairs_GH: Any = np.concatenate([x.registers.reshape(-1, 2) for x in parts])
    lane = _Lane()
    shape = parts[0].registers.shape
    even, odd = np.empty(shape, object), np.empty(shape, object)
    for (group, half), _ in np.ndenumerate(even.reshape(-1, 2)):
      held = pairs_GH[2 * group, half], pairs_GH[2 * group + 1, half]
      for result, value in zip((even, odd), lane.halves(*held), strict=True):
        result.reshape(-1, 2)[group, half] = value
    return tuple(
      mgpu.FragmentedArray(_registers=x, _layout=parts[0].layout, _is_signed=None)
      for x in (even, odd)
    )

  def twin(first: Array, second: Array) -> tuple[Array, Array]:
    both = jnp.concatenate([first, second], axis=1)
    return both[:, ::2], both[:, 1::2]

  told_apart.twin = twin
  layout = plgpu.Layout.WGMMA
  result = plgpu.ShapeDtypeStruct(first.shape, first.dtype, layout=layout)
  call = plgpu.inline_mgpu(arg_types=(layout, layout), return_type=(result, result))(told_apart)
  return call(first, second)


def together(even: Array, odd: Array) -> tuple[Array, Array]:
  """The inverse of ``apart``: two neighbours whose columns come from either in turn.

  Lane t has halves of pairs 2t and 2t + 1 and needs pairs t and t + 4.
  """

  def put_together(ctx: Any, *parts: mgpu.FragmentedArray) -> tuple[mgpu.FragmentedArray, ...]:
    del ctx
    even_GH, odd_GH = (x.registers.reshape(-1, 2) for x in parts)
    lane = _Lane()
    shape = parts[0].registers.shape
    both = np.empty((2 * len(even_GH), 2), object)
    for (group, half), even_pair in np.ndenumerate(even_GH):
      held: Any = even_pair, odd_GH[group, half]
      both[2 * group, half], both[2 * group + 1, half] = lane.pairs(*held)
    return tuple(
      mgpu.FragmentedArray(_registers=x.reshape(shape), _layout=parts[0].layout, _is_signed=None)
      for x in np.split(both, 2)
    )

  def twin(even: Array, odd: Array) -> tuple[Array, ...]:
    both = jnp.stack([even, odd], axis=2).reshape(even.shape[0], -1)
    return tuple(jnp.split(both, 2, axis=1))

  put_together.twin = twin
  layout = plgpu.Layout.WGMMA
  result = plgpu.ShapeDtypeStruct(even.shape, even.dtype, layout=layout)
  call = plgpu.inline_mgpu(arg_types=(layout, layout), return_type=(result, result))(put_together)
  return call(even, odd)


class _Lane:
  """What a lane, the one in the middle of four numbered ``2 * high + low``, gives and takes."""

  def __init__(self) -> None:
    self.i32 = ir.IntegerType.get_signless(32)
    index = nvvm.read_ptx_sreg_laneid(results=[self.i32])
    low = arith.andi(index, self._constant(1))
    high = arith.andi(arith.shrui(index, self._constant(1)), self._constant(1))
    self.is_low, self.is_high = (self._is_one(bit) for bit in (low, high))
    quad = arith.andi(index, self._constant(-4))
    source = arith.addi(quad, arith.shli(low, self._constant(1)))
    self.source = arith.addi(source, high)

  def halves(self, lower: ir.Value, upper: ir.Value) -> tuple[ir.Value, ir.Value]:
    """From pairs t and t + 4 to the first and the second halves of pairs 2t and 2t + 1."""
    lower, upper, kind = *(mgpu.utils.bitcast(x, self.i32) for x in (lower, upper)), lower.type
    one = self._shuffle(arith.select(self.is_low, upper, lower), self.source)
    other_source = arith.xori(self.source, self._constant(1))
    other = self._shuffle(arith.select(self.is_low, lower, upper), other_source)
    first, second = (arith.select(self.is_high, *x) for x in ((other, one), (one, other)))
    picked = (self._pick(first, second, bytes) for bytes in (_LOW_HALVES, _HIGH_HALVES))
    low, high = (mgpu.utils.bitcast(x, kind) for x in picked)
    return low, high

  def pairs(self, even: ir.Value, odd: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The inverse: from the first and the second halves to pairs t and t + 4."""
    even, odd, kind = *(mgpu.utils.bitcast(x, self.i32) for x in (even, odd)), even.type
    first, second = (self._pick(even, odd, bytes) for bytes in (_LOW_HALVES, _HIGH_HALVES))
    one = self._shuffle(arith.select(self.is_high, second, first), self.source)
    other_source = arith.xori(self.source, self._constant(2))
    other = self._shuffle(arith.select(self.is_high, first, second), other_source)
    found = (arith.select(self.is_low, *x) for x in ((other, one), (one, other)))
    lower, upper = (mgpu.utils.bitcast(x, kind) for x in found)
    return lower, upper

  def _shuffle(self, value: ir.Value, source: ir.Value) -> ir.Value:
    code = f"shfl.sync.idx.b32 $0, $1, $2, 0x1f, {ALL_LANES};"
    return mgpu.utils.inline_ptx(code, value, source, result_types=self.i32, convergent=True)

  def _pick(self, first: ir.Value, second: ir.Value, which: int) -> ir.Value:
    code = f"prmt.b32 $0, $1, $2, {which};"
    return mgpu.utils.inline_ptx(code, first, second, result_types=self.i32)

  def _constant(self, value: int) -> ir.Value:
    return arith.constant(self.i32, value)

  def _is_one(self, bit: ir.Value) -> ir.Value:
    return arith.cmpi(arith.CmpIPredicate.ne, bit, self._constant(0))
