"""Blockwise attention over packed requests, against a dense softmax."""

import functools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from ultraep_jax.models.attention import attend

ROWS, LENGTH, BLOCK, HEADS, KEY_HEADS, CHANNELS, VALUES = 2, 32, 4, 4, 2, 6, 5
SCALE = 0.7


@functools.partial(jax.jit, static_argnames="window")
def attend_here(query, key, value, segment, window=None, sink=None):
  options = {"scale": SCALE, "block": BLOCK, "window": window, "sink_H": sink}
  return attend(query, key, value, segment, **options)


def dense(query, key, value, segment, window=None, sink=None):
  """Softmax over all pairs of tokens, in float64."""
  group = HEADS // KEY_HEADS
  key, value = (np.repeat(x.astype(np.float64), group, axis=2) for x in (key, value))
  score = np.einsum("bthc,bshc->bhts", query.astype(np.float64), key) * SCALE
  place = np.arange(LENGTH)
  visible = (segment[:, :, None] == segment[:, None, :]) & (segment > 0)[:, :, None]
  visible &= place[:, None] >= place[None, :]
  if window is not None:
    visible &= place[:, None] - place[None, :] < window
  score = np.where(visible[:, None], score, -np.inf)
  largest = score.max(axis=-1, keepdims=True, initial=-1e9)
  weight = np.exp(score - largest)
  total = weight.sum(axis=-1, keepdims=True)
  if sink is not None:
    total = total + np.exp(np.minimum(np.float64(sink)[None, :, None, None] - largest, 700))
  return np.einsum("bhts,bshv->bthv", weight / np.where(total > 0, total, 1), value)


WINDOWS, SINK = (None, 1, 3, 9), np.array([-20.0, -1.0, 2.0, 30.0], np.float32)


def draw_inputs(seed: int, size: float = 1.0) -> list[np.ndarray]:
  rng = np.random.default_rng(seed)
  shapes = [(HEADS, CHANNELS), (KEY_HEADS, CHANNELS), (KEY_HEADS, VALUES)]
  return [rng.normal(0, size, (ROWS, LENGTH, *s)).astype(np.float32) for s in shapes]


@st.composite
def layouts(draw) -> np.ndarray:
  """Segments of any length with any padding between them; rows may be all padding."""
  segment = np.zeros((ROWS, LENGTH), np.int32)
  for row in segment:
    start, request = 0, 0
    for gap, length in draw(st.lists(st.tuples(st.integers(0, 9), st.integers(1, LENGTH)))):
      start, request = start + gap, request + 1
      row[start : start + length] = request
      start += length
  return segment


@given(
  segment=layouts(),
  seed=st.integers(0, 99),
  size=st.sampled_from([1.0, 8.0]),
  window=st.sampled_from(WINDOWS),
  sink=st.sampled_from([None, SINK]),
)
def test_attention_is_that_of_each_segment_alone(segment, seed, size, window, sink):
  inputs = draw_inputs(seed, size)
  mixed = np.asarray(attend_here(*inputs, segment, window, sink))
  expected = dense(*inputs, segment, window, sink)
  np.testing.assert_allclose(mixed, expected, rtol=1e-5, atol=1e-5 * size**2)
  assert not mixed[segment == 0].any()


@pytest.mark.parametrize("window", WINDOWS[1:])
def test_blocks_before_the_window_are_not_visited(window):
  query, key, value = draw_inputs(0)
  segment = np.ones((ROWS, LENGTH), np.int32)
  here = slice(LENGTH - BLOCK, LENGTH)
  first = (here.start - window + 1) // BLOCK * BLOCK
  spoilt = key.copy()
  spoilt[:, :first] = np.nan
  got = np.asarray(attend_here(query, spoilt, value, segment, window))[:, here]
  np.testing.assert_array_equal(got, attend_here(query, key, value, segment, window)[:, here])


@given(segment=layouts(), seed=st.integers(0, 99))
def test_padding_may_hold_anything(segment, seed):
  inputs = draw_inputs(seed)
  wild = [np.where((segment > 0)[..., None, None], x, np.float32(1e30)) for x in inputs]
  one, other = (np.asarray(attend_here(*x, segment)) for x in (inputs, wild))
  np.testing.assert_array_equal(one, other)


@given(
  length=st.integers(1, LENGTH // 2),
  block=st.integers(0, LENGTH // BLOCK // 2),
  others=layouts(),
  seed=st.integers(0, 99),
  window=st.sampled_from([None, 3]),
)
def test_result_does_not_depend_on_the_place_in_the_row(length, block, others, seed, window):
  """Bit for bit, where a request starts at a block; and no block of another request is visited."""
  inputs, elsewhere = draw_inputs(seed), draw_inputs(seed + 100)
  alone = np.zeros((ROWS, LENGTH), np.int32)
  alone[0, :length] = 1
  there = slice(block * BLOCK, block * BLOCK + length)
  segment = others + np.int32(1)
  segment[0, there] = 100
  segment[0, there.stop :] += 200  # or a segment would go on behind the request
  own = slice(there.start, -(-there.stop // BLOCK) * BLOCK)
  for x, y in zip(elsewhere, inputs, strict=True):
    kept = x[0, own].copy()
    x[...] = np.nan  # weighted by 0 it would still show
    x[0, own] = kept
    x[0, there] = y[0, :length]
  one = np.asarray(attend_here(*inputs, alone, window))[0, :length]
  other = np.asarray(attend_here(*elsewhere, segment, window))[0, there]
  np.testing.assert_array_equal(one, other)


def test_sizes_are_checked():
  query = jnp.zeros((1, 6, 4, 2))
  segment = jnp.ones((1, 6), jnp.int32)
  with pytest.raises(ValueError, match="multiple of 4, got 6"):
    attend(query, query, query, segment, scale=1.0, block=4)
  with pytest.raises(ValueError, match="expected heads that 3 divides, got 4"):
    attend(query, query[:, :, :3], query, segment, scale=1.0, block=3)
