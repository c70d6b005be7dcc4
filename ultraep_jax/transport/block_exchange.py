"""The exchange of tokens by collectives, right on every backend.

A token crosses to each rank that computes any of its assignments once, and fans out into its
rows there; its rows' sum comes back once. Ranks exchange equal blocks of tokens with
``all_to_all``, the fastest collective that JAX has for it; a rank with more tokens for some
peer than a block holds takes further steps, so nothing is dropped and no buffer is sized for
the worst case. Where a kernel can, it writes what came to its rows, and no others.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from ultraep_jax.config import DispatchDtype
from ultraep_jax.mesh import mesh_max
from ultraep_jax.planning.load import position_in_group
from ultraep_jax.transport import local_rows, received, wire
from ultraep_jax.transport.local_rows import PORTABLY, Placing
from ultraep_jax.types import Array, AxisName, Routes

Groups = tuple[tuple[int, ...], ...]  # of ranks, all equally large; each exchanges by itself

# How much a block exceeds the mean number of tokens that two ranks exchange.
_BLOCK_SLACK = 1.25


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockCrossing:
  """How one rank's tokens cross in one round; see ``exchange.Collecting``.

  N is the tokens in a block, A = G·N the tokens a rank receives in a step.

  Attributes:
    axis_name: the expert mesh axis.
    groups: the ranks along it that exchange with each other, and count from 0 in their group;
      ``None``: all G.
    capacity: C, rows of the round.
    block: N.
    dest_TK: the rank that computes the assignment in this round, −1 if none.
    row_TK: the assignment's row in this round.
    leads_TK: whether it is the first of its token's assignments for that rank.
    position_TK: its token's place in the list of tokens for that rank.
    row_AK: the rows on this rank that the tokens received in the first step feed, −1 where an
      assignment runs elsewhere.
    steps: steps that the longest list on the mesh needs, or None if one always suffices.
    placing: how tokens that came get to their rows.
  """

  axis_name: AxisName = dataclasses.field(metadata={"static": True})
  groups: Groups | None = dataclasses.field(metadata={"static": True})
  capacity: int = dataclasses.field(metadata={"static": True})
  block: int = dataclasses.field(metadata={"static": True})
  dest_TK: Array
  row_TK: Array
  leads_TK: Array
  position_TK: Array
  row_AK: Array
  steps: Array | None
  placing: Placing = dataclasses.field(default=PORTABLY, metadata={"static": True})

  @jax.named_scope("uep.dispatch")
  def dispatch(self, x_TD: Array, dtype: DispatchDtype | None = None) -> Array:
    """Rows that no token feeds are zero, or anything where a kernel writes the others."""
    return self.dispatch_packed(wire.pack(x_TD, dtype), x_TD.dtype)

  def dispatch_packed(self, packed: Sequence[Array], dtype: jnp.dtype) -> Array:
    """``dispatch`` of what ``wire.pack`` made of tokens of this dtype."""

    def received(i: Array | int) -> list[Array]:
      token_A, _ = _outgoing(self, i)
      return [_swap(array[token_A], self) for array in packed]

    def step(i: Array | int, row_AK: Array, rows_CD: Array) -> Array:
      return local_rows.place_over(rows_CD, received(i), row_AK)

    rows_CD = self.placing.place(received(0), self.row_AK, self.capacity, dtype)
    return _further_steps(self, step, rows_CD)

  @jax.named_scope("uep.combine")
  def combine(self, rows_CD: Array, gate_C: Array | None) -> Array:
    """The rank that computed the rows sums those of a token, the token's rank sums over ranks."""

    def step(i: Array | int, row_AK: Array, y_TD: Array) -> Array:
      back_AD = _swap(local_rows.sums(rows_CD, gate_C, row_AK), self)
      here_TK, place_TK = _places(self, i)
      for here_T, place_T in zip((here_TK & self.leads_TK).T, place_TK.T, strict=True):
        y_TD += jnp.where(here_T[:, None], back_AD[place_T].astype(jnp.float32), 0)
      return y_TD

    zero_TD = jnp.zeros((self.dest_TK.shape[0], rows_CD.shape[1]), jnp.float32)
    return _steps(self, step, zero_TD).astype(rows_CD.dtype)

  @jax.named_scope("uep.dispatch")
  def spread(self, value_TK: Array) -> Array:
    """Rows that no token feeds are zero."""

    def step(i: Array | int, row_AK: Array, value_C: Array) -> Array:
      token_A, sent_AK = _outgoing(self, i)
      received_AK = _swap(jnp.where(sent_AK, value_TK[token_A], 0), self)
      source_C = local_rows.feeding(row_AK, self.capacity)
      return jnp.where(source_C >= 0, received_AK.reshape(-1)[source_C], value_C)

    return _steps(self, step, jnp.zeros(self.capacity, value_TK.dtype))

  @jax.named_scope("uep.combine")
  def collect(self, value_C: Array) -> Array:
    """The adjoint of ``spread``."""

    def step(i: Array | int, row_AK: Array, value_TK: Array) -> Array:
      value_AK = _swap(jnp.where(row_AK >= 0, value_C[row_AK], 0), self)
      here_TK, place_TK = _places(self, i)
      column_1K = jnp.arange(row_AK.shape[1])[None]
      return jnp.where(here_TK, value_AK[place_TK, column_1K], value_TK)

    return _steps(self, step, jnp.zeros(self.dest_TK.shape, value_C.dtype))


@jax.named_scope("uep.dispatch")
def cross(
  routes: Routes,
  round_index: Array | int,
  capacity: int,
  axis_name: AxisName,
  *,
  placing: Placing = PORTABLY,
) -> BlockCrossing:
  """Lists the tokens that cross in a round; see ``exchange.send``."""
  num_tokens, top_k = routes.dest_TK.shape
  block = block_size(num_tokens, num_tokens * top_k, lax.axis_size(axis_name))
  assignments = received.of_round(routes, round_index, capacity)
  return among(None, *assignments, capacity, axis_name, block, placing)


def block_size(num_tokens: int, assignments: int, num_ranks: int) -> int:
  """N, for a rank's tokens, so many of whose assignments are on ``num_ranks`` ranks."""
  return min(num_tokens, math.ceil(assignments / num_ranks * _BLOCK_SLACK))


def among(
  groups: Groups | None,
  dest_TK: Array,
  row_TK: Array,
  capacity: int,
  axis_name: AxisName,
  block: int,
  placing: Placing,
) -> BlockCrossing:
  """A crossing among the ranks of each group.

  Args:
    groups: as in ``BlockCrossing``.
    dest_TK: the rank, counted in its group, that computes the assignment, −1 if none.
    row_TK: the assignment's row there.
    capacity: C.
    axis_name: the expert mesh axis.
    block: N, at most T.
    placing: as in ``BlockCrossing``.
  """
  num_ranks = _num_ranks(axis_name, groups)
  num_tokens = dest_TK.shape[0]
  leader_TK, leads_TK = leaders(dest_TK)
  position_A, count_G = position_in_group(
    jnp.where(leads_TK, dest_TK, num_ranks).reshape(-1), num_ranks
  )
  position_TK = jnp.take_along_axis(position_A.reshape(dest_TK.shape), leader_TK, axis=1)
  crossing = BlockCrossing(
    axis_name=axis_name,
    groups=groups,
    capacity=capacity,
    block=block,
    dest_TK=dest_TK,
    row_TK=row_TK,
    leads_TK=leads_TK,
    position_TK=position_TK,
    row_AK=row_TK[:0],
    steps=mesh_max(-(-jnp.max(count_G) // block)) if block < num_tokens else None,
    placing=placing,
  )
  return dataclasses.replace(crossing, row_AK=_announce_rows(crossing, 0))


def leaders(dest_TK: Array) -> tuple[Array, Array]:
  """The first of its token's assignments for an assignment's rank, and whether it is that itself.

  The first one stands for all of them.
  """
  leader_TK = jnp.argmax(dest_TK[:, :, None] == dest_TK[:, None, :], axis=2)
  return leader_TK, (dest_TK >= 0) & (leader_TK == jnp.arange(dest_TK.shape[1])[None])


def _steps[Carry](
  crossing: BlockCrossing,
  step: Callable[[Array | int, Array, Carry], Carry],
  carry: Carry,
) -> Carry:
  """Runs the first step, with the rows already announced, and the rare further ones."""
  carry = step(0, crossing.row_AK, carry)  # its result varies over every axis that its inputs do
  return _further_steps(crossing, step, carry)


def _further_steps[Carry](
  crossing: BlockCrossing,
  step: Callable[[Array | int, Array, Carry], Carry],
  carry: Carry,
) -> Carry:
  """Runs those after the first."""
  if crossing.steps is None:
    return carry

  def further(i: Array, carry: Carry) -> Carry:
    return step(i, _announce_rows(crossing, i), carry)

  return lax.fori_loop(jnp.int32(1), crossing.steps, further, carry)


def _announce_rows(crossing: BlockCrossing, step: Array | int) -> Array:
  """Tells each receiver the rows that the tokens of a step feed, ``[A, K]``."""
  token_A, sent_AK = _outgoing(crossing, step)
  return _swap(jnp.where(sent_AK, crossing.row_TK[token_A], -1), crossing)


def _outgoing(crossing: BlockCrossing, step: Array | int) -> tuple[Array, Array]:
  """The tokens of a step's blocks ``[A]``, and the assignments each carries ``[A, K]``."""
  num_sent = _num_ranks(crossing.axis_name, crossing.groups) * crossing.block
  here_TK, place_TK = _places(crossing, step)
  place_TK = jnp.where(here_TK & crossing.leads_TK, place_TK, num_sent)
  token_T1 = jnp.arange(place_TK.shape[0], dtype=jnp.int32)[:, None]
  token_A = jnp.full(num_sent, -1, jnp.int32)
  token_A = token_A.at[place_TK].set(jnp.broadcast_to(token_T1, place_TK.shape), mode="drop")
  real_A, token_A = token_A >= 0, jnp.maximum(token_A, 0)
  rank_A = jnp.arange(num_sent, dtype=jnp.int32) // crossing.block
  return token_A, real_A[:, None] & (crossing.dest_TK[token_A] == rank_A[:, None])


def _places(crossing: BlockCrossing, step: Array | int) -> tuple[Array, Array]:
  """Which assignments cross in a step, and where their token stands in the blocks."""
  local_TK = crossing.position_TK - step * crossing.block
  here_TK = (crossing.dest_TK >= 0) & (local_TK >= 0) & (local_TK < crossing.block)
  return here_TK, jnp.where(here_TK, crossing.dest_TK * crossing.block + local_TK, 0)


def _swap(block_AX: Array, crossing: BlockCrossing) -> Array:
  """Sends block g of ``[G·N, ...]`` to rank g and returns the blocks received."""
  return lax.all_to_all(
    block_AX, crossing.axis_name, 0, 0, tiled=True, axis_index_groups=crossing.groups
  )


def _num_ranks(axis_name: AxisName, groups: Groups | None) -> int:
  return lax.axis_size(axis_name) if groups is None else len(groups[0])
