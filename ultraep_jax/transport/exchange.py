"""Tokens to the rows where they are computed, and rows back to tokens.

A token crosses to each rank that computes any of its assignments once, and fans out into its
rows there; its rows' sum comes back once. How it crosses is up to the implementation: kernels that
write into other GPUs' memory (``push_exchange``), or collectives: equal blocks by ``all_to_all``
(``block_exchange``), all tokens to all ranks where blocks would hold as many (``gather_exchange``),
or once to each node first, where that costs fewer bytes (``node_exchange``).
"""

from typing import NamedTuple, Protocol, runtime_checkable

from jax import lax

from pallas_kernels import Tunings
from ultraep_jax.config import DispatchDtype
from ultraep_jax.implementation import Implementations, first_that_can
from ultraep_jax.mesh import after
from ultraep_jax.transport import (
  block_exchange,
  gather_exchange,
  node_exchange,
  push_exchange,
  received,
)
from ultraep_jax.transport.local_rows import Placing
from ultraep_jax.types import Array, AxisName, Routes


class Crossing(Protocol):
  """How one rank's tokens cross in one round: made by ``send``, used in both directions.

  A pytree. All ranks of the mesh must call the same methods in the same order.
  """

  def dispatch(self, x_TD: Array) -> Array:
    """Carries other values ``[T, D]``, such as gradients, to the tokens' rows ``[C, D]``."""
    ...

  def combine(self, rows_CD: Array, gates: Array | None, /) -> Array:
    """Sums each token's rows, weighted by their gates: the adjoint of ``dispatch``.

    A rank's rows of a token are summed in float32, in the order of its assignments, and rounded
    to their dtype to cross. Sums over ranks are in float32, too, in an order that does not depend
    on timing. Kernels begin with the rows of the token's own rank, which are not rounded.

    Args:
      rows_CD: ``[C, D]``; rows that no token feeds are ignored, NaN included.
      gates: as ``Sent`` has them; ``None``: all are 1.

    Returns:
      ``[T, D]`` in the dtype of the rows.
    """
    ...


@runtime_checkable
class Collecting(Crossing, Protocol):
  """A crossing by collectives, whose numbers cross apart from rows."""

  def collect(self, value_C: Array) -> Array:
    """Brings a number of each row ``[C]`` back to its assignment; see ``combine_values``.

    Returns:
      ``[T, K]``, zero where the assignment is not of this round.
    """
    ...


class Sent(NamedTuple):
  """What a rank has received in a round.

  Attributes:
    rows_CD: the tokens at their rows, in their dtype and the same bits from every implementation.
      Rows that no token feeds may hold anything, NaN included.
    gates: float32, in the form that ``Crossing.combine`` takes.
    gate_C: ``[C]`` float32, at their rows; zero at rows that no token feeds.
    crossing: the way back.
  """

  rows_CD: Array
  gates: Array
  gate_C: Array
  crossing: Crossing


def send(
  x_TD: Array,
  gate_TK: Array,
  routes: Routes,
  round_index: Array | int,
  capacity: int,
  axis_name: AxisName,
  *,
  dispatch_dtype: DispatchDtype | None,
  node_ranks: int,
  implementations: Implementations,
  placing: Implementations,
  tunings: Tunings,
  rank: Array,
  count: Array | None,
) -> Sent:
  """Carries the tokens of a round to their rows.

  Args:
    x_TD: this rank's tokens.
    gate_TK: float32, the gates of their assignments.
    routes: this rank's routes.
    round_index: the round, the same on every rank.
    capacity: C.
    axis_name: the expert mesh axis.
    dispatch_dtype: that tokens cross in; every row holds its token as ``wire`` rounds it, also
      where the token does not leave its rank. ``None``: their own.
    node_ranks: ranks along the axis that are on one node, side by side.
    implementations: what to try, in order.
    placing: the same, for what collectives bring.
    tunings: how kernels are laid out.
    rank: this rank along the axis.
    count: for ``mesh.after``, where collectives must follow each other; ``None``: they need not.

  Raises:
    NotImplementedError: none of them can.
  """

  def by_kernels() -> Sent:
    rows_CD, gate_GTK, crossing = push_exchange.send(
      *(x_TD, gate_TK, routes, round_index, capacity, axis_name),
      dispatch_dtype=dispatch_dtype,
      tunings=tunings,
      rank=rank,
    )
    return Sent(rows_CD, gate_GTK, crossing.at_rows(gate_GTK), crossing)

  def by_collectives() -> Sent:
    num_tokens, top_k = routes.dest_TK.shape
    sizes = num_tokens, top_k, lax.axis_size(axis_name)
    arguments, place = (routes, round_index, capacity, axis_name), Placing(placing, tunings)
    if node_exchange.saves(*sizes, node_ranks):
      crossing = node_exchange.cross(*arguments, node_ranks, placing=place)
    elif gather_exchange.saves(*sizes) and received.fits(capacity, axis_name):
      crossing = gather_exchange.cross(*arguments, placing=place)
    else:
      crossing = block_exchange.cross(*arguments, placing=place)
    gate_C = crossing.spread(gate_TK)
    after_TD = x_TD if count is None else after(x_TD, count, gate_C)
    rows_CD = crossing.dispatch(after_TD, dispatch_dtype)
    return Sent(rows_CD, gate_C, gate_C, crossing)

  candidates = {"mosaic_gpu": by_kernels, "portable": by_collectives}
  return first_that_can(implementations, candidates)


def combine_values[T](
  crossing: Crossing, rows_CD: Array, value_C: Array, made: T, count: Array | None
) -> tuple[Array, Array, T]:
  """``Crossing.combine`` without gates, and a number of each row back at its assignment.

  Args:
    crossing: of all ranks.
    rows_CD: as for ``Crossing.combine``.
    value_C: float32, such as the gradients of gates.
    made: arrays that matmuls make. What is returned waits for them: they are not put off until
      after other layers. Nor does a collective of the numbers run beside the matmuls, whose last
      blocks would wait for the SMs that it holds while it waits for other ranks.
    count: as for ``send``.

  Returns:
    The sums ``[T, D]``; the numbers ``[T, K]``, zero where an assignment is not of this round;
    what was made.
  """
  if isinstance(crossing, push_exchange.PushCrossing):
    return lax.optimization_barrier((*crossing.combine_values(rows_CD, value_C), made))
  assert isinstance(crossing, Collecting)
  y_TD = crossing.combine(rows_CD, None)
  value_C, y_TD, made = lax.optimization_barrier((value_C, y_TD, made))
  value_C = value_C if count is None else after(value_C, count, y_TD)
  return y_TD, crossing.collect(value_C), made
