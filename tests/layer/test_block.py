"""The block of a model: its router's logits. ``test_nnx.py`` has the rest."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from programs import kernels

from ultraep_jax import block
from ultraep_jax.block import router_logits
from ultraep_jax.gating import GatingConfig


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


def test_tokens_of_a_single_channel_give_the_router_itself():
  """All 24 bits of it."""
  router_DE = problem(jnp.bfloat16)[1]
  for dtype in (jnp.bfloat16, jnp.float32):
    one = jax.jit(router_logits)(jnp.eye(512, dtype=dtype), router_DE)
    np.testing.assert_array_equal(one, router_DE)


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


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("token_axes", [("expert",), ("data", "expert")])
def test_every_device_chooses_for_its_own_tokens(axis_type, token_axes):
  """By a kernel on GPUs, forward and backward, and results are those of all tokens at once."""
  keys = jax.random.split(jax.random.key(0), 2)
  x = jax.random.normal(keys[0], (4, 40, 64))
  router_DE = jax.random.normal(keys[1], (64, 16)) / 8
  mask = jnp.arange(4 * 40).reshape(4, 40) % 3 > 0
  gating = GatingConfig(num_experts=16, num_experts_per_tok=3, use_selection_bias=True)
  mesh = jax.make_mesh((2, 2), ("data", "expert"), (axis_type,) * 2, devices=jax.devices()[:4])

  def loss(x, router_DE, bias_E, implementation, axes):
    router = block._Router(router_DE, None, bias_E)
    routed = block._route(x, router, mask, None, gating, implementation, axes)
    losses = routed.load_balance_loss + routed.router_z_loss
    return losses + jnp.sum(routed.gate**2), routed

  def program(implementation, axes):
    return jax.jit(
      lambda *args: jax.value_and_grad(loss, (0, 1), True)(*args, implementation, axes)
    )

  args = x, router_DE, jnp.linspace(-0.1, 0.1, 16)
  with jax.set_mesh(jax.make_mesh((1,), ("expert",), (axis_type,), devices=jax.devices()[:1])):
    want = program("portable", ("expert",))(*args)
  with jax.set_mesh(mesh):
    x = jax.device_put(x, P(token_axes))
    got = program("portable", token_axes)(x, *args[1:])
    traced = program("mosaic_gpu", token_axes).trace(x, *args[1:])
    assert "custom_call @mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()
  np.testing.assert_array_equal(got[0][1].expert_index, want[0][1].expert_index)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want)
  tokens = 4 * 40 // (2 * len(token_axes))
  (shape,) = {kernel.outvars[0].aval.shape for kernel in kernels(traced.jaxpr)}
  assert shape == (tokens * 3,)
