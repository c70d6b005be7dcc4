"""Updates of vectors in shared memory at an index per thread, and barriers between them.

Where several threads update one element, all updates count, in any order: sums and extremes of
integers come out the same. Nothing here waits for other threads but what says so, so that others
may read what was written only after ``barrier``, and overwrite it only after one more; in a kernel
of several warpgroups, after ``clusters.wait_for_block``.
"""

from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_kernels.support import Array
from pallas_kernels.warp.warps import LAYOUT, THREADS, chunks, element, ones


def put_at(table_ref: Any, index: Array, value: Array | int, mask: Array | None = None) -> None:
  """Each thread whose ``mask`` (``[128]`` bool or int32) is not 0 writes an element of a vector.

  Where several threads write one element, they have to write the same value.
  """
  _update("store", table_ref, index, value, mask)


def add_at(table_ref: Any, index: Array, value: Array | int, mask: Array | None = None) -> None:
  """The same, where the value is added to the element."""
  _update("add", table_ref, index, value, mask)


def min_at(table_ref: Any, index: Array, value: Array | int, mask: Array | None = None) -> None:
  """The same, where the lesser of the element and the value stays."""
  _update("min", table_ref, index, value, mask)


def max_at(table_ref: Any, index: Array, value: Array | int, mask: Array | None = None) -> None:
  """The same, where the greater of the element and the value stays."""
  _update("max", table_ref, index, value, mask)


def _update(
  kind: str, table_ref: Any, index: Array, value: Array | int, mask: Array | None
) -> None:
  # Predicates, not branches: barriers follow. Relaxed: the barriers order what has to be in order.
  operation = "st.shared" if kind == "store" else f"red.relaxed.cta.shared.{kind}"
  # Sums are the same of unsigned numbers, and only for these does the compiler have an instruction
  # that counts the threads that add 1 to one element. Others would do so one by one.
  ptx = f"{operation}.{'u32' if kind == 'add' else 's32'} [$0], $1;"

  def update(ctx: Any, table: ir.Value, *args: mgpu.FragmentedArray) -> None:
    del ctx
    index, value, mask = map(element, args)
    i32 = ir.IntegerType.get_signless(32)
    place = utils.getelementptr(utils.memref_ptr(table), [index], i32)
    chosen = arith.cmpi(arith.CmpIPredicate.ne, mask, arith.constant(i32, 0))
    utils.inline_ptx(ptx, place, value, predicate=chosen, has_side_effects=True)

  update.effect = kind
  everyone = index * 0 + 1
  plgpu.inline_mgpu(arg_types=(plgpu.RefType(), LAYOUT, LAYOUT, LAYOUT))(update)(
    table_ref, index, index * 0 + value, everyone if mask is None else ones(mask)
  )


def fill(table_ref: Any, size: int, value: int) -> None:
  """Writes one value to a vector, padded to 128."""
  for _, i in chunks(size):
    put_at(table_ref, i, value)


def barrier() -> None:
  """All threads of the warpgroup wait here for each other, and then see what the others wrote."""

  def wait(ctx: Any) -> None:
    del ctx
    ptx, name = f"bar.sync $0, {THREADS};", utils.warpgroup_barrier_idx(sync=False)
    utils.inline_ptx(ptx, name, has_side_effects=True, convergent=True)

  wait.effect = "join_warpgroup"
  plgpu.inline_mgpu()(wait)()


def any_of_all(mask: Array) -> Array:
  """``[]`` bool, whether ``mask`` (``[128]`` bool) is set in any thread; a barrier, too."""

  def vote(ctx: Any, mask: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
    del ctx
    i1, i32 = (ir.IntegerType.get_signless(bits) for bits in (1, 32))
    own = arith.cmpi(arith.CmpIPredicate.ne, element(mask), arith.constant(i32, 0))
    ptx = f"bar.red.or.pred $0, $1, {THREADS}, $2;"
    name = utils.warpgroup_barrier_idx(sync=False)
    voted = utils.inline_ptx(
      ptx, name, own, result_types=i1, has_side_effects=True, convergent=True
    )
    return mgpu.FragmentedArray.splat(voted, shape=(), is_signed=False)

  vote.twin, vote.effect = lambda mask: jnp.any(mask != 0), "join_warpgroup"
  result = plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.bool_), layout=plgpu.Layout.WG_SPLAT)
  return plgpu.inline_mgpu(arg_types=(LAYOUT,), return_type=result)(vote)(ones(mask))
