"""The grouped matmul kernels: what they lower to, and their results interpreted."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grouped_rows import (
  CAPACITY,
  DEFERRED,
  EVEN,
  FEW,
  IN_PAIRS,
  IN_TURNS,
  LARGE_TILES,
  SIZES,
  TOGETHER,
  WHOLE,
  assert_products,
  compiled,
  exact,
  interpreted,
  lower,
  shape,
  used_rows,
)

from pallas_kernels.matmul.grouped import grouped_matmul, grouped_matmul_sum
from pallas_kernels.matmul.layout import MatmulTuning

# Widths of several models, of one tile, of less; one home slot, no replica, odd sizes, one row.
SHAPES = [
  (32768, 7168, 2048, 16, 2),
  (4096, 2880, 2880, 16, 0),
  (8200, 1408, 4096, 1, 2),
  (259, 64, 192, 2, 1),
  (1, 64, 64, 3, 1),
]
TUNINGS = [
  MatmulTuning(even=False),
  MatmulTuning("deferred", auto_barriers=False, even=False),
  MatmulTuning(rows=256, cols=192, stages=3, even=False),
  MatmulTuning("in_turns", stages=6, even=False),
  MatmulTuning("in_turns", stages=6, cluster=2, even=False),
  MatmulTuning(even=True),
]


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("number", range(len(SHAPES)))
def test_matmul_lowers(number, transpose):
  """Each shape and each tuning, transposed and not."""
  c, k, n, m, s = SHAPES[number]
  tuning = TUNINGS[(number + transpose) % len(TUNINGS)]
  weights = (n, k) if transpose else (k, n)
  f = functools.partial(grouped_matmul, transpose_rhs=transpose, tuning=tuning)
  sizes = shape(m + s, dtype=jnp.int32)
  text = lower(f, shape(c, k), shape(m, *weights), shape(s, *weights), sizes)
  assert text.count("custom_call @mosaic_gpu") == 1
  assert "concatenate" not in "".join(line for line in text.splitlines() if "bf16" in line)


def test_sum_lowers_to_one_kernel():
  rows, home, replica = [
    [shape(*axes, k) for k in (2048, 128)] for axes in ((4096,), (16, 7168), (2, 7168))
  ]
  f = functools.partial(grouped_matmul_sum, transpose_rhs=True)
  text = lower(f, rows, home, replica, shape(18, dtype=jnp.int32))
  assert text.count("custom_call @mosaic_gpu") == 1
  assert "stablehlo.add" not in "".join(line for line in text.splitlines() if "bf16" in line)


def check(sizes, tuning, transpose, num_home, cols, depth=128, capacity=CAPACITY):
  rng = np.random.default_rng(0)
  rows, weights = used_rows(rng, sizes, depth, capacity), np.asarray(exact(rng, 4, depth, cols))
  operand = weights.mT if transpose else weights
  run = compiled(grouped_matmul, transpose_rhs=transpose, tuning=tuning)
  out = run(rows, operand[:num_home], operand[num_home:], jnp.array(sizes))
  assert_products(out, rows, weights, sizes)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(
  ("tuning", "transpose", "num_home", "cols"),
  [
    (TOGETHER, True, 4, 384),
    (DEFERRED, False, 2, 256),
    (IN_TURNS, False, 3, 384),
    (EVEN, True, 2, 256),
    (EVEN, False, 3, 192),
  ],
)
def test_matmul_interpreted(sizes, tuning, transpose, num_home, cols):
  with interpreted():
    check(sizes, tuning, transpose, num_home, cols)


# Tiles that the columns do not divide into, and columns of which a tile needs all.
@pytest.mark.parametrize(
  ("capacity", "tuning", "transpose", "depth", "cols"),
  [
    (1, TOGETHER, True, 64, 64),
    (7, IN_TURNS, False, 64, 192),
    (63, DEFERRED, False, 128, 448),
    (255, LARGE_TILES, True, 64, 320),
    (1, EVEN, False, 64, 64),
    (63, EVEN, True, 64, 192),
    (255, EVEN, False, 64, 320),
  ],
)
def test_few_rows_and_any_multiple_of_64(capacity, tuning, transpose, depth, cols):
  with interpreted():
    check(FEW[capacity], tuning, transpose, 2, cols, depth, capacity)


# Fewer steps than there is to store meanwhile; groups of whole tiles, so that none races.
@pytest.mark.parametrize(
  ("tuning", "depth", "cols"),
  [
    (TOGETHER, 128, 512),
    (DEFERRED, 64, 512),
    (IN_TURNS, 448, 256),
    (IN_PAIRS, 128, 256),
    (EVEN, 448, 256),
  ],
)
def test_matmul_has_no_race(tuning, depth, cols):
  with interpreted(races=True):
    check(WHOLE, tuning, transpose=False, num_home=3, cols=cols, depth=depth)


@pytest.mark.parametrize("tuning", [TOGETHER, DEFERRED, IN_TURNS, EVEN])
def test_sum_interpreted(tuning):
  rng, sizes = np.random.default_rng(0), SIZES[0]
  rows = [used_rows(rng, sizes, depth) for depth in (128, 192)]
  weights = [np.asarray(exact(rng, 4, depth, 256)) for depth in (128, 192)]
  f = functools.partial(grouped_matmul_sum, transpose_rhs=True, tuning=tuning)
  home, replica = [w.mT[:3] for w in weights], [w.mT[3:] for w in weights]
  with interpreted():
    out = jax.jit(f)(rows, home, replica, jnp.array(sizes))
  assert_products(out, np.concatenate(rows, axis=1), np.concatenate(weights, axis=1), sizes)


def zeros(*sizes, dtype=jnp.bfloat16):
  return jnp.zeros(sizes, dtype)


@pytest.mark.parametrize(
  ("rows", "home", "replica", "sizes", "error", "match"),
  [
    ((256, 64), (2, 64, 128), (1, 64, 256), 3, ValueError, "replica_SKN: expected shape"),
    ((256, 64), (2, 128, 128), (1, 64, 128), 3, ValueError, "home_MKN: expected shape"),
    ((256, 64), (2, 64, 128), (1, 64, 128), 2, ValueError, "group_size_P: expected shape"),
    ((256, 96), (2, 96, 128), (1, 96, 128), 3, NotImplementedError, "K: expected a multiple of 64"),
    ((256, 64), (2, 64, 96), (1, 64, 96), 3, NotImplementedError, "N: expected a multiple of 64"),
  ],
)
def test_matmul_refuses(rows, home, replica, sizes, error, match):
  with pytest.raises(error, match=match):
    grouped_matmul(zeros(*rows), zeros(*home), zeros(*replica), zeros(sizes, dtype=jnp.int32))


def test_sum_refuses_what_does_not_fit_together():
  rows, home, replica = zeros(256, 64), zeros(2, 64, 128), zeros(1, 64, 128)
  sizes = zeros(3, dtype=jnp.int32)
  with pytest.raises(ValueError, match="expected as many of each, at least 1, got 2, 1 and 1"):
    grouped_matmul_sum([rows, rows], [home], [replica], sizes)
  with pytest.raises(ValueError, match="expected as many of each, at least 1, got 0, 0 and 0"):
    grouped_matmul_sum([], [], [], sizes)
  with pytest.raises(ValueError, match="rows_CK: expected shape"):
    grouped_matmul_sum([rows, zeros(264, 64)], [home] * 2, [replica] * 2, sizes)
  with pytest.raises(ValueError, match="home_MKN: expected shape"):
    grouped_matmul_sum([rows] * 2, [home, zeros(2, 64, 256)], [replica] * 2, sizes)


def test_dtypes_other_than_bfloat16_are_refused():
  weights = zeros(2, 128, 128, dtype=jnp.float32)
  with pytest.raises(NotImplementedError, match="home_MKN: expected bfloat16, got float32"):
    grouped_matmul(zeros(256, 128), weights, zeros(1, 128, 128), zeros(3, dtype=jnp.int32))
