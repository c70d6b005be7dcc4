"""The block of a model: its router's logits. ``test_nnx.py`` has the rest."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ultraep_jax.block import router_logits


def problem(dtype):
  keys = jax.random.split(jax.random.key(0), 3)
  x = jax.random.normal(keys[0], (3, 40, 512)).astype(dtype)
  # Columns that differ in less than bfloat16 sees, and in how large they are.
  router_DE = 1 + 1e-4 * jax.random.normal(keys[1], (512, 16))
  router_DE *= jnp.logspace(-6, 6, 16)[None]
  return x, router_DE.astype(jnp.float32), jax.random.normal(keys[2], (3, 40, 16))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_router_rounds_no_operand(dtype):
  x, router_DE, _ = problem(dtype)
  logits = jax.jit(router_logits)(x, router_DE)
  assert logits.dtype == jnp.float32
  wide = np.asarray(x, np.float64), np.asarray(router_DE, np.float64)
  size = np.abs(wide[0]) @ np.abs(wide[1])
  assert (np.abs(logits - wide[0] @ wide[1]) / size).max() < 1e-6


def test_router_gradients_of_bfloat16_are_those_of_the_float32_matmul():
  x, router_DE, weight = problem(jnp.bfloat16)

  def gradients(f):
    def loss(x, router_DE):
      return jnp.sum(f(x, router_DE) * weight)

    return jax.jit(jax.grad(loss, argnums=(0, 1)))(x, router_DE)

  got = gradients(router_logits)
  want = gradients(lambda x, w: jnp.matmul(x.astype(jnp.float32), w, precision="highest"))
  for a, b in zip(got, want, strict=True):
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(a.astype(jnp.float32), b.astype(jnp.float32))
