"""What a rank tells all others of its assignments, in the lines that travel with its tokens.

A line has a *code* for every assignment of a chunk: its *place*, the rank that computes it times
the capacity and the row there, where the sender writes that row. Otherwise −2 less the place: the
receiver copies the row from one that the sender writes. The token of ``dispatch``, of rank 0 with
rows 4 and 9 on rank 1 and row 2 at home, with a capacity of 16::

  assignment      0        1        2
  place          20       25        2
  code           20      −27        2     rank 0 writes rows 4 and 2, rank 1 copies row 4 to row 9

An assignment that nobody computes has −1 as its place and its code. The bits of a number for each
assignment, such as its gate, may follow the codes of a token.
"""

import jax.numpy as jnp
from jax import lax

from pallas_kernels.support import Array
from pallas_kernels.transfer.chunks import Deal


def line_table(
  deal: Deal,
  dest_TK: Array,
  row_TK: Array,
  written_TK: Array,
  value_TK: Array | None,
  capacity: int,
) -> Array:
  """``[chunks, line]`` int32, what this rank tells of its assignments.

  Args:
    deal: of as many columns as a token has codes and numbers.
    dest_TK: the rank that computes an assignment, −1 for none.
    row_TK: its row there.
    written_TK: whether the sender writes that row.
    value_TK: float32, a number for each assignment, or none.
    capacity: rows of a rank.
  """
  place_TK = jnp.where(dest_TK >= 0, dest_TK * capacity + row_TK, -1)
  code_TK = jnp.where(written_TK, place_TK, -2 - place_TK)
  if value_TK is None:
    return deal.table(code_TK, -1)
  bits_TK = lax.bitcast_convert_type(value_TK, jnp.int32)
  return deal.table(jnp.concatenate([code_TK, bits_TK], axis=1), -1)


def place(code: Array) -> Array:
  """The place that a code stands for.

  >>> place(jnp.array([20, -27, 2, -1])).tolist()
  [20, 25, 2, -1]
  """
  return jnp.maximum(code, -2 - code)


def row_here(code: Array, capacity: int, rank: Array) -> Array:
  """The row of an assignment on a rank, −1 if another one computes it, or none."""
  row = place(code) - rank * capacity
  return jnp.where((row >= 0) & (row < capacity), row, -1)


def read(
  deal: Deal, line_GXL: Array, top_k: int, capacity: int, rank: Array
) -> tuple[Array, Array | None]:
  """What the lines of all ranks say to this one.

  Returns:
    ``received_GTK``, rows on this rank, −1 for assignments without one here, and the numbers
    ``value_GTK`` of all assignments if lines have them.
  """
  told_GTY = deal.values(line_GXL)
  received_GTK = row_here(told_GTY[..., :top_k], capacity, rank)
  if deal.columns == top_k:
    return received_GTK, None
  return received_GTK, lax.bitcast_convert_type(told_GTY[..., top_k:], jnp.float32)
