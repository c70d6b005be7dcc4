"""Arrays with one element a thread, and what the threads of a warp tell each other.

A kernel of one warpgroup that computes on arrays of shape ``[128]`` with ``LAYOUT`` is a program
for 128 threads: arithmetic is each thread's own. Pallas has no operation for what a warp does
together, nor for a load at an index per thread; those are here, as inlined Mosaic GPU code. Each
carries a ``twin``, the same function of whole arrays, by which the tests interpret it, or the name
of an ``effect`` that they know.

Warps may leave a loop at different times: a loop on ``any_of_warp`` must have a body that changes
nothing once the condition is false, and no store or barrier, since those join all four warps.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, nvvm, scf

from pallas_kernels.support import Array
from pallas_kernels.warp.branches import one_if

INT32_MAX = 2**31 - 1
LANES, THREADS = 32, 128
LAYOUT = plgpu.Layout.WG_STRIDED((THREADS,), vec_size=1)
ALL_LANES = -1


def thread_index() -> Array:
  """``[128]`` int32: 0, 1, …; the four warps are 32 neighbours each."""
  return plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, (THREADS,), 0), LAYOUT)


def where(mask: Array, x: Array | int, y: Array | int) -> Array:
  """``jnp.where`` of int32.

  Where all threads select the same ``x``, Mosaic GPU takes the result for unsigned, as the mask
  is. So the first choice must be an array of each thread's own.
  """
  if jnp.ndim(x) != 0:
    return jnp.where(mask, x, y)
  if jnp.ndim(y) == 0:
    y = ones(mask) * 0 + y
  return jnp.where(~mask, y, x)


def _by_warp(reduce: Callable[..., np.ndarray], x: Array) -> Array:
  x_WL = x.reshape(-1, LANES)
  return jnp.broadcast_to(reduce(x_WL, axis=1, keepdims=True), x_WL.shape).reshape(x.shape)


def _reduction(kind: nvvm.ReductionKind, reduce: Callable[..., Any]) -> Callable[[Array], Array]:
  def over_lanes(ctx: Any, x: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
    del ctx
    i32 = ir.IntegerType.get_signless(32)
    mask = arith.constant(i32, ALL_LANES)
    return mapped(x, lambda value: nvvm.redux_sync(value, kind, mask))

  over_lanes.twin = functools.partial(_by_warp, reduce)
  result = plgpu.ShapeDtypeStruct((THREADS,), jnp.dtype(jnp.int32), layout=LAYOUT)
  return plgpu.inline_mgpu(arg_types=(LAYOUT,), return_type=result)(over_lanes)


def warp_max(x: Array) -> Array:
  """The greatest of a warp's 32 elements, int32, in all of them."""
  return _reduction(nvvm.ReductionKind.MAX, jnp.max)(x)


def warp_min(x: Array) -> Array:
  """The least of a warp's 32 elements, int32, in all of them."""
  return _reduction(nvvm.ReductionKind.MIN, jnp.min)(x)


def warp_sum(x: Array) -> Array:
  """The sum of a warp's 32 elements, int32, in all of them."""
  return _reduction(nvvm.ReductionKind.ADD, jnp.sum)(x)


def any_of_warp(x: Array) -> Array:
  """``[]`` bool, whether an element of the warp is not 0; interpreted, of all four warps."""

  def vote(ctx: Any, x: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
    del ctx
    i1, i32 = (ir.IntegerType.get_signless(bits) for bits in (1, 32))
    zero, mask = arith.constant(i32, 0), arith.constant(i32, ALL_LANES)
    own = arith.cmpi(arith.CmpIPredicate.ne, element(x), zero)
    voted = nvvm.vote_sync(mask, own, nvvm.VoteSyncKind.any, results=[i1])
    return mgpu.FragmentedArray.splat(voted, shape=(), is_signed=False)

  vote.twin = lambda x: jnp.any(x != 0)
  result = plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.bool_), layout=plgpu.Layout.WG_SPLAT)
  return plgpu.inline_mgpu(arg_types=(LAYOUT,), return_type=result)(vote)(x)


def mapped(
  x: mgpu.FragmentedArray, function: Callable[[ir.Value], ir.Value]
) -> mgpu.FragmentedArray:
  """An array of int32 from each thread's own element, in inlined code."""
  result = x.foreach(lambda value, _: function(value), create_array=True, is_signed=True)
  assert result is not None
  return result


def element(x: mgpu.FragmentedArray) -> ir.Value:
  """A thread's own element of an array, in inlined code."""
  values: list[ir.Value] = []
  x.foreach(lambda value, _: values.append(value))
  (value,) = values
  return value


@contextlib.contextmanager
def chosen(mask: ir.Value) -> Iterator[None]:
  """What is inside is for threads whose ``mask`` is not 0, in inlined code."""
  zero = arith.constant(ir.IntegerType.get_signless(32), 0)
  branch = scf.IfOp(arith.cmpi(arith.CmpIPredicate.ne, mask, zero))
  with ir.InsertionPoint(branch.then_block):
    yield
    scf.yield_([])


def lookup(table_ref: Any, index: Array) -> Array:
  """Element ``index`` (``[128]`` int32, in range) of a vector in memory, for each thread."""

  def load(ctx: Any, table: ir.Value, index: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
    del ctx

    def load_one(value: ir.Value) -> ir.Value:
      return memref.load(table, [arith.index_cast(ir.IndexType.get(), value)])

    return mapped(index, load_one)

  load.twin = lambda table, index: table[index]
  result = plgpu.ShapeDtypeStruct((THREADS,), jnp.dtype(jnp.int32), layout=LAYOUT)
  inlined = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), LAYOUT), return_type=result)(load)
  return inlined(table_ref, index)


def store(table_ref: Any, index: Array, value: Array, mask: Array) -> None:
  """Each thread whose ``mask`` (``[128]`` int32) is not 0 writes an element of a vector.

  Unlike a store of Pallas it is no barrier: what is written is for a later kernel to read.
  """

  def store_one(ctx: Any, table: ir.Value, *args: mgpu.FragmentedArray) -> None:
    del ctx
    index, value, mask = map(element, args)
    with chosen(mask):
      memref.store(value, table, [arith.index_cast(ir.IndexType.get(), index)])

  store_one.effect = "store"
  plgpu.inline_mgpu(arg_types=(plgpu.RefType(), LAYOUT, LAYOUT, LAYOUT))(store_one)(
    table_ref, index, value, mask
  )


def padded(size: int) -> int:
  """The next multiple of 128."""
  return -(-size // THREADS) * THREADS


def chunks(size: int) -> Iterator[tuple[int, Array]]:
  """Starts of pieces of 128 of a vector, and each thread's index in them."""
  thread = thread_index()
  for start in range(0, size, THREADS):
    yield start, thread + start


def largest_divisor(size: int, most: int) -> int:
  """Of ``size``, up to ``most``.

  >>> [largest_divisor(size, 6) for size in (45, 24, 22, 8, 7)]
  [5, 6, 2, 4, 1]
  """
  return max(n for n in range(1, most + 1) if size % n == 0)


def unrolled(
  size: Array | int, body: Callable[[Array, Any], Any], init: Any, most: int = 16
) -> Any:
  """A ``fori_loop`` from 0 to ``size``.

  A size that is known is unrolled by its largest divisor of at most ``most``, a scalar not.
  """
  if isinstance(size, int):
    return lax.fori_loop(0, size, body, init, unroll=largest_divisor(size, most))
  return lax.fori_loop(jnp.int32(0), size, body, init)


def unrolled_used(
  size: int, used: Array, body: Callable[[Array, Any], Any], init: Any, most: int = 16
) -> Any:
  """The same to the first multiple of what is unrolled that is not below ``used``, a scalar."""
  unroll = largest_divisor(size, most)

  def step(i: Array, carry: Any) -> Any:
    for place in range(unroll):
      carry = body(i * unroll + place, carry)
    return carry

  return lax.fori_loop(jnp.int32(0), lax.div(used + (unroll - 1), jnp.int32(unroll)), step, init)


def pieces_of(size: Array | int) -> Array | int:
  """Pieces of 128 that hold so many elements, a number or a scalar."""
  if isinstance(size, int):
    return padded(size) // THREADS
  return lax.div(size + (THREADS - 1), jnp.int32(THREADS))


def each_piece(size: Array | int, body: Callable[[Array], None]) -> None:
  """Calls ``body`` with each thread's index in every piece of 128 of a vector, in a loop."""
  thread, pieces = thread_index(), pieces_of(size)
  if isinstance(pieces, int) and pieces == 1:
    body(thread)
  else:
    unrolled(pieces, lambda piece, _: body(thread + piece * THREADS), None, most=4)


def ones(mask: Array) -> Array:
  """int32, 1 where ``mask``."""
  if jnp.ndim(mask) == 0:
    return one_if(mask)
  zero = thread_index() * 0
  return jnp.where(mask, zero + 1, zero)


def clip(x: Array, high: Array | int) -> Array:
  """``x`` from 0 to ``high``; 0 goes before."""
  return jnp.minimum(jnp.maximum(x, 0), high)


def divide(x: Array, divisor: Array | int) -> tuple[Array, Array]:
  """Quotient and remainder; operands are not negative."""
  divisor = x * 0 + divisor
  return lax.div(x, divisor), lax.rem(x, divisor)


def ceil_div(x: Array, divisor: Array | int) -> Array:
  """``ceil(x / divisor)``; operands are not negative."""
  quotient, remainder = divide(x, divisor)
  return quotient + ones(remainder > 0)


def shift_right(x: Array, bits: int) -> Array:
  """``x >> bits``; ``x`` is not negative."""
  return lax.shift_right_logical(x, x * 0 + bits)


_PAIRWISE: dict[Any, Callable[[Array, Array], Array]] = {
  warp_max: jnp.maximum,
  warp_min: jnp.minimum,
  warp_sum: jnp.add,
}


def over(reduce: Callable[[Array], Array], pieces: Sequence[Array]) -> Array:
  """``warp_max``, ``warp_min`` or ``warp_sum`` of several arrays together."""
  return reduce(functools.reduce(_PAIRWISE[reduce], pieces))


def over_all(reduce: Callable[[Array], Array], pieces: Sequence[Array], scratch_ref: Any) -> Array:
  """The same over all four warps, by way of 128 elements of shared memory."""
  scratch_ref[pl.ds(0, THREADS)] = over(reduce, pieces)
  warps = [lookup(scratch_ref, thread_index() * 0 + first) for first in range(0, THREADS, LANES)]
  return functools.reduce(_PAIRWISE[reduce], warps)
