"""Products that contract some rows of a stage, as if the others were zero.

``plgpu.wgmma`` contracts a multiple of 64 rows, the width of the swizzle, though one instruction
contracts 16. Operands whose rows are contracted lie in tiles of eight rows, so any 16 of them will
do. Where only some of these 16 are wanted, registers hold the left ones and make the others zero.
To make them zero in shared memory takes longer than to multiply them (docs/lab/kernels.md).

Rows 5 to 40 of a stage, in parts of 16::

      0        16        32        48        64
      |  █████ | ███████ | ████    |         |
        masked   as it is   masked    left out
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array, mma_utils, utils
from jax.experimental.mosaic.gpu.wgmma import wgmma_fence, wgmma_m64
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf

from pallas_kernels.matmul import pipeline
from pallas_kernels.matmul.layout import DEPTH, SWIZZLE, TILE_ROWS, UNIT
from pallas_kernels.support import Array

ROWS = 16  # that one instruction contracts


def add_product(sum_MN: Array, lhs_KM: Any, rhs_KN: Any, begin: Array, end: Array) -> Array:
  """``sum + lhs[begin:end].T @ rhs[begin:end]``, started: ``plgpu.wgmma_wait`` waits for it.

  Groups of products are waited for as usual, but a stage may be several. Where the first part is
  masked, this waits for it: a masked last part has the same registers. Once a product is done, all
  its operands are read, masked ones too.

  Args:
    sum_MN: ``[M, N]`` float32, the last call's or ``wgmma_accumulator_load(..., wait_n=None)``'s.
    lhs_KM: a reference to ``[64, M]`` bfloat16 in shared memory, tiled and swizzled.
    rhs_KN: likewise ``[64, N]``. Its rows up to ``begin``, and from ``end`` on up to a multiple of
      16, are multiplied by zero: they must be finite.
    begin: at most 15; what is less than 0 is 0.
    end: at least 1; what is more than 64 is 64.

  Returns:
    ``[M, N]`` float32.
  """

  def multiply(
    ctx: Any, total: mgpu.FragmentedArray, lhs: ir.Value, rhs: ir.Value, *bounds: Any
  ) -> mgpu.FragmentedArray:
    del ctx
    begin, end = (x.registers.item() for x in bounds)
    sums = total.to_layout(fragmented_array.WGMMA_LAYOUT_ACC_32BIT)
    lhs = mgpu.memref_transpose(lhs, (1, 0, 3, 2))

    def all_rows() -> mgpu.FragmentedArray:
      acc = mgpu.WGMMAAccumulator.from_registers(sums, sync=False)
      product = mgpu.wgmma(acc, lhs, rhs, swizzle=SWIZZLE).value
      _wgmma("commit_group")
      return product

    def some_rows() -> mgpu.FragmentedArray:
      last = arith.minsi(end, _int(DEPTH))
      num_parts = arith.divsi(arith.addi(last, _int(ROWS - 1)), _int(ROWS))

      @mgpu.fori(num_parts, sums)
      def summed(part: ir.Value, sums: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        row = arith.muli(part, _int(ROWS))
        bounds = arith.subi(begin, row), arith.subi(end, row)
        return _either(
          _wants_all(*bounds, ROWS),
          lambda: _add(sums, *_in_memory(lhs, part), rhs, part),
          lambda: _add_masked(sums, lhs, rhs, part, *bounds),
          sums,
        )

      return summed.results[0]

    product = _either(_wants_all(begin, end, DEPTH), all_rows, some_rows, sums)
    return product.to_layout(total.layout)

  def twin(total: Array, lhs: Array, rhs: Array, begin: Array, end: Array) -> Array:
    row = jnp.arange(DEPTH)[:, None]
    left = jnp.where((row >= begin) & (row < end), lhs, 0).astype(jnp.float32)
    right = jnp.where(row < -(-end // ROWS) * ROWS, rhs, 0).astype(jnp.float32)
    return total + left.T @ right

  multiply.twin, multiply.reads_as_wgmma = twin, True
  tiled = plgpu.RefType(pipeline.smem(DEPTH, UNIT).transforms)
  layout, splat = plgpu.Layout.WGMMA, plgpu.Layout.WG_SPLAT
  call = plgpu.inline_mgpu(
    arg_types=(layout, tiled, tiled, splat, splat),
    return_type=plgpu.ShapeDtypeStruct(sum_MN.shape, jnp.dtype(jnp.float32), layout=layout),
  )
  return call(multiply)(sum_MN, lhs_KM, rhs_KN, begin, end)


def _add_masked(
  sums: mgpu.FragmentedArray,
  lhs: ir.Value,
  rhs: ir.Value,
  part: ir.Value,
  begin: ir.Value,
  end: ir.Value,
) -> mgpu.FragmentedArray:
  """Adds the product of a part's rows from ``begin`` to ``end``."""

  def strip(m: int) -> mgpu.FragmentedArray:
    cols = mgpu.memref_slice(lhs, slice(m, m + 1))
    return wgmma_fence(_in_registers(cols, part, begin, end))

  result = _add(sums, strip, None, rhs, part)
  # A product reads its registers until it is done.
  with mgpu.when(arith.cmpi(arith.CmpIPredicate.sgt, begin, _int(0))):
    _wgmma("wait_group", " 0")
  return result


def _add(
  sums: mgpu.FragmentedArray,
  left: Callable[[int], Any],
  left_stride: int | None,
  rhs: ir.Value,
  part: ir.Value,
) -> mgpu.FragmentedArray:
  """Adds the product of a part.

  Args:
    sums: as ``wgmma`` accumulates.
    left: the m-th 64 columns of the part's left rows, registers or a descriptor.
    left_stride: bytes from a part to the next, if they are in memory.
    rhs: the right rows of all parts.
    part: which one.
  """
  first, stride, _ = _descriptor(rhs, sums.shape[1], contracted_first=True)
  right = _moved(first, part, stride)
  registers, bf16 = sums.registers.copy(), ir.BF16Type.get()
  for m in range(registers.shape[0]):
    registers[m : m + 1] = wgmma_m64(
      *(registers[m : m + 1], left(m), right),
      a_transpose=None if left_stride is None else True,
      b_transpose=True,
      a_k_stride=left_stride,
      b_k_stride=stride,
      n=sums.shape[1],
      swizzle=2 * ROWS,  # bytes: it only says how many rows to contract
      a_element_type=bf16,
      b_element_type=bf16,
    )
  _wgmma("commit_group")
  return _with_registers(sums, registers)


def _descriptor(operand: ir.Value, cols: int, contracted_first: bool) -> tuple[ir.Value, int, int]:
  """Of an operand's first part, and the bytes from a part to the next and to its next columns."""
  found: Any = mma_utils.create_descriptor(
    operand,
    swizzle=SWIZZLE,
    large_tile=(UNIT, UNIT),
    group_size=(UNIT, cols),
    logical_k_major=contracted_first,
  )
  (first, (_, (stride,))), strides, _ = found
  return first, stride, strides[0]


def _in_memory(lhs: ir.Value, part: ir.Value) -> tuple[Callable[[int], ir.Value], int]:
  """Descriptors of a part's rows, 64 columns each, and how far apart its parts are, in bytes."""
  first, stride, across = _descriptor(lhs, UNIT, contracted_first=False)
  left = _moved(first, part, stride)
  return lambda m: _moved(left, _int(m), across), stride


def _in_registers(
  lhs: ir.Value, part: ir.Value, begin: ir.Value, end: ir.Value
) -> mgpu.FragmentedArray:
  """A part's rows, ``[M, 16]``: zero before ``begin`` and from ``end`` on."""
  tile = arith.index_cast(ir.IndexType.get(), arith.muli(part, _int(ROWS // TILE_ROWS)))
  every = slice(None)
  rows = mgpu.memref_slice(lhs, (every, mgpu.ds(tile, ROWS // TILE_ROWS), every, every))
  held = mgpu.FragmentedArray.load_tiled(rows, SWIZZLE, layout=fragmented_array.WGMMA_LAYOUT)
  masks = [_pair_mask(tile, begin, end) for tile in range(0, ROWS, TILE_ROWS)]
  registers = held.registers.copy()  # of two rows each; the second axis has the tiles
  for index, register in np.ndenumerate(registers):
    bits = arith.andi(utils.bitcast(register, ir.IntegerType.get_signless(32)), masks[index[1]])
    registers[index] = utils.bitcast(bits, register.type)
  return _with_registers(held, registers)


def _with_registers(like: mgpu.FragmentedArray, registers: Any) -> mgpu.FragmentedArray:
  """An array of the same layout and type."""
  return mgpu.FragmentedArray(_registers=registers, _layout=like.layout, _is_signed=like.is_signed)


def _pair_mask(tile: int, begin: ir.Value, end: ir.Value) -> ir.Value:
  """Ones where the two rows of a tile that a thread has are wanted: 16 bits for each."""
  pair = arith.remui(mgpu.thread_idx(), _int(4))
  first = arith.subi(arith.addi(arith.muli(pair, _int(2)), _int(tile)), begin)
  mask = _int(0)
  for row, bits in enumerate((0xFFFF, -0x10000)):
    # Unsigned, so that rows before the first are many.
    inside = arith.cmpi(
      arith.CmpIPredicate.ult, arith.addi(first, _int(row)), arith.subi(end, begin)
    )
    mask = arith.ori(mask, arith.select(inside, _int(bits), _int(0)))
  return mask


def _wants_all(begin: ir.Value, end: ir.Value, count: int) -> ir.Value:
  """Whether rows from ``begin`` to ``end`` are all of so many."""
  return arith.andi(
    arith.cmpi(arith.CmpIPredicate.sle, begin, _int(0)),
    arith.cmpi(arith.CmpIPredicate.sge, end, _int(count)),
  )


def _moved(descriptor: ir.Value, count: ir.Value, stride: int) -> ir.Value:
  """The descriptor of what lies ``count`` strides of so many bytes behind."""
  i64 = ir.IntegerType.get_signless(64)
  by = arith.muli(arith.extui(i64, count), mgpu.c(mma_utils.encode_addr(stride), i64))
  return llvm.add(descriptor, by, overflow_flags=llvm.IntegerOverflowFlags.none)


def _wgmma(what: str, argument: str = "") -> None:
  """Commits or waits for groups. Beyond the block that multiplies, ptxas begins groups itself."""
  utils.inline_ptx(f"wgmma.{what}.sync.aligned{argument};", has_side_effects=True, convergent=True)


def _either(
  condition: ir.Value,
  holds: Callable[[], mgpu.FragmentedArray],
  fails: Callable[[], mgpu.FragmentedArray],
  like: mgpu.FragmentedArray,
) -> mgpu.FragmentedArray:
  leaves, tree = jax.tree.flatten(like)
  chosen: Any = scf.IfOp(condition, [x.type for x in leaves], has_else=True)
  for block, function in ((chosen.then_block, holds), (chosen.else_block, fails)):
    with ir.InsertionPoint(block):
      scf.yield_(jax.tree.leaves(function()))
  return jax.tree.unflatten(tree, list(chosen.results_))


def _int(value: int) -> ir.Value:
  return mgpu.c(value, ir.IntegerType.get_signless(32))
