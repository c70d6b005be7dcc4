"""The gradient to the weights: lowering, its tables, and results interpreted."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grouped_rows import (
  SIZES,
  TOGETHER,
  WHOLE,
  interpreted,
  lower,
  shape,
  sizes_that_fit,
  spans,
  used_rows,
)
from hypothesis import example, given

from pallas_kernels.matmul import wgrad as module
from pallas_kernels.matmul.layout import Tuning
from pallas_kernels.matmul.wgrad import grouped_matmul_wgrad

CAPACITY, SLOTS = 1024, 6
IN_PAIRS = Tuning(blocks=4, cluster=2)

# Widths of several models, widths of one tile, one home slot, no replica, odd capacities.
SHAPES = [
  (32768, 7168, 2048, 16, 2),
  (4096, 4096, 1408, 16, 0),
  (8200, 1536, 4096, 1, 2),
  (264, 128, 128, 3, 1),
]
TUNINGS = {
  "together": Tuning(),
  "few stages": Tuning(stages=3, buffers=3, blocks=264, auto_barriers=False),
  "in pairs": Tuning(cluster=2),
}


@pytest.mark.parametrize("tuning", TUNINGS.values(), ids=TUNINGS)
@pytest.mark.parametrize(("c", "k", "n", "m", "s"), SHAPES)
def test_wgrad_lowers(c, k, n, m, s, tuning):
  f = functools.partial(grouped_matmul_wgrad, num_home=m, tuning=tuning)
  text = lower(f, shape(c, k), shape(c, n), shape(m + s, dtype=jnp.int32))
  assert text.count("custom_call @mosaic_gpu") == 1
  home, replica = jax.eval_shape(f, shape(c, k), shape(c, n), shape(m + s, dtype=jnp.int32))
  assert home.shape == (m, k, n)
  assert replica.shape == (s, k, n)
  assert home.dtype == replica.dtype == jnp.float32


inner_steps = jax.jit(module.inner_steps, static_argnums=0)

examples = (
  example(np.zeros(SLOTS, np.int64)),
  example(np.array([3, 2, 1, 1, 0, 64])),
  example(np.array([0, 0, CAPACITY, 0, 0, 0])),
)


def with_examples(test):
  return functools.reduce(lambda f, decorate: decorate(f), examples, test)


@with_examples
@given(sizes_that_fit(CAPACITY, SLOTS))
def test_inner_steps_contract_every_row_of_their_group_once(sizes):
  table, row, mine = inner_steps(CAPACITY, jnp.array(sizes, jnp.int32))
  table, row, mine = np.asarray(table), np.asarray(row), np.asarray(mine)
  end = np.cumsum(sizes)
  assert sorted(table[0]) == list(range(SLOTS))
  assert list(sizes[table[0]]) == sorted(sizes, reverse=True)
  for slot, aligned, border_steps, steps in table.T:
    in_place = aligned + np.arange(64 * (steps - border_steps))
    if len(in_place):
      assert aligned % 8 == 0
    assert not mine[slot, 64 * border_steps :].any()
    got = np.concatenate([row[slot][mine[slot]], in_place])
    assert sorted(got) == list(range(end[slot] - sizes[slot], end[slot]))
    assert 64 * steps < sizes[slot] + 64


def check(sizes, tuning, num_home, depth, cols):
  rng = np.random.default_rng(0)
  rows, grad = used_rows(rng, sizes, depth), used_rows(rng, sizes, cols)
  f = functools.partial(grouped_matmul_wgrad, num_home=num_home, tuning=tuning)
  home, replica = jax.jit(f)(rows, grad, jnp.array(sizes))
  assert home.shape == (num_home, depth, cols)
  assert replica.shape == (4 - num_home, depth, cols)
  for got, span in zip(jnp.concatenate([home, replica]), spans(sizes), strict=True):
    expected = np.asarray(rows, np.float32)[span].T @ np.asarray(grad, np.float32)[span]
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(
  ("tuning", "num_home", "depth", "cols"),
  [
    (TOGETHER, 2, 128, 256),
    (TOGETHER, 4, 256, 128),
    (IN_PAIRS, 3, 128, 512),
  ],
)
def test_wgrad_interpreted(sizes, tuning, num_home, depth, cols):
  with interpreted():
    check(sizes, tuning, num_home, depth, cols)


@pytest.mark.parametrize(
  ("tuning", "sizes"), [(TOGETHER, WHOLE), (TOGETHER, SIZES[0]), (IN_PAIRS, SIZES[0])]
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
    ((256, 64), (256, 128), 2, NotImplementedError, "K: expected a multiple of 128"),
    ((256, 128), (256, 64), 2, NotImplementedError, "N: expected a multiple of 128"),
    ((260, 128), (260, 128), 2, NotImplementedError, "C: expected a multiple of 8"),
    ((248, 128), (248, 128), 2, NotImplementedError, "C: expected at least 256"),
  ],
)
def test_wgrad_refuses(rows, grad, num_home, error, match):
  with pytest.raises(error, match=match):
    grouped_matmul_wgrad(zeros(*rows), zeros(*grad), zeros(3, dtype=jnp.int32), num_home)


def test_wgrad_refuses_what_it_does_not_do():
  sizes = zeros(3, dtype=jnp.int32)
  with pytest.raises(NotImplementedError, match="grad_CN: expected bfloat16, got float32"):
    grouped_matmul_wgrad(zeros(256, 128), zeros(256, 128, dtype=jnp.float32), sizes, 2)
  with pytest.raises(ValueError, match="tuning: expected 'together', got 'deferred'"):
    grouped_matmul_wgrad(zeros(256, 128), zeros(256, 128), sizes, 2, tuning=Tuning("deferred"))
