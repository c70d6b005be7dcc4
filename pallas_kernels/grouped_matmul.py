"""Matmuls of grouped rows with home and replica weights, and the gradient to the weights.

Both kernels are persistent. Of a block's three warpgroups one loads operands by TMA into a ring
of shared-memory stages and runs ahead into the next tile; the other two multiply a strip of the
tile's rows each, and store it. A tile takes its weights from the home or from the replica
operand, by its slot: the two are never joined. Groups of rows begin anywhere; what is computed of
each is laid out in a table first.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

Array = jax.Array
Scalars = tuple[Array, ...]

_BLOCKS = 132  # the SMs of an H100 or H200; right, if slower, with any other number
_STRIPS = 2  # of a tile, one for each warpgroup that multiplies
_DEPTH = 64  # contracted per stage: 128 bytes, the widest swizzle
_STAGES = 4  # with 3 the loads come late: a tenth slower
_BUFFERS = 2  # pieces of 64 × 64 that a warpgroup stores at a time
_BAND = 2048  # columns worked on side by side, so that the cache serves most loads
_BORDER = 2 * _DEPTH  # room for the rows of a group outside its aligned part: at most 7 + 63
_BLOCK_AXIS, _GROUP_AXIS = "matmul_block", "matmul_warpgroup"


def grouped_matmul(
  rows_CK: Array,
  home_MKN: Array,
  replica_SKN: Array,
  group_size_P: Array,
  *,
  transpose_rhs: bool = False,
) -> Array:
  """Multiplies each group of rows by the weights of its slot.

  Args:
    rows_CK: ``[C, K]`` bfloat16, grouped by slot from row 0 on. Rows at or beyond the sum of
      the group sizes may hold anything, NaN included.
    home_MKN: ``[M, K, N]`` bfloat16 (``[M, N, K]`` with ``transpose_rhs``).
    replica_SKN: ``[S, K, N]`` bfloat16, likewise; S may be 0.
    group_size_P: ``[M + S]`` int32, rows per slot; the sum is at most C.
    transpose_rhs: multiply by the transposed weights (the gradient to the rows).

  Returns:
    ``[C, N]`` bfloat16, accumulated in float32. Rows at or beyond the sum of the group sizes
    are not written: they hold anything.

  Raises:
    NotImplementedError: a dtype other than bfloat16, K no multiple of 64, N no multiple of 128,
      or C below 256.
    ValueError: shapes that do not fit together.
  """
  (capacity, depth), num_home, num_replica = rows_CK.shape, home_MKN.shape[0], replica_SKN.shape[0]
  cols = home_MKN.shape[1 if transpose_rhs else 2]
  weights = (cols, depth) if transpose_rhs else (depth, cols)
  _expect_shape("home_MKN", home_MKN, (num_home, *weights))
  _expect_shape("replica_SKN", replica_SKN, (num_replica, *weights))
  _expect_shape("group_size_P", group_size_P, (num_home + num_replica,))
  _expect_bfloat16(rows_CK=rows_CK, home_MKN=home_MKN, replica_SKN=replica_SKN)
  _expect_multiple("K", depth, _DEPTH)
  _expect_multiple("N", cols, 128)
  _expect_capacity(capacity)
  tile = _tile(cols, rows=256)
  kernel = _kernel(
    functools.partial(_matmul_body, num_home=num_home, transpose_rhs=transpose_rhs, tile=tile),
    out_type=jax.typeof(rows_CK).update(shape=(capacity, cols)),
    scratch_types=[
      # One memory, two views: TMA may start at any row only without tiling, wgmma wants tiles
      # of 8 rows. For one swizzle's width of columns both name the same bytes.
      plgpu.RefUnion(
        _smem(_STAGES, _STRIPS * tile.strip, _DEPTH, tiled=False),
        _smem(_STAGES, _STRIPS * tile.strip, _DEPTH),
      ),
      _smem(_STAGES, *((tile.cols, _DEPTH) if transpose_rhs else (_DEPTH, tile.cols))),
      plgpu.RefUnion(
        _smem(_STRIPS, _BUFFERS, 64, 64), _smem(_STRIPS, _BUFFERS, 64, 64, tiled=False)
      ),
    ],
    loads=2,
    kernel_name="grouped_matmul",
  )
  # An operand may not be empty; without replicas the second one is never read.
  replica_SKN = replica_SKN if num_replica else home_MKN
  table = _row_tiles(capacity, group_size_P, _STRIPS * tile.strip)
  return kernel(table, rows_CK, home_MKN, replica_SKN)


def grouped_matmul_wgrad(
  rows_CK: Array, grad_CN: Array, group_size_P: Array, num_home: int
) -> tuple[Array, Array]:
  """The gradient of ``grouped_matmul`` to its weights: per slot, ``rows.T @ grad``.

  Args:
    rows_CK: ``[C, K]`` bfloat16. Rows at or beyond the sum of the group sizes may hold anything,
      NaN included, and so may those of ``grad_CN``.
    grad_CN: ``[C, N]`` bfloat16.
    group_size_P: ``[M + S]`` int32, rows per slot; the sum is at most C.
    num_home: M, at least 1.

  Returns:
    ``[M, K, N]`` and ``[S, K, N]``, float32; an empty slot's gradient is zero.

  Raises:
    NotImplementedError: a dtype other than bfloat16, K or N no multiple of 128, C no multiple
      of 8, or below 256.
    ValueError: shapes that do not fit together.
  """
  (capacity, depth), (num_slots,), cols = rows_CK.shape, group_size_P.shape, grad_CN.shape[1]
  _expect_shape("grad_CN", grad_CN, (capacity, cols))
  if not 1 <= num_home <= num_slots:
    raise ValueError(f"num_home: expected 1 to {num_slots}, the slots, got {num_home}")
  _expect_bfloat16(rows_CK=rows_CK, grad_CN=grad_CN)
  _expect_multiple("K", depth, 128)
  _expect_multiple("N", cols, 128)
  _expect_multiple("C", capacity, 8)
  _expect_capacity(capacity)
  table, border_row_PB, mine_PB = _row_steps(capacity, group_size_P)

  def border(x_CX: Array) -> Array:
    x_PBX = jnp.where(mine_PB[..., None], x_CX[border_row_PB], jnp.zeros((), x_CX.dtype))
    return x_PBX.reshape(-1, x_CX.shape[1])

  num_replica, tile = num_slots - num_home, _tile(cols, rows=depth)
  out_type = functools.partial(jax.typeof(rows_CK).update, dtype=jnp.dtype(jnp.float32))
  kernel = _kernel(
    functools.partial(_wgrad_body, num_home=num_home, tile=tile),
    out_type=[out_type(shape=(n, depth, cols)) for n in (num_home, num_replica) if n],
    scratch_types=[
      _smem(_STAGES, _STRIPS, _DEPTH, tile.strip),
      _smem(_STAGES, _DEPTH, tile.cols),
    ],
    loads=_STRIPS + 1,
    kernel_name="grouped_matmul_wgrad",
  )
  grads = kernel(table, rows_CK, grad_CN, border(rows_CK), border(grad_CN))
  return grads[0], grads[1] if num_replica else jnp.zeros((0, depth, cols), jnp.float32)


def _row_tiles(capacity: int, group_size_P: Array, tile_rows: int) -> Array:
  """What each tile of rows computes.

  Tiles begin where their group begins. The last one of a group is moved up until it ends with
  the group, so that none crosses a border: rows computed twice are stored twice, with the same
  bits. If at most half a tile is left it is a half tile. Only a group smaller than its tile has
  a tile that is stored in part. Half tiles come last, so that blocks finish together.

  Returns:
    ``[4, T]`` int32: slot, first row, rows to store (at most half a tile: a half tile), and
    in the last line the number of tiles.
  """
  num_slots = group_size_P.shape[0]
  start_P = _sum_before(group_size_P)
  end_P = start_P + group_size_P
  left_P = group_size_P % tile_rows
  half_P = ((left_P > 0) & (left_P <= tile_rows // 2)).astype(jnp.int32)
  tiles_Q = jnp.concatenate([-(-group_size_P // tile_rows) - half_P, half_P])
  before_Q = _sum_before(tiles_Q)
  tile_T = jnp.arange(capacity // tile_rows + num_slots, dtype=jnp.int32)
  q_T = jnp.sum((before_Q + tiles_Q)[:, None] <= tile_T[None, :], axis=0, dtype=jnp.int32)
  q_T = jnp.minimum(q_T, 2 * num_slots - 1)
  slot_T = q_T % num_slots
  rows_T = jnp.where(q_T < num_slots, tile_rows, tile_rows // 2)
  first_T = start_P[slot_T] + (tile_T - before_Q[q_T]) * tile_rows
  # Half tiles are counted apart from the whole ones before them: they end with their group.
  first_T = jnp.where(q_T < num_slots, first_T, end_P[slot_T])
  first_T = jnp.maximum(jnp.minimum(first_T, end_P[slot_T] - rows_T), start_P[slot_T])
  stored_T = jnp.minimum(group_size_P[slot_T], rows_T)
  num_tiles_T = jnp.broadcast_to(jnp.sum(tiles_Q, dtype=jnp.int32), tile_T.shape)
  return jnp.stack([slot_T, first_T, stored_T, num_tiles_T])


def _row_steps(capacity: int, group_size_P: Array) -> tuple[Array, Array, Array]:
  """The stages of each group's contraction over its rows.

  The rows between the first that TMA can address (a multiple of 8) and the last whole stage
  after it are loaded in place. The few before and after are gathered into ``_BORDER`` rows per
  slot, filled up with zeros.

  Returns:
    ``[4, P]`` int32, the largest group first, since what a block does last should be short:
    slot, first aligned row, stages of border rows, stages in all; ``[P, _BORDER]`` int32, the
    row of each border row; and whether it is one.
  """
  start_P = _sum_before(group_size_P)
  head_P = jnp.minimum(-start_P % 8, group_size_P)
  aligned_P = (group_size_P - head_P) // _DEPTH
  border_P = group_size_P - aligned_P * _DEPTH
  border_steps_P = -(-border_P // _DEPTH)
  slot_P = jnp.arange(group_size_P.shape[0], dtype=jnp.int32)
  larger_PP = group_size_P[:, None] > group_size_P[None, :]
  equal_PP = group_size_P[:, None] == group_size_P[None, :]
  earlier_PP = slot_P[:, None] < slot_P[None, :]
  rank_P = jnp.sum(larger_PP | (equal_PP & earlier_PP), axis=0, dtype=jnp.int32)
  lines_4P = jnp.stack([slot_P, start_P + head_P, border_steps_P, border_steps_P + aligned_P])
  ranked_PP = rank_P[None, :] == slot_P[:, None]
  table_4P = jnp.sum(jnp.where(ranked_PP[None], lines_4P[:, None, :], 0), axis=2, dtype=jnp.int32)
  i_1B = jnp.arange(_BORDER, dtype=jnp.int32)[None, :]
  in_head_PB = i_1B < head_P[:, None]
  row_PB = start_P[:, None] + i_1B + jnp.where(in_head_PB, 0, aligned_P[:, None] * _DEPTH)
  return table_4P, jnp.minimum(row_PB, capacity - 1), i_1B < border_P[:, None]


def _sum_before(x_N: Array) -> Array:
  """The sum of all before each. A masked sum fuses with what surrounds it; a scan does not."""
  i_N = jnp.arange(x_N.shape[0], dtype=jnp.int32)
  return jnp.sum(jnp.where(i_N[:, None] < i_N[None, :], x_N[:, None], 0), axis=0, dtype=jnp.int32)


@dataclasses.dataclass(frozen=True)
class _Tile:
  """The rows of a strip and the columns of a tile."""

  strip: int
  cols: int


def _tile(cols: int, rows: int) -> _Tile:
  """The largest tile, 128 × 256 or 256 × 128, whose sums stay in registers."""
  if cols % 256 == 0:
    return _Tile(64, 256)
  return _Tile(128 if rows % 256 == 0 else 64, 128)


@dataclasses.dataclass(frozen=True)
class _Ring:
  """The stages in shared memory, as the loading and the multiplying warpgroups see them.

  Steps are counted over all tiles of a block; a step uses stage ``step % _STAGES``.
  """

  full: Any
  free: Any

  def stage(self, step: Array) -> Array:
    return lax.rem(step, jnp.int32(_STAGES))

  def acquire(self, step: Array) -> tuple[Array, Any]:
    """The stage to load and the barrier that loads arrive on, once its last use is over."""
    stage = self.stage(step)
    pl.when(step >= _STAGES)(lambda: plgpu.barrier_wait(self.free.at[stage]))
    return stage, self.full.at[stage]

  def finish(self, steps: Array) -> None:
    """Waits until the stages of the last of ``steps`` steps are given back."""

    def wait(step: Array, _: None) -> None:
      plgpu.barrier_wait(self.free.at[self.stage(step)])

    lax.fori_loop(lax.max(steps - _STAGES, jnp.int32(0)), steps, wait, None)

  def multiply(self, first: Array, count: Array | int, wgmma: Callable[[Array], None]) -> None:
    """Multiplies ``count`` stages, giving each back once the next one's product is under way."""

    def step(k: Array, _: None) -> None:
      stage = self.stage(first + k)
      plgpu.barrier_wait(self.full.at[stage])
      wgmma(stage)
      plgpu.wgmma_wait(1)
      pl.when(k > 0)(lambda: plgpu.barrier_arrive(self.free.at[self.stage(first + k - 1)]))

    lax.fori_loop(0, count, step, None)
    plgpu.wgmma_wait(0)
    pl.when(count > 0)(lambda: plgpu.barrier_arrive(self.free.at[self.stage(first + count - 1)]))

  def skip(self, first: Array, count: int) -> None:
    """Gives ``count`` stages back unused."""

    def step(k: Array, _: None) -> None:
      stage = self.stage(first + k)
      plgpu.barrier_wait(self.full.at[stage])
      plgpu.barrier_arrive(self.free.at[stage])

    lax.fori_loop(0, count, step, None)


def _matmul_body(
  table: Any,
  rows: Any,
  home: Any,
  replica: Any,
  out: Any,
  lhs_views: Any,
  rhs: Any,
  staged_views: Any,
  full: Any,
  free: Any,
  *,
  num_home: int,
  transpose_rhs: bool,
  tile: _Tile,
) -> None:
  (lhs_load, lhs), (staged, staged_store) = lhs_views, staged_views
  steps, num_cols = rows.shape[1] // _DEPTH, out.shape[1] // tile.cols
  num_rows = table[3, 0]
  strip = lax.axis_index(_GROUP_AXIS)
  ring = _Ring(full, free)

  def describe(t: Array) -> Scalars:
    row, col = _position(t, lax.max(num_rows, jnp.int32(1)), num_cols, _BAND // tile.cols)
    return table[0, row], table[1, row], table[2, row], col * tile.cols

  def load(work: Scalars, first: Array) -> Array:
    slot, start, _, col = work
    cols = pl.ds(col, tile.cols)

    def load_steps(weights: Any, slot: Array) -> None:
      def step(k: Array, _: None) -> None:
        stage, loaded = ring.acquire(first + k)
        depth = pl.ds(k * _DEPTH, _DEPTH)
        source = rows.at[pl.ds(start, _STRIPS * tile.strip), depth]
        plgpu.copy_gmem_to_smem(source, lhs_load.at[stage], loaded)
        weight = weights.at[slot, cols, depth] if transpose_rhs else weights.at[slot, depth, cols]
        plgpu.copy_gmem_to_smem(weight, rhs.at[stage], loaded)

      lax.fori_loop(0, steps, step, None)

    pl.when(slot < num_home)(lambda: load_steps(home, slot))
    pl.when(slot >= num_home)(lambda: load_steps(replica, slot - num_home))
    return first + steps

  def compute(work: Scalars, first: Array) -> Array:
    _, start, stored, col = work
    start, stored = start + strip * tile.strip, stored - strip * tile.strip

    def multiply(acc: Any) -> Array:
      def wgmma(stage: Array) -> None:
        lhs_strip = lhs.at[stage, pl.ds(strip * tile.strip, tile.strip)]
        weight = rhs.at[stage]
        plgpu.wgmma(acc, lhs_strip, weight.transpose((1, 0)) if transpose_rhs else weight)

      pl.when(stored > 0)(lambda: ring.multiply(first, steps, wgmma))
      pl.when(stored <= 0)(lambda: ring.skip(first, steps))
      return acc[...]

    def store(r: int, c: int, buffer: int) -> None:
      def store_rows(first_row: Array | int, size: int) -> None:
        source = staged_store.at[strip, buffer, pl.ds(first_row, size)]
        target = out.at[pl.ds(start + r + first_row, size), pl.ds(col + c, 64)]
        plgpu.copy_smem_to_gmem(source, target)

      rest = stored - r
      pl.when(rest >= 64)(lambda: store_rows(0, 64))

      # A copy has a fixed number of rows, so a part is stored by the bits of its size.
      @pl.when((rest > 0) & (rest < 64))
      def _() -> None:
        for size in (32, 16, 8, 4, 2, 1):
          done = rest & (64 - 2 * size)
          pl.when((rest & size) != 0)(functools.partial(store_rows, done, size))

    product = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((tile.strip, tile.cols))).astype(
      out.dtype
    )
    pieces = list(itertools.product(range(0, tile.strip, 64), range(0, tile.cols, 64)))
    for i in range(0, len(pieces), _BUFFERS):
      plgpu.wait_smem_to_gmem(0, wait_read_only=True)
      batch = list(enumerate(pieces[i : i + _BUFFERS]))
      for buffer, (r, c) in batch:
        staged[strip, buffer] = product[r : r + 64, c : c + 64]
      plgpu.commit_smem()
      for buffer, (r, c) in batch:
        store(r, c, buffer)
    return first + steps

  _persist(num_rows * num_cols, describe, load, compute, ring)


def _wgrad_body(
  table: Any,
  rows: Any,
  grad: Any,
  border_rows: Any,
  border_grad: Any,
  *refs: Any,
  num_home: int,
  tile: _Tile,
) -> None:
  *outs, lhs, rhs, full, free = refs
  num_rows = outs[0].shape[1] // (_STRIPS * tile.strip)
  num_cols = outs[0].shape[2] // tile.cols
  slot_tiles = num_rows * num_cols
  strip = lax.axis_index(_GROUP_AXIS)
  ring = _Ring(full, free)

  def describe(t: Array) -> Scalars:
    rank = lax.div(t, jnp.int32(slot_tiles))
    in_slot = lax.rem(t, jnp.int32(slot_tiles))
    row, col = _position(in_slot, num_rows, num_cols, _BAND // tile.cols)
    corner = row * (_STRIPS * tile.strip), col * tile.cols
    return *(table[line, rank] for line in range(4)), *corner

  def load(work: Scalars, first: Array) -> Array:
    slot, aligned, border_steps, steps, out_row, out_col = work

    def load_steps(rows: Any, grad: Any, first_row: Array, first: Array, count: Array) -> None:
      def step(k: Array, _: None) -> None:
        stage, loaded = ring.acquire(first + k)
        depth = pl.ds(pl.multiple_of(first_row + k * _DEPTH, 8), _DEPTH)
        for strip in range(_STRIPS):
          source = rows.at[depth, pl.ds(out_row + strip * tile.strip, tile.strip)]
          plgpu.copy_gmem_to_smem(source, lhs.at[stage, strip], loaded)
        source = grad.at[depth, pl.ds(out_col, tile.cols)]
        plgpu.copy_gmem_to_smem(source, rhs.at[stage], loaded)

      lax.fori_loop(0, count, step, None)

    load_steps(border_rows, border_grad, slot * _BORDER, first, border_steps)
    load_steps(rows, grad, aligned, first + border_steps, steps - border_steps)
    return first + steps

  def compute(work: Scalars, first: Array) -> Array:
    slot, _, _, steps, out_row, out_col = work

    def multiply(acc: Any) -> Array:
      def wgmma(stage: Array) -> None:
        plgpu.wgmma(acc, lhs.at[stage, strip].transpose((1, 0)), rhs.at[stage])

      ring.multiply(first, steps, wgmma)
      return acc[...]

    product = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((tile.strip, tile.cols)))

    def store(out: Any, slot: Array) -> None:
      # A quad of threads holds 32 consecutive bytes: straight to memory is as good as by TMA,
      # and there is nothing to wait for.
      rows = pl.ds(out_row + strip * tile.strip, tile.strip)
      out[slot, rows, pl.ds(out_col, tile.cols)] = product

    pl.when(slot < num_home)(lambda: store(outs[0], slot))
    pl.when(slot >= num_home)(lambda: store(outs[-1], slot - num_home))
    return first + steps

  _persist(table.shape[1] * slot_tiles, describe, load, compute, ring)


def _persist(
  num_tiles: Array | int,
  describe: Callable[[Array], Scalars],
  load: Callable[[Scalars, Array], Array],
  compute: Callable[[Scalars, Array], Array],
  ring: _Ring,
) -> None:
  """Runs this block's share of the tiles.

  ``load`` and ``compute`` take a tile and the steps done before it, and return the steps done
  after it.
  """
  block = lax.axis_index(_BLOCK_AXIS)
  share = lax.div(num_tiles - block + _BLOCKS - 1, jnp.int32(_BLOCKS))
  last = lax.max(jnp.int32(num_tiles - 1), jnp.int32(0))

  def run(body: Callable[[Scalars, Array], Array]) -> Array:
    def step(i: Array, carry: tuple[Scalars, Array]) -> tuple[Scalars, Array]:
      work, steps = carry
      # Read what comes next before this tile starts, which hides the latency.
      following = describe(lax.min(block + (i + 1) * _BLOCKS, last))
      return following, body(work, steps)

    return lax.fori_loop(0, share, step, (describe(lax.min(block, last)), jnp.int32(0)))[1]

  multiplies = lax.axis_index(_GROUP_AXIS) < _STRIPS

  @pl.when(multiplies)
  def _() -> None:
    plgpu.set_max_registers(232, action="increase")
    run(compute)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

  @pl.when(~multiplies)
  def _() -> None:
    plgpu.set_max_registers(40, action="decrease")
    ring.finish(run(load))


def _position(t: Array, num_rows: Array | int, num_cols: int, max_band: int) -> tuple[Array, Array]:
  """Row and column of tile t, in bands of columns: row by row within a band."""
  num_bands = -(-num_cols // max_band)
  band = -(-num_cols // num_bands)
  before, in_band = (f(t, jnp.int32(num_rows * band)) for f in (lax.div, lax.rem))
  first_col = before * band
  width = lax.min(jnp.int32(band), num_cols - first_col)  # the last band may be narrower
  return lax.div(in_band, width), first_col + lax.rem(in_band, width)


def _smem(*shape: int, dtype: Any = jnp.bfloat16, tiled: bool = True) -> Any:
  """Shared memory whose rows are swizzled by 128 bytes, in tiles of eight rows or as one."""
  transforms: tuple[Any, ...] = (plgpu.SwizzleTransform(128),)  # pyright: ignore[reportAbstractUsage]
  if tiled:
    tiling = (8, 128 // jnp.dtype(dtype).itemsize)
    transforms = (plgpu.TilingTransform(tiling), *transforms)  # pyright: ignore[reportAbstractUsage]
  return plgpu.SMEM(shape, dtype, transforms=transforms)


def _kernel(
  body: Callable[..., None], *, loads: int, scratch_types: list[Any], **kwargs: Any
) -> Callable[..., Any]:
  return plgpu.kernel(
    body,
    grid=(_BLOCKS,),
    grid_names=(_BLOCK_AXIS,),
    num_threads=_STRIPS + 1,
    thread_name=_GROUP_AXIS,
    scratch_types=[
      *scratch_types,
      plgpu.Barrier(num_arrivals=loads, num_barriers=_STAGES),
      plgpu.Barrier(num_arrivals=_STRIPS, num_barriers=_STAGES),
    ],
    # Only this lowering lets two views name one memory.
    compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    **kwargs,
  )


def _expect_shape(name: str, x: Array, shape: tuple[int, ...]) -> None:
  if x.shape != shape:
    raise ValueError(f"{name}: expected shape {shape}, got {x.shape}")


def _expect_bfloat16(**arrays: Array) -> None:
  for name, x in arrays.items():
    if x.dtype != jnp.bfloat16:
      raise NotImplementedError(f"{name}: expected bfloat16, got {x.dtype}")


def _expect_multiple(name: str, size: int, unit: int) -> None:
  if size % unit:
    raise NotImplementedError(f"{name}: expected a multiple of {unit}, got {size}")


def _expect_capacity(capacity: int) -> None:
  if capacity < 256:
    raise NotImplementedError(f"C: expected at least 256 rows, got {capacity}")
