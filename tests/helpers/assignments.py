"""Random assignments of tokens to rows of ranks, for the tests of what carries them."""

import jax
import numpy as np


def random_routes(rng, ranks, tokens, top_k, favourite=None):
  """Random destinations with rows that number each rank's assignments, in random order."""
  dest = rng.integers(0, ranks, size=(ranks, tokens, top_k))
  if favourite is not None:
    dest[:] = favourite
  dest = np.where(rng.random(dest.shape) < 0.1, -1, dest)
  row = np.zeros_like(dest)
  for rank in range(ranks):
    mine = dest == rank
    row[mine] = rng.permutation(mine.sum())
  return dest.astype(np.int32), row.astype(np.int32)


def received(dest_GTK, row_GTK):
  """``[receiver, G, T, K]``: the rows on each rank of all assignments, −1 for other ranks'."""
  rank = np.arange(dest_GTK.shape[0])[:, None, None, None]
  return np.where(dest_GTK[None] == rank, row_GTK[None], -1).astype(np.int32)


def mesh(*sizes_and_names):
  sizes, names = zip(*sizes_and_names, strict=True)
  axis_types = (jax.sharding.AxisType.Auto,) * len(sizes)
  return jax.make_mesh(sizes, names, axis_types, devices=jax.devices()[: int(np.prod(sizes))])
