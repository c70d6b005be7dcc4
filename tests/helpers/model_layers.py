"""Shapes of layers of published models, for programs that are traced and lowered only."""

import jax
import jax.numpy as jnp
from layer_problems import make_weights

import ultraep_jax as uep

SHAPES = {
  "qwen3-235b": (8192, 4096, 1536),
  "glm4.5-106b": (8192, 4096, 1408),
  "deepseek-v3": (8192, 7168, 2048),
  "gpt-oss-120b": (8192, 2880, 2880),
  "one token": (1, 448, 64),
}


def model_arguments(name, mesh):
  """Shapes of a layer of 64 experts: tokens, choices, gates and weights."""
  tokens, width, inner = SHAPES[name]
  total = tokens * mesh.size

  def shape(*sizes, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(sizes, dtype)

  up, down = shape(64, width, inner), shape(64, inner, width)
  index, gate = shape(total, 8, dtype=jnp.int32), shape(total, 8, dtype=jnp.float32)
  return shape(total, width), index, gate, uep.ExpertWeights(up, up, down)


def in_form(weights, layout, biases=()):
  """Weights of the same sizes in another layout, with biases or without."""
  experts, width, inner = weights.wi_up.shape

  def shape(*sizes, scale=1.0):
    return jax.ShapeDtypeStruct(sizes, weights.wo.dtype)

  return make_weights(shape, experts, width, layout, biases, inner=inner)


def gradients(apply):
  def loss(x, gate, weights, index):
    y, stats = apply(x, index, gate, weights)
    return jnp.sum(y.astype(jnp.float32)), stats

  def grads(x, index, gate, weights):
    return jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(x, gate, weights, index)

  return jax.jit(grads)
