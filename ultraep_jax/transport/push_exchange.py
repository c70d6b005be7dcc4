"""The exchange of tokens by kernels that write into other GPUs' memory.

Every rank is told the rows of all assignments first, by a small ``all_gather``; then it knows
what it receives, and the kernels need no lists.
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
    tunings: how the kernels are laid out.
  """

  row_TK: Array
  tunings: Tunings = dataclasses.field(default=UNTUNED, metadata={"static": True})

  @jax.named_scope("uep.dispatch")
  def dispatch(self, x_TD: Array, dtype: DispatchDtype | None = None) -> Array:
    """Rows that no token feeds hold anything."""
    assignments = self.dest_TK, self.row_TK, self.received_GTK
    sizes: Any = {"capacity": self.capacity, "axis_name": self.axis_name}
    if dtype is None:
      sizes["tuning"] = self._tuning("dispatch", x_TD)
      return kernels.dispatch([x_TD], *assignments, **sizes)[0]
    value_TD, scale_TB = wire.pack(x_TD, dtype)
    sizes["tuning"] = self._tuning("dispatch scaled", value_TD)
    # Multiplied on arrival: a pass of its own would read and write all rows once more.
    return kernels.dispatch_scaled(value_TD, scale_TB, *assignments, dtype=x_TD.dtype, **sizes)

  @jax.named_scope("uep.combine")
  def combine(self, rows_CD: Array, gate_C: Array | None) -> Array:
    """Sums at the rank of the rows, then at the token's."""
    gate_GTK = None if gate_C is None else self.at_rows(gate_C)
    return kernels.combine(
      rows_CD,
      gate_GTK,
      self.dest_TK,
      self.received_GTK,
      axis_name=self.axis_name,
      tuning=self._tuning("combine", rows_CD),
    )

  def _tuning(self, operation: str, token_XD: Array) -> Any:
    return self.tunings.find(operation, token_XD.shape[1] * token_XD.dtype.itemsize)


@jax.named_scope("uep.dispatch")
def cross(
  routes: Routes,
  round_index: Array | int,
  capacity: int,
  axis_name: AxisName,
  *,
  width: int,
  dtype: object,
  tunings: Tunings = UNTUNED,
) -> PushCrossing:
  """Tells every rank the rows of a round; see ``exchange.cross``.

  Raises:
    NotImplementedError: sizes or a mesh that the kernels do not handle.
  """
  kernels.check_mesh(axis_name)
  kernels.check_sizes(width, dtype)
  if not received.fits(capacity, axis_name):
    raise NotImplementedError(f"capacity: too large for int32 on all ranks: {capacity}")
  dest_TK, row_TK = received.of_round(routes, round_index, capacity)
  received_GTK = received.rows(dest_TK, row_TK, capacity, axis_name)
  return PushCrossing(axis_name, capacity, dest_TK, received_GTK, row_TK, tunings)
