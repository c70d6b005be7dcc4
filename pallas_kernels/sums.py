"""Tables of integers that XLA makes in few kernels: each place is a sum over what may go there.

Three slots of 2, 0 and 1 tiles. A table of their tiles, of at most four::

  tile   slot 0       slot 1       slot 2         sum
  0      0 ≤ 0 < 2    no           no             slot 0
  1      0 ≤ 1 < 2    no           no             slot 0
  2      no           no           2 ≤ 2 < 3      slot 2
  3      no           no           no             0
"""

import jax.numpy as jnp
from jax import lax

from pallas_kernels.support import Array


def sum_lines(*terms_TN: Array) -> Array:
  """``[X, T]``, the lines of a table: each place is a sum over the last axis of its terms.

  XLA makes one kernel of it all. It makes several of sums that are stacked, of scans, and of what
  two kernels need that takes a division.
  """
  return jnp.sum(jnp.stack(terms_TN), axis=2, dtype=jnp.int32)


def sums_before(*x_N: Array) -> list[Array]:
  """``[N + 1]``, of each vector the sums of all before each and, at the end, of all."""
  i_N = jnp.arange(x_N[0].shape[0], dtype=jnp.int32)
  place_E = jnp.arange(i_N.size + 1, dtype=jnp.int32)
  before_EN = i_N[None, :] < place_E[:, None]
  return list(sum_lines(*(jnp.where(before_EN, x[None, :], 0) for x in x_N)))


def ceil_div(x: Array, divisor: int) -> Array:
  """``ceil(x / divisor)``; ``x`` is not negative."""
  return lax.div(x + (divisor - 1), jnp.int32(divisor))
