"""The largest of each row's scores: which experts a token goes to."""

import jax

import pallas_kernels as kernels
from ultraep_jax.implementation import Implementations, first_that_can
from ultraep_jax.types import Array


def top_k(score: Array, count: int, implementations: Implementations = ("portable",)) -> Array:
  """Indices of the largest of the last axis, the largest first; of equal ones the lower index.

  Args:
    score: ``[..., E]`` float32.
    count: K.
    implementations: what to try, in order.

  Returns:
    ``[..., K]`` int32.

  Raises:
    NotImplementedError: none of the implementations can.

  >>> import jax.numpy as jnp
  >>> top_k(jnp.array([[1.0, 3.0, 2.0], [5.0, 5.0, 4.0]]), 2).tolist()
  [[1, 2], [0, 1]]
  """
  candidates = {
    "mosaic_gpu": lambda: _on_gpu(score, count),
    "portable": lambda: jax.lax.top_k(score, count)[1],
  }
  return first_that_can(implementations, candidates)


def _on_gpu(score: Array, count: int) -> Array:
  """The same, by a kernel that XLA does not know how to split.

  Raises:
    NotImplementedError: the scores may be of several devices or of a CPU, or the kernel cannot
      take them.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or not mesh.are_all_axes_manual:
    raise NotImplementedError(
      f"scores: expected those of one device, in a shard_map over all mesh axes, got {mesh}"
    )

  @jax.custom_batching.custom_vmap
  def best(score: Array) -> Array:
    index = kernels.top_k(score.reshape(-1, score.shape[-1]), count)
    return index.reshape(*score.shape[:-1], count)

  # Whatever is mapped over is one more axis of rows.
  best.def_vmap(lambda size, mapped, score: (best(score), True))
  return best(score)
