"""The exchange of tokens over several nodes in plain JAX: a token crosses the network once a node.

The ranks in the same place of their nodes form a *line*. A rank gathers the tokens of its line,
then serves the ranks of its node as if all of these were its own, by blocks. Results go back the
same way: they are summed inside the node, and cross the network once. Blocks for each rank carry a
token over the network as often as ranks of another node compute for it.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ultraep_jax.config import DispatchDtype
from ultraep_jax.transport import block_exchange, received, wire
from ultraep_jax.transport.block_exchange import BlockCrossing, Groups
from ultraep_jax.transport.local_rows import PORTABLY, Placing
from ultraep_jax.types import Array, AxisName, Routes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NodeCrossing:
  """How one rank's tokens cross in one round; see ``exchange.Collecting``.

  L is the nodes, X = L·T the tokens of a line.

  Attributes:
    axis_name: the expert mesh axis.
    lines: ranks in the same place of all nodes.
    inside: the crossing inside each node, of the tokens of a line.
  """

  axis_name: AxisName = dataclasses.field(metadata={"static": True})
  lines: Groups = dataclasses.field(metadata={"static": True})
  inside: BlockCrossing

  @jax.named_scope("uep.dispatch")
  def dispatch(self, x_TD: Array, dtype: DispatchDtype | None = None) -> Array:
    """Rows that no token feeds are zero, or anything where a kernel writes the others."""
    packed = [_gather(array, self.axis_name, self.lines) for array in wire.pack(x_TD, dtype)]
    return self.inside.dispatch_packed(packed, x_TD.dtype)

  @jax.named_scope("uep.combine")
  def combine(self, rows_CD: Array, gate_C: Array | None) -> Array:
    """Sums on the rank of the rows, then over the ranks of a node, then over nodes."""
    return self._sum_home(self.inside.combine(rows_CD, gate_C))

  @jax.named_scope("uep.dispatch")
  def spread(self, value_TK: Array) -> Array:
    """Rows that no token feeds are zero."""
    return self.inside.spread(_gather(value_TK, self.axis_name, self.lines))

  @jax.named_scope("uep.combine")
  def collect(self, value_C: Array) -> Array:
    """The adjoint of ``spread``: an assignment has a row on one node, others have zero."""
    return self._sum_home(self.inside.collect(value_C))

  def _sum_home(self, part_XY: Array) -> Array:
    """Brings the parts of each token to its rank, which adds them up in float32."""
    part_XY = lax.all_to_all(
      part_XY, self.axis_name, 0, 0, tiled=True, axis_index_groups=self.lines
    )
    parts = jnp.split(part_XY.astype(jnp.float32), len(self.lines[0]))
    return functools.reduce(jnp.add, parts).astype(part_XY.dtype)


def saves(num_tokens: int, top_k: int, num_ranks: int, node_ranks: int) -> bool:
  """Whether a node's blocks hold more than all tokens of a rank, which cross once here.

  >>> saves(8192, 8, num_ranks=32, node_ranks=8), saves(8192, 8, num_ranks=128, node_ranks=8)
  (True, False)
  """
  block = block_exchange.block_size(num_tokens, num_tokens * top_k, num_ranks)
  return node_ranks < num_ranks and num_tokens < node_ranks * block


def network_tokens(num_tokens: int, top_k: int, num_ranks: int, node_ranks: int) -> int:
  """Tokens that a rank sends over the network in a dispatch of one step, and as many in a combine.

  >>> network_tokens(8192, 8, num_ranks=32, node_ranks=8) // 8192
  3
  """
  if saves(num_tokens, top_k, num_ranks, node_ranks):
    return (num_ranks // node_ranks - 1) * num_tokens
  block = block_exchange.block_size(num_tokens, num_tokens * top_k, num_ranks)
  return (num_ranks - node_ranks) * block


@jax.named_scope("uep.dispatch")
def cross(
  routes: Routes,
  round_index: Array | int,
  capacity: int,
  axis_name: AxisName,
  node_ranks: int,
  *,
  placing: Placing = PORTABLY,
) -> NodeCrossing:
  """Lists the tokens that cross in a round; see ``exchange.send``."""
  num_tokens, top_k = routes.dest_TK.shape
  rank_LR = np.arange(lax.axis_size(axis_name)).reshape(-1, node_ranks).tolist()
  nodes, lines = tuple(map(tuple, rank_LR)), tuple(zip(*rank_LR, strict=True))
  dest_XK, row_XK = (
    _gather(array, axis_name, lines) for array in received.of_round(routes, round_index, capacity)
  )
  is_here_XK = (dest_XK >= 0) & (dest_XK // node_ranks == lax.axis_index(axis_name) // node_ranks)
  # Of the tokens of all nodes, each node computes an even share.
  block = block_exchange.block_size(len(nodes) * num_tokens, num_tokens * top_k, node_ranks)
  inside = block_exchange.among(
    nodes,
    jnp.where(is_here_XK, dest_XK % node_ranks, -1),
    row_XK,
    capacity,
    axis_name,
    block,
    placing,
  )
  return NodeCrossing(axis_name, lines, inside)


def _gather(value_TY: Array, axis_name: AxisName, lines: Groups) -> Array:
  """``[X, Y]`` of a line's ranks, one after another."""
  return lax.all_gather(value_TY, axis_name, axis_index_groups=lines, tiled=True)
