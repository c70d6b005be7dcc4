"""Tokens in FP8: bit for bit against a plain reference, and as near as e4m3 allows."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from wire_rounding import e4m3_numbers, rounded

from ultraep_jax.transport import wire

FP8 = "float8_e4m3fn"
TOKENS, WIDTH = 8, 200  # a whole block and a part of one
DTYPES = ("bfloat16", "float16", "float32")


@functools.partial(jax.jit, static_argnums=1)
def cross(x_TD, dtype=FP8):
  packed = wire.pack(x_TD, dtype)
  return wire.unpack(packed, x_TD.dtype), wire.unpack(packed, jnp.dtype("float32")), packed


def random_tokens(seed, dtype):
  """Magnitudes from the dtype's least to its largest; rows differ in how far they spread."""
  rng = np.random.default_rng(seed)
  info = jnp.finfo(dtype)
  low, high = np.log2(float(info.smallest_subnormal)), np.log2(float(info.max))
  center = rng.uniform(low, high, size=(TOKENS, 1))
  spread = rng.choice([0.0, 4.0, 12.0, 300.0], size=(TOKENS, 1))
  exponent = np.clip(center + spread * rng.uniform(-1, 1, (TOKENS, WIDTH)), low, high)
  sign = rng.choice([-1.0, 1.0], size=exponent.shape)
  zero = rng.random(exponent.shape) < rng.choice([0.0, 0.1, 1.0], size=(TOKENS, 1))
  largest = float(info.max)
  return np.where(zero, 0.0, np.clip(sign * 2.0**exponent, -largest, largest)).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@hypothesis.given(seed=st.integers(0, 2**32 - 1))
@hypothesis.settings(max_examples=25)
def test_every_value_is_the_nearest_e4m3_number_at_its_scale(dtype, seed):
  x = random_tokens(seed, jnp.dtype(dtype))
  got, exact, _ = cross(x)
  value, scale = rounded(x)
  np.testing.assert_array_equal(np.asarray(exact), value)
  np.testing.assert_array_equal(np.asarray(got), value.astype(dtype))
  # Half a step of e4m3's three bits of mantissa, or of its subnormals.
  error = np.abs(value.astype(np.float64) - x.astype(np.float64))
  bound = np.maximum(2.0**-4 * np.abs(x.astype(np.float64)), 2.0**-10 * scale)
  assert (error <= bound * (1 + 1e-6)).all()


def test_midpoints_go_to_even():
  numbers = e4m3_numbers()
  middle = (numbers[1:] + numbers[:-1]) / 2
  x = np.zeros((2, 128), np.float32)
  x[0, : middle.size], x[1, : middle.size] = middle, -middle
  x[:, 127] = 448  # a scale of 1
  _, exact, (_, scale) = cross(x)
  even = np.where(np.arange(126) % 2, numbers[1:], numbers[:-1])
  assert scale[:, 0].tolist() == [1, 1]
  np.testing.assert_array_equal(np.asarray(exact)[:, :126], np.stack([even, -even]))


def test_blocks_of_zeros_stay_zero_and_bad_blocks_become_nan_alone():
  x = np.ones((4, 384), np.float32)
  x[0] = 0
  x[1, 130], x[2, 130], x[3, 130] = np.nan, np.inf, -np.inf
  got, _, (_, scale) = cross(x)
  assert (np.asarray(got)[0] == 0).all() and (np.asarray(scale) > 0)[0].all()
  assert np.isnan(got[1:, 128:256]).all()
  np.testing.assert_array_equal(np.delete(got[1:], np.s_[128:256], axis=1), 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_and_the_least_numbers_stay_finite(dtype):
  info = jnp.finfo(dtype)
  x = np.zeros((4, 128), dtype)
  x[0], x[1] = info.max, -info.max
  x[2], x[3] = info.tiny, info.smallest_subnormal
  got = np.asarray(cross(x)[0], np.float64)
  np.testing.assert_allclose(got[:2], np.asarray(x[:2], np.float64), rtol=2.0**-20)
  assert np.isfinite(got).all() and (np.abs(got[2:]) <= 2 * np.asarray(x[2:], np.float64)).all()


@pytest.mark.parametrize("width", [1, 128, 200, 640, 4096])
def test_rows_of_scales_are_whole_bulk_copies(width):
  packed = jax.eval_shape(lambda x: wire.pack(x, FP8), jnp.zeros((3, width), jnp.bfloat16))
  assert [array.shape[0] for array in packed] == [3, 3]
  assert packed[1].shape[1] * 4 % 16 == 0 and 128 * packed[1].shape[1] >= width
  total = sum(array.shape[1] * array.dtype.itemsize for array in packed)
  assert total == wire.token_bytes(width, 2, FP8)


def test_none_is_the_row_itself():
  x = jnp.ones((2, 3), jnp.bfloat16)
  assert wire.pack(x, None) == [x] and wire.unpack([x], x.dtype) is x
  assert wire.token_bytes(3, 2, None) == 6
