"""How many rows a rank's buffer holds, and how many rounds of these a plan needs.

A small buffer costs more than memory saves: a plan that may not exceed it makes copies that only
serve to fit. Few tokens do not hide these behind their matmuls. So small batches have more room.

Four ranks, all tokens on the 32 experts of one. A buffer of twice the mean needs 16 copies, one of
three times the mean 8.
"""

import math

import jax.numpy as jnp

from ultraep_jax.config import BalanceConfig
from ultraep_jax.types import Array, Plan

_ROW_UNIT = 8  # of rows that kernels take
_TILE_ROWS = 64  # of many rows, as of the kernels' tiles: none copies gates to pad them
_TIGHT, _AMPLE = 1.25, 2  # rows over the mean
# Bytes of tokens, by ``capacity_factor="auto"``. The rows that a layer keeps for its gradients stay
# until the backward pass, those of a layer without gradients until its end.
_ALL_BYTES = 64 << 20  # of all ranks: a buffer holds them all
# Of a rank: ``_AMPLE`` up to these; all rows up to the first, where that spares a plan or a loop.
_KEPT_BYTES, _TRANSIENT_BYTES = 512 << 20, 2 << 30
_LEAST_BYTES = 1 << 30  # of a rank: ``least`` up to this
_NEARLY_ALL = 7 / 8  # of the rows of all ranks: ``least`` is all then, and spares copies to fit
_MOST_RANKS = 8  # whose rows one buffer holds to spare a plan


def row_capacity(
  tokens: int,
  top_k: int,
  num_ranks: int,
  config: BalanceConfig,
  token_bytes: int | None = None,
  *,
  kept: bool = True,
  least: int = 0,
) -> int:
  """C, the rows that a rank computes in one round: a multiple of 8, from 1024 on of 64.

  Never more than there are assignments, rounded up.

  Args:
    tokens: T, of a rank.
    top_k: K.
    num_ranks: G.
    config: ``capacity_factor`` counts; the constants above say what ``"auto"`` is.
    token_bytes: of one token, by which small batches are told; ``None``: none is small.
    kept: for gradients.
    least: rows that ``"auto"`` has in any case up to 1 GiB, such as ``least_room``; all that there
      are, if seven eighths are asked for.

  >>> auto = BalanceConfig()
  >>> [row_capacity(tokens, 8, 4, auto, token_bytes=4096) for tokens in (512, 2048, 8192)]
  [16384, 32768, 131072]
  >>> [row_capacity(32768, 8, 4, auto, token_bytes=4096, kept=kept) for kept in (True, False)]
  [327680, 524288]
  """
  mean = tokens * top_k
  everything = mean * num_ranks
  if config.capacity_factor != "auto":
    rows = math.ceil(mean * min(config.capacity_factor, num_ranks))
  elif token_bytes is None:
    rows = math.ceil(mean * _TIGHT)
  elif everything * token_bytes <= _ALL_BYTES:
    rows = everything
  else:
    room = (_KEPT_BYTES if kept else _TRANSIENT_BYTES) // token_bytes
    least = everything if least >= _NEARLY_ALL * everything else least
    least = min(least, _LEAST_BYTES // token_bytes)
    rows = max(math.ceil(mean * _TIGHT), min(mean * _AMPLE, room), least)
  return _in_units(min(rows, everything))


def least_room(assignments: int, num_home: int, copy_rows: int) -> int:
  """Rows with which no load needs copies to fit that take longer than not balancing.

  The most copies are needed where one rank has all rows, equally many for each of its experts. Of
  its r rows a buffer holds C, and copies take the others: ``M (r - C) / r`` copies, rounded up. Not
  balancing takes as long as r rows. The least C is asked for with which, for every r up to all
  assignments::

    copy_rows * (M (r - C) / r + 1)  <=  r

  The largest is that of ``r = (M + 1) / 2 * copy_rows``: about a quarter of ``M * copy_rows`` if M
  is large. Copies must travel beside matmuls. If they take their time alone, none is worth it.

  Args:
    assignments: of all ranks, G * T * K.
    num_home: M, experts of a rank.
    copy_rows: rows that are multiplied while one copy is sent; 0: it takes no time.

  >>> [least_room(4 * rows, 32, 2800) for rows in (2048, 4096, 8192, 16384)]
  [7700, 13901, 21809, 23822]
  >>> least_room(64 * 4096, 4, 2800)
  4375
  """
  if not copy_rows:
    return 0
  rows, all_copied = min(assignments, (num_home + 1) * copy_rows // 2), num_home * copy_rows
  return min(rows - rows * (rows - copy_rows) // all_copied, assignments)


def rows_of_all(tokens: int, top_k: int, num_ranks: int) -> int:
  """The assignments of all ranks, rounded up as those of ``row_capacity`` are."""
  return _in_units(tokens * top_k * num_ranks)


def _in_units(rows: int) -> int:
  unit = _ROW_UNIT if rows < 16 * _TILE_ROWS else _TILE_ROWS
  return -(-rows // unit) * unit


def may_hold(rows: int, num_ranks: int, token_bytes: int) -> bool:
  """Whether a buffer may hold the rows of all ranks, where that spares a plan or a loop.

  Up to 512 MiB, and up to eight ranks: more would keep many times their own rows for gradients.
  """
  return rows * token_bytes <= _KEPT_BYTES and num_ranks <= _MOST_RANKS


def num_rounds(plan: Plan, capacity: int) -> Array:
  """``[]`` int32, rounds that the busiest rank needs, at least 1."""
  busiest = jnp.max(jnp.sum(plan.quota, axis=0))
  return jnp.maximum(1, -(-busiest // capacity)).astype(jnp.int32)
