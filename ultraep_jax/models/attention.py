"""Causal attention over packed requests, a block of keys at a time, in plain JAX."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from ultraep_jax.types import Array

# Query blocks that walk together: enough work for one step, few waits for the longest walk.
_TOGETHER = 8
_NONE = -1e30  # below any score, and finite: a difference of two of them is 0, not NaN


class _Blocks(NamedTuple):
  """A row cut into blocks; the blocks of all rows lie along axis X = B * T / block.

  Letters: Q queries and K keys of a block, N key heads, R query heads per key head.
  """

  query_XQNRC: Array
  key_XKNC: Array
  value_XKNV: Array
  segment_XQ: Array
  place_XQ: Array  # index in the row
  first_X: Array  # the block where walking starts, along X
  steps_X: Array  # key blocks to visit; 0 if all queries are padding


class _Running(NamedTuple):
  """Softmax so far: the largest score, the sum of weights and the weighted values."""

  largest_XNRQ: Array
  total_XNRQ: Array
  mixed_XNRQV: Array


def attend(
  query_BTHC: Array,
  key_BTNC: Array,
  value_BTNV: Array,
  segment_BT: Array,
  *,
  scale: float,
  block: int,
  window: int | None = None,
  sink_H: Array | None = None,
) -> Array:
  """Causal attention inside each segment of each row.

  A block of queries visits the blocks of keys from where its first segment or window starts up to
  itself: no mask over pairs of tokens, no work across segments. The order of operations for a query
  depends only on its place in its segment and the segment's place in a block. Softmax is summed
  in float32. No gradient: the number of steps is known at run time only.

  Inside ``shard_map`` rows are one device's; no communication.

  Args:
    query_BTHC: ``[B, T, H, C]`` float.
    key_BTNC: ``[B, T, N, C]``; N divides H, key head n serves queries ``n * H / N`` onwards.
    value_BTNV: ``[B, T, N, V]``.
    segment_BT: ``[B, T]`` int32; the tokens of a segment are contiguous, 0 is padding.
    scale: factor on the scores.
    block: tokens of a block; divides T.
    window: a query sees so many tokens, itself the last of them; None: all of its segment.
    sink_H: ``[H]`` float, one more score of every query, which no value belongs to.

  Returns:
    ``[B, T, H, V]``, dtype of the values; 0 for padding, whatever the padding holds that is
    finite.

  Raises:
    ValueError: sizes do not fit.
  """
  batch, length, heads, _ = query_BTHC.shape
  if length % block:
    raise ValueError(f"query: expected a length that is a multiple of {block}, got {length}")
  if heads % key_BTNC.shape[2]:
    raise ValueError(f"query: expected heads that {key_BTNC.shape[2]} divides, got {heads}")
  blocks = _cut(query_BTHC, key_BTNC, value_BTNV, segment_BT, block, window)
  count = blocks.steps_X.size
  # Blocks with walks of about the same length go together, so that few wait for others.
  order_X = jnp.argsort(-blocks.steps_X)
  padded = jnp.pad(order_X, (0, -count % min(_TOGETHER, count)), mode="edge")
  groups = padded.reshape(-1, min(_TOGETHER, count))
  mixed_XQHV = lax.map(lambda chosen: _walk(blocks, chosen, scale, window, sink_H), groups)
  mixed_XQHV = mixed_XQHV.reshape(-1, *mixed_XQHV.shape[2:])[jnp.argsort(order_X)]
  return mixed_XQHV.reshape(batch, length, heads, -1)


def _cut(
  query_BTHC: Array,
  key_BTNC: Array,
  value_BTNV: Array,
  segment_BT: Array,
  block: int,
  window: int | None,
) -> _Blocks:
  batch, length, heads, _ = query_BTHC.shape
  key_heads = key_BTNC.shape[2]

  def cut(x: Array, *shape: int) -> Array:
    return x.reshape(batch * length // block, block, *shape)

  place_BT = lax.broadcasted_iota(jnp.int32, (batch, length), 1)
  before_BT = jnp.pad(segment_BT, ((0, 0), (1, 0)))[:, :-1]
  starts_BT = (segment_BT != before_BT) | (place_BT == 0)
  start_BT = lax.cummax(jnp.where(starts_BT, place_BT, 0), axis=1)
  if window is not None:
    start_BT = jnp.maximum(start_BT, place_BT - (window - 1))
  segment_XQ, own_X = cut(segment_BT), cut(place_BT)[:, 0] // block
  start_XQ = jnp.where(segment_XQ > 0, cut(start_BT), length)
  first_X = jnp.min(start_XQ, axis=1) // block
  row_start_X = jnp.arange(own_X.size, dtype=jnp.int32) - own_X
  return _Blocks(
    query_XQNRC=cut(query_BTHC, key_heads, heads // key_heads, query_BTHC.shape[3]),
    key_XKNC=cut(key_BTNC, *key_BTNC.shape[2:]),
    value_XKNV=cut(value_BTNV, *value_BTNV.shape[2:]),
    segment_XQ=segment_XQ,
    place_XQ=cut(place_BT),
    first_X=row_start_X + first_X,
    steps_X=jnp.maximum(own_X - first_X + 1, 0),
  )


def _walk(
  blocks: _Blocks, chosen_X: Array, scale: float, window: int | None, sink_H: Array | None
) -> Array:
  """Attention of some blocks of queries: ``[X, Q, H, V]``."""
  query_XQNRC = blocks.query_XQNRC[chosen_X]
  segment_XQ, place_XQ = blocks.segment_XQ[chosen_X], blocks.place_XQ[chosen_X]
  first_X, steps_X = blocks.first_X[chosen_X], blocks.steps_X[chosen_X]

  def visit(step: Array, running: _Running) -> _Running:
    # A block that has arrived looks at its last keys again, and sees none of them.
    visited_X = jnp.clip(first_X + jnp.minimum(step, steps_X - 1), 0, len(blocks.segment_XQ) - 1)
    key_XKNC, value_XKNV = blocks.key_XKNC[visited_X], blocks.value_XKNV[visited_X]
    back_XQK = place_XQ[:, :, None] - blocks.place_XQ[visited_X][:, None, :]
    visible_XQK = (
      (segment_XQ[:, :, None] == blocks.segment_XQ[visited_X][:, None, :])
      & (segment_XQ > 0)[:, :, None]
      & (back_XQK >= 0)
      & (step < steps_X)[:, None, None]
    )
    if window is not None:
      visible_XQK &= back_XQK < window
    return _update(running, query_XQNRC, key_XKNC, value_XKNV, visible_XQK, scale)

  count, queries, key_heads, shared, _ = query_XQNRC.shape
  flat = jnp.zeros((count, key_heads, shared, queries), jnp.float32)
  values = blocks.value_XKNV.shape[-1]
  start = _Running(flat + _NONE, flat, jnp.zeros((*flat.shape, values), jnp.float32))
  if sink_H is not None:
    sink_1NR1 = sink_H.astype(jnp.float32).reshape(1, key_heads, shared, 1)
    start = start._replace(largest_XNRQ=flat + sink_1NR1, total_XNRQ=flat + 1)
  end = lax.fori_loop(0, jnp.max(steps_X), visit, start)
  # Padding sees nothing and gets 0. A request's NaN must stay NaN, or nobody would see it.
  asks_XNRQ1 = (segment_XQ > 0)[:, None, None, :, None]
  total_XNRQ1 = jnp.where(asks_XNRQ1, end.total_XNRQ[..., None], 1.0)
  mixed_XNRQV = jnp.where(asks_XNRQ1, end.mixed_XNRQV / total_XNRQ1, 0.0)
  mixed_XQNRV = mixed_XNRQV.transpose(0, 3, 1, 2, 4).astype(blocks.value_XKNV.dtype)
  return mixed_XQNRV.reshape(count, queries, key_heads * shared, values)


def _update(
  running: _Running,
  query_XQNRC: Array,
  key_XKNC: Array,
  value_XKNV: Array,
  visible_XQK: Array,
  scale: float,
) -> _Running:
  """One step of the running softmax."""
  f32 = jnp.float32
  score = jnp.einsum("xqnrc,xknc->xnrqk", query_XQNRC, key_XKNC, preferred_element_type=f32)
  visible = jnp.broadcast_to(visible_XQK[:, None, None], score.shape)
  score = jnp.where(visible, score * scale, _NONE)
  largest = jnp.maximum(running.largest_XNRQ, jnp.max(score, axis=-1))
  weight = jnp.where(visible, jnp.exp(score - largest[..., None]), 0.0)
  kept = jnp.exp(running.largest_XNRQ - largest)
  mixed = jnp.einsum(
    "xnrqk,xknv->xnrqv", weight.astype(value_XKNV.dtype), value_XKNV, preferred_element_type=f32
  )
  return _Running(
    largest_XNRQ=largest,
    total_XNRQ=running.total_XNRQ * kept + jnp.sum(weight, axis=-1),
    mixed_XNRQV=running.mixed_XNRQV * kept[..., None] + mixed,
  )
