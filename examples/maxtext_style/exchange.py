"""Rows of tokens between the ranks of the mesh axis ``expert``, as many as each pair has."""

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array


def exchange_rows(rows_AD: Array, sizes_GG: Array, capacity: int) -> Array:
  """Sends rows that lie by destination; they arrive by source. Call it inside ``shard_map``.

  Args:
    rows_AD: ``[A, D]``, this rank's rows.
    sizes_GG: ``[G, G]`` int32, rows from each source to each destination.
    capacity: at least as many rows as this rank receives.

  Returns:
    ``[capacity, D]``, zeros behind the rows received.
  """
  rank = lax.axis_index("expert")
  start_GG = jnp.cumsum(sizes_GG, axis=1) - sizes_GG  # at the source
  landing_GG = jnp.cumsum(sizes_GG, axis=0) - sizes_GG  # at the destination

  def ragged(rows_AD: Array) -> Array:
    return lax.ragged_all_to_all(
      rows_AD,
      jnp.zeros_like(rows_AD, shape=(capacity, rows_AD.shape[1])),
      start_GG[rank],
      sizes_GG[rank],
      landing_GG[rank],
      sizes_GG[:, rank],
      axis_name="expert",
    )

  def gathered(rows_AD: Array) -> Array:  # XLA has no ragged all-to-all for CPUs
    rows_GAD = lax.all_gather(rows_AD, "expert")
    place_C = jnp.arange(capacity)
    end_G = landing_GG[:, rank] + sizes_GG[:, rank]
    source_C = jnp.sum(end_G[None, :] <= place_C[:, None], axis=1)
    row_C = (start_GG - landing_GG)[source_C, rank] + place_C
    return rows_GAD.at[source_C, row_C].get(mode="fill", fill_value=0)

  return lax.platform_dependent(rows_AD, cpu=gathered, default=ragged)
