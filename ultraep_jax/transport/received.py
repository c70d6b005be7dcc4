"""What a rank receives, where every rank is told the rows of all assignments."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from ultraep_jax.types import Array, AxisName, Routes


def of_round(routes: Routes, round_index: Array | int, capacity: int) -> tuple[Array, Array]:
  """The ranks that compute assignments in a round, −1 if none, and their rows there, ``[T, K]``."""
  active_TK = (routes.dest_TK >= 0) & (routes.row_TK // capacity == round_index)
  return jnp.where(active_TK, routes.dest_TK, -1), routes.row_TK % capacity


def fits(capacity: int, axis_name: AxisName) -> bool:
  """Whether a row of any rank is one int32."""
  return lax.axis_size(axis_name) * capacity <= jnp.iinfo(jnp.int32).max


def rows(dest_TK: Array, row_TK: Array, capacity: int, axis_name: AxisName) -> Array:
  """``[G, T, K]``, rows on this rank of the assignments of all ranks, −1 for other ranks' rows."""
  place_TK = jnp.where(dest_TK >= 0, dest_TK * capacity + row_TK, -1)
  local_GTK = lax.all_gather(place_TK, axis_name) - lax.axis_index(axis_name) * capacity
  return jnp.where((local_GTK >= 0) & (local_GTK < capacity), local_GTK, -1)


@dataclasses.dataclass(frozen=True)
class ToldCrossing:
  """A crossing whose ranks know the rows of all assignments; see ``exchange.Crossing``.

  Attributes:
    axis_name: the expert mesh axis.
    capacity: C, rows of the round.
    dest_TK: the rank that computes the assignment in this round, −1 if none.
    received_GTK: rows on this rank of the assignments of all ranks, −1 for other ranks' rows.
  """

  axis_name: AxisName = dataclasses.field(metadata={"static": True})
  capacity: int = dataclasses.field(metadata={"static": True})
  dest_TK: Array
  received_GTK: Array

  @jax.named_scope("uep.dispatch")
  def at_rows(self, value_GTK: Array) -> Array:
    """Numbers of assignments at their rows, ``[C]``; rows that no token feeds have zero."""
    row_GTK = jnp.where(self.received_GTK < 0, self.capacity, self.received_GTK)
    value_C = jnp.zeros(self.capacity, value_GTK.dtype)
    return value_C.at[row_GTK].set(value_GTK, mode="drop")
