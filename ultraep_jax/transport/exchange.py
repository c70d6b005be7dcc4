"""Tokens to the rows where they are computed, and rows back to tokens.

A token crosses to each rank that computes any of its assignments once, and fans out into its
rows there; its rows' sum comes back once. How it crosses is up to the implementation: kernels that
write into other GPUs' memory (``push_exchange``), or collectives: equal blocks by ``all_to_all``
(``block_exchange``), all tokens to all ranks where blocks would hold as many (``gather_exchange``),
or once to each node first, where that costs fewer bytes (``node_exchange``).
"""

from typing import Protocol

from jax import lax

from pallas_kernels import Tunings
from ultraep_jax.config import DispatchDtype
from ultraep_jax.implementation import Implementations, first_that_can
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
  """How one rank's tokens cross in one round: built by ``cross``, used in both directions.

  A pytree. All ranks of the mesh must call the same methods in the same order.
  """

  def dispatch(self, x_TD: Array, dtype: DispatchDtype | None = None) -> Array:
    """Carries tokens ``[T, D]`` to their rows ``[C, D]``.

    Args:
      x_TD: tokens.
      dtype: that they cross in; every row holds its token as ``wire`` rounds it, also where the
        token does not leave its rank. ``None``: their own.

    Returns:
      ``[C, D]`` in the dtype of the tokens, the same bits from every implementation. Rows that
      no token feeds may hold anything, NaN included.
    """
    ...

  def combine(self, rows_CD: Array, gate_C: Array | None) -> Array:
    """Sums each token's rows, weighted by their gates: the adjoint of ``dispatch``.

    Both sums, of a token's rows on one rank and over ranks, are in float32 and in the order of
    the token's assignments; what crosses is rounded to the dtype of the rows.

    Args:
      rows_CD: ``[C, D]``; rows that no token feeds are ignored, NaN included.
      gate_C: ``[C]`` float32; ``None``: all gates are 1.

    Returns:
      ``[T, D]`` in the dtype of the rows.
    """
    ...

  def spread(self, value_TK: Array) -> Array:
    """Carries one number per assignment, such as its gate, to its row ``[C]``."""
    ...

  def collect(self, value_C: Array) -> Array:
    """Brings one number per row back to its assignment: the adjoint of ``spread``.

    Returns:
      ``[T, K]``, zero where the assignment is not of this round.
    """
    ...


def cross(
  routes: Routes,
  round_index: Array | int,
  capacity: int,
  axis_name: AxisName,
  *,
  width: int,
  dtype: object,
  node_ranks: int,
  implementations: Implementations,
  placing: Implementations,
  tunings: Tunings,
) -> Crossing:
  """Lists the tokens that cross in a round.

  Args:
    routes: this rank's routes.
    round_index: the round, the same on every rank.
    capacity: C.
    axis_name: the expert mesh axis.
    width: D.
    dtype: of tokens and rows.
    node_ranks: ranks along the axis that are on one node, side by side.
    implementations: what to try, in order.
    placing: the same, for what collectives bring.
    tunings: how kernels are laid out.

  Raises:
    NotImplementedError: none of them can.
  """

  def portable() -> Crossing:
    num_tokens, top_k = routes.dest_TK.shape
    sizes = num_tokens, top_k, lax.axis_size(axis_name)
    place = Placing(placing, tunings)
    if node_exchange.saves(*sizes, node_ranks):
      return node_exchange.cross(
        routes, round_index, capacity, axis_name, node_ranks, placing=place
      )
    if gather_exchange.saves(*sizes) and received.fits(capacity, axis_name):
      return gather_exchange.cross(routes, round_index, capacity, axis_name, placing=place)
    return block_exchange.cross(routes, round_index, capacity, axis_name, placing=place)

  candidates = {
    "mosaic_gpu": lambda: push_exchange.cross(
      routes, round_index, capacity, axis_name, width=width, dtype=dtype, tunings=tunings
    ),
    "portable": portable,
  }
  return first_that_can(implementations, candidates)
