"""The fused projections into a gated expert: lowering, results interpreted, activations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grouped_rows import (
  CAPACITY,
  DEFERRED,
  FEW,
  IN_PAIRS,
  IN_TURNS,
  SIZES,
  TOGETHER,
  WHOLE,
  assert_products,
  exact,
  interpreted,
  lower,
  shape,
  spans,
  used_rows,
)

from pallas_kernels.matmul.gated import gated_beside, gated_matmul
from pallas_kernels.matmul.layout import MatmulTuning

CAPTURED = np.ones((64, 64), np.float32)


def lowered(activation, keep_hidden=False, c=4096, k=4096, n=2880, m=16, s=2, tuning=None):
  f = functools.partial(gated_matmul, activation=activation, keep_hidden=keep_hidden, tuning=tuning)
  home, replica = [shape(m, k, n)] * 2, [shape(s, k, n)] * 2
  return lower(f, shape(c, k), *home, *replica, shape(m + s, dtype=jnp.int32))


@pytest.mark.parametrize("keep_hidden", [False, True])
@pytest.mark.parametrize("schedule", ["together", "deferred", "in_turns"])
def test_gated_lowers_to_one_kernel(keep_hidden, schedule):
  tuning = MatmulTuning(schedule, stages=6 if schedule == "in_turns" else 4)
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


def check(sizes, tuning, keep_hidden, num_home, activation, depth=128, cols=256, capacity=CAPACITY):
  rng = np.random.default_rng(0)
  rows = used_rows(rng, sizes, depth, capacity)
  gate_weights, up_weights = exact(rng, 4, depth, cols), exact(rng, 4, depth, cols)
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
  expected = activation(gate) * up
  for span in spans(sizes):
    # Of the rounded projections, rounded once, which is half a step of bfloat16 at most.
    got = inner[span].astype(jnp.float32)
    np.testing.assert_allclose(got, expected[span], rtol=1.01 * 2**-8, atol=1e-30)
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


@pytest.mark.parametrize(
  ("capacity", "tuning", "depth", "cols"),
  [(1, TOGETHER, 64, 64), (63, IN_TURNS, 64, 192), (255, TOGETHER, 192, 320)],
)
def test_few_rows_and_any_multiple_of_64(capacity, tuning, depth, cols):
  options = {"keep_hidden": True, "num_home": 2, "activation": jax.nn.relu}
  with interpreted():
    check(FEW[capacity], tuning, **options, depth=depth, cols=cols, capacity=capacity)


def test_inner_is_the_same_without_hidden():
  sizes = SIZES[0]
  with interpreted():
    one = check(sizes, TOGETHER, keep_hidden=True, num_home=3, activation=jax.nn.relu)
    other = check(sizes, TOGETHER, keep_hidden=False, num_home=3, activation=jax.nn.relu)
  np.testing.assert_array_equal(one[: sum(sizes)], other[: sum(sizes)])


def split(rows, home_gate, home_up, replica_gate, replica_up, sizes, tuning=None, **kwargs):
  """As ``gated_matmul``, with replicas that come from no transfer."""
  homes, replicas = (home_gate, home_up), (replica_gate, replica_up)
  kwargs |= {"replicas": replicas, "tuning": tuning, "replica_tuning": tuning}
  return gated_beside(None, rows, *homes, sizes, **kwargs)[0]


# Of two home and two replica slots: a border inside a tile, replicas without rows, homes without.
SPLITS = [[0, 77, 0, 50], [150, 70, 1, 300], [300, 340, 0, 0], [0, 0, 640, 0], [0, 0, 0, 0]]


@pytest.mark.slow
@pytest.mark.parametrize("keep_hidden", [False, True])
def test_home_and_replica_slots_apart_give_the_same_bits(keep_hidden):
  rng = np.random.default_rng(0)
  weights = [exact(rng, 2, 64, 128) for _ in range(4)]
  options = {"activation": jax.nn.relu, "keep_hidden": keep_hidden, "tuning": TOGETHER}
  whole, apart = (jax.jit(functools.partial(f, **options)) for f in (gated_matmul, split))
  for sizes in SPLITS:
    arguments = used_rows(rng, sizes, 64), *weights, jnp.array(sizes)
    with interpreted():
      results = jax.block_until_ready((whole(*arguments), apart(*arguments)))
    expected, got = (jax.tree.leaves(x) for x in results)
    assert len(expected) == (3 if keep_hidden else 1)
    for x, y in zip(expected, got, strict=True):
      np.testing.assert_array_equal(x[: sum(sizes)], y[: sum(sizes)])


def test_replica_slots_are_written_in_place():
  f = functools.partial(split, activation=jax.nn.silu, keep_hidden=True)
  weights = [shape(16, 256, 512)] * 2 + [shape(2, 256, 512)] * 2
  text = lower(f, shape(4096, 256), *weights, shape(18, dtype=jnp.int32))
  home, replica = (x for x in text.splitlines() if "custom_call @mosaic_gpu" in x)
  name = home.split(":")[0].strip()
  assert replica.count("#stablehlo.output_operand_alias<") == 3
  assert all(f"{name}#{i}" in replica for i in range(3))  # as they are: nothing copies them


def test_both_kernels_run_again_under_checkpoint():
  """An effect, as that of a mutable reference, would not: gradients would be wrong."""

  @jax.custom_vjp
  def gate(rows, *operands):
    return forward(rows, *operands)[0]

  def forward(rows, *operands):
    kept = split(rows, *operands, activation=jax.nn.silu, keep_hidden=True)
    return kept.inner_CN, kept.gate_CN

  gate.defvjp(forward, lambda gate_CN, grad: (gate_CN[:, :256] * grad[:, :256], *[None] * 5))

  def gradient(rows, *operands):
    wrapped = jax.checkpoint(jax.jit(gate))
    return jax.grad(lambda rows: jnp.sum(wrapped(rows, *operands).astype(jnp.float32)))(rows)

  shapes = [shape(2, 256, 256)] * 2 + [shape(1, 256, 256)] * 2
  text = lower(gradient, shape(512, 256), *shapes, shape(3, dtype=jnp.int32))
  assert text.count("custom_call @mosaic_gpu") == 2


@pytest.mark.parametrize("tuning", [TOGETHER, DEFERRED, IN_TURNS])
def test_gated_has_no_race(tuning):
  with interpreted(races=True):
    check(WHOLE, tuning, keep_hidden=True, num_home=3, activation=jax.nn.silu)


def test_refuses_slots_without_weights():
  weights = (jnp.zeros((2, 64, 128), jnp.bfloat16),) * 2
  arguments = jnp.zeros((256, 64), jnp.bfloat16), *weights, jnp.zeros(5, jnp.int32), jax.nn.silu
  with pytest.raises(ValueError, match=r"slots: expected 2 of range\(0, 5\), got range\(2, 5\)"):
    jax.eval_shape(lambda: gated_beside(None, *arguments, keep_hidden=False, replicas=weights))


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
