"""The gradient to the weights: lowering, its tables, and results interpreted."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import mosaic_interpret
import numpy as np
import pytest
from grouped_rows import (
  CAPACITY,
  FEW,
  IN_TURNS,
  LARGE_TILES,
  SIZES,
  TOGETHER,
  compiled,
  interpreted,
  lower,
  shape,
  sizes_that_fit,
  spans,
  used_rows,
)
from hypothesis import example, given

from pallas_kernels.matmul import layout
from pallas_kernels.matmul import wgrad as module
from pallas_kernels.matmul.layout import MatmulTuning
from pallas_kernels.matmul.wgrad import grouped_matmul_wgrad

STEPS_CAPACITY, SLOTS = 1024, 6
IN_PAIRS = MatmulTuning(blocks=4, cluster=2)
WIDE_STRIPS = MatmulTuning("in_turns", rows=192, cols=128, blocks=2)

# Widths of several models, of one tile, of less; one home slot, no replica, odd sizes, one row.
SHAPES = [
  (32768, 7168, 2048, 16, 2),
  (4096, 2880, 2880, 16, 0),
  (8200, 1408, 4096, 1, 2),
  (1, 64, 64, 3, 1),
]
TUNINGS = {
  "together": MatmulTuning(),
  "few stages": MatmulTuning(stages=3, buffers=3, auto_barriers=False),
  "in pairs": MatmulTuning(cluster=2),
  "in turns": MatmulTuning("in_turns", stages=6),
}


@pytest.mark.parametrize("next_tuning", [0, 1])
@pytest.mark.parametrize("number", range(len(SHAPES)))
def test_wgrad_lowers(number, next_tuning):
  """Each shape and each tuning, twice: for float32 and for rounded gradients."""
  c, k, n, m, s = SHAPES[number]
  tuning = [*TUNINGS.values()][(number + next_tuning) % len(TUNINGS)]
  dtype = (jnp.float32, jnp.bfloat16)[next_tuning]
  f = functools.partial(grouped_matmul_wgrad, num_home=m, dtype=dtype, tuning=tuning)
  text = lower(f, shape(c, k), shape(c, n), shape(m + s, dtype=jnp.int32))
  assert text.count("custom_call @mosaic_gpu") == 1
  home, replica = jax.eval_shape(f, shape(c, k), shape(c, n), shape(m + s, dtype=jnp.int32))
  assert home.shape == (m, k, n)
  assert replica.shape == (s, k, n)
  assert home.dtype == replica.dtype == dtype


inner_steps = jax.jit(module.inner_steps, static_argnums=1)

examples = (
  example(np.zeros(SLOTS, np.int64)),
  example(np.array([3, 2, 1, 1, 0, 64])),
  example(np.array([0, 0, STEPS_CAPACITY, 0, 0, 0])),
)


def with_examples(test):
  return functools.reduce(lambda f, decorate: decorate(f), examples, test)


@with_examples
@given(sizes_that_fit(STEPS_CAPACITY, SLOTS))
def test_inner_steps_begin_where_tma_can_and_hold_their_group(sizes):
  table = np.asarray(inner_steps(jnp.array(sizes, jnp.int32), SLOTS - 2, None))
  end = np.cumsum(sizes)
  assert sorted(table[0]) == list(range(SLOTS))
  assert list(sizes[table[0]]) == sorted(sizes, reverse=True)
  all_steps = sum(-(-end // 64) for _, _, _, end, *_ in table.T[: np.sum(sizes > 0)])
  for slot, first, begin, end_in_steps, grouped, with_rows, count, steps in table.T:
    assert first % 8 == 0 and begin < 8 and first + grouped == sum(sizes)
    assert (with_rows, count, steps) == (np.sum(sizes > 0), SLOTS, all_steps)
    assert (first + begin, first + end_in_steps) == (end[slot] - sizes[slot], end[slot])


def test_slots_that_are_not_filled_come_last():
  filled = jnp.array([False, True])
  table = np.asarray(inner_steps(jnp.array([0, 3, 0, 5, 0, 0]), SLOTS - 2, filled))
  assert table[0].tolist() == [3, 1, 0, 2, 5, 4] and (set(table[5]), set(table[6])) == ({2}, {5})


def check(sizes, tuning, num_home, depth, cols, capacity=CAPACITY, filled=None, dtype=jnp.float32):
  """``filled`` of the replica slots; the others are as the interpreter leaves memory, NaN."""
  rng = np.random.default_rng(0)
  rows, grad = (used_rows(rng, sizes, width, capacity) for width in (depth, cols))
  options = {"num_home": num_home, "dtype": dtype, "tuning": tuning}
  run = compiled(grouped_matmul_wgrad, **options)
  filled = None if filled is None else jnp.array(filled)
  home, replica = run(rows, grad, jnp.array(sizes), filled_S=filled)
  assert home.shape == (num_home, depth, cols)
  assert replica.shape == (len(sizes) - num_home, depth, cols)
  rows, grad = np.asarray(rows, np.float32), np.asarray(grad, np.float32)
  expected = np.stack([rows[span].T @ grad[span] for span in spans(sizes)])
  if filled is not None:
    expected[num_home:][~np.asarray(filled)] = np.nan
  assert home.dtype == replica.dtype == dtype
  expected = np.asarray(jnp.asarray(expected, dtype), np.float32)
  np.testing.assert_array_equal(np.asarray(home, np.float32), expected[:num_home])
  np.testing.assert_array_equal(np.asarray(replica, np.float32), expected[num_home:])


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(
  ("tuning", "num_home", "depth", "cols", "dtype"),
  [
    (TOGETHER, 2, 128, 256, jnp.bfloat16),
    (IN_TURNS, 4, 256, 128, jnp.bfloat16),
    (IN_PAIRS, 3, 128, 512, jnp.float32),
  ],
)
def test_wgrad_interpreted(sizes, tuning, num_home, depth, cols, dtype):
  with interpreted():
    check(sizes, tuning, num_home, depth, cols, dtype=dtype)


@pytest.mark.parametrize(
  ("depth", "cols", "tile"),
  [
    (2048, 768, (128, 192)),
    (2880, 2880, (128, 192)),
    (1024, 2048, (128, 192)),
    (3072, 1024, (192, 128)),
    (4096, 1408, (128, 128)),
    (1280, 640, (128, 128)),
  ],
)
def test_tiles_fill_the_gradient(depth, cols, tile):
  found = module.turns_for(depth, cols)
  assert (found.rows, found.cols) == tile
  known = layout.choose_tile(depth, cols, 1, found)
  assert (known.rows, known.cols) == tile


@pytest.mark.parametrize(("depth", "cols"), [(128, 192), (384, 256), (256, 256), (64, 64)])
def test_wgrad_as_by_default(depth, cols):
  """In each of the layouts, and in less than a tile."""
  tuning = dataclasses.replace(module.turns_for(depth, cols), blocks=2)
  with interpreted():
    check(SIZES[0], tuning, 2, depth, cols, dtype=jnp.bfloat16)


# One of 15 steps among others of one; none with as many as four times the mean.
@pytest.mark.parametrize(
  ("sizes", "claimed"),
  [([30, 900, 1, 0, 20, 9, 2, 5], True), ([200, 400, 90, 0, 70, 80, 50, 60], False)],
)
@pytest.mark.parametrize(
  ("tuning", "num_home", "cols", "dtype"),
  [
    (TOGETHER, 8, 192, jnp.float32),
    (IN_TURNS, 6, 192, jnp.bfloat16),
    (IN_PAIRS, 8, 512, jnp.bfloat16),
  ],
)
def test_tiles_of_uneven_groups_are_claimed(
  sizes, claimed, tuning, num_home, cols, dtype, monkeypatch
):
  """Each once, and one more than there are by each block. Clusters do not claim."""
  takes, effects = [], mosaic_interpret._EFFECTS
  take = effects["take_one"]
  monkeypatch.setitem(effects, "take_one", lambda *args: takes.append(args) or take(*args))
  with interpreted():
    check(sizes, tuning, num_home, 320, cols, capacity=1000, dtype=dtype)
  tile = layout.choose_tile(320, cols, 1, tuning)
  tiles = 7 * -(-320 // tile.rows) * -(-cols // tile.cols)
  assert len(takes) == (tiles + tuning.blocks if claimed and tuning.cluster == 1 else 0)


def test_tiles_that_all_blocks_have_alike_are_not_claimed(monkeypatch):
  launched = []

  def launch(*_, claims, out_type, **__):
    launched.append(claims)
    return [jnp.zeros(each.shape, each.dtype) for each in out_type], None

  monkeypatch.setattr(module.pipeline, "launch", launch)
  for blocks in (2, 3, 4):
    run = functools.partial(grouped_matmul_wgrad, num_home=8, tuning=MatmulTuning(blocks=blocks))
    jax.eval_shape(run, shape(1000, 512), shape(1000, 256), shape(8, dtype=jnp.int32))
  assert [claims is None for claims in launched] == [True, False, True]


# Groups that end one row before, at, and one row behind a border of parts of their last stage.
@pytest.mark.parametrize("sizes", [[15, 24, 40, 56], [16, 32, 48, 64], [17, 32, 48, 64]])
@pytest.mark.parametrize("tuning", [TOGETHER, IN_TURNS, WIDE_STRIPS])
def test_each_last_stage_has_all_rows_of_its_group(sizes, tuning):
  with interpreted():
    check(sizes, tuning, num_home=2, depth=192, cols=128)


# Tiles that neither rows nor columns divide into, or that are larger than the result.
@pytest.mark.parametrize(
  ("capacity", "tuning", "depth", "cols", "dtype"),
  [
    (1, TOGETHER, 64, 64, jnp.float32),
    (7, TOGETHER, 64, 320, jnp.float32),
    (63, LARGE_TILES, 320, 192, jnp.bfloat16),
    (255, TOGETHER, 192, 448, jnp.float32),
  ],
)
def test_few_rows_and_any_multiple_of_64(capacity, tuning, depth, cols, dtype):
  with interpreted():
    check(FEW[capacity], tuning, 2, depth, cols, capacity, dtype=dtype)


def test_slots_that_are_not_filled_are_not_written():
  """One has rows, one is filled and has none, one is empty; a home without rows is zero."""
  with interpreted():
    check([0, 77, 0, 0], TOGETHER, 1, 128, 128, filled=[True, True, False])


# Tiles that fit, strips and columns that overlap, strips beyond the end.
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
  ("tuning", "depth", "cols"),
  [(TOGETHER, 128, 256), (LARGE_TILES, 320, 192), (IN_TURNS, 64, 320), (IN_PAIRS, 192, 512)],
)
def test_gradients_are_added_once_to_what_is_there(tuning, depth, cols, dtype):
  """Slots without rows keep their bits, NaN included. In bfloat16 sums are rounded twice."""
  sizes = [70, 0, 33, 5]
  rng = np.random.default_rng(0)
  rows, grad = (used_rows(rng, sizes, width, CAPACITY) for width in (depth, cols))
  before = rng.integers(-99, 99, (3, depth, cols)).astype(np.float32)
  before[1] = np.nan
  add = jax.jit(functools.partial(grouped_matmul_wgrad, num_home=3, tuning=tuning, dtype=dtype))
  with interpreted():
    home, replica = add(rows, grad, jnp.array(sizes), into_MKN=jnp.asarray(before, dtype))
  assert home.dtype == replica.dtype == dtype
  rows, grad = np.asarray(rows, np.float32), np.asarray(grad, np.float32)
  products = np.stack([rows[span].T @ grad[span] for span in spans(sizes)])
  products = products.astype(dtype).astype(np.float32)
  want = (before + products[:3]).astype(dtype)
  np.testing.assert_array_equal(np.asarray(home, np.float32), want.astype(np.float32))
  np.testing.assert_array_equal(np.asarray(replica, np.float32), products[3:])


@pytest.mark.parametrize(
  ("tuning", "sizes"), [(TOGETHER, SIZES[0]), (IN_TURNS, SIZES[0]), (IN_PAIRS, SIZES[0])]
)
def test_wgrad_has_no_race(tuning, sizes):
  with interpreted(races=True):
    check(sizes, tuning, num_home=3, depth=128, cols=256)


def zeros(*sizes, dtype=jnp.bfloat16):
  return jnp.zeros(sizes, dtype)


@pytest.mark.parametrize(
  ("rows", "grad", "num_home", "error", "match"),
  [
    ((256, 128), (248, 128), 2, ValueError, "grad_CN: expected shape"),
    ((256, 128), (256, 128), 4, ValueError, "num_home: expected 1 to 3"),
    ((256, 96), (256, 128), 2, NotImplementedError, "K: expected a multiple of 64"),
    ((256, 128), (256, 32), 2, NotImplementedError, "N: expected a multiple of 64"),
  ],
)
def test_wgrad_refuses(rows, grad, num_home, error, match):
  with pytest.raises(error, match=match):
    grouped_matmul_wgrad(zeros(*rows), zeros(*grad), zeros(3, dtype=jnp.int32), num_home)


def test_wgrad_refuses_what_it_does_not_do():
  sizes = zeros(3, dtype=jnp.int32)
  with pytest.raises(NotImplementedError, match="grad_CN: expected bfloat16, got float32"):
    grouped_matmul_wgrad(zeros(256, 128), zeros(256, 128, dtype=jnp.float32), sizes, 2)
  with pytest.raises(ValueError, match=r"filled_S: expected shape \(1,\), got \(3,\)"):
    filled = zeros(3, dtype=bool)
    grouped_matmul_wgrad(zeros(256, 128), zeros(256, 128), sizes, 2, filled_S=filled)
  with pytest.raises(NotImplementedError, match="dtype: expected float32 or bfloat16, got"):
    grouped_matmul_wgrad(zeros(256, 128), zeros(256, 128), sizes, 2, dtype=jnp.float16)
  with pytest.raises(ValueError, match=r"into_MKN: expected shape \(2, 128, 128\), got \(3,"):
    into = zeros(3, 128, 128, dtype=jnp.float32)
    grouped_matmul_wgrad(zeros(256, 128), zeros(256, 128), sizes, 2, into_MKN=into)
  with pytest.raises(ValueError, match="into_MKN: expected float32, got bfloat16"):  # the default
    grouped_matmul_wgrad(zeros(256, 128), zeros(256, 128), sizes, 2, into_MKN=zeros(2, 128, 128))
  with pytest.raises(ValueError, match="tuning: expected 'together' or 'in_turns', got"):
    grouped_matmul_wgrad(
      zeros(256, 128), zeros(256, 128), sizes, 2, tuning=MatmulTuning("deferred")
    )
