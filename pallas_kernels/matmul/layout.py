"""How a matmul's work is laid out: tiles, their order, and which block works on which.

And what the matmul kernels expect of their operands.

Two layouts of a block's sums, both 128 for each thread of the two warpgroups that multiply::

  128 × 256, together    each warpgroup has 64 rows of the tile
  128 × 128, in turns    each warpgroup has a tile of its own

A third one is for groups of any size: see ``EVEN``.
"""

import dataclasses
from collections.abc import Mapping
from typing import Literal, get_args

import jax.numpy as jnp
from jax import lax

from pallas_kernels import support
from pallas_kernels.support import Array
from pallas_kernels.transfer.tuning import SHARED_BYTES, check_positive
from pallas_kernels.warp.branches import one_if

UNIT = 64  # of all widths: 128 bytes of bfloat16, the widest swizzle
SWIZZLE = 128  # bytes
TILE_ROWS = 8  # of operands in shared memory, which TMA fills a whole tile at a time
DEPTH = UNIT  # contracted per stage
MULTIPLYING = 2  # warpgroups of a block
WARPGROUPS = MULTIPLYING + 1  # with the one that loads
_WIDEST = 256  # columns of a tile of one weight: of one instruction
_MOST_COMPARED = 16  # bands of columns that are told apart by comparing
EVEN_SIZES = (32, 64, 96, 112, 128, 144, 160, 176, 192)  # rows of even tiles
EVEN_COLS = 128  # columns of these, of all weights together

Schedule = Literal["together", "deferred", "in_turns"]

# Rows and columns of tiles, those of all weights together.
_SHARED_TILES = ((128, 256), (256, 128), (128, 192), (256, 64), (128, 128), (128, 64))
_TILES: Mapping[Schedule, tuple[tuple[int, int], ...]] = {
  "together": _SHARED_TILES,
  "deferred": _SHARED_TILES,
  "in_turns": ((128, 128), (128, 64), (64, 128), (64, 64)),
}
# Sums of a warpgroup that registers hold.
_MOST_SUMS: Mapping[Schedule, int] = {
  "together": 128 * 192,
  "deferred": 128 * 128,
  "in_turns": 128 * 192,
}


@dataclasses.dataclass(frozen=True)
class MatmulTuning:
  """How a kernel is laid out on the device. It changes no result beyond rounding.

  Attributes:
    schedule: of the two warpgroups that multiply. "together": they share a tile, half of its rows
      each, and nothing is multiplied while they store it. "deferred": they store it while they
      multiply the next one. "in_turns": each has a tile of its own, and stores it while the other
      multiplies.
    rows: of a tile. ``None``, or where the widths have no room for it: as ``choose_tile`` finds.
    cols: of a tile, those of all weights together; given if ``rows`` is.
    stages: of the ring; each has ``DEPTH`` of both operands. Weight gradients have fewer where they
      need the memory for zeros (``zeros.py``).
    buffers: pieces of 8 KB (64 × 64 of bfloat16, 64 × 32 of float32) that a warpgroup stores at
      a time.
    band: columns worked on side by side, so that the cache serves most loads.
    blocks: that run at a time; ``None``: one for each SM of the device.
    short_last: whether tiles of fewer rows come after all others, so that blocks finish together,
      or each after those of its group, whose weights are in the cache. ``None``: if groups are
      large, or not small and their weights large. Weight gradients have no such tiles.
    even: whether each group is divided into tiles of equally many rows, as few as there can be.
      They are laid out as ``EVEN``: of the other fields, only blocks counts. ``None``: where groups
      are not small. Neither interleaved columns nor weight gradients have such tiles.
    cluster: blocks that work on neighbouring columns and load their common rows once, if the
      columns allow.
    auto_barriers: whether the compiler puts a warpgroup's barrier before every copy and around
      every store to shared memory. The kernels' own are enough: no thread reads what another
      wrote but through a barrier of the ring or ``commit_smem``.

  Raises:
    ValueError: a value is outside its range, or the stages need too much shared memory.
    TypeError: a value has the wrong type.
  """

  schedule: Schedule = "together"
  rows: int | None = None
  cols: int | None = None
  stages: int = 4
  buffers: int = 2
  band: int = 2048
  blocks: int | None = None
  short_last: bool | None = None
  even: bool | None = None
  cluster: int = 1
  auto_barriers: bool = True

  def __post_init__(self) -> None:
    if self.schedule not in get_args(Schedule):
      raise ValueError(f"schedule: expected one of {get_args(Schedule)}, got {self.schedule!r}")
    check_positive(self, "stages", "buffers", "band", "cluster")
    if self.blocks is not None:
      check_positive(self, "blocks")
    self._check_tile()
    for name in ("short_last", "even"):
      if (value := getattr(self, name)) not in (None, True, False):
        raise TypeError(f"{name}: expected a bool or None, got {value!r}")
    if not isinstance(self.auto_barriers, bool):
      raise TypeError(f"auto_barriers: expected a bool, got {type(self.auto_barriers).__name__}")
    if self.blocks is not None and self.blocks % self.cluster:
      raise ValueError(f"blocks: expected a multiple of {self.cluster}, got {self.blocks}")
    if self.band < _WIDEST * self.cluster:
      raise ValueError(f"band: expected at least {_WIDEST * self.cluster}, got {self.band}")
    if self.ring_bytes > SHARED_BYTES:
      raise ValueError(
        f"stages: expected at most {SHARED_BYTES} shared bytes, got {self.ring_bytes}"
      )

  def _check_tile(self) -> None:
    if self.rows is None and self.cols is None:
      return
    check_positive(self, "rows", "cols")
    (rows, cols), most = self._largest, self.strips * _MOST_SUMS[self.schedule]
    if rows % (UNIT * self.strips) or cols % UNIT or rows * cols > most:
      raise ValueError(
        f"rows, cols: expected multiples of {UNIT * self.strips} and {UNIT}, their product at most "
        f"{most} for {self.schedule!r}, got {rows} and {cols}"
      )

  @property
  def strips(self) -> int:
    """Warpgroups that share a tile."""
    return 1 if self.schedule == "in_turns" else MULTIPLYING

  @property
  def _largest(self) -> tuple[int, int]:
    """Rows and columns of the largest tile that a stage must hold."""
    if self.rows is not None and self.cols is not None:
      return self.rows, self.cols
    return max(_TILES[self.schedule], key=sum)

  def placed(self) -> "MatmulTuning":
    """With the number of blocks that run at a time on the device, in whole clusters.

    Raises:
      ValueError: ``blocks`` or ``cluster`` is more than the device has SMs.
    """
    blocks = support.num_blocks(self.blocks)
    if self.cluster > blocks:
      raise ValueError(f"cluster: expected at most {blocks}, got {self.cluster}")
    return dataclasses.replace(self, blocks=blocks - blocks % self.cluster)

  @property
  def clusters(self) -> int:
    """That run at a time, if placed."""
    assert self.blocks is not None, "expected a tuning that is placed"
    return self.blocks // self.cluster

  @property
  def ring_bytes(self) -> int:
    """Of the stages; as many for any number of weights."""
    return stage_bytes(*self._largest) * self.stages

  @property
  def store_bytes(self) -> int:
    """Of the pieces to be stored."""
    return 2 * MULTIPLYING * self.buffers * 64 * 64


def stage_bytes(rows: int, cols: int) -> int:
  """What a tile's operands take in a stage, in bfloat16."""
  return 2 * DEPTH * (rows + cols)


# Of even tiles. Each warpgroup has a tile of its own: the sums of the largest fill its registers.
EVEN = MatmulTuning("in_turns", rows=EVEN_SIZES[-1], cols=EVEN_COLS, even=True)


@dataclasses.dataclass(frozen=True)
class Tile:
  """The part of the result that one or both warpgroups hold in registers.

  Attributes:
    strip: rows of one warpgroup, a multiple of 64.
    cols: columns, of each weight operand; a multiple of 64.
    strips: warpgroups that share the tile: 2, or 1 if they take turns.
  """

  strip: int
  cols: int
  strips: int

  @property
  def rows(self) -> int:
    return self.strips * self.strip


def choose_tile(
  rows: int, cols: int, operands: int, tuning: MatmulTuning, unit: int = UNIT
) -> Tile:
  """The tile that computes the result soonest: the tuning's own if the result has room for it.

  The last tile along an axis may begin inside the one before, so that none sticks out.

  Args:
    rows: of the result, a multiple of 64; or 256 where they come in groups of any size.
    cols: of the result, a multiple of ``unit``.
    operands: weights that share the tile's columns.
    tuning: whether the warpgroups take turns.
    unit: of the tile's columns.
  """

  def of(rows: int, cols: int) -> Tile:
    return Tile(rows // tuning.strips, cols // operands, tuning.strips)

  def fits(tile: Tile) -> bool:
    return tile.strip <= rows and tile.cols <= min(cols, _WIDEST) and tile.cols % unit == 0

  def cost(tile: Tile) -> float:
    height, width = (
      -(-size // part) * part for size, part in ((rows, tile.rows), (cols, tile.cols))
    )
    return height * width * (1 + _shared_cycles(tile, operands))

  if tuning.rows is not None and tuning.cols is not None and fits(of(tuning.rows, tuning.cols)):
    return of(tuning.rows, tuning.cols)
  return min(filter(fits, (of(*shape) for shape in _TILES[tuning.schedule])), key=cost)


def _shared_cycles(tile: Tile, operands: int) -> float:
  """Cycles that shared memory is busy, for each that the tensor cores are.

  It serves 128 bytes a cycle. A product of 64 rows reads these and all columns; loads write each
  row and column once.
  """
  products = tile.rows // UNIT * operands
  read = products * (UNIT + tile.cols)
  written = tile.rows + operands * tile.cols
  return 2 * (read + written) * DEPTH / 128 / (products * tile.cols * 2)


def position(t: Array, num_rows: Array | int, num_cols: int, max_band: int) -> tuple[Array, Array]:
  """Row and column of tile t, in bands of columns: row by row within a band."""
  num_bands = -(-num_cols // max_band)
  band = -(-num_cols // num_bands)
  last = num_cols - (num_bands - 1) * band  # columns of the last band, which may be narrower
  size = jnp.int32(num_rows * band)
  # Every tile waits for this, and dividing by what the compiler does not know takes long.
  if num_bands <= _MOST_COMPARED:
    before = sum((one_if(t >= k * size) for k in range(1, num_bands)), jnp.int32(0))
  else:
    before = lax.div(t, lax.max(size, jnp.int32(1)))
  in_band = t - before * size
  row, col = (f(in_band, jnp.int32(band)) for f in (lax.div, lax.rem))
  if last < band:
    is_last = before == num_bands - 1
    row = lax.select(is_last, lax.div(in_band, jnp.int32(last)), row)
    col = lax.select(is_last, lax.rem(in_band, jnp.int32(last)), col)
  return row, before * band + col


def home_first(
  t: Array, num_rows: Array, home_rows: Array, num_cols: int, max_band: int, at_once: int
) -> tuple[Array, Array]:
  """As ``position`` where replicas arrive: all tiles of home slots, then those of the others.

  A block would else wait for a copy while there are tiles of home slots in a later band. The others
  come by so many rows as blocks work on ``at_once``, in bands: by more, they would wait for the
  copies of all; by fewer, weights would be read again and again.

  Args:
    t: the tile.
    num_rows: rows of tiles.
    home_rows: of these, those of home slots; they come first.
    num_cols: columns of tiles.
    max_band: columns that are worked on side by side.
    at_once: tiles that are.
  """
  most = max(at_once // min(max_band, num_cols), 1)
  rest = t - home_rows * num_cols
  part, inside = (f(rest, jnp.int32(most * num_cols)) for f in (lax.div, lax.rem))
  first = home_rows + part * most
  is_home = rest < 0
  first = lax.select(is_home, jnp.int32(0), first)
  rows = lax.select(is_home, home_rows, lax.min(num_rows - first, jnp.int32(most)))
  row, col = position(lax.select(is_home, t, inside), rows, num_cols, max_band)
  return first + row, col


def expect_shape(name: str, x: Array, shape: tuple[int, ...]) -> None:
  if x.shape != shape:
    raise ValueError(f"{name}: expected shape {shape}, got {x.shape}")


def expect_bfloat16(**arrays: Array) -> None:
  for name, x in arrays.items():
    if x.dtype != jnp.bfloat16:
      raise NotImplementedError(f"{name}: expected bfloat16, got {x.dtype}")


def expect_multiple(name: str, size: int, unit: int) -> None:
  if size % unit:
    raise NotImplementedError(f"{name}: expected a multiple of {unit}, got {size}")
