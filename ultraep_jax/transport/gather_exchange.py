"""The exchange of tokens by collectives where each rank needs most tokens of every other.

A block for a rank would hold all tokens then. So all ranks gather all tokens, and no lists are
needed of which go where. While tokens cross, kernels work on what a rank has itself.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from ultraep_jax.config import DispatchDtype
from ultraep_jax.implementation import first_that_can
from ultraep_jax.transport import block_exchange, local_rows, received, wire
from ultraep_jax.transport.local_rows import PORTABLY, Placing
from ultraep_jax.types import Array, AxisName, Routes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GatherCrossing(received.ToldCrossing):
  """How one rank's tokens cross in one round.

  Attributes:
    placing: how tokens that came get to their rows.
  """

  placing: Placing = dataclasses.field(default=PORTABLY, metadata={"static": True})

  @property
  def row_AK(self) -> Array:
    """Rows of the tokens of all ranks, one rank after another."""
    return self.received_GTK.reshape(-1, self.received_GTK.shape[2])

  @jax.named_scope("uep.dispatch")
  def dispatch(self, x_TD: Array, dtype: DispatchDtype | None = None) -> Array:
    """Rows that no token feeds hold anything."""
    packed, options = wire.pack(x_TD, dtype), {"capacity": self.capacity, "dtype": x_TD.dtype}
    if self.received_GTK.shape[0] == 1:
      return self.placing.place(packed, self.row_AK, **options)
    gathered = [lax.all_gather(array, self.axis_name, tiled=True) for array in packed]

    def own_first() -> Array:
      """A rank's own tokens get to their rows while those of others come."""
      rank, row_GTK = lax.axis_index(self.axis_name), self.received_GTK
      own_CD = self.placing.by_kernel(packed, row_GTK[rank], **options)
      other_AK = row_GTK.at[rank].set(-1).reshape(self.row_AK.shape)
      return self.placing.by_kernel(gathered, other_AK, **options, over_CD=own_CD)

    # In plain JAX each would write all rows.
    at_once = functools.partial(self.placing.place, gathered, self.row_AK, **options)
    candidates = {"mosaic_gpu": own_first, "portable": at_once}
    return first_that_can(self.placing.implementations, candidates)

  @jax.named_scope("uep.dispatch")
  def spread(self, value_TK: Array) -> Array:
    """Rows that no token feeds have zero."""
    return self.at_rows(lax.all_gather(value_TK, self.axis_name))

  @jax.named_scope("uep.combine")
  def combine(self, rows_CD: Array, gate_C: Array | None) -> Array:
    """The rank that computed the rows sums those of a token, the token's rank sums over ranks."""
    num_ranks, num_tokens, top_k = self.received_GTK.shape
    if num_ranks == 2:
      return self._combine_two(rows_CD, gate_C)
    part_AD = local_rows.sums(rows_CD, gate_C, self.row_AK)
    if num_ranks == 1:
      return part_AD
    part_AD = lax.all_to_all(part_AD, self.axis_name, 0, 0, tiled=True)
    part_GTD = part_AD.reshape(num_ranks, num_tokens, -1).astype(jnp.float32)
    leads_TK = block_exchange.leaders(self.dest_TK)[1]
    y_TD, token_T = jnp.zeros(part_GTD.shape[1:], jnp.float32), jnp.arange(num_tokens)
    for k in range(top_k):
      part_TD = part_GTD[self.dest_TK[:, k], token_T]
      y_TD += jnp.where(leads_TK[:, k, None], part_TD, 0)
    return y_TD.astype(rows_CD.dtype)

  @jax.named_scope("uep.combine")
  def collect(self, value_C: Array) -> Array:
    """Every assignment has one row: the sum over ranks is its number."""
    value_GTK = value_C[jnp.maximum(self.received_GTK, 0)]
    value_GTK = jnp.where(self.received_GTK >= 0, value_GTK, 0)
    return lax.psum_scatter(value_GTK, self.axis_name)

  def _combine_two(self, rows_CD: Array, gate_C: Array | None) -> Array:
    """``combine`` of two ranks: the rank's own sums are made while the other's cross."""
    rank = lax.axis_index(self.axis_name)
    theirs_TD = local_rows.sums(rows_CD, gate_C, self.received_GTK[1 - rank])
    # Barriers, because XLA makes all sums together otherwise: before any cross, or after.
    rows_CD, theirs_TD = lax.optimization_barrier((rows_CD, theirs_TD))
    theirs_TD = lax.ppermute(theirs_TD, self.axis_name, [(0, 1), (1, 0)])
    own_TD = local_rows.sums(rows_CD, gate_C, self.received_GTK[rank])
    own_TD = lax.optimization_barrier(own_TD)
    # A sum of two has one order.
    return (own_TD.astype(jnp.float32) + theirs_TD.astype(jnp.float32)).astype(rows_CD.dtype)


def saves(num_tokens: int, top_k: int, num_ranks: int) -> bool:
  """Whether blocks would hold all tokens.

  >>> saves(8192, top_k=8, num_ranks=8), saves(8192, top_k=8, num_ranks=16)
  (True, False)
  """
  return block_exchange.block_size(num_tokens, num_tokens * top_k, num_ranks) == num_tokens


@jax.named_scope("uep.dispatch")
def cross(
  routes: Routes,
  round_index: Array | int,
  capacity: int,
  axis_name: AxisName,
  *,
  placing: Placing = PORTABLY,
) -> GatherCrossing:
  """Tells every rank the rows of a round; see ``exchange.send``."""
  dest_TK, row_TK = received.of_round(routes, round_index, capacity)
  received_GTK = received.rows(dest_TK, row_TK, capacity, axis_name)
  return GatherCrossing(axis_name, capacity, dest_TK, received_GTK, placing)
