"""Where the requests of packed rows lie."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from ultraep_jax.packed import PackedBatch
from ultraep_jax.types import Array


class Spans(NamedTuple):
  """The requests of each row.

  Attributes:
    start_BR: ``[B, R]`` int32, index in the row of the request's first token.
    size_BR: ``[B, R]`` int32, its tokens; 0 where there is no request.
  """

  start_BR: Array
  size_BR: Array

  def inside(self, length: int) -> Array:
    """``[B, length]`` bool, whether a token belongs to a request."""
    place_T = lax.iota(jnp.int32, length)[None, None]
    start_BR1, end_BR1 = self.start_BR[..., None], (self.start_BR + self.size_BR)[..., None]
    return jnp.any((place_T >= start_BR1) & (place_T < end_BR1), axis=1)


def spans_of(batch: PackedBatch) -> Spans:
  """Reads them off the place of each request's last token."""
  present_BR, last_BR = batch.last_BR >= 0, jnp.maximum(batch.last_BR, 0)
  before_BR = jnp.take_along_axis(batch.position_BT, last_BR, axis=1)
  size_BR = jnp.where(present_BR, before_BR + 1, 0)
  return Spans(jnp.where(present_BR, last_BR - before_BR, 0), size_BR)
