"""The gradients between the matrices of an expert: interpreted, lowered, and what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grouped_rows import lower, shape
from mosaic_interpret import interpreted

from pallas_kernels.matmul.gated_grads import gated_grads

COLUMNS = ("apart", "fused", "interleaved", "ungated")


def swiglu(gate, up):
  return jax.nn.silu(gate) * up


def clamped(gate, up):
  gate, up = jnp.minimum(gate, 0.5), jnp.clip(up, -0.5, 0.5)
  return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)


def projections(make, columns, rows, cols):
  count, width = {"apart": (2, cols), "ungated": (1, cols)}.get(columns, (1, 2 * cols))
  return tuple(make(rows, width) for _ in range(count))


def told_apart(hidden, columns):
  if columns == "fused":
    return jnp.split(hidden[0], 2, axis=1)
  return [hidden[0][:, ::2], hidden[0][:, 1::2]] if columns == "interleaved" else list(hidden)


def reference(hidden, grad_CN, gate_C, unit, columns):
  """Of the same bfloat16 arrays, in float32, for all rows."""

  def weighted(hidden, gate_C):
    value = unit(*told_apart(hidden, columns))
    return gate_C[:, None] * value, value

  hidden = [x.astype(jnp.float32) for x in hidden]
  grad_CN = grad_CN.astype(jnp.float32)
  (inner_CN, _), vjp = jax.vjp(weighted, hidden, gate_C)
  hidden_grads, gate_grad_C = vjp((grad_CN, jnp.zeros_like(grad_CN)))
  return inner_CN, tuple(hidden_grads), gate_grad_C


def problem(columns, rows, cols, used):
  """Rows beyond those that are used are NaN, as a buffer's may be."""
  rng = np.random.default_rng(rows + cols)

  def make(*sizes):
    values = rng.standard_normal(sizes).astype(np.float32)
    values[used:] = np.nan
    return jnp.asarray(values, jnp.bfloat16)

  hidden = projections(make, columns, rows, cols)
  return hidden, make(rows, cols), jnp.asarray(rng.random(rows), jnp.float32)


def computed(unit, columns, *operands):
  f = jax.jit(functools.partial(gated_grads, unit=unit, columns=columns))
  with interpreted():
    return jax.block_until_ready(f(*operands))


# No row, one, whole tiles, a last or only tile that the buffer cuts; one column of tiles and three.
@pytest.mark.parametrize(
  ("columns", "rows", "cols", "sizes"),
  [
    ("apart", 200, 128, (100, 0, 60, 37)),
    ("fused", 128, 192, (64, 64)),
    ("interleaved", 136, 64, (1, 0, 134)),
    ("interleaved", 72, 192, (0, 1)),
    ("ungated", 64, 64, (0, 0)),
    ("fused", 8, 64, (0, 3)),
    ("ungated", 192, 64, (0, 65)),
  ],
)
def test_equals_the_gradients_of_float32(columns, rows, cols, sizes):
  used, unit = sum(sizes), jax.nn.silu if columns == "ungated" else swiglu
  hidden, grad_CN, gate_C = problem(columns, rows, cols, used)
  found = computed(unit, columns, hidden, grad_CN, gate_C, jnp.asarray(sizes, jnp.int32))
  expected = reference(hidden, grad_CN, gate_C, unit, columns)
  assert [x.shape for x in jax.tree.leaves(tuple(found))] == [
    x.shape for x in jax.tree.leaves(expected)
  ]
  for a, b in zip(jax.tree.leaves(tuple(found)), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(
      np.asarray(a, np.float32)[:used], np.asarray(b)[:used], rtol=2e-2, atol=2e-2
    )


def test_a_weighted_gate_gets_its_own_gradient():
  """Weights that are zero have one, and give none to the projections."""
  hidden, grad_CN, _ = problem("apart", 64, 64, 64)
  gate_C = jnp.zeros(64, jnp.float32)
  found = computed(clamped, "apart", hidden, grad_CN, gate_C, jnp.asarray([64], jnp.int32))
  assert not np.any(np.asarray(found.inner_CN, np.float32))
  assert not any(np.any(np.asarray(x, np.float32)) for x in found.hidden)
  expected = reference(hidden, grad_CN, gate_C, clamped, "apart")[-1]
  np.testing.assert_allclose(found.gate_C, expected, rtol=1e-2, atol=0.1)


@pytest.mark.parametrize("columns", COLUMNS)
def test_every_form_lowers_to_one_kernel(columns):
  unit = jax.nn.gelu if columns == "ungated" else clamped
  operands = shape(4096, 2880), shape(4096, dtype=jnp.float32), shape(18, dtype=jnp.int32)
  f = functools.partial(gated_grads, unit=unit, columns=columns)
  text = lower(f, projections(shape, columns, 4096, 2880), *operands)
  assert text.count("custom_call @mosaic_gpu") == 1


def test_what_it_cannot_do_is_refused():
  def refused(error, message, hidden=None, grad=None, gate=None, unit=swiglu):
    hidden = (shape(128, 64), shape(128, 64)) if hidden is None else hidden
    grad, gate = grad or shape(128, 64), gate or shape(128, dtype=jnp.float32)
    with pytest.raises(error, match=message):
      jax.eval_shape(
        functools.partial(gated_grads, unit=unit), hidden, grad, gate, shape(3, dtype=jnp.int32)
      )

  refused(
    NotImplementedError, "N: expected a multiple of 64", (shape(128, 48),) * 2, shape(128, 48)
  )
  refused(NotImplementedError, "bfloat16", grad=shape(128, 64, dtype=jnp.float32))
  refused(NotImplementedError, "elementwise", unit=lambda a, b: jnp.cumsum(a, 1) * b)
  refused(ValueError, "hidden: expected 2 that are apart, got 1", (shape(128, 64),))
  refused(ValueError, r"hidden\[1\]", (shape(128, 64), shape(128, 128)))
  refused(ValueError, "gate_C", gate=shape(64, dtype=jnp.float32))
