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
_MOST_OF_LINE = 512  # where a token has fewer: lines of all workers must fit beside their tiles


@dataclasses.dataclass(frozen=True)
class Deal:
  """How T tokens are dealt, and how many numbers a line has of each.

  Attributes:
    tokens: T.
    columns: numbers of a token: K, or more where others travel beside the assignments.
    chunk: tokens of a chunk.
    steps: chunks of every worker; the last ones may be past the last token.
    num_workers: of a rank.
  """

  tokens: int
  columns: int
  chunk: int
  steps: int
  num_workers: int

  @classmethod
  def of(cls, tokens: int, columns: int, tuning: ExchangeTuning) -> "Deal":
    num_workers = tuning.num_workers
    chunk = max(-(-tokens // (num_workers * tuning.steps)), 1)
    chunk = max(min(chunk, _MOST_OF_LINE // max(columns, 1)), 1)  # then there are more steps
    return cls(tokens, columns, chunk, -(-tokens // (num_workers * chunk)), num_workers)

  @property
  def line(self) -> int:
    """Values of a line."""
    return -(-self.chunk * self.columns // _LINE) * _LINE

  @property
  def chunks(self) -> int:
    """Lines of a table."""
    return self.steps * self.num_workers

  def table(self, value_XTY: Array, fill: int | float) -> Array:
    """``[..., T, columns]`` as lines ``[..., chunks, line]``, chunk by chunk."""
    *lead, tokens, columns = value_XTY.shape
    none = [(0, 0)] * len(lead)
    value_XTY = jnp.pad(
      value_XTY, [*none, (0, self.chunks * self.chunk - tokens), (0, 0)], constant_values=fill
    )
    line_XL = value_XTY.reshape(*lead, self.chunks, self.chunk * columns)
    padding = (0, self.line - self.chunk * columns)
    return jnp.pad(line_XL, [*none, (0, 0), padding], constant_values=fill)

  def values(self, line_XL: Array) -> Array:
    """``[..., T, columns]`` of lines ``[..., chunks, line]``: the inverse of ``table``."""
    lead = line_XL.shape[:-2]
    used_XL = line_XL[..., : self.chunk * self.columns]
    return used_XL.reshape(*lead, -1, self.columns)[..., : self.tokens, :]

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


def check_assignments(dest_TK: Array) -> None:
  """Raises ValueError unless the ranks of assignments are int32 ``[T, K]``."""
  if dest_TK.ndim != 2 or dest_TK.dtype != jnp.int32:
    raise ValueError(f"dest_TK: expected int32 [T, K], got {dest_TK.dtype} {dest_TK.shape}")
