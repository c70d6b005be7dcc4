"""Tokens dealt to the workers of a kernel in chunks, the same way on every rank.

A *chunk* is a few consecutive tokens. Chunks are dealt to the workers in turn, so worker w of one
rank handles exactly the chunks that worker w of every other rank handles, and two such workers
can agree about a chunk with a semaphore of their own. What a worker must know about the
assignments of a chunk lies in one *line* of a table, which it loads as a whole.

Chunks of 2 tokens, 3 workers::

  tokens   0 1 | 2 3 | 4 5 | 6 7 | 8 9
  worker    0     1     2     0     1
"""

import dataclasses

import jax.numpy as jnp
from jax import lax

from pallas_kernels.support import Array, AxisName
from pallas_kernels.transfer import peers
from pallas_kernels.transfer.tuning import ExchangeTuning

_LINE = 32  # int32 or float32 values: 128 bytes, what shared memory and bulk copies like


@dataclasses.dataclass(frozen=True)
class Deal:
  """How T tokens with K assignments each are dealt.

  Attributes:
    tokens: T.
    top_k: K.
    chunk: tokens of a chunk.
    steps: chunks of every worker; the last ones may be past the last token.
    num_workers: of a rank.
  """

  tokens: int
  top_k: int
  chunk: int
  steps: int
  num_workers: int

  @classmethod
  def of(cls, tokens: int, top_k: int, tuning: ExchangeTuning) -> "Deal":
    num_workers = tuning.num_workers
    chunk = max(-(-tokens // (num_workers * tuning.steps)), 1)
    return cls(tokens, top_k, chunk, -(-tokens // (num_workers * chunk)), num_workers)

  @property
  def line(self) -> int:
    """Values of a line."""
    return -(-self.chunk * self.top_k // _LINE) * _LINE

  def table(self, value_XTK: Array, fill: int | float) -> Array:
    """``[..., T, K]`` as lines ``[..., steps * num_workers, line]``, chunk by chunk."""
    *lead, tokens, top_k = value_XTK.shape
    chunks = self.steps * self.num_workers
    none = [(0, 0)] * len(lead)
    value_XTK = jnp.pad(
      value_XTK, [*none, (0, chunks * self.chunk - tokens), (0, 0)], constant_values=fill
    )
    line_XL = value_XTK.reshape(*lead, chunks, self.chunk * top_k)
    padding = (0, self.line - self.chunk * top_k)
    return jnp.pad(line_XL, [*none, (0, 0), padding], constant_values=fill)

  def chunk_index(self, step: Array, worker: Array) -> Array:
    """The chunk of a worker's step (inside a kernel)."""
    return step * self.num_workers + worker


def pieces(width: int, most: int) -> list[tuple[int, int]]:
  """Start and length of the parts of a row, none longer than ``most``."""
  return [(start, min(most, width - start)) for start in range(0, width, most)]


def peer(index: int, axis_name: AxisName) -> Array:
  """The ``index``-th rank after this one, so that not all ranks begin with the same."""
  num_ranks = lax.axis_size(axis_name)
  return lax.rem(peers.rank(axis_name) + jnp.int32(index), jnp.int32(num_ranks))


def leads(dest_TK: Array) -> Array:
  """Whether an assignment is the first of its token's for its rank.

  All elementwise, to become part of the table made from it: a search along the few choices of a
  token would be a slow kernel of its own before the dispatch.
  """
  leads_TK = dest_TK >= 0
  for back in range(1, dest_TK.shape[1]):
    earlier_TK = jnp.pad(dest_TK[:, :-back], ((0, 0), (back, 0)), constant_values=-1)
    leads_TK &= dest_TK != earlier_TK
  return leads_TK


def check_assignments(dest_TK: Array, received_GTK: Array, axis_name: AxisName) -> None:
  """Raises ValueError unless the shapes and dtypes of a kernel's assignments fit together."""
  expected = (lax.axis_size(axis_name), *dest_TK.shape)
  if dest_TK.ndim != 2 or dest_TK.dtype != jnp.int32:
    raise ValueError(f"dest_TK: expected int32 [T, K], got {dest_TK.dtype} {dest_TK.shape}")
  if received_GTK.shape != expected or received_GTK.dtype != jnp.int32:
    raise ValueError(
      f"received_GTK: expected int32 {expected}, got {received_GTK.dtype} {received_GTK.shape}"
    )
