"""The indices of each row's largest elements: those of ``jax.lax.top_k``, in one kernel.

XLA sorts whole rows on GPUs. Here a warp takes a row. Its lanes hold every 32nd element as an
integer that orders as the element does, and bring their own in order first. Then only the first
of each lane can be the next of the row: a round is a maximum over the warp, and a minimum over the
indices of those that reach it.

Six scores over three lanes, the two largest::

  lane 0: 3 1   lane 1: 7 5   lane 2: 6 2     in order within a lane, heads 3 7 6
  round 0: 7 (lane 1, whose head is now 5)     heads 3 5 6
  round 1: 6 (lane 2)
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref

from pallas_kernels.launch import launch
from pallas_kernels.support import Array
from pallas_kernels.warp.warps import (
  INT32_MAX,
  LANES,
  LAYOUT,
  THREADS,
  element,
  mapped,
  ones,
  shift_right,
  store,
  thread_index,
  warp_max,
  warp_min,
  where,
)

Entry = tuple[Array, Array]  # an element as an ordered integer, and its index in the row

MOST_COLUMNS = 1024  # a lane holds 32 of them in registers
_ROWS = THREADS // LANES  # of a block
_BLOCK_AXIS = "top_k_block"
_LOWEST, _NO_INDEX = -INT32_MAX - 1, INT32_MAX  # no element is below, and none is there


@functools.partial(jax.jit, static_argnames=("k",))
def top_k(scores_TE: Array, k: int) -> Array:
  """Chooses the k largest of each row, the largest first; bit for bit ``lax.top_k(...)[1]``.

  Equal elements go to the lower index. All others are ordered, −0 before 0 and NaN by their bits:
  those without a sign beyond infinity, those with one beyond −infinity.

  Args:
    scores_TE: ``[T, E]`` float32.
    k: how many, at most E.

  Returns:
    ``[T, k]`` int32.

  Raises:
    NotImplementedError: nothing to choose, more than 32 to choose, rows of more than 1024 scores,
      or 2^31 scores or more.
    ValueError: the array has no rows, or they are shorter than ``k``.
    TypeError: it is not float32.
  """
  _check(scores_TE, k)
  rows, columns = scores_TE.shape
  scores = scores_TE.reshape(-1)
  (chosen,) = launch(
    functools.partial(_choose, rows=rows, columns=columns, k=k),
    [scores],
    out_type=[jax.typeof(scores).update(shape=(rows * k,), dtype=jnp.dtype(jnp.int32))],
    grid=(-(-rows // _ROWS),),
    grid_names=(_BLOCK_AXIS,),
    # Only this lowering takes loads per thread. The kernel reaches no other device.
    compiler_params=plgpu.CompilerParams(
      lowering_semantics=plgpu.LoweringSemantics.Lane, skip_device_barrier=True
    ),
    kernel_name="top_k",
  )
  return chosen.reshape(rows, k)


def _check(scores_TE: Array, k: int) -> None:
  if scores_TE.ndim != 2 or not 0 <= k <= scores_TE.shape[1]:
    raise ValueError(f"scores_TE: expected shape [T, E] with E >= {k}, got {scores_TE.shape}")
  if scores_TE.dtype != jnp.float32:
    raise TypeError(f"scores_TE: expected float32, got {scores_TE.dtype}")
  # Indices are int32.
  if not 0 < scores_TE.size <= INT32_MAX or scores_TE.shape[1] > MOST_COLUMNS:
    raise NotImplementedError(
      f"scores_TE: expected rows of 1 to {MOST_COLUMNS}, below 2^31 in all, got {scores_TE.shape}"
    )
  if not 0 < k <= LANES:
    raise NotImplementedError(f"k: expected 1 to {LANES}, got {k}")


def _choose(scores_ref: Any, index_ref: Any, *, rows: int, columns: int, k: int) -> None:
  thread = thread_index()
  warp = shift_right(thread, LANES.bit_length() - 1)
  lane = thread - warp * LANES
  row = lax.axis_index(_BLOCK_AXIS) * _ROWS + warp
  exists = ones(row < rows)
  row = jnp.minimum(row, rows - 1)  # those of the last block that do not exist read another

  entries = _in_order(_load(scores_ref, row * columns, lane, columns), k)
  nothing = lane * 0 + _LOWEST, lane * 0 + _NO_INDEX
  chosen = lane * 0
  for place in range(k):
    key, index = entries[0]
    largest = warp_max(key)
    winner = warp_min(where(key == largest, index, _NO_INDEX))
    chosen = where(lane == place, winner, chosen)
    # The lane that had it moves up, as far as there are rounds to come.
    pairs = itertools.pairwise([*entries, nothing][: k - place])
    entries = [_select(index == winner, after, before) for before, after in pairs]
  store(index_ref, row * k + lane, chosen, exists * ones(lane < k))


def _load(scores_ref: Any, first: Array, lane: Array, columns: int) -> list[Entry]:
  """Each lane's elements of a row; neighbours load neighbours."""
  entries = []
  for start in range(0, columns, LANES):
    index = lane + start
    key = _ordered(_load_bits(scores_ref, first + jnp.minimum(index, columns - 1)))
    if start + LANES > columns:
      exists = index < columns
      key, index = where(exists, key, _LOWEST), where(exists, index, _NO_INDEX)
    entries.append((key, index))
  return entries


def _ordered(bits: Array) -> Array:
  """Integers that order as the floats of these bits: without their sign, negatives fall."""
  return where(bits < 0, bits ^ INT32_MAX, bits)


def _in_order(entries: list[Entry], count: int) -> list[Entry]:
  """The ``count`` largest of each lane, the largest first; equal ones stay in order."""
  for front in range(min(count, len(entries))):
    for place in range(len(entries) - 1, front, -1):
      before, after = entries[place - 1 : place + 1]
      swap = before[0] < after[0]
      entries[place - 1 : place + 1] = _select(swap, after, before), _select(swap, before, after)
  return entries[:count]


def _select(mask: Array, x: Entry, y: Entry) -> Entry:
  return where(mask, x[0], y[0]), where(mask, x[1], y[1])


def _load_bits(scores_ref: Any, index: Array) -> Array:
  """The bits of element ``index`` (``[128]`` int32, in range) of float32, for each thread."""

  def load(ctx: Any, scores: ir.Value, index: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
    del ctx
    at = arith.index_cast(ir.IndexType.get(), element(index))
    i32 = ir.IntegerType.get_signless(32)
    return mapped(index, lambda _: arith.bitcast(i32, memref.load(scores, [at])))

  load.twin = lambda scores, index: lax.bitcast_convert_type(scores[index], jnp.int32)
  result = plgpu.ShapeDtypeStruct((THREADS,), jnp.dtype(jnp.int32), layout=LAYOUT)
  inlined = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), LAYOUT), return_type=result)(load)
  return inlined(scores_ref, index)
