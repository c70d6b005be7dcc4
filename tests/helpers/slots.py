"""Rows of few slots for the matmuls in plain JAX, and what is right."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

C, D, F, HOME, REPLICA = 40, 6, 10, 3, 2

# Borders anywhere, empty groups, nothing at all, everything in one slot, a full buffer.
SIZES = [
  [7, 0, 13, 5, 1],
  [0, 0, 0, 0, 0],
  [40, 0, 0, 0, 0],
  [0, 0, 0, 0, 40],
  [1, 1, 1, 1, 1],
  [9, 9, 9, 9, 4],
  [0, 31, 0, 0, 2],
]


def normal(rng: np.random.Generator, *shape: int) -> jax.Array:
  return jnp.asarray(rng.normal(size=shape), jnp.float32)


def reference(rows: jax.Array, weights: jax.Array, sizes: Sequence[int]) -> np.ndarray:
  """Each group times its weights; unused rows are zero."""
  out = np.zeros((rows.shape[0], weights.shape[2]))
  end = np.cumsum(sizes)
  for slot, size in enumerate(sizes):
    span = slice(end[slot] - size, end[slot])
    out[span] = np.asarray(rows[span], np.float64) @ np.asarray(weights[slot], np.float64)
  return out


def poison(rows: jax.Array, sizes: Sequence[int]) -> jax.Array:
  """Unused rows hold NaN."""
  return rows.at[sum(sizes) :].set(jnp.nan)
