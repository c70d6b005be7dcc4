"""The exchange of tokens by kernels that write into other GPUs' memory.

A dispatch tells every rank the rows of all assignments, in lines that travel with the tokens; the
first one of a round their gates, too. Then a rank knows what it has for whom, and combine needs no
lists of others.
"""

import dataclasses
from typing import Any

import jax

import pallas_kernels as kernels
from pallas_kernels import UNTUNED, Tunings
from ultraep_jax.config import DispatchDtype
from ultraep_jax.transport import received, wire
from ultraep_jax.types import Array, AxisName, Routes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PushCrossing(received.ToldCrossing):
  """How one rank's tokens cross in one round.

  Attributes:
    row_TK: the assignment's row in this round.
    rank: this rank along the axis.
    tunings: how the kernels are laid out.
  """

  row_TK: Array
  rank: Array
  tunings: Tunings = dataclasses.field(default=UNTUNED, metadata={"static": True})

  @jax.named_scope("uep.dispatch")
  def dispatch(self, x_TD: Array) -> Array:
    """Rows that no token feeds hold anything."""
    assignments = x_TD, None, self.dest_TK, self.row_TK, None
    sizes = self.capacity, self.axis_name
    return _dispatch(*assignments, *sizes, self.rank, self.tunings).arrays[0]

  @jax.named_scope("uep.combine")
  def combine(self, rows_CD: Array, gate_GTK: Array | None) -> Array:
    """Sums at the rank of the rows, then at the token's; gates are those of all assignments."""
    return kernels.combine(
      rows_CD,
      gate_GTK,
      self.dest_TK,
      self.received_GTK,
      axis_name=self.axis_name,
      rank=self.rank,
      tuning=_tuning(self.tunings, "combine", rows_CD),
    )

  @jax.named_scope("uep.combine")
  def combine_values(self, rows_CD: Array, value_C: Array) -> tuple[Array, Array]:
    """The same without gates, and a number of each row at its assignment, by one kernel."""
    return kernels.combine_values(
      rows_CD,
      value_C,
      self.dest_TK,
      self.received_GTK,
      axis_name=self.axis_name,
      rank=self.rank,
      tuning=_tuning(self.tunings, "combine", rows_CD),
    )


@jax.named_scope("uep.dispatch")
def send(
  x_TD: Array,
  gate_TK: Array,
  routes: Routes,
  round_index: Array | int,
  capacity: int,
  axis_name: AxisName,
  *,
  rank: Array,
  dispatch_dtype: DispatchDtype | None = None,
  tunings: Tunings = UNTUNED,
) -> tuple[Array, Array, PushCrossing]:
  """Dispatches the tokens of a round; see ``exchange.send``.

  Returns:
    The rows ``[C, D]``; ``gate_GTK``, the gates of all assignments of all ranks; the crossing.

  Raises:
    NotImplementedError: sizes or a mesh that the kernels do not handle.
  """
  kernels.check_mesh(axis_name)
  kernels.check_sizes(x_TD.shape[1], x_TD.dtype)
  if not received.fits(capacity, axis_name):
    raise NotImplementedError(f"capacity: too large for int32 on all ranks: {capacity}")
  dest_TK, row_TK = received.of_round(routes, round_index, capacity)
  assignments = x_TD, dispatch_dtype, dest_TK, row_TK, gate_TK
  (rows_CD,), received_GTK, gate_GTK = _dispatch(*assignments, capacity, axis_name, rank, tunings)
  assert gate_GTK is not None  # gates were sent
  return (
    rows_CD,
    gate_GTK,
    PushCrossing(axis_name, capacity, dest_TK, received_GTK, row_TK, rank, tunings),
  )


def _dispatch(
  x_TD: Array,
  dtype: DispatchDtype | None,
  dest_TK: Array,
  row_TK: Array,
  gate_TK: Array | None,
  capacity: int,
  axis_name: AxisName,
  rank: Array,
  tunings: Tunings,
) -> "kernels.Dispatched":
  assignments = dest_TK, row_TK, gate_TK
  sizes: Any = {"capacity": capacity, "axis_name": axis_name, "rank": rank}
  if dtype is None:
    sizes["tuning"] = _tuning(tunings, "dispatch", x_TD)
    return kernels.dispatch([x_TD], *assignments, **sizes)
  value_TD, scale_TB = wire.pack(x_TD, dtype)
  sizes["tuning"] = _tuning(tunings, "dispatch scaled", value_TD)
  # Multiplied on arrival: a pass of its own would read and write all rows once more.
  return kernels.dispatch_scaled(value_TD, scale_TB, *assignments, dtype=x_TD.dtype, **sizes)


def _tuning(tunings: Tunings, operation: str, token_XD: Array) -> Any:
  return tunings.find(operation, token_XD.shape[1] * token_XD.dtype.itemsize)
