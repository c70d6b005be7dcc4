"""Even tiles: which rows and columns of the result each one computes, and in which order."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grouped_rows import sizes_that_fit
from hypothesis import example, given

from pallas_kernels import MatmulTuning, grouped_matmul
from pallas_kernels.matmul import even_tiles as module
from pallas_kernels.matmul import pipeline
from pallas_kernels.matmul.layout import EVEN_SIZES

CAPACITY, SLOTS, COLS = 4096, 6, 7
MOST, TURNS = EVEN_SIZES[-1], module.Turns(8, 4)
UNEQUAL = [
  np.zeros(SLOTS, np.int64),
  np.array([0, 0, CAPACITY, 0, 0, 0]),
  np.array([683, 683, 683, 683, 682, 682]),
  np.array([1, 64, 65, 193, 100, 3500]),
  np.array([90, 180, 700, 192, 1, 300]),
  np.array([1, 1, 1, 1, 1, CAPACITY - 5]),  # as many tiles as there can be
]


@functools.partial(jax.jit, static_argnums=1)
def tiles_of(sizes, num_home):
  """All tiles that the table has room for, and how many there are."""
  table = module.even_row_tiles(CAPACITY, sizes, num_home, TURNS.rows)
  t = jnp.arange(table.shape[1] * COLS)
  tiles = jax.vmap(lambda t: module.even_tile(module.entry(table, t, COLS), COLS, TURNS.cols))(t)
  return tiles, table[3] * COLS


@pytest.fixture
def made(monkeypatch):
  """The arguments of each table."""
  made, table_of = [], module.even_row_tiles

  def table(*arguments):
    made.append(arguments)
    return table_of(*arguments)

  monkeypatch.setattr(module, "even_row_tiles", table)
  return made


def slots_in_order(slot):
  """Each slot once, as its first tile comes."""
  _, first = np.unique(slot, return_index=True)
  return slot[np.sort(first)]


@pytest.mark.parametrize("num_home", [SLOTS, 4, 1])
@given(sizes=sizes_that_fit(CAPACITY, SLOTS))
@example(sizes=UNEQUAL[0])
@example(sizes=UNEQUAL[1])
@example(sizes=UNEQUAL[2])
@example(sizes=UNEQUAL[3])
@example(sizes=UNEQUAL[4])
@example(sizes=UNEQUAL[5])
def test_tiles_store_each_row_of_their_group_in_each_column(num_home, sizes):
  tiles, counts = tiles_of(jnp.array(sizes, jnp.int32), num_home)
  count = int(counts[0])
  assert (np.asarray(counts) == count).all()
  slot, start, stored, col = (np.asarray(x)[:count] for x in tiles)
  end = np.cumsum(sizes)
  # As few tiles as there can be, alike, and no larger than they must be.
  needed = -(-sizes // MOST)
  for s in range(SLOTS):
    mine = slot == s
    alike = min((x for x in EVEN_SIZES if x * needed[s] >= sizes[s]), default=0)
    assert stored[mine].tolist() == [min(alike, sizes[s])] * (needed[s] * COLS)
    for c in range(COLS):
      first = np.sort(start[mine & (col == c)])
      starts = end[s] - sizes[s] + alike * np.arange(needed[s])
      assert first.tolist() == np.minimum(starts, end[s] - min(alike, sizes[s])).tolist()


@pytest.mark.parametrize("num_home", [SLOTS, 4, 1])
@given(sizes=sizes_that_fit(CAPACITY, SLOTS))
@example(sizes=UNEQUAL[1])
@example(sizes=UNEQUAL[3])
@example(sizes=UNEQUAL[4])
def test_the_same_weights_are_read_by_tiles_that_follow_each_other(num_home, sizes):
  tiles, counts = tiles_of(jnp.array(sizes, jnp.int32), num_home)
  slot, _, _, col = (np.asarray(x)[: int(counts[0])] for x in tiles)
  needed = -(-sizes // MOST)
  slots = slots_in_order(slot)
  assert slot.tolist() == np.repeat(slots, needed[slots] * COLS).tolist()  # one by one
  for s in slots:
    expected = []
    for first in range(0, needed[s], TURNS.rows):
      turns = min(needed[s] - first, TURNS.rows)
      for columns in np.array_split(np.arange(COLS), -(-COLS // TURNS.cols)):
        expected += np.tile(columns, turns).tolist()
    assert col[slot == s].tolist() == expected


@pytest.mark.parametrize("num_home", [SLOTS, 4, 1])
@given(sizes=sizes_that_fit(CAPACITY, SLOTS))
@example(sizes=UNEQUAL[3])
@example(sizes=UNEQUAL[4])
def test_slots_of_one_tile_are_spread_among_those_of_several(num_home, sizes):
  tiles, counts = tiles_of(jnp.array(sizes, jnp.int32), num_home)
  slots = slots_in_order(np.asarray(tiles.slot)[: int(counts[0])])
  needed = -(-sizes // MOST)
  is_home, is_single = slots < num_home, needed[slots] == 1
  for kind in (is_home & is_single, is_home & ~is_single, ~is_home):
    assert slots[kind].tolist() == sorted(slots[kind])
  assert is_home.tolist() == sorted(is_home, reverse=True)  # home slots come first
  singles, several = int((is_home & is_single).sum()), needed[slots[is_home & ~is_single]].sum()
  before = done = 0
  for s in slots[is_home]:
    if needed[s] == 1:
      before += 1
    else:
      assert before == done * singles // several
      done += needed[s]


@pytest.mark.parametrize(
  ("capacity", "width", "tile_cols", "expected"),
  [
    (64 * 512, 7168, 128, (8, 2)),  # small groups: 256 columns
    (64 * 512, 2048, 64, (8, 4)),
    (64 * 512, 1024, 64, (8, 16)),  # narrow results: all columns
    (64 * 512, 768, 128, (8, 8)),
    (64 * 1536, 7168, 128, (64 * 1536, 8)),  # large groups: all rows, 1024 columns
    (64 * 1536, 64, 64, (64 * 1536, 16)),
  ],
)
def test_weights_of_small_groups_and_rows_of_large_ones_stay_in_the_cache(
  capacity, width, tile_cols, expected
):
  assert module.turns_of(capacity, 64, width, tile_cols) == expected


@pytest.mark.parametrize(
  ("capacity", "even", "expected"),
  [(192, None, True), (190, None, False), (190, True, True), (192, False, False)],
)
def test_even_tiles_are_the_default_where_groups_are_not_small(capacity, even, expected, made):
  kernel = functools.partial(grouped_matmul, tuning=MatmulTuning(blocks=2, even=even))
  shapes = (capacity, 64), (2, 64, 192), (0, 64, 192)
  operands = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
  jax.eval_shape(kernel, *operands, jax.ShapeDtypeStruct((2,), jnp.int32))
  assert bool(made) == expected


@pytest.mark.parametrize(
  ("capacity", "width", "band"),
  [(4 * 256, 2048, 256), (4 * 256, 1024, 1024), (4 * 1536, 2048, 1024)],
)
def test_the_kernel_and_its_table_have_the_same_turns(capacity, width, band, made, monkeypatch):
  launched = []

  def launch(body, *operands, out_type, **_):
    launched.append(body.keywords)
    return [jnp.zeros(each.shape, each.dtype) for each in out_type], None

  monkeypatch.setattr(pipeline, "launch", launch)
  shapes = (capacity, 64), (3, 64, width), (1, 64, width)
  operands = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
  kernel = functools.partial(grouped_matmul, tuning=MatmulTuning(blocks=2))
  jax.eval_shape(kernel, *operands, jax.ShapeDtypeStruct((4,), jnp.int32))
  ((its_capacity, sizes, num_home, rows),) = made
  (given,) = launched
  assert (its_capacity, sizes.shape, num_home, given["num_home"]) == (capacity, (4,), 3, 3)
  cols = given["tile"].cols
  assert (rows, given["tuning"].band // cols) == module.turns_of(capacity, 4, width, cols)
  assert given["tuning"].band == band
