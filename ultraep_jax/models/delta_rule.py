"""The gated delta rule over packed requests, a chunk of tokens at a time, in plain JAX.

A head's state is a matrix that maps keys to values. A token lets it decay, and then replaces what
it holds for the token's key by a share ``beta`` of the token's value (Gated Delta Networks,
arXiv 2412.06464)::

  state = exp(decay) * state
  state = state + beta * key (value - key state)
  out = query state

Within a chunk the replacements are one triangular system, so that all else is matmuls.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ultraep_jax.types import Array

_HIGHEST = lax.Precision.HIGHEST


class Tokens(NamedTuple):
  """What a layer makes of the tokens, float32.

  Attributes:
    query_BTHC: ``[B, T, H, C]``.
    key_BTHC: ``[B, T, H, C]``, of length 1.
    value_BTHV: ``[B, T, H, V]``.
    decay_BTH: ``[B, T, H]``, logarithms, at most 0.
    beta_BTH: ``[B, T, H]``, 0 to 1.
  """

  query_BTHC: Array
  key_BTHC: Array
  value_BTHV: Array
  decay_BTH: Array
  beta_BTH: Array


class _Chunk(NamedTuple):
  """One chunk of every row. Q and K are its tokens.

  Attributes:
    query_BHQC: of it.
    key_BHKC: of it.
    value_BHKV: what is to be written, were the state empty.
    read_BHKC: what of the state is to be taken from that.
    decay_BHK: logarithms, summed from the chunk's first token.
    segment_BK: which request a token belongs to, 0: none.
    start: of the chunk in its row.
  """

  query_BHQC: Array
  key_BHKC: Array
  value_BHKV: Array
  read_BHKC: Array
  decay_BHK: Array
  segment_BK: Array
  start: Array


class _Requests(NamedTuple):
  """Where requests end, in the order in which they do."""

  last_BR: Array  # far beyond the row where there is none
  index_BR: Array  # which request it is


class _Carry(NamedTuple):
  """Between chunks: the state of the request that the last token belongs to, and those at ends."""

  state_BHCV: Array
  segment_B: Array
  ended_BRHCV: Array


def delta_rule(
  tokens: Tokens, segment_BT: Array, last_BR: Array, *, chunk: int
) -> tuple[Array, Array]:
  """Runs every request from an empty state.

  The order of operations for a token depends only on its place in its request and the request's
  place in a chunk. In float32 on any device.

  Args:
    tokens: what the layer makes of them; finite in padding.
    segment_BT: ``[B, T]`` int32; the tokens of a segment are contiguous, 0 is padding.
    last_BR: ``[B, R]`` int32, where each request ends, −1: no such request.
    chunk: tokens that are taken together; divides T.

  Returns:
    ``[B, T, H, V]`` float32, 0 in padding, and the states behind each request
    ``[B, R, H, C, V]`` float32, 0 where there is none.
  """
  rows, length = segment_BT.shape
  heads, channels, values = *tokens.key_BTHC.shape[2:], tokens.value_BTHV.shape[3]
  order_BR = jnp.argsort(jnp.where(last_BR < 0, length, last_BR), axis=1)
  last_BR = jnp.take_along_axis(jnp.where(last_BR < 0, 2 * length, last_BR), order_BR, axis=1)
  requests = _Requests(last_BR, order_BR)
  empty = jnp.zeros((rows, heads, channels, values), jnp.float32)
  ended = jnp.zeros((rows, last_BR.shape[1], *empty.shape[1:]), jnp.float32)
  carry = _Carry(empty, jnp.zeros(rows, jnp.int32), ended)
  chunks = _cut(tokens, segment_BT, chunk)
  carry, out_XBHQV = lax.scan(lambda carry, one: _step(carry, one, requests), carry, chunks)
  out_BTHV = out_XBHQV.transpose(1, 0, 3, 2, 4).reshape(rows, length, heads, values)
  return out_BTHV, carry.ended_BRHCV


def _cut(tokens: Tokens, segment_BT: Array, chunk: int) -> _Chunk:
  """The chunks of all rows along a leading axis, and what they need not wait for others for."""
  rows, length = segment_BT.shape
  count = length // chunk

  def cut(x: Array) -> Array:
    """``[B, T, H, ...]`` to ``[X, B, H, K, ...]``."""
    x = x.reshape(rows, count, chunk, *x.shape[2:])
    return x.transpose(1, 0, 3, 2, *range(4, x.ndim))

  query, key, value, decay, beta = (cut(x) for x in tokens)
  segment = segment_BT.reshape(rows, count, chunk).transpose(1, 0, 2)
  decay = jnp.cumsum(decay, axis=-1)
  passed_XBHQK = _decay_between(decay, decay, segment, segment)
  earlier = jnp.tri(chunk, k=-1, dtype=jnp.float32)[None, None, None]
  system = _dot("...qc,...kc->...qk", key, key) * passed_XBHQK * beta[..., None] * earlier
  eye = jnp.broadcast_to(jnp.eye(chunk, dtype=jnp.float32), system.shape)
  wanted = jnp.concatenate([value, key * jnp.exp(decay)[..., None]], axis=-1) * beta[..., None]
  solved = lax.linalg.triangular_solve(
    system + eye, wanted, left_side=True, lower=True, unit_diagonal=True
  )
  written, read = solved[..., : value.shape[-1]], solved[..., value.shape[-1] :]
  start = jnp.arange(count, dtype=jnp.int32) * chunk
  return _Chunk(query, key, written, read, decay, segment, start)


def _step(carry: _Carry, one: _Chunk, requests: _Requests) -> tuple[_Carry, Array]:
  """One chunk of every row behind another."""
  # Only the tokens up to the first end go on with the request that came before.
  goes_on_B = (one.segment_BK[:, 0] == carry.segment_B) & (carry.segment_B > 0)
  state = jnp.where(goes_on_B[:, None, None, None], carry.state_BHCV, 0.0)
  reads_BK = (one.segment_BK == one.segment_BK[:, :1]) & goes_on_B[:, None]
  reads = reads_BK[:, None, :, None]
  value_BHKV = one.value_BHKV - jnp.where(reads, _dot("bhkc,bhcv->bhkv", one.read_BHKC, state), 0.0)

  decayed = one.query_BHQC * jnp.exp(one.decay_BHK)[..., None]
  out_BHQV = jnp.where(reads, _dot("bhqc,bhcv->bhqv", decayed, state), 0.0)
  passed = _decay_between(one.decay_BHK, one.decay_BHK, one.segment_BK, one.segment_BK)
  weight = _dot("bhqc,bhkc->bhqk", one.query_BHQC, one.key_BHKC) * passed
  out_BHQV += _dot("bhqk,bhkv->bhqv", weight, value_BHKV)

  def state_at(place_B: Array) -> Array:
    """The state behind one token of each row."""

    def at(x: Array) -> Array:
      return jnp.take_along_axis(x, place_B.reshape(-1, *[1] * (x.ndim - 1)), axis=-1)

    decay_BH1, segment_B1 = at(one.decay_BHK), at(one.segment_BK)
    place_BK = lax.broadcasted_iota(jnp.int32, one.segment_BK.shape, 1)
    own_BK = (one.segment_BK == segment_B1) & (place_BK <= place_B[:, None]) & (segment_B1 > 0)
    gap = jnp.where(own_BK[:, None], decay_BH1 - one.decay_BHK, -jnp.inf)
    key = one.key_BHKC * jnp.exp(gap)[..., None]
    kept_B1 = jnp.take_along_axis(reads_BK, place_B[:, None], axis=1)
    kept = jnp.where(kept_B1[..., None], jnp.exp(decay_BH1), 0.0)[..., None]
    return state * kept + _dot("bhkc,bhkv->bhcv", key, value_BHKV)

  chunk = one.segment_BK.shape[1]
  first_B, behind_B = (
    jnp.sum(requests.last_BR < one.start + edge, axis=1, dtype=jnp.int32) for edge in (0, chunk)
  )

  def keep(i: Array, ended_BRHCV: Array) -> Array:
    """Of each row the next request that ends here, if one does."""
    r_B1 = jnp.minimum(first_B + i, requests.last_BR.shape[1] - 1)[:, None]
    here_B = first_B + i < behind_B
    place_B1 = jnp.take_along_axis(requests.last_BR, r_B1, axis=1) - one.start
    index_B1 = jnp.take_along_axis(requests.index_BR, r_B1, axis=1)
    now = state_at(jnp.clip(place_B1[:, 0], 0, chunk - 1))
    row_B = jnp.arange(len(here_B), dtype=jnp.int32)
    before = ended_BRHCV[row_B, index_B1[:, 0]]
    now = jnp.where(here_B[:, None, None, None], now, before)
    return ended_BRHCV.at[row_B, index_B1[:, 0]].set(now)

  ended = lax.fori_loop(0, jnp.max(behind_B - first_B), keep, carry.ended_BRHCV)
  last_B = jnp.full(first_B.shape, chunk - 1, jnp.int32)
  return _Carry(state_at(last_B), one.segment_BK[:, -1], ended), out_BHQV


def _decay_between(late: Array, early: Array, late_segment: Array, early_segment: Array) -> Array:
  """``[..., B, H, Q, K]``, what is left at token q of what token k wrote; 0 if q comes before."""
  size = late.shape[-1]
  same = (late_segment[..., :, None] == early_segment[..., None, :]) & (
    late_segment[..., :, None] > 0
  )
  same &= jnp.expand_dims(jnp.tri(size, dtype=jnp.bool_), range(same.ndim - 2))
  gap = late[..., :, None] - early[..., None, :]
  return jnp.exp(jnp.where(same[..., None, :, :], gap, -jnp.inf))


def _dot(form: str, *operands: Array) -> Array:
  return jnp.einsum(form, *operands, precision=_HIGHEST, preferred_element_type=jnp.float32)


def causal_conv(x_BTX: Array, kernel_X1W: Array, segment_BT: Array) -> Array:
  """Each channel's weighted sum of its last W values in the request: ``[B, T, X]``.

  Args:
    x_BTX: ``[B, T, X]`` float.
    kernel_X1W: ``[X, 1, W]``, the last of W is the token's own.
    segment_BT: ``[B, T]`` int32.
  """
  width = kernel_X1W.shape[-1]
  total = jnp.zeros_like(x_BTX)
  for back in range(width):
    before, segment = x_BTX, segment_BT
    if back:
      before = jnp.pad(x_BTX, ((0, 0), (back, 0), (0, 0)))[:, :-back]
      segment = jnp.pad(segment_BT, ((0, 0), (back, 0)))[:, :-back]
    weight_X = kernel_X1W[:, 0, width - 1 - back].astype(x_BTX.dtype)
    own = (segment == segment_BT) & (segment_BT > 0)
    total += jnp.where(own[..., None], before, jnp.zeros((), x_BTX.dtype)) * weight_X[None, None]
  return total


def last_inputs(x_BTX: Array, count: int, segment_BT: Array, last_BR: Array) -> Array:
  """Of each request the last inputs of a convolution: ``[B, R, count, X]``, 0 before it starts."""
  back = jnp.arange(count - 1, -1, -1, dtype=jnp.int32)
  place = last_BR[..., None] - back[None, None]  # [B, R, count]
  flat = jnp.clip(place, 0).reshape(place.shape[0], -1)
  segment = jnp.take_along_axis(segment_BT, flat, axis=1).reshape(place.shape)
  own = (segment == segment[..., -1:]) & (place >= 0) & (last_BR >= 0)[..., None]
  taken = jnp.take_along_axis(x_BTX, flat[..., None], axis=1).reshape(*place.shape, -1)
  return jnp.where(own[..., None], taken, jnp.zeros((), x_BTX.dtype))


def unit_length(x: Array) -> Array:
  """Divided by its length along the last axis, in float32."""
  x = x.astype(jnp.float32)
  return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + 1e-6)
