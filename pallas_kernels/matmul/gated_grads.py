"""Gradients through what is between the matrices of an expert, in one pass over its rows.

Nothing is multiplied by a matrix, so XLA could do it. But a buffer has more room than rows: 1.25
times the mean for large batches, twice for smaller ones. XLA would pass over all of it::

  projections ─┐       ┌─► gate · unit(projections)      which the gradient of wo multiplies
  gradient ────┼─► ────┼─► gradients of projections
  gate ────────┘       └─► Σ unit(projections) · gradient    the gate's
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import support, varying
from pallas_kernels.launch import launch
from pallas_kernels.matmul import layout
from pallas_kernels.matmul.elementwise import elementwise_vjp
from pallas_kernels.matmul.gated import Columns, check_columns
from pallas_kernels.matmul.layout import SWIZZLE, TILE_ROWS, UNIT
from pallas_kernels.support import Array
from pallas_kernels.warp import pairs
from pallas_kernels.warp.branches import when
from pallas_kernels.warp.warps import largest_divisor

_BLOCKS = 2  # of an SM: one loads and stores while the other computes
# A tile of rows has its columns in up to so many parts, which blocks take in turn. Whole tiles are
# about two for each block, so that three of some would be half as much again.
_MOST_PARTS = 6
_STAGES = 2  # pieces of 64 rows and columns that a block has of each array
_BLOCK_AXIS = "block"
_BY_ROW = plgpu.Layout.WGMMA.reduce(1)


class GatedGrads(NamedTuple):
  """What backward needs between the matrices.

  Attributes:
    inner_CN: ``[C, N]`` bfloat16, what was between them, times the gates.
    hidden_grad: gradients of the projections, in their shapes.
    gate_grad_C: ``[C]`` float32, gradients of the gates.
  """

  inner_CN: Array
  hidden_grad: tuple[Array, ...]
  gate_grad_C: Array


@functools.partial(jax.jit, static_argnames=("unit", "columns"))
def gated_grads(
  hidden: Sequence[Array],
  grad_CN: Array,
  gate_C: Array,
  group_size_P: Array,
  unit: Callable[..., Array],
  *,
  columns: Columns = "apart",
) -> GatedGrads:
  """The gradients of ``gate * unit(hidden)`` for the rows of all groups, and that product.

  All is computed in float32, and rounded once.

  Args:
    hidden: ``[C, N]`` bfloat16 each, or one ``[C, 2N]``: ``Gated.hidden``.
    grad_CN: ``[C, N]`` bfloat16, gradients of the product.
    gate_C: ``[C]`` float32, the router's gate of each row. It weighs the product; the projection
      that is called gate elsewhere is one of ``hidden``.
    group_size_P: ``[P]`` int32, rows per slot; the sum is at most C.
    unit: as for ``gated_matmul``.
    columns: likewise.

  Returns:
    Rows at or beyond the sum of the group sizes hold anything.

  Raises:
    NotImplementedError: a unit that the kernel cannot compute, a dtype other than bfloat16, or N
      no multiple of 64.
    TypeError: gates of a dtype other than float32.
    ValueError: shapes that do not fit together.
  """
  check_columns(columns)
  capacity, cols = grad_CN.shape
  elementwise_vjp(unit, _arguments(columns), (UNIT, UNIT))  # only whether it is
  layout.expect_bfloat16(grad_CN=grad_CN, **{f"hidden[{i}]": x for i, x in enumerate(hidden)})
  layout.expect_multiple("N", cols, UNIT)
  widths = {"apart": (cols, cols), "ungated": (cols,)}.get(columns, (2 * cols,))
  if len(hidden) != len(widths):
    raise ValueError(f"hidden: expected {len(widths)} that are {columns}, got {len(hidden)}")
  for i, (each, width) in enumerate(zip(hidden, widths, strict=True)):
    layout.expect_shape(f"hidden[{i}]", each, (capacity, width))
  layout.expect_shape("gate_C", gate_C, (capacity,))
  if gate_C.dtype != jnp.float32:
    raise TypeError(f"gate_C: expected float32, got {gate_C.dtype}")
  num_rows = jnp.sum(group_size_P, dtype=jnp.int32)[None]
  blocks = _BLOCKS * support.num_sms()
  # TMA clips a tile at the array's end if that has a whole one. Registers clip nothing.
  gate_C = jnp.pad(gate_C, (0, -capacity % UNIT))
  if (more := UNIT - capacity) > 0:
    grad_CN, *hidden = (jnp.pad(x, [(0, more), (0, 0)]) for x in (grad_CN, *hidden))
  gate_C, grad_CN, *hidden = varying.vary_alike(gate_C, grad_CN, *hidden)
  parts = largest_divisor(cols // UNIT, _MOST_PARTS)
  sums = jax.typeof(gate_C).update(shape=(parts * gate_C.size,))
  inner_CN, *grads, gate_grad = launch(
    functools.partial(_body, unit=unit, columns=columns, blocks=blocks, parts=parts),
    [num_rows, gate_C, grad_CN, *hidden],
    out_type=[*(jax.typeof(x) for x in (grad_CN, *hidden)), sums],
    grid=(blocks,),
    grid_names=(_BLOCK_AXIS,),
    compiler_params=plgpu.CompilerParams(
      # Only this lowering tells columns that take turns apart.
      lowering_semantics=plgpu.LoweringSemantics.Lane,
      approx_math=True,  # of 11 bits or more: the results have 8
      skip_device_barrier=True,  # reaches no other device
    ),
    kernel_name="gated_grads",
  )
  gate_grad_C = jnp.sum(gate_grad.reshape(parts, -1), axis=0)
  inner_CN, *grads, gate_grad_C = (x[:capacity] for x in (inner_CN, *grads, gate_grad_C))
  return GatedGrads(inner_CN, tuple(grads), gate_grad_C)


def _body(
  *refs: Any, unit: Callable[..., Array], columns: Columns, blocks: int, parts: int
) -> None:
  """Passes over parts of tiles of 64 rows, in turn with the other blocks, and over their columns.

  Each part has a line of sums, ``gate_grad``.
  """
  num_rows, gate, grad, *rest = refs
  count = (len(rest) - 2) // 2
  hidden, (inner, *hidden_grads, gate_grad) = rest[:count], rest[count:]
  cols, arguments = grad.shape[1], _arguments(columns)
  interleaved = columns == "interleaved"
  differentiate = elementwise_vjp(unit, arguments, (UNIT, UNIT))
  block, num_cols = lax.axis_index(_BLOCK_AXIS), cols // UNIT
  cols_of_part = num_cols // parts
  most_tiles = gate.shape[0] // UNIT
  num_tiles = lax.min(lax.div(num_rows[0] + (UNIT - 1), jnp.int32(UNIT)), jnp.int32(most_tiles))
  mine = lax.div(num_tiles * parts + (blocks - 1 - block), jnp.int32(blocks))

  def taken(i: Array) -> tuple[Array, Array]:
    """The tile and the part that this block takes as its i-th."""
    index = block + i * blocks
    return lax.div(index, jnp.int32(parts)), lax.rem(index, jnp.int32(parts))

  def piece(place: Callable[[Array], Array]) -> Any:
    """A block of 64 x 64: rows of a tile, and the columns that ``place`` makes of columns c."""

    def index(i: Array, c: Array) -> tuple[Array, Array]:
      tile, part = taken(i)
      return tile, place(part * cols_of_part + c)

    return plgpu.BlockSpec(
      (UNIT, UNIT),
      index,
      transforms=(plgpu.TilingTransform((TILE_ROWS, UNIT)), plgpu.SwizzleTransform(SWIZZLE)),  # pyright: ignore[reportAbstractUsage]
    )

  same = piece(lambda c: c)
  if interleaved:
    of_hidden = [piece(lambda c, k=k: 2 * c + k) for k in range(2)]
  elif columns == "fused":
    of_hidden = [piece(lambda c, k=k: c + k * num_cols) for k in range(2)]
  else:
    of_hidden = [same] * arguments
  sources, targets = ([x[i % len(x)] for i in range(arguments)] for x in (hidden, hidden_grads))

  def step(indices: tuple[Array, Array], *pieces_and_sum: Any) -> Array:
    (i, c), (*pieces, before) = indices, pieces_and_sum
    grad_piece, *hidden_pieces = pieces[: 1 + arguments]
    inner_out, *hidden_outs = pieces[1 + arguments :]
    tile, part = taken(i)
    rows = pl.ds(tile * UNIT, UNIT)
    gate_C = plgpu.load(gate.at[rows], layout=_BY_ROW, optimized=False)
    gate_CN = lax.broadcast_in_dim(gate_C, (UNIT, UNIT), (0,))
    values = [_load(x) for x in hidden_pieces]
    values = pairs.apart(*values) if interleaved else values
    values = [x.astype(jnp.float32) for x in values]
    results = differentiate(*values, _load(grad_piece).astype(jnp.float32) * gate_CN)
    # Of an argument that is not used, the gradient is a constant.
    value, *grads = (plgpu.layout_cast(x, plgpu.Layout.WGMMA) for x in results)
    grads = [x.astype(jnp.bfloat16) for x in grads]
    grads = pairs.together(*grads) if interleaved else grads
    for out, each in zip(hidden_outs, grads, strict=True):
      out[...] = each
    inner_out[...] = (value * gate_CN).astype(jnp.bfloat16)
    # Loaded again, as registers are few.
    products = value * _load(grad_piece).astype(jnp.float32)
    total = lax.select(c > 0, before, jnp.zeros_like(before)) + jnp.sum(products, axis=1)

    @when(c == cols_of_part - 1)
    def _() -> None:
      gate_grad[pl.ds(part * gate.shape[0] + tile * UNIT, UNIT)] = total

    return total

  plgpu.emit_pipeline(
    step,
    grid=(mine, cols_of_part),
    in_specs=[same, *of_hidden],
    out_specs=[same, *of_hidden],
    max_concurrent_steps=_STAGES,
    init_carry=plgpu.layout_cast(jnp.zeros(UNIT, jnp.float32), _BY_ROW),
  )(grad, *sources, inner, *targets)


def _arguments(columns: Columns) -> int:
  """Of the unit."""
  return 1 if columns == "ungated" else 2


def _load(piece: Any) -> Array:
  return plgpu.load(piece, layout=plgpu.Layout.WGMMA, optimized=False)
