"""The fused projections into a gated expert: lowering, results interpreted, activations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grouped_rows import (
  DEFERRED,
  IN_PAIRS,
  IN_TURNS,
  SIZES,
  TOGETHER,
  WHOLE,
  assert_products,
  interpreted,
  lower,
  normal,
  shape,
  spans,
  used_rows,
)

from pallas_kernels.gated_matmul import gated_matmul
from pallas_kernels.matmul_pipeline import Tuning

CAPTURED = np.ones((64, 64), np.float32)


def lowered(activation, keep_hidden=False, c=4096, k=4096, n=1408, m=16, s=2, tuning=None):
  f = functools.partial(gated_matmul, activation=activation, keep_hidden=keep_hidden, tuning=tuning)
  home, replica = [shape(m, k, n)] * 2, [shape(s, k, n)] * 2
  return lower(f, shape(c, k), *home, *replica, shape(m + s, dtype=jnp.int32))


@pytest.mark.parametrize("keep_hidden", [False, True])
@pytest.mark.parametrize("schedule", ["together", "deferred", "in_turns"])
def test_gated_lowers_to_one_kernel(keep_hidden, schedule):
  tuning = Tuning(schedule, stages=6 if schedule == "in_turns" else 4)
  text = lowered(jax.nn.silu, keep_hidden, tuning=tuning)
  assert text.count("custom_call @mosaic_gpu") == 1
  assert "stablehlo.multiply" not in "".join(x for x in text.splitlines() if "bf16" in x)


@pytest.mark.parametrize(
  "activation",
  [
    jax.nn.silu,
    jax.nn.relu,
    jax.nn.gelu,
    jax.nn.sigmoid,
    jax.nn.leaky_relu,
    jax.nn.hard_swish,
    lambda x: jnp.square(jax.nn.relu(x)),
    lambda x: jnp.where(x > 0, jnp.minimum(x, 7.0), jnp.float32(0.5)),
  ],
)
def test_activations_that_lower(activation):
  assert lowered(activation).count("custom_call @mosaic_gpu") == 1


@pytest.mark.parametrize(
  ("activation", "match"),
  [
    (jax.nn.softmax, "expected scalars and arrays of"),
    (lambda x: jnp.cumsum(x, axis=0), "expected elementwise operations, got cumsum"),
    (lambda x: x[:, ::-1], "expected elementwise operations, got rev"),
    (jax.nn.softplus, "expected elementwise operations, got log1p"),
    (lambda x: x.astype(jnp.bfloat16), "expected float32 of its argument's shape"),
    (lambda x: x + CAPTURED, "expected no captured arrays, got"),
  ],
)
def test_activations_that_are_refused(activation, match):
  with pytest.raises(NotImplementedError, match=match):
    lowered(activation)


def check(sizes, tuning, keep_hidden, num_home, activation):
  rng = np.random.default_rng(0)
  rows = used_rows(rng, sizes, 128)
  gate_weights, up_weights = normal(rng, 4, 128, 256), normal(rng, 4, 128, 256)
  f = functools.partial(gated_matmul, activation=activation, keep_hidden=keep_hidden, tuning=tuning)
  home = gate_weights[:num_home], up_weights[:num_home]
  replica = gate_weights[num_home:], up_weights[num_home:]
  inner, gate, up = jax.jit(f)(rows, *home, *replica, jnp.array(sizes))
  assert inner.dtype == jnp.bfloat16
  if not keep_hidden:
    assert gate is None
    assert up is None
    return inner
  assert_products(gate, rows, gate_weights, sizes)
  assert_products(up, rows, up_weights, sizes)
  gate, up = gate.astype(jnp.float32), up.astype(jnp.float32)
  expected = (activation(gate) * up).astype(jnp.bfloat16)
  for span in spans(sizes):
    # Of the rounded projections, rounded once: the interpreter's exp is exact.
    np.testing.assert_array_equal(inner[span], expected[span])
  return inner


@pytest.mark.parametrize(
  ("tuning", "num_home", "sizes"),
  [
    (TOGETHER, 3, SIZES[0]),
    (DEFERRED, 2, SIZES[1]),
    (IN_TURNS, 4, SIZES[0]),
    (IN_TURNS, 2, SIZES[3]),
    (IN_PAIRS, 3, SIZES[1]),
  ],
)
def test_gated_interpreted(tuning, num_home, sizes):
  with interpreted():
    check(sizes, tuning, keep_hidden=True, num_home=num_home, activation=jax.nn.silu)


def test_inner_is_the_same_without_hidden():
  sizes = SIZES[0]
  with interpreted():
    one = check(sizes, TOGETHER, keep_hidden=True, num_home=3, activation=jax.nn.relu)
    other = check(sizes, TOGETHER, keep_hidden=False, num_home=3, activation=jax.nn.relu)
  np.testing.assert_array_equal(one[: sum(sizes)], other[: sum(sizes)])


@pytest.mark.parametrize("tuning", [TOGETHER, DEFERRED, IN_TURNS])
def test_gated_has_no_race(tuning):
  with interpreted(races=True):
    check(WHOLE, tuning, keep_hidden=True, num_home=3, activation=jax.nn.silu)


def test_refuses_weights_that_do_not_fit_together():
  def zeros(*sizes):
    return jnp.zeros(sizes, jnp.bfloat16)

  home, replica, sizes = zeros(2, 64, 128), zeros(1, 64, 128), jnp.zeros(3, jnp.int32)
  with pytest.raises(ValueError, match="home_MKN: expected shape"):
    gated_matmul(
      zeros(256, 64),
      home,
      zeros(2, 64, 256),
      replica,
      replica,
      sizes,
      jax.nn.silu,
      keep_hidden=True,
    )
